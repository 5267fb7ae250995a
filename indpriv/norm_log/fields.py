"""What a log says of a run: words, ids, units and settings of the steps; and checks of them.

Settings are public choices, not data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from indpriv import _checks
from indpriv._facts import refused
from indpriv._types import ArrayLike, FloatArray, IntArray, NDArray
from indpriv.errors import InputError, PrivacyWarning

# "truncated_poisson": a random max_batch_size of the examples that Poisson sampling drew, if these
# are more. "shuffled" and "sequential": every example once an epoch, in a new or in one order.
# "fixed_size": a new random set of one size for each step. "with_replacement": an example may be
# drawn twice. "by_client": all rows of a federated client together, or clients that add noise
# themselves.
SAMPLERS = (
    "poisson",
    "truncated_poisson",
    "shuffled",
    "sequential",
    "fixed_size",
    "with_replacement",
    "by_client",
    "other",
)
NEIGHBOURING = ("add_remove", "zero_out", "replace_one")
UNITS = ("example", "user", "client", "row")  # row: of which there are copies
# What a log holds in place of gradient norms, by the kind of clipping.
CONTRIBUTIONS = {
    "per_layer": "norms of what clipping per layer leaves of a gradient",
    "quantile": "contributions to the clipped sum and the number of unclipped gradients together",
    "adaclip": "norms of gradients that are centred and scaled by coordinate",
}


@dataclass(frozen=True)
class Truncation:
    """The cap on batches of Poisson sampling from n_examples; whom it leaves out is random."""

    max_batch_size: int
    n_examples: int


def check_words(
    sampler: str,
    unit: str,
    neighbouring: str,
    max_batch_size: int | None = None,
    n_examples: int = 0,
) -> Truncation | None:
    """Check what a log says of itself (InputError), and return how its batches were truncated."""
    _checks.check_choice("sampler", sampler, SAMPLERS)
    _checks.check_choice("unit", unit, UNITS)
    _checks.check_choice("neighbouring", neighbouring, NEIGHBOURING)
    if (sampler == "truncated_poisson") != (max_batch_size is not None):
        raise refused("refusal.words", "cap", sampler=sampler, max_batch_size=max_batch_size)
    if max_batch_size is None:
        return None
    return Truncation(_checks.check_positive_int("max_batch_size", max_batch_size), n_examples)


def is_covered(sampler: str, neighbouring: str) -> bool:
    """Whether an account with secret participation is proven for batches of this sampler."""
    replaced = sampler == "fixed_size" and neighbouring == "replace_one"
    return sampler in ("poisson", "truncated_poisson") or replaced


def check_recorded_steps(steps: NDArray[np.generic], n_records: int, total_steps: int) -> None:
    """Raise InputError unless steps is (n_records,), increasing and in [0, total_steps)."""
    if steps.shape != (n_records,) or (n_records and not np.issubdtype(steps.dtype, np.integer)):
        raise refused("refusal.steps", "shape", steps=steps, n_records=n_records)
    if n_records == 0:
        return
    if steps[0] < 0 or np.any(np.diff(steps.astype(np.int64)) <= 0):
        raise refused("refusal.steps", "order", steps=steps.tolist()[:10])
    if steps[-1] >= total_steps:
        raise refused("refusal.steps", "end", last=steps[-1], total_steps=total_steps)


def check_ids(ids: NDArray[np.generic], n_examples: int) -> None:
    """Raise InputError unless ids is (n_examples,), not empty, and unique."""
    if n_examples == 0:
        raise InputError("the log has no examples; an empty data set has nothing to audit")
    if ids.shape != (n_examples,):
        raise refused("refusal.ids", "shape", ids=ids, n=n_examples)
    repeated = ids[pd.Series(ids).duplicated()].tolist()
    if repeated:
        raise refused("refusal.ids", "repeated", n=len(repeated), example=repeated[0])


def check_unit_ids(
    unit_ids: ArrayLike | None, n_examples: int, unit: str
) -> NDArray[np.generic] | None:
    """Unit ids (n_examples,), none missing; None is allowed only if the unit is the example."""
    if unit_ids is None:
        if unit != "example":
            raise refused("refusal.ids", "no_units", unit=unit)
        return None
    units = np.asarray(unit_ids)
    if units.shape != (n_examples,):
        raise refused("refusal.ids", "unit_shape", units=units, n=n_examples)
    missing = int(pd.isna(units).sum())
    if missing:
        raise refused("refusal.ids", "unit_missing", missing=missing, n=n_examples)
    return units


def check_norms(rows: NDArray[np.generic], ids: NDArray[np.generic]) -> None:
    """Raise InputError for NaN or negative norms (..., n_examples), by ids; infinite ones pass."""
    values: NDArray[Any] = rows
    for what, bad in (("NaN", np.isnan(values)), ("negative", values < 0), ("", np.isinf(values))):
        if not bad.any():
            continue
        columns = np.unique(np.nonzero(bad)[-1])
        examples = f"{len(columns)} examples"
        named = f"e.g. ids {ids[columns[:5]].tolist()}"
        if what:
            raise refused("refusal.norm_values", "bad", what=what, examples=examples, named=named)
        warnings.warn(
            f"{int(bad.sum())} gradient norms of {examples} are infinite, {named}; they count as "
            "clipped",
            PrivacyWarning,
            stacklevel=3,
        )


def widened(norms: NDArray[np.generic]) -> tuple[NDArray[np.float64], str]:
    """Norms in float64, rounded up where they were narrower; and then the caveat, else ""."""
    exact = norms.astype(np.float64)
    if norms.dtype.kind != "f" or norms.dtype.itemsize >= exact.dtype.itemsize:
        return exact, ""
    return exact * (1 + float(np.finfo(str(norms.dtype)).eps)), (
        f"norms are {norms.dtype}: sums of squares in this precision can be too small (in float32 "
        "by up to 0.00055 of the norm, as observed)"
    )


# --- settings of the steps


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

    noise_multiplier is the noise's standard deviation over max_grad_norm, the clipping norm;
    sample_rate the probability with which Poisson sampling draws an example.
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
        """Scalars or (total_steps,) arrays, checked and broadcast; InputError for any other."""
        total_steps = _checks.check_positive_int("total_steps", total_steps)
        values = zip(SETTING_NAMES, (noise_multiplier, max_grad_norm, sample_rate), strict=True)
        columns = {name: _checks.check_setting(name, value) for name, value in values}
        for name, column in columns.items():
            if column.shape not in ((), (total_steps,)):
                raise refused("refusal.steps", "setting", name=name, column=column, n=total_steps)
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
