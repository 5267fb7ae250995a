"""Rounding of gradient norms to integer codes, in units of a fraction of the clipping norm.

A code at most `top` means a norm of at most `code * rounding * max_grad_norm`; the top level is
max_grad_norm itself. A code above `top` means a clipped norm. Its size is kept on a logarithmic
scale, for choosing max_grad_norm; accounting only uses that it is clipped. Output is sensitive.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._checks import check_choice, check_rounding
from indpriv.errors import InputError

MODES = ("up", "nearest")
_OVERFLOW_PER_OCTAVE = 8
_MAX_OVERFLOW = 16 * _OVERFLOW_PER_OCTAVE  # sizes of clipped norms up to 2^16 times max_grad_norm

Codes = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Levels:
    """The levels of a rounding: fractions 0, r, 2r, ..., 1 of max_grad_norm (1 is always one).

    Args:
        rounding: r, a fraction of max_grad_norm in [1e-4, 1].
        rounding_mode: "up" never under-reports; "nearest" reproduces the paper's rounding and can.

    >>> Levels(0.5, "up").fractions
    array([0. , 0.5, 1. ])
    """

    rounding: float
    rounding_mode: str

    def __post_init__(self) -> None:
        if check_rounding(self.rounding) == 0:
            raise InputError("rounding=0 has no levels; keep the norms themselves")
        check_choice("rounding_mode", self.rounding_mode, MODES)

    @property
    def top(self) -> int:
        """The code of max_grad_norm itself."""
        return math.ceil(1 / self.rounding - 1e-9)

    @property
    def max_code(self) -> int:
        """The largest code, which stands for every clipped norm beyond the scale."""
        return min(self.top + _MAX_OVERFLOW, int(np.iinfo(self.dtype).max))

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """One byte per norm if the levels and at least an octave of clipped sizes fit, else two."""
        return np.uint8 if self.top + _OVERFLOW_PER_OCTAVE <= np.iinfo(np.uint8).max else np.uint16

    @cached_property
    def fractions(self) -> NDArray[np.float64]:
        """(top + 1,) relative norms of the levels, as fractions of max_grad_norm."""
        fractions: NDArray[np.float64] = np.minimum(np.arange(self.top + 1) * self.rounding, 1.0)
        fractions[-1] = 1.0
        return fractions

    def encode(
        self, norms: NDArray[np.floating], max_grad_norm: float | NDArray[np.floating]
    ) -> Codes:
        """Round norms to codes.

        Args:
            norms: gradient norms before clipping, of any shape, at least 0, without NaN; infinity
                counts as clipped.
            max_grad_norm: the clipping norm of all, or of each.

        Returns:
            codes of the same shape. With mode "up" the level of a code is never below its norm.
        """
        relative = np.asarray(norms, dtype=np.float64) / max_grad_norm
        inside = np.minimum(relative, 1.0)
        if self.rounding_mode == "up":
            # The division may have underflowed.
            inside = np.where((inside == 0) & (norms > 0), np.nextafter(0.0, 1.0), inside)
            codes = np.minimum(np.ceil(inside / self.rounding), self.top).astype(np.int64)
            # In floats 0.07 / 0.01 is above 7.
            codes -= (codes > 0) & (self.fractions[np.maximum(codes - 1, 0)] >= inside)
            codes += self.fractions[codes] < inside
        else:
            codes = np.minimum(np.floor(inside / self.rounding + 0.5), self.top).astype(np.int64)
        clipped = relative > 1.0
        if clipped.any():
            octaves = np.ceil(_OVERFLOW_PER_OCTAVE * np.log2(relative[clipped]))
            above = np.clip(octaves, 1, self.max_code - self.top)
            codes[clipped] = self.top + above.astype(np.int64)
        return codes.astype(self.dtype)

    def relative(self, codes: Codes) -> NDArray[np.float64]:
        """Contributions min(norm, C) / C of codes, where C is the max_grad_norm of their record."""
        return self.fractions[np.minimum(codes, self.top)]

    def norms(self, codes: Codes, max_grad_norm: float) -> NDArray[np.float64]:
        """Norms that codes stand for; of clipped ones, the upper edge of their bin."""
        octaves = np.maximum(codes.astype(np.int64) - self.top, 0) / _OVERFLOW_PER_OCTAVE
        return self.relative(codes) * np.exp2(octaves) * max_grad_norm


def levels_of(rounding: float, rounding_mode: str) -> Levels | None:
    """The levels of a checked rounding; None if it is 0, which keeps norms in full."""
    check_choice("rounding_mode", rounding_mode, MODES)
    return Levels(rounding, rounding_mode) if check_rounding(rounding) else None


def dtype_of(levels: Levels | None) -> Any:
    """The type of codes; that of norms where they are kept in full."""
    return np.float64 if levels is None else levels.dtype
