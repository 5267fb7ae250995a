"""Local training of the clients of a round, in one batch. Sensitive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from indpriv._arrays import IntArray

_FLOATS_AT_ONCE = 1 << 25  # of gradients and activations


@dataclass(frozen=True)
class Clipping:
    """Parts of a vector of parameters that are clipped on their own.

    Attributes:
        sizes: numbers of coordinates of the parts, which share max_grad_norm equally: each of M
            parts is clipped at max_grad_norm / sqrt(M). One part is flat clipping.
    """

    sizes: tuple[int, ...]

    def clip(self, vectors: Tensor, max_grad_norm: float) -> tuple[Tensor, Tensor]:
        """Clipped vectors (n, d), and the norms (n,) that a log of this clipping holds.

        Flat: norms before clipping. Per layer: of what clipping leaves.
        """
        parts, factors, norms = self._factors(vectors, max_grad_norm)
        each = zip(parts, factors, strict=True)
        return torch.cat([part * factor.unsqueeze(-1) for part, factor in each], dim=-1), norms

    def clipped_sums(
        self, vectors: Tensor, kept: Tensor, max_grad_norm: float
    ) -> tuple[Tensor, Tensor]:
        """Sums (n, d) of clipped vectors (n, batch, d) where kept (n, batch) is 1; norms of all."""
        parts, factors, norms = self._factors(vectors, max_grad_norm)
        sums = [
            torch.bmm((factor * kept).unsqueeze(1), part)[:, 0]
            for part, factor in zip(parts, factors, strict=True)
        ]
        return torch.cat(sums, dim=-1), norms

    def _factors(
        self, vectors: Tensor, max_grad_norm: float
    ) -> tuple[tuple[Tensor, ...], list[Tensor], Tensor]:
        """Parts of vectors (..., d), the factor of each part, and norms (...)."""
        limit = max_grad_norm / math.sqrt(len(self.sizes))
        parts, factors = vectors.split(self.sizes, dim=-1), []
        squares = torch.zeros(vectors.shape[:-1], dtype=torch.float64, device=vectors.device)
        for part in parts:
            norm = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64)
            factors.append((limit / norm.clamp(min=1e-300)).clamp(max=1.0).to(part.dtype))
            squares += (norm if len(parts) == 1 else norm.clamp(max=limit)).square()
        return parts, factors, squares.sqrt()


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
        parameters, norms = start.expand(len(rows), -1), []
        for step in zip(*rows, strict=True):
            index, mask = self._padded(step)
            batch = self._inputs[index], self._targets[index], mask
            if protection is None:
                direction = vmap(grad(self._mean_loss))(parameters, *batch)
            else:
                direction, lengths = self._protected(parameters, batch, protection)
                norms.append(lengths)
            parameters = parameters - self._rate * direction
        return parameters - start, norms

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
        self, parameters: Tensor, batch: tuple[Tensor, Tensor, Tensor], protection: RowProtection
    ) -> tuple[Tensor, Tensor]:
        """Noisy mean of clipped gradients (n_clients, d), and norms (n_clients, batch)."""
        inputs, targets, mask = batch
        each = vmap(vmap(grad(self._loss), in_dims=(None, 0, 0)))(parameters, inputs, targets)
        limit = protection.max_grad_norm
        total, norms = protection.clipping.clipped_sums(each, mask, limit)
        number = mask.sum(dim=1, keepdim=True)
        noise = torch.randn(total.shape, generator=protection.noise, device=total.device)
        if protection.on_each:  # independent noise on each row adds up
            noise *= number.sqrt()
        return (total + protection.noise_std * noise) / number, norms * mask

    def _outputs(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        named = {
            name: part.view(shape)
            for (name, shape), part in zip(
                self._shapes.items(), parameters.split(self.sizes), strict=True
            )
        }
        outputs: Tensor = functional_call(self._module, named, (inputs,))
        return outputs

    def _loss(self, parameters: Tensor, row: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self._outputs(parameters, row[None]), target[None])

    def _mean_loss(
        self, parameters: Tensor, inputs: Tensor, targets: Tensor, mask: Tensor
    ) -> Tensor:
        losses = F.cross_entropy(self._outputs(parameters, inputs), targets, reduction="none")
        return (losses * mask).sum() / mask.sum()


def _stacked(norms: list[Tensor]) -> Tensor:
    """Norms of all clients of a step; chunks may have batches of different lengths."""
    longest = max(part.shape[1] for part in norms)
    return torch.cat([F.pad(part, (0, longest - part.shape[1])) for part in norms])
