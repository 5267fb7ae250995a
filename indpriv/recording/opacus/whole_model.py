"""The user's module as one rank can run it alone, also where FSDP2 divides its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from opacus.grad_sample import (
    AbstractGradSampleModule,
    GradSampleModuleFastGradientClipping,
    GradSampleModuleFastGradientClippingFSDP,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from indpriv.errors import InputError
from indpriv.recording.norms.shadow_model import make_shadow

# Models that Opacus clips in ghost mode, by norms that it computes without the gradients.
GHOST_MODELS = (GradSampleModuleFastGradientClipping, GradSampleModuleFastGradientClippingFSDP)


class WholeModel:
    """The module in training, or a copy with whole parameters on each rank if FSDP2 shards it.

    Norms are taken on such a copy: the parts that ranks take of a pass then need no exchange. A
    rank must have room for all parameters.

    Attributes:
        is_sharded: whether FSDP2 divides the parameters between the ranks.
        module: with whole parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        """Copy a module if it is sharded; all ranks must then call this together.

        Raises:
            InputError: gradients are not the mean over all ranks, to which Opacus adds noise, or
                are of another precision than the parameters.
        """
        self._source = module
        self._shards = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self.is_sharded = bool(self._shards)
        self.module = module
        if self.is_sharded:
            _check_shards(module, self._shards)
            self.module = self.copy()

    @torch.no_grad()
    def copy(self) -> nn.Module:
        """A copy as it stands now; of a sharded module, all ranks must call this together."""
        if not self.is_sharded:
            return make_shadow(self._source)
        self._reshard()
        whole = {id(p): _whole(p) for p in self._source.parameters()}
        return make_shadow(self._source, whole)

    @torch.no_grad()
    def gather(self) -> None:
        """Bring a copy up to date; all ranks must call this together."""
        if not self.is_sharded:
            return
        self._reshard()
        for mine, theirs in zip(self.module.parameters(), self._source.parameters(), strict=True):
            mine.data = _whole(theirs).data
            mine.requires_grad_(theirs.requires_grad)
        for copied, buffer in zip(self.module.buffers(), self._source.buffers(), strict=True):
            copied.data = buffer.data.clone()
        for part, original in zip(self.module.modules(), self._source.modules(), strict=True):
            part.training = original.training

    def in_training(self, model: nn.Module) -> nn.Module:
        """What computes per-example gradients as the model that make_private returned does.

        Of a sharded one it is a copy in ghost mode, whose formulas for norms are the same.
        """
        if not (self.is_sharded and isinstance(model, AbstractGradSampleModule)):
            return model
        return GradSampleModuleFastGradientClipping(
            make_shadow(self.module),
            batch_first=model.batch_first,
            loss_reduction=model.loss_reduction,
            strict=False,
        )

    def adds_noise(self, optimizer: Any) -> bool:
        """Whether this rank adds noise: the first one, or each to its shard."""
        return self.is_sharded or getattr(optimizer, "rank", 0) == 0

    def noise_divisor(self, optimizer: Any) -> int:
        """What Opacus divides noise by: gradients that FSDP2 adds up are means over the ranks."""
        is_mean = self.is_sharded and optimizer.loss_reduction == "mean"
        return _ranks() if is_mean else 1

    def _reshard(self) -> None:
        """After a forward pass alone, FSDP2 keeps parameters whole, which are then others."""
        for part in self._shards:
            part.reshard()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(parameter: nn.Parameter) -> nn.Parameter:
    value = parameter.data
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _check_shards(module: nn.Module, shards: Sequence[FSDPModule]) -> None:
    """Raise InputError unless Opacus's noise is that of the mean of gradients over all ranks."""
    for name, p in module.named_parameters():
        if p.requires_grad and not (
            isinstance(p, DTensor) and p.device_mesh.ndim == 1 and p.device_mesh.size() == _ranks()
        ):
            raise InputError(
                f"the parameter {name!r} is not sharded over all {_ranks()} ranks, so that ranks "
                "would train parameters of their own; shard the model with "
                "opacus.utils.fsdp_utils.FSDP2Wrapper(model), without a mesh or ignored parameters"
            )
    for part in shards:
        state = part._get_fsdp_state()
        # One group in older versions of torch.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        if any(g is not None and g.gradient_divide_factor is not None for g in groups):
            raise InputError(
                "set_gradient_divide_factor was called, but Opacus divides the noise by the number "
                "of ranks: the noise would not be what the account assumes; leave it out"
            )
        policy = state._mp_policy
        if (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) != (None,) * 3:
            raise InputError(
                "FSDP2's mp_policy makes gradients of another precision than recorded norms; leave "
                "it out"
            )


def _ranks() -> int:
    return dist.get_world_size()
