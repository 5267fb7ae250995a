"""Watches a run while it trains: counts what happens, and compares it with its recomputation.

What flows: each draw of the sampler is counted. A pre-hook of the user's module keeps what is fed,
a hook keeps the outputs and gives the loop aliases of them, whose gradients are those of the loss;
once Opacus has clipped the batch, these are compared with loss_fn's, and at drawn steps everything
is repeated (`Replay`). The noise is measured, the gradient is compared as the inner optimizer takes
it, the state between steps, the update and the settings. Nothing here may change training: its
random state is put back, and an error in a comparison is a finding, "not compared". Sensitive.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from opacus.grad_sample import GradSampleModuleExpandedWeights
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from indpriv._facts import damaged, text
from indpriv._types import IntArray
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.session_counts import DrawCounts, NoiseCounts, TrainingCounts
from indpriv.recording.attacks import RunAttack
from indpriv.recording.clipping import AdaClip, ClippingRule
from indpriv.recording.compared import updates
from indpriv.recording.compared.calls import Call, Deliveries, LossComparison, relative
from indpriv.recording.compared.findings import Budget, Findings, worst_of
from indpriv.recording.compared.replay import Replay
from indpriv.recording.norms.batches import LossFn, map_tensors, same_values, tensors_of
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.norms.shadow_model import autocast_now
from indpriv.recording.opacus import gradients
from indpriv.recording.opacus import run as of_run
from indpriv.recording.opacus.draws import OF_ONE_RANK, Draw, Tally, sampler_watched
from indpriv.recording.opacus.run import Batch, OpacusRun, Ranks, local
from indpriv.recording.random_states import kept_random_state, random_state, state_of
from indpriv.recording.training_data import Examples

_ADDING = "opacus.", "indpriv."  # whose add_noise has a known law
_SAME = 1e-3  # relative difference of losses at the same weights, by rounding
_OF_A_BATCH = ("fed", "loss", "loss_function", "replay", "alone")


class _Hook(partial[Any]):
    """A hook of the model in training; copies of the model, pickled ones too, do nothing there."""

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    """What a copy of a hook does."""


class Watch:
    """Counts and comparisons of one run, inside the block of `watching`."""

    def __init__(
        self,
        run: OpacusRun,
        examples: Examples,
        loss_fn: LossFn,
        ranks: Ranks,
        norm_pass: NormPass,
        *,
        public_settings: updates.PublicSettings | None = None,
        steps_before: int = 0,
        counts_before: Mapping[str, Any] = MappingProxyType({}),
        attack: RunAttack | None = None,
    ) -> None:
        """Prepare to watch a run; the log of a resumed one has steps, and counts at the last."""
        self._run, self._ranks, self._steps_before, self._attack = run, ranks, steps_before, attack
        optimizer, parameters = run.optimizer, run.optimizer.params
        self.tally = Tally(run.n_examples, resumed=steps_before > 0)
        self._micro_batches: list[gradients.ClippedBatch] = []  # of the current step
        if not run.is_ghost:  # where norms are not sums over a gradient
            self.tally.counts.clip_excess = gradients.clip_excess(optimizer)
        self.tally.counts.moved = self.tally.counts.unmoved = 0
        self._noise = gradients.NoiseWatch(parameters, getattr(optimizer, "grad_state", None))
        self._noised: StepSetting | None = None  # at which noise was added to the current step
        self.limits: tuple[float, ...] = ()  # clipping norms per layer, when noise was added
        self.with_norms = True  # the coming step needs the norms that training clips
        self._updating: StepSetting | None = None  # of the update that has begun
        self._versions: list[int] = []  # of the parameters, as the last update left them

        self.findings = Findings()
        self.news: list[str] = []  # keys of what was not equal at the last step, for the first time
        self._others: list[of_run.RankStep] = []  # what other ranks saw up to the last step
        self._budget = Budget(next(run.module.parameters()).device.type)
        stored = counts_before.get("items")
        self.deliveries = Deliveries(run.batch_sampler, examples, self.findings, stored)
        self._loss = LossComparison(loss_fn)
        self._settings = updates.Settings(run, public_settings, counts_before.get("settings"))
        self._state = updates.PublishedState(
            run.module, optimizer.original_optimizer, self.findings
        )
        if steps_before:
            with self._careful("state", kind="once"):
                self._state.compare_weights(counts_before, steps_before)
        self._norm_pass = norm_pass
        self._losses = counts_before.get("losses_after") or norm_pass.held_still()
        if steps_before:
            self._compare_losses("resumed")
        places = {id(p): k for k, p in enumerate(run.module.parameters())}
        in_module = [places[id(p)] for p in parameters]
        self._replay = Replay(self.findings, loss_fn, parameters, in_module, run.is_ghost)
        self._trained = [
            part
            for part in run.module.modules()
            if any(p.requires_grad for p in part.parameters(recurse=False))
        ]
        self._given_noise = getattr(optimizer.add_noise, "__func__", optimizer.add_noise)
        self._calls: list[Call] = []  # since gradients were clipped last
        self._sums: list[Tensor] | None = []  # of this step, recomputed; None if not known
        self._coming: list[Tensor] = []  # the gradient that the inner optimizer is to be given
        self._begun = self._same_state = False  # nothing wrote to the state since the last update
        self._held: list[Any] | None = None  # attributes after the last forward pass
        self._seeds = set[int]()  # of torch's default generator, at forward passes
        self._thread, self._aside = threading.get_ident(), False  # batches were drawn in another
        # How the model was called first: numbers, names and autocast; of tensors, see `places`.
        self._first: tuple[list[str], Any, Sequence[set[int]]] | None = None

    @contextmanager
    def watching(
        self,
        before_step: Callable[[StepSetting, Batch | None], None],
        after_step: Callable[[StepSetting], None],
        *,
        thresholds: gradients.Thresholds | None,
    ) -> Iterator[None]:
        """Count and compare every draw, micro-batch and step of the block.

        before_step is called before each parameter update with its setting and the batch of all
        ranks, None if what was clipped is not what was drawn; after_step after it. thresholds are
        for individual clipping.
        """
        run, optimizer = self._run, self._run.optimizer
        inner = optimizer.original_optimizer
        self._versions = run.parameter_versions()
        accountant_hook = optimizer.step_hook

        def step_hook(optimizer: Any) -> None:
            if accountant_hook is not None:
                # Opacus has one slot: without this call its accountant would stop, with no warning.
                accountant_hook(optimizer)
            setting, drawn = self._begin_update(thresholds is not None)
            step = self._steps_before + self.tally.counts.steps
            before_step(setting, self.exchange(f"step {step}", setting, drawn))
            of_rule = type(optimizer).scale_grad is not DPOptimizer.scale_grad
            if self._coming and of_rule and "scale_grad" not in vars(optimizer):
                self._coming = [p.grad.clone() for p in optimizer.params]
            inner._optimizer_step_pre_hooks.move_to_end(taking.id)  # others may not follow ours
            self._micro_batches.clear()
            self._updating = setting

        # Expanded weights stand for the parameters inside the user's module.
        expanded = isinstance(run.model, GradSampleModuleExpandedWeights)
        module = run.model if expanded else run.module
        add_noise = partial(self._add_noise, optimizer.add_noise)
        own: dict[str, Any] = {"step_hook": step_hook, "add_noise": add_noise}
        if reduce := getattr(optimizer, "reduce_gradients", None):
            own["reduce_gradients"] = partial(self._reduce, reduce)
        with ExitStack() as stack:
            n_canaries = 0 if self._attack is None else self._attack.n_canaries
            draws = self._before_draw, self._on_draw, self._on_epoch_end
            stack.enter_context(sampler_watched(run.batch_sampler, n_canaries, *draws))
            self._fixed = run.fixed  # with canaries
            asked = self.tally.micro_batch, self._on_micro_batch, thresholds
            stack.enter_context(
                gradients.ClippingWatch(run.model, run.clipper, optimizer, *asked).watching()
            )
            stack.enter_context(patch.multiple(optimizer, **own))
            # Before FSDP2's own, which makes the parameters whole.
            first, entering = run.whole.is_sharded, _Hook(self._entering)
            for handle in (
                module.register_forward_pre_hook(entering, prepend=first, with_kwargs=True),
                module.register_forward_hook(_Hook(self._leaving), with_kwargs=True),
                taking := inner.register_step_pre_hook(self._taking),
                updated := inner.register_step_post_hook(lambda *_: after_step(self._end_update())),
            ):
                stack.callback(handle.remove)
            inner._optimizer_step_post_hooks.move_to_end(updated.id, last=False)
            with self._careful("state"):
                self._state.keep()  # nothing may change before the first forward pass either
            self._compare_data_set()
            stack.callback(self._end)
            stack.enter_context(self.deliveries.watching())
            yield

    def _compare_losses(self, case: str) -> None:
        """Losses of the same few examples as before, at the same weights."""
        before, self._losses = self._losses, self._norm_pass.held_still()
        off = relative(torch.tensor(self._losses), torch.tensor(before))
        if off > max(_SAME, self._norm_pass.slack):
            self.findings.add("replay", case)

    def _end(self) -> None:
        with self._careful("state"):
            self._state.compare("after the last update")
        with self._careful("settings"):
            if later := self._settings.moved_later(self.coming_setting()):
                self.findings.add("settings", "later", names=", ".join(later))
        self._compare_data_set()
        self.findings.end_step()

    def _compare_data_set(self) -> None:
        with self._careful("fed", kind="once"):
            self.deliveries.compare_items(every=True)

    @contextmanager
    def _careful(self, *keys: str, kind: str = "every") -> Iterator[None]:
        """No error of a comparison may reach training, and what it draws is drawn apart."""
        with self._budget.spending(kind):
            try:
                yield
            except Exception as error:  # noqa: BLE001  # of model, loss or data
                said = " ".join(str(error).split())[:200]
                why = f"not compared: {type(error).__name__}: {said}"
                self.findings.not_compared(keys, why)

    # Draws

    def _before_draw(self, new_epoch: bool) -> None:
        if self._run.is_poisson:  # others draw an epoch at once
            self._note_moved("batches", new_epoch=new_epoch)

    def _on_draw(self, positions: IntArray, canaries: IntArray, trains: bool) -> None:
        run, own = self._run, torch.default_generator
        if threading.get_ident() != self._thread:  # while this one may put its state back
            self._aside |= own in (run.sources.batches, run.sources.noise)
        if run.fixed != self._fixed:
            self.findings.add("settings", "sampler")
        if trains:
            self.tally.drew(Draw(positions, run.sample_rate, canaries))
        if run.is_poisson:
            run.sources.leave("batches")
            self.tally.counts.repeated_draws += not self._aside and run.sources.repeated("batches")

    def _on_epoch_end(self, exhausted: bool, final: bool) -> None:
        optimizer, loader = self._run.optimizer, self._run.loader
        interrupted = bool(optimizer._step_skip_queue or optimizer._is_last_step_skipped)
        if interrupted or not exhausted:  # else a step may have begun, where a thread loads ahead
            self._micro_batches.clear()
        self.tally.end_epoch(
            exhausted=exhausted,
            planned=len(self._run.batch_sampler),
            prefetched=loader.num_workers * (loader.prefetch_factor or 0),
            interrupted=interrupted,
            final=final,
        )

    def _note_moved(self, kind: str, *, new_epoch: bool = False) -> None:
        moved = self._run.sources.moved(kind, new_epoch=new_epoch)
        self.tally.counts.moved = (self.tally.counts.moved or 0) + moved

    # Forward and backward passes

    def _is_training(self) -> bool:
        hooked = getattr(self._run.clipper, "hooks_enabled", True)
        return torch.is_grad_enabled() and hooked and any(p.training for p in self._trained)

    def _entering(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_training():
            return
        budget, replay = self._budget, self._replay
        with self._careful(*_OF_A_BATCH):
            if not self._begun:
                if not self.tally.counts.steps:
                    self._compare_losses("moves")  # since the Recorder was attached
                self._begun, self._same_state = True, False
                budget.begin_step()
                if budget.every:
                    when = "between the last update and this forward pass"
                    self._same_state = self._state.compare(when)
                else:
                    self._state.keep(known=False)
            elif budget.every:
                self._state.compare("between two forward passes of a step")
            if any(call.gradients for call in self._calls):
                self._calls.clear()  # of a backward pass without a step
            if replay.counts_itself:  # after that it is not asked any more
                held = updates.attributes(module) if budget.every else None
                replay.counts_itself = bool(held) and held == (self._held or held)
            if not budget.every:
                return
            fed = tensors_of((args, dict(sorted(kwargs.items()))))
            found = self.deliveries.match(fed, self.tally.micro_batch) if fed else (None, [])
            call = Call((args, kwargs), *found)
            self._calls.append(call)
            self._seeds.add(torch.initial_seed())
            if len(self._seeds) > self.tally.counts.passes + 2:  # a few, by the epoch
                self.findings.add("fed", "seeds")
            if self._aside:
                self.findings.add("fed", "aside")
            call.precision = autocast_now(next(module.parameters()).device.type)
            self._compare_manner(call)
            if budget.drawn:
                with budget.spending("drawn"), kept_random_state():
                    self._keep(call)

    def _compare_manner(self, call: Call) -> None:
        """How the model was called, beside how it was called first, as what training saw may say.

        Numbers among the arguments may also be the batch's own.
        """
        args, kwargs = call.arguments
        plain, named = _plain_of(call.arguments), [kwargs, *args, *kwargs.values()]
        keys = [sorted(map(str, one)) for one in named if isinstance(one, Mapping)]
        manner = len(args), keys, call.precision.keywords
        first = self._first = self._first or (plain, manner, call.places)
        loaded = [] if call.delivered is None else _plain_of(call.delivered.unpacked[0])
        if plain not in (first[0], loaded):
            self.findings.add("fed", "arguments", one=(plain or first[0])[0])
        places = [mine & theirs for mine, theirs in zip(call.places, first[2], strict=False)]
        if manner != first[1] or not all(places):
            self.findings.add("fed", "manner")
        self._first = *first[:2], places or first[2] or call.places

    def _keep(self, call: Call) -> None:
        """Keep all that it takes to repeat a forward pass."""
        module = self._run.module
        call.random_state = random_state()
        call.arguments = map_tensors(call.arguments, lambda t: t.detach().clone())
        call.twin = self._run.whole.copy()
        for mine, theirs in zip(call.twin.modules(), module.modules(), strict=True):
            mine.training = theirs.training

    def _leaving(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        if not self._calls or self._calls[-1].outputs is not None or not self._is_training():
            return None
        seen = None
        with self._careful("loss"):
            call = self._calls[-1]
            if call.twin is None:
                call.arguments = None
            ghost, clipper = self._run.is_ghost, self._run.clipper
            seen = call.came_out(outputs, lambda: ghost and not clipper.hooks_enabled)
        with self._careful("state"):
            self._state.compare("inside the forward pass", but_buffers=not self._micro_batches)
            if self._replay.counts_itself:
                self._held = updates.attributes(module)
        return seen

    def _on_micro_batch(self, batch: gradients.ClippedBatch) -> None:
        """Count a micro-batch that was clipped, and compare the forward pass behind it."""
        calls = [call for call in self._calls if call.gradients or call.inside]
        self._calls.clear()
        self.tally.clipped.append(len(batch.norms))
        counts, budget = self.tally.counts, self._budget
        counts.clip_rounding = max(counts.clip_rounding, batch.rounding)
        self._micro_batches.append(batch)
        if not budget.every and batch.positions is not None:
            self.deliveries.skip(batch.positions)  # or batches that are not compared pile up
        if not budget.every or not len(batch.norms):
            return
        with self._careful(*_OF_A_BATCH):
            if len(calls) != 1 or calls[0].delivered is None:
                self._sums = None
                why = text("check.fed", "not_loaded" if len(calls) == 1 else "passes", n=len(calls))
                return self.findings.not_compared(_OF_A_BATCH, why)
            self._compare_batch(calls[0], batch)
        if budget.drawn:
            self._repeat(calls[0], batch)

    def _compare_batch(self, call: Call, batch: gradients.ClippedBatch) -> None:
        """Rows that were fed beside the next that were drawn; gradients of the loss."""
        ids = call.delivered.ids
        if batch.positions is None or not np.array_equal(ids, batch.positions):
            self.findings.add("fed", "other_rows")
        elif len(np.unique(ids)) < len(ids):
            self.findings.add("fed", "twice")
        else:
            intact = call.places and not call.delivered.is_changed
            self.findings.add("fed", "" if intact else "changed")
            with kept_random_state():
                self.deliveries.compare_known(call.delivered)
        if call.is_written:
            return self.findings.add("loss", "in_place")
        factors = batch.factors if self._run.is_ghost else None
        is_mean = self._run.optimizer.loss_reduction == "mean"
        with kept_random_state():
            case, values = self._loss.case(call, len(batch.norms), is_mean, factors)
        self.findings.add("loss", case, **values)

    def _repeat(self, call: Call, batch: gradients.ClippedBatch) -> None:
        with self._careful("replay", "alone", "loss_function", kind="drawn"):
            rule, sums, self._sums = self._run.optimizer, self._sums, None
            transforms = rule.transforms() if isinstance(rule, AdaClip) else ()
            found = self._replay.compare(call, batch, transforms)
            if sums is not None:
                self._sums = list(torch._foreach_add(sums, found)) if sums else found
        with self._careful("rows", kind="drawn"), kept_random_state():
            self.deliveries.compare_rows(call.delivered)
        with self._careful("fed", kind="drawn"):
            self.deliveries.compare_items(every=False)

    # The noise

    def _add_noise(self, add_noise: Callable[[], None]) -> None:
        """Let Opacus add the noise: compare the sum before, and measure what is added."""
        run, optimizer, counts = self._run, self._run.optimizer, self.tally.counts
        self._compare_whole_sum()
        attack, waiting, setting = self._attack, self.tally.waiting, self.coming_setting()
        if attack and not waiting:
            raise damaged("refusal.training", "other_batch")
        if attack and waiting:
            attack.before_noise(setting, waiting)
        self._noise.before()
        before = state_of(run.sources.noise)
        if not isinstance(optimizer, ClippingRule):  # which draws from it in between
            self._note_moved("noise")
        add_noise()
        run.sources.leave("noise")
        draws = run.noise_std and run.whole.adds_noise(optimizer)
        now = state_of(run.sources.noise)
        still = before is not None and now is not None and torch.equal(before, now)
        counts.unmoved = (counts.unmoved or 0) + bool(draws and still)
        counts.guessable_seed |= run.sources.is_guessable
        # Now, since another step hook may change settings before it calls ours.
        self._noised, self.limits = self.coming_setting(), run.limits
        if getattr(optimizer, "rank", 0) == 0:  # of several shards, the first is watched
            self._noise.after(run.noise_std / run.whole.noise_divisor(optimizer))
        if attack and waiting:
            attack.after_noise(setting, waiting)
        self._coming = []
        if not self._budget.every:
            return
        with self._careful("gradient_taken"):
            given = self._given_noise
            drawing = getattr(given, "__globals__", {}).get("_generate_noise", given)
            if not all(str(f.__module__).startswith(_ADDING) for f in (given, drawing)):
                self.findings.add("gradient_taken", "noise")
            divisor = optimizer.expected_batch_size if optimizer.loss_reduction == "mean" else 1.0
            noisy = [local(p.grad) for p in optimizer.params]
            self._coming = list(torch._foreach_div(noisy, float(divisor)))

    def _compare_whole_sum(self) -> None:
        """Gradients are summed up: compare the sum of a drawn step."""
        (sums, self._sums), run = (self._sums, []), self._run
        if not self._budget.drawn:
            return
        size, optimizer = sum(len(b.norms) for b in self._micro_batches), run.optimizer
        with self._careful("replay", kind="drawn"):
            if run.whole.is_sharded:
                # FSDP2 has added up the ranks' sums, and divided by their number.
                if not all(self._ranks.gather("the sum of a step", sums is not None)):
                    return
                held = list(run.whole.module.parameters())
                found = sums or [torch.zeros_like(held[k]) for k in self._replay.in_module]
                for part in found:
                    dist.all_reduce(part)
                state: Any = getattr(optimizer, "grad_state", None)
                taken = [state[p]["summed_grad"].full_tensor() for p in optimizer.params]
                whole = torch._foreach_mul(taken, self._ranks.size)
                self._replay.compare_sum(found, whole, optimizer, size)
            elif sums:
                own: Any = [getattr(p, "summed_grad", None) for p in optimizer.params]
                self._replay.compare_sum(sums, own, optimizer, size)

    # The update

    def coming_setting(self, max_grad_norm: float | None = None) -> StepSetting:
        """Settings of the step of the batch drawn next; max_grad_norm: see `OpacusRun.setting`."""
        waiting = self.tally.waiting if self._run.is_poisson else None
        rate = None if waiting is None else waiting.sample_rate
        return self._run.setting(sample_rate=rate, max_grad_norm=max_grad_norm)

    def _begin_update(self, individually: bool) -> tuple[StepSetting, Draw | None]:
        """Count an update that is about to be made; return its setting, and its batch if known."""
        run, counts, batches = self._run, self.tally.counts, self._micro_batches
        run.check_update()
        if run.whole.adds_noise(run.optimizer):
            counts.repeated_draws += not self._aside and run.sources.repeated("noise")
        drawn, whole = self.tally.next_batch()
        if self._noised is None:
            raise damaged("refusal.training", "add_noise")
        setting, self._noised = self._noised, None
        written = run.parameter_versions() != self._versions
        counts.changed_outside += written and not self._same_state
        size = sum(len(b.norms) for b in batches)
        sound = sum(len(b.norms) for b in batches if b.max_grad_norm == setting.max_grad_norm)
        counts.gradients += size
        counts.misclipped_gradients += size - sound
        if individually and drawn is not None:
            known = [batch.positions for batch in batches if batch.positions is not None]
            if np.array_equal(np.concatenate([drawn.positions[:0], *known]), drawn.positions):
                counts.gradients_at_levels += sound
        return setting, drawn if whole else None

    def exchange(
        self, moment: str, setting: StepSetting | None = None, drawn: Draw | None = None
    ) -> Batch | None:
        """Exchange what the ranks saw of a step, or of the end; return the batch if it is known."""
        shared = {**({} if setting is None else vars(setting)), **self._run.shared_by_ranks}
        norms = [torch.zeros(0, dtype=torch.float64), *(one.norms for one in self._micro_batches)]
        known = drawn is not None and self.with_norms
        mine = of_run.RankStep(
            tuple(self.tally.unsent),
            {name: getattr(self.tally.counts, name) for name in OF_ONE_RANK},
            None if drawn is None else drawn.positions,
            torch.cat([one.cpu() for one in norms]).numpy() if known else None,
            dict(self.findings.found),
        )
        self.tally.unsent.clear()
        seed = self._run.sources.seed_of_batches
        parts = self._ranks.gather(moment, mine, shared=shared, seed=seed)
        self._others = [part for rank, part in enumerate(parts) if rank != self._ranks.rank]
        for positions in (drawn for part in self._others for drawn in part.drawn):
            np.add.at(self.tally.participations, positions, 1)
        return of_run.whole_batch(moment, parts)

    def _reduce(self, reduce: Callable[[], None]) -> None:
        """Several ranks add up their gradients: compare before, and keep what comes of it."""
        self._compare_gradient()
        reduce()
        with self._careful("gradient_taken"):
            if self._coming:
                self._coming = [p.grad.clone() for p in self._run.optimizer.params]

    def _compare_gradient(self) -> None:
        with self._careful("gradient_taken"):
            if not self._coming:
                return
            taken = [p.grad for p in self._run.optimizer.params]
            same = all(
                t is not None and same_values(local(t), e)
                for t, e in zip(taken, self._coming, strict=True)
            )
            self.findings.add("gradient_taken", "" if same else "other")

    def _taking(self, *_: Any) -> None:
        """The last moment before parameters move."""
        self._compare_gradient()
        self._coming = []
        with self._careful("settings"):
            step, setting = self._steps_before + self.tally.counts.steps, self._updating
            if setting is not None:
                case, values = self._settings.case(step, setting)
                self.findings.add("settings", case, **values)
        if self._budget.every:
            with self._careful("state"):
                self._state.compare("between the forward pass and the update")
        if self._budget.drawn:
            with self._careful("step", kind="drawn"):
                self._state.copy_optimizer()

    def _end_update(self) -> StepSetting:
        """Count an update that was made; return its setting."""
        run, budget, (setting, self._updating) = self._run, self._budget, (self._updating, None)
        if setting is None:
            raise damaged("refusal.training", "replaced_hook")
        with self._careful("step", kind="drawn"):
            self._state.repeat_step()
        self.deliveries.end_step()
        budget.end_step()
        if run.whole.is_sharded:  # all ranks repeat the same steps
            coins = self._ranks.gather("the end of a step", (budget.every, budget.drawn))
            budget.every, budget.drawn = coins[0]
        self._begun = False
        with self._careful("state"):
            self._state.keep(known=budget.every)
        self.news = self.findings.end_step()
        self._versions = run.parameter_versions()
        self.tally.stepped(setting)
        counted = run.history.steps
        if self.tally.counts.steps == 1 and counted is not None and counted <= 0:
            raise damaged("refusal.training", "not_counted")
        return setting

    # What was seen

    def counts(self) -> tuple[DrawCounts, TrainingCounts, NoiseCounts | None]:
        """Counts up to now; None if nothing was measured of the noise."""
        tally, run, history = self.tally, self._run, self._run.history
        training = deepcopy(tally.counts)
        training.sampler_class = run.sampler_class
        if self.deliveries.random_rows:  # norms of training are of another draw than recorded ones
            training.forget_norms()
        training.compared = worst_of([self.findings.found, *(one.found for one in self._others)])
        for name in OF_ONE_RANK:
            total = sum(one.counts[name] for one in self._others)
            setattr(training, name, getattr(training, name) + total)
        training.guessable_seed |= run.sources.is_guessable
        training.source = str(run.sources)
        training.settings, training.items = self._settings.last, self.deliveries.stored
        with self._careful("state", kind="once"):
            training.weights = self._state.fingerprint()
        training.earlier_steps = max(0, history.steps_before - self._steps_before)
        training.accountant_steps = history.steps
        training.accountant_settings_match = history.matches(
            tally.noise_multipliers, run.sample_rate
        )
        return tally.draw_counts(), training, self._noise.counts()


def _plain_of(value: Any) -> list[str]:
    """Numbers and texts in nested containers, sorted."""
    leaves = torch.utils._pytree.tree_leaves(value)
    held = [vars(leaf) for leaf in leaves if is_dataclass(leaf)]  # whose tensors are fed
    plain = [one for one in leaves if not (isinstance(one, Tensor) or is_dataclass(one))]
    return sorted([repr(updates.held_in(one)) for one in plain] + (_plain_of(held) if held else []))
