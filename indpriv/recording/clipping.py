"""Clipping rules that Opacus lacks, and clip thresholds of single examples. Sensitive.

Each rule is an optimizer in place of the one that `PrivacyEngine.make_private` returned, in hooks
mode; Opacus has none of them, or in a form that its account does not fit:

    optimizer = QuantileClipping.of(optimizer, quantile=0.5)

The Recorder logs what an example contributes to the released sum, as a share of what the noise
multiplier is for, times max_grad_norm.

Individual clipping (Yu et al. 2023, Algorithm 3) clips each example at its last recorded level, so
that the account with between_records="last" is exact. Levels come from full records only: they
depend on the trajectory and on the example, never on which examples were sampled. A level is the
recorded norm plus a headroom, which the paper has not, rounded up: norms grow until the next
record. The noise stays at noise_multiplier * max_grad_norm, and the log records levels.

Under a privacy filter an example that would exceed the cap is left out, by clipping it at 0 from
then on. Before each step, every example that is not yet left out is charged for its clip threshold
of that step, whether it is drawn or not. Rows of one unit are charged, and left out, together.
`indpriv.PrivacyFilter` says what this guarantees.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self
from unittest.mock import patch

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise
from torch import Tensor

from indpriv._checks import check_number
from indpriv._facts import damaged, refused, text
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.errors import PrivacyWarning
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import FULL_PRECISION, Levels

# With a tenth of it, levels an epoch old cost accuracy (benchmarks/individual_clipping.py).
DEFAULT_HEADROOM = 0.1
_FLOAT32 = 1 - 2**-23  # a level times this is not above the level once it is rounded to float32
_RANGE = 1e6  # the clipping norm stays within this factor of the first one
_STABILISER = 1e-6  # as in Opacus's clip factor


class ClippingRule(DPOptimizer):
    """Flat clipping, for subclasses to change.

    Attributes:
        clipping: name of the rule in logs and audit files.
        no_privacy: why a run with this rule is not differentially private; "" if it is. A subclass
            of yours is recorded if it says so: the run is void.
    """

    noise_multiplier: float
    max_grad_norm: float
    clipping: ClassVar[str] = "flat"
    no_privacy: ClassVar[str] = ""
    _kept: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, optimizer: DPOptimizer, **options: Any) -> Self:
        """The rule in place of an optimizer that `make_private(clipping="flat")` returned.

        Raises:
            InputError: another optimizer, or options that the rule refuses.
        """
        if type(optimizer) is not DPOptimizer:
            made, rule = type(optimizer).__name__, cls.__name__
            raise refused("refusal.attached", "rule", optimizer=made, rule=rule)
        made = cls(
            optimizer.original_optimizer,
            noise_multiplier=optimizer.noise_multiplier,
            max_grad_norm=optimizer.max_grad_norm,
            expected_batch_size=optimizer.expected_batch_size,
            loss_reduction=optimizer.loss_reduction,
            generator=optimizer.generator,
            secure_mode=optimizer.secure_mode,
            **options,
        )
        if optimizer.step_hook is not None:
            made.attach_step_hook(optimizer.step_hook)
        return made

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of gradients."""
        return float(self.gradient_multiplier(self.noise_multiplier) * self.max_grad_norm)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """Noise multiplier of the sum of gradients, of that of all that a step releases."""
        return noise_multiplier

    def contributions(self, norms: FloatArray, setting: StepSetting) -> FloatArray:
        """Contributions (n,) of examples with these norms (n,), in units of max_grad_norm."""
        return norms

    def state(self) -> dict[str, Any]:
        """What earlier steps have left in the rule, in tensors and numbers; `restore` takes it."""
        return {name.lstrip("_"): getattr(self, name) for name in self._kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where another object of the rule had come to."""
        for name in self._kept:
            held = state[name.lstrip("_")]
            if isinstance(held, list):  # of tensors, one for each parameter
                held = [value.to(p) for value, p in zip(held, self.params, strict=True)]
            setattr(self, name, held)

    def _norms(self) -> Tensor:
        """(n,) norms of the gradients of this micro-batch, as Opacus computes them."""
        samples = self.grad_samples
        if not len(samples[0]):
            return torch.zeros(0)
        each = [g.flatten(1).norm(2, dim=-1).to(samples[0].device) for g in samples]
        return torch.stack(each, dim=1).norm(2, dim=1)


class QuantileClipping(ClippingRule):
    """Clip at a running quantile of the norms (Andrew et al. 2021, arXiv:1905.03871, Theorem 1).

    Each step also releases the number of gradients that are not clipped, with noise, and moves
    max_grad_norm by it: C exp(-rate (share - quantile)). `noise_multiplier` is that of both
    releases together, as accountants count it; the gradients get more noise, with multiplier
    (noise_multiplier^-2 - (2 count_noise)^-2)^(-1/2).

    The number is centred: an example adds 1/2 or -1/2. It is divided by the expected batch size.
    Opacus's AdaClipDPOptimizer does neither: there an example that is not clipped adds 1, for which
    the noise of the theorem is too little, and the size of the batch is not protected.

    Args:
        quantile: share of gradients that are to stay unclipped.
        rate: learning rate of the clipping norm.
        count_noise: standard deviation of the noise of the number; default a twentieth of the
            expected batch size.
    """

    clipping = "quantile"
    _kept = ("max_grad_norm", "_first")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        quantile: float = 0.5,
        rate: float = 0.2,
        count_noise: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(optimizer, **settings)
        self.quantile = check_number("quantile", quantile, "(0, 1)")
        self.rate = check_number("rate", rate, "(0, inf)")
        if not self.expected_batch_size:
            raise refused("refusal.arguments", "batch_size")
        noise = self.expected_batch_size / 20 if count_noise is None else count_noise
        self.count_noise = check_number("count_noise", noise, "(0, inf)")
        self._first, self._centred = float(self.max_grad_norm), 0.0
        self.gradient_multiplier(self.noise_multiplier)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """See ClippingRule: without the number of unclipped gradients."""
        rest = noise_multiplier**-2 - (2 * self.count_noise) ** -2 if noise_multiplier else math.inf
        if rest <= 0:
            values = {"noise_multiplier": noise_multiplier, "count_noise": self.count_noise}
            raise refused("refusal.arguments", "count_noise", **values)
        return float(rest**-0.5)

    def contributions(self, norms: FloatArray, setting: StepSetting) -> FloatArray:
        """Of the sum and of the number together; never 0, since even a gradient of 0 is counted."""
        sigma, clip = setting.noise_multiplier, setting.max_grad_norm
        share = np.minimum(norms / clip, 1.0) / self.gradient_multiplier(sigma)
        return np.asarray(clip * sigma * np.hypot(share, 1 / (2 * self.count_noise)))

    def clip_and_accumulate(self) -> None:
        """Clip, and count the gradients that are not clipped."""
        norms = self._norms()
        unclipped = norms + _STABILISER <= float(self.max_grad_norm)
        self._centred += float(unclipped.sum()) - len(norms) / 2
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Add the noise of the gradients."""
        of_gradients = self.gradient_multiplier(self.noise_multiplier)
        with patch.object(self, "noise_multiplier", of_gradients):
            super().add_noise()

    def pre_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Clip and add noise; then move the clipping norm for the next step."""
        updates = super().pre_step(closure)
        if updates:
            zero = torch.zeros((), device=self.params[0].device)
            noise = _generate_noise(self.count_noise, zero, self.generator, self.secure_mode)
            share = 0.5 + (self._centred + float(noise)) / float(self.expected_batch_size)
            self._centred = 0.0
            moved = float(self.max_grad_norm) * math.exp(-self.rate * (share - self.quantile))
            self.max_grad_norm = min(max(moved, self._first / _RANGE), self._first * _RANGE)
        return updates


class AdaClip(ClippingRule):
    """Clip gradients that are centred and scaled by coordinate.

    After Pichapati et al. 2019 (arXiv:1908.07643), Algorithm 1.

    Mean and standard deviation of each coordinate are estimated from the noisy mean gradients of
    earlier steps, which are public. In the first step it clips at max_grad_norm; later that is
    only the unit of contributions. Means of batches vary less than single gradients: once most are
    clipped, the widths shrink from step to step, and training stalls.
    """

    clipping = "adaclip"
    _kept = ("_means", "_variances")
    _MEAN, _VARIANCE = 0.99, 0.9  # shares of the old estimates that are kept
    _LEAST, _MOST = 1e-12, 10.0  # of a coordinate's variance

    def __init__(self, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        if self.loss_reduction != "mean" or not self.expected_batch_size:
            raise refused("refusal.arguments", "adaclip")
        size = sum(p.numel() for p in self.params)
        start = float(self.max_grad_norm) ** 2 / size
        self._means = [torch.zeros_like(p) for p in self.params]
        self._variances = [torch.full_like(p, start) for p in self.params]

    def _scales(self) -> list[Tensor]:
        """The width of each coordinate: b = sqrt(s) sqrt(sum of all s), with s the deviation."""
        deviations = [v.sqrt() for v in self._variances]
        total = sum(float(s.sum(dtype=torch.float64)) for s in deviations)
        return [s.mul(total).sqrt() for s in deviations]

    def transforms(self) -> list[tuple[Tensor, Tensor]]:
        """(centre, factor) of each trainable tensor: what is clipped is (g - centre) * factor."""
        clip = float(self.max_grad_norm)
        return [(m, clip / b) for m, b in zip(self._means, self._scales(), strict=True)]

    def clip_and_accumulate(self) -> None:
        """Centre and scale the gradients of each example, then clip."""
        for p, (centre, factor) in zip(self.params, self.transforms(), strict=True):
            _check_processed_flag(p.grad_sample)
            parts = p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]
            moved = [(part - centre) * factor for part in parts]
            p.grad_sample = moved if isinstance(p.grad_sample, list) else moved[0]
        super().clip_and_accumulate()

    @torch.no_grad()
    def scale_grad(self) -> None:
        """Undo centre and scale on the noisy mean, and learn from it."""
        super().scale_grad()
        clip, size = float(self.max_grad_norm), float(self.expected_batch_size)
        for index, (p, b) in enumerate(zip(self.params, self._scales(), strict=True)):
            away = p.grad * (b / clip)
            seen = away.square() - (self.noise_multiplier * b / size).square()
            seen.clamp_(self._LEAST, self._MOST)
            p.grad = away + self._means[index]
            self._means[index] = self._means[index] + (1 - self._MEAN) * away
            kept = self._VARIANCE * self._variances[index]
            self._variances[index] = kept + (1 - self._VARIANCE) * seen


def check_headroom(
    value: float | None, *, individually: bool, logged: float | None = None
) -> float:
    """The headroom of a run: the given one; else that of the log to continue, else the default.

    It is 0 without individual clipping. InputError if it is not in [0, 1], differs from the log's,
    or is given without individual clipping.
    """
    if not individually:
        if value is not None:
            raise refused("refusal.arguments", "headroom_alone", value=value)
        return 0.0
    if value is None:
        return DEFAULT_HEADROOM if logged is None else logged
    value = check_number("clip_headroom", value, "[0, 1]", "a fraction of max_grad_norm, e.g. 0.1")
    if logged not in (None, value):
        raise refused("refusal.arguments", "headroom_logged", value=value, logged=logged)
    return value


class ClipThresholds:
    """What each example is clipped at: max_grad_norm, its recorded level, or 0 by a filter."""

    def __init__(
        self,
        n_examples: int,
        *,
        headroom: float | None = None,
        levels: Levels = FULL_PRECISION,
        policy: Any = None,
        units: IntArray | None = None,
    ) -> None:
        """Begin with all examples present, nothing spent, and max_grad_norm as each one's level.

        Args:
            n_examples: in the training set.
            headroom: of individual clipping; None clips all examples at max_grad_norm.
            levels: to which the log rounds norms.
            policy: an `indpriv.PrivacyFilter`, if there is one.
            units: (n_examples,) the unit of each row, from 0; None if each row is a unit.
        """
        self.policy, self._headroom, self._levels, self._units = policy, headroom, levels, units
        # Whether examples have thresholds of their own.
        self.varies = headroom is not None or policy is not None
        self._positions = np.arange(n_examples)
        self._norms: FloatArray | None = None  # of a record whose step is not over
        self._bounds = np.full(n_examples, np.inf)  # by the last record whose step is over
        self.spent = np.zeros(n_examples)  # RDP that the filter has charged
        self.present = np.ones(n_examples, dtype=bool)  # whom it has not left out
        self._charged: tuple[int, StepSetting] | None = None  # the step that was charged last
        self._charges: tuple[StepSetting, FloatArray] | None = None  # of one step at these levels
        # Steps at which it left examples out, and their positions, until they are logged.
        self.unlogged: list[tuple[int, IntArray]] = []

    def restore(self, log: NormLog, left_out_at: IntArray) -> None:
        """Continue where a log ends; left_out_at (n_examples,) as `read_left_out` returns it."""
        if self._headroom is not None and log.n_records:
            last = log.records[-1:].read(0, log.n_examples)[0]
            clip = float(log.settings.max_grad_norm[log.recorded_steps[-1]])
            self._bounds = self._bounds_in_log(last, clip)
        if self.policy is not None:
            self.spent = self.policy.spent(log, left_out_at)
            self.present = left_out_at >= log.total_steps

    def begin_record(self, norms: FloatArray) -> None:
        """Use norms (n_examples,) of the coming step; they are rounded at its max_grad_norm."""
        if self._headroom is not None:
            self._norms, self._charges = norms, None

    def end_record(self, max_grad_norm: float) -> None:
        """Fix the levels of the record begun last, if any: its step ran at max_grad_norm."""
        if self._norms is not None:
            self._bounds, self._norms = self._rounded(self._norms, max_grad_norm), None

    def thresholds(self, positions: IntArray, max_grad_norm: float) -> Tensor:
        """Clip thresholds (n,) float64 at these positions, at most max_grad_norm of this step."""
        limits = self.bounds(positions, max_grad_norm)
        if self._headroom is not None:
            held = (limits * _FLOAT32).astype(np.float32)
            # Below the normal range of float32, its steps are wider than that.
            held = np.where(held > limits, np.nextafter(held, np.float32(0)), held)
            limits = held.astype(np.float64)
        return torch.as_tensor(limits * self.present[positions])

    def bounds(self, positions: IntArray, max_grad_norm: float) -> FloatArray:
        """(n,) contributions of these examples to the current step, unless they are left out."""
        bounds = self._bounds[positions]
        if self._norms is not None:
            bounds = self._rounded(self._norms[positions], max_grad_norm)
        return np.minimum(bounds, max_grad_norm)

    def _rounded(self, norms: FloatArray, max_grad_norm: float) -> FloatArray:
        """The bounds that the log will give for these norms."""
        exact = norms + (self._headroom or 0.0) * max_grad_norm
        return self._bounds_in_log(self._levels.encode(exact, max_grad_norm), max_grad_norm)

    def _bounds_in_log(self, row: NDArray[Any], max_grad_norm: float) -> FloatArray:
        """Bounds that a row of the log gives; a clipped norm counts as any step's max_grad_norm."""
        if not self._levels.rounding:
            return row
        bounds = self._levels.relative(row) * max_grad_norm
        return np.where(row > self._levels.top, np.inf, bounds)

    def charge(self, step: int, setting: StepSetting) -> None:
        """Charge present examples for the coming step; leave out those that would exceed the cap.

        A step is charged once, however many micro-batches it has; EvidenceError if it was charged
        under other settings.
        """
        if self.policy is None:
            return
        if self._charged is not None and self._charged[0] == step:
            if self._charged[1] != setting:
                values = {"step": step, "charged": self._charged[1], "setting": setting}
                raise damaged("refusal.training", "charged", **values)
            return
        if self._charges is None or self._charges[0] != setting:
            charges = self.policy.charges(
                self.bounds(self._positions, setting.max_grad_norm) / setting.max_grad_norm,
                noise_multiplier=setting.noise_multiplier,
                sample_rate=setting.sample_rate,
                units=self._units,
            )
            self._charges = setting, charges
        charges = self._charges[1]
        beyond = self.present & (self.spent + charges > self.policy.rdp_cap)
        if beyond.any():
            self.present = self.present & ~beyond
            self.unlogged.append((step, np.flatnonzero(beyond)))
            if not self.present.any():  # said at this line: at one of torch, it would be filtered
                warnings.warn(text("sentence.warnings", "all_out", step=step), PrivacyWarning, 1)
        self.spent += np.where(self.present, charges, 0.0)
        self._charged = step, setting
