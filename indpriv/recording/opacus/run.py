"""What Opacus is doing in a run: read from its own objects, checked once at the border, watched while it trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from indpriv import _checks
from indpriv.errors import EvidenceError, InputError
from indpriv.recording.norms.shadow_model import standard_module
from indpriv.recording.opacus.checks import (
    check_loader,
    check_optimizer,
    check_parameters,
    find_accountant,
    sampler_kind,
)
from indpriv.recording.opacus.clipping_watch import (
    ClippedBatch,
    Thresholds,
    clip_excess,
    watch_clipping,
)
from indpriv.recording.opacus.memory_format import check_memory_format, watch_memory_format
from indpriv.recording.opacus.ranks import RankStep
from indpriv.recording.opacus.tally import StepSetting, Tally
from indpriv.recording.random_states import SeenStates, generator_of, is_guessable


@dataclass(frozen=True)
class TrainedBatch:
    """The examples of one logical batch: positions (n,), and the norms (n,) that training clipped, on its device."""

    positions: NDArray[np.int64]
    norms: Tensor


class OpacusRun:
    """One attached model, optimizer and loader; `InputError` at once where the run cannot be accounted."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: DataLoader[Any],
        n_examples: int,
        *,
        steps_before: int = 0,
    ) -> None:
        """Check and read a run; nothing is changed yet.

        Args:
            model: as PrivacyEngine.make_private returned it.
            optimizer: likewise; an Opacus DPOptimizer with flat clipping.
            loader: likewise.
            n_examples: length of the data set that the Recorder was given.
            steps_before: steps that the log holds already, where a run is resumed.
        """
        check_optimizer(optimizer, model)
        self.module = standard_module(model)
        self._model = model
        self.optimizer: DPOptimizer = optimizer
        self.loader = loader
        self._batch_sampler: Any = loader.batch_sampler
        self.sampler = sampler_kind(self._batch_sampler, optimizer)
        check_loader(loader, n_examples)
        check_parameters(self.module, optimizer)
        check_memory_format(model, self.module)
        self.accountant, self._accountant_rate = find_accountant(optimizer)
        self._history_before = self._history_steps()
        self._steps_before = steps_before
        if self.sampler == "poisson" and self._accountant_rate < self.sample_rate * (1 - 1e-9):
            raise InputError(
                f"Opacus's accountant counts sample_rate={self._accountant_rate:.6g}, but the loader samples at "
                f"{self.sample_rate:.6g}: its epsilon is too small; make the loader and the accountant from one "
                "make_private call"
            )
        self.tally = Tally(np.zeros(n_examples, dtype=np.int64))
        self._pieces: list[ClippedBatch] = []  # of the step under way
        self._clip_rounding = 0.0
        self._trained = {id(p) for p in optimizer.params}
        self._clip_excess = (
            0.0 if self.is_ghost else clip_excess(optimizer)
        )  # ghost norms are no such sums
        self._coins, self._noise = SeenStates(), SeenStates()
        self.setting()

    @property
    def sample_rate(self) -> float:
        """The sampler's own rate; without Poisson sampling, the rate that the accountant assumes."""
        return (
            float(self._batch_sampler.sample_rate)
            if self.sampler == "poisson"
            else self._accountant_rate
        )

    @property
    def is_ghost(self) -> bool:
        """Whether gradients are scaled by norms that are worked out without them."""
        return isinstance(self._model, GradSampleModuleFastGradientClipping)

    @property
    def steps_per_epoch(self) -> int:
        """Logical batches an epoch."""
        return len(self._batch_sampler)

    @property
    def sampler_class(self) -> str:
        """Name of the class that draws the batches."""
        return type(self._batch_sampler).__name__

    @property
    def alike(self) -> dict[str, Any]:
        """What must be the same on every rank, or they do not train one model on one sample."""
        optimizer, sampler = self.optimizer, self._batch_sampler
        shards = ("total_size", "shuffle", "shuffle_seed", "epoch")
        return {
            "expected_batch_size": optimizer.expected_batch_size,  # noise is divided by the first rank's
            "loss_reduction": optimizer.loss_reduction,
            **{name: getattr(sampler, name, None) for name in shards},
        }

    @property
    def sampling_seed(self) -> int | None:
        """What the generator of the sampler's coins was seeded with, on the CPU; None for a secure one, which has no seed."""
        if self.optimizer.secure_mode:
            return None
        return (
            int(self._coin_generator.initial_seed()) % 2**32
        )  # all that the Mersenne Twister takes in

    @property
    def guessable_seed(self) -> bool:
        """Whether noise or coins come from a generator whose seed looks chosen by a person, or is torch's default."""
        return not self.optimizer.secure_mode and any(
            map(is_guessable, (self._noise_generator, self._coin_generator))
        )

    @property
    def _noise_generator(self) -> torch.Generator | None:
        return generator_of(self.optimizer.generator, next(self.module.parameters()).device)

    @property
    def _coin_generator(self) -> torch.Generator:
        return getattr(self._batch_sampler, "generator", None) or torch.default_generator

    @property
    def first_random_state(self) -> bytes:
        """Where the first draw of a batch left its generator; empty before, and where nobody can tell."""
        return self._coins.first

    def _watch_randomness(self, seen: SeenStates, generator: torch.Generator | None) -> None:
        """Count a draw just made that repeats an earlier one."""
        self.tally.repeated_draws += not self.optimizer.secure_mode and seen.again(generator)

    def told(
        self,
        setting: StepSetting | None,
        positions: NDArray[np.int64] | None,
        norms: NDArray[np.float64] | None,
    ) -> RankStep:
        """What the other ranks must know of the step under way; setting is None at the end of the run."""
        settings = {} if setting is None else vars(setting)
        return RankStep(
            self.tally.news(), {**settings, **self.alike}, self.sampling_seed, positions, norms
        )

    def setting(self, sample_rate: float | None = None) -> StepSetting:
        """Realised settings of the step under way; InputError where model and optimizer disagree.

        sample_rate: at which its batch was drawn; default the sampler's rate now.
        """
        max_grad_norm = self.optimizer.max_grad_norm
        if self.is_ghost and self._model.max_grad_norm != max_grad_norm:
            raise InputError(
                f"the model clips at max_grad_norm={self._model.max_grad_norm}, the optimizer adds noise for "
                f"{max_grad_norm}; in ghost mode set both, or the noise is not what the account assumes"
            )
        if getattr(self.optimizer, "_adjusted_noise_multiplier", None) is not None:
            raise InputError(
                "adaptive clipping is not supported: every example also enters a noisy count that this account would "
                'leave out; use make_private(clipping="flat") with a fixed max_grad_norm'
            )
        if not isinstance(max_grad_norm, int | float):
            raise InputError(
                f"max_grad_norm={max_grad_norm} is not one number; clipping per layer is not supported"
            )
        return StepSetting(
            float(_checks.check_noise_multiplier(self.optimizer.noise_multiplier)),
            float(_checks.check_max_grad_norm(max_grad_norm)),
            float(
                _checks.check_sample_rate(self.sample_rate if sample_rate is None else sample_rate)
            ),
        )

    def coming_setting(self, max_grad_norm: float) -> StepSetting:
        """Settings, as they stand, of the step whose batch is being clipped at max_grad_norm."""
        waiting = self.tally.waiting_rate if self.sampler == "poisson" else None
        return StepSetting(
            float(_checks.check_noise_multiplier(self.optimizer.noise_multiplier)),
            float(_checks.check_max_grad_norm(max_grad_norm)),
            float(_checks.check_sample_rate(self.sample_rate if waiting is None else waiting)),
        )

    def watch(
        self,
        before_step: Callable[[StepSetting, TrainedBatch | None], None],
        after_step: Callable[[StepSetting], None],
        *,
        thresholds: Thresholds | None = None,
    ) -> Callable[[], None]:
        """Count every draw, physical batch and step.

        Args:
            before_step: called before each parameter update with its setting and the examples of its batch; None where
                the batch that was clipped is not the one that was drawn.
            after_step: called after each parameter update.
            thresholds: clip thresholds of some examples, for individual clipping; see `watch_clipping`.

        Returns:
            a function that takes everything off again.
        """
        unwatch_sampler = self._watch_sampler()
        unwatch_images = watch_memory_format(self._model, self.module)
        accountant_hook = self.optimizer.step_hook
        plain_noise, own_noise = self.optimizer.add_noise, vars(self.optimizer).get("add_noise")
        noised: list[StepSetting] = []
        pending: list[StepSetting] = []
        versions = self._versions()  # of the parameters' values, as the last update left them
        pieces = self._pieces

        def on_batch(piece: ClippedBatch) -> None:
            self.tally.clipped(len(piece.norms))
            self._clip_rounding = max(self._clip_rounding, piece.rounding)
            pieces.append(piece)

        unwatch_clipping = watch_clipping(
            self._model,
            self.optimizer,
            positions_of=self.tally.piece,
            on_batch=on_batch,
            thresholds=thresholds,
        )

        def add_noise() -> None:
            plain_noise()
            noised[:] = [
                self.setting()
            ]  # a step hook may set those of the next step before it calls this one

        def before_update(optimizer: DPOptimizer) -> None:
            if (
                accountant_hook is not None
            ):  # Opacus has one slot: chain, or its accountant stops without a word
                accountant_hook(optimizer)
            if optimizer.accumulated_iterations != 1:
                raise InputError(
                    f"{optimizer.accumulated_iterations} batches were accumulated into one step; each Poisson batch must "
                    "be one step (use BatchMemoryManager for small memory)"
                )
            if getattr(optimizer, "rank", 0) == 0:  # which adds the noise of all ranks
                self._watch_randomness(self._noise, self._noise_generator)
            batch = self.tally.next_batch()
            now = self.setting(batch[1] if batch and self.sampler == "poisson" else None)
            if not noised:
                raise EvidenceError(
                    "the optimizer's add_noise was replaced: nothing says what noise this step has; leave it as Opacus made it"
                )
            setting = replace(noised.pop(), sample_rate=now.sample_rate)
            self._check_trained()
            self.tally.changed_outside += self._versions() != versions
            self._count_clipping(
                setting, batch[0] if batch else None, individually=thresholds is not None
            )
            before_step(
                setting, TrainedBatch(batch[0], _joined(pieces)) if batch and batch[2] else None
            )
            pieces.clear()
            pending.append(setting)

        def after_update(*_: object) -> None:
            if not pending:
                raise EvidenceError(
                    "the parameters were updated, but the optimizer's step hook did not run: another "
                    "optimizer.attach_step_hook call replaced it, and with it Opacus's accountant; call "
                    "the previous optimizer.step_hook from your hook"
                )
            setting = pending.pop()
            pending.clear()
            versions[:] = self._versions()
            self.tally.stepped(setting)
            self._check_history_grows()
            after_step(setting)

        self.optimizer.add_noise = add_noise
        self.optimizer.attach_step_hook(before_update)
        handle = self.optimizer.original_optimizer.register_step_post_hook(after_update)

        def unwatch() -> None:
            handle.remove()
            if self.optimizer.step_hook is before_update:
                self.optimizer.attach_step_hook(accountant_hook)
            if own_noise is None:
                vars(self.optimizer).pop("add_noise", None)
            else:
                self.optimizer.add_noise = own_noise
            unwatch_clipping()
            unwatch_images()
            unwatch_sampler()

        return unwatch

    def _count_clipping(
        self, setting: StepSetting, drawn: NDArray[np.int64] | None, *, individually: bool
    ) -> None:
        """Hold how the gradients of the step under way were clipped against its setting and its batch."""
        sound = [piece for piece in self._pieces if piece.max_grad_norm == setting.max_grad_norm]
        gradients = sum(len(piece.norms) for piece in self._pieces)
        kept = sum(len(piece.norms) for piece in sound)
        self.tally.gradients += gradients
        self.tally.misclipped += gradients - kept
        known = [piece.positions for piece in self._pieces if piece.positions is not None]
        if (
            individually
            and drawn is not None
            and np.array_equal(np.concatenate([drawn[:0], *known]), drawn)
        ):
            self.tally.at_levels += kept

    def _versions(self) -> list[int]:
        return [p._version for p in self.module.parameters()]

    def _check_trained(self) -> None:
        """Raise where the update under way would apply a gradient that Opacus left out, or train what was not there."""
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            if p.requires_grad and id(p) not in self._trained:
                raise EvidenceError(
                    f"the optimizer trains a parameter of shape {tuple(p.shape)} that it did not train when the Recorder was "
                    "attached: its gradient is in no norm; add or unfreeze parameters before attaching"
                )
            if not p.requires_grad and p.grad is not None and bool(p.grad.any()):
                raise EvidenceError(
                    f"a parameter of shape {tuple(p.shape)} was frozen after the backward pass: Opacus leaves its gradient out "
                    "of clipping and noise, and the update would apply it as it is; freeze parameters between steps, and call "
                    "optimizer.zero_grad() first"
                )

    def _watch_sampler(self) -> Callable[[], None]:
        sampler, tally, run = self._batch_sampler, self.tally, self
        plain = type(sampler)

        class Watched(plain):  # type: ignore[misc, valid-type] # a DataLoader's batch_sampler cannot be reassigned
            def __iter__(self) -> Iterator[list[int]]:
                run._end_epoch(exhausted=state["exhausted"])
                state["exhausted"] = False
                for indices in super().__iter__():
                    tally.drew(indices, run.sample_rate)
                    run._watch_randomness(run._coins, run._coin_generator)
                    yield indices
                state["exhausted"] = True

        state = {"exhausted": False}
        Watched.__name__, Watched.__qualname__ = plain.__name__, plain.__qualname__
        sampler.__class__ = Watched

        def unwatch() -> None:
            sampler.__class__ = plain
            run._end_epoch(exhausted=state["exhausted"])

        return unwatch

    def _end_epoch(self, *, exhausted: bool) -> None:
        optimizer, loader = self.optimizer, self.loader
        self._pieces.clear()
        self.tally.end_epoch(
            exhausted=exhausted,
            planned=len(self._batch_sampler),
            prefetched=loader.num_workers * (loader.prefetch_factor or 0),
            interrupted=bool(optimizer._step_skip_queue or optimizer._is_last_step_skipped),
        )

    def _check_history_grows(self) -> None:
        if (
            self.accountant is not None
            and self.tally.steps == 1
            and self._history_steps() <= self._history_before
        ):
            raise EvidenceError(
                "Opacus's accountant did not count the first step: its get_epsilon would report too little; make the "
                "optimizer with make_private again"
            )

    def evidence(self) -> dict[str, Any]:
        """Counts up to now, for the log."""
        tally = self.tally
        return {
            "sampler": self.sampler,
            "sampler_class": self.sampler_class,
            "guessable_seed": self.guessable_seed,
            "steps": tally.steps,
            "draws": tally.draws,
            "expected_participations": tally.expected,
            "participations": int(tally.participations.sum()),
            "participations_min": int(tally.participations.min()),
            "participations_max": int(tally.participations.max()),
            "participations_variance": tally.variance,
            "participations_spread": float(
                np.square(tally.participations - tally.expected / len(tally.participations)).sum()
            ),
            "undrawn_steps": tally.undrawn_steps,
            "unstepped_draws": tally.unstepped_draws,
            "peeks": tally.peeks,
            "passes": tally.passes,
            "dropped_batches": tally.dropped_batches,
            "interrupted_batches": tally.interrupted_batches,
            "unmatched_steps": tally.unmatched_steps,
            "gradients": tally.gradients,
            "misclipped_gradients": tally.misclipped,
            "gradients_at_levels": tally.at_levels,
            "compared_norms": tally.compared,
            "larger_norms": tally.larger,
            "largest_excess": min(tally.largest_excess, 1.0),
            "larger_clipped_norms": tally.larger_clipped,
            "underestimated_norms": tally.underestimated,
            "clip_excess": self._clip_excess,
            "clip_rounding": self._clip_rounding,
            "changed_outside": tally.changed_outside,
            "repeated_draws": tally.repeated_draws,
            "earlier_steps": max(0, self._history_before - self._steps_before),
            "accountant_steps": None
            if self.accountant is None
            else self._history_steps() - self._history_before,
            "accountant_settings_match": self._history_matches(),
        }

    def _history_steps(self) -> int:
        return (
            0 if self.accountant is None else sum(steps for _, _, steps in self.accountant.history)
        )

    def _history_matches(self) -> bool:
        """Whether the accountant's history ends with the steps counted here, at no smaller sampling rate."""
        if self.accountant is None:
            return True
        counted: Counter[float] = Counter()
        skip = self._history_before
        for noise_multiplier, sample_rate, steps in self.accountant.history:
            new = max(0, steps - skip)
            skip = max(0, skip - steps)
            if new and sample_rate < self.sample_rate * (1 - 1e-9):
                return False
            counted[float(noise_multiplier)] += new
        return +counted == self.tally.settings


def _joined(pieces: list[ClippedBatch]) -> Tensor:
    return (
        torch.cat([piece.norms for piece in pieces])
        if pieces
        else torch.zeros(0, dtype=torch.float64)
    )
