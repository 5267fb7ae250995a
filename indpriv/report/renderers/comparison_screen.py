"""Audits side by side on a terminal. Sensitive."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from indpriv._formatting import format_epsilon, format_number, format_share
from indpriv.analysis.comparison import SAME, Change, Comparison
from indpriv.analysis.stability import TOP_SHARE, AuditComparison, GroupOrder, Stability
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.renderers.terminal import clean, print_whole

_MOST_ROWS = 40
_NOT_PROVEN = ("void", "unproven")


def print_comparison(found: AuditComparison, console: Console) -> None:
    """Print who is better or worse off than in the first audit, and what is stable over all of them."""
    first = found.summaries[0]
    console.print(Text(SENSITIVE, style="bold red"))
    console.print(Text(f"individual epsilon, {first['meaning']}"))
    for number, summary in enumerate(found.summaries, 1):
        guarantee = summary["guarantee"]
        none = (
            f", no guarantee ({guarantee.get('status')})"
            if guarantee.get("status") in _NOT_PROVEN
            else ""
        )
        console.print(
            Text(
                f"AUDIT {number}  {clean(str(summary.get('name', '')))}: {summary['claim']}; worst-case epsilon "
                f"{format_epsilon(guarantee['worst_case_epsilon'])}{none}"
            )
        )
    for number, comparison in enumerate(found.comparisons, 2):
        if len(found.comparisons) > 1:
            console.print(Text(f"\nAudit {number} against audit 1", style="bold"))
        _print_changes(comparison, console)
    _print_stability(found.stability, console)
    console.print(
        Text(
            f"Better and worse: by more than {format_share(SAME)} of the first epsilon. Two runs differ by chance as well: read "
            "large groups, not single examples."
        )
    )
    if any(summary["claim"] == "estimate" for summary in found.summaries):
        console.print(
            Text(
                "! An estimate has an error of its own, which is part of these changes.",
                style="yellow",
            )
        )
    console.print(Text(DISCLAIMER, style="italic"))


def _print_changes(comparison: Comparison, console: Console) -> None:
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


def _print_stability(found: Stability, console: Console) -> None:
    console.print(Text(f"stability over {found.n_audits} runs", style="bold"))
    texts = [
        "They have the same settings: what differs is chance."
        if found.same_settings
        else "Their settings differ, so that what differs is not chance alone."
    ]
    if found.least_spearman is not None:
        texts.append(
            f"Rank correlation of epsilon at least {format_number(found.least_spearman, 3)}."
        )
    if found.least_top_overlap is not None:
        share = format_share(found.least_top_overlap)
        texts.append(
            f"Of the {format_share(TOP_SHARE)} most exposed in one run, at least {share} are in another."
        )
    else:
        texts.append(
            f"No {format_share(TOP_SHARE)} are the most exposed: examples share an epsilon there."
        )
    texts.append(
        f"One example's epsilon ranges over {found.median_range:.3f} (median), {found.p95_range:.3f} (95 %)."
    )
    console.print(Padding(Text(" ".join(texts)), (0, 0, 0, 2)))
    for group in found.groups:
        if group.n_groups < 2:
            continue
        kept = (
            f"{group.pairs_kept:,} of {group.pairs:,} pairs of groups keep their order in all runs"
        )
        worst = [
            clean(name) if name is not None else "no single one"
            for name in dict.fromkeys(group.worst)
        ]
        console.print(
            Padding(
                Text(f"by {clean(group.by)}: {kept}; worst off: {', '.join(worst)}{_least(group)}"),
                (0, 0, 0, 2),
            )
        )


def _least(group: GroupOrder) -> str:
    if group.least_spearman is None:
        return ""
    return f"; rank correlation of group means at least {format_number(group.least_spearman, 3)}"


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
    for column in (
        "n",
        "mean, first",
        "second",
        "median change",
        "better",
        "worse",
        "test acc., first",
        "second",
    ):
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
