"""What someone reads of a gradient: of one example, of a batch, or of a local update. Sensitive.

Everything is a sum of what each example adds; dividing by the size of the batch hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from indpriv._checks import check_choice, check_positive_int
from indpriv.errors import InputError
from indpriv.recording.norms.batches import LossFn

OF = ("row", "batch", "update")
_MIXES_EXAMPLES = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True)
class Observation:
    """What is read, and what protects it.

    Attributes:
        of: "row", the gradient of one example (type 2 of Wei et al. 2021); "batch", the sum of the
            gradients of a batch; or "update", what several local steps on a batch change (types 0
            and 1: a server, or someone who reads what a client sends).
        batch_size: number of examples in a batch or an update.
        max_grad_norm: clipping norm of each gradient, or of the whole update; None for no clipping.
        clipping: "flat" or "per_layer", where each parameter has the share
            max_grad_norm / sqrt(n_parameters).
        noise_multiplier: standard deviation of the noise over max_grad_norm.
        noise_at: "batch", once for what is read, or "row", for each example.
        local_steps: of an update.
        learning_rate: of an update.
        share: share of coordinates that is sent, the largest first, chosen after the noise.

    Raises:
        InputError: a value out of range, noise without clipping, or options of another kind.
    """

    of: str = "row"
    batch_size: int = 1
    max_grad_norm: float | None = None
    clipping: str = "flat"
    noise_multiplier: float = 0.0
    noise_at: str = "batch"
    local_steps: int = 1
    learning_rate: float = 0.1
    share: float = 1.0

    def __post_init__(self) -> None:
        check_choice("of", self.of, OF)
        check_choice("clipping", self.clipping, ("flat", "per_layer"))
        check_choice("noise_at", self.noise_at, ("batch", "row"))
        for name in ("batch_size", "local_steps"):
            check_positive_int(name, getattr(self, name))
        if self.of == "row" and self.batch_size != 1:
            raise InputError('of="row" reads one example; leave out batch_size, or pass of="batch"')
        if self.of != "update" and self.local_steps != 1:
            raise InputError(f'local_steps belongs to of="update", not to of="{self.of}"')
        if self.of == "update" and self.noise_at == "row":
            raise InputError('noise_at="row" is noise on gradients; an update gets noise once')
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            raise InputError(f"max_grad_norm={self.max_grad_norm} must be positive and finite")
        if not 0 <= self.noise_multiplier < math.inf:
            raise InputError(f"noise_multiplier={self.noise_multiplier} must be at least 0")
        if self.noise_multiplier and self.max_grad_norm is None:
            raise InputError("noise_multiplier is relative to max_grad_norm; pass max_grad_norm")
        if not 0 < self.share <= 1:
            raise InputError(f"share={self.share} must be in (0, 1]")
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate={self.learning_rate} must be positive and finite")

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of what is read."""
        rows = self.batch_size if self.noise_at == "row" else 1
        return self.noise_multiplier * (self.max_grad_norm or 0.0) * math.sqrt(rows)

    @property
    def text(self) -> str:
        """In a few words, for reports."""
        read = {
            "row": "the gradient of one example",
            "batch": f"the gradient of a batch of {self.batch_size}",
            "update": f"an update of {self.local_steps} local steps on {self.batch_size} examples",
        }[self.of]
        clip = "" if self.max_grad_norm is None else f", clipped at {self.max_grad_norm:g}"
        scale = self.noise_multiplier
        noise = f", noise multiplier {scale:.3g}" if scale else ", without noise"
        sent = f", the largest {self.share:.0%} of it" if self.share < 1 else ""
        return f"{read}{clip}{' per layer' * (self.clipping == 'per_layer')}{noise}{sent}"


@dataclass(frozen=True)
class Reader:
    """Reads what examples add to an observation, as a flat vector and differentiably.

    Attributes:
        model: at the state of the observation.
        loss_fn: `loss_fn(outputs, targets)` -> per-example losses (batch,).
        observation: what is read.
    """

    model: nn.Module
    loss_fn: LossFn
    observation: Observation

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, _MIXES_EXAMPLES):
                raise InputError(
                    f"layer {name} ({type(module).__name__}) mixes the examples of a batch, so no "
                    "example has a gradient of its own; use GroupNorm"
                )
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and module.training:
                raise InputError(
                    f"layer {name} drops out at random, and an attacker cannot know what; observe "
                    "the model without dropout"
                )

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """What is trained, by name."""
        return {k: p for k, p in self.model.named_parameters() if p.requires_grad}

    def read(
        self, inputs: Tensor, targets: Tensor, *, clipped: bool = True, differentiable: bool = False
    ) -> Tensor:
        """(d,) what examples add together, without noise.

        Args:
            inputs: (n, ...) of n examples, at most those of one observation.
            targets: (n,) their targets.
            clipped: as the observation clips; otherwise as if it did not.
            differentiable: with respect to the inputs.
        """
        if self.observation.of == "update":
            found = self._clip(self._update(inputs, targets, differentiable), clipped)
            return found if differentiable else found.detach()
        rows = [
            self._clip(self._gradient(self.parameters, *row, 1, differentiable), clipped)
            for row in zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True)
        ]
        size = sum(p.numel() for p in self.parameters.values())
        return torch.stack(rows).sum(0) if rows else torch.zeros(size)

    @property
    def unit(self) -> float:
        """About how long what is read is, as a multiple of a gradient."""
        return self.observation.learning_rate if self.observation.of == "update" else 1.0

    def gradients(self, flat: Tensor) -> dict[str, Tensor]:
        """What is read, by parameter."""
        parts = torch.split(flat, [p.numel() for p in self.parameters.values()])
        names = self.parameters.items()
        return {k: part.view_as(p) for (k, p), part in zip(names, parts, strict=True)}

    def _gradient(
        self,
        parameters: dict[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        divisor: int,
        differentiable: bool,
    ) -> list[Tensor]:
        loss = self.loss_fn(functional_call(self.model, parameters, (inputs,)), targets)
        values = list(parameters.values())
        return list(torch.autograd.grad(loss.sum() / divisor, values, create_graph=differentiable))

    def _update(self, inputs: Tensor, targets: Tensor, differentiable: bool) -> list[Tensor]:
        """How far local steps of SGD on these rows move each parameter.

        The loss is divided by the planned size of the batch, whoever is in it.
        """
        seen, parameters = self.observation, self.parameters
        for _ in range(seen.local_steps if len(inputs) else 0):
            found = self._gradient(parameters, inputs, targets, seen.batch_size, differentiable)
            moved = [
                p - seen.learning_rate * g for p, g in zip(parameters.values(), found, strict=True)
            ]
            if not differentiable:
                moved = [p.detach().requires_grad_() for p in moved]
            parameters = dict(zip(parameters, moved, strict=True))
        return [p - parameters[k] for k, p in self.parameters.items()]

    def _clip(self, parts: Sequence[Tensor], clipped: bool) -> Tensor:
        most = self.observation.max_grad_norm
        flat = torch.cat([part.flatten() for part in parts])
        if most is None or not clipped:
            return flat
        if self.observation.clipping == "flat":
            return flat * _factor(flat, most)
        most /= math.sqrt(len(parts))
        return torch.cat([part.flatten() * _factor(part, most) for part in parts])


def _factor(vector: Tensor, most: float) -> Tensor:
    """What clips a vector to this length."""
    return torch.clamp(most / vector.norm().clamp(min=1e-30), max=1.0)


def one_by_one(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one example each."""
    return ((inputs[i : i + 1], targets[i : i + 1]) for i in range(len(inputs)))
