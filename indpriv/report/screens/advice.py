"""The page of `indpriv advise`, and what it prints. Sensitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console

from indpriv._formatting import capitalised, format_epsilon, format_number, format_share
from indpriv.analysis.advice.findings import LINE_GOES_ON, PREDICTION, Advice, GroupAdvice
from indpriv.analysis.advice.records_advice import MOST_DATA, RISES, UNKNOWN, RecordsNeeded
from indpriv.analysis.advice.settings_advice import MOST_NOISE, Remedy
from indpriv.analysis.groups.group_rows import MIN_GROUP
from indpriv.analysis.run_facts import Range
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.document import (
    Block,
    Callout,
    Details,
    Page,
    Paragraph,
    Row,
    Section,
    Table,
    paragraph,
    table,
)
from indpriv.report.renderers.terminal import print_blocks
from indpriv.report.wording import after, counted

_DIGITS = 3  # significant, of a setting


def page_of(found: Advice) -> Page:
    """The page of an advice."""
    settings = Section("settings", "More noise, or a lower clipping norm", _settings(found))
    records = Section("records", "More records", _records(found))
    return Page(
        title=f"Advice on {found.name}",
        eyebrow="What would lower the epsilons of a group",
        name=found.name,
        meta=f"{counted(found.groups[0].n, found.plural[:-1])} · target epsilon {found.target:g} "
        f"for {_share(found.quantile)} of each group",
        sections=(settings, records) if found.has_records else (settings,),
        disclaimer=paragraph(DISCLAIMER, style="disclaimer"),
    )


def print_advice(found: Advice, console: Console) -> None:
    """Print an advice."""
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(
            f"ADVICE on {found.name}: what would bring {_share(found.quantile)} of each group to "
            f"epsilon {found.target:g} or less"
        ),
        *map(paragraph, _facts(found)),
        settings_table(found),
        *map(paragraph, found.of_settings),
    ]
    if found.has_records:
        blocks += [records_table(found), paragraph(LINE_GOES_ON)]
    blocks += [
        paragraph(PREDICTION, style="warn"),
        paragraph(DISCLAIMER, style="disclaimer"),
    ]
    print_blocks(blocks, console)


def _settings(found: Advice) -> tuple[Block, ...]:
    return (
        Callout((paragraph(PREDICTION),), warn=True),
        *map(paragraph, _facts(found)),
        settings_table(found),
        *(paragraph(text, style="note") for text in found.of_settings),
    )


def _records(found: Advice) -> tuple[Block, ...]:
    return (
        records_table(found),
        paragraph(LINE_GOES_ON, style="note"),
        Details("The figure of each group in every run", (runs_table(found),)),
    )


def records_table(found: Advice) -> Table:
    """How many training examples each group would need."""
    shares = _shares(found)
    head = (
        "Group",
        *(f"On {_share(share)}" for share in shares),
        f"{capitalised(found.plural)} needed",
        "Times the data",
        "Power of n",
        "Line off by",
    )
    rows = [_records_row(found, one, shares) for one in found.groups]
    caption = (
        f"{_share(found.quantile)} of the group at most, on shares of the data (means over seeds); "
        "training examples needed in all"
    )
    return table(head, rows, caption=caption)


def _shares(found: Advice) -> list[float]:
    records = found.groups[0].records
    return [] if records is None else sorted({one.share for one in records.readings})


def _records_row(found: Advice, group: GroupAdvice, shares: Sequence[float]) -> Row:
    needed = group.records
    if needed is None:
        return Row((_name(group), *["–"] * (len(shares) + 4)))
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
            _name(group),
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


def runs_table(found: Advice) -> Table:
    """The figure of each group in every run."""
    rows = [
        (
            _name(group),
            _share(one.share),
            f"{one.seed}",
            f"{one.n_all:,}",
            f"{one.n:,}",
            format_epsilon(one.quantile),
        )
        for group in found.groups
        if group.records is not None
        for one in group.records.readings
    ]
    head = ("Group", "Share", "Seed", "Training examples", "of the group")
    return table((*head, f"{_share(found.quantile)} at most"), rows)


def settings_table(found: Advice) -> Table:
    """What each group has, and which settings would bring it to the target."""
    head = [
        "Group",
        capitalised(found.plural),
        f"{_share(found.quantile)} at most",
        "Noise multiplier needed",
        "worst case then",
    ]
    if not found.unclipped:
        head += ["or clipping norm needed", "worst case then"]
    return table(head, [_row(found, one) for one in found.groups])


def _row(found: Advice, group: GroupAdvice) -> Row:
    cells = [
        _name(group),
        f"{group.n:,}",
        f"{format_epsilon(group.quantile)}{after(group.interval)}",
        _cell(group.noise, found.noise_multiplier, _up, f"> {MOST_NOISE:g} times"),
        format_epsilon(group.noise.worst_case_epsilon),
    ]
    if group.clipping is not None:
        cells += [
            _cell(group.clipping, found.max_grad_norm, _down, "none"),
            format_epsilon(group.clipping.worst_case_epsilon),
        ]
    return Row(tuple(cells), "small" if group.too_small else "total" * (group.by is None))


def _name(group: GroupAdvice) -> str:
    name = group.name if group.by is None else f"{group.by}: {group.name}"
    return name + " (too few)" * group.too_small


def _cell(remedy: Remedy, now: Range, form: Callable[[float], str], beyond: str) -> str:
    """The setting with its interval; a factor where the setting changed in the run."""

    def shown(factor: float | None) -> str:
        if factor is None:
            return beyond
        return form(now.min * factor) if now.min == now.max else f"× {form(factor)}"

    ends = sorted(
        (remedy.factor_low, remedy.factor_high), key=lambda end: math.inf if end is None else end
    )
    text = "as now" if remedy.factor == 1 else shown(remedy.factor)
    return text if ends == [remedy.factor] * 2 else f"{text} [{shown(ends[0])}, {shown(ends[1])}]"


def _up(value: float) -> str:
    return _rounded(value, math.ceil, 1 - 1e-9)


def _down(value: float) -> str:
    return _rounded(value, math.floor, 1 + 1e-9)


def _rounded(value: float, to: Callable[[float], int], noise: float) -> str:
    """A setting to three significant digits, on the side of a smaller epsilon."""
    digits = max(0, _DIGITS - 1 - math.floor(math.log10(value)))
    scale = 10.0**digits
    return f"{to(value * scale * noise) / scale:.{digits}f}"


def _share(quantile: float) -> str:
    return f"{format_number(100 * quantile)} %"


def _facts(found: Advice) -> tuple[str, ...]:
    guarantee = found.guarantee
    worst = format_epsilon(guarantee.worst_case_epsilon)
    state = "" if guarantee.stands else f", which is no guarantee of this run ({guarantee.status})"
    return (
        f"This run: noise multiplier {found.noise_multiplier}, clipping norm "
        f"{found.max_grad_norm}, worst case {worst}{state}. Individual epsilons ({found.claim}) at "
        f"{found.meaning}.",
        *([found.claim_reason] if found.claim == "estimate" else []),
    )
