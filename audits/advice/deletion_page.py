"""The page of `python -m audits deletion`, and what it prints. Sensitive."""

from __future__ import annotations

from rich.console import Console

from audits.advice.deletion import BY_CHANCE, COMPARED, Deletion, GroupChange
from indpriv._formatting import format_epsilon, format_number, format_share
from indpriv.analysis.statistics.intervals import Interval
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.document import (
    Block,
    Page,
    Paragraph,
    Row,
    Section,
    Table,
    paragraph,
    table,
)
from indpriv.report.renderers.terminal import print_blocks
from indpriv.report.wording import counted


def deletion_page(found: Deletion) -> Page:
    """The page of a deletion."""
    blocks: tuple[Block, ...] = (
        paragraph(_facts(found)),
        deletion_table(found),
        *(paragraph(text, style="note") for text in _notes(found)),
    )
    return Page(
        title=f"{found.name} without {found.deleted}",
        eyebrow="Whose epsilon rises if records are deleted",
        name=f"{found.name} without {found.deleted}",
        meta=f"{found.n_deleted:,} of {found.n_deleted + found.n_left:,} {found.plural} deleted · "
        f"{counted(found.n_seeds, 'seeded run')} with and without them",
        sections=(Section("changes", "Who is worse off", blocks),),
        disclaimer=paragraph(DISCLAIMER, style="disclaimer"),
    )


def print_deletion(found: Deletion, console: Console) -> None:
    """Print what deleting records changes."""
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(f"DELETION from {found.name}: {found.deleted}"),
        paragraph(_facts(found)),
        deletion_table(found),
        *map(paragraph, _notes(found)),
        paragraph(DISCLAIMER, style="disclaimer"),
    ]
    print_blocks(blocks, console)


def deletion_table(found: Deletion) -> Table:
    """Every group of those who stay, the largest rise first within a column."""
    percent = f"{format_number(100 * found.quantile)} %"
    head = (
        "Group",
        "Stay",
        "deleted",
        "mean with",
        "without",
        "change of the mean",
        f"{percent} at most, with",
        "without",
        "rise > 10 %",
        "by chance",
        "fall > 10 %",
    )
    return table(head, map(_row, found.groups))


def _row(group: GroupChange) -> Row:
    name = group.name if group.by is None else f"{group.by}: {group.name}"
    return Row(
        (
            name + " (too few)" * group.too_small,
            f"{group.n:,}",
            f"{group.n_deleted:,}",
            format_epsilon(group.mean_with),
            format_epsilon(group.mean_without),
            _percent(group.relative_change) + _between(group.interval),
            format_epsilon(group.quantile_with),
            format_epsilon(group.quantile_without),
            format_share(group.share_rises),
            format_share(group.rises_by_chance),
            format_share(group.share_falls),
        ),
        "small" if group.too_small else "total" * (group.by is None),
    )


def _percent(change: float) -> str:
    return f"{100 * change:+.1f} %"


def _between(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f" [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def _facts(found: Deletion) -> str:
    change = found.worst_case_without / found.worst_case_with - 1
    return (
        f"{found.n_deleted:,} of {found.n_deleted + found.n_left:,} {found.plural} are deleted. "
        f"The worst case of such a run goes from {format_epsilon(found.worst_case_with)} to "
        f"{format_epsilon(found.worst_case_without)} ({_percent(change)}). All runs are seeded, so "
        f"none of them has a guarantee. Individual epsilons ({' or '.join(found.claims)}) at "
        f"{found.meaning}; means over {counted(found.n_seeds, 'seed')}."
    )


def _notes(found: Deletion) -> tuple[str, ...]:
    one = "With one seed there is no interval, and nothing says what is chance: pass --seeds 2."
    return (COMPARED, BY_CHANCE if found.n_seeds > 1 else one)
