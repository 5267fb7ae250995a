"""Shadow models: copies of a model in training that share its parameters. Sensitive.

Norms are computed on a shadow model, so that the model in training keeps its hooks, gradients and
modes.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from inspect import getclosurevars, isfunction
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from indpriv._facts import refused
from indpriv.errors import InputError
from indpriv.recording.norms import batches
from indpriv.recording.random_states import NotedGenerators

# Stands for reentrant checkpoints: calls what they would run twice.
_CALLED = SimpleNamespace(apply=lambda function, _preserve_random_state, *args: function(*args))
_LARGE = 100  # by which weights are multiplied to see whether a forward pass limits them
_OF_TORCH = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_WRAPPERS = ("opacus.", "torch.distributed.fsdp.", "indpriv.recording.watch")
# Where hooks, handles and states are kept that a shadow model goes without.
_KEPT = ("autograd_grad_sample_hooks", "__composable_api_state_key")


def standard_module(model: nn.Module) -> nn.Module:
    """The user's own module inside any Opacus wrapper."""
    inner: nn.Module = model
    while True:
        if isinstance(inner, AbstractGradSampleModule):
            inner = inner._module
        elif isinstance(inner, DifferentiallyPrivateDistributedDataParallel):
            inner = inner.module
        elif type(inner).__name__ == "OptimizedModule":  # torch.compile; slow to import
            inner = inner._orig_mod  # type: ignore[assignment]
        else:
            return inner


class ModelInTraining:
    """A user's model with its loss and arithmetic, from which shadow models are made.

    If constructed under `torch.autocast`, all computations use the same autocast settings.
    """

    def __init__(self, model: nn.Module, loss_fn: batches.LossFn) -> None:
        """Unwrap a model; InputError if no parameter is trainable."""
        # The user's own module, which is never changed, and per-example losses.
        self.module, self.loss_fn = standard_module(model), batches.with_targets(loss_fn)
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        if not trainable:
            raise InputError("the model has no trainable parameter; there is no gradient to record")
        self._trainable = trainable_names(self.module)
        # Clipping norm, and (centre, factor), of each trainable tensor of parameters, in order, or
        # none. Norms are those of what clipping leaves of (gradient - centre) * factor.
        self.limits: Sequence[float] = ()
        self.transforms: Sequence[tuple[Tensor, Tensor]] = ()
        # A forward pass writes into parameters, which shadow models then do not share.
        self.writes = False
        self.n_parameters = sum(p.numel() for p in trainable)
        # In a model of several types, frozen parts included, rounding is that of the coarsest.
        types = {p.dtype for p in self.module.parameters() if p.dtype.is_floating_point}
        self._dtype = max(types, key=lambda t: torch.finfo(t).eps, default=torch.float32)
        device = next(self.module.parameters()).device.type
        self.precision = autocast_now(device)  # makes the context in which forward passes run
        autocast = torch.is_autocast_enabled(device)
        self.compute_dtype = torch.get_autocast_dtype(device) if autocast else self._dtype

    @property
    def slack(self) -> float:
        """Relative error that rounding may cause in a norm; see `NormPass`."""
        wide = torch.float32 if self._dtype in batches.HALF else self._dtype
        half = torch.finfo(self.compute_dtype).eps if self.compute_dtype in batches.HALF else 0.0
        return torch.finfo(wide).eps * (40 + 4 * self.n_parameters**0.5) + 4 * half

    def check_writes(self, inputs: Any) -> None:
        """Find out what a forward pass writes into and draws from; what fails here fails later."""
        shadow = make_shadow(self.module)
        for p in shadow.parameters():
            p.data.mul_(_LARGE)  # a limit on weights then shows
        before = [(p.data.clone(), p._version) for p in shadow.parameters()]
        with suppress(*batches.FAULTS), torch.no_grad(), self.precision(), NotedGenerators():
            for mode in (True, False):
                batches.call(
                    shadow.train(mode), batches.map_tensors(inputs, lambda t: t[:2].clone())
                )
        self.writes = any(
            p._version != version or not batches.same_values(p.data, value)
            for p, (value, version) in zip(shadow.parameters(), before, strict=True)
        )

    def shadow(self) -> nn.Module:
        """A new shadow model at the current parameters."""
        shadow = make_shadow(self.module)
        self.update(shadow)
        return shadow

    def update(self, shadow: nn.Module, *, channels_last: bool = False) -> None:
        """Give a shadow model the current parameters, modes, and copies of the buffers.

        Parameters share memory, unless those of four dimensions get channels last. Raises
        InputError if other parameters are trainable than before.
        """
        if changed := sorted(trainable_names(self.module) ^ self._trainable):
            raise refused("refusal.norms", "trainable", names=", ".join(changed[:5]))
        for mine, theirs in zip(shadow.parameters(), self.module.parameters(), strict=True):
            value = theirs.data.clone() if self.writes else theirs.data
            mine.data = to_channels_last(value) if channels_last else value
        for copied, buffer in zip(shadow.buffers(), self.module.buffers(), strict=True):
            copied.data = buffer.data.clone()
        if self.module.training:
            for part, original in zip(shadow.modules(), self.module.modules(), strict=False):
                part.training = original.training

    def losses(self, shadow: nn.Module, batch: batches.Batch) -> Tensor:
        """Checked losses (batch,) of a shadow model, in training's arithmetic."""
        with self.precision():
            return batches.check_losses(
                self.loss_fn(batches.call(shadow, batch.inputs), batch.targets), batch.targets
            )


def without_checkpoints() -> AbstractContextManager[Any]:
    """Keep activations in the block: hooks and torch.func cannot follow a reentrant checkpoint."""
    return patch.object(torch.utils.checkpoint, "CheckpointFunction", _CALLED)


def autocast_now(device: str) -> partial[torch.autocast]:
    """Makes contexts with the autocast settings of this moment, to compute under them later.

    Weights cast under autocast are not cached: the cache would outlive a training step if the
    user's own autocast context does.
    """
    return partial(
        torch.autocast,
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )


def make_shadow(
    module: nn.Module, parameters: Mapping[int, nn.Parameter] | None = None
) -> nn.Module:
    """A copy without Opacus's hooks, in the module's modes, or in train() if it is in eval().

    It is also without FSDP2, and has the given parameters, by the id of those that they replace.
    """
    _check_forward(module)
    with _as_written(module):
        shadow = copy.deepcopy(module, dict(parameters or {}))
    return shadow if shadow.training else shadow.train()


def _check_forward(module: nn.Module) -> None:
    """Raise InputError if a forward was replaced by a function that holds the module's own parts.

    A copy would then run the module itself. A loss of ghost mode inside holds it, too.
    """
    own = set(map(id, module.modules()))
    for name, part in module.named_modules():
        forward = vars(part).get("forward")
        function = getattr(forward, "__func__", forward)
        held = getclosurevars(function).nonlocals.values() if isfunction(function) else ()
        if any(id(getattr(one, "__self__", one)) in own for one in held):
            raise refused("refusal.norms", "forward", name=name or type(part).__name__)
        if any(isinstance(one, DPLossFastGradientClipping) for one in vars(part).values()):
            raise refused("refusal.attached", "trainer_in_ghost_mode")


def to_channels_last(value: Tensor) -> Tensor:
    """The same values with channels last in memory, if there are four dimensions."""
    if value.ndim != 4:
        return value
    channels, height, width = value.shape[1:]
    if channels == 1:  # both orders are the same in memory; only the strides differ
        return value.contiguous().as_strided(value.shape, (height * width, 1, width, 1))
    return value.contiguous(memory_format=torch.channels_last)


def described_parameters(module: nn.Module) -> dict[str, Any]:
    """What the header of a log says of a model: trainable parameters, layers by class."""
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    layers = Counter(type(m).__name__ for m in module.modules() if not list(m.children()))
    return {"n_parameters": sum(sizes.values()), "trainable": sorted(sizes), "layers": dict(layers)}


def trainable_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that require gradients."""
    return frozenset(name for name, p in module.named_parameters() if p.requires_grad)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote; FSDP2 replaces it with a subclass."""
    kind = type(module)
    if not isinstance(module, FSDPModule):
        return kind
    return next(k for k in kind.__mro__[1:] if k is not FSDPModule)


@contextmanager
def _as_written(module: nn.Module) -> Iterator[None]:
    """Take hooks of Opacus and FSDP2 off a module, and put them back on leaving."""
    kept = [(part, type(part), dict(vars(part))) for part in module.modules()]
    try:
        for part, _, own in kept:
            part.__class__ = plain_class(part)
            for name in own:
                if name in _HOOKS:
                    kept_hooks = {k: hook for k, hook in own[name].items() if not _is_wrapper(hook)}
                    vars(part)[name] = type(own[name])(kept_hooks)
                elif name.startswith(_KEPT):
                    del vars(part)[name]
                elif name not in _OF_TORCH and not all(
                    t.is_leaf for t in batches.tensors_of(own[name])
                ):
                    # Of a forward pass; they cannot be copied.
                    vars(part)[name] = batches.map_tensors(own[name], Tensor.detach)
        yield
    finally:
        for part, kind, own in kept:
            part.__class__ = kind
            vars(part).update(own)


def _is_wrapper(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # Opacus wraps its backward hook in functools.partial
    owner = getattr(function, "__self__", None)
    return type(owner).__module__.startswith(_WRAPPERS)
