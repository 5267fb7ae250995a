"""What templates name: how figures are shown, in filters and columns, and constants. Sensitive."""

import math
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import StrictUndefined
from rich.cells import cell_len, set_cell_size

from indpriv import _formatting
from indpriv._facts import text
from indpriv._formatting import capitalised, formatted
from indpriv.analysis import comparison, distribution, reconstruction
from indpriv.analysis.attacks import lower_bound, rates
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics import CONFIDENCE
from indpriv.attack_scores import RUNGS
from indpriv.epsilon_table import DISCLAIMER, FALSE_POSITIVE_RATE
from indpriv.norm_log.fields import CONTRIBUTIONS

TEMPLATES = Path(__file__).parent / "templates"
# What the environments of pages and of texts have in common: a missing value is an error.
JINJA: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
MOST_EXAMPLES = 100_000  # that a page can be searched for; with more it would take too long to open
MOST_ROWS = 40  # of one table; audit.json has all
_BEST_SHOWN = 4


def after(interval: Any) -> str:
    """An interval as it stands after its figure; nothing where there is none."""
    form = getattr(interval, "form", "span")  # of a registered column
    return "" if interval is None else f" {formatted(interval, form)}"


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
    return set_cell_size(line, width - 1).rstrip(" .,;:…") + "…"


def odds(epsilon: float) -> str:
    """E to the epsilon, rounded up.

    >>> odds(1.0), odds(8.0), odds(40.0)
    ('2.8', '2,981', '10^18')
    """
    if epsilon > 30:
        return f"10^{math.ceil(epsilon / math.log(10))}"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 10) / 10:.1f}" if factor < 100 else f"{math.ceil(factor):,}"


def setting(value: float, *, up: bool) -> str:
    """A setting to three significant digits, on the side of a smaller epsilon.

    >>> setting(1.501, up=True), setting(0.3219, up=False)
    ('1.51', '0.321')
    """
    rounded = _formatting.round_up if up else _formatting.round_down
    return rounded(value, max(0, 2 - math.floor(math.log10(value))))


def listed(texts: Sequence[Any], most: int = 0) -> str:
    """Texts with commas; of more than `most`, the first ones and how many there are."""
    if not most or len(texts) <= most:
        return ", ".join(map(str, texts))
    return f"{', '.join(map(str, texts[:most]))} and {len(texts) - most:,} more"


@cache
def data_of(name: str) -> dict[str, Any]:
    """The content of a TOML file beside the templates."""
    return tomllib.loads((TEMPLATES / f"{name}.toml").read_text(encoding="utf-8"))


# Of texts, and of figures with words; `FORMATS` are those of figures alone.
WORDS: dict[str, Callable[..., str]] = {
    "after": after,
    "odds": odds,
    "rows": lambda row: _formatting.format_rows(row.least, row.most),
    "cap": capitalised,
    "sentence": _formatting.sentence,
    "spaced": lambda name: str(name).replace("_", " "),
    "counted": counted,
    "shorten": shorten,
    "listed": listed,
}

CONSTANTS: dict[str, Any] = {
    **data_of("texts"),
    "bounds": lower_bound.BOUNDS,
    "by_loss": "loss_threshold",  # the attack of the paper's protocol
    "close": reconstruction.CLOSE,
    "confidence": CONFIDENCE,
    "contributions": CONTRIBUTIONS,
    "disclaimer": DISCLAIMER,
    "false_positive_rate": FALSE_POSITIVE_RATE,
    "min_group": MIN_GROUP,
    "min_trials": rates.MIN_TRIALS,
    "models": {"dp": "This model", "non_dp": "Without DP"},
    "no_exact_values": text("sentence.missing", "exact_values"),
    "most_rows": MOST_ROWS,
    "most_searched": MOST_EXAMPLES,
    "null_trials": lower_bound.NULL_TRIALS,
    "prediction": text("sentence.advice", "prediction"),
    "rungs": RUNGS,
    "same": comparison.SAME,
    "stated_floor": distribution.STATED_FLOOR,
}
