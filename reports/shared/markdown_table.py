"""Tables of the pages in reports/."""

import re
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are Markdown already; columns of numbers are aligned right."""
    numbers = [
        all(re.match(r"[-+\d<>–\[]", row[column]) for row in rows) for column in range(len(head))
    ]
    rule = ["---:" if number and column else "---" for column, number in enumerate(numbers)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
