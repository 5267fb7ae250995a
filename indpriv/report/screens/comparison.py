"""What `indpriv compare` prints: audits side by side. Sensitive."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from indpriv._formatting import format_epsilon, format_number, format_share
from indpriv._plain import records
from indpriv.analysis.comparison import (
    SAME,
    TOP_SHARE,
    AuditComparison,
    Comparison,
    GroupOrder,
    Stability,
)
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.document import Entry, Paragraph, Table, paragraph, table
from indpriv.report.renderers.terminal import print_blocks
from indpriv.report.screens.groups import worst_case_of
from indpriv.report.wording import BETWEEN_CHECKPOINTS, MOST_ROWS

_HEAD = (
    "group",
    "n",
    "mean, first",
    "second",
    "median change",
    "better",
    "worse",
    "test acc., first",
    "second",
)


def print_comparison(found: AuditComparison, console: Console) -> None:
    """Print which examples are better or worse off than in the first audit, and what is stable."""
    blocks: list[Entry | Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(f"individual epsilon, {found.summaries[0]['meaning']}"),
    ]
    for number, summary in enumerate(found.summaries, 1):
        blocks.append(
            paragraph(
                f"AUDIT {number}  {summary.get('name', '')}: {summary['claim']}; worst-case "
                f"epsilon {worst_case_of(summary)}"
            )
        )
    for number, comparison in enumerate(found.comparisons, 2):
        if len(found.comparisons) > 1:
            blocks += [
                paragraph(),
                paragraph(f"Audit {number} compared with audit 1", style="lead"),
            ]
        blocks += _changes(comparison)
    blocks += _stability(found.stability)
    blocks += _readings(found)
    blocks.append(
        paragraph(
            f"Better and worse: by more than {format_share(SAME)} of the first epsilon. Two runs "
            "differ by chance as well: read large groups, not single examples."
        )
    )
    if any(summary["claim"] == "estimate" for summary in found.summaries):
        text = "An estimate has an error of its own, which is part of these changes."
        blocks.append(paragraph(text, style="warn"))
    print_blocks([*blocks, paragraph(DISCLAIMER, style="disclaimer")], console)


def _readings(found: AuditComparison) -> list[Entry | Paragraph | Table]:
    """Accuracy at the epsilon and epsilon at the accuracy asked for; empty where neither was."""
    if not found.readings:
        return []
    head, rows = ["audit", "held fixed"], []
    if found.at_epsilon is not None:
        head.append(f"accuracy at epsilon {format_epsilon(found.at_epsilon)}")
    if found.at_accuracy is not None:
        head += [f"epsilon at accuracy {format_share(found.at_accuracy, 1)}", "step"]
    head += ["worst case, end", "median epsilon, end"]
    for number, one in enumerate(found.readings, 1):
        if one is None:
            rows.append((f"{number}", "no checkpoints", *["–"] * (len(head) - 2)))
            continue
        cells = [f"{number}", one.held_fixed]
        if found.at_epsilon is not None:
            cells.append(format_share(one.accuracy, 1))
        if found.at_accuracy is not None:
            cells += [format_epsilon(one.epsilon), "–" if one.step is None else f"{one.step:,.0f}"]
        cells += map(format_epsilon, (one.worst_case_epsilon, one.median_epsilon))
        rows.append(tuple(cells))
    return [table(head, rows, caption="on the way"), paragraph(BETWEEN_CHECKPOINTS)]


def _changes(comparison: Comparison) -> list[Entry | Paragraph | Table]:
    ranks, values = (format_number(found, 3) for found in (comparison.spearman, comparison.pearson))
    text = (
        f"Spearman's correlation of ranks is {ranks}, Pearson's of values {values}; the epsilon "
        f"of one example falls by at most {format_epsilon(comparison.largest_decrease)} and rises "
        f"by at most {format_epsilon(comparison.largest_increase)}"
    )
    blocks = [*_rows("all examples", [comparison.overall]), Entry("", (paragraph(text),))]
    return blocks + [
        block
        for group in comparison.groups
        for block in _rows(f"by {group.by}", list(records(group.rows)))
    ]


def _rows(title: str, rows: Sequence[Any]) -> list[Entry | Paragraph | Table]:
    cells = [
        (
            row.name + " (too few)" * row.too_small,
            f"{row.n:,}",
            format_epsilon(row.mean_first),
            format_epsilon(row.mean_second),
            f"{row.median_change:+.3f}",
            format_share(row.share_better),
            format_share(row.share_worse),
            format_share(row.accuracy_first, 1),
            format_share(row.accuracy_second, 1),
        )
        for row in rows[:MOST_ROWS]
    ]
    blocks: list[Entry | Paragraph | Table] = [table(_HEAD, cells, caption=title)]
    if len(rows) > MOST_ROWS:
        text = f"{len(rows) - MOST_ROWS:,} more groups are in --json"
        blocks.append(Entry("", (paragraph(text),)))
    return blocks


def _stability(found: Stability) -> list[Entry | Paragraph | Table]:
    top = format_share(TOP_SHARE)
    texts = [
        "The runs have the same settings: they differ by chance."
        if found.same_settings
        else "The runs differ in their settings, not by chance alone."
    ]
    if found.least_spearman is not None:
        least = format_number(found.least_spearman, 3)
        texts.append(f"The rank correlation of epsilon is at least {least}.")
    texts.append(
        f"No {top} of the examples stand out as the most exposed: examples share an epsilon there."
        if found.least_top_overlap is None
        else f"Of the {top} most exposed examples of one run, at least "
        f"{format_share(found.least_top_overlap)} are among those of another."
    )
    texts.append(
        f"The epsilon of one example ranges over {found.median_range:.3f} (median), "
        f"{found.p95_range:.3f} (95 %)."
    )
    lines = [" ".join(texts), *(_order(group) for group in found.groups if group.n_groups > 1)]
    title = paragraph(f"stability over {found.n_audits} runs", style="lead")
    return [title, Entry("", tuple(map(paragraph, lines)))]


def _order(group: GroupOrder) -> str:
    worst = ["no single one" if name is None else name for name in dict.fromkeys(group.worst)]
    least = ""
    if group.least_spearman is not None:
        least = (
            f"; rank correlation of group means at least {format_number(group.least_spearman, 3)}"
        )
    return (
        f"by {group.by}: {group.pairs_kept:,} of {group.pairs:,} pairs of groups keep their order "
        f"in all runs; worst off: {', '.join(worst)}{least}"
    )
