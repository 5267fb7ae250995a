"""Two audits side by side on a terminal. Sensitive."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from indpriv.analysis.comparison import SAME, Change, Comparison
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.formatting import format_epsilon, format_number, format_share
from indpriv.report.terminal import clean, print_whole

_MOST_ROWS = 40
_NOT_PROVEN = ("void", "unproven")


def print_comparison(
    comparison: Comparison, first: Mapping[str, Any], second: Mapping[str, Any], console: Console
) -> None:
    """Print who is better or worse off in the second audit.

    Args:
        comparison: of both.
        first: the content of its audit.json; second: likewise.
        second: see first.
        console: where to.
    """
    console.print(Text(SENSITIVE, style="bold red"))
    console.print(Text(f"individual epsilon, {first['meaning']}"))
    for title, summary in (("FIRST", first), ("SECOND", second)):
        guarantee = summary["guarantee"]
        none = f", no guarantee ({guarantee.get('status')})" if guarantee.get("status") in _NOT_PROVEN else ""
        console.print(
            Text(
                f"{title:<7}{clean(str(summary.get('name', '')))}: {summary['claim']}; worst-case epsilon "
                f"{format_epsilon(guarantee['worst_case_epsilon'])}{none}"
            )
        )
    _print_rows("everybody", [comparison.overall], console)
    console.print(
        Text(
            f"  ranks agree by Spearman's {format_number(comparison.spearman, 3)}, values by Pearson's "
            f"{format_number(comparison.pearson, 3)}; one example gains at most "
            f"{format_epsilon(comparison.largest_decrease)} and loses at most {format_epsilon(comparison.largest_increase)}"
        )
    )
    for group in comparison.groups:
        _print_rows(f"by {group.by}", group.rows, console)
    console.print(
        Text(
            f"Better and worse: by more than {format_share(SAME)} of the first epsilon. Two runs differ by chance as well: read "
            "large groups, not single examples."
        )
    )
    if first["claim"] != second["claim"] or "estimate" in (first["claim"], second["claim"]):
        console.print(Text("! An estimate has an error of its own, which is part of these changes.", style="yellow"))
    console.print(Text(DISCLAIMER, style="italic"))


def _print_rows(title: str, rows: Sequence[Change], console: Console) -> None:
    grid = Table(
        title=Text(clean(title)),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    grid.add_column("group", no_wrap=True)
    for column in ("n", "mean, first", "second", "median change", "better", "worse", "test acc., first", "second"):
        grid.add_column(column, justify="right", no_wrap=True)
    for row in rows[:_MOST_ROWS]:
        grid.add_row(
            Text(clean(row.name) + (" (too few)" if row.too_small else "")),
            f"{row.n:,}",
            format_epsilon(row.mean_first),
            format_epsilon(row.mean_second),
            f"{row.median_change:+.3f}",
            format_share(row.share_better),
            format_share(row.share_worse),
            format_share(row.accuracy_first, 1),
            format_share(row.accuracy_second, 1),
        )
    print_whole(grid, console)
    if len(rows) > _MOST_ROWS:
        console.print(Text(f"  {len(rows) - _MOST_ROWS:,} more groups are in --json"))
