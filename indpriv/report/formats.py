"""What templates name: how figures are shown, in filters and columns, and constants. Sensitive."""

import math
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.cells import cell_len, set_cell_size

from indpriv import _formatting
from indpriv._facts import text
from indpriv._formatting import capitalised, format_interval, format_number, format_share
from indpriv.analysis import comparison, loss, reconstruction
from indpriv.analysis.attacks import canaries, lower_bound, rates
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics.intervals import CONFIDENCE
from indpriv.attack_scores import RUNGS
from indpriv.epsilon_table import DISCLAIMER, FALSE_POSITIVE_RATE
from indpriv.norm_log.fields import CONTRIBUTIONS
from indpriv.report.search import MOST_EXAMPLES

TEMPLATES = Path(__file__).parent / "templates"
MOST_ROWS = 40  # of one table; audit.json has all
_BEST_SHOWN = 4
_NONE = "–"


def _or_dash(form: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: _NONE if value is None else form(value)


def _span(interval: Any, scale: float = 1.0, digits: int = 2, unit: str = "") -> str:
    """An interval, e.g. 12.1 to 13.4 %."""
    if interval is None:
        return _NONE
    return f"{scale * interval.low:.{digits}f} to {scale * interval.high:.{digits}f}{unit}"


def after(interval: Any) -> str:
    """An interval as it stands after its figure; nothing where there is none."""
    return "" if interval is None else f" {format_interval(interval.low, interval.high)}"


def counted(n: int, what: str) -> str:
    """A number with its noun: "1 group", "2 groups"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def shown_rows(rows: pd.DataFrame, most: int = MOST_ROWS) -> list[int]:
    """Positions of groups that have examples: all, or the worst and a few of the best."""
    present: list[int] = np.flatnonzero(rows["n"]).tolist()
    best = min(_BEST_SHOWN, most // 2)
    return present if len(present) <= most else present[: most - best] + present[-best:]


def shorten(text: object, width: int) -> str:
    """A text of at most this many columns of a terminal."""
    line = " ".join(str(text).split())
    if cell_len(line) <= width:
        return line
    return set_cell_size(line, width - 1).rstrip(" .,;:") + "…"


def odds(epsilon: float) -> str:
    """E to the epsilon, rounded up.

    >>> odds(1.0), odds(8.0), odds(40.0)
    ('2.8', '2,981', '10^18')
    """
    if epsilon > 30:
        return f"10^{math.ceil(epsilon / math.log(10))}"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 10) / 10:.1f}" if factor < 100 else f"{math.ceil(factor):,}"


def digit_up(bound: float) -> str:
    """A bound with one digit, rounded up.

    >>> digit_up(0.00213), digit_up(0.0)
    ('0.003', '0')
    """
    if bound == 0:
        return "0"
    unit = 10.0 ** math.floor(math.log10(bound))
    return f"{math.ceil(bound / unit) * unit:.1g}"


def setting(value: float, *, up: bool) -> str:
    """A setting to three significant digits, on the side of a smaller epsilon.

    >>> setting(1.501, up=True), setting(0.3219, up=False)
    ('1.51', '0.321')
    """
    digits = max(0, 2 - math.floor(math.log10(value)))
    scaled = value * 10.0**digits
    rounded = math.ceil(scaled * (1 - 1e-9)) if up else math.floor(scaled * (1 + 1e-9))
    return f"{rounded / 10.0**digits:.{digits}f}"


def listed(texts: Sequence[Any], most: int = 0) -> str:
    """Texts with commas; of more than `most`, the first ones and how many there are."""
    if not most or len(texts) <= most:
        return ", ".join(map(str, texts))
    return f"{', '.join(map(str, texts[:most]))} and {len(texts) - most:,} more"


@cache
def data_of(name: str) -> dict[str, Any]:
    """The content of a TOML file beside the templates."""
    return tomllib.loads((TEMPLATES / f"{name}.toml").read_text(encoding="utf-8"))


# Epsilons, limits and ceilings are rounded up, lower bounds down.
FORMATS: dict[str, Callable[..., str]] = {
    "text": lambda value: _NONE if value is None else str(value),
    "eps": _formatting.format_epsilon,
    "delta": _formatting.format_delta,
    "least": _formatting.format_lower_bound,
    "share": format_share,
    "share1": lambda value: format_share(value, 1),
    "share2": lambda value: format_share(value, 2),
    "percent": lambda value: f"{format_number(100 * value)} %",
    "up": _or_dash(_formatting.format_share_up),
    "int": _or_dash("{:,}".format),
    "num": format_number,
    "num2": lambda value: format_number(value, 2),
    "dec2": _or_dash("{:.2f}".format),
    "dec3": _or_dash("{:.3f}".format),
    "sig3": "{:.3g}".format,
    "signed": _or_dash("{:+.3f}".format),
    "points": _or_dash(lambda value: f"{100 * value:+.2f} %"),
    "auc": _or_dash("{:.3f}".format),
    "corr": _or_dash("{:.4f}".format),
    "p": _or_dash(_formatting.format_p_value),
    "span": _or_dash(lambda interval: format_interval(interval.low, interval.high)),
    "auc_span": _or_dash(lambda found: f"[{found.low:.3f}, {found.high:.3f}]"),
    "percent_span": lambda interval: _span(interval, 100, 1, " %"),
    "percent_span2": lambda interval: _span(interval, 100, 2, " %"),
    "points_span": _or_dash(lambda f: f"[{100 * f.low:+.2f}, {100 * f.high:+.2f}] %"),
    "after": after,
    "digit_up": digit_up,
    "rows": lambda row: _formatting.format_rows(row.least, row.most),
    "odds": odds,
    "cap": capitalised,
    "sentence": _formatting.sentence,
    "spaced": lambda name: str(name).replace("_", " "),
    "counted": counted,
    "shorten": shorten,
    "listed": listed,
}

CONSTANTS: dict[str, Any] = {
    **data_of("texts"),
    "bounds": canaries.BOUNDS,
    "by_loss": "loss_threshold",  # the attack of the paper's protocol
    "close": reconstruction.CLOSE,
    "confidence": CONFIDENCE,
    "contributions": CONTRIBUTIONS,
    "disclaimer": DISCLAIMER,
    "each_by_itself": canaries.EACH_BY_ITSELF,
    "false_positive_rate": FALSE_POSITIVE_RATE,
    "interval": rates.interval,
    "min_group": MIN_GROUP,
    "min_trials": rates.MIN_TRIALS,
    "models": {"dp": "This model", "non_dp": "Without DP"},
    "no_exact_values": text("sentence.missing", "exact_values"),
    "most_rows": MOST_ROWS,
    "most_searched": MOST_EXAMPLES,
    "null_trials": lower_bound.NULL_TRIALS,
    "prediction": text("sentence.advice", "prediction"),
    "protocol": rates.PROTOCOL,
    "rungs": RUNGS,
    "same": comparison.SAME,
    "stated_floor": loss.STATED_FLOOR,
    "top_share": comparison.TOP_SHARE,
}
