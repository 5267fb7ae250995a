"""Epsilon by the number of rows of a privacy unit, and what a cap on rows would cost."""

from indpriv._formatting import capitalised, format_epsilon, format_rows, format_share
from indpriv.analysis.summary import Audit
from indpriv.report.document import Entry, Section, paragraph, table


def units(summary: Audit) -> Section | None:
    """None where each unit has one row."""
    if not summary.unit_sizes:
        return None
    unit, plural = summary.account.unit, summary.account.plural
    rows = [
        (
            format_rows(row.least, row.most),
            f"{row.n_units:,}",
            *map(format_epsilon, (row.worst_case_epsilon, row.median, row.max)),
            f"{row.rows_dropped:,} of {row.n_rows:,} "
            f"({format_share(row.rows_dropped / row.n_rows)})",
        )
        for row in summary.unit_sizes
    ]
    head = ("Worst case", "Median", "Largest", "Rows that a cap here would drop")
    screen = [(f"  {first}", *rest) for first, *rest in rows]
    name = f"Rows of one {unit}"
    return Section(
        "units",
        name,
        (
            paragraph(
                "Individual epsilon beside the worst case for the same number of rows. A cap on "
                f"the number of rows would guarantee all {plural} the worst case of its line, "
                "but it drops rows, and training without them would give another model. The "
                f"number of rows of a {unit} is itself private: choose a cap without looking at "
                "this table, or count that choice as tuning."
            ),
            table((name, capitalised(plural), *head), rows),
        ),
        (
            Entry(
                "",
                (
                    table(
                        (name.upper(), plural, "worst case", "median", "largest", "a cap drops"),
                        screen,
                    ),
                ),
            ),
        ),
        nested=True,
    )
