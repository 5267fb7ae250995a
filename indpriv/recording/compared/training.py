"""Compares a run with its own recomputation while it trains; what differs is a finding.

What flows: a pre-hook of the user's module keeps what is fed, a hook keeps the outputs and gives
the loop aliases of them, whose gradients are those of the loss; once Opacus has clipped the batch,
these are compared with loss_fn's, and at drawn steps everything is repeated (`Replay`); the
gradient is compared as the inner optimizer takes it, the state between steps, the update and the
settings. Nothing here may change training: its random state is put back, and an error in a
comparison is a finding, "not compared".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from opacus.grad_sample import GradSampleModuleExpandedWeights
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from indpriv._arrays import IntArray
from indpriv._facts import text
from indpriv.norm_log.fields import StepSetting
from indpriv.recording.clipping.rules import AdaClip
from indpriv.recording.compared.deliveries import Deliveries
from indpriv.recording.compared.findings import UNKNOWN, Budget, Findings
from indpriv.recording.compared.outputs import Call, LossComparison
from indpriv.recording.compared.replay import Replay, sum_differs
from indpriv.recording.compared.settings import PublicSettings, Settings
from indpriv.recording.compared.state import PublishedState, attributes, held_in
from indpriv.recording.norms.batches import LossFn, map_tensors, same_values, tensors_of
from indpriv.recording.norms.shadow_model import autocast_now
from indpriv.recording.opacus.gradients import ClippedBatch, replaced_methods
from indpriv.recording.opacus.ranks import Ranks, local
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.random_states import kept_random_state, random_state
from indpriv.recording.training_data import Examples

_OF_A_BATCH = ("fed", "loss", "loss_function", "replay", "alone")


class _Hook(partial[Any]):
    """A hook of the model in training; copies of the model, pickled ones too, do nothing there."""

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    """What a copy of a hook does."""


class Comparison:
    """Comparisons of one session, inside the block of `comparing`.

    Attributes:
        findings: what they found.
        budget: which of them are made at the current step.
        same_state: nothing wrote to what is published since the last update, as far as known.
    """

    def __init__(
        self,
        run: OpacusRun,
        examples: Examples,
        loss_fn: LossFn,
        public_settings: PublicSettings | None,
        first_step: int,
        ranks: Ranks,
        expected: Callable[[int], IntArray | None],
    ) -> None:
        """Prepare; expected: positions of the next rows to train on, given their number."""
        self._run, self._ranks, self._expected = run, ranks, expected
        self.findings = Findings()
        self.budget = Budget(next(run.module.parameters()).device.type)
        self._deliveries = Deliveries(run.batch_sampler, examples, self.findings)
        self._loss = LossComparison(loss_fn)
        self._settings = Settings(run.optimizer, public_settings)
        self._state = PublishedState(run.module, run.optimizer.original_optimizer, self.findings)
        parameters = run.optimizer.params
        places = {id(p): k for k, p in enumerate(run.module.parameters())}
        in_module = [places[id(p)] for p in parameters]
        self._replay = Replay(self.findings, loss_fn, parameters, in_module, run.is_ghost)
        self._trained = [
            part
            for part in run.module.modules()
            if any(p.requires_grad for p in part.parameters(recurse=False))
        ]
        given = getattr(run.optimizer.add_noise, "__func__", run.optimizer.add_noise)
        self._own_noise = str(given.__module__).startswith(("opacus.", "indpriv."))
        self._step = first_step
        self._calls: list[Call] = []  # since gradients were clipped last
        self._sums: list[Tensor] | None = []  # of this step, recomputed; None if not known
        self._size = 0
        self._coming: list[Tensor] = []  # the gradient that the inner optimizer is to be given
        self._begun = self._half = self.same_state = False
        self._held: list[Any] | None = None  # attributes after the last forward pass
        self._setting: Any = None
        self._plain: list[str] | None = None  # arguments of the first pass that are no tensors

    @property
    def random_rows(self) -> bool:
        """Whether items of the data set were seen to be random."""
        return self._deliveries.random_rows

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Watch forward passes, the loader and the inner optimizer in the block."""
        run, inner = self._run, self._run.optimizer.original_optimizer
        # Expanded weights stand for the parameters inside the user's module.
        module = run.model if isinstance(run.model, GradSampleModuleExpandedWeights) else run.module
        handles = [
            # Before FSDP2's own, which makes the parameters whole.
            module.register_forward_pre_hook(
                _Hook(self._entering), prepend=run.whole.is_sharded, with_kwargs=True
            ),
            module.register_forward_hook(_Hook(self._leaving), with_kwargs=True),
            inner.register_step_pre_hook(self._taking),
        ]
        self._pre_hooks, self._last_hook = inner._optimizer_step_pre_hooks, handles[-1].id
        reduce = getattr(run.optimizer, "reduce_gradients", None)
        methods = {} if reduce is None else {"reduce_gradients": lambda: self._reduced(reduce)}
        with self._careful("state"):
            self._state.keep()  # nothing may change before the first forward pass either
        with self._careful("fed"):
            self._deliveries.compare_items()
        try:
            with self._deliveries.watching(), replaced_methods(run.optimizer, **methods):
                yield
        finally:
            for handle in handles:
                handle.remove()
            with self._careful("state"):
                self._state.compare("after the last update")
            with self._careful("fed"):
                self._deliveries.compare_items()
            self.findings.end_step()

    @contextmanager
    def _careful(self, *keys: str, kind: str = "every") -> Iterator[None]:
        """No error of a comparison may reach training, and what it draws is drawn apart."""
        with self.budget.spending(kind):
            try:
                yield
            except Exception as error:  # noqa: BLE001  # of model, loss or data
                said = " ".join(str(error).split())[:200]
                detail = f"not compared: {type(error).__name__}: {said}"
                for key in keys:
                    self.findings.add(key, UNKNOWN, detail)

    # Forward and backward passes

    def _is_training(self) -> bool:
        hooked = getattr(self._run.model, "hooks_enabled", True)
        return torch.is_grad_enabled() and hooked and any(p.training for p in self._trained)

    def _entering(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_training():
            return
        with self._careful(*_OF_A_BATCH):
            if not self._begun:
                self._begun, self.same_state = True, False
                self.budget.begin_step()
                if self.budget.every:
                    when = "between the last update and this forward pass"
                    self.same_state = self._state.compare(when)
                else:
                    self._state.keep(known=False)
            if any(call.gradients for call in self._calls):
                self._calls.clear()  # of a backward pass without a step
            if self._replay.counts_itself:  # after that it is not asked any more
                held = attributes(module) if self.budget.every else None
                self._replay.counts_itself = bool(held) and held == (self._held or held)
            if not self.budget.every:
                return
            fed = tensors_of((args, kwargs))
            delivered, intact = (
                self._deliveries.match(fed, self._expected) if fed else (None, False)
            )
            call = Call((args, kwargs), delivered, intact)
            self._calls.append(call)
            self._compare_plain(call)
            if self.budget.drawn:
                with self.budget.spending("drawn"), kept_random_state():
                    self._keep(call)

    def _compare_plain(self, call: Call) -> None:
        """Numbers among the arguments: the batch's own, or always the same."""
        given = _plain_of(call.arguments)
        if self._plain is None:
            self._plain = given
        loaded = [] if call.delivered is None else _plain_of(call.delivered.unpacked[0])
        if given not in (self._plain, loaded):
            self.findings.add("fed", UNKNOWN, text("check.fed", "arguments", one=given[0]))

    def _keep(self, call: Call) -> None:
        """Keep all that it takes to repeat a forward pass."""
        module = self._run.module
        call.random_state = random_state()
        call.arguments = map_tensors(call.arguments, lambda t: t.detach().clone())
        call.precision = autocast_now(next(module.parameters()).device.type)
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
            ghost, model = self._run.is_ghost, self._run.model
            seen = call.came_out(outputs, lambda: ghost and not model.hooks_enabled)
        with self._careful("state"):
            self._state.compare("inside the forward pass", but_buffers=True)
            if self._replay.counts_itself:
                self._held = attributes(module)
        return seen

    def clipped(self, batch: ClippedBatch) -> None:
        """A micro-batch was clipped: compare what went through the model with it."""
        calls = [call for call in self._calls if call.gradients or call.inside]
        self._calls.clear()
        self._size += len(batch.norms)
        if not self.budget.every and batch.positions is not None:
            self._deliveries.skip(batch.positions)  # or batches that are not compared pile up
        if not self.budget.every or not len(batch.norms):
            return
        with self._careful(*_OF_A_BATCH):
            if len(calls) != 1 or calls[0].delivered is None:
                one = len(calls) == 1
                detail = text("check.fed", "not_loaded" if one else "passes", n=len(calls))
                self._sums = None
                for key in _OF_A_BATCH:
                    self.findings.add(key, UNKNOWN, detail)
                return
            call = calls[0]
            self._deliveries.compare_fed(call.loaded.ids, batch.positions, call.intact)
            if [t._version for t in tensors_of(call.outputs)] != call.versions:
                self.findings.add("loss", UNKNOWN, text("check.loss", "in_place"))
            else:
                factors = batch.factors if self._run.is_ghost else None
                is_mean = self._run.optimizer.loss_reduction == "mean"
                with kept_random_state():
                    found = self._loss.difference(call, len(batch.norms), is_mean, factors)
                self.findings.compare("loss", not found, found)
        if self.budget.drawn:
            self._repeat(call, batch)

    def _repeat(self, call: Call, batch: ClippedBatch) -> None:
        with self._careful("replay", "alone", "loss_function", kind="drawn"):
            rule, sums, self._sums = self._run.optimizer, self._sums, None
            transforms = rule.transforms() if isinstance(rule, AdaClip) else ()
            found = self._replay.compare(call, batch, transforms)
            self._half |= self._replay.is_half(call)
            if self._run.is_ghost and not self._run.whole.is_sharded:
                self._compare_sum(found, [p.grad for p in rule.params], len(batch.norms))
            elif sums is not None:
                self._sums = list(torch._foreach_add(sums, found)) if sums else found
        with self._careful("rows", kind="drawn"), kept_random_state():
            self._deliveries.compare_rows(call.loaded)
        with self._careful("fed", kind="drawn"):
            self._deliveries.compare_items()

    def _compare_sum(self, found: Sequence[Tensor], own: Any, size: int) -> None:
        detail = sum_differs(found, own, float(self._run.optimizer.max_grad_norm), size, self._half)
        self.findings.compare("replay", not detail, detail)

    # The update

    def before_noise(self) -> None:
        """Gradients are summed up: compare the sum of a drawn step."""
        sums, self._sums = self._sums, []
        size, self._size = self._size, 0
        if not self.budget.drawn:
            return
        with self._careful("replay", kind="drawn"):
            if self._run.whole.is_sharded:
                self._compare_sum_of_ranks(sums, size)
            elif sums and not self._run.is_ghost:
                own = [getattr(p, "summed_grad", None) for p in self._run.optimizer.params]
                self._compare_sum(sums, own, size)

    def _compare_sum_of_ranks(self, sums: list[Tensor] | None, size: int) -> None:
        """FSDP2 has added up the ranks' sums, and divided by their number."""
        optimizer, ranks = self._run.optimizer, self._ranks
        if not all(ranks.gather("the sum of a step", sums is not None)):
            return
        held = list(self._run.whole.module.parameters())
        found = sums or [torch.zeros_like(held[k]) for k in self._replay.in_module]
        for part in found:
            dist.all_reduce(part)
        taken = [optimizer.grad_state[p]["summed_grad"].full_tensor() for p in optimizer.params]
        self._compare_sum(found, torch._foreach_mul(taken, ranks.size), size)

    def after_noise(self) -> None:
        """The gradient that the inner optimizer is to be given is the noisy one, scaled."""
        self._coming = []
        if not self.budget.every:
            return
        with self._careful("gradient_taken"):
            optimizer = self._run.optimizer
            if not self._own_noise:
                self.findings.add("gradient_taken", UNKNOWN, text("check.gradient_taken", "noise"))
            divisor = optimizer.expected_batch_size if optimizer.loss_reduction == "mean" else 1.0
            noisy = [local(p.grad) for p in optimizer.params]
            self._coming = list(torch._foreach_div(noisy, float(divisor)))

    def before_step(self, setting: StepSetting) -> None:
        """Called in the optimizer's step hook: settings are those of the step."""
        self._setting, optimizer = setting, self._run.optimizer
        of_rule = type(optimizer).scale_grad is not DPOptimizer.scale_grad
        if self._coming and of_rule and "scale_grad" not in vars(optimizer):
            self._coming = [p.grad.clone() for p in optimizer.params]
        self._pre_hooks.move_to_end(self._last_hook)  # other hooks may not follow ours

    def _reduced(self, reduce: Callable[[], None]) -> None:
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
            self.findings.compare("gradient_taken", same, text("check.gradient_taken", "other"))

    def _taking(self, *_: Any) -> None:
        """The last moment before parameters move."""
        self._compare_gradient()
        self._coming = []
        with self._careful("settings"):
            moved = self._settings.moved(self._step, self._setting)
            self.findings.compare("settings", not moved, moved, UNKNOWN)
        if self.budget.every:
            with self._careful("state"):
                self._state.compare("between the forward pass and the update")
        if self.budget.drawn:
            with self._careful("step", kind="drawn"):
                self._state.copy_optimizer()

    def updated(self) -> list[str]:
        """The parameters moved; return keys of what was found for the first time."""
        if self._state.is_copied:
            with self._careful("step", kind="drawn"):
                self._state.repeat_step()
        self._deliveries.end_step()
        self.budget.end_step()
        if self._run.whole.is_sharded:  # all ranks repeat the same steps
            coins = self._ranks.gather("the end of a step", (self.budget.every, self.budget.drawn))
            self.budget.every, self.budget.drawn = coins[0]
        self._begun = False
        with self._careful("state"):
            self._state.keep(known=self.budget.every)
        self._step += 1
        return self.findings.end_step()


def _plain_of(value: Any) -> list[str]:
    """Numbers and texts in nested containers, sorted."""
    leaves = torch.utils._pytree.tree_leaves(value)
    held = [vars(leaf) for leaf in leaves if is_dataclass(leaf)]  # whose tensors are fed
    plain = [one for one in leaves if not (isinstance(one, Tensor) or is_dataclass(one))]
    return sorted([repr(held_in(one)) for one in plain] + (_plain_of(held) if held else []))
