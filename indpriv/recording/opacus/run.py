"""An Opacus run as its own objects describe it, what is required of them, and its processes.

Model, optimizer and loader are checked once, before anything is changed; settings are read at each
step, never from a configuration. Sensitive.

Opacus divides a run of several processes (ranks) between them: each rank draws from its own shard,
clips its own gradients and sums them; the first rank adds the noise to its sum, and all sums are
added. (With FSDP2, sums are added first, and each rank adds the noise of the parameters that it
holds.) Here all ranks exchange what they saw, before each step and after each pass, so that all
reach the same verdict and stop together. Only the first rank writes the log.
"""

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from opacus import grad_sample, optimizers
from opacus.accountants.accountant import IAccountant
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
from opacus.utils import uniform_sampler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from indpriv import _checks
from indpriv._facts import damaged, refused, text
from indpriv._types import FloatArray, IntArray
from indpriv.norm_log.fields import SETTING_NAMES, StepSetting
from indpriv.norm_log.session_counts import Found
from indpriv.recording.clipping import AdaClip, ClippingRule, QuantileClipping
from indpriv.recording.norms.shadow_model import make_shadow, plain_class, standard_module
from indpriv.recording.opacus.draws import TruncatedPoissonSampler
from indpriv.recording.random_states import Sources

T = TypeVar("T")
# Opacus's sampler drops an empty local batch. A run in which this is likelier is refused.
_DROPPED_BATCH = 1e-9


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
_SAME_RATE = 1 - 1e-9  # sampling rates that differ by less are the same number, rounded
_ACCOUNTED = (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    optimizers.SimpleDistributedPerLayerOptimizer,
    QuantileClipping,
    AdaClip,
    *DISTRIBUTED,
)
_FIXED = ("num_samples", "total_size", "max_batch_size", "batch_size", "drop_last", "sampler")
_NONE: Mapping[str, Any] = MappingProxyType({})


class Batch(NamedTuple):
    """Examples of one logical batch: positions (n,), and the norms (n,) that training clipped."""

    positions: IntArray
    norms: FloatArray


@dataclass(frozen=True)
class RankStep:
    """What one rank reports to the others before a step."""

    drawn: tuple[IntArray, ...]  # positions of each of its local batches since its last message
    counts: Mapping[str, int]  # up to now, by the names of their fields of TrainingCounts
    # (n,) of its part of the batch; None if that is not the one that was drawn.
    positions: IntArray | None = None
    norms: FloatArray | None = None  # (n,) that training clipped; None if no rank needs them
    found: Mapping[str, Found] = field(default_factory=dict)  # by comparisons up to the last step


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

        EvidenceError if a rank is gone, is at another moment (in words), differs in what is shared
        (name -> value), or draws with the same seed as another; None is a seed that is not known.
        """
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, (moment, dict(shared), seed, value), group=self._group)
        except RuntimeError as error:
            values = {"size": self.size, "moment": moment}
            raise damaged("refusal.training", "rank_is_gone", **values) from error
        moments, alike, seeds, parts = zip(*found, strict=True)
        if len(set(moments)) > 1:
            places = ", ".join(f"rank {rank} at {where}" for rank, where in enumerate(moments))
            raise damaged("refusal.training", "ranks_apart", places=places)
        for name in shared:
            each = [part[name] for part in alike]
            if any(one != each[0] for one in each):
                listed = ", ".join(f"{one!r} on rank {rank}" for rank, one in enumerate(each))
                said = {"moment": moment, "name": name, "values": listed}
                raise damaged("refusal.training", "ranks_differ", **said)
        known = [one for one in seeds if one is not None]
        if len(set(known)) < len(known):
            raise damaged("refusal.training", "same_seed", moment=moment, n=self.size)
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
        raise damaged("refusal.training", "drawn_twice", moment=moment)
    norms = [part.norms for part in parts if part.positions is not None and part.norms is not None]
    return Batch(positions, np.concatenate(norms)) if len(norms) == len(parts) else None


class WholeModel:
    """The module in training, or a copy with whole parameters on each rank if FSDP2 shards it.

    Norms are taken on such a copy: the parts that ranks take of a pass then need no exchange. A
    rank must have room for all parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        """Copy a module if it is sharded; all ranks must then call this together."""
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


def sampler_kind(batch_sampler: Any, optimizer: Any) -> str:
    """How batches are drawn: one of the samplers of a NormLog; "other" if nothing is known of it.

    InputError if several ranks do not fit together.
    """
    shards = type(batch_sampler) is uniform_sampler.DistributedUniformWithReplacementSampler
    if shards != isinstance(optimizer, DISTRIBUTED):
        classes = {"optimizer": optimizer, "sampler": batch_sampler}
        names = {key: type(one).__name__ for key, one in classes.items()}
        raise refused("refusal.attached", "shards", **names)
    if shards:
        _check_shards(batch_sampler, optimizer)
        return "poisson"
    if (
        type(batch_sampler) is uniform_sampler.UniformWithReplacementSampler
    ):  # a subclass may draw otherwise
        return "poisson"
    if type(batch_sampler) is TruncatedPoissonSampler:
        return "truncated_poisson"
    # A WeightedRandomSampler, a SubsetRandomSampler or a list may be made by looking at data.
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    if type(sampler) is SequentialSampler:
        return "sequential"
    if type(sampler) is not RandomSampler:
        return "other"
    if sampler.replacement or sampler.num_samples > len(sampler.data_source):
        return "with_replacement"
    return "fixed_size" if sampler.num_samples <= batch_sampler.batch_size else "shuffled"


def _check_shards(sampler: Any, optimizer: Any) -> None:
    """Raise InputError unless the ranks' shards and batches are as the account assumes."""
    size = dist.get_world_size()
    for owner, (rank, ranks) in {
        "sampler": (sampler.rank, sampler.num_replicas),
        "optimizer": (optimizer.rank, optimizer.world_size),
    }.items():
        if (rank, ranks) != (dist.get_rank(), size):
            values = {"owner": owner, "rank": rank, "ranks": ranks, "size": size}
            raise refused("refusal.attached", "other_rank", mine=dist.get_rank(), **values)
    smallest = sampler.total_size // size
    dropped = (1 - sampler.sample_rate) ** smallest * len(sampler) * size
    if dropped >= _DROPPED_BATCH:
        chances = {"mean": sampler.sample_rate * smallest, "chance": dropped}
        raise refused("refusal.attached", "empty_batches", most=_DROPPED_BATCH, **chances)


def convolutions(model: nn.Module) -> list[tuple[str, nn.Conv2d]]:
    """Trained convolutions that Opacus handles itself; it uses functorch for subclasses."""
    if getattr(model, "force_functorch", False):
        return []
    return [
        (name, layer)
        for name, layer in standard_module(model).named_modules()
        if plain_class(layer) is nn.Conv2d and any(p.requires_grad for p in layer.parameters())
    ]


class OpacusRun:
    """One attached model, optimizer and loader; InputError at once if it cannot be accounted."""

    def __init__(
        self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], n_examples: int
    ) -> None:
        """Check and read what make_private returned; n_examples: of the Recorder's data set."""
        if not isinstance(model, nn.Module):  # from make_private(wrap_model=False)
            model = getattr(model, "_module", model)
        self.model, self.clipper = model, _check(model, optimizer, loader, n_examples)
        self.module = standard_module(model)  # the user's own, inside the model
        self.whole = WholeModel(self.module)
        self.optimizer: DPOptimizer = optimizer
        self.loader, self.n_examples = loader, n_examples
        self._first_clip, layers = optimizer.max_grad_norm, getattr(optimizer, "max_grad_norms", ())
        self.clip_cost = _checks.check_clipping_norm_epsilon(0.0, [self._first_clip, *layers])
        self.batch_sampler: Any = loader.batch_sampler
        self.sampler_class = type(self.batch_sampler).__name__
        self.sampler = sampler_kind(self.batch_sampler, optimizer)
        self.is_poisson = self.sampler in ("poisson", "truncated_poisson")
        self.sources = Sources(optimizer, self.module, loader, self.sampler)
        # Opacus clips by norms that it computes without the gradients.
        self.is_ghost = isinstance(self.clipper, GHOST_MODELS)
        self._rule = optimizer if isinstance(optimizer, ClippingRule) else None
        self._each = isinstance(optimizer, DPPerLayerOptimizer)
        self.clipping = "per_layer" if self._each else getattr(self._rule, "clipping", "flat")
        self.no_privacy = getattr(self._rule, "no_privacy", "")  # whatever its noise
        # Where gradients are transformed before they are clipped.
        self.norm_backend = "functorch" if isinstance(optimizer, AdaClip) else "auto"
        for name, layer in convolutions(model):
            if not layer.weight.is_contiguous():  # channels last, and so are its outputs
                values = {"name": name, "remedy": text("refusal.training", "contiguous")}
                raise refused("refusal.attached", "channels_last", **values)
        self.history = AccountantHistory(optimizer)
        if self.is_poisson and self.history.sample_rate < self.sample_rate * _SAME_RATE:
            rates = {"assumed": self.history.sample_rate, "rate": self.sample_rate}
            raise refused("refusal.attached", "sample_rate", **rates)
        self._trained = {id(p) for p in optimizer.params}
        self.setting()

    @property
    def limits(self) -> tuple[float, ...]:
        """Clipping norm of each trainable tensor, in the module's order; empty if all share one."""
        each: Any = self.optimizer
        return tuple(map(float, self._in_order(each.max_grad_norms))) if self._each else ()

    @property
    def transforms(self) -> list[tuple[Tensor, Tensor]]:
        """(centre, factor) of each trainable tensor, if what is clipped is not the gradient."""
        return self._in_order(self._rule.transforms()) if isinstance(self._rule, AdaClip) else []

    def _in_order(self, values: Sequence[T]) -> list[T]:
        """Values of the optimizer's parameters, in the order of the module."""
        by_id = {id(p): value for p, value in zip(self.optimizer.params, values, strict=True)}
        return [by_id[id(p)] for p in self.module.parameters() if id(p) in by_id]

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise that the optimizer adds to the sum of gradients."""
        if self._rule is not None:
            return self._rule.noise_std
        return float(self.optimizer.noise_multiplier * self.optimizer.max_grad_norm)

    def contributions(self, norms: FloatArray, setting: StepSetting) -> FloatArray:
        """What examples with these norms (n,) contribute to a step, in units of max_grad_norm."""
        return norms if self._rule is None else self._rule.contributions(norms, setting)

    @property
    def sample_rate(self) -> float:
        """Share of the examples that a batch holds, before truncation; if unknown, as accounted."""
        if self.is_poisson:
            return float(self.batch_sampler.sample_rate)
        if self.sampler == "fixed_size":
            return float(self.batch_sampler.sampler.num_samples / self.n_examples)
        return self.history.sample_rate

    @property
    def fixed(self) -> list[Any]:
        """What a sampler draws from, how much at most, and what collates, which nobody may move."""
        drawing = [getattr(self.batch_sampler, name, None) for name in _FIXED]
        return [*drawing, self.loader.collate_fn]

    @property
    def shared_by_ranks(self) -> dict[str, Any]:
        """Values that must be equal on all ranks, or they do not train one model on one sample."""
        optimizer, sampler = self.optimizer, self.batch_sampler
        shards = ("total_size", "shuffle", "shuffle_seed", "epoch")
        return {
            # The noise is divided by the first rank's.
            "expected_batch_size": optimizer.expected_batch_size,
            "loss_reduction": optimizer.loss_reduction,
            **{name: getattr(sampler, name, None) for name in shards},
        }

    def setting(
        self, *, sample_rate: float | None = None, max_grad_norm: float | None = None
    ) -> StepSetting:
        """Realised settings of the current step; InputError if they cannot be accounted.

        sample_rate: at which its batch was drawn; default the sampler's now. max_grad_norm: needed
        while Opacus clips, when the optimizer has a stand-in for it.
        """
        if max_grad_norm is None:
            max_grad_norm = self._checked_max_grad_norm()
        rate = self.sample_rate if sample_rate is None else sample_rate
        settings = (self.optimizer.noise_multiplier, max_grad_norm, rate)
        return StepSetting(*map(float, map(_checks.check_setting, SETTING_NAMES, settings)))

    def _checked_max_grad_norm(self) -> float:
        limit = self.optimizer.max_grad_norm
        if limit is not self._first_clip and _checks.check_clipping_norm_epsilon(0.0, limit):
            raise refused("refusal.training", "released", limit=limit)
        if self.is_ghost and (mine := self.clipper.max_grad_norm) != limit:
            raise refused("refusal.training", "ghost_norms", model=mine, optimizer=limit)
        if getattr(self.optimizer, "_adjusted_noise_multiplier", None) is not None:
            raise refused("refusal.attached", "adaptive")
        whole = math.hypot(*self.limits)
        if self._each and not math.isclose(whole, limit, rel_tol=1e-6):
            raise refused("refusal.training", "layer_norms", limit=limit, whole=whole)
        return limit

    def parameter_versions(self) -> list[int]:
        """Numbers that change when something writes to the parameters."""
        return [p._version for p in self.module.parameters()]

    def check_update(self) -> None:
        """Raise unless this update is of one batch and trains the parameters of the beginning."""
        optimizer: Any = self.optimizer
        if optimizer.accumulated_iterations != 1:
            n = optimizer.accumulated_iterations
            raise refused("refusal.training", "accumulated", n=n)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.requires_grad and id(p) not in self._trained:
                raise damaged("refusal.training", "new_parameter", shape=tuple(p.shape))


class AccountantHistory:
    """What Opacus's accountant has counted since the Recorder was attached, and before."""

    def __init__(self, optimizer: DPOptimizer) -> None:
        """Find the accountant behind the step hook, perhaps called by another hook."""
        self._accountant: IAccountant | None = None
        self.sample_rate = 1.0
        hooks = [optimizer.step_hook]
        for hook in hooks:  # the list grows while it is searched
            enclosed = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
            accountant = enclosed.get("self")
            if isinstance(accountant, IAccountant):
                self._accountant, self.sample_rate = accountant, float(enclosed["sample_rate"])
                break
            found = filter(inspect.isfunction, enclosed.values())
            hooks += [value for value in found if value not in hooks]
        self._before = self._counted()
        self.steps_before = self._before.total()

    @property
    def steps(self) -> int | None:
        """Number of steps counted since attaching; None without an accountant."""
        return None if self._accountant is None else self._counted().total() - self.steps_before

    def matches(self, counted: Counter[float], sample_rate: float) -> bool:
        """Whether the history agrees with the number of steps counted at each noise multiplier.

        The history may not have a smaller sample_rate than the sampler.
        """
        found: Counter[float] = Counter()
        for (noise_multiplier, rate), steps in (self._counted() - self._before).items():
            if rate < sample_rate * _SAME_RATE:
                return False
            found[noise_multiplier] += steps
        return self._accountant is None or found == counted

    def _counted(self) -> Counter[tuple[float, float]]:
        """Steps by noise multiplier and sampling rate."""
        counted: Counter[tuple[float, float]] = Counter()
        for noise, rate, steps in () if self._accountant is None else self._accountant.history:
            counted[float(noise), float(rate)] += steps
        return counted


def _check(model: Any, optimizer: Any, loader: DataLoader[Any], n_examples: int) -> Any:
    """Raise InputError unless a model, its optimizer and its loader can be accounted.

    Returns what takes per-example gradients of the model: a wrapper or hooks; itself if nothing
    does.
    """
    wrapped = model._module if isinstance(model, grad_sample.AbstractGradSampleModule) else model
    needed: type = DifferentiallyPrivateDistributedDataParallel
    remedy = "opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model)"
    if isinstance(optimizer, FSDP):
        needed, remedy = FSDPModule, "opacus.utils.fsdp_utils.FSDP2Wrapper(model)"
    layers = model.modules() if isinstance(model, nn.Module) else ()
    hooks = (hook for layer in layers for hook in layer._forward_hooks.values())
    owners = {getattr(hook, "__self__", None): None for hook in hooks}
    clippers = [owner for owner in owners if isinstance(owner, _CLIPPERS)] or [model]
    clipper: Any = clippers[0]
    is_ghost = isinstance(optimizer, DPOptimizerFastGradientClipping)
    reduction = getattr(optimizer, "loss_reduction", None)
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    sizes = {
        "the loader's data set": len(dataset) if isinstance(dataset, Sized) else None,
        # With several ranks, num_samples is the size of a shard.
        "the loader's sampler": getattr(sampler, "total_size", None)
        or getattr(sampler, "num_samples", n_examples),
    }
    name, size = next((one for one in sizes.items() if one[1] != n_examples), ("", n_examples))
    faults = {
        "optimizer": not isinstance(optimizer, DPOptimizer),
        "adaptive": type(optimizer) is optimizers.AdaClipDPOptimizer,
        "clipping": type(optimizer) not in _ACCOUNTED
        and not (isinstance(optimizer, ClippingRule) and optimizer.no_privacy),
        "several_ranks": isinstance(optimizer, DISTRIBUTED) and not isinstance(wrapped, needed),
        "model": not isinstance(model, nn.Module),
        "several_clippers": len(clippers) > 1,
        "batch_first": not getattr(clipper, "batch_first", True),
        "step_hook": getattr(optimizer, "step_hook", None) is None,
        "ghost": is_ghost and not isinstance(clipper, GHOST_MODELS),
        "loss_reduction": reduction not in ("mean", "sum"),
        "batch_sampler": sampler is None,
        "in_order": not getattr(loader, "in_order", True),
        "size": size != n_examples,
    }
    if case := next((case for case, found in faults.items() if found), ""):
        classes = {"optimizer": optimizer, "model": model, "wrapped": wrapped}
        names = {key: type(one).__name__ for key, one in classes.items()}
        names |= {"remedy": remedy, "name": name}
        values = {"reduction": reduction, "n_examples": n_examples, "size": size}
        raise refused("refusal.attached", case, **names, **values)
    trained = {id(p) for p in optimizer.params}
    named = standard_module(model).named_parameters()
    trainable = {id(p): name for name, p in named if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in trained][:5]
    foreign = len(trained - set(trainable))
    if missing or foreign:
        raise refused("refusal.attached", "parameters", missing=missing, foreign=foreign)
    return clipper
