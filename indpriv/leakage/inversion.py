"""What someone reads of a gradient, and attacks that reconstruct examples from it. Sensitive.

What is read is a sum of what each example adds; dividing by the size of the batch hides nothing.
An attack is a frozen dataclass of its settings, and a function from a `Look` to the reconstructed
inputs (batch, ...) and the number of iterations that they took.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from indpriv._checks import check_choice, check_number, check_positive_int
from indpriv._facts import refused
from indpriv.errors import InputError
from indpriv.recording.norms.batches import LossFn

OF = ("row", "batch", "update")
_MIXES_EXAMPLES = (nn.modules.batchnorm._BatchNorm,)
Guess = tuple[Tensor, int]
STARTS = ("patterned", "uniform", "normal")
_FOUND, _STALLED = 1e-10, 3  # a loss that ends the search, and calls without progress that do
_ADAM_RATE, _TOTAL_VARIATION = 0.1, 1e-4  # Geiping et al. 2020


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
        for name in ("max_grad_norm", "learning_rate"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, "(0, inf)")
        check_number("noise_multiplier", self.noise_multiplier, "[0, inf)")
        if self.noise_multiplier and self.max_grad_norm is None:
            raise InputError("noise_multiplier is relative to max_grad_norm; pass max_grad_norm")
        check_number("share", self.share, "(0, 1]")

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
    """Reads what examples add to an observation of a model, as a flat vector and differentiably."""

    model: nn.Module
    loss_fn: LossFn
    observation: Observation

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, _MIXES_EXAMPLES):
                raise refused("refusal.leakage", "mixes", name=name, kind=type(module).__name__)
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and module.training:
                raise refused("refusal.leakage", "dropout", layer=name)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """What is trained, by name."""
        return {k: p for k, p in self.model.named_parameters() if p.requires_grad}

    def read(
        self, inputs: Tensor, targets: Tensor, *, clipped: bool = True, differentiable: bool = False
    ) -> Tensor:
        """(d,) what examples, at most those of one observation, add together, without noise.

        clipped: as the observation clips, or as if it did not; differentiable: with respect to
        inputs.
        """
        if self.observation.of == "update":
            found = self._clip(self._update(inputs, targets, differentiable), clipped)
            return found if differentiable else found.detach()
        rows = [
            self._clip(self._gradient(self.parameters, *row, 1, differentiable), clipped)
            for row in one_by_one(inputs, targets)
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
        """How far local SGD moves each parameter; losses are over the planned batch size."""
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


# --- attacks


@dataclass(frozen=True)
class Look:
    """One observation, and what the attacker knows."""

    observed: Tensor  # (d,) what was read, with its noise
    sent: Tensor  # (d,) bool, the coordinates that were sent
    targets: Tensor  # (batch,) labels, found or known
    # shape, low, high: of the inputs of the batch, and their range
    shape: tuple[int, ...]
    low: float
    high: float
    reader: Reader
    generator: torch.Generator
    # from the place of an example in the batch to candidates (m, ...), and what would be read (m,
    # d) without noise if each of them stood there
    alternatives: Callable[[int], tuple[Tensor, Tensor]]

    def mismatch(self, inputs: Tensor, *, clipped: bool) -> Tensor:
        """Sum of squared differences between what inputs add and what was observed."""
        found = self.reader.read(inputs, self.targets, clipped=clipped, differentiable=True)
        return (((found - self.observed)[self.sent]) / self.reader.unit).square().sum()


class Inversion:
    """An attack: its name in commands and files, and what it is in a few words.

    knows_candidates: it names one of them, with its label, and knows the rest of the batch.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    knows_candidates: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """In a few words, with the settings that matter."""
        return self.words

    def invert(self, look: Look) -> Guess:
        """Reconstructed inputs (batch, ...) of a look, and after how many iterations."""
        raise NotImplementedError


@dataclass(frozen=True)
class LBFGS(Inversion):
    """Match the gradient by torch's L-BFGS with its defaults, from a random start.

    Attributes:
        iterations: largest number of calls, each of up to 20 inner steps.
        start: "patterned" (a random patch of half the side, tiled; Wei et al. 2020, ESORICS,
            arXiv:2004.10397), "uniform" or "normal" (Zhu, Liu and Han 2019).
        knows_clipping: clip the gradient of the guess as the real one was clipped. False is the
            attack of the papers, which clipping fools.
    """

    name: ClassVar[str] = "lbfgs"
    words: ClassVar[str] = "L-BFGS"
    needs_labels: ClassVar[bool] = True
    iterations: int = 300
    start: str = "patterned"
    knows_clipping: bool = True

    def __post_init__(self) -> None:
        check_positive_int("iterations", self.iterations)
        check_choice("start", self.start, STARTS)

    @property
    def title(self) -> str:
        """See Inversion."""
        forgets = "" if self.knows_clipping else ", forgets clipping"
        return f"{self.words}, {self.start} start{forgets}"

    def invert(self, look: Look) -> Guess:
        """See Inversion."""
        guess = _start(look, self.start).requires_grad_()
        optimizer: Any = torch.optim.LBFGS([guess])

        def loss() -> Tensor:
            optimizer.zero_grad()
            found = look.mismatch(guess, clipped=self.knows_clipping)
            (guess.grad,) = torch.autograd.grad(found, [guess])
            return found.detach()

        best, least, stalled, calls = guess.detach().clone(), math.inf, 0, 0
        while calls < self.iterations and stalled < _STALLED and least >= _FOUND:
            optimizer.step(loss)
            calls += 1
            found = float(look.mismatch(guess, clipped=self.knows_clipping).detach())
            if not math.isfinite(found):
                break
            stalled = 0 if found < 0.999 * least else stalled + 1
            if found < least:
                best, least = guess.detach().clone(), found
        return best.clamp(look.low, look.high), calls


@dataclass(frozen=True)
class Adam(Inversion):
    """Match the direction of the gradient by Adam with signed steps, for smooth images.

    Geiping et al. 2020 (arXiv:2003.14053v2): cosine distance plus total variation, inputs in range.

    Attributes:
        iterations: number of steps.
        knows_clipping: as of `LBFGS`; under flat clipping of one example the direction is the same.
    """

    name: ClassVar[str] = "adam"
    words: ClassVar[str] = "Adam, cosine distance and total variation"
    needs_labels: ClassVar[bool] = True
    iterations: int = 2000
    knows_clipping: bool = True

    def __post_init__(self) -> None:
        check_positive_int("iterations", self.iterations)

    def invert(self, look: Look) -> Guess:
        """See Inversion."""
        guess = _start(look, "normal").clamp(look.low, look.high).requires_grad_()
        optimizer = torch.optim.Adam([guess], lr=_ADAM_RATE * (look.high - look.low))
        steps = [self.iterations * part // 8 for part in (3, 5, 7)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, steps, gamma=0.1)
        target = look.observed * look.sent
        best, least = guess.detach().clone(), math.inf
        for _ in range(self.iterations):
            found = look.reader.read(
                guess, look.targets, clipped=self.knows_clipping, differentiable=True
            )
            loss = 1 - nn.functional.cosine_similarity(found * look.sent, target, dim=0)
            loss = loss + _TOTAL_VARIATION * _total_variation(guess)
            if not math.isfinite(float(loss.detach())):
                break
            if float(loss.detach()) < least:
                best, least = guess.detach().clone(), float(loss.detach())
            (gradient,) = torch.autograd.grad(loss, [guess])
            guess.grad = gradient.sign()
            optimizer.step()
            schedule.step()
            guess.data.clamp_(look.low, look.high)
        return best, self.iterations


@dataclass(frozen=True)
class FirstLayer(Inversion):
    """Read inputs off a first linear layer with bias: its weight gradients are multiples of them.

    Geiping et al. 2020 (arXiv:2003.14053v2), Proposition 3.1. Of one example, the least-squares
    solution over all rows; of a batch, the rows with the largest bias gradients, which mix examples
    wherever a unit is active for several.
    """

    name: ClassVar[str] = "first-layer"
    words: ClassVar[str] = "the first layer, solved"

    def invert(self, look: Look) -> Guess:
        """See Inversion."""
        weight, bias = _first_layer(look)
        if len(look.targets) == 1:
            rows = (weight.T @ bias / bias.square().sum()).unsqueeze(0)
        else:
            largest = bias.abs().topk(min(len(look.targets), len(bias))).indices
            rows = weight[largest] / bias[largest, None]
            rows = rows.repeat(math.ceil(len(look.targets) / len(rows)), 1)[: len(look.targets)]
        return rows.reshape(look.shape).clamp(look.low, look.high), 1


@dataclass(frozen=True)
class Informed(Inversion):
    """Name the candidate whose gradient makes the observation likeliest.

    It knows the candidates, and the other examples of the batch: the likelihood-ratio test, which
    meets the ceiling and must never exceed it.
    """

    name: ClassVar[str] = "informed"
    words: ClassVar[str] = "most likely of the candidates"
    knows_candidates: ClassVar[bool] = True

    def invert(self, look: Look) -> Guess:
        """See Inversion."""
        named = []
        for place in range(len(look.targets)):
            inputs, read = look.alternatives(place)
            distance = (read - look.observed)[:, look.sent].square().sum(1)
            named.append(inputs[distance.argmin()])
        return torch.stack(named), 1


INVERSIONS: dict[str, type[Inversion]] = {
    attack.name: attack for attack in (Informed, FirstLayer, LBFGS, Adam)
}


def _start(look: Look, kind: str) -> Tensor:
    """Where a search begins; random in the range of the inputs, or normal around its middle."""
    if kind == "normal":
        middle, spread = (look.low + look.high) / 2, (look.high - look.low) / 2
        return middle + spread * torch.randn(look.shape, generator=look.generator)
    start = torch.rand(look.shape, generator=look.generator)
    if kind == "patterned" and len(look.shape) == 4:
        height, width = (math.ceil(side / 2) for side in look.shape[2:])
        start = start[..., :height, :width].tile(1, 1, 2, 2)[..., : look.shape[2], : look.shape[3]]
    return look.low + (look.high - look.low) * start


def _total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels; 0 for inputs that are no images."""
    if images.dim() != 4:
        return images.new_zeros(())
    across = (images[..., 1:] - images[..., :-1]).abs().mean()
    return across + (images[..., 1:, :] - images[..., :-1, :]).abs().mean()


def _first_layer(look: Look) -> tuple[Tensor, Tensor]:
    """What was read of weight and bias of the first layer; InputError if it is not linear."""
    modules = look.reader.model.modules()
    first = next((m for m in modules if next(m.parameters(False), None) is not None), None)
    inputs = math.prod(look.shape[1:])
    if not isinstance(first, nn.Linear) or first.bias is None or first.in_features != inputs:
        raise refused("refusal.leakage", "first_layer", n=inputs)
    weight, bias = list(look.reader.gradients(look.observed * look.sent).values())[:2]
    return weight, bias
