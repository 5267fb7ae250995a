"""Realised settings of the steps of a run. Public choices, not data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.errors import InputError


@dataclass(frozen=True)
class StepSetting:
    """Realised noise_multiplier, max_grad_norm and sample_rate of one step."""

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float


SETTING_NAMES = tuple(field.name for field in fields(StepSetting))


@dataclass(frozen=True)
class StepSettings:
    """Realised settings of every step; each array has shape (total_steps,).

    Attributes:
        noise_multiplier: noise standard deviation over max_grad_norm.
        max_grad_norm: the clipping norm.
        sample_rate: probability with which Poisson sampling draws an example.
    """

    noise_multiplier: FloatArray
    max_grad_norm: FloatArray
    sample_rate: FloatArray

    @classmethod
    def from_values(
        cls,
        total_steps: int,
        noise_multiplier: ArrayLike,
        max_grad_norm: ArrayLike,
        sample_rate: ArrayLike,
    ) -> StepSettings:
        """Check scalars or (total_steps,) arrays and broadcast them.

        Raises:
            InputError: no steps, any other shape, or a value out of range.
        """
        total_steps = _checks.check_positive_int("total_steps", total_steps)
        columns = {
            "noise_multiplier": _checks.check_noise_multiplier(noise_multiplier),
            "max_grad_norm": _checks.check_max_grad_norm(max_grad_norm),
            "sample_rate": _checks.check_sample_rate(sample_rate),
        }
        for name, column in columns.items():
            if column.shape not in ((), (total_steps,)):
                raise InputError(
                    f"{name} has shape {column.shape}; pass one value, or the realised value of "
                    f"each of the {total_steps} steps"
                )
        return cls(
            **{name: np.broadcast_to(column, (total_steps,)) for name, column in columns.items()}
        )

    def __len__(self) -> int:
        return len(self.noise_multiplier)

    def at(self, step: int) -> StepSetting:
        """The settings of one step."""
        return StepSetting(**{name: float(getattr(self, name)[step]) for name in SETTING_NAMES})

    def distinct(self) -> tuple[IntArray | None, StepSettings]:
        """Index of each step's setting (None if all steps share one), and the distinct settings."""
        columns = vars(self)
        index: IntArray | None = None
        for column in columns.values():
            if column.strides == (0,) or column.min() == column.max():
                continue
            values, inverse = np.unique(column, return_inverse=True)
            joint = inverse if index is None else index * len(values) + inverse
            index = np.unique(joint, return_inverse=True)[1]
        step = np.zeros(1 if index is None else int(index.max()) + 1, np.int64)
        if index is not None:
            step[index] = np.arange(len(index))  # one that has this setting
        return index, StepSettings(**{name: column[step] for name, column in columns.items()})

    def steady_between(self, recorded_steps: IntArray) -> StepSettings:
        """The same with one max_grad_norm from record to record: the smallest there and at both.

        What clipping leaves of a gradient, as a share of max_grad_norm, does not fall where
        max_grad_norm rises; a smaller max_grad_norm makes a recorded contribution a larger share.
        """
        clip = self.max_grad_norm.copy()
        ends = [-1, *recorded_steps.tolist(), len(self)]
        for first, last in pairwise(ends):
            if last - first > 1:
                clip[first + 1 : last] = self.max_grad_norm[max(first, 0) : last + 1].min()
        return replace(self, max_grad_norm=clip)

    def spans(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """(first, end) of each stretch of equal settings, from step start to before stop."""
        end = len(self) if stop is None else stop
        columns = np.stack([getattr(self, name)[start:end] for name in SETTING_NAMES])
        changes = start + 1 + np.flatnonzero((np.diff(columns) != 0).any(axis=0))
        return pairwise([start, *changes.tolist(), end]) if end > start else iter(())
