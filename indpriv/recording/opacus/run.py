"""An Opacus run as its own objects describe it, and what is required of them.

Model, optimizer and loader are checked once, before anything is changed; settings are read at each
step, never from a configuration.
"""

import inspect
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from opacus import optimizers
from opacus.accountants.accountant import IAccountant
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.fields import SETTING_NAMES, StepSetting
from indpriv.recording import clipping
from indpriv.recording.clipping import AdaClip, ClippingRule
from indpriv.recording.norms.shadow_model import standard_module
from indpriv.recording.opacus.draws import sampler_kind
from indpriv.recording.opacus.gradients import check_memory_format
from indpriv.recording.opacus.ranks import DISTRIBUTED, FSDP, GHOST_MODELS, WholeModel
from indpriv.recording.random_states import Sources

T = TypeVar("T")
_SAME_RATE = 1 - 1e-9  # sampling rates that differ by less are the same number, rounded
_ACCOUNTED = (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    optimizers.SimpleDistributedPerLayerOptimizer,
    clipping.QuantileClipping,
    AdaClip,
    clipping.LargestNormNoise,
    *DISTRIBUTED,
)
_NOT_AS_PROVEN = (
    "Opacus's adaptive clipping is not supported: it does not centre the number of unclipped "
    "gradients, so its noise is too little for the theorem, and it divides by the number of "
    "sampled examples, which is data; use indpriv.recording.QuantileClipping.of(optimizer)"
)


class OpacusRun:
    """One attached model, optimizer and loader; InputError at once if it cannot be accounted.

    Attributes:
        module: the user's own, inside the model.
        whole: the same with whole parameters, where FSDP2 shards them.
        sampler: how batches are drawn; one of the samplers of a NormLog.
        is_poisson: each batch is a Poisson sample, truncated or not.
        is_ghost: Opacus clips in ghost mode, by norms that it computes without the gradients.
        clipping: how gradients are clipped: "flat", "per_layer", "quantile" or "adaclip".
        no_privacy: why the run is not differentially private, whatever its noise; "" if it may be.
        norm_backend: what takes norms: "auto", or "functorch", where gradients are transformed
            before they are clipped.
        sampler_class: name of the class that draws the batches.
        sources: of random numbers.
        history: of Opacus's accountant.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], n_examples: int
    ) -> None:
        """Check and read what make_private returned; n_examples: of the Recorder's data set."""
        _check_optimizer(optimizer, model)
        self.model: Any = model
        self.module = standard_module(model)
        self.whole = WholeModel(self.module)
        self.optimizer: DPOptimizer = optimizer
        self.loader, self.n_examples = loader, n_examples
        self.batch_sampler: Any = loader.batch_sampler
        self.sampler_class = type(self.batch_sampler).__name__
        self.sampler = sampler_kind(self.batch_sampler, optimizer)
        self.is_poisson = self.sampler in ("poisson", "truncated_poisson")
        self.sources = Sources(optimizer, self.module, loader, self.sampler)
        self.is_ghost = isinstance(model, GHOST_MODELS)
        self._rule = optimizer if isinstance(optimizer, ClippingRule) else None
        self._each = isinstance(optimizer, DPPerLayerOptimizer)
        self.clipping = "per_layer" if self._each else getattr(self._rule, "clipping", "flat")
        self.no_privacy = getattr(self._rule, "no_privacy", "")
        self.norm_backend = "functorch" if isinstance(optimizer, AdaClip) else "auto"
        _check_loader(loader, n_examples)
        _check_parameters(self.module, optimizer)
        check_memory_format(model)
        self.history = AccountantHistory(optimizer)
        if self.is_poisson and self.history.sample_rate < self.sample_rate * _SAME_RATE:
            raise InputError(
                f"Opacus's accountant assumes sample_rate={self.history.sample_rate:.6g}, but the "
                f"loader samples at {self.sample_rate:.6g}, so the accountant's epsilon is too "
                "small; make the loader and the accountant with one make_private call"
            )
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
    def steps_per_epoch(self) -> int:
        """Number of logical batches in an epoch."""
        return len(self.batch_sampler)

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

        Args:
            sample_rate: rate at which its batch was drawn; default the sampler's rate now.
            max_grad_norm: needed while Opacus clips, when the optimizer has a stand-in for it.
        """
        if max_grad_norm is None:
            max_grad_norm = self._checked_max_grad_norm()
        rate = self.sample_rate if sample_rate is None else sample_rate
        settings = (self.optimizer.noise_multiplier, max_grad_norm, rate)
        return StepSetting(*map(float, map(_checks.check_setting, SETTING_NAMES, settings)))

    def _checked_max_grad_norm(self) -> float:
        max_grad_norm = self.optimizer.max_grad_norm
        if self.is_ghost and self.model.max_grad_norm != max_grad_norm:
            raise InputError(
                f"the model clips at max_grad_norm={self.model.max_grad_norm}, but the optimizer "
                f"adds noise for {max_grad_norm}; in ghost mode set both, or the noise is not what "
                "the account assumes"
            )
        if getattr(self.optimizer, "_adjusted_noise_multiplier", None) is not None:
            raise InputError(_NOT_AS_PROVEN)
        limits = self.limits
        if limits and not math.isclose(math.hypot(*limits), max_grad_norm, rel_tol=1e-6):
            raise InputError(
                f"max_grad_norm={max_grad_norm:g}, which the noise is for, is not the Euclidean "
                f"norm of the clipping norms per layer, {math.hypot(*limits):g}; Opacus's "
                "schedulers move only one of the two: move both"
            )
        return max_grad_norm

    def parameter_versions(self) -> list[int]:
        """Numbers that change when something writes to the parameters."""
        return [p._version for p in self.module.parameters()]

    def check_update(self) -> None:
        """Raise unless this update is of one batch and trains the parameters of the beginning."""
        optimizer: Any = self.optimizer
        if optimizer.accumulated_iterations != 1:
            raise InputError(
                f"{optimizer.accumulated_iterations} batches were accumulated into one step; each "
                "Poisson batch must be one step (use BatchMemoryManager if memory is short)"
            )
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.requires_grad and id(p) not in self._trained:
                raise EvidenceError(
                    f"the optimizer trains a parameter of shape {tuple(p.shape)} that it did not "
                    "train when the Recorder was attached: no recorded norm contains its gradient; "
                    "add or unfreeze parameters before attaching"
                )


class AccountantHistory:
    """What Opacus's accountant has counted since the Recorder was attached.

    Attributes:
        sample_rate: at which the accountant counts steps; 1 if there is none.
        steps_before: that it had counted by then.
    """

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


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise InputError if the optimizer cannot be accounted, or does not belong to the model."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, DPOptimizer):
        raise InputError(
            f"the optimizer is a {name}, not an Opacus DPOptimizer; attach the one that "
            "PrivacyEngine.make_private returned"
        )
    if type(optimizer) is optimizers.AdaClipDPOptimizer:
        raise InputError(_NOT_AS_PROVEN)
    if type(optimizer) not in _ACCOUNTED:
        raise InputError(
            f"{name} is not supported: flat clipping is accounted, and per layer (not automatic or "
            'sharded); use make_private(clipping="flat")'
        )
    if isinstance(optimizer, DISTRIBUTED):
        _check_distributed(model, optimizer)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}, as make_private(wrap_model=False) returns; "
            "attach the module that it was made for"
        )
    if isinstance(model, AbstractGradSampleModule) and not model.batch_first:
        raise InputError(
            "make_private(batch_first=False) takes the second dimension of every layer's input for "
            "the examples; leave it out, and give all layers inputs with the examples first"
        )
    if optimizer.step_hook is None:
        raise InputError(
            "the optimizer has no step hook: Opacus's accountant is not attached and would report "
            "epsilon 0; attach the optimizer that PrivacyEngine.make_private returned"
        )
    is_ghost = isinstance(optimizer, DPOptimizerFastGradientClipping)
    if is_ghost and not isinstance(model, GHOST_MODELS):
        raise InputError(
            f"the optimizer clips in ghost mode, but the model is a plain {type(model).__name__}, "
            "whose clipping norm cannot be read; attach the model that make_private returned"
        )
    if optimizer.loss_reduction not in ("mean", "sum"):
        raise InputError(f"loss_reduction={optimizer.loss_reduction!r} is not known")


def _check_distributed(model: nn.Module, optimizer: Any) -> None:
    """Raise InputError unless a model of several ranks is one that its optimizer is for."""
    wrapped = model._module if isinstance(model, AbstractGradSampleModule) else model
    needed: type = DifferentiallyPrivateDistributedDataParallel
    remedy = "opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model)"
    if isinstance(optimizer, FSDP):
        needed, remedy = FSDPModule, "opacus.utils.fsdp_utils.FSDP2Wrapper(model)"
    if not isinstance(wrapped, needed):
        raise InputError(
            "the optimizer adds up the gradients of several ranks, but the model is a "
            f"{type(wrapped).__name__}; pass {remedy} to make_private"
        )


def _check_loader(loader: DataLoader[Any], n_examples: int) -> None:
    """Raise InputError if batches would not match their draws, or the data set is another one."""
    sampler = loader.batch_sampler
    if sampler is None:
        raise InputError(
            "the loader has no batch sampler (batch_size=None); pass the loader that make_private "
            "returned"
        )
    if not getattr(loader, "in_order", True):
        raise InputError(
            "the loader has in_order=False, so batches would not match their draws; use "
            "in_order=True"
        )
    sizes = {
        "the loader's data set": len(loader.dataset),  # type: ignore[arg-type]
        # With several ranks, num_samples is the size of a shard.
        "the loader's sampler": getattr(sampler, "total_size", None)
        or getattr(sampler, "num_samples", n_examples),
    }
    for name, size in sizes.items():
        if size != n_examples:
            raise InputError(
                f"the Recorder's dataset has {n_examples} examples, {name} has {size}; pass the "
                "training set to the Recorder"
            )


def _check_parameters(module: nn.Module, optimizer: DPOptimizer) -> None:
    """Raise InputError unless the optimizer trains exactly the model's trainable parameters."""
    trained = {id(p) for p in optimizer.params}
    trainable = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in trained]
    foreign = len(trained - set(trainable))
    if missing or foreign:
        raise InputError(
            "the optimizer does not train exactly the model's trainable parameters (not trained: "
            f"{missing[:5]}; not in the model, or frozen: {foreign}), so norms would be those of "
            "another gradient; freeze the rest with requires_grad_(False)"
        )
