"""The page of `indpriv advise`, and what it prints. Sensitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console

from indpriv._formatting import capitalised, format_epsilon, format_number
from indpriv.analysis.advice import MOST_NOISE, PREDICTION, Advice, GroupAdvice, Remedy
from indpriv.analysis.run_facts import Range
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.document import (
    Block,
    Callout,
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


def page_of(found: Advice, further: Sequence[Section] = ()) -> Page:
    """The page of an advice; further: sections after that of the settings."""
    settings = Section("settings", "More noise, or a lower clipping norm", _settings(found))
    return Page(
        title=f"Advice on {found.name}",
        eyebrow="What would lower the epsilons of a group",
        name=found.name,
        meta=f"{counted(found.groups[0].n, found.plural[:-1])} · target epsilon {found.target:g} "
        f"for {share_text(found.quantile)} of each group",
        sections=(settings, *further),
        disclaimer=paragraph(DISCLAIMER, style="disclaimer"),
    )


def print_advice(
    found: Advice, console: Console, further: Sequence[Paragraph | Table] = ()
) -> None:
    """Print an advice; further: blocks after those of the settings."""
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(
            f"ADVICE on {found.name}: what would bring {share_text(found.quantile)} of each group "
            f"to epsilon {found.target:g} or less"
        ),
        *map(paragraph, _facts(found)),
        settings_table(found),
        *map(paragraph, found.of_settings),
        *further,
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


def settings_table(found: Advice) -> Table:
    """What each group has, and which settings would bring it to the target."""
    head = [
        "Group",
        capitalised(found.plural),
        f"{share_text(found.quantile)} at most",
        "Noise multiplier needed",
        "worst case then",
    ]
    if not found.unclipped:
        head += ["or clipping norm needed", "worst case then"]
    return table(head, [_row(found, one) for one in found.groups])


def _row(found: Advice, group: GroupAdvice) -> Row:
    cells = [
        name_of(group),
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


def name_of(group: GroupAdvice) -> str:
    """A group as tables call it."""
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


def share_text(quantile: float) -> str:
    """A share as per cent."""
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
