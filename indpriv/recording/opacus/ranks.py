"""The processes (ranks) that train one model together, and what they exchange. Sensitive.

Opacus divides a run between them: each rank draws from its own shard, clips its own gradients and
sums them; the first rank adds the noise to its sum, and all sums are added. (With FSDP2, sums are
added first, and each rank adds the noise of the parameters that it holds.) Here all ranks exchange
what they saw, before each step and after each pass, so that all reach the same verdict and stop
together. Only the first rank writes the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    FSDPOptimizerFastGradientClipping,
)

from indpriv._arrays import FloatArray, IntArray
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.session_counts import Found
from indpriv.recording.opacus.tally import RankCounts

DISTRIBUTED = (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    FSDPOptimizerFastGradientClipping,
)
# Opacus's sampler drops an empty local batch. A run in which this is likelier is refused.
DROPPED_BATCH = 1e-9

Batch = tuple[IntArray, FloatArray]  # positions and norms
T = TypeVar("T")


@dataclass(frozen=True)
class RankStep:
    """What one rank reports to the others before a step.

    Attributes:
        counted: since its last message.
        shared: name -> value of what must be equal on all ranks.
        sampling_seed: must differ between ranks; None if the generator has none.
        positions: (n,) of its part of the batch; None if that is not the one that was drawn.
        norms: (n,) that training clipped; None if no rank needs them.
        found: by its comparisons, up to the last step.
    """

    counted: RankCounts
    shared: Mapping[str, Any]
    sampling_seed: int | None
    positions: IntArray | None = None
    norms: FloatArray | None = None
    found: Mapping[str, Found] = field(default_factory=dict)


class Ranks:
    """The ranks of one run; a run in one process has one rank, which exchanges nothing."""

    def __init__(self, optimizer: Any) -> None:
        """Find the ranks that an optimizer works with; all of them must call this together."""
        self.rank, self.size, self._group = 0, 1, None
        if isinstance(optimizer, DISTRIBUTED):
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            # A group of its own: training's may use GPUs, and be busy.
            self._group = dist.new_group(backend="gloo")

    @property
    def writes(self) -> bool:
        """Whether this rank writes the log."""
        return self.rank == 0

    def gather(self, moment: str, value: T) -> list[T]:
        """Values of all ranks, in their order. All must call this at the same moment.

        Raises:
            EvidenceError: a rank is gone, or is at another moment.
        """
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, (moment, value), group=self._group)
        except RuntimeError as error:
            raise EvidenceError(
                f"another of the {self.size} ranks did not answer at {moment}; its part is missing "
                "and cannot be recorded. The log keeps what was recorded before: start all ranks "
                "again from a checkpoint, with resume_at="
            ) from error
        moments = [where for where, _ in found]
        if len(set(moments)) > 1:
            places = ", ".join(f"rank {rank} at {where}" for rank, where in enumerate(moments))
            raise EvidenceError(
                f"the ranks are not at the same place ({places}): every rank must take the same "
                "steps, one for each batch that it draws"
            )
        return [part for _, part in found]

    def part(self, positions: IntArray) -> IntArray:
        """The positions that this rank takes, in order, if a pass is divided evenly."""
        return np.array_split(positions, self.size)[self.rank]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def check_together(
    moment: str, shared: Sequence[Mapping[str, Any]], seeds: Sequence[int | None]
) -> None:
    """Compare the ranks with each other.

    Raises:
        EvidenceError: something differs that must be equal, or two ranks draw with the same seed.
    """
    for name in shared[0]:
        values = [part[name] for part in shared]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            raise EvidenceError(
                f"at {moment} the ranks differ in {name} ({listed}): they do not train one model "
                "in one way, and no account covers that; give every rank the same value"
            )
    known = [seed for seed in seeds if seed is not None]
    if len(set(known)) < len(known):
        raise EvidenceError(
            f"at {moment} two of {len(seeds)} ranks draw with the same seed, so their samples are "
            "not independent, as the account assumes; give each its own DataLoader("
            "generator=indpriv.recording.private_generator())"
        )


def whole_batch(moment: str, parts: Sequence[RankStep]) -> Batch | None:
    """Positions and norms of the logical batch that the ranks drew; None if a part is not known.

    Raises:
        EvidenceError: two ranks drew the same example.
    """
    known = [part.positions for part in parts if part.positions is not None]
    positions = np.concatenate([*known, np.zeros(0, dtype=np.int64)])
    if len(parts) > 1 and len(np.unique(positions)) < len(positions):
        raise EvidenceError(
            f"at {moment} an example was drawn by two ranks: it would contribute twice what the "
            "account assumes; on every rank use the loader that make_private returned there"
        )
    norms = [part.norms for part in parts if part.positions is not None and part.norms is not None]
    return (positions, np.concatenate(norms)) if len(norms) == len(parts) else None


def check_distributed_sampler(sampler: Any, optimizer: Any) -> None:
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
    if dropped >= DROPPED_BATCH:
        raise InputError(
            f"a rank's local batch has {sampler.sample_rate * smallest:.3g} examples on average, "
            f"and in an epoch one is empty with probability {dropped:.1g}; Opacus's distributed "
            "sampler drops empty batches, and the ranks would get out of step: take larger batches "
            f"or fewer ranks, until this probability is below {DROPPED_BATCH:g}"
        )
