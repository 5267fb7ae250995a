"""Checks of what users pass: each message gives name, value, condition and remedy."""

import math
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from indpriv._arrays import FloatArray
from indpriv.errors import InputError, PrivacyWarning

# Keys of audit files that had another name before 0.2, and in the headers of logs still have it.
FORMER_NAMES = {
    "free_records": "batch_norms",
    "exact_examples": "reference_examples",
    "non_dp_twin": "non_private_baseline",
    "non_dp_learning_rate": "non_private_learning_rate",
}


def check_delta(delta: float) -> float:
    """Return delta as a float in (0, 1), or raise InputError."""
    if not (isinstance(delta, int | float | np.number) and 0.0 < float(delta) < 1.0):
        raise InputError(f"delta={delta} is not in (0, 1); pass a value well below 1/n, e.g. 1e-5")
    return float(delta)


def check_choice(name: str, value: str, choices: Collection[str]) -> str:
    """Return value if it is one of choices, or raise InputError naming them."""
    if value not in choices:
        raise InputError(
            f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}"
        )
    return value


def check_positive_int(name: str, value: int, *, minimum: int = 1) -> int:
    """Return value as an int of at least minimum, or raise InputError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise InputError(f"{name}={value!r} is not a whole number of at least {minimum}")
    return int(value)


def check_noise_multiplier(value: ArrayLike) -> FloatArray:
    """Return noise multipliers as float64, finite and above 0 (NaN makes an accountant hang)."""
    expected = "a finite number above 0; a run without noise has no finite epsilon"
    return _check_each("noise_multiplier", value, math.inf, expected)


def check_max_grad_norm(value: ArrayLike) -> FloatArray:
    """Return clipping norms as float64: finite and above 0."""
    expected = "a finite number above 0; pass the clipping norm of the optimizer"
    return _check_each("max_grad_norm", value, math.inf, expected)


def check_sample_rate(value: ArrayLike) -> FloatArray:
    """Return Poisson sampling rates as float64 in (0, 1]."""
    expected = "in (0, 1]; pass the Poisson rate, e.g. batch_size / n"
    return _check_each("sample_rate", value, 1.0, expected)


def check_row(
    name: str,
    value: ArrayLike,
    accepts: Callable[[FloatArray], NDArray[np.bool_]],
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
    known = isinstance(epsilon, int | float | np.number) and not isinstance(epsilon, bool)
    if not (known and math.isfinite(epsilon) and epsilon >= 0):
        raise InputError(
            f"clipping_norm_epsilon={epsilon!r} is not a finite number of at least 0; pass the "
            "epsilon of the private release that max_grad_norm was set to, or leave it out"
        )
    return float(epsilon)


def check_rounding(rounding: float) -> float:
    """Return the rounding, a fraction of max_grad_norm in [0, 1]; 0 means full precision."""
    if not (isinstance(rounding, int | float) and math.isfinite(rounding) and 0 <= rounding <= 1):
        raise InputError(
            f"rounding={rounding} is not in [0, 1]; pass a fraction of max_grad_norm, e.g. 0.01"
        )
    if 0 < rounding < 1e-4:
        raise InputError(
            f"rounding={rounding} is finer than two bytes can hold; pass at least 1e-4, or 0 for "
            "full precision"
        )
    return float(rounding)


def _check_each(name: str, value: ArrayLike, most: float, expected: str) -> FloatArray:
    """Return finite values above 0 and at most `most`, as float64."""
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


def warn_caller(message: str) -> None:
    """Warn with PrivacyWarning at the line outside this package that led here."""
    level, frame = 1, sys._getframe()
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] == "indpriv"
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, PrivacyWarning, stacklevel=level)


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under current names; InputError if both names of one are given."""
    renamed = {FORMER_NAMES.get(name, name): value for name, value in values.items()}
    if len(renamed) < len(values):
        former, current = next(pair for pair in FORMER_NAMES.items() if set(pair) <= set(values))
        raise InputError(
            f"{former} and {current} are both given, but {former} is the former name of {current}: "
            f"pass only {current}"
        )
    return renamed


def check_orders(orders: ArrayLike) -> FloatArray:
    """Rényi orders as (n_orders,) float64; InputError unless each is finite and above 1."""
    return check_row(
        "orders",
        orders,
        lambda x: np.isfinite(x) & (x > 1),
        "finite numbers above 1, e.g. [1.5, 2, 4, 8, 16, 32]",
        least=1,
    )
