"""An Opacus run as its own objects describe it: settings, sampler, generators, accountant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from opacus.accountants.accountant import IAccountant
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.step_settings import StepSetting
from indpriv.recording.clipping.rules import AdaClip, ClippingRule
from indpriv.recording.norms.shadow_model import standard_module
from indpriv.recording.opacus.checks import (
    NOT_AS_PROVEN,
    check_loader,
    check_optimizer,
    check_parameters,
    find_accountant,
    sampler_kind,
)
from indpriv.recording.opacus.memory_format import check_memory_format
from indpriv.recording.opacus.whole_model import GHOST_MODELS, WholeModel
from indpriv.recording.random_states import generator_of, is_guessable, private_generator, source_of

T = TypeVar("T")
_SAME_RATE = 1 - 1e-9  # sampling rates that differ by less are the same number, rounded


class OpacusRun:
    """One attached model, optimizer and loader; InputError at once if it cannot be accounted."""

    def __init__(
        self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], n_examples: int
    ) -> None:
        """Check and read what make_private returned; n_examples: of the Recorder's data set."""
        check_optimizer(optimizer, model)
        self.model: Any = model
        self.module = standard_module(model)
        self.whole = WholeModel(self.module)
        self.optimizer: DPOptimizer = optimizer
        self._rule = optimizer if isinstance(optimizer, ClippingRule) else None
        self.loader = loader
        self.n_examples = n_examples
        self.batch_sampler: Any = loader.batch_sampler
        self.sampler = sampler_kind(self.batch_sampler, optimizer)
        check_loader(loader, n_examples)
        check_parameters(self.module, optimizer)
        check_memory_format(model, self.module)
        self.history = AccountantHistory(*find_accountant(optimizer))
        if self.is_poisson and self.history.sample_rate < self.sample_rate * _SAME_RATE:
            raise InputError(
                f"Opacus's accountant assumes sample_rate={self.history.sample_rate:.6g}, but the "
                f"loader samples at {self.sample_rate:.6g}, so the accountant's epsilon is too "
                "small; make the loader and the accountant with one make_private call"
            )
        self._trained = {id(p) for p in optimizer.params}
        self._seeds: dict[torch.Generator, int] = {}  # when they were asked for first
        self.setting()

    @property
    def limits(self) -> tuple[float, ...]:
        """Clipping norm of each trainable tensor, in the module's order; empty if all share one."""
        if not isinstance(self.optimizer, DPPerLayerOptimizer):
            return ()
        return tuple(map(float, self._in_order(self.optimizer.max_grad_norms)))

    @property
    def transforms(self) -> list[tuple[Tensor, Tensor]]:
        """(centre, factor) of each trainable tensor, if what is clipped is not the gradient."""
        return self._in_order(self._rule.transforms()) if isinstance(self._rule, AdaClip) else []

    def _in_order(self, values: Sequence[T]) -> list[T]:
        """Values of the optimizer's parameters, in the order of the module."""
        by_id = {id(p): value for p, value in zip(self.optimizer.params, values, strict=True)}
        return [by_id[id(p)] for p in self.module.parameters() if id(p) in by_id]

    @property
    def norm_backend(self) -> str:
        """What takes norms: "functorch" if gradients are transformed before clipping, or "auto"."""
        return "functorch" if isinstance(self._rule, AdaClip) else "auto"

    @property
    def clipping(self) -> str:
        """How gradients are clipped: "flat", "per_layer", "quantile" or "adaclip"."""
        if self._rule is not None:
            return self._rule.clipping
        return "per_layer" if isinstance(self.optimizer, DPPerLayerOptimizer) else "flat"

    @property
    def no_privacy(self) -> str:
        """Why the run is not differentially private, whatever its noise; "" if it may be."""
        return "" if self._rule is None else self._rule.no_privacy

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
    def is_poisson(self) -> bool:
        """Whether each batch is a Poisson sample, truncated or not."""
        return self.sampler in ("poisson", "truncated_poisson")

    @property
    def is_ghost(self) -> bool:
        """Whether Opacus clips in ghost mode, by norms that it computes without the gradients."""
        return isinstance(self.model, GHOST_MODELS)

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
    def sampler_class(self) -> str:
        """Name of the class that draws the batches."""
        return type(self.batch_sampler).__name__

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

    @property
    def sampling_seed(self) -> int | None:
        """Seed of the generator that draws the batches; a secure generator has none."""
        if self.optimizer.secure_mode:
            return None
        # The Mersenne Twister uses the low 32 bits only.
        return int(self.sampling_generator.initial_seed()) % 2**32

    @property
    def sampling_generator(self) -> torch.Generator:
        """The generator that draws the batches, on the CPU."""
        owners = self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.loader
        given = (getattr(owner, "generator", None) for owner in owners)
        return next((one for one in given if one is not None), torch.default_generator)

    def draw_privately(self) -> None:
        """Give noise and batches private generators where they draw from torch's default ones."""
        given, at = self.noise_generator, next(self.module.parameters()).device
        default, secure = generator_of(None, at), self.optimizer.secure_mode
        if given is None or given is default or (given.device != at and not secure):  # moved since
            self.optimizer.generator = private_generator(at)
        owner = self.batch_sampler if self.is_poisson else getattr(self.batch_sampler, "sampler", 0)
        if hasattr(owner, "generator") and self.sampling_generator is torch.default_generator:
            owner.generator = private_generator()

    @property
    def noise_generator(self) -> torch.Generator | None:
        """The generator that draws the noise; None if it is not known."""
        return generator_of(self.optimizer.generator, next(self.module.parameters()).device)

    @property
    def guessable_seed(self) -> bool:
        """Whether a seed of noise or batches seems chosen by a person, or is torch's default.

        Also one that was set since this was asked first.
        """
        if self.optimizer.secure_mode:
            return False
        secret = self.is_poisson or self.sampler == "fixed_size"  # who takes part
        used = [self.noise_generator, *([self.sampling_generator] if secret else [])]
        seeds = {one: one.initial_seed() for one in used if one is not None}
        set_again = any(self._seeds.setdefault(one, seed) != seed for one, seed in seeds.items())
        return set_again or any(map(is_guessable, used))

    @property
    def random_source(self) -> str:
        """What draws noise and batches, in words."""
        if self.optimizer.secure_mode:
            return "cryptographically secure generators (secure_mode)"
        noise, batches = source_of(self.noise_generator), source_of(self.sampling_generator)
        return noise if noise == batches else f"noise: {noise}; batches: {batches}"

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
        return StepSetting(
            float(_checks.check_noise_multiplier(self.optimizer.noise_multiplier)),
            float(_checks.check_max_grad_norm(max_grad_norm)),
            float(
                _checks.check_sample_rate(self.sample_rate if sample_rate is None else sample_rate)
            ),
        )

    def _checked_max_grad_norm(self) -> float:
        max_grad_norm = self.optimizer.max_grad_norm
        if self.is_ghost and self.model.max_grad_norm != max_grad_norm:
            raise InputError(
                f"the model clips at max_grad_norm={self.model.max_grad_norm}, but the optimizer "
                f"adds noise for {max_grad_norm}; in ghost mode set both, or the noise is not what "
                "the account assumes"
            )
        if getattr(self.optimizer, "_adjusted_noise_multiplier", None) is not None:
            raise InputError(NOT_AS_PROVEN)
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

    def check_trained_parameters(self) -> None:
        """Raise if this update would train an added parameter."""
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            if p.requires_grad and id(p) not in self._trained:
                raise EvidenceError(
                    f"the optimizer trains a parameter of shape {tuple(p.shape)} that it did not "
                    "train when the Recorder was attached: no recorded norm contains its gradient; "
                    "add or unfreeze parameters before attaching"
                )


class AccountantHistory:
    """What Opacus's accountant has counted since the Recorder was attached."""

    def __init__(self, accountant: IAccountant | None, sample_rate: float) -> None:
        """Begin; sample_rate: the rate at which the accountant, if there is one, counts steps."""
        self._accountant, self.sample_rate = accountant, sample_rate
        self.steps_before = self._all_steps()

    @property
    def steps(self) -> int | None:
        """Number of steps counted since attaching; None without an accountant."""
        return None if self._accountant is None else self._all_steps() - self.steps_before

    def matches(self, counted: Counter[float], sample_rate: float) -> bool:
        """Whether the history agrees with the number of steps counted at each noise multiplier.

        The history may not have a smaller sample_rate than the sampler.
        """
        if self._accountant is None:
            return True
        found: Counter[float] = Counter()
        skip = self.steps_before
        for noise_multiplier, rate, steps in self._accountant.history:
            new = max(0, steps - skip)
            skip = max(0, skip - steps)
            if new and rate < sample_rate * _SAME_RATE:
                return False
            found[float(noise_multiplier)] += new
        return +found == counted

    def _all_steps(self) -> int:
        return 0 if self._accountant is None else sum(s for _, _, s in self._accountant.history)
