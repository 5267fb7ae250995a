"""Checks of what users pass: each message gives name, value, condition and remedy."""

import math
import sys
import warnings
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from indpriv._facts import refused, text
from indpriv._types import ArrayLike, BoolArray, FloatArray
from indpriv.errors import InputError, PrivacyWarning


def check_number(name: str, value: Any, interval: str, advice: str = "") -> float:
    """Return a number, no text and no flag, in an interval as "(0, 1]", or raise InputError."""
    low, high = map(float, interval[1:-1].split(","))
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    closed = [low] * interval.startswith("[") + [high] * interval.endswith("]")
    if not (real and (low < value < high or value in closed)):
        raise InputError(f"{name}={value!r} is not in {interval}{advice and '; '}{advice}")
    return float(value)


def check_delta(delta: float) -> float:
    """Return delta as a float in (0, 1), or raise InputError."""
    return check_number("delta", delta, "(0, 1)", "pass a value well below 1/n, e.g. 1e-5")


def check_choice(name: str, value: str, choices: Collection[str]) -> str:
    """Return value if it is one of choices, or raise InputError naming them."""
    if value not in choices:
        named = ", ".join(map(repr, choices))
        raise InputError(f"{name}={value!r} is not known; choose one of {named}")
    return value


def check_positive_int(name: str, value: int, *, minimum: int = 1) -> int:
    """Return value as an int of at least minimum, or raise InputError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise InputError(f"{name}={value!r} is not a whole number of at least {minimum}")
    return int(value)


_ABOVE_0 = "a finite number above 0"
# Name of a setting of a step -> the most that it can be, and what it is. NaN would make an
# accountant hang.
_SETTINGS = {
    "noise_multiplier": (math.inf, f"{_ABOVE_0}; a run without noise has no finite epsilon"),
    "max_grad_norm": (math.inf, f"{_ABOVE_0}; pass the clipping norm of the optimizer"),
    "sample_rate": (1.0, "in (0, 1]; pass the Poisson rate, e.g. batch_size / n"),
}


def check_setting(name: str, value: ArrayLike) -> FloatArray:
    """Return one of _SETTINGS, or values of each step, as float64; InputError out of range."""
    most, expected = _SETTINGS[name]
    try:
        array: FloatArray = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}={value!r} is not a number") from error
    good = np.isfinite(array) & (array > 0) & (array <= most)
    if not np.all(good):
        bad = array[~good].flat[0] if array.ndim else array.item()
        where = f" at step {int(np.flatnonzero(~good)[0])}" if array.ndim else ""
        raise InputError(f"{name}={bad}{where} is not {expected}")
    return array


def check_row(
    name: str,
    value: ArrayLike,
    accepts: Callable[[FloatArray], BoolArray],
    expected: str,
    *,
    least: int = 0,
) -> FloatArray:
    """Return a number or row as (n,) float64; InputError unless all are accepted and n >= least."""
    try:
        row = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}={value!r} must be {expected}") from error
    if row.ndim != 1 or len(row) < least or not np.all(accepts(row)):
        raise InputError(f"{name}={value!r} must be {expected}")
    return row


def check_clipping_norm_epsilon(epsilon: float) -> float:
    """Return the cost of a private clipping norm, finite and at least 0, or raise InputError."""
    advice = text("refusal.numbers", "clipping_norm_epsilon")
    return check_number("clipping_norm_epsilon", epsilon, "[0, inf)", advice)


def check_rounding(rounding: float) -> float:
    """Return the rounding, a fraction of max_grad_norm in [0, 1]; 0 means full precision."""
    advice = "pass a fraction of max_grad_norm, e.g. 0.01"
    if 0 < (found := check_number("rounding", rounding, "[0, 1]", advice)) < 1e-4:
        raise refused("refusal.numbers", "fine_rounding", value=rounding)
    return found


def warn_caller(message: str) -> None:
    """Warn with PrivacyWarning at the line outside this package, and contextlib, that led here."""
    level, frame, passed = 1, sys._getframe(), ("indpriv", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in passed:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, PrivacyWarning, stacklevel=level)


def check_orders(orders: ArrayLike) -> FloatArray:
    """Rényi orders as (n_orders,) float64; InputError unless each is finite and above 1."""
    expected = "finite numbers above 1, e.g. [1.5, 2, 4, 8, 16, 32]"
    return check_row("orders", orders, lambda x: np.isfinite(x) & (x > 1), expected, least=1)
