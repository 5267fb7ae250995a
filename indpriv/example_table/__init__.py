"""ExampleTable: what is known of each example, in memory or in a file. Sensitive."""

from indpriv.example_table.stored import open_examples
from indpriv.example_table.table import ExampleTable, check_metadata, check_storable

__all__ = ["ExampleTable", "check_metadata", "check_storable", "open_examples"]
