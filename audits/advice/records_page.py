"""The page of `python -m audits subsets`, and what it prints. Sensitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console

from audits.advice.records import MOST_DATA, RISES, UNKNOWN, RecordsNeeded
from audits.advice.subsets import LINE_GOES_ON, AdviceOnRecords, GroupOnRecords
from indpriv._formatting import capitalised, format_epsilon, format_share
from indpriv.analysis.groups import MIN_GROUP
from indpriv.report.document import Details, Page, Row, Section, Table, paragraph, table
from indpriv.report.screens.advice import name_of, page_of, print_advice, share_text


def records_page(found: AdviceOnRecords) -> Page:
    """The page of an advice that rests on runs on subsets."""
    blocks = (
        records_table(found),
        paragraph(LINE_GOES_ON, style="note"),
        Details("The figure of each group in every run", (runs_table(found),)),
    )
    return page_of(found, (Section("records", "More records", blocks),))


def print_records(found: AdviceOnRecords, console: Console) -> None:
    """Print such an advice."""
    print_advice(found, console, (records_table(found), paragraph(LINE_GOES_ON)))


def records_table(found: AdviceOnRecords) -> Table:
    """How many training examples each group would need."""
    shares = _shares(found)
    head = (
        "Group",
        *(f"On {share_text(share)}" for share in shares),
        f"{capitalised(found.plural)} needed",
        "Times the data",
        "Power of n",
        "Line off by",
    )
    rows = [_records_row(found, one, shares) for one in found.groups]
    caption = (
        f"{share_text(found.quantile)} of the group at most, on shares of the data (means over "
        "seeds); training examples needed in all"
    )
    return table(head, rows, caption=caption)


def _shares(found: AdviceOnRecords) -> list[float]:
    return sorted({one.share for one in found.groups[0].records.readings})


def _records_row(found: AdviceOnRecords, group: GroupOnRecords, shares: Sequence[float]) -> Row:
    needed = group.records
    means = []
    for share in shares:
        known = [one.quantile for one in needed.readings if one.share == share]
        few = any(one.n < MIN_GROUP for one in needed.readings if one.share == share)
        values = [value for value in known if value is not None]
        mean = format_epsilon(sum(values) / len(values)) if values else "–"
        means.append(mean + " (too few)" * few)
    whole = found.groups[0].n
    return Row(
        (
            name_of(group),
            *means,
            _needed(needed, lambda factor: f"{math.ceil(factor * whole):,}"),
            _needed(needed, lambda factor: f"{factor:.2f}"),
            "–" if needed.exponent is None else f"{needed.exponent:+.2f}",
            format_share(needed.largest_error, 1),
        ),
        "small" if group.too_small else "total" * (group.by is None),
    )


def _needed(needed: RecordsNeeded, form: Callable[[float], str]) -> str:
    """A number of records with its interval, or why there is none."""
    beyond = f"> {form(MOST_DATA)}"
    if needed.status == UNKNOWN:
        return "unknown"
    if needed.status == RISES:
        return "does not fall"
    text = beyond if needed.factor is None else form(needed.factor)
    if needed.factor_high == 1:
        return "as now"
    ends = [beyond if end is None else form(end) for end in (needed.factor_low, needed.factor_high)]
    return text if ends == [text] * 2 else f"{text} [{ends[0]}, {ends[1]}]"


def runs_table(found: AdviceOnRecords) -> Table:
    """The figure of each group in every run."""
    rows = [
        (
            name_of(group),
            share_text(one.share),
            f"{one.seed}",
            f"{one.n_all:,}",
            f"{one.n:,}",
            format_epsilon(one.quantile),
        )
        for group in found.groups
        for one in group.records.readings
    ]
    head = ("Group", "Share", "Seed", "Training examples", "of the group")
    return table((*head, f"{share_text(found.quantile)} at most"), rows)
