"""Compares a run with its own recomputation while it trains; what differs is a finding.

What flows: a pre-hook of the user's module keeps what is fed, a hook keeps the outputs and gives
the loop aliases of them, whose gradients are those of the loss; once Opacus has clipped the batch,
these are compared with loss_fn's, and at drawn steps everything is repeated (`Replay`); the
gradient is compared as the inner optimizer takes it, the state between steps, the update and the
settings. Nothing here may change training: its random state is put back, and an error in a
comparison is a finding, "not compared".
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from opacus.grad_sample import GradSampleModuleExpandedWeights
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from indpriv._arrays import IntArray
from indpriv._facts import text
from indpriv.norm_log.step_settings import StepSetting
from indpriv.recording.clipping.rules import AdaClip
from indpriv.recording.compared.deliveries import Deliveries, collated
from indpriv.recording.compared.findings import EQUAL, REFUTED, UNKNOWN, Budget, Findings
from indpriv.recording.compared.outputs import Call, LossComparison, relative
from indpriv.recording.compared.prints import attributes, equal, held_in, print_of
from indpriv.recording.compared.replay import Replay, sum_differs
from indpriv.recording.compared.settings import PublicSettings, Settings
from indpriv.recording.norms.batches import LossFn, map_tensors, same_values, tensors_of
from indpriv.recording.norms.shadow_model import autocast_now
from indpriv.recording.opacus.clipping_watch import ClippedBatch, replaced_methods
from indpriv.recording.opacus.ranks import Ranks
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.opacus.whole_model import local
from indpriv.recording.random_states import kept_random_state, random_state, set_random_state
from indpriv.recording.training_data import Examples

_OF_A_BATCH = ("fed", "loss", "loss_function", "replay", "alone")
_SAME_STEP = 1e-6
_OFTEN = 12  # times that rows are read again to see whether they are random
_ROWS = 32  # of the data set, secret ones, that are read again


class _Hook(partial[Any]):
    """A hook of the model in training; copies of the model, pickled ones too, do nothing there."""

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    """What a copy of a hook does."""


class Comparison:
    """Comparisons of one session, inside the block of `comparing`."""

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
        self._ranks = ranks
        self.findings = Findings()
        self.budget = Budget(next(run.module.parameters()).device.type)
        self._run, self._expected = run, expected
        self._deliveries = Deliveries(run.batch_sampler, examples)
        self._loss = LossComparison(loss_fn)
        self._settings = Settings(run.optimizer, public_settings)
        parameters = run.optimizer.params
        places = {id(p): k for k, p in enumerate(run.module.parameters())}
        self._replay = Replay(
            self.findings, loss_fn, parameters, [places[id(p)] for p in parameters], run.is_ghost
        )
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
        self._noisy: list[Tensor] = []  # gradients with noise, as they were left
        self._divisor = 1.0
        self._state: Any = None  # after the last update or forward pass
        self._copy: Any = None  # of the inner optimizer, to repeat the step
        self._begun = self._half = self.same_state = False
        self._held: list[Any] | None = None  # attributes after the last forward pass
        self._setting: Any = None
        self._plain: list[str] | None = None  # arguments of the first pass that are no tensors
        count = min(len(examples), _ROWS)
        chosen = np.random.default_rng(secrets.randbits(128)).choice(len(examples), count, False)
        self._items = chosen, random_state(), list[Tensor]()  # positions, state, how they were
        self._examples = examples
        self._read_equal = False  # at some step, what the loader gave was read again
        self.random_rows = False  # items of the data set are random

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
        reduce = getattr(self._run.optimizer, "reduce_gradients", None)
        methods = {} if reduce is None else {"reduce_gradients": lambda: self._reduced(reduce)}
        with self._careful("state"):
            self._state = self._print()  # nothing may change before the first forward pass either
        with self._careful("fed"):
            self._compare_items()
        try:
            with self._deliveries.watching(), replaced_methods(self._run.optimizer, **methods):
                yield
        finally:
            for handle in handles:
                handle.remove()
            with self._careful("state"):
                self._compare_state("after the last update")
            with self._careful("fed"):
                self._compare_items()
            self.findings.end_step()

    @contextmanager
    def _careful(self, *keys: str, kind: str = "every") -> Iterator[None]:
        """No error of a comparison may reach training, and what it draws is drawn apart."""
        with self.budget.spending(kind):
            try:
                yield
            except Exception as error:  # noqa: BLE001  # of model, loss or data
                text = f"not compared: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                for key in keys:
                    self.findings.add(key, UNKNOWN, text)

    # Forward and backward passes

    def _is_training(self) -> bool:
        hooked = getattr(self._run.model, "hooks_enabled", True)
        return torch.is_grad_enabled() and hooked and any(p.training for p in self._trained)

    def _entering(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_training():
            return
        with self._careful(*_OF_A_BATCH):
            if not self._begun:
                self._begun = True
                self.budget.begin_step()
                if self.budget.every:
                    when = "between the last update and this forward pass"
                    self.same_state = self._compare_state(when)
                else:
                    self._state, self.same_state = None, False
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
            self._compare_state("inside the forward pass", but_buffers=True)
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
            self._compare_fed(call, batch)
            factors = batch.factors if self._run.is_ghost else None
            if [t._version for t in tensors_of(call.outputs)] != call.versions:
                self.findings.add("loss", UNKNOWN, text("check.loss", "in_place"))
            else:
                is_mean = self._run.optimizer.loss_reduction == "mean"
                with kept_random_state():
                    found = self._loss.difference(call, len(batch.norms), is_mean, factors)
                self.findings.compare("loss", not found, found)
        if self.budget.drawn:
            self._repeat(call, batch)

    def _compare_fed(self, call: Call, batch: ClippedBatch) -> None:
        ids = call.loaded.ids
        if batch.positions is None or not np.array_equal(ids, batch.positions):
            self.findings.add("fed", REFUTED, text("check.fed", "other_rows"))
        elif len(np.unique(ids)) < len(ids):
            self.findings.add("fed", REFUTED, text("check.fed", "twice"))
        else:
            self.findings.compare("fed", call.intact, text("check.fed", "changed"), UNKNOWN)

    def _repeat(self, call: Call, batch: ClippedBatch) -> None:
        with self._careful("replay", "alone", "loss_function", kind="drawn"):
            rule, sums, self._sums = self._run.optimizer, self._sums, None
            transforms = rule.transforms() if isinstance(rule, AdaClip) else ()
            found = self._replay.compare(call, batch, transforms)
            self._half |= self._replay.is_half(call)
            if self._run.is_ghost and not self._run.whole.is_sharded:
                own = [p.grad for p in rule.params]
                self._compare_sum(found, own, len(batch.norms))
            elif sums is not None:
                self._sums = list(torch._foreach_add(sums, found)) if sums else found
        with self._careful("rows", kind="drawn"), kept_random_state():
            self._compare_rows(call)
        with self._careful("fed", kind="drawn"):
            self._compare_items()

    def _compare_sum(self, found: Sequence[Tensor], own: Any, size: int) -> None:
        limit, half = float(self._run.optimizer.max_grad_norm), self._half
        detail = sum_differs(found, own, limit, size, half)
        self.findings.compare("replay", not detail, detail)

    def _compare_rows(self, call: Call) -> None:
        """Rows as loaded beside the data set's own items."""
        loaded = tensors_of(call.loaded.batch)
        if call.loaded.is_changed:
            return self.findings.add("rows", UNKNOWN, text("check.rows", "written"))
        state, first = random_state(), tensors_of(call.loaded.read_again())
        if equal(loaded, first):
            self._read_equal = True
            return self.findings.add("rows", EQUAL)
        set_random_state(state)
        again = (tensors_of(call.loaded.read_again()) for _ in range(_OFTEN))
        if not equal(first, next(again)):
            self.findings.add("rows", REFUTED, text("check.rows", "keeps_items"))
        elif self._read_equal or not all(equal(first, other) for other in again):
            self.random_rows = True
            self.findings.add("rows", UNKNOWN, text("check.rows", "random"))
        else:
            self.findings.add("rows", REFUTED, text("check.rows", "other_rows"))

    def _compare_items(self) -> None:
        """Some items of the data set, beside what they were when training began."""
        chosen, state, before = self._items
        with kept_random_state():
            set_random_state(state)
            now = tensors_of(self._examples.unpacked(collated(self._examples, chosen)))
            if not before:
                before += [tensor.clone() for tensor in now]
                few = (tensors_of(collated(self._examples, chosen[:2])) for _ in range(_OFTEN))
                first = next(few)
                self.random_rows = not all(equal(first, other) for other in few)
        if not equal(now, before):
            self.findings.add("fed", UNKNOWN, text("check.fed", "items"))

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
        """Keep what the optimizer is to be given, before it is scaled."""
        self._noisy = []
        if not self.budget.every:
            return
        with self._careful("gradient_taken"):
            optimizer = self._run.optimizer
            if not self._own_noise:
                self.findings.add("gradient_taken", UNKNOWN, text("check.gradient_taken", "noise"))
            self._noisy = [local(p.grad).clone() for p in optimizer.params]
            is_mean = optimizer.loss_reduction == "mean"
            self._divisor = optimizer.expected_batch_size if is_mean else 1.0

    def before_step(self, setting: StepSetting) -> None:
        """Called in the optimizer's step hook: settings are those of the step."""
        self._setting, optimizer = setting, self._run.optimizer
        of_rule = type(optimizer).scale_grad is not DPOptimizer.scale_grad
        if self._noisy and of_rule and "scale_grad" not in vars(optimizer):
            self._noisy = [p.grad.clone() for p in optimizer.params]
            self._divisor = 1.0
        self._pre_hooks.move_to_end(self._last_hook)  # other hooks may not follow ours

    def _reduced(self, reduce: Callable[[], None]) -> None:
        """Several ranks add up their gradients: compare before, and keep what comes of it."""
        self._compare_gradient()
        reduce()
        with self._careful("gradient_taken"):
            if self._noisy:
                self._noisy = [p.grad.clone() for p in self._run.optimizer.params]
                self._divisor = 1.0

    def _compare_gradient(self) -> None:
        with self._careful("gradient_taken"):
            if not self._noisy:
                return
            expected = torch._foreach_div(self._noisy, self._divisor)
            taken = [p.grad for p in self._run.optimizer.params]
            same = all(
                t is not None and same_values(local(t), e)
                for t, e in zip(taken, expected, strict=True)
            )
            self.findings.compare("gradient_taken", same, text("check.gradient_taken", "other"))

    def _taking(self, inner: Any, *_: Any) -> None:
        """The last moment before parameters move."""
        self._compare_gradient()
        self._noisy = []
        with self._careful("settings"):
            moved = self._settings.moved(self._step, self._setting)
            self.findings.compare("settings", not moved, moved, UNKNOWN)
        if not self.budget.every:
            return
        with self._careful("state"):
            self._compare_state("between the forward pass and the update")
        if self.budget.drawn:
            with self._careful("step", kind="drawn"):
                self._copy, self._random = copy.deepcopy(inner), random_state()
                for mine, theirs in self._pairs(inner):
                    mine.grad = None if theirs.grad is None else theirs.grad.detach().clone()

    def _pairs(self, inner: Any) -> Iterator[tuple[Any, Any]]:
        groups = zip(self._copy.param_groups, inner.param_groups, strict=True)
        return (pair for a, b in groups for pair in zip(a["params"], b["params"], strict=True))

    def updated(self) -> list[str]:
        """The parameters moved; return keys of what was found for the first time."""
        inner = self._run.optimizer.original_optimizer
        if self._copy is not None:
            with self._careful("step", kind="drawn"), kept_random_state():
                set_random_state(self._random)
                step = type(self._copy).step
                getattr(step, "__wrapped__", step)(self._copy)  # without hooks
                pairs = [tuple(map(local, pair)) for pair in self._pairs(inner)]
                off = max(max(relative(a, b), relative(b, a)) for a, b in pairs)
                of_torch = f"{type(inner).__module__}.".startswith("torch.optim.")
                detail = text("check.step", "other" if of_torch else "library")
                self.findings.compare("step", of_torch and off <= _SAME_STEP, detail, UNKNOWN)
            self._copy = None
        self._deliveries.end_step()
        self.budget.end_step()
        if self._run.whole.is_sharded:  # all ranks repeat the same steps
            coins = self._ranks.gather("the end of a step", (self.budget.every, self.budget.drawn))
            self.budget.every, self.budget.drawn = coins[0]
        self._state, self._begun = None, False
        if self.budget.every:
            with self._careful("state"):
                self._state = self._print()
        self._step += 1
        return self.findings.end_step()

    def _compare_state(self, when: str, *, but_buffers: bool = False) -> bool:
        """Whether it is what it was; False too if that is not known."""
        last, self._state = self._state, self._print()
        if last is None:
            return False
        end = -1 if but_buffers else None  # a forward pass may write what is published, too
        same = bool(last[but_buffers:end] == self._state[but_buffers:end])
        self.findings.compare("state", same, text("check.state", "changed", when=when), UNKNOWN)
        return same

    @torch.no_grad()
    def _print(self) -> tuple[Any, ...]:
        """Fingerprints of buffers, parameters, and the optimizer's state."""
        module, state = self._run.module, self._run.optimizer.original_optimizer.state
        leaves = torch.utils._pytree.tree_leaves([dict(one) for one in state.values()])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        prints = [print_of(part) for part in (module.buffers(), module.parameters(), tensors)]
        plain = repr([leaf for leaf in leaves if not isinstance(leaf, Tensor)])
        # What else a state dict publishes.
        more = [
            held_in(part.get_extra_state())
            for part in module.modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        ]
        return *prints, plain, more


def _plain_of(value: Any) -> list[str]:
    """Numbers and texts in nested containers, sorted."""
    leaves = torch.utils._pytree.tree_leaves(value)
    held = [vars(leaf) for leaf in leaves if is_dataclass(leaf)]  # whose tensors are fed
    plain = [one for one in leaves if not (isinstance(one, Tensor) or is_dataclass(one))]
    return sorted([repr(held_in(one)) for one in plain] + (_plain_of(held) if held else []))
