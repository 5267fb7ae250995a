"""Counts taken while a run trains, for comparison with what an account assumes. Sensitive."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.session_counts import DrawCounts, TrainingCounts
from indpriv.recording.opacus.ranks import RankStep

# Training and the norm pass do the same arithmetic in another order; norms that differ by more than
# this share of max_grad_norm are different norms. For norms above max_grad_norm, which contribute
# no more, a share of the norm itself.
_SAME_NORM = 1e-5
_SAME_CLIPPED_NORM = 0.01
_FEW_LEFT = 2  # passes that a loop may leave anywhere, with a batch that it does not use
# In ghost mode: differences beyond the slack of the norm pass that rounding cannot explain.
_SAME_GHOST_NORM = 0.01
# What each rank of a run counts for itself; all ranks count the rest alike.
_OF_ONE_RANK = (
    "undrawn_steps",
    "unstepped_draws",
    "dropped_batches",
    "interrupted_batches",
    "unmatched_steps",
    "gradients",
    "misclipped_gradients",
    "gradients_at_levels",
    "repeated_draws",
    "moved",
)


class Draw(NamedTuple):
    """One logical batch: positions of its examples, the rate, and numbers of drawn canaries."""

    positions: IntArray
    sample_rate: float
    canaries: IntArray


class Tally:
    """Counts of one session, of all ranks together; steps and draws are those of logical batches.

    Attributes:
        counts: of training; `Watch` adds what it counts itself.
        participations: (n_examples,) how often each example was drawn.
        took_part: (n_examples,) how often it was in the batch of a step.
        noise_multipliers: number of steps with each noise_multiplier.
    """

    def __init__(self, n_examples: int) -> None:
        self.counts = TrainingCounts()
        self.participations: IntArray = np.zeros(n_examples, dtype=np.int64)
        self.took_part: IntArray = np.zeros(n_examples, dtype=np.int64)
        self.noise_multipliers: Counter[float] = Counter()
        self._draws = 0
        self._expected = self._variance = 0.0  # of one example's participations
        self._epoch_draws = self._epoch_steps = 0  # an epoch is one pass of the batch sampler
        self._waiting: deque[Draw] = deque()  # batches without a step
        self._carried = 0  # batches of earlier epochs whose step is still to come
        self._clipped = 0  # examples of the first of them whose gradients are clipped already
        self._passes, self._left = 0, Counter[int]()  # with steps; left with a batch, by steps
        self._unsent: list[IntArray] = []  # batches drawn since the last message
        self._sent: Counter[str] = Counter()

    def drew(self, positions: IntArray, sample_rate: float, canaries: IntArray) -> None:
        """Count one logical batch when it is drawn; canaries are drawn, but not counted."""
        self._draws += 1
        self._epoch_draws += 1
        self._expected += sample_rate
        self._variance += sample_rate * (1 - sample_rate)
        np.add.at(self.participations, positions, 1)
        self._waiting.append(Draw(positions, sample_rate, canaries))
        self._unsent.append(positions)

    def since_last_message(self) -> tuple[tuple[IntArray, ...], dict[str, int]]:
        """What this rank drew and counted since the last call; see `RankStep`."""
        counts = {name: getattr(self.counts, name) - self._sent[name] for name in _OF_ONE_RANK}
        drawn, self._unsent = tuple(self._unsent), []
        self._sent.update(counts)
        return drawn, counts

    def add(self, other: RankStep) -> None:
        """Add what another rank drew and counted: its part of the same logical batches."""
        for positions in other.drawn:
            np.add.at(self.participations, positions, 1)
        for name, count in other.counts.items():
            setattr(self.counts, name, getattr(self.counts, name) + count)
        self._sent.update(other.counts)

    @property
    def waiting(self) -> Draw | None:
        """The batch of the next step; None if no batch is waiting."""
        return self._waiting[0] if self._waiting else None

    def micro_batch(self, size: int) -> IntArray | None:
        """Positions of the next micro-batch of this size: batches and parts are used in order."""
        if not self._waiting:
            return None
        positions = self._waiting[0].positions[self._clipped : self._clipped + size]
        return positions if len(positions) == size else None

    def clipped(self, size: int) -> None:
        """Count one micro-batch whose gradients enter the current step."""
        self._clipped += size

    def next_batch(self) -> tuple[IntArray, float, bool] | None:
        """The batch of the current step: positions, rate, and whether all of it was clipped."""
        clipped, self._clipped = self._clipped, 0
        if not self._waiting:
            return None
        positions, sample_rate, _ = self._waiting.popleft()
        np.add.at(self.took_part, positions, 1)
        whole = clipped == len(positions)
        self.counts.unmatched_steps += not whole
        return positions, sample_rate, whole

    def stepped(self, setting: StepSetting) -> None:
        """Count one parameter update."""
        self.counts.steps += 1
        self._epoch_steps += 1
        self.noise_multipliers[setting.noise_multiplier] += 1

    def compare(
        self,
        recorded: FloatArray,
        trained: FloatArray,
        max_grad_norm: float,
        *,
        ghost_slack: float | None = None,
    ) -> None:
        """Compare norms that training clipped with the recorded norms of the same examples.

        Args:
            recorded: (n,) norms.
            trained: (n,) norms.
            max_grad_norm: of the step.
            ghost_slack: None unless training clips in ghost mode; else the relative slack by which
                recorded norms may be too large. Ghost mode scales each gradient by max_grad_norm
                over a norm that it computes without the gradient, and that may be too small.
        """
        excess = np.minimum(trained, max_grad_norm) - np.minimum(recorded, max_grad_norm)
        counts = self.counts
        counts.compared_norms += len(excess)
        if ghost_slack is not None:
            left = recorded * np.minimum(1.0, max_grad_norm / np.maximum(trained, 1e-300))
            largest = max_grad_norm * (1 + 2 * ghost_slack + _SAME_GHOST_NORM)
            self.counts.underestimated_norms += int((left > largest).sum())
        counts.larger_norms += int((excess > _SAME_NORM * max_grad_norm).sum())
        larger = trained > (1 + _SAME_CLIPPED_NORM) * recorded
        both_clipped = np.minimum(recorded, trained) >= max_grad_norm
        counts.larger_clipped_norms += int((both_clipped & larger).sum())
        share = min(float(excess.max(initial=0.0)) / max_grad_norm, 1.0)
        counts.largest_excess = max(counts.largest_excess, share)

    def end_epoch(
        self, *, exhausted: bool, planned: int, prefetched: int, interrupted: bool, final: bool
    ) -> None:
        """Compare the steps of an epoch with its draws; final: no step comes after it.

        If the sampler is exhausted (it drew all planned batches), a batch that was drawn and no
        step used was skipped or merged into another. A loop that breaks leaves those that workers
        prefetched and one more, at which it may have looked unless all passes end at the same step.
        It is interrupted if it left a logical batch unfinished (BatchMemoryManager), which the next
        step then includes.
        """
        counts, draws, steps = self.counts, self._epoch_draws, self._epoch_steps
        self._passes += steps > 0
        counts.passes += steps > 1
        counts.dropped_batches += max(0, planned + self._carried - draws) if exhausted else 0
        if exhausted and not final and not interrupted:
            self._epoch_draws = self._carried = len(self._waiting)  # loaded ahead: steps follow
            self._epoch_steps = 0
            return
        counts.undrawn_steps += max(0, steps - draws)
        self._carried = 0
        self._left[steps] += not exhausted and draws - steps > prefetched
        by_law = final or not steps or self._left[steps] == self._passes
        by_law |= self._left.total() - self._left[0] <= _FEW_LEFT
        allowed = 0 if exhausted else by_law + prefetched
        counts.unstepped_draws += max(0, draws - steps - allowed)
        counts.interrupted_batches += interrupted
        counts.peeks += not exhausted and draws > 0 and steps == 0
        self._epoch_draws = self._epoch_steps = 0
        self._waiting.clear()
        self._clipped = 0

    def draw_counts(self) -> DrawCounts:
        """How often examples were drawn up to now."""
        return DrawCounts.of(
            self.participations,
            draws=self._draws,
            expected=self._expected,
            variance=self._variance,
        )
