"""Counts taken while a run trains: what `indpriv verify` holds against the account's assumptions. Sensitive."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# Training and the norm pass run the same arithmetic in another order; a norm beyond this share of max_grad_norm is another.
_SAME_NORM = 1e-5
_SAME_CLIPPED_NORM = (
    0.01  # the same of its own size, for norms above max_grad_norm, which contribute no more
)
_SAME_GHOST_NORM = (
    0.01  # beyond what the pass's slack allows for, norms that are no rounding of one another
)
# What the ranks of a run count each for itself; all else they count alike.
_OF_A_RANK = (
    "undrawn_steps",
    "unstepped_draws",
    "dropped_batches",
    "interrupted_batches",
    "unmatched_steps",
    "gradients",
    "misclipped",
    "at_levels",
    "repeated_draws",
)


@dataclass(frozen=True)
class StepSetting:
    """Realised noise_multiplier, max_grad_norm and sample_rate of one step."""

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float


@dataclass(frozen=True)
class Counted:
    """What one rank of several counted since it last told the others; drawn: positions of each of its local batches."""

    drawn: tuple[NDArray[np.int64], ...]
    counts: Mapping[str, int]


@dataclass
class Tally:
    """Counts of one recording session, of all ranks together; steps and draws are those of logical batches.

    participations: (n_examples,) how often each example was drawn. An epoch is one pass of the batch sampler.
    dropped_batches: local batches that the sampler of a rank left out of an epoch.
    compared, larger, largest_excess: gradient norms that training clipped, held against the recorded ones.
    larger_clipped: those that are larger by themselves, but contribute no more, since the recorded ones are clipped too.
    peeks: iterations over the loader that drew and were left without a step; passes: those with several steps.
    underestimated: gradients above max_grad_norm that ghost mode clipped by too small a norm, so that they stay above it.
    unmatched_steps: steps whose physical batches together were not of the size that was drawn.
    gradients: those that entered steps; misclipped: clipped under another max_grad_norm than the noise of their step;
    at_levels: clipped at the level of the very example that the batch has there (individual clipping).
    changed_outside: steps before which something else than the optimizer had changed parameters since the last one.
    repeated_draws: of noise, or of a batch, by a generator that an earlier draw had left in the same state.
    """

    participations: NDArray[np.int64]
    steps: int = 0
    draws: int = 0
    expected: float = 0.0
    variance: float = 0.0  # of one example's participations
    undrawn_steps: int = 0
    unstepped_draws: int = 0
    dropped_batches: int = 0
    interrupted_batches: int = 0
    unmatched_steps: int = 0
    gradients: int = 0
    misclipped: int = 0
    at_levels: int = 0
    compared: int = 0
    larger: int = 0
    largest_excess: float = 0.0
    larger_clipped: int = 0
    peeks: int = 0
    passes: int = 0
    underestimated: int = 0
    changed_outside: int = 0
    repeated_draws: int = 0
    settings: Counter[float] = field(default_factory=Counter)
    _epoch_draws: int = 0
    _epoch_steps: int = 0
    _waiting: deque[tuple[NDArray[np.int64], float]] = field(default_factory=deque)
    _clipped: int = 0  # examples of the first batch waiting whose gradients are clipped already
    _untold: list[NDArray[np.int64]] = field(
        default_factory=list
    )  # drawn since the other ranks were told
    _told: Counter[str] = field(default_factory=Counter)

    def drew(self, indices: list[int], sample_rate: float) -> None:
        """Count one logical batch, at the draw."""
        self.draws += 1
        self._epoch_draws += 1
        self.expected += sample_rate * len(self.participations)
        self.variance += sample_rate * (1 - sample_rate)
        positions = np.array(indices, dtype=np.int64)
        np.add.at(self.participations, positions, 1)
        self._waiting.append((positions, sample_rate))
        self._untold.append(positions)

    def news(self) -> Counted:
        """What this rank counted since it last told the others."""
        counts = {name: getattr(self, name) - self._told[name] for name in _OF_A_RANK}
        drawn, self._untold = tuple(self._untold), []
        self._told.update(counts)
        return Counted(drawn, counts)

    def add(self, other: Counted) -> None:
        """Take in what another rank counted: its part of the same logical batches."""
        for positions in other.drawn:
            np.add.at(self.participations, positions, 1)
        for name, count in other.counts.items():
            setattr(self, name, getattr(self, name) + count)
        self._told.update(other.counts)

    @property
    def waiting_rate(self) -> float | None:
        """The rate at which the batch of the coming step was drawn; None where none waits."""
        return self._waiting[0][1] if self._waiting else None

    def piece(self, size: int) -> NDArray[np.int64] | None:
        """Positions of the next physical batch of this size: batches are used in order of draw, pieces in order."""
        if not self._waiting:
            return None
        positions = self._waiting[0][0][self._clipped : self._clipped + size]
        return positions if len(positions) == size else None

    def clipped(self, size: int) -> None:
        """Count one physical batch whose gradients enter the step under way."""
        self._clipped += size

    def next_batch(self) -> tuple[NDArray[np.int64], float, bool] | None:
        """The batch that the step under way should be of: positions, rate, and whether it was clipped whole."""
        clipped, self._clipped = self._clipped, 0
        if not self._waiting:
            return None
        positions, sample_rate = self._waiting.popleft()
        whole = clipped == len(positions)
        self.unmatched_steps += not whole
        return positions, sample_rate, whole

    def stepped(self, setting: StepSetting) -> None:
        """Count one parameter update."""
        self.steps += 1
        self._epoch_steps += 1
        self.settings[setting.noise_multiplier] += 1

    def compare(
        self,
        recorded: NDArray[np.float64],
        trained: NDArray[np.float64],
        max_grad_norm: float,
        *,
        ghost_slack: float | None = None,
    ) -> None:
        """Hold norms that training clipped against the recorded norms of the same examples, (n,) each.

        In ghost mode training never has the gradients themselves: they are scaled by max_grad_norm over a norm that is
        worked out beside them. ghost_slack is then the slack within recorded; None in other modes.
        """
        excess = np.minimum(trained, max_grad_norm) - np.minimum(recorded, max_grad_norm)
        self.compared += len(excess)
        if ghost_slack is not None:
            left = recorded * np.minimum(1.0, max_grad_norm / np.maximum(trained, 1e-300))
            self.underestimated += int(
                (left > max_grad_norm * (1 + 2 * ghost_slack + _SAME_GHOST_NORM)).sum()
            )
        self.larger += int((excess > _SAME_NORM * max_grad_norm).sum())
        alike = np.minimum(recorded, trained) >= max_grad_norm
        self.larger_clipped += int((alike & (trained > (1 + _SAME_CLIPPED_NORM) * recorded)).sum())
        self.largest_excess = max(
            self.largest_excess, float(excess.max(initial=0.0)) / max_grad_norm
        )

    def end_epoch(
        self, *, exhausted: bool, planned: int, prefetched: int, interrupted: bool
    ) -> None:
        """Hold the steps of an epoch against its draws.

        A batch that an exhausted epoch drew and no step used is one that the loop skipped or merged into another.

        Args:
            exhausted: the sampler came to its end.
            planned: batches that it draws until then.
            prefetched: batches that workers may have drawn ahead; a loop that breaks leaves those and one fetched.
            interrupted: the loop left a logical batch in pieces (BatchMemoryManager), which the next step then takes in.
        """
        self.undrawn_steps += max(0, self._epoch_steps - self._epoch_draws)
        self.dropped_batches += max(0, planned - self._epoch_draws) if exhausted else 0
        allowed = 0 if exhausted else 1 + prefetched
        self.unstepped_draws += max(0, self._epoch_draws - self._epoch_steps - allowed)
        self.interrupted_batches += interrupted
        self.peeks += not exhausted and self._epoch_draws > 0 and self._epoch_steps == 0
        self.passes += self._epoch_steps > 1
        self._epoch_draws = self._epoch_steps = 0
        self._waiting.clear()
        self._clipped = 0
