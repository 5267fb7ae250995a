"""Numbers that come a part at a time, and their quantiles. Sensitive."""

from __future__ import annotations

import numpy as np

from indpriv._arrays import FloatArray, IntArray

_MOST = 1 << 20  # distinct values that are kept
_SIGNIFICAND, _FEWEST_BITS = 52, 8


class CountedValues:
    """Distinct finite numbers and how often each came.

    Of more than 2^20 distinct values, only the first bits of their significand are kept, so that
    memory does not grow: 2^-8 (0.4 %) is the most by which a value is then too close to zero.

    Attributes:
        n: number of values.
        least: the smallest; infinity without any.
    """

    def __init__(self) -> None:
        self.n, self.least, self._bits = 0, np.inf, _SIGNIFICAND
        self._values: FloatArray = np.zeros(0)
        self._counts: IntArray = np.zeros(0, np.int64)

    def add(self, values: FloatArray) -> None:
        """Count values (n,)."""
        self.n += len(values)
        self.least = min(self.least, float(values.min(initial=np.inf)))
        self._merge(values, np.ones(len(values), np.int64))
        while len(self._values) > _MOST and self._bits > _FEWEST_BITS:
            self._bits -= 4
            self._merge(np.zeros(0), np.zeros(0, np.int64))

    def observations(self, probabilities: FloatArray) -> FloatArray:
        """The values closest to these quantiles, as numpy's method "closest_observation" has it."""
        place = self.n * probabilities - 1.5
        before = np.floor(place).astype(np.int64)
        tied = (place == before) & (before % 2 == 1)  # as Hyndman and Fan 1996 have it
        rank = np.clip(np.where(tied, before, before + 1), 0, self.n - 1)
        return self._values[np.searchsorted(np.cumsum(self._counts), rank, side="right")]

    def _merge(self, values: FloatArray, counts: IntArray) -> None:
        every = np.concatenate([self._values, values]) + 0.0  # no -0.0
        if self._bits < _SIGNIFICAND:
            kept = np.int64(-1) << np.int64(_SIGNIFICAND - self._bits)
            every = (every.view(np.int64) & kept).view(np.float64)
        self._values, codes = np.unique(every, return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(codes, weights, minlength=len(self._values)).astype(np.int64)
