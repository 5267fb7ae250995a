"""What a log says of a run: words, ids, units, settings of the steps and when norms are taken.

Settings are public choices, not data.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from indpriv import _checks
from indpriv._facts import refused, text
from indpriv._types import ArrayLike, FloatArray, IntArray, NDArray
from indpriv.errors import EvidenceError, InputError, PrivacyWarning

# "truncated_poisson": a random max_batch_size of the examples that Poisson sampling drew, if these
# are more. "shuffled" and "sequential": every example once an epoch, in a new or in one order.
# "fixed_size": a new random set of one size for each step. "with_replacement": an example may be
# drawn twice. "by_client": all rows of a federated client together, or clients that add noise
# themselves.
SAMPLERS = (
    *("poisson", "truncated_poisson", "shuffled", "sequential"),
    *("fixed_size", "with_replacement", "by_client", "other"),
)
NEIGHBOURING = ("add_remove", "zero_out", "replace_one")
# What words of `indpriv.account` may be; an engine of each accountant is in accountant/account.py.
ACCOUNT_WORDS = {
    "accountant": ("rdp", "pld"),
    "conversion": ("canonne2020", "mironov2017"),
    "between_records": ("last", "closest", "worst_case"),
    "participation": ("secret", "known"),
    "neighbouring": NEIGHBOURING,
}
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


def check_ids(ids: NDArray[np.generic], n_examples: int, name: str = "example_ids") -> None:
    """Raise InputError unless ids is (n_examples,), not empty, and unique."""
    if n_examples == 0:
        raise InputError("the log has no examples; an empty data set has nothing to audit")
    if ids.shape != (n_examples,):
        raise refused("refusal.ids", "shape", name=name, ids=ids, n=n_examples)
    if repeated := ids[pd.Series(ids).duplicated()].tolist():
        raise refused("refusal.ids", "repeated", name=name, n=len(repeated), example=repeated[0])


def check_unit_ids(
    unit_ids: ArrayLike | None, n_examples: int, unit: str, name: str = "unit_ids"
) -> NDArray[np.generic] | None:
    """Unit ids (n_examples,), none missing; None is allowed only if the unit is the example."""
    if unit_ids is None:
        if unit != "example":
            raise refused("refusal.ids", "no_units", unit=unit)
        return None
    units = np.asarray(unit_ids)
    if units.shape != (n_examples,):
        raise refused("refusal.ids", "unit_shape", units=units, n=n_examples)
    if missing := int(pd.isna(units).sum()):
        raise refused("refusal.ids", "unit_missing", name=name, missing=missing, n=n_examples)
    return units


def check_norms(rows: NDArray[np.generic], ids: NDArray[np.generic]) -> None:
    """Raise InputError for NaN or negative norms (..., n_examples), by ids; infinite ones pass."""
    values: NDArray[Any] = rows
    if values.dtype.kind not in "fiu":
        raise InputError(f"norms are {values.dtype}; they must be numbers")
    for what, bad in (("NaN", np.isnan(values)), ("negative", values < 0), ("", np.isinf(values))):
        if not bad.any():
            continue
        columns = np.unique(np.nonzero(bad)[-1])
        examples = f"{len(columns)} examples"
        named = f"e.g. ids {ids[columns[:5]].tolist()}"
        if what:
            raise refused("refusal.norm_values", "bad", what=what, examples=examples, named=named)
        said = text("sentence.warnings", "infinite", n=bad.sum(), examples=examples, named=named)
        warnings.warn(said, PrivacyWarning, stacklevel=3)


def widened(norms: NDArray[np.generic]) -> tuple[FloatArray, str]:
    """Norms in float64, rounded up where they were narrower; and then the caveat, else ""."""
    exact = norms.astype(np.float64)
    if norms.dtype.kind != "f" or norms.dtype.itemsize >= exact.dtype.itemsize:
        return exact, ""
    caveat = text("sentence.claim", "narrow", dtype=norms.dtype)
    return exact * (1 + float(np.finfo(str(norms.dtype)).eps)), caveat


# --- settings of the steps


@dataclass(frozen=True)
class StepSetting:
    """Realised settings of one step."""

    noise_multiplier: float  # standard deviation of the noise, over max_grad_norm
    max_grad_norm: float  # the clipping norm
    sample_rate: float  # probability of an example to be in the batch


SETTING_NAMES = tuple(field.name for field in fields(StepSetting))


@dataclass(frozen=True)
class StepSettings:
    """Realised settings of every step, each (total_steps,), as of `StepSetting`."""

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
    ) -> "StepSettings":
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

    def distinct(self) -> "tuple[IntArray | None, StepSettings]":
        """Index of each step's setting (None if all steps share one), and the distinct settings."""
        columns = np.stack([getattr(self, name) for name in SETTING_NAMES])
        index, first = None, np.zeros(1, np.int64)  # one step that has each setting
        if np.ptp(columns, axis=1).any():
            _, first, index = np.unique(columns, return_index=True, return_inverse=True, axis=1)
            index = index.ravel()  # numpy 2.0 gives it two dimensions
        return index, StepSettings(*columns[:, first])

    def steady_between(self, recorded_steps: IntArray) -> "StepSettings":
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

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """(first, stop) of each stretch of equal settings, from step start to before end."""
        columns = np.stack([getattr(self, name)[start:end] for name in SETTING_NAMES])
        changes = start + 1 + np.flatnonzero((np.diff(columns) != 0).any(axis=0))
        return pairwise([start, *changes.tolist(), end]) if end > start else iter(())


# --- before which steps all norms are taken, and what else is recorded

EPOCH, ONCE = "epoch", "once"
_EPOCHS = re.compile("([2-9]|[1-9][0-9]{1,5}) epochs")
_IN_LOGS = {"batch_norms": "free_records", "reference_examples": "exact_examples"}
_WHOLE = 1 + 1e-12  # a whole number of steps may come out slightly too small


@dataclass(frozen=True)
class RecordingPolicy:
    """What a Recorder takes, and when.

    Full passes come before step `first` and then after gaps of `every`, `every * growth`, `every *
    growth**2`, ... steps, none longer than `longest`: growing gaps record more often early, when
    norms change most. A policy depends on nothing that is observed in training.

    Make the first gaps short: each example's first record counts until half-way to its next one.
    For a single pass, choose `first` after the steps in which norms fall, if training starts with
    clipped gradients.

    Attributes:
        every: K, the number of steps between full passes (the first gap, if gaps grow); or "epoch",
            "2 epochs", ...; or "once" for a single pass. 1 makes the account exact.
        growth: factor from one gap to the next, in [1, 10]; 1 keeps them equal.
        longest: the longest gap, in steps or "epoch", "2 epochs", ...; None for no limit.
        batch_norms: also keep the norms that DP-SGD computes of each sampled batch.
        reference_examples: number of random examples whose norms are recorded at every step.
        first: the step before which the first full pass comes; earlier steps count at
            max_grad_norm, or from an example's first batch norm on at that norm.

    Raises:
        InputError: a value out of range, `longest` without growth or below `every`, or growth
            without gaps.

    >>> policy = RecordingPolicy(every=2, growth=2.0, longest=10)
    >>> [step for step in range(50) if policy.due(step)]
    [0, 2, 6, 14, 24, 34, 44]
    >>> RecordingPolicy(every="once", first=4, batch_norms=True).describe()
    'one full pass before step 4; batch norms of sampled batches'
    """

    every: int | str
    growth: float = 1.0
    longest: int | str | None = None
    batch_norms: bool = False
    reference_examples: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # which JSON does not take
                object.__setattr__(self, name, value.item())
        _check_gap("every", self.every, (EPOCH, ONCE))
        factor = "it is the factor from one gap between full passes to the next, e.g. 1.5"
        _checks.check_number("growth", self.growth, "[1, 10]", factor)
        if self.every == ONCE and self.growth != 1:
            raise refused("refusal.policy", "once", policy=self)
        _checks.check_positive_int("reference_examples", self.reference_examples, minimum=0)
        _checks.check_positive_int("first", self.first, minimum=0)
        _checks.check_flags(batch_norms=self.batch_norms)
        if self.longest is None:
            return
        _check_gap("longest", self.longest, (EPOCH,))
        if self.growth == 1:
            raise refused("refusal.policy", "longest", policy=self)
        # Steps and epochs can only be compared in a run.
        for gap, limit in ((self.every, self.longest), map(epochs_of, (self.every, self.longest))):
            if isinstance(gap, int) and isinstance(limit, int) and limit < gap:
                raise refused("refusal.policy", "short", policy=self)

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> "RecordingPolicy":
        """The policy in the header of a log."""
        names = {_IN_LOGS.get(one.name, one.name): one.name for one in fields(cls)}
        try:
            return cls(**{names[name]: value for name, value in header["policy"].items()})
        except (KeyError, TypeError) as error:
            raise EvidenceError(f"the policy in the header of a log is none: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The fields, under the names that they have in logs."""
        return {_IN_LOGS.get(name, name): value for name, value in asdict(self).items()}

    def in_steps(self, steps_per_epoch: int) -> "RecordingPolicy":
        """The same policy with epochs as numbers of steps; the first gap is at most the longest.

        >>> DEFAULT_POLICY.in_steps(34).longest
        34
        """
        gap, limit = epochs_of(self.every), epochs_of(self.longest)
        every = self.every if gap is None else gap * steps_per_epoch
        longest = self.longest if limit is None else limit * steps_per_epoch
        if isinstance(every, int) and isinstance(longest, int):
            every = min(every, longest)
        return replace(self, every=every, longest=longest)

    def due(self, step: int) -> bool:
        """Whether a full pass is due before this step (0-based); InputError: first `in_steps`."""
        if isinstance(self.longest, str) or epochs_of(self.every) is not None:
            raise refused("refusal.policy", "epochs")
        step -= self.first
        if step <= 0 or isinstance(self.every, str):  # "once"
            return step == 0
        if self.growth == 1:
            return step % self.every == 0
        at, gap, longest = 0.0, float(self.every), self.longest or math.inf
        while gap < longest * (1 - 1e-9) and math.floor(at * _WHOLE) < step:
            at, gap = at + gap, gap * self.growth
        past = step - math.floor(at * _WHOLE)  # the pass after the gaps that ended
        return past == 0 or (past > 0 and gap >= longest * (1 - 1e-9) and past % longest == 0)

    def describe(self) -> str:
        """One phrase for a report; steps count from 0.

        >>> RecordingPolicy(every=5, growth=1.5, longest=34, reference_examples=100).describe()
        'full passes after 5 steps, each gap 1.5 times the last, at most 34; 100 reference examples'
        """
        start = f", the first before step {self.first}" if self.first else ""
        longest = "an epoch" if self.longest == EPOCH else self.longest
        limit = f", at most {longest}" if longest else ""
        if self.every == ONCE:
            said = f"one full pass {f'before step {self.first}' if self.first else 'at the start'}"
        elif self.growth == 1:
            said = f"a full pass every {_gap(self.every)}{start}"
        else:
            said = f"full passes after {_gap(self.every, 'an ')}, each gap {self.growth:g} times "
            said += f"the last{limit}{start}"
        said += "; batch norms of sampled batches" * self.batch_norms
        examples = f"; {self.reference_examples:,} reference examples"
        return said + examples * bool(self.reference_examples)


def epochs_of(gap: object) -> int | None:
    """The number of epochs in a gap; None if it is not in epochs."""
    if gap == EPOCH:
        return 1
    found = _EPOCHS.fullmatch(gap) if isinstance(gap, str) else None
    return int(found[1]) if found else None


def _check_gap(name: str, gap: int | str, words: tuple[str, ...]) -> None:
    if gap in words or epochs_of(gap) is not None:
        return
    if isinstance(gap, str):
        known = " or ".join(f'"{word}"' for word in words)
        raise refused("refusal.policy", "gap", name=name, gap=gap, known=known)
    _checks.check_positive_int(name, gap)


def _gap(gap: int | str, article: str = "") -> str:
    if isinstance(gap, str):
        return f"{article}epoch" if gap == EPOCH else gap
    return f"{gap:,} steps" if gap != 1 else ("1 step" if article else "step")


# Of a Recorder. On Adult it takes three passes more than one per epoch, and the estimate's bias
# falls from +9 to +1 %.
DEFAULT_POLICY = RecordingPolicy(every=4, growth=2.0, longest=EPOCH)
