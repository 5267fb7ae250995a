"""Schedules: the value of a setting at every step, a law of the step alone. Public.

After Wei and Liu, "Gradient Leakage Attack Resilient Deep Learning" (TIFS 2021), section V. They
state the laws by rates of decay: gamma_1 = (1 - end / start) / total_steps of the linear law and
gamma_2 = log(start / end) / total_steps of the exponential one. What their code calls linear and
exponential noise is linear and exponential in 1 / noise_multiplier: the inverse laws here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from audits.training.config.errors import explain
from audits.training.config.values import KNOWN_KEYS_ONLY, Count, Positive
from indpriv._types import FloatArray
from indpriv.errors import InputError

_OF_CYCLES = ("cycles", "depth")


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class Schedule:
    """A public law of the step t, from 0 to total_steps T.

    "linear" is start + (end - start) t / T and "exponential" start (end / start)^(t / T); an
    inverse law is that of 1 / value. "cyclic" falls linearly from a top by the share `depth` and
    rises again, `cycles` times, while the top moves linearly from start to end.

    Attributes:
        law: of the value.
        start: value of the first step.
        end: value that the law reaches after the last step; the constant law has none.
        cycles: of "cyclic"; default 1.
        depth: of "cyclic"; default 0.5.

    Raises:
        InputError: a value that is not positive, or one that belongs to another law.

    >>> Schedule("linear", start=4.0, end=2.0).values(4)
    array([4. , 3.5, 3. , 2.5])
    """

    law: Literal[
        "constant", "linear", "exponential", "inverse_linear", "inverse_exponential", "cyclic"
    ]
    start: Positive
    end: Positive | None = None
    cycles: Count | None = None
    depth: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None

    def __post_init__(self) -> None:
        if (self.end is None) != (self.law == "constant"):
            raise InputError(
                "a constant schedule has no end; leave it out"
                if self.law == "constant"
                else f"a schedule with law = {self.law!r} lacks end, the value after the last step"
            )
        for name in _OF_CYCLES:
            if self.law != "cyclic" and getattr(self, name) is not None:
                raise InputError(
                    f'{name} is for law = "cyclic" only; leave it out of law = {self.law!r}'
                )

    def values(self, total_steps: int) -> FloatArray:
        """(total_steps,) values, all positive and finite."""
        if self.end is None:
            return np.full(total_steps, self.start)
        inverse = self.law in ("inverse_linear", "inverse_exponential")
        start, end = (1 / self.start, 1 / self.end) if inverse else (self.start, self.end)
        time = np.arange(total_steps) / total_steps
        if self.law in ("exponential", "inverse_exponential"):
            values = start * (end / start) ** time
        else:
            values = start + (end - start) * time
        if self.law == "cyclic":
            phase = (self.cycles or 1) * time % 1
            values *= 1 - (self.depth or 0.5) * (1 - np.abs(1 - 2 * phase))
        return np.asarray(1 / values if inverse else values)

    def times(self, factor: float) -> Schedule:
        """The schedule of the same shape with every value multiplied."""
        end = None if self.end is None else self.end * factor
        return replace(self, start=self.start * factor, end=end)


def _read(value: Any) -> Any:
    """A schedule from its TOML table; anything else is left to pydantic."""
    if not isinstance(value, Mapping):
        return value
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise InputError(explain(error, _ADAPTER.json_schema(), whole="the schedule")) from error


NumberOrSchedule = Annotated[Positive | Schedule, BeforeValidator(_read)]
ClippingNorm = Annotated[Positive | Schedule | Literal["median"], BeforeValidator(_read)]

_ADAPTER = TypeAdapter(Schedule)


def values_of(setting: float | Schedule, total_steps: int) -> FloatArray:
    """(total_steps,) values of a setting that is a number or a schedule."""
    if isinstance(setting, Schedule):
        return setting.values(total_steps)
    return np.broadcast_to(np.float64(setting), (total_steps,))
