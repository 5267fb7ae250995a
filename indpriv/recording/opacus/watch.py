"""Watching a run: counts each draw, micro-batch and step, and reports each step. Sensitive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from indpriv._arrays import FloatArray, IntArray
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.session_counts import (
    DrawCounts,
    Found,
    NoiseCounts,
    TrainingCounts,
)
from indpriv.norm_log.step_settings import StepSetting
from indpriv.recording.clipping.rules import ClippingRule
from indpriv.recording.compared.findings import worst_of
from indpriv.recording.compared.training import Comparison
from indpriv.recording.opacus.clipping_watch import (
    ClippedBatch,
    Thresholds,
    clip_excess,
    clipping_watched,
    replaced_methods,
)
from indpriv.recording.opacus.memory_format import memory_format_watched
from indpriv.recording.opacus.noise_watch import NoiseWatch
from indpriv.recording.opacus.ranks import RankStep
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.opacus.run_attack import AttackedStep, StartedAttack
from indpriv.recording.opacus.tally import Tally
from indpriv.recording.random_states import LeftStates, SeenStates


@dataclass(frozen=True)
class TrainedBatch:
    """Examples of one logical batch: positions (n,), and the norms (n,) that training clipped."""

    positions: IntArray
    norms: Tensor


BeforeStep = Callable[[StepSetting, TrainedBatch | None], None]
AfterStep = Callable[[StepSetting], None]


class Watch:
    """Counts of one run, taken inside the block of `watching`."""

    def __init__(
        self,
        run: OpacusRun,
        compared: Callable[[Callable[[int], IntArray | None]], Comparison],
        *,
        steps_before: int = 0,
        attack: StartedAttack | None = None,
    ) -> None:
        """Prepare to watch a run; the log of a resumed one has `steps_before` steps already.

        compared: makes the comparison of its steps, given a function from the number of the next
        rows to their positions.
        """
        self._run, self._steps_before, self._attack = run, steps_before, attack
        self.tally = Tally(run.n_examples)
        self._compared = compared(self.tally.micro_batch)
        self.found_by_others: list[Mapping[str, Found]] = []  # comparisons of other ranks
        self.news: list[str] = []  # comparisons that were not equal at this step for the first time
        self._micro_batches: list[ClippedBatch] = []  # of the current step
        if not run.is_ghost:  # where norms are not sums over a gradient
            self.tally.counts.clip_excess = clip_excess(run.optimizer)
        self._sampling_states, self._noise_states = SeenStates(), SeenStates()
        self._left = LeftStates()
        self.tally.counts.moved = 0
        self._noise = NoiseWatch(run.optimizer.params, getattr(run.optimizer, "grad_state", None))
        self._noised: StepSetting | None = None  # at which noise was added to the current step
        self.limits: tuple[float, ...] = ()  # per layer, when noise was added
        self._updating: StepSetting | None = None  # of the update that has begun
        self._versions: list[int] = []  # of the parameters, as the last update left them

    @contextmanager
    def watching(
        self, before_step: BeforeStep, after_step: AfterStep, *, thresholds: Thresholds | None
    ) -> Iterator[None]:
        """Count every draw, micro-batch and step of the block.

        Args:
            before_step: called before each parameter update with its setting and the examples of
                its batch; None if the batch that was clipped is not the one that was drawn.
            after_step: called after each parameter update.
            thresholds: for individual clipping; None to clip at max_grad_norm.
        """
        run, individually = self._run, thresholds is not None
        self._versions = run.parameter_versions()

        def before_update() -> None:
            setting, batch = self._begin_update(individually)
            before_step(setting, batch)
            self._compared.before_step(setting)
            self._micro_batches.clear()
            self._updating = setting

        with ExitStack() as stack:
            n_canaries = 0 if self._attack is None else self._attack.n_canaries
            draws = self._before_draw, self._on_draw, self._on_epoch_end
            stack.enter_context(_sampler_watched(run.batch_sampler, n_canaries, *draws))
            stack.enter_context(memory_format_watched(run.model, run.module))
            clipping = clipping_watched(
                run.model,
                run.optimizer,
                positions_of=self.tally.micro_batch,
                on_batch=self._on_micro_batch,
                thresholds=thresholds,
            )
            stack.enter_context(clipping)
            updates = _updates_watched(
                run.optimizer,
                self._add_noise,
                before_update,
                lambda: after_step(self._end_update()),
            )
            stack.enter_context(updates)
            stack.enter_context(self._compared.comparing())
            yield

    @property
    def first_random_state(self) -> bytes:
        """State in which the first draw of a batch left its generator; empty if not known."""
        return self._sampling_states.first

    def coming_setting(self, max_grad_norm: float) -> StepSetting:
        """Settings, as they stand, of the step whose batch is being clipped at max_grad_norm."""
        waiting = self.tally.waiting if self._run.is_poisson else None
        rate = None if waiting is None else waiting.sample_rate
        return self._run.setting(sample_rate=rate, max_grad_norm=max_grad_norm)

    def to_message(
        self,
        setting: StepSetting | None,
        positions: IntArray | None,
        norms: FloatArray | None,
    ) -> RankStep:
        """What the other ranks must know of this step; setting is None at the end of the run."""
        settings = {} if setting is None else vars(setting)
        shared = {**settings, **self._run.shared_by_ranks}
        return RankStep(
            self.tally.since_last_message(),
            shared,
            self._run.sampling_seed,
            positions,
            norms,
            dict(self.compared),
        )

    def _on_micro_batch(self, batch: ClippedBatch) -> None:
        self._compared.clipped(batch)
        self.tally.clipped(len(batch.norms))
        counts = self.tally.counts
        counts.clip_rounding = max(counts.clip_rounding, batch.rounding)
        self._micro_batches.append(batch)

    def _add_noise(self, add_noise: Callable[[], None]) -> None:
        """Let Opacus add the noise, with an attack's view of it before and after."""
        run, attack = self._run, self._attack
        self._compared.before_noise()
        step = None if attack is None else _attacked_step(run, self.tally)
        if attack is not None and step is not None:
            attack.before_noise(step)
        self._noise.before()
        state = _state_of(run.noise_generator)
        randomness, optimizer = self.tally.counts, run.optimizer
        if not isinstance(optimizer, ClippingRule):  # which draws from it in between
            self._note_moved(self._left.moved(run.noise_generator))
        add_noise()
        self._left.leave(run.noise_generator)
        draws = run.noise_std and run.whole.adds_noise(optimizer) and not optimizer.secure_mode
        still = state is not None and state == _state_of(run.noise_generator)
        randomness.unmoved = (randomness.unmoved or 0) + bool(draws and still)
        randomness.guessable_seed |= run.guessable_seed
        # Now, since another step hook may change settings before it calls ours.
        self._noised, self.limits = run.setting(), run.limits
        if getattr(run.optimizer, "rank", 0) == 0:  # of several shards, the first is watched
            self._noise.after(run.noise_std / run.whole.noise_divisor(run.optimizer))
        if attack is not None and step is not None:
            attack.after_noise(step)
        self._compared.after_noise()

    @property
    def random_rows(self) -> bool:
        """Whether items of the data set were seen to be random."""
        return self._compared.random_rows

    @property
    def compared(self) -> Mapping[str, Found]:
        """What comparisons of training with its own recomputation found."""
        return self._compared.findings.found

    @property
    def noise(self) -> NoiseCounts | None:
        """What was measured of the noise; None if nothing was."""
        return self._noise.counts()

    def _begin_update(self, individually: bool) -> tuple[StepSetting, TrainedBatch | None]:
        """Count an update that is about to be made; return its setting and its batch."""
        run, optimizer = self._run, self._run.optimizer
        _check_one_batch(optimizer)
        if run.whole.adds_noise(optimizer):
            self._count_randomness(self._noise_states, run.noise_generator)
        drawn = self.tally.next_batch()
        now = run.setting(sample_rate=drawn[1] if drawn and run.is_poisson else None)
        if self._noised is None:
            raise EvidenceError(
                "the optimizer's add_noise was replaced, so it is not known how much noise this "
                "step has; leave it as Opacus made it"
            )
        setting, self._noised = replace(self._noised, sample_rate=now.sample_rate), None
        run.check_trained_parameters()
        written = run.parameter_versions() != self._versions
        self.tally.counts.changed_outside += written and not self._compared.same_state
        self._count_clipping(setting, drawn[0] if drawn else None, individually)
        if drawn is None or not drawn[2]:
            return setting, None
        norms = [batch.norms for batch in self._micro_batches]
        joined = torch.cat(norms) if norms else torch.zeros(0, dtype=torch.float64)
        return setting, TrainedBatch(drawn[0], joined)

    def _end_update(self) -> StepSetting:
        """Count an update that was made; return its setting."""
        setting, self._updating = self._updating, None
        if setting is None:
            raise EvidenceError(
                "the parameters were updated, but the optimizer's step hook did not run: another "
                "optimizer.attach_step_hook call replaced it, and with it Opacus's accountant; "
                "call the previous optimizer.step_hook from your hook"
            )
        self.news = self._compared.updated()
        self._versions = self._run.parameter_versions()
        self.tally.stepped(setting)
        counted = self._run.history.steps
        if self.tally.counts.steps == 1 and counted is not None and counted <= 0:
            raise EvidenceError(
                "Opacus's accountant did not count the first step: its get_epsilon would report "
                "too little; make the optimizer with make_private again"
            )
        return setting

    def _count_clipping(
        self, setting: StepSetting, drawn: IntArray | None, individually: bool
    ) -> None:
        """Compare how gradients of this step were clipped with its setting and its batch."""
        batches = self._micro_batches
        gradients = sum(len(batch.norms) for batch in batches)
        sound = sum(len(b.norms) for b in batches if b.max_grad_norm == setting.max_grad_norm)
        self.tally.counts.gradients += gradients
        self.tally.counts.misclipped_gradients += gradients - sound
        if individually and drawn is not None:
            known = [batch.positions for batch in batches if batch.positions is not None]
            if np.array_equal(np.concatenate([drawn[:0], *known]), drawn):
                self.tally.counts.gradients_at_levels += sound

    def _count_randomness(self, states: SeenStates, generator: torch.Generator | None) -> None:
        """Count the draw just made if it repeats an earlier one."""
        if not self._run.optimizer.secure_mode:
            self.tally.counts.repeated_draws += states.repeated(generator)

    def _before_draw(self, new_epoch: bool) -> None:
        if self._run.is_poisson:  # others draw an epoch at once
            generator = self._run.sampling_generator
            self._note_moved(self._left.moved(generator, new_epoch=new_epoch))

    def _note_moved(self, moved: bool) -> None:
        randomness = self.tally.counts
        randomness.moved = (randomness.moved or 0) + moved

    def _on_draw(self, positions: IntArray, canaries: IntArray, trains: bool) -> None:
        if trains:
            self.tally.drew(positions, self._run.sample_rate, canaries)
        if self._run.is_poisson:
            self._left.leave(self._run.sampling_generator)
            self._count_randomness(self._sampling_states, self._run.sampling_generator)

    def _on_epoch_end(self, exhausted: bool, final: bool) -> None:
        optimizer, loader = self._run.optimizer, self._run.loader
        self._micro_batches.clear()
        self.tally.end_epoch(
            exhausted=exhausted,
            planned=self._run.steps_per_epoch,
            prefetched=loader.num_workers * (loader.prefetch_factor or 0),
            interrupted=bool(optimizer._step_skip_queue or optimizer._is_last_step_skipped),
            final=final,
        )

    def counts(self) -> tuple[DrawCounts, TrainingCounts]:
        """Counts up to now."""
        tally, run = self.tally, self._run
        training = deepcopy(tally.counts)
        training.sampler_class = run.sampler_class
        if self.random_rows:  # norms of training are of another draw than the recorded ones
            training.forget_norms()
        training.compared = worst_of([self.compared, *self.found_by_others])
        training.guessable_seed |= run.guessable_seed
        training.unmoved = training.unmoved or 0
        training.source = run.random_source
        history = run.history
        training.earlier_steps = max(0, history.steps_before - self._steps_before)
        training.accountant_steps = history.steps
        training.accountant_settings_match = history.matches(
            tally.noise_multipliers, run.sample_rate
        )
        return tally.draw_counts(), training


def _state_of(generator: torch.Generator | None) -> bytes | None:
    return None if generator is None else generator.get_state().numpy().tobytes()


def _check_one_batch(optimizer: Any) -> None:
    if optimizer.accumulated_iterations != 1:
        raise InputError(
            f"{optimizer.accumulated_iterations} batches were accumulated into one step; each "
            "Poisson batch must be one step (use BatchMemoryManager if memory is short)"
        )


def _attacked_step(run: OpacusRun, tally: Tally) -> AttackedStep:
    """The step that noise is about to be added to."""
    waiting = tally.waiting
    if waiting is None:
        raise EvidenceError(
            "a step was taken on a batch that the attached loader did not draw, so the attack on "
            "this run does not know its examples; take every batch from the loader"
        )
    setting = run.setting(sample_rate=waiting.sample_rate)
    return AttackedStep(setting, waiting.positions, waiting.canaries)


@contextmanager
def _sampler_watched(
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


@contextmanager
def _updates_watched(
    optimizer: Any,
    with_noise: Callable[[Callable[[], None]], None],
    before_update: Callable[[], None],
    after_update: Callable[[], None],
) -> Iterator[None]:
    """Report what comes before and after each parameter update.

    with_noise is called in place of add_noise, with what Opacus would call.
    """
    accountant_hook = optimizer.step_hook
    plain_noise = optimizer.add_noise

    def step_hook(optimizer: Any) -> None:
        if accountant_hook is not None:
            # Opacus has one slot: without this call its accountant would stop, with no warning.
            accountant_hook(optimizer)
        before_update()

    optimizer.attach_step_hook(step_hook)
    inner = optimizer.original_optimizer
    handle = inner.register_step_post_hook(lambda *_: after_update())
    inner._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    try:
        with replaced_methods(optimizer, add_noise=lambda: with_noise(plain_noise)):
            yield
    finally:
        handle.remove()
        if optimizer.step_hook is step_hook:
            optimizer.attach_step_hook(accountant_hook)
