"""Drawn steps: training's own forward pass repeated, with other rows beside the same ones.

One weighted sum of the gradients of random rows stands for all of them: half of the rows are
replaced by others, the rest keep their places, and the random state is training's. The weighted sum
of the gradients that training clipped must be the same vector. It differs if a gradient depends on
other rows, on anything that training did and loss_fn does not, or if Opacus computes another one.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from indpriv.recording.compared.calls import Call, output_gradients, relative, weighed
from indpriv.recording.compared.findings import Findings
from indpriv.recording.norms import batches
from indpriv.recording.norms.batches import LossFn, fresh, map_tensors, tensors_of
from indpriv.recording.norms.model_checks import first_that_mixes
from indpriv.recording.opacus.gradients import STABILISER, ClippedBatch
from indpriv.recording.random_states import (
    Still,
    draw_from_each,
    has_drawn,
    kept_random_state,
    noted,
    random_state,
    set_random_state,
)

# Differences that rounding makes, in float32 and in half precision.
_TOLERANCES = {
    "same": (3e-4, 0.1),  # of the weighted sum
    "sum": (2e-4, 0.06),  # of max_grad_norm, times the root of the number of rows
    "alone": (1e-3, 0.1),
    "norms": (1e-3, 0.06),  # ghost mode's, of one row
    "small": (1e-3, 0.1),  # of max_grad_norm: gradients below count as this long
}
_SAME, _ALONE, _SMALL = (_TOLERANCES[name][0] for name in ("same", "alone", "small"))
_TOO_SHORT = 0.02  # sums in float32 fall short by less; half precision too
_ROWS = 4  # whose norms are taken one by one in ghost mode
_FEW = 64  # rows, at most, by which it is seen whether a model remembers rows
_SKIPPED = 0.5  # of the drawn steps after the first, at which outliers are looked at instead
_BATCHES = 8  # whose losses are asked again, the first ones and the last
_COMPANIONS = 4  # of a row that is also collated alone, and as many again
_TAKEN = 3  # rows that are collated alone
_WHOLE = 0.5  # of the times the whole batch is collated with them, which may be treated otherwise
_VALUES = 3  # different ones, by which a row of whole numbers is known again
_EXTREME = 30.0  # times as large as they are, some inputs stand for outliers
_NOTHING = 1e-6  # of max_grad_norm
_ONE = torch.ones(())  # the weight of each row


@dataclass
class Replay:
    """Repeats forward passes of one run."""

    findings: Findings
    loss_fn: LossFn
    parameters: Sequence[nn.Parameter]  # of the optimizer, in its order
    in_module: Sequence[int]  # their places among the parameters of the module
    is_ghost: bool

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(secrets.randbits(128))
        self._first: tuple[Call, Any, list[Tensor]] | None = None  # call, rows, gradient
        self._kept: list[tuple[Any, list[Tensor]]] = []  # of some steps: what was asked, losses
        self._turn = -1
        self.counts_itself = True  # nothing but forward passes changed what modules hold
        self._is_half = self._was_half = False  # this call, any call, in half precision

    def compare(self, one: Call, batch: ClippedBatch, transforms: Sequence[Any]) -> list[Tensor]:
        """Compare everything about one micro-batch; return the sum of its clipped gradients."""
        held = *self.parameters, *tensors_of(one.outputs)
        self._is_half = any(tensor.dtype in batches.HALF for tensor in held)
        self._was_half |= self._is_half
        size = len(batch.norms)
        # As Opacus left them: those that it clipped. Ghost mode has none.
        left = [] if self.is_ghost else [vars(p)["grad_sample"] for p in self.parameters]
        samples = [torch.cat(g) if isinstance(g, list) else g for g in left]
        with kept_random_state():
            keep = torch.as_tensor(self._random.random(size) < 0.5)
            keep[int(self._random.integers(size))] = True
            swapped = self._swapped(one, keep)
            if swapped is None:
                keep[:] = True
            fed = swapped or (one.arguments, one.targets)
            if self.is_ghost:
                self._norms(one, batch, keep, fed)
            else:
                plain = samples
                if transforms:  # AdaClip leaves what it clips
                    plain = [g / k + m for g, (m, k) in zip(samples, transforms, strict=True)]
                self._gradients(one, batch, plain, keep, fed)
            if self._kept and self._random.random() < _SKIPPED:
                self._outliers(one)
            else:
                self._memory(one)
            self._later(one, batch.max_grad_norm)
            self._loss_function(one)
            self._alone(one, batch.max_grad_norm)
            return self._sum(one, batch, samples)

    def _gradients(
        self, one: Call, batch: ClippedBatch, samples: Sequence[Tensor], keep: Tensor, fed: Any
    ) -> None:
        """Compare gradients (n, ...) of the rows that stay with those of a repetition."""
        norms = batch.norms.cpu().double()
        shares = (batch.max_grad_norm / norms.clamp(min=1e-12)).clamp(max=1.0)
        weights = torch.as_tensor(self._random.standard_normal(len(norms))) * keep * shares
        lengths, floor = _row_norms(samples).cpu(), _NOTHING * batch.max_grad_norm
        scale = max(math.sqrt(float((weights * lengths).square().sum())), floor)
        theirs = _weighted(samples, weights)
        error = _distance(self._repeated(one, weights, fed), theirs) / scale
        if error <= self._within("same"):
            return self.findings.add("replay")
        again = _distance(self._repeated(one, weights), theirs) / scale
        mixes = again <= self._within("same")
        self._differs(one, keep, fed, mixes, f"by {error:.2g} of their length")

    def _norms(self, one: Call, batch: ClippedBatch, keep: Tensor, fed: Any) -> None:
        """In ghost mode no gradient of one row exists in training, only its norm."""
        rows = self._random.permutation(np.flatnonzero(keep.numpy()))[:_ROWS]
        tolerance, theirs = self._within("norms"), batch.norms.cpu().double()[torch.as_tensor(rows)]
        floor = self._within("small") * batch.max_grad_norm

        def errors(fed: Any) -> Tensor:
            mine = self._row_norms(one, rows, fed)
            return (theirs - mine) / mine.clamp(min=floor)

        error = float(errors(fed).abs().max())
        if error <= tolerance:
            return self.findings.add("replay", "" if self._adds_up(one) else "not_linear")
        same, off = errors((one.arguments, one.targets)), f"by {error:.2g} of their norm"
        if float(same.abs().max()) > tolerance and float(same.min()) >= -tolerance:
            return self.findings.add("replay", "larger_norms", off=off)
        self._differs(one, keep, fed, float(same.abs().max()) <= tolerance, off)

    def _differs(self, one: Call, keep: Tensor, fed: Any, mixes: bool, off: str) -> None:
        """Say why gradients of the rows that stayed are others."""
        if mixes:
            self._mixes("mixes", one, keep, fed[0], off=off)
        elif not self._repeats(one):
            self.findings.add("replay", "other_outputs")
        elif not self._adds_up(one):
            self.findings.add("replay", "not_linear")
        else:
            self.findings.add("replay", "other_gradients", off=off)

    def _mixes(self, case: str, one: Call, keep: Tensor, others: Any, **values: str) -> None:
        """Say where outputs of the rows that stayed change with others: where not by draws alone.

        others: arguments of the model with other rows in place of the rest.
        """
        place, same = float(self._random.random()), []
        for held in (nullcontext(), Still(place)):
            with held:
                same.append(self._are_same(one, keep, *map(one.outputs_again, (None, others))))
        if same == [False, True]:
            if case == "mixes":
                self.findings.add("replay", "draws")
            return
        twin = one.new_twin()
        passes = (partial(one.outputs_again, fed, twin) for fed in (None, others))
        found = first_that_mixes(twin, passes, keep)
        where = "loss_fn" if found is None else "".join(found)
        self.findings.add("replay", case, where=where, **values)

    def _are_same(
        self, one: Call, keep: Tensor, mine: Sequence[Tensor], theirs: Sequence[Tensor]
    ) -> bool:
        """Whether two outputs of the model are alike in the rows that stayed."""
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a.ndim and b.ndim]
        pairs = [(a[keep], b[keep]) for a, b in pairs if len(a) == len(b) == one.size]
        return self._all_close(pairs)

    def _all_close(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
        return all(relative(*pair) <= self._within("same") for pair in pairs)

    def _repeats(self, one: Call) -> bool:
        """Whether a forward pass gives its outputs again."""
        return self._all_close(zip(one.outputs_again(), tensors_of(one.outputs), strict=True))

    def _adds_up(self, one: Call) -> bool:
        """Whether the gradient of a sum of weighted losses is the sum of their gradients."""
        weights = torch.as_tensor(self._random.standard_normal((2, one.size)))
        mine, more, both = (self._repeated(one, each) for each in (*weights, weights.sum(0)))
        off = _distance(torch._foreach_add(mine, more), both)
        return off <= self._within("same") * math.hypot(_distance(mine), _distance(more))

    def _memory(self, one: Call) -> None:
        """Outputs of the same rows after a pass over fewer others, and one over themselves."""
        swapped = self._swapped(one, torch.zeros(one.size, dtype=torch.bool))
        if swapped is None:
            return
        mine = batches.rows_of(one.arguments, 0, _FEW)
        others = batches.rows_of(swapped[0], 0, min(one.size, _FEW) // 2)
        outputs, buffers = [], []
        for arguments in (mine, others):
            twin = one.new_twin()
            noted(twin, [vars(module) for module in twin.modules()])
            with torch.enable_grad():  # as in training
                with kept_random_state():  # by generators of its own, it draws the same afterwards
                    one.again(arguments, twin)
                buffers.append({name: b.clone() for name, b in twin.named_buffers()})
                outputs.append(tensors_of(one.again(mine, twin)))
        if moved := [name for name, b in buffers[0].items() if relative(buffers[1][name], b)]:
            self.findings.add("replay", "buffer", name=moved[0])
        elif _differ(*outputs):
            self.findings.add("replay", "keeps_examples")

    def _outliers(self, one: Call) -> None:
        """Outputs beside rows that are far larger, which few batches hold."""
        keep = torch.as_tensor(self._random.random(one.size) < 0.5)
        if not one.has_rows or not bool(keep.any()):
            return
        factors = torch.where(keep, 1.0, _EXTREME)

        def grown(t: Tensor) -> Tensor:
            each = factors.view(-1, *[1] * (t.ndim - 1)).to(t) if t.ndim else 1
            return t * each if t.is_floating_point() else t

        others, found = map_tensors(one.arguments, grown), tensors_of(one.outputs)
        with suppress(Exception):  # a model need not take such rows
            found = one.outputs_again(others)
        if not self._are_same(one, keep, found, tensors_of(one.outputs)) and self._repeats(one):
            self._mixes("outliers", one, keep, others)

    def _later(self, one: Call, max_grad_norm: float) -> None:
        """Gradients of a few rows of the first call, asked again at the parameters of then."""
        if self._first is None:
            if one.has_rows:
                fed = batches.rows_of((one.arguments, one.targets), 0, _FEW)
                kept = replace(one, outputs=None, gradients={}, second={}, inside={})
                self._first = kept, fed, self._repeated(kept, _ONE, fed)
            return
        kept, fed, before = self._first
        calls = [kept]
        if not self.counts_itself:  # what the modules hold by now, at the parameters of then
            twin = one.new_twin()
            now, then = ([*m.parameters(), *m.buffers()] for m in (twin, kept.twin))
            for mine, theirs in zip(now, then, strict=True):
                mine.data = theirs.data.clone()
            calls.append(replace(kept, twin=twin))
        floor = _SMALL * max_grad_norm
        if any(_off(self._repeated(each, _ONE, fed), before, floor) > _SAME for each in calls):
            self.findings.add("replay", "moves")

    def _loss_function(self, one: Call) -> None:
        """Ask loss_fn for the same losses twice, and later again."""
        loss_fn, asked = fresh(self.loss_fn), (one.outputs, one.targets, one.random_state)
        losses = [_asked(loss_fn, *asked) for _ in range(2)]
        if _differ(*losses):
            return self.findings.add("loss_function", "keeps_examples")
        self.findings.add("loss_function")
        known, self._kept = self._kept, [*self._kept[: _BATCHES - 1], (asked, losses[0])]
        if any(_differ(_asked(loss_fn, *asked), before) for asked, before in known):
            self.findings.add("loss_function", "moves")

    def _alone(self, one: Call, max_grad_norm: float, *, first: bool = False) -> None:
        """Some rows, each collated alone, and beside others; randomness is held still.

        first: one row, in the first place: a generator that the model keeps gives it the same.
        """
        if not one.places:
            return self.findings.add("alone", "changed")
        self._turn += 1  # chances are seldom taken: once low, once high, once anywhere
        held_at = (0.02, 0.98, float(self._random.random()))[self._turn % 3]
        places, each, together = self._batches(one, first)
        singly, loaded = [(batch, [0]) for batch in each], list[list[Tensor]]()
        held = list[Still]()

        def taken(one: Call) -> Iterator[list[list[Tensor]]]:
            for number, parts in enumerate((singly, [(together, places)], singly)):
                rows = list[list[Tensor]]()
                for batch, wanted in parts:
                    set_random_state(one.random_state)
                    if number == 2:  # for what does not hold still
                        draw_from_each()
                    with Still(held_at) as still:
                        rows += self._of_rows(one, batch, wanted, still, loaded)
                    held.append(still)
                yield rows
            self._stored(one, held[-1].foreign)

        off = partial(_off, floor=self._within("small") * max_grad_norm)
        alone, among, again = taken(one)
        if _ALONE < max(map(off, again, alone)) < math.inf:
            return self.findings.add("alone", "random")
        error, limit = max(map(off, among, alone)), self._within("alone")
        if error > limit or self._is_half:
            # Another batch size rounds otherwise (a ReLU near 0 opens); half precision hides much.
            with suppress(Exception):  # a model need not take float64
                alone, among, _ = taken(one.in_float64)
                exact = max(map(off, among, alone))
                precise = self._is_half and not held[-1].saw_half
                error, limit = (exact, _ALONE) if precise else (min(error, exact), limit)
        if error <= limit:
            return self.findings.add("alone")
        twin = one.new_twin()
        twice = zip(one.outputs_again(twin=twin), one.outputs_again(twin=twin), strict=True)
        if not first and not self._all_close(twice):  # at the same random state
            return self._alone(one, max_grad_norm, first=True)
        order = _stands_elsewhere(loaded[0], loaded[len(each)], places[0])
        self.findings.add("alone", "order" if order else "changes", error=error)

    def _batches(
        self, one: Call, first: bool
    ) -> tuple[list[int], Sequence[Callable[[], Any]], Callable[[], Any]]:
        """Places of some rows, the shortest first; a batch of each alone, and one of all."""
        examples = one.delivered.examples
        size = one.size if self._random.random() < _WHOLE else 2 * _COMPANIONS
        ids = self._random.permutation(one.delivered.ids)[:size]
        places = [0] if first else self._random.permutation(len(ids))[:_TAKEN].tolist()
        state, items, collate = random_state(), examples.read(ids), examples.collate
        if isinstance(items, list) and len(items) == len(ids):  # else the data set makes batches
            sizes = [sum(t.numel() for t in tensors_of(item)) for item in items]
            shortest = int(np.argmin(sizes))
            if first:
                items.insert(0, items.pop(shortest))
                ids = np.insert(np.delete(ids, shortest), 0, ids[shortest])
            elif len(set(sizes)) > 1:
                places = list(dict.fromkeys([shortest, *places]))[:_TAKEN]
            at_once = hasattr(examples.dataset, "__getitems__")  # which may mix what it reads
            if not at_once or has_drawn(state) or any(examples.random_parts):
                each = [partial(collate, [items[k]]) for k in places]
                return places, each, partial(collate, items)
        each = [partial(examples.collated, ids[[place]]) for place in places]
        return places, each, partial(examples.collated, ids)

    def _of_rows(
        self,
        one: Call,
        batch: Callable[[], Any],
        places: Sequence[int],
        still: Still,
        loaded: list[list[Tensor]],
    ) -> list[list[Tensor]]:
        """The gradient of each of some rows of a batch, which is added to `loaded`."""
        examples, twin, loss_fn = one.delivered.examples, one.new_twin(), fresh(self.loss_fn)
        inputs, targets = examples.on_device(examples.unpacked(batch()))
        fed = {t.dtype for t in tensors_of(one.arguments) if t.is_floating_point()}
        if len(fed) == 1:
            (kind,) = fed
            inputs = map_tensors(inputs, lambda t: t.to(kind) if t.is_floating_point() else t)
        loaded.append(tensors_of((inputs, targets)))
        own = [p for p in twin.parameters() if p.requires_grad]
        with torch.enable_grad(), one.precision(), still.reading([*own, *loaded[-1]]):
            losses = batches.check_losses(loss_fn(batches.call(twin, inputs), targets), targets)
        several = len(places) > 1
        return [self._taken(twin, losses[place], retain=several) for place in places]

    def _stored(self, one: Call, foreign: Sequence[Tensor]) -> None:
        """Whether model or loss read rows of the data set that they keep, in whatever place."""
        fed = tensors_of((one.arguments, one.targets))
        rows = [t.flatten(1) for t in fed if t.ndim > 1 and not t.is_complex()]
        for kept in foreign:
            if kept.is_complex() or kept.layout is not torch.strided:
                continue
            if any(_share(row, kept) for row in rows):
                return self.findings.add("replay", "holds_rows", shape=tuple(kept.shape))
            is_start = isinstance(kept, nn.Parameter)  # a frozen one: what the run began with
            if len(one.delivered.examples) in kept.shape and not is_start:
                self.findings.add("replay", "of_each", shape=tuple(kept.shape))

    def _sum(self, one: Call, batch: ClippedBatch, samples: Sequence[Tensor]) -> list[Tensor]:
        """Sum of clipped gradients, by the norms that training clipped by."""
        if self.is_ghost:
            return self._repeated(one, batch.factors)
        if batch.each is None:
            own = _row_norms(samples).to(batch.norms) * (1 - _TOO_SHORT)
            if bool((batch.norms + _SMALL * batch.max_grad_norm < own).any()):
                self.findings.add("replay", "small_norms")
            return _weighted(samples, batch.factors)
        return [
            torch.einsum("i,i...", (c / (_row_norms([g]) + STABILISER)).clamp(max=1).to(g), g)
            for g, c in zip(samples, batch.each, strict=True)
        ]

    def compare_sum(
        self, found: Sequence[Tensor], clipped: Sequence[Tensor], rule: Any, size: int
    ) -> None:
        """Compare training's sum before the noise with that of its `size` clipped gradients."""
        alike = [t.view_as(f) for f, t in zip(clipped, found, strict=True)]
        off = _distance(clipped, alike) / float(rule.max_grad_norm)
        same = off <= _TOLERANCES["sum"][self._was_half] * math.sqrt(max(size, 1))
        self.findings.add("replay", "" if same else "other_sum", error=off)

    def _repeated(self, one: Call, weights: Tensor, fed: Any = None) -> list[Tensor]:
        """Gradients of the weighted sum of losses, by autograd on a twin.

        fed: arguments of the model, and targets; training's where left out.
        """
        twin = one.new_twin()
        losses = self._losses(twin, one, fed or (one.arguments, one.targets))
        with torch.enable_grad():
            return self._taken(twin, (losses * weights.to(losses)).sum())

    def _row_norms(self, one: Call, rows: Any, fed: Any) -> Tensor:
        twin = one.new_twin()
        for part in twin.modules():  # ghost mode counts the row of padding in norms
            if isinstance(part, nn.Embedding):
                part.padding_idx = None
        losses = self._losses(twin, one, fed)
        norms = [_distance(self._taken(twin, losses[int(row)], retain=True)) for row in rows]
        return torch.tensor(norms, dtype=torch.float64)

    def _losses(self, twin: nn.Module, one: Call, fed: Any) -> Tensor:
        with torch.enable_grad():
            outputs, targets = one.again(fed[0], twin), fed[1]
            outputs = batches.as_real(outputs, torch.float32) if one.in_float32 else outputs
            return batches.check_losses(fresh(self.loss_fn)(outputs, targets), targets)

    def _taken(self, twin: nn.Module, loss: Tensor, *, retain: bool = False) -> list[Tensor]:
        """The gradient of a loss, which leaves none in the twin."""
        loss.backward(retain_graph=retain)
        found, own = list[Tensor](), list(twin.parameters())
        for p in (own[place] for place in self.in_module):
            taken = torch.zeros_like(p) if p.grad is None else p.grad.detach()
            found.append(taken.to_dense() if taken.is_sparse else taken)
            p.grad = None
        return found

    def _swapped(self, one: Call, keep: Tensor) -> tuple[Any, Any] | None:
        """Arguments and targets with other rows where they are not kept.

        None if a tensor of them has another number of rows than the batch.
        """
        size = len(keep)
        if size < 2 or not one.has_rows:
            return None
        by, own = torch.as_tensor(self._random.integers(1, size, size)), torch.arange(size)
        rows = torch.where(keep, own, (own + by) % size)  # never the row itself
        swapped: tuple[Any, Any] = map_tensors(
            (one.arguments, one.targets), lambda t: t[rows.to(t.device)] if t.ndim else t
        )
        return swapped

    def _within(self, name: str) -> float:
        return _TOLERANCES[name][self._is_half]


def _asked(loss_fn: LossFn, outputs: Any, targets: Any, state: Any) -> list[Tensor]:
    """Losses, and their gradients at the outputs, which no large constant hides."""
    set_random_state(state)
    losses, gradients = output_gradients(loss_fn, outputs, targets)
    return [losses, *gradients.values()]


def _differ(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return any(relative(*pair) > _SAME for pair in zip(one, other, strict=True))


def _weighted(samples: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    return [torch.einsum("i,i...", weights.to(g), g) for g in samples]


def _share(rows: Tensor, kept: Tensor) -> bool:
    """Whether two rows (n, d) or more of a batch stand in a tensor, with numbers that tell."""
    size = rows.shape[1]
    ends = [math.prod(kept.shape[k:]) for k in range(kept.ndim)]
    if size not in ends or not kept.numel():
        return False
    rows = rows.double().unique(dim=0)
    telling = (rows != rows.round()).any(1)
    telling |= (rows.sort(1).values.diff(dim=1) != 0).sum(1) >= _VALUES - 1
    mine, theirs = weighed(rows[telling]), weighed(kept.reshape(-1, size).double())
    return int(torch.isin(mine, theirs).sum()) > 1


def _stands_elsewhere(alone: Sequence[Tensor], among: Sequence[Tensor], place: int) -> bool:
    """Whether a row that was collated alone stands among others, but not at its place."""
    rows = [t.ndim > 0 and t.shape[1:] == a.shape[1:] for a, t in zip(alone, among, strict=False)]
    if len(alone) != len(among) or not all(rows):
        return False
    same = [(t == a[:1]).flatten(1).all(1) for a, t in zip(alone, among, strict=True) if t.ndim > 1]
    places = torch.stack(same).all(0) if same else torch.zeros(1, dtype=torch.bool)
    return bool(places.any()) and not bool(places[place])


def _row_norms(samples: Sequence[Tensor]) -> Tensor:
    each = [g.reshape(len(g), -1).norm(dim=1).double() for g in samples]
    return torch.stack(each, 1).norm(dim=1)


def _distance(one: Sequence[Tensor], other: Sequence[Tensor] | None = None) -> float:
    """Euclidean distance of two lists of tensors, or the length of one."""
    found = [a.double() for a in one]
    if other is not None:
        found = [a - b.double() for a, b in zip(found, other, strict=True)]
    squares = [float(a.square().sum()) for a in found]
    return math.sqrt(sum(squares)) if all(map(math.isfinite, squares)) else math.inf


def _off(one: Sequence[Tensor], other: Sequence[Tensor], floor: float) -> float:
    """Distance relative to the length of the other, or to a least length; maybe infinite."""
    off = _distance(one, other)
    return off / max(_distance(other), floor) if math.isfinite(off) else math.inf
