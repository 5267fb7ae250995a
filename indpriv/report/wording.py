"""Phrases and figures that several sections share."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from indpriv._formatting import format_interval, format_p_value
from indpriv.analysis.statistics.intervals import Interval
from indpriv.analysis.summary import Audit
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.document import Callout, Paragraph, Span, Text, paragraph

NO_EVIDENCE = "An attack that fails is no evidence of privacy."
BETWEEN_CHECKPOINTS = (
    "Between checkpoints on a line. Had the run been planned to end there, that epsilon would be "
    "its guarantee; to end it because of its test accuracy is a choice made afterwards, and free "
    "only if the test data are public."
)
MOST_ROWS = 40  # of one table; audit.json has all
_BEST_SHOWN = 4


def shown_rows(rows: pd.DataFrame, most: int = MOST_ROWS) -> list[int]:
    """Positions of groups that have examples: all, or the worst and a few of the best."""
    present: list[int] = np.flatnonzero(rows["n"]).tolist()
    best = min(_BEST_SHOWN, most // 2)
    return present if len(present) <= most else present[: most - best] + present[-best:]


def finding(text: str) -> Callout:
    """A finding against the run: an attack achieves more than the guarantee allows."""
    return Callout((paragraph(Span("A finding against the run."), f" {text}"),), warn=True)


def disclaimer(summary: Audit) -> Paragraph:
    """What individual epsilon is not, and whether there is a guarantee to quote instead."""
    quote = "" if summary.guarantee.publishable else " This run has no guarantee to quote."
    return paragraph(DISCLAIMER + quote, style="disclaimer")


def span(interval: Interval | None) -> str:
    """An interval, or a dash where there is none."""
    return "–" if interval is None else format_interval(interval.low, interval.high)


def percent_span(interval: Interval | None) -> str:
    """An interval of a share in per cent, or a dash where there is none."""
    return "–" if interval is None else f"{100 * interval.low:.1f} to {100 * interval.high:.1f} %"


def after(interval: Interval | None) -> str:
    """An interval as it stands after its figure; nothing where there is none."""
    return "" if interval is None else f" {span(interval)}"


def p_value(value: float | None) -> str:
    """A p-value, or a dash where there is none."""
    return "–" if value is None else format_p_value(value)


def correlation(value: float | None) -> str:
    """A correlation near 1 to four decimals, or a dash where there is none."""
    return "–" if value is None else f"{value:.4f}"


def counted(n: int, what: str) -> str:
    """A number with its noun: "1 group", "2 groups"."""
    return f"{n:,} {what}" + "s" * (n != 1)


def spaced(name: str) -> str:
    """The name of a choice as words."""
    return name.replace("_", " ")


def shorten(text: str, length: int) -> str:
    """A text of at most this many characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def joined(texts: Sequence[Text]) -> tuple[Text, ...]:
    """Parts of a paragraph with spaces between them."""
    return tuple(part for text in texts for part in (" ", text))[1:]
