"""What an attack on one model can use. Sensitive."""

from dataclasses import dataclass

from indpriv.example_table import ExampleTable


@dataclass(frozen=True)
class Material:
    """What is known about one model; a field is None where it is not known.

    Attributes:
        final_losses: losses of the final model on its training examples (members) and on test
            examples (non-members).
    """

    final_losses: ExampleTable | None = None
