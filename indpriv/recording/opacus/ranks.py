"""The processes (ranks) that train one model together, and what they exchange. Sensitive.

Opacus divides a run between them: each rank draws from its own shard, clips its own gradients and
sums them; the first rank adds the noise to its sum, and all sums are added. (With FSDP2, sums are
added first, and each rank adds the noise of the parameters that it holds.) Here all ranks exchange
what they saw, before each step and after each pass, so that all reach the same verdict and stop
together. Only the first rank writes the log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from opacus import grad_sample, optimizers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from indpriv._facts import refused, text
from indpriv._types import FloatArray, IntArray
from indpriv.errors import EvidenceError
from indpriv.norm_log.session_counts import Found
from indpriv.recording.norms.shadow_model import make_shadow


def of_opacus(module: ModuleType, *names: str) -> tuple[type, ...]:
    """The classes of these names; Opacus 1.5 lacks those for FSDP2."""
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


# What clips in ghost mode, by norms that are computed without the gradients: a model of Opacus, or
# what make_private(wrap_model=False) hooks into the user's own, from Opacus 1.6 on.
_GHOST = ("GradSampleModuleFastGradientClipping", "GradSampleHooksFastGradientClipping")
GHOST_MODELS = of_opacus(grad_sample, *_GHOST, f"{_GHOST[0]}FSDP")
_CLIPPERS = (
    grad_sample.AbstractGradSampleModule,
    *of_opacus(grad_sample, "AbstractGradSampleHooks"),
)
FSDP = of_opacus(optimizers, "FSDPOptimizerFastGradientClipping")
_BY_RANK = ("DistributedDPOptimizer", "DistributedDPOptimizerFastGradientClipping")
DISTRIBUTED = (*of_opacus(optimizers, *_BY_RANK), *FSDP)


def clipper_of(model: nn.Module) -> Any:
    """What takes per-example gradients of a model, a wrapper or hooks; itself if nothing does."""
    hooks = (hook for layer in model.modules() for hook in layer._forward_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, _CLIPPERS)), model)


T = TypeVar("T")
_NONE: Mapping[str, Any] = MappingProxyType({})


class Batch(NamedTuple):
    """Examples of one logical batch: positions (n,), and the norms (n,) that training clipped."""

    positions: IntArray
    norms: FloatArray


@dataclass(frozen=True)
class RankStep:
    """What one rank reports to the others before a step.

    Attributes:
        drawn: positions of each of its local batches since its last message.
        counts: up to now, by the names of their fields of TrainingCounts.
        positions: (n,) of its part of the batch; None if that is not the one that was drawn.
        norms: (n,) that training clipped; None if no rank needs them.
        found: by its comparisons, up to the last step.
    """

    drawn: tuple[IntArray, ...]
    counts: Mapping[str, int]
    positions: IntArray | None = None
    norms: FloatArray | None = None
    found: Mapping[str, Found] = field(default_factory=dict)


class Ranks:
    """The ranks of one run; a run in one process has one rank, which exchanges nothing."""

    def __init__(self, optimizer: Any) -> None:
        """Find the ranks that an optimizer works with; all of them must call this together."""
        self.rank, self.size, self._group = 0, 1, None
        if isinstance(optimizer, DISTRIBUTED):
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            # A group of its own: training's may use GPUs, and be busy.
            self._group = dist.new_group(backend="gloo")
        self.writes = self.rank == 0  # the log

    def gather(
        self, moment: str, value: T, *, shared: Mapping[str, Any] = _NONE, seed: int | None = None
    ) -> list[T]:
        """Values of all ranks, in their order. All must call this at the same moment.

        EvidenceError if a rank is gone, is at another moment, differs in what must be equal, or
        draws with the same seed as another.

        Args:
            moment: in words.
            value: of this rank.
            shared: name -> value of what must be equal on all ranks.
            seed: must differ between ranks; None if it is not known.
        """
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, (moment, dict(shared), seed, value), group=self._group)
        except RuntimeError as error:
            values = {"size": self.size, "moment": moment}
            raise EvidenceError(text("refusal.training", "rank_is_gone", **values)) from error
        moments, alike, seeds, parts = zip(*found, strict=True)
        if len(set(moments)) > 1:
            places = ", ".join(f"rank {rank} at {where}" for rank, where in enumerate(moments))
            raise EvidenceError(text("refusal.training", "ranks_apart", places=places))
        for name in shared:
            each = [part[name] for part in alike]
            if any(one != each[0] for one in each):
                listed = ", ".join(f"{one!r} on rank {rank}" for rank, one in enumerate(each))
                said = {"moment": moment, "name": name, "values": listed}
                raise EvidenceError(text("refusal.training", "ranks_differ", **said))
        known = [one for one in seeds if one is not None]
        if len(set(known)) < len(known):
            raise EvidenceError(text("refusal.training", "same_seed", moment=moment, n=self.size))
        return list(parts)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def whole_batch(moment: str, parts: Sequence[RankStep]) -> Batch | None:
    """Positions and norms of the logical batch that the ranks drew; None if a part is not known.

    EvidenceError if two ranks drew the same example.
    """
    known = [part.positions for part in parts if part.positions is not None]
    positions = np.concatenate([*known, np.zeros(0, dtype=np.int64)])
    if len(parts) > 1 and len(np.unique(positions)) < len(positions):
        raise EvidenceError(text("refusal.training", "drawn_twice", moment=moment))
    norms = [part.norms for part in parts if part.positions is not None and part.norms is not None]
    return Batch(positions, np.concatenate(norms)) if len(norms) == len(parts) else None


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

        InputError if gradients are not the mean over all ranks, to which Opacus adds noise, or are
        of another precision than the parameters.
        """
        self._source = module
        self._shards = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self.is_sharded = bool(self._shards)
        self.module = module
        if self.is_sharded:
            self._check_shards()
            self.module = self.copy()

    @torch.no_grad()
    def copy(self) -> nn.Module:
        """A copy as it stands now; of a sharded module, all ranks must call this together."""
        if not self.is_sharded:
            return make_shadow(self._source)
        self._reshard()
        return make_shadow(self._source, {id(p): _whole(p) for p in self._source.parameters()})

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
        if not (self.is_sharded and isinstance(model, grad_sample.AbstractGradSampleModule)):
            return model
        return grad_sample.GradSampleModuleFastGradientClipping(
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
        return dist.get_world_size() if is_mean else 1

    def _reshard(self) -> None:
        """After a forward pass alone, FSDP2 keeps parameters whole, which are then others."""
        for part in self._shards:
            part.reshard()

    def _check_shards(self) -> None:
        """Raise InputError unless Opacus's noise is that of the mean of gradients of all ranks."""
        size = dist.get_world_size()
        for name, p in self._source.named_parameters():
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            if p.requires_grad and (mesh is None or mesh.ndim != 1 or mesh.size() != size):
                raise refused("refusal.attached", "not_sharded", name=name, size=size)
        for part in self._shards:
            state = part._get_fsdp_state()
            # One group in older versions of torch.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            if any(g is not None and g.gradient_divide_factor is not None for g in groups):
                raise refused("refusal.attached", "divide_factor")
            policy = state._mp_policy
            if (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) != (None,) * 3:
                raise refused("refusal.attached", "mp_policy")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(parameter: nn.Parameter) -> nn.Parameter:
    value = parameter.data
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
