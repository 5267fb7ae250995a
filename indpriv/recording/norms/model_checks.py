"""Checks that a model's per-example gradients exist, and that Opacus trains on the same ones."""

import inspect
import tomllib
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from opacus.grad_sample import (
    AbstractGradSampleModule,
    GradSampleModule,
    GradSampleModuleExpandedWeights,
    GradSampleModuleFastGradientClipping,
)
from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_rnn import DPRNNBase
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from indpriv._facts import refused, text
from indpriv.errors import InputError
from indpriv.recording.norms import batches
from indpriv.recording.norms.shadow_model import ModelInTraining, make_shadow, standard_module
from indpriv.recording.random_states import Still, kept_random_state, random_state

_COMPARED = 7  # examples; a length or a width is seldom a multiple of it, so that rows are found
_OFTEN = 4  # of six replacements: by no chance order of random numbers
_FIT = "it must take batches of any size; of outputs (n, 1) take outputs.squeeze(1), not .squeeze()"
_OF_A_DICT = "targets are the whole batch where that is a dict: take e.g. targets['labels']"
_PROBED = 4  # examples that stand for all others
_ROUNDING = 1e-6  # relative, of outputs
TINY = 1e-12  # norms below it count as 0
_HINDRANCES: Mapping[str, str] = tomllib.loads(
    Path(__file__).with_name("hindrances.toml").read_text(encoding="utf-8")
)
_FAULTS = ("shared", "packed", "padding", "checkpoint")  # of these, where nothing fails


def validate_module(module: nn.Module) -> None:
    """Raise InputError for layers that mix examples or have no per-example gradient."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise refused("refusal.norms", "complex", name=name)
    checks, named_parts = ModuleValidator.VALIDATORS, module.named_modules()
    if replaceable := [
        named(name, part)
        for name, part in named_parts
        if type(part) in checks
        and type(part) is not nn.MultiheadAttention  # whose norms exist
        and any(p.requires_grad for p in part.parameters())
        and checks[type(part)](part)
    ]:
        raise refused("refusal.norms", "layers", layers=", ".join(replaceable))
    for part in module.modules():
        if isinstance(part, nn.Embedding) and (
            part.max_norm is not None or part.scale_grad_by_freq
        ):
            raise refused("refusal.norms", "embedding")


def check_each_alone(model: ModelInTraining, batch: batches.Batch) -> None:
    """Raise InputError unless model and loss accept these examples, and take each for itself.

    Some are replaced, at the same shapes, places and random numbers: what is made of the rest must
    not change. A bit of its place says whether one is, so that any two are once told apart.
    """
    few = batch.rows(0, _COMPARED)
    made, places = partial(_made, model, model.shadow()), torch.arange(len(few))
    (first, drawn), (again, _) = made(few), made(few)
    if not all(map(_close, first, again)):
        return  # it remembers examples, or draws from elsewhere
    found = []
    for bit, value in product(range((len(few) - 1).bit_length()), (0, 1)):
        kept = (places >> bit) % 2 == value
        others = batch.picked(torch.where(kept, places, (places + len(batch) // 2) % len(batch)))
        try:
            rows, now = made(others)
        except InputError:  # such as texts that had been sorted by length
            continue
        if torch.equal(now, drawn) and not _same(first, rows, kept):
            found.append((others, kept))
    if len(found) < _OFTEN and not torch.equal(drawn, _generators()):
        with Still():  # dropout of present tokens alone draws in an order that others decide
            still = made(few)[0]
            found = [each for each in found if not _same(still, made(each[0])[0], each[1])]
    for others, kept in found:
        shadow = model.shadow()
        passes = (partial(_made, model, shadow, each) for each in (few, others))
        who, where = first_that_mixes(shadow, passes, kept) or ("loss_fn", "")
        raise refused("refusal.norms", "mixes", who=who, where=where, done="replaced")
    alone, now = made(few.rows(0, 1))
    near = [
        one.shape == rows[:1].shape and torch.allclose(one, rows[:1], 0.05, 0.01, True)
        for one, rows in zip(alone, first, strict=False)
    ]
    if torch.equal(now, drawn) and not near[0]:
        who = "loss_fn" if all(near[1:]) else "the model"
        raise refused("refusal.norms", "mixes", who=who, where="", done="taken away")


def _same(before: list[Tensor], after: list[Tensor], kept: Tensor) -> bool:
    return all(_close(a[kept], b[kept]) for a, b in zip(before, after, strict=True))


def _generators() -> Tensor:
    return torch.cat([state for _, state in random_state() if isinstance(state, Tensor)])


def _made(
    model: ModelInTraining, shadow: nn.Module, batch: batches.Batch
) -> tuple[list[Tensor], Tensor]:
    """Losses and outputs with a row per example, and the state in which they left generators."""
    inputs = batch.inputs
    failed, remedy = f"the model fails on {batches.described(inputs)}", how_to_call(shadow, inputs)
    with kept_random_state(), torch.no_grad(), model.precision():
        try:
            outputs = batches.call(shadow, inputs)
            failed = f"loss_fn fails on {batches.described((outputs, batch.targets))}"
            remedy = _OF_A_DICT if isinstance(batch.targets, dict) else _FIT
            found = batches.fresh(model.loss_fn)(outputs, batch.targets)
            losses = batches.check_losses(found, batch.targets)
        except InputError:
            raise
        except batches.FAULTS as error:
            raise InputError(f"{failed}: {type(error).__name__}: {error}; {remedy}") from error
        rows = [x for x in (losses, *batches.tensors_of(outputs)) if x.shape[:1] == (len(batch),)]
        return rows, _generators()


def first_that_mixes(
    module: nn.Module, passes: Iterable[Callable[[], object]], kept: Tensor
) -> tuple[str, str] | None:
    """The first part of a module that makes something else of the kept rows in the second pass.

    With it, whether that is " in its own forward", between its parts; None: no part does.
    """
    inside, seen = [module], list[list[tuple[nn.Module, list[list[Tensor]]]]]()

    def before(part: nn.Module, args: Any) -> None:
        seen[-1].append((inside[-1], _rows_of(args, kept)))
        inside.append(part)

    def after(part: nn.Module, args: Any, output: Any) -> None:
        seen[-1].append((inside.pop(), _rows_of(output, kept)))

    with hooks.register_module_forward_pre_hook(before), hooks.register_module_forward_hook(after):
        for run in passes:
            seen.append([])
            run()
    names = {part: name for name, part in module.named_modules()}
    for (part, mine), (_, theirs) in zip(*seen, strict=False):
        pairs = zip(mine, theirs, strict=False)
        if part in names and any(a and not any(map(_close, a, b)) for a, b in pairs):
            return named(names[part], part), " in its own forward" * any(part.children())
    return None


def _rows_of(value: Any, kept: Tensor) -> list[list[Tensor]]:
    """Of each tensor, what may belong to the kept examples: one for each order it may have."""
    n, found = len(kept), list[list[Tensor]]()
    for x in batches.tensors_of(value):
        orders = [x.movedim(1, 0)] if x.ndim > 1 and x.shape[1] == n else []
        if x.ndim and len(x) and len(x) % n == 0:
            orders += [x.unflatten(0, (n, -1)), x.unflatten(0, (-1, n)).movedim(1, 0)]
        found.append([order[kept] for order in orders])
    return found


def check_memory(module: nn.Module, inputs: Any) -> None:
    """Raise InputError if a forward pass keeps anything about its examples.

    Two copies of the module pass over different parts of some real inputs. Then their buffers are
    equal, and so are their outputs for one and the same part: whatever else a module keeps of its
    examples, in lists or attributes, matters only if it changes outputs.
    """
    for name, part in module.named_modules():
        attends = type(part).forward is DPMultiheadAttention.forward
        if attends and part.batch_first and part.num_heads > 1:
            raise refused("refusal.norms", "attention", layer=named(name, part))
    size = min(_PROBED, len(batches.first_tensor(inputs)) // 2)
    if not size:
        return
    parts = [batches.rows_of(inputs, start, start + size) for start in (0, size)]
    first, second, *fed_alike = (make_shadow(module) for _ in range(4))
    _outputs(first, parts[0])
    _outputs(second, parts[1])
    for (name, value), other in zip(first.named_buffers(), second.buffers(), strict=True):
        if not batches.same_values(value, other):
            raise refused("refusal.norms", "buffer", name=name)
    if all(map(_close, _outputs(first, parts[0]), _outputs(second, parts[0]))):
        return
    for _ in parts:
        mine, theirs = (_outputs(shadow, parts[0]) for shadow in fed_alike)
    if all(map(_close, mine, theirs)):
        raise refused("refusal.norms", "memory")
    raise refused("refusal.norms", "counter")


def _outputs(shadow: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors that a copy of the model returns in training, always with the same seed."""
    with kept_random_state(), torch.no_grad():
        torch.manual_seed(0)
        return batches.tensors_of(batches.call(shadow, inputs))


def _close(mine: Tensor, theirs: Tensor) -> bool:
    """Equal, or up to rounding on devices that sum in another order each time."""
    if mine.shape != theirs.shape or not mine.is_floating_point():
        return torch.equal(mine, theirs)
    rounding = max(_ROUNDING, 2 * torch.finfo(mine.dtype).eps)
    scale = rounding * float(mine.abs().nan_to_num().max()) if mine.numel() else 0.0
    return torch.allclose(mine, theirs, rtol=0, atol=scale, equal_nan=True)


Expected = tuple[ModelInTraining, batches.Batch, Tensor, Any]
"""A model, a few examples, their norms, and the `AutogradCheck` with which these agree."""


def check_opacus_norms(
    wrapped: AbstractGradSampleModule,
    batch: batches.Batch,
    expected: Iterable[Expected],
    views: int = 1,
) -> None:
    """Raise InputError if training with Opacus uses other gradients than autograd.

    Of what is expected in several precisions, one has to be found; rounding has to explain others.
    """
    if fault := hindrance(wrapped, batch, _FAULTS):
        raise InputError(fault)
    another = 'train with grad_sample_mode="functorch"'
    if getattr(wrapped, "force_functorch", False):
        another = "freeze the layers that Opacus does not support (requires_grad_(False))"
    said = ""
    for model, few, ours, check in expected:
        try:
            theirs = _norms_in_training(wrapped, model, few, views)
        except batches.FAULTS as error:
            found = f"{type(error).__name__}: {error}"
            failed = text("refusal.norms", "no_gradient", found=found, remedy=another)
            failed = str(error) if isinstance(error, InputError) else failed
            raise InputError(hindrance(wrapped, batch) or failed) from error
        # In ghost mode, too large a norm is safe: the gradient is only clipped too much.
        is_ghost = isinstance(wrapped, GradSampleModuleFastGradientClipping)
        off = ours - theirs if is_ghost else (ours - theirs).abs()
        off = off - ours * check.tolerance - TINY
        if not bool((off > 0).any()):
            return
        i = int(off.nan_to_num().argmax())
        values = {"theirs": float(theirs[i]), "ours": float(ours[i]), "remedy": another}
        said = said or text("refusal.norms", "other_gradient", example=i, **values)
        if not check.explains(off):
            break
    raise InputError(hindrance(wrapped, batch) or said)


def _norms_in_training(
    wrapped: AbstractGradSampleModule, model: ModelInTraining, batch: batches.Batch, views: int
) -> Tensor:
    """Norms (batch,) float64 that Opacus clips by in training, from a shadow model wrapped alike.

    In ghost mode Opacus keeps norms, in the model's own precision; otherwise every gradient.
    """
    kinds = GradSampleModuleFastGradientClipping, GradSampleModule
    kind: Any = next((k for k in kinds if isinstance(wrapped, k)), GradSampleModuleExpandedWeights)
    asked = ("batch_first", "force_functorch", "use_ghost_clipping")
    options = {name: getattr(wrapped, name) for name in asked if hasattr(wrapped, name)}
    if kind in kinds:
        options["strict"] = False
    again = kind(model.shadow(), loss_reduction="sum", **options)
    with torch.enable_grad(), model.precision(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # on a first layer
        losses = model.losses(again, batch)
        losses.sum().backward()
    n = len(losses)
    squares = torch.zeros(n, dtype=torch.float64, device=losses.device)
    trained: list[Any] = [p for p in again.parameters() if p.requires_grad]
    for p in trained:
        if kind is GradSampleModuleFastGradientClipping:
            squares += p._norm_sample.double().square()
        elif p.grad_sample is not None:
            if (rows := len(p.grad_sample)) != n * views:
                raise refused("refusal.norms", "rows", rows=rows, n=n, views=max(rows // n, 2))
            # A view's gradient is of its share of the loss; the loop averages those of training.
            each = p.grad_sample.double().unflatten(0, (n, views)).sum(1)
            squares += each.flatten(1).square().sum(1)
    return squares.sqrt()


def named(name: str, part: nn.Module) -> str:
    """A layer as messages call it: its class, and its name in the model."""
    return f"{type(part).__name__} {name!r}" if name else type(part).__name__


def where_failed(error: BaseException) -> str:
    """The innermost part of a model whose code raised an error, as messages begin with it."""
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    parts = [one for one in frames if isinstance(one, nn.Module)]
    names = {part: name for name, part in parts[0].named_modules()} if parts else {}
    return f"{named(names.get(parts[-1], ''), parts[-1])}: " if parts else ""


def hindrance(
    model: nn.Module, batch: batches.Batch, keys: Iterable[str] = tuple(_HINDRANCES)
) -> str:
    """Which layer keeps Opacus from per-example gradients, why, and what to change; "" if unknown.

    The model is as it is trained, wrapped by Opacus or not; the batch is of a few examples. Of an
    Embedding that looks up the same for all examples, Opacus takes each position for an example.
    """
    sizes = batch, batch.repeated(len(batch) + 1)  # a length may be one batch size by chance
    first, second = (_seen(model, each) for each in sizes)
    layers = {key: first[key] or second[key] for key in keys}
    return next((_HINDRANCES[key].format(*found) for key, found in layers.items() if found), "")


def _seen(model: nn.Module, batch: batches.Batch) -> Mapping[str, list[str]]:
    """What a forward pass shows of a model: key in `_HINDRANCES` -> the layers it is said of."""
    module, seen = standard_module(model), defaultdict[str, list[str]](list)
    parts = dict(module.named_modules())
    ghost = isinstance(model, GradSampleModuleFastGradientClipping)
    by_autograd = ghost or getattr(model, "force_functorch", False)
    pads = isinstance(model, AbstractGradSampleModule) and not by_autograd
    calls, keywords, outputs = Counter[str](), set[str](), list[tuple[str, Tensor, int]]()

    def after(name: str, part: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        calls[name] += 1
        if not all(value is None or isinstance(value, bool) for value in kwargs.values()):
            keywords.add(name)
        if isinstance(out, Tensor):
            outputs.append((name, out, out._version))
        own, first = bool(_own(part)), args[0] if args else None
        trained_before = any(_own(parts[each]) for each in calls if each != name)
        facts = {
            "shared": own
            and isinstance(part, nn.Embedding)
            and args
            and len(batch) not in args[0].shape[:2],
            "packed": isinstance(part, DPRNNBase)
            and getattr(first, "sorted_indices", None) is not None,
            "padding": pads and own and type(part) is nn.Embedding and part.padding_idx is not None,
            "checkpoint": own and _in_checkpoint(reentrant=False),
            # What it gets requires no gradient, so that autograd runs the checkpoint without one.
            "early": own
            and not (trained_before or getattr(first, "requires_grad", False))
            and _in_checkpoint(reentrant=True),
            "turned": own and type(part) is nn.Conv2d and not args[0].is_contiguous(),
        }
        for key in facts:
            if facts[key]:
                seen[key].append(named(name, part))

    shadow = make_shadow(module)
    for name, part in shadow.named_modules():
        part.register_forward_hook(partial(after, name), with_kwargs=True)
    with kept_random_state(), torch.no_grad():
        batches.call(shadow, batch.inputs)
    uses = Counter(id(p) for part in parts.values() for p in _own(part))
    changed = [named(n, parts[n]) for n, output, before in outputs if output._version != before]
    switches = [named(*each) for each in parts.items() if getattr(each[1], "inplace", False)]
    if changed:
        seen["in_place" if switches else "changed"] = [changed[0], *switches]
    for name, part in parts.items():
        own_uses = [uses[id(p)] for p in _own(part)]
        tied = max(own_uses, default=0) > 1
        if own_uses and isinstance(part, nn.EmbeddingBag):
            seen["bag"].append(named(name, part))
        if own_uses and (name in keywords or (calls[name] == 0 and not tied)):
            seen["hidden"].append(named(name, part))
        if own_uses and ghost and (tied or calls[name] > 1):
            seen["tied"] = [" and ".join([*seen["tied"], named(name, part)])]
    return seen


def how_to_call(module: nn.Module, inputs: Any) -> str:
    """What to pass as unpack= where a model does not take the inputs as they are."""
    names = list(inspect.signature(module.forward).parameters)
    remedy = f"(batch[0].to({next(module.parameters()).dtype}), batch[1])"
    if isinstance(inputs, batches.Keywords):
        known = ", ".join(f'"{name}": batch["{name}"]' for name in inputs if name in names)
        *_, last = [name for name in inputs if name not in names] or inputs
        given = f"{{{known}}}" if known else f'batch["{next(iter(inputs))}"]'
        remedy = f'({given}, batch["{last}"])'
    elif not isinstance(inputs, Tensor):
        remedy = f"({'dict' if isinstance(inputs, Mapping) else 'tuple'}(batch[0]), batch[1])"
    return f"it takes ({', '.join(names)}); say how: unpack=lambda batch: {remedy}"


def _own(part: nn.Module) -> list[nn.Parameter]:
    return [p for p in part.parameters(recurse=False) if p.requires_grad]


def _in_checkpoint(*, reentrant: bool) -> bool:
    """Whether this is called inside a torch.utils.checkpoint that is reentrant, or is not."""
    return any(
        each.frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        and each.frame.f_locals.get("use_reentrant") is reentrant
        for each in inspect.stack(0)
    )
