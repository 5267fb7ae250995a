"""RecordingPolicy: before which steps all norms are taken, and what else is recorded. Public.

It is stored in the header of a log: the Recorder follows it, and reports show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from indpriv import _checks, _facts
from indpriv.errors import EvidenceError, InputError

EPOCH, ONCE = "epoch", "once"
_EPOCHS = re.compile("([2-9]|[1-9][0-9]{1,5}) epochs")
_IN_LOGS = {"batch_norms": "free_records", "reference_examples": "exact_examples"}
_LARGEST_GROWTH = 10.0  # beyond it, a run hardly gets a second record
_WHOLE = 1 + 1e-12  # a whole number of steps may come out slightly too small


@dataclass(frozen=True)
class RecordingPolicy:
    """What a Recorder takes, and when.

    Full passes come before step `first` and then after gaps of `every`, `every * growth`, `every *
    growth**2`, ... steps, none longer than `longest`: growing gaps record more often early, when
    norms change most. A policy depends on nothing that is observed in training, so it is the same
    for all examples, and a resumed run continues it.

    Make the first gaps short: each example's first record counts until half-way to its next one.
    The page on recording cheaply has measurements. For a single pass, choose `first` after the
    steps in which norms fall, but only if training starts with clipped gradients, as fine-tuning
    may not: earlier steps count at max_grad_norm.

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
        _check_gap("every", self.every, (EPOCH, ONCE))
        number = isinstance(self.growth, int | float) and not isinstance(self.growth, bool)
        if not (number and 1.0 <= self.growth <= _LARGEST_GROWTH):
            raise _facts.refused("refusal.policy", "growth", policy=self, most=_LARGEST_GROWTH)
        if self.every == ONCE and self.growth != 1:
            raise _facts.refused("refusal.policy", "once", policy=self)
        _checks.check_positive_int("reference_examples", self.reference_examples, minimum=0)
        _checks.check_positive_int("first", self.first, minimum=0)
        if not isinstance(self.batch_norms, bool):
            raise InputError(f"batch_norms={self.batch_norms!r} is not true or false")
        if self.longest is None:
            return
        _check_gap("longest", self.longest, (EPOCH,))
        if self.growth == 1:
            raise _facts.refused("refusal.policy", "longest", policy=self)
        gap: int | str | None = epochs_of(self.every)
        limit: int | str | None = epochs_of(self.longest)
        if gap is None and limit is None:
            gap, limit = self.every, self.longest
        # Steps and epochs can only be compared in a run.
        if isinstance(gap, int) and isinstance(limit, int) and limit < gap:
            raise _facts.refused("refusal.policy", "short", policy=self)

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> RecordingPolicy:
        """The policy in the header of a log."""
        names = {_IN_LOGS.get(one.name, one.name): one.name for one in fields(cls)}
        try:
            return cls(**{names[name]: value for name, value in header["policy"].items()})
        except (KeyError, TypeError) as error:
            raise EvidenceError(f"the policy in the header of a log is none: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The fields, under the names that they have in logs."""
        return {_IN_LOGS.get(name, name): value for name, value in asdict(self).items()}

    def in_steps(self, steps_per_epoch: int) -> RecordingPolicy:
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
        """Whether a full pass is due before this step (0-based).

        Raises:
            InputError: a policy in epochs; `in_steps` first.
        """
        if isinstance(self.longest, str) or epochs_of(self.every) is not None:
            raise _facts.refused("refusal.policy", "epochs")
        step -= self.first
        if step <= 0 or isinstance(self.every, str):  # "once"
            return step == 0
        if self.growth == 1:
            return step % self.every == 0
        if self.longest is not None:
            number = max(0, math.ceil(math.log(self.longest / self.every, self.growth) - 1e-9))
            constant_from = self._record(number)
            if step >= constant_from:
                return (step - constant_from) % self.longest == 0
        # Inverts _record. The logarithm may be slightly off, so its neighbour is tried as well.
        number = math.ceil(
            math.log1p(step * (self.growth - 1) / self.every) / math.log(self.growth)
        )
        return step in (self._record(number), self._record(max(0, number - 1)))

    def _record(self, number: int) -> int:
        """The step of a record: every * (1 + growth + ... + growth**(number - 1)), rounded down."""
        return math.floor(int(self.every) * (self.growth**number - 1) / (self.growth - 1) * _WHOLE)

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
        raise _facts.refused("refusal.policy", "gap", name=name, gap=gap, known=known)
    _checks.check_positive_int(name, gap)


def _gap(gap: int | str, article: str = "") -> str:
    if isinstance(gap, str):
        return f"{article}epoch" if gap == EPOCH else gap
    return f"{gap:,} steps" if gap != 1 else ("1 step" if article else "step")


# Of a Recorder. On Adult it takes three passes more than one per epoch, and the estimate's bias
# falls from +9 to +1 %.
DEFAULT_POLICY = RecordingPolicy(every=4, growth=2.0, longest=EPOCH)
