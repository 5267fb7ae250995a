"""Values of noise, clipping norm and sampling rate at every step, from all sources. Public."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from indpriv import _checks
from indpriv._arrays import BoolArray, FloatArray
from indpriv._files import first_at
from indpriv.errors import InputError
from indpriv.norm_log.run_files import RUN_JSON
from indpriv.recording.checkpoints.discovery import Span

ACCOUNTANT, OPTIONS = "the accountant in the checkpoints", "the options"
_SAME = 1e-9  # relative difference of one number that was written and read again
_CHECKS = {
    "noise_multiplier": _checks.check_noise_multiplier,
    "max_grad_norm": _checks.check_max_grad_norm,
    "sample_rate": _checks.check_sample_rate,
}

Known = tuple[str, FloatArray]
"""A source, and the values it gives for the first steps of a run."""


def parse_schedule(name: str, value: float | str) -> list[tuple[int, float]]:
    """[(first step, value), ...] from one value or a schedule such as "1.1,0.9@500"."""
    parts: list[tuple[int, float]] = []
    for part in str(value).split(","):
        number, at, start = part.strip().partition("@")
        try:
            parts.append((int(start) if at else 0, float(number)))
        except ValueError as error:
            raise InputError(
                f"{name}={value!r} is neither a number nor a schedule such as 1.1,0.9@500"
            ) from error
    starts = [start for start, _ in parts]
    if starts[0] != 0 or sorted(set(starts)) != starts:
        raise InputError(
            f"{name}={value!r}: a schedule must start at step 0 and give later steps in order"
        )
    for _, setting in parts:
        _CHECKS[name](setting)
    return parts


def known_values(
    name: str,
    declared: Mapping[str, Any],
    history: Sequence[Span],
    option: float | str | None,
    total: int | None,
) -> list[Known]:
    """What run.json, the accountant and the user say about a setting, the most trusted first.

    Raises InputError if a value is out of range, or if there are too many or too few.
    """
    known: list[Known] = []
    steps = total or 1
    value = first_at(declared, (name,), ("training", name))
    if value is not None:
        array = np.atleast_1d(_CHECKS[name](value))
        if array.shape not in ((1,), (steps,)):
            raise InputError(
                f"run.json: {name} has {array.shape[0]} values; write one, or one for each of "
                f"{total} steps"
            )
        known.append((RUN_JSON, np.broadcast_to(array, (steps,))))
    column = {"noise_multiplier": 0, "sample_rate": 1}.get(name)
    if history and column is not None:
        values = np.repeat([span[column] for span in history], [span[2] for span in history])
        known.append((ACCOUNTANT, np.asarray(values, dtype=np.float64)))
    if option is not None:
        array = np.empty(steps)
        for start, number in parse_schedule(name, option):
            array[start:] = number
        known.append((OPTIONS, array))
    return known


def combined(name: str, known: Sequence[Known], total: int) -> FloatArray:
    """(total,) values, each from the first source that has it, or NaN; InputError if two differ."""
    for (source, values), (other, others) in combinations(known, 2):
        shared = min(len(values), len(others))
        differs = ~np.isclose(values[:shared], others[:shared], rtol=_SAME, atol=0)
        if name == "sample_rate" and ACCOUNTANT in (source, other):
            counted, drawn = (others, values) if other == ACCOUNTANT else (values, others)
            differs &= ~_one_step_less(drawn[:shared], counted[:shared])
        if differs.any():
            step = int(np.argmax(differs))
            raise InputError(
                f"the values of {name} contradict each other: at step {step} it is "
                f"{values[step]:.8g} by {source} and {others[step]:.8g} by {other}; remove the "
                "wrong one"
            )
    values = np.full(total, np.nan)
    for _, some in reversed(known):
        values[: min(total, len(some))] = some[:total]
    return values


def _one_step_less(drawn: FloatArray, counted: FloatArray) -> BoolArray:
    """Whether the accountant counts rate 1 / (k - 1) where the sampler draws at 1 / k.

    Opacus's int(1 / (1 / n)) can be n - 1.
    """
    return (counted > drawn) & np.isclose(1 / drawn - 1 / counted, 1.0, rtol=1e-6)
