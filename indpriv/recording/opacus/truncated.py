"""A Poisson sampler with a cap on the size of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from indpriv import _checks


class TruncatedPoissonSampler(UniformWithReplacementSampler):
    """Draws each example with probability sample_rate, and keeps at most max_batch_size of them.

    Pass it to a DataLoader as batch_sampler, and the loader to
    `PrivacyEngine.make_private(poisson_sampling=False)`. `indpriv.account` allows for the cap;
    Opacus's own epsilon does not, and is too small.

    Attributes:
        max_batch_size: if more examples were drawn, a random choice of this many is trained on.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        max_batch_size: int,
        generator: torch.Generator | None = None,
        steps: int | None = None,
    ) -> None:
        """As Opacus's sampler; InputError unless the cap and the rate are in range."""
        self.max_batch_size = _checks.check_positive_int("max_batch_size", max_batch_size)
        _checks.check_sample_rate(sample_rate)
        super().__init__(
            num_samples=num_samples, sample_rate=sample_rate, generator=generator, steps=steps
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the positions of each batch."""
        for drawn in super().__iter__():
            if len(drawn) > self.max_batch_size:
                order = torch.randperm(len(drawn), generator=self.generator)
                drawn = [drawn[place] for place in order[: self.max_batch_size].tolist()]
            yield drawn
