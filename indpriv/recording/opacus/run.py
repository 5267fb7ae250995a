"""An Opacus run as its own objects describe it, and what is required of them.

Model, optimizer and loader are checked once, before anything is changed; settings are read at each
step, never from a configuration.
"""

import inspect
import math
from collections import Counter
from collections.abc import Sequence, Sized
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
from indpriv._facts import refused, text
from indpriv._types import FloatArray
from indpriv.errors import EvidenceError
from indpriv.norm_log.fields import SETTING_NAMES, StepSetting
from indpriv.recording.clipping import AdaClip, ClippingRule, QuantileClipping
from indpriv.recording.norms.shadow_model import standard_module
from indpriv.recording.opacus.draws import sampler_kind
from indpriv.recording.opacus.gradients import check_memory_format
from indpriv.recording.opacus.ranks import DISTRIBUTED, FSDP, GHOST_MODELS, WholeModel, clipper_of
from indpriv.recording.random_states import Sources

T = TypeVar("T")
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
        if not isinstance(model, nn.Module):  # from make_private(wrap_model=False)
            model = getattr(model, "_module", model)
        _check(model, optimizer, loader, n_examples)
        self.model, self.clipper = model, clipper_of(model)
        self.module = standard_module(model)
        self.whole = WholeModel(self.module)
        self.optimizer: DPOptimizer = optimizer
        self.loader, self.n_examples = loader, n_examples
        self.batch_sampler: Any = loader.batch_sampler
        self.sampler_class = type(self.batch_sampler).__name__
        self.sampler = sampler_kind(self.batch_sampler, optimizer)
        self.is_poisson = self.sampler in ("poisson", "truncated_poisson")
        self.sources = Sources(optimizer, self.module, loader, self.sampler)
        self.is_ghost = isinstance(self.clipper, GHOST_MODELS)
        self._rule = optimizer if isinstance(optimizer, ClippingRule) else None
        self._each = isinstance(optimizer, DPPerLayerOptimizer)
        self.clipping = "per_layer" if self._each else getattr(self._rule, "clipping", "flat")
        self.no_privacy = getattr(self._rule, "no_privacy", "")
        self.norm_backend = "functorch" if isinstance(optimizer, AdaClip) else "auto"
        check_memory_format(model)
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
        limit = self.optimizer.max_grad_norm
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
                raise EvidenceError(text("refusal.training", "new_parameter", shape=tuple(p.shape)))


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


def _check(model: Any, optimizer: Any, loader: DataLoader[Any], n_examples: int) -> None:
    """Raise InputError unless a model, its optimizer and its loader can be accounted."""
    wrapped = model._module if isinstance(model, AbstractGradSampleModule) else model
    needed: type = DifferentiallyPrivateDistributedDataParallel
    remedy = "opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model)"
    if isinstance(optimizer, FSDP):
        needed, remedy = FSDPModule, "opacus.utils.fsdp_utils.FSDP2Wrapper(model)"
    clipper = clipper_of(model) if isinstance(model, nn.Module) else None
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
