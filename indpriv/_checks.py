"""Checks of what users pass: each message gives name, value, condition and remedy."""

import sys
import warnings
from collections.abc import Collection
from typing import Any

import numpy as np

from indpriv._facts import refused, text
from indpriv._types import ArrayLike, FloatArray
from indpriv.errors import InputError, PrivacyWarning


def check_number(name: str, value: Any, interval: str, advice: str = "") -> float:
    """Return a number, no text and no flag, in an interval as "(0, 1]", or raise InputError."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    too_large = isinstance(value, int) and abs(value) > sys.float_info.max
    if not real or too_large or not _inside(value, interval):
        raise InputError(f"{name}={value!r} is not in {interval}{advice and '; '}{advice}")
    return float(value)


def _inside(value: Any, interval: str) -> Any:
    """Whether a number, or each of an array, is in an interval as "(0, 1]"; no NaN is."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval.startswith("[") else value > low
    return above & (value <= high if interval.endswith("]") else value < high)


def check_delta(delta: float) -> float:
    """Return delta as a float in (0, 1), or raise InputError."""
    return check_number("delta", delta, "(0, 1)", "pass a value well below 1/n, e.g. 1e-5")


def check_choice(name: str, value: str, choices: Collection[str]) -> str:
    """Return value if it is one of choices, or raise InputError naming them."""
    if value not in choices:
        named = ", ".join(map(repr, choices))
        raise InputError(f"{name}={value!r} is not known; choose one of {named}")
    return value


def check_positive_int(name: str, value: int, *, minimum: int = 1, maximum: int = 2**64 - 1) -> int:
    """Return value as an int from minimum to maximum (64 bits, as seeds), or raise InputError."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and minimum <= value <= maximum):
        most = f", at most {maximum:,}" if whole and value > maximum else ""
        raise InputError(f"{name}={value!r} is not a whole number of at least {minimum}{most}")
    return int(value)


def check_flags(**flags: Any) -> None:
    """Raise InputError unless each is true or false: a text such as "no" would count as yes."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise InputError(f"{name}={value!r} is not true or false")


_ABOVE_0 = "a finite number above 0"
# Name of a setting of a step -> its interval, and what it is. NaN would make an accountant hang.
SETTINGS = {
    "noise_multiplier": ("(0, inf)", f"{_ABOVE_0}; a run without noise has no finite epsilon"),
    "max_grad_norm": ("(0, inf)", f"{_ABOVE_0}; pass the clipping norm of the optimizer"),
    "sample_rate": ("(0, 1]", "in (0, 1]; pass the Poisson rate, e.g. batch_size / n"),
}


def check_setting(name: str, value: ArrayLike) -> FloatArray:
    """Return one of SETTINGS, or values of each step, as float64; InputError out of range."""
    interval, expected = SETTINGS[name]
    try:
        array: FloatArray = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name}={value!r} is not a number") from error
    if not np.all(good := _inside(array, interval)):
        bad = array[~good].flat[0] if array.ndim else array.item()
        where = f" at step {int(np.flatnonzero(~good)[0])}" if array.ndim else ""
        raise InputError(f"{name}={bad}{where} is not {expected}")
    return array


def check_row(
    name: str, value: ArrayLike, interval: str, expected: str = "", *, least: int = 0
) -> FloatArray:
    """Return a number or row as (n,) float64; InputError unless in an interval, and n >= least."""
    expected = expected or f"numbers in {interval}"
    try:
        row = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError, OverflowError):
        row = np.zeros((0, 0))  # no row
    if row.ndim != 1 or len(row) < least or not np.all(_inside(row, interval)):
        raise InputError(f"{name}={value!r} must be {expected}")
    return row


def check_clipping_norm_epsilon(epsilon: float, norm: Any = None) -> float:
    """Cost of a private clipping norm (or list), told or carried; InputError unless 0 or more."""
    advice = text("refusal.numbers", "clipping_norm_epsilon")
    told = check_number("clipping_norm_epsilon", epsilon, "[0, inf)", advice)
    released = {id(one): one for one in (norm if isinstance(norm, list | tuple) else [norm])}
    return max(told, sum(getattr(one, "clipping_norm_epsilon", 0.0) for one in released.values()))


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
    return check_row("orders", orders, "(1, inf)", expected, least=1)
