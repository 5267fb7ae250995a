"""Watching a run: counts each draw, micro-batch and step, and reports each step. Sensitive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn

from indpriv._arrays import FloatArray, IntArray
from indpriv.attack_scores import AttackScores
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.session_counts import (
    DrawCounts,
    Found,
    NoiseCounts,
    TrainingCounts,
)
from indpriv.recording.clipping.rules import ClippingRule
from indpriv.recording.compared.findings import worst_of
from indpriv.recording.compared.training import Comparison
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.opacus.gradients import (
    ClippedBatch,
    NoiseWatch,
    Thresholds,
    clip_excess,
    clipping_watched,
    replaced_methods,
)
from indpriv.recording.opacus.ranks import RankStep
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.opacus.samplers import sampler_watched
from indpriv.recording.opacus.tally import Tally
from indpriv.recording.random_states import LeftStates, SeenStates
from indpriv.recording.training_data import Examples, TrainingData


@dataclass(frozen=True)
class AttackedRun:
    """A run that is about to train.

    Attributes:
        run: model, optimizer and loader.
        data: what it trains on.
        train, test: the same, as passes read it; test is None without a test set.
        norm_pass: of the model.
        clips_at_levels: examples have clip thresholds of their own.
    """

    run: OpacusRun
    data: TrainingData
    train: Examples
    test: Examples | None
    norm_pass: NormPass
    clips_at_levels: bool

    def check_one_rank_of_poisson(self, attack: str) -> None:
        """Raise InputError unless one rank trains on Poisson batches."""
        if type(self.run.batch_sampler) is not UniformWithReplacementSampler:
            raise InputError(
                f"{attack} need one rank that draws Poisson batches, but the loader draws with "
                f"{self.run.sampler_class}; pass poisson_sampling=True to make_private and train "
                "on one rank"
            )


@dataclass(frozen=True)
class AttackedStep:
    """One update whose noise is about to be added, or was added.

    Attributes:
        setting: realised settings.
        drawn: positions of the examples in its batch.
        drawn_canaries: numbers of the canaries that the sampler drew.
    """

    setting: StepSetting
    drawn: IntArray
    drawn_canaries: IntArray


class StartedAttack(Protocol):
    """An attack that watches every update of one run.

    Attributes:
        file_name: of its scores, in the run directory.
        n_canaries: number of canaries that the run's sampler draws besides the examples.
    """

    file_name: str
    n_canaries: int

    def before_noise(self, step: AttackedStep) -> None:
        """Called when the clipped gradients of a step are summed up."""
        ...

    def after_noise(self, step: AttackedStep) -> None:
        """Called when p.grad holds the noisy sum, before it is divided by the batch size."""
        ...

    def scores(self, model: nn.Module) -> AttackScores:
        """Scores at the end; model: the final model in eval mode."""
        ...


class RunAttack(Protocol):
    """What a Recorder takes as `attack=`."""

    def start(self, attacked: AttackedRun) -> StartedAttack:
        """Prepare to watch a run; InputError if the attack does not fit it."""
        ...


@dataclass(frozen=True)
class TrainedBatch:
    """Examples of one logical batch: positions (n,), and the norms (n,) that training clipped."""

    positions: IntArray
    norms: Tensor


BeforeStep = Callable[[StepSetting, TrainedBatch | None], None]


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
        self.tally.counts.moved = self.tally.counts.unmoved = 0
        self._noise = NoiseWatch(run.optimizer.params, getattr(run.optimizer, "grad_state", None))
        self._noised: StepSetting | None = None  # at which noise was added to the current step
        self.limits: tuple[float, ...] = ()  # per layer, when noise was added
        self._updating: StepSetting | None = None  # of the update that has begun
        self._versions: list[int] = []  # of the parameters, as the last update left them

    @contextmanager
    def watching(
        self,
        before_step: BeforeStep,
        after_step: Callable[[StepSetting], None],
        *,
        thresholds: Thresholds | None,
    ) -> Iterator[None]:
        """Count every draw, micro-batch and step of the block.

        before_step is called before each parameter update with its setting and the examples of its
        batch, None if the batch that was clipped is not the one that was drawn; after_step after
        it. thresholds are for individual clipping.
        """
        run, optimizer = self._run, self._run.optimizer
        self._versions = run.parameter_versions()
        accountant_hook = optimizer.step_hook

        def step_hook(optimizer: Any) -> None:
            if accountant_hook is not None:
                # Opacus has one slot: without this call its accountant would stop, with no warning.
                accountant_hook(optimizer)
            setting, batch = self._begin_update(thresholds is not None)
            before_step(setting, batch)
            self._compared.before_step(setting)
            self._micro_batches.clear()
            self._updating = setting

        def restore() -> None:
            if optimizer.step_hook is step_hook:
                optimizer.attach_step_hook(accountant_hook)

        add_noise, inner = optimizer.add_noise, optimizer.original_optimizer
        n_canaries = 0 if self._attack is None else self._attack.n_canaries
        draws = self._before_draw, self._on_draw, self._on_epoch_end
        clipping = clipping_watched(
            run.model,
            optimizer,
            positions_of=self.tally.micro_batch,
            on_batch=self._on_micro_batch,
            thresholds=thresholds,
        )
        with ExitStack() as stack:
            stack.enter_context(sampler_watched(run.batch_sampler, n_canaries, *draws))
            stack.enter_context(clipping)
            optimizer.attach_step_hook(step_hook)
            stack.callback(restore)
            handle = inner.register_step_post_hook(lambda *_: after_step(self._end_update()))
            stack.callback(handle.remove)
            inner._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
            replaced = replaced_methods(optimizer, add_noise=lambda: self._add_noise(add_noise))
            stack.enter_context(replaced)
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
        shared = {**({} if setting is None else vars(setting)), **self._run.shared_by_ranks}
        seed, found = self._run.sampling_seed, dict(self.compared)
        return RankStep(*self.tally.since_last_message(), shared, seed, positions, norms, found)

    def _on_micro_batch(self, batch: ClippedBatch) -> None:
        self._compared.clipped(batch)
        self.tally.clipped(len(batch.norms))
        counts = self.tally.counts
        counts.clip_rounding = max(counts.clip_rounding, batch.rounding)
        self._micro_batches.append(batch)

    def _add_noise(self, add_noise: Callable[[], None]) -> None:
        """Let Opacus add the noise, with an attack's view of it before and after."""
        run, attack, optimizer = self._run, self._attack, self._run.optimizer
        self._compared.before_noise()
        step = None if attack is None else self._attacked_step()
        if attack is not None and step is not None:
            attack.before_noise(step)
        self._noise.before()
        state = _state_of(run.noise_generator)
        if not isinstance(optimizer, ClippingRule):  # which draws from it in between
            self._note_moved(run.noise_generator)
        add_noise()
        self._left.leave(run.noise_generator)
        draws = run.noise_std and run.whole.adds_noise(optimizer) and not optimizer.secure_mode
        still = state is not None and state == _state_of(run.noise_generator)
        self.tally.counts.unmoved = (self.tally.counts.unmoved or 0) + bool(draws and still)
        self.tally.counts.guessable_seed |= run.guessable_seed
        # Now, since another step hook may change settings before it calls ours.
        self._noised, self.limits = run.setting(), run.limits
        if getattr(optimizer, "rank", 0) == 0:  # of several shards, the first is watched
            self._noise.after(run.noise_std / run.whole.noise_divisor(optimizer))
        if attack is not None and step is not None:
            attack.after_noise(step)
        self._compared.after_noise()

    def _attacked_step(self) -> AttackedStep:
        """The step that noise is about to be added to."""
        waiting = self.tally.waiting
        if waiting is None:
            raise EvidenceError(
                "a step was taken on a batch that the attached loader did not draw, so the attack "
                "on this run does not know its examples; take every batch from the loader"
            )
        setting = self._run.setting(sample_rate=waiting.sample_rate)
        return AttackedStep(setting, waiting.positions, waiting.canaries)

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
        run = self._run
        run.check_update()
        if run.whole.adds_noise(run.optimizer):
            self._count_randomness(self._noise_states, run.noise_generator)
        drawn = self.tally.next_batch()
        now = run.setting(sample_rate=drawn[1] if drawn and run.is_poisson else None)
        if self._noised is None:
            raise EvidenceError(
                "the optimizer's add_noise was replaced, so it is not known how much noise this "
                "step has; leave it as Opacus made it"
            )
        setting, self._noised = replace(self._noised, sample_rate=now.sample_rate), None
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
        batches, counts = self._micro_batches, self.tally.counts
        gradients = sum(len(batch.norms) for batch in batches)
        sound = sum(len(b.norms) for b in batches if b.max_grad_norm == setting.max_grad_norm)
        counts.gradients += gradients
        counts.misclipped_gradients += gradients - sound
        if individually and drawn is not None:
            known = [batch.positions for batch in batches if batch.positions is not None]
            if np.array_equal(np.concatenate([drawn[:0], *known]), drawn):
                counts.gradients_at_levels += sound

    def _count_randomness(self, states: SeenStates, generator: torch.Generator | None) -> None:
        """Count the draw just made if it repeats an earlier one."""
        if not self._run.optimizer.secure_mode:
            self.tally.counts.repeated_draws += states.repeated(generator)

    def _note_moved(self, generator: torch.Generator | None, *, new_epoch: bool = False) -> None:
        moved = self._left.moved(generator, new_epoch=new_epoch)
        self.tally.counts.moved = (self.tally.counts.moved or 0) + moved

    def _before_draw(self, new_epoch: bool) -> None:
        if self._run.is_poisson:  # others draw an epoch at once
            self._note_moved(self._run.sampling_generator, new_epoch=new_epoch)

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
