"""How batches are drawn, and counts of draws and steps, which checks compare. Sensitive."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from indpriv import _checks
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.session_counts import DrawCounts, TrainingCounts

# Training and the norm pass do the same arithmetic in another order; norms that differ by more than
# this share of max_grad_norm are different norms. For norms above max_grad_norm, which contribute
# no more, a share of the norm itself.
_SAME_NORM = 1e-5
_SAME_CLIPPED_NORM = 0.01
_SMALL_SLACK = 0.01  # of max_grad_norm; where training's norms are smaller, nothing is at risk
# In ghost mode: differences beyond the slack of the norm pass that rounding cannot explain.
_SAME_GHOST_NORM = 0.01
# What each rank of a run counts for itself; all ranks count the rest alike.
OF_ONE_RANK = (
    *("undrawn_steps", "unstepped_draws", "left_batches", "dropped_batches"),
    *("interrupted_batches", "unmatched_steps", "gradients", "misclipped_gradients"),
    *("gradients_at_levels", "repeated_draws", "moved"),
)


class TruncatedPoissonSampler(UniformWithReplacementSampler):
    """Draws each example with probability sample_rate, and keeps at most max_batch_size of them.

    Pass it to a DataLoader as batch_sampler, and the loader to
    `PrivacyEngine.make_private(poisson_sampling=False)`. `indpriv.account` allows for the cap;
    Opacus's own epsilon does not, and is too small.

    Args:
        max_batch_size: if more examples were drawn, a random choice of this many is trained on.
        sample_rate: probability of each example to be drawn.
        settings: num_samples, generator and steps, as Opacus's sampler takes them.

    Raises:
        InputError: the cap or the rate is not in range.
    """

    def __init__(self, *, max_batch_size: int, sample_rate: float, **settings: Any) -> None:
        self.max_batch_size = _checks.check_positive_int("max_batch_size", max_batch_size)
        _checks.check_setting("sample_rate", sample_rate)
        super().__init__(sample_rate=sample_rate, **settings)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the positions of each batch."""
        for drawn in super().__iter__():
            if len(drawn) > self.max_batch_size:
                order = torch.randperm(len(drawn), generator=self.generator)
                drawn = [drawn[place] for place in order[: self.max_batch_size].tolist()]
            yield drawn


@contextmanager
def sampler_watched(
    sampler: Any,
    n_canaries: int,
    before_draw: Callable[[bool], None],
    on_draw: Callable[[IntArray, IntArray, bool], None],
    on_epoch_end: Callable[[bool, bool], None],
) -> Iterator[None]:
    """Report each batch that is drawn, and each epoch's end: whether its sampler was exhausted.

    The sampler draws canaries as if they were further examples; the loop does not see them. A pass
    that begins with gradients off evaluates, whatever it draws: no step may use a batch of it.
    """
    plain = type(sampler)
    n = sampler.num_samples if n_canaries else np.inf
    exhausted = False

    # A DataLoader's batch_sampler cannot be reassigned, so its class is replaced.
    class Watched(plain):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[list[int]]:
            return self.reported(super().__iter__(), True)

        def reported(self, draws: Any, from_the_start: bool = False) -> Iterator[list[int]]:
            nonlocal exhausted
            if trains := torch.is_grad_enabled():
                on_epoch_end(exhausted, False)
                exhausted = False
            before_draw(True)
            for indices in draws:
                drawn = np.array(indices, dtype=np.int64)
                positions, canaries = drawn[drawn < n], drawn[drawn >= n] - n
                on_draw(positions, canaries, trains)
                yield positions.tolist() if n_canaries else indices
                before_draw(False)
            exhausted = from_the_start if trains else exhausted

    Watched.__name__, Watched.__qualname__ = plain.__name__, plain.__qualname__
    sampler.__class__ = Watched
    if n_canaries:
        sampler.num_samples += n_canaries
    try:
        yield
    finally:
        sampler.__class__ = plain
        if n_canaries:
            sampler.num_samples -= n_canaries
        on_epoch_end(exhausted, True)


class Draw(NamedTuple):
    """One logical batch: positions of its examples, the rate, and numbers of drawn canaries."""

    positions: IntArray
    sample_rate: float
    canaries: IntArray


class Tally:
    """Counts of one session, of all ranks together; steps and draws are of logical batches."""

    def __init__(self, n_examples: int, *, resumed: bool = False) -> None:
        self.counts = TrainingCounts(left_batches=0)  # `Watch` adds what it counts itself
        # How often each example was drawn, and was in the batch of a step.
        self.participations: IntArray = np.zeros(n_examples, dtype=np.int64)
        self.took_part: IntArray = np.zeros(n_examples, dtype=np.int64)
        self.noise_multipliers: Counter[float] = Counter()  # of steps
        self._draws = 0
        self._expected = self._variance = 0.0  # of one example's participations
        self._epoch_draws = self._epoch_steps = 0  # an epoch is one pass of the batch sampler
        self._waiting: deque[Draw] = deque()  # batches without a step
        self._carried = 0  # batches of earlier epochs whose step is still to come
        self._taken = 0  # 1 while an update is made: a thread may begin the next epoch meanwhile
        self.clipped: list[int] = []  # sizes of micro-batches whose gradients enter the next step
        self._passes, self._looks = 0, 0  # with steps; without, since the last of them
        # Steps of the last pass, and whether it was left with a batch; of a resumed run's first.
        self._ended, self._resumed, self._first = (0, False), resumed, 0
        # Of passes with steps: by the looks before them; of those left with a batch, by steps.
        self._looked, self._left = Counter[int](), Counter[int]()
        self.unsent: list[IntArray] = []  # of this rank's batches, which others do not know yet

    def drew(self, draw: Draw) -> None:
        """Count one logical batch when it is drawn; canaries are not counted."""
        self._draws += 1
        self._epoch_draws += 1
        self._expected += draw.sample_rate
        self._variance += draw.sample_rate * (1 - draw.sample_rate)
        np.add.at(self.participations, draw.positions, 1)
        self._waiting.append(draw)
        self.unsent.append(draw.positions)

    @property
    def waiting(self) -> Draw | None:
        """The batch of the next step; None if no batch is waiting."""
        return self._waiting[0] if self._waiting else None

    def micro_batch(self, size: int) -> IntArray | None:
        """Positions of the next micro-batch of this size: batches and parts are used in order."""
        if not self._waiting:
            return None
        positions = self._waiting[0].positions[sum(self.clipped) :][:size]
        return positions if len(positions) == size else None

    def next_batch(self) -> tuple[Draw | None, bool]:
        """The batch of the current step, if one was drawn, and whether all of it was clipped."""
        ends, self.clipped = np.cumsum([0, *self.clipped]).tolist(), []
        if not self._waiting:
            return None, False
        sizes = [len(one.positions) for one in self._waiting if len(one.positions)]
        drawn = [end for end in np.cumsum(sizes).tolist() if end <= ends[-1]]
        if len(drawn) > 1 and drawn[-1] == ends[-1] and set(drawn) <= set(ends):
            raise refused("refusal.training", "accumulated", n=len(drawn))
        draw, self._taken = self._waiting.popleft(), 1
        np.add.at(self.took_part, draw.positions, 1)
        whole = ends[-1] == len(draw.positions)
        self.counts.unmatched_steps += not whole
        return draw, whole

    def stepped(self, setting: StepSetting) -> None:
        """Count one parameter update."""
        self.counts.steps += 1
        if not self._epoch_steps:  # training goes on after the looks and passes before it
            self.counts.peeks += self._looks
            self._looked[self._looks], self._looks = self._looked[self._looks] + 1, 0
            self._count_left(final=False)
        self._epoch_steps, self._taken = self._epoch_steps + 1, 0
        self.noise_multipliers[setting.noise_multiplier] += 1

    def compare(
        self,
        recorded: FloatArray,
        trained: FloatArray,
        max_grad_norm: float,
        *,
        slack: float = 0.0,
        is_ghost: bool = False,
    ) -> None:
        """Compare norms (n,) that training clipped with recorded ones of the same examples.

        slack: relative, by which recorded norms may be too large. Ghost mode scales each gradient
        by max_grad_norm over a norm that it computes without the gradient, and that may be too
        small.
        """
        counts, clip = self.counts, max_grad_norm
        excess = np.minimum(trained, clip) - np.minimum(recorded, clip)
        counts.compared_norms += len(excess)
        if is_ghost:
            left = recorded * np.minimum(1.0, clip / np.maximum(trained, 1e-300))
            largest = clip * (1 + 2 * slack + _SAME_GHOST_NORM)
            counts.underestimated_norms += int((left > largest).sum())
        counts.larger_norms += int((excess > _SAME_NORM * clip).sum())
        larger = trained > (1 + _SAME_CLIPPED_NORM) * recorded
        both_clipped = np.minimum(recorded, trained) >= clip
        counts.larger_clipped_norms += int((both_clipped & larger).sum())
        share = min(float(excess.max(initial=0.0)) / clip, 1.0)
        counts.largest_excess = max(counts.largest_excess, share)
        if not is_ghost and slack < _SMALL_SLACK:  # half precision may round in one of them alone
            smaller = int((excess < -2 * _SMALL_SLACK * clip).sum())
            counts.smaller_norms = (counts.smaller_norms or 0) + smaller

    def end_epoch(
        self, *, exhausted: bool, planned: int, prefetched: int, interrupted: bool, final: bool
    ) -> None:
        """Compare the steps of an epoch with its draws; final: no step comes after it.

        If the sampler is exhausted (it drew all planned batches), a batch that was drawn and no
        step used was skipped or merged into another. A loop that breaks leaves those that workers
        prefetched and maybe one more, at which it may have looked. It is interrupted if it left a
        logical batch unfinished (BatchMemoryManager), which the next step then includes.
        """
        counts, draws, steps = self.counts, self._epoch_draws, self._epoch_steps
        in_hand = not exhausted and draws - steps > prefetched
        self._looks += in_hand and not steps
        self._ended = (steps, in_hand) if steps else self._ended
        if final:
            counts.ended_in_hand = in_hand
            self._count_left(final=True)
        counts.passes += steps > 1
        counts.dropped_batches += max(0, planned + self._carried - draws) if exhausted else 0
        if exhausted and not final and not interrupted:
            self._epoch_draws = self._carried = len(self._waiting) + self._taken  # loaded ahead
            self._epoch_steps = 0
            return
        counts.undrawn_steps += max(0, steps - draws)
        self._carried = 0
        allowed = 0 if exhausted else 1 + prefetched
        counts.unstepped_draws += max(0, draws - steps - allowed)
        counts.interrupted_batches += interrupted
        self._epoch_draws = self._epoch_steps = 0
        self._waiting.clear()
        self.clipped.clear()

    def _count_left(self, *, final: bool) -> None:
        """Count batches that the loop had in hand and left, unless all passes leave theirs alike.

        Which ones to leave may then have been chosen by what they hold. When to stop is another
        line of the evidence: the last pass may end earlier, and the first of a resumed run.
        """
        (steps, in_hand), self._ended = self._ended, (0, False)
        if self._resumed and in_hand and not (final or self._first or self._passes):
            self._first = steps
        elif steps and (not final or steps >= min(self._left, default=np.inf)):
            self._passes += 1
            self._left.update([steps] * in_hand)
        counted = [self._first] * (self._first >= min(self._left, default=1))
        left, passes = self._left + Counter(counted), self._passes + len(counted)
        looks_alike = len(self._looked) == 1 < self._looked.total()
        left_alike = len(left) == 1 and 1 < passes == left.total()
        looks = self.counts.peeks * (not looks_alike)
        self.counts.left_batches = looks + left.total() * (not left_alike)

    def draw_counts(self) -> DrawCounts:
        """How often examples were drawn up to now."""
        return DrawCounts.of(
            self.participations, draws=self._draws, expected=self._expected, variance=self._variance
        )
