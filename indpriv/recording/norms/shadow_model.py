"""Twins of a model in training: copies that share its parameters, so that norms can be taken beside it. Sensitive."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule
from torch import Tensor, nn


def standard_module(model: nn.Module) -> nn.Module:
    """The user's own module inside any Opacus wrapper."""
    inner: nn.Module = model
    while True:
        if isinstance(inner, AbstractGradSampleModule):
            inner = inner._module
        elif isinstance(inner, DifferentiallyPrivateDistributedDataParallel):
            inner = inner.module
        elif (
            type(inner).__name__ == "OptimizedModule"
        ):  # of torch.compile, whose own module is slow to import
            inner = inner._orig_mod  # type: ignore[assignment]
        else:
            return inner


def make_twin(source: nn.Module) -> nn.Module:
    """A copy without Opacus's hooks, in the modes that training uses: the model's own, or train() where it is in eval()."""
    with _without_hooks(source):
        twin = copy.deepcopy(source)
    return twin if twin.training else twin.train()


def follow(
    twin: nn.Module, source: nn.Module, *, modes: bool = True, channels_last: bool = False
) -> None:
    """Let a twin have its source's current parameters, in the same memory where they lie alike, and copies of its buffers.

    A forward pass may change buffers, which then are the twin's own.

    Args:
        twin: of `make_twin`.
        source: it was made of.
        modes: whether its modules also train or evaluate as the source's do, where the source is in training.
        channels_last: whether the twin's parameters of four dimensions have channels last in memory.
    """
    for mine, theirs in zip(twin.parameters(), source.parameters(), strict=True):
        mine.data = to_channels_last(theirs.data) if channels_last else theirs.data
    for copied, buffer in zip(twin.buffers(), source.buffers(), strict=True):
        copied.data = buffer.data.clone()
    if modes and source.training:
        for module, original in zip(twin.modules(), source.modules(), strict=False):
            module.training = original.training


def trainable_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that training changes."""
    return frozenset(
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    )


def to_channels_last(value: Tensor) -> Tensor:
    """The same values with channels last in memory, where there are four dimensions."""
    if value.ndim != 4:
        return value
    channels, height, width = value.shape[1:]
    if channels == 1:  # the values lie in both orders; only the strides say which
        return value.contiguous().as_strided(value.shape, (height * width, 1, width, 1))
    return value.contiguous(memory_format=torch.channels_last)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Run with Opacus's per-example hooks taken off a module, and put them back."""
    hooked = [m for m in module.modules() if m._forward_hooks or m._backward_hooks]
    kept = [(m, m._forward_hooks, m._backward_hooks, m._backward_pre_hooks) for m in hooked]
    handles = module.__dict__.pop("autograd_grad_sample_hooks", None)
    try:
        for m, forward, backward, pre in kept:
            m._forward_hooks = _plain_hooks(forward)
            m._backward_hooks = _plain_hooks(backward)
            m._backward_pre_hooks = _plain_hooks(pre)
        yield
    finally:
        for m, forward, backward, pre in kept:
            m._forward_hooks, m._backward_hooks, m._backward_pre_hooks = forward, backward, pre
        if handles is not None:
            module.autograd_grad_sample_hooks = handles


def _plain_hooks(hooks: Any) -> Any:
    return type(hooks)((key, hook) for key, hook in hooks.items() if not _is_opacus(hook))


def _is_opacus(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # Opacus wraps its backward hook in functools.partial
    owner = getattr(function, "__self__", None)
    return type(owner).__module__.startswith("opacus.")
