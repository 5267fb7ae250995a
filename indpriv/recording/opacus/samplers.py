"""How batches are drawn: samplers that can be accounted, and each batch of them as it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from indpriv import _checks
from indpriv._arrays import IntArray
from indpriv.errors import InputError
from indpriv.recording.opacus.ranks import DISTRIBUTED

# Opacus's sampler drops an empty local batch. A run in which this is likelier is refused.
_DROPPED_BATCH = 1e-9


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


def sampler_kind(batch_sampler: Any, optimizer: Any) -> str:
    """How batches are drawn: one of the samplers of a NormLog; "other" if nothing is known of it.

    InputError if several ranks do not fit together.
    """
    shards = type(batch_sampler) is DistributedUniformWithReplacementSampler
    if shards != isinstance(optimizer, DISTRIBUTED):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__}, the batch sampler a "
            f"{type(batch_sampler).__name__}: several ranks can be accounted only if each draws "
            "from its own shard and gradients are added up; make model, optimizer and loader with "
            "one make_private call, with Poisson sampling"
        )
    if shards:
        _check_shards(batch_sampler, optimizer)
        return "poisson"
    if type(batch_sampler) is UniformWithReplacementSampler:  # a subclass may draw otherwise
        return "poisson"
    if type(batch_sampler) is TruncatedPoissonSampler:
        return "truncated_poisson"
    # A WeightedRandomSampler, a SubsetRandomSampler or a list may be made by looking at data.
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    if type(sampler) is SequentialSampler:
        return "sequential"
    if type(sampler) is not RandomSampler:
        return "other"
    if sampler.replacement or sampler.num_samples > len(sampler.data_source):
        return "with_replacement"
    return "fixed_size" if sampler.num_samples <= batch_sampler.batch_size else "shuffled"


def _check_shards(sampler: Any, optimizer: Any) -> None:
    """Raise InputError unless the ranks' shards and batches are as the account assumes."""
    size = dist.get_world_size()
    for owner, (rank, ranks) in {
        "sampler": (sampler.rank, sampler.num_replicas),
        "optimizer": (optimizer.rank, optimizer.world_size),
    }.items():
        if (rank, ranks) != (dist.get_rank(), size):
            raise InputError(
                f"the {owner} is for rank {rank} of {ranks}, but this is rank {dist.get_rank()} of "
                f"{size}; make it on this rank with make_private"
            )
    smallest = sampler.total_size // size
    dropped = (1 - sampler.sample_rate) ** smallest * len(sampler) * size
    if dropped >= _DROPPED_BATCH:
        raise InputError(
            f"a rank's local batch has {sampler.sample_rate * smallest:.3g} examples on average, "
            f"and in an epoch one is empty with probability {dropped:.1g}; Opacus's distributed "
            "sampler drops empty batches, and the ranks would get out of step: take larger batches "
            f"or fewer ranks, until this probability is below {_DROPPED_BATCH:g}"
        )


@contextmanager
def sampler_watched(
    sampler: Any,
    n_canaries: int,
    before_draw: Callable[[bool], None],
    on_draw: Callable[[IntArray, IntArray, bool], None],
    on_epoch_end: Callable[[bool, bool], None],
) -> Iterator[None]:
    """Report each batch that is drawn, and each epoch's end: whether its sampler was exhausted.

    The sampler draws canaries as if they were further examples; the loop does not see them. A pass
    that begins with gradients off evaluates, whatever it draws: no step may use a batch of it.
    """
    plain = type(sampler)
    n = sampler.num_samples if n_canaries else np.inf
    exhausted = False

    # A DataLoader's batch_sampler cannot be reassigned, so its class is replaced.
    class Watched(plain):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[list[int]]:
            return self.reported(super().__iter__(), True)

        def reported(self, draws: Any, from_the_start: bool = False) -> Iterator[list[int]]:
            nonlocal exhausted
            if trains := torch.is_grad_enabled():
                on_epoch_end(exhausted, False)
                exhausted = False
            before_draw(True)
            for indices in draws:
                drawn = np.array(indices, dtype=np.int64)
                positions, canaries = drawn[drawn < n], drawn[drawn >= n] - n
                on_draw(positions, canaries, trains)
                yield positions.tolist() if n_canaries else indices
                before_draw(False)
            exhausted = from_the_start if trains else exhausted

    Watched.__name__, Watched.__qualname__ = plain.__name__, plain.__qualname__
    sampler.__class__ = Watched
    if n_canaries:
        sampler.num_samples += n_canaries
    try:
        yield
    finally:
        sampler.__class__ = plain
        if n_canaries:
            sampler.num_samples -= n_canaries
        on_epoch_end(exhausted, True)
