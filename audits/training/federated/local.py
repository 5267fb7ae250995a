"""Local training of the clients of a round, in one batch. Sensitive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from indpriv._types import IntArray

_FLOATS_AT_ONCE = 1 << 25  # of gradients and activations
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Clipping:
    """How a vector of all parameters is clipped.

    Attributes:
        sizes: numbers of coordinates of its tensors.
        per_layer: clip each of the M tensors on its own, at max_grad_norm / sqrt(M).
    """

    sizes: tuple[int, ...]
    per_layer: bool = False

    def clip(self, vectors: Tensor, max_grad_norm: float) -> tuple[Tensor, Tensor]:
        """Clipped vectors (n, d), and the norms (n,) that a log of this clipping holds.

        Flat: norms before clipping. Per layer: of what clipping leaves.
        """
        parts = vectors.split(self.sizes, dim=-1)
        factors, norms = self._factors(parts, max_grad_norm)
        each = zip(parts, factors, strict=True)
        return torch.cat([part * factor.unsqueeze(-1) for part, factor in each], dim=-1), norms

    def clipped_sums(
        self, parts: Sequence[Tensor], kept: Tensor, max_grad_norm: float
    ) -> tuple[list[Tensor], Tensor]:
        """Sums over a batch where kept (n, batch) is 1, and norms (n, batch) of all.

        parts: tensors (n, batch, size) of the vectors; a sum is (n, size).
        """
        factors, norms = self._factors(parts, max_grad_norm)
        each = zip(parts, factors, strict=True)
        return [torch.bmm((f * kept).unsqueeze(1), part)[:, 0] for part, f in each], norms

    def _factors(
        self, parts: Sequence[Tensor], max_grad_norm: float
    ) -> tuple[list[Tensor], Tensor]:
        """The factor of each part (..., size), and norms (...)."""
        lengths = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in parts]
        limit = max_grad_norm / math.sqrt(len(parts)) if self.per_layer else max_grad_norm
        if self.per_layer:
            norms = _joint([length.clamp(max=limit) for length in lengths])
        else:
            norms = _joint(lengths)
            lengths = [norms] * len(parts)
        factors = [(limit / length.clamp(min=1e-300)).clamp(max=1.0) for length in lengths]
        return [factor.to(parts[0].dtype) for factor in factors], norms


def _joint(lengths: list[Tensor]) -> Tensor:
    """The norm of a vector, of those of its parts."""
    return torch.linalg.vector_norm(torch.stack(lengths), dim=0)


@dataclass(frozen=True)
class RowProtection:
    """Clipping and noise of single rows in every local step.

    noise_std: of the noise on the sum of clipped gradients; of each gradient if `on_each`.
    """

    clipping: Clipping
    max_grad_norm: float
    noise_std: float
    on_each: bool
    noise: torch.Generator


class LocalTraining:
    """SGD of several clients from one model, each on rows of its own."""

    def __init__(self, module: nn.Module, inputs: Tensor, targets: Tensor, rate: float) -> None:
        """Keep the architecture of a module; rows (n, ...) and targets (n,) are on its device."""
        self._module, self._inputs, self._targets, self._rate = module, inputs, targets, rate
        self._shapes = {name: value.shape for name, value in module.named_parameters()}
        self.sizes = tuple(shape.numel() for shape in self._shapes.values())

    def updates(
        self,
        start: Tensor,
        rows: Sequence[Sequence[IntArray]],
        protection: RowProtection | None = None,
        *,
        at_once: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Train every client from the same parameters.

        Args:
            start: (d,) all parameters.
            rows: rows of each client in each of its local steps.
            protection: of rows; None for plain SGD.
            at_once: number of clients that are trained in one batch; default what memory allows.

        Returns:
            (n_clients, d) updates, and for each local step the norms (n_clients, batch) of its
            rows, if they are protected; a shorter batch ends in zeros.
        """
        found, norms = [], []
        size = at_once or self._at_once(rows, protection)
        for first in range(0, len(rows), size):
            update, lengths = self._updates(start, rows[first : first + size], protection)
            found.append(update)
            norms.append(lengths)
        return torch.cat(found), [_stacked(list(step)) for step in zip(*norms, strict=True)]

    def _at_once(self, rows: Sequence[Sequence[IntArray]], protection: RowProtection | None) -> int:
        batch = max(len(step) for client in rows for step in client)
        vectors = batch if protection is not None else 4
        per_client = vectors * sum(self.sizes) + 16 * batch * self._inputs[0].numel()
        return max(1, _FLOATS_AT_ONCE // per_client)

    def _updates(
        self, start: Tensor, rows: Sequence[Sequence[IntArray]], protection: RowProtection | None
    ) -> tuple[Tensor, list[Tensor]]:
        first, norms = self._named(start), []
        parameters = {
            name: value.expand(len(rows), *value.shape).clone() for name, value in first.items()
        }
        for step in zip(*rows, strict=True):
            index, mask = self._padded(step)
            batch = self._inputs[index], self._targets[index], mask
            if protection is None:
                directions = vmap(grad(self._mean_loss))(parameters, *batch)
            else:
                directions, lengths = self._protected(parameters, batch, protection)
                norms.append(lengths)
            for name, direction in directions.items():
                parameters[name].sub_(direction, alpha=self._rate)
        moved = [(value - first[name]).flatten(1) for name, value in parameters.items()]
        return torch.cat(moved, dim=1), norms

    def _named(self, vector: Tensor) -> Parameters:
        """Parameters by name, as views of the vector of all."""
        parts = zip(self._shapes.items(), vector.split(self.sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    def _padded(self, step: Sequence[IntArray]) -> tuple[Tensor, Tensor]:
        """Rows (n_clients, batch) of a step, and which of them are real."""
        longest = max(map(len, step))
        index = torch.zeros((len(step), longest), dtype=torch.int64)
        mask = torch.zeros((len(step), longest))
        for number, rows in enumerate(step):
            index[number, : len(rows)] = torch.from_numpy(rows)
            mask[number, : len(rows)] = 1
        return index.to(self._inputs.device), mask.to(self._inputs.device)

    def _protected(
        self,
        parameters: Parameters,
        batch: tuple[Tensor, Tensor, Tensor],
        protection: RowProtection,
    ) -> tuple[Parameters, Tensor]:
        """Noisy mean of clipped gradients (n_clients, ...), and norms (n_clients, batch)."""
        inputs, targets, mask = batch
        each = vmap(vmap(grad(self._loss), in_dims=(None, 0, 0)))(parameters, inputs, targets)
        parts = [gradient.flatten(2) for gradient in each.values()]
        totals, norms = protection.clipping.clipped_sums(parts, mask, protection.max_grad_norm)
        number = mask.sum(dim=1, keepdim=True)
        # independent noise on each row adds up
        std = protection.noise_std * (number.sqrt() if protection.on_each else 1.0)
        means = {}
        for name, total in zip(each, totals, strict=True):
            noise = torch.randn(total.shape, generator=protection.noise, device=total.device)
            means[name] = ((total + std * noise) / number).view_as(parameters[name])
        return means, norms * mask

    def _loss(self, parameters: Parameters, row: Tensor, target: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._module, parameters, (row[None],))
        return F.cross_entropy(outputs, target[None])

    def _mean_loss(
        self, parameters: Parameters, inputs: Tensor, targets: Tensor, mask: Tensor
    ) -> Tensor:
        outputs: Tensor = functional_call(self._module, parameters, (inputs,))
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return (losses * mask).sum() / mask.sum()


def _stacked(norms: list[Tensor]) -> Tensor:
    """Norms of all clients of a step; chunks may have batches of different lengths."""
    longest = max(part.shape[1] for part in norms)
    return torch.cat([F.pad(part, (0, longest - part.shape[1])) for part in norms])
