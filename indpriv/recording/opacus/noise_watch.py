"""The noise that was added to each update, measured as training adds it.

Opacus leaves the clipped sum in p.summed_grad and the noisy sum in p.grad; their difference is the
noise. Divided by noise_multiplier * max_grad_norm it must look like independent standard normal
numbers: in all parameters and in each, unlike that of earlier steps, and unrelated to the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from indpriv.norm_log.session_counts import NoiseCounts
from indpriv.recording.opacus.whole_model import local

_SHORT = 1e-10  # norm of a sum that has no direction: of an empty batch, or lost in rounding
_COMPARED = 10_000  # coordinates whose noise is compared with that of earlier steps


class NoiseWatch:
    """Sums over the noise of one session; they stay on the model's device until they are read."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        states: Mapping[nn.Parameter, Mapping[str, Any]] | None = None,
    ) -> None:
        """Prepare; parameters are those that the noise is added to.

        With FSDP2, sums are in the optimizer's states of parameters, and this rank's shards of
        parameters are watched, to which it adds noise.
        """
        self._parameters, self._states = parameters, states
        self._sizes = np.array([local(p).numel() for p in parameters])
        # MPS has no float64, and half precision rounds the noise.
        self._measures = all(
            p.device.type != "mps" and p.dtype in (torch.float32, torch.float64) for p in parameters
        )
        total, ends = int(self._sizes.sum()), np.cumsum(self._sizes)
        chosen = np.unique(np.random.default_rng().integers(0, total, min(_COMPARED, total)))
        parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        self._compared = [
            torch.as_tensor(part - end + size, device=p.device)
            for p, part, end, size in zip(parameters, parts, ends, self._sizes, strict=True)
        ]
        self._n_compared = len(chosen)
        self._steps = 0
        self._powers = torch.zeros(len(parameters), 2, dtype=torch.float64)  # sums of 2nd and 4th
        self._along = torch.zeros((), dtype=torch.float64)  # the clipped sum's direction
        self._products = torch.zeros(2, dtype=torch.float64)  # with the previous, the first step
        self._previous: Tensor | None = None
        self._first: Tensor | None = None
        self._sums: list[tuple[Tensor, int]] = []

    def before(self) -> None:
        """Remember the clipped sums of a step, to which noise is about to be added."""
        if self._states is None:
            sums = [getattr(p, "summed_grad", None) for p in self._parameters]
        else:
            sums = [self._states[p]["summed_grad"] for p in self._parameters]
        self._sums = [(total, total._version) for total in sums if total is not None]
        self._measures &= len(self._sums) == len(sums)

    def after(self, standard_deviation: float) -> None:
        """Measure the noise of a step; standard_deviation is what the account assumes of it."""
        # A sum that was changed in place is gone.
        known = all(total._version == version for total, version in self._sums)
        self._measures &= known and all(p.grad is not None for p in self._parameters)
        if self._measures:
            self._add(standard_deviation)
        self._sums = []

    @torch.no_grad()
    def _add(self, standard_deviation: float) -> None:
        powers, along, squares, compared = [], [], [], []
        for p, (total, _), chosen in zip(self._parameters, self._sums, self._compared, strict=True):
            total = local(total).reshape(-1)
            noisy: Any = p.grad
            noise = (local(noisy).reshape(-1) - total).div_(standard_deviation)
            compared.append(noise[chosen].double())
            along.append((noise * total).sum(dtype=torch.float64))
            squares.append(total.square().sum(dtype=torch.float64))
            second = noise.square_()
            powers.append(second.sum(dtype=torch.float64))
            powers.append(second.square_().sum(dtype=torch.float64))
        device = powers[0].device
        self._powers = _stacked(powers, device).view(-1, 2) + self._powers.to(device)
        length = _stacked(squares, device).sum().sqrt()
        direction = torch.where(length > _SHORT, _stacked(along, device).sum() / length, 0.0)
        self._along = direction + self._along.to(device)
        mine = torch.cat([part.to(device) for part in compared])
        if self._first is None or self._previous is None:
            self._first = mine
        else:
            found = torch.stack([mine @ self._previous, mine @ self._first])
            self._products = found + self._products.to(device)
        self._previous = mine
        self._steps += 1

    def counts(self) -> NoiseCounts | None:
        """What was measured so far; None unless every step was, and its noise was finite."""
        second, fourth = self._powers.cpu().numpy().T
        if not (self._measures and self._steps and np.isfinite(fourth).all()):
            return None
        values = self._sizes * self._steps
        variances = second / values
        least = int(np.argmin((variances - 1) * np.sqrt(values)))
        pairs = max(1, self._n_compared * (self._steps - 1))
        previous, first = (self._products.cpu().numpy() / np.sqrt(pairs)).tolist()
        return NoiseCounts(
            values=int(values.sum()),
            variance=float(second.sum() / values.sum()),
            least_variance=float(variances[least]),
            least_values=int(values[least]),
            fourth_moment=float(fourth.sum() / values.sum()),
            previous=previous,
            first=first,
            along_sum=float(self._along) / np.sqrt(self._steps),
        )


def _stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([value.to(device) for value in values])
