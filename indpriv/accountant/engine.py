"""What an accountant must provide; `engines` lists those that there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv._progress import Advance
from indpriv.accountant.histogram.histogram import Histogram
from indpriv.accountant.method import Method
from indpriv.norm_log.norm_log import NormLog


@dataclass(frozen=True)
class Epsilons:
    """Bounds of the epsilon of each of n examples; arrays have shape (n,).

    Attributes:
        epsilon: never below the truth. epsilon_lower: never above it.
        details: further columns of the accountant.
    """

    epsilon: FloatArray
    epsilon_lower: FloatArray
    details: dict[str, NDArray[np.generic]]

    def __len__(self) -> int:
        return len(self.epsilon)


def joined(parts: Sequence[Epsilons]) -> Epsilons:
    """The examples of all parts, which have the same details."""
    names = parts[0].details
    return Epsilons(
        np.concatenate([part.epsilon for part in parts]),
        np.concatenate([part.epsilon_lower for part in parts]),
        {name: np.concatenate([part.details[name] for part in parts]) for name in names},
    )


class Engine(Protocol):
    """The account of one log by one accountant: what all blocks share, then block by block."""

    numerical_noise: ClassVar[str]  # largest relative change of others' epsilons without one person

    @classmethod
    def prepare(cls, log: NormLog, method: Method) -> Engine:
        """Do what all blocks of examples share."""
        ...

    @property
    def worst_case(self) -> Epsilons:
        """Bounds of one example that is clipped in every step."""
        ...

    @property
    def histogram(self) -> Histogram:
        """How norms are counted; it never says that an example is always clipped unless it is."""
        ...

    @property
    def bytes_per_example(self) -> int:
        """Memory that `block` takes for one example."""
        ...

    def block(self, block: NormLog) -> Epsilons:
        """Bounds of the examples of a block, none above the worst case."""
        ...


@runtime_checkable
class Watched(Protocol):
    """An engine whose blocks take so long that it reports how far it is in each."""

    def watched(self, advance: Advance) -> Engine:
        """The same engine, which calls advance for at most the examples of each block."""
        ...


@runtime_checkable
class Fillable(Protocol):
    """An engine whose tables are filled in another way than by its work on a block."""

    def filled(self, block: NormLog) -> Engine:
        """The same engine, which takes along the tables that the examples of a block need."""
        ...
