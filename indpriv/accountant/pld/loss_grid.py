"""One step's privacy loss on a grid, with laws that provably lie above and below it.

A pair (P, Q) is the law of X = dP/dQ under Q; delta(epsilon) of a composition is
E[(product of X - exp(epsilon))_+] (remove) or E[(1 - exp(epsilon) product of X)_+] (add), convex in
every factor. So a mean-preserving spread of one step's X can only raise delta of the whole run, and
a mean-preserving contraction can only lower it, in both directions.

* Above: X between two grid points is split between them (connect the dots; Doroshenko et al. 2022,
  arXiv:2207.04380v1).
* Below: with v the curve c -> E[(X - c)_+], any positive measure on the grid whose curve lies below
  v will do. The polygon through v(x_k) - D_k is taken, where D_k bounds by how much a chord lies
  above v on either side of x_k; where that polygon is not convex, its greatest convex minorant. All
  mass left of a first point is contracted to its mean, which becomes the first grid point: a run
  where participation is rare keeps its bulk in place, however coarse the grid.

Both differ from the law in second order of the spacing only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, isotonic_regression
from scipy.special import log_ndtr, ndtr

from indpriv._arrays import FloatArray

# Relative to the curve: rounding of sums, allowed for when a lower law is compared with it
LOWER_EXCESS = 2e-12

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_PANEL = 0.25  # width in z, over max(1, shift); 8 Gauss-Legendre nodes then err by 1e-14 relative
_FAR_LEFT = -38.0  # a Gaussian holds nothing below it
_NEGLIGIBLE = 1e-22  # negative mass that is left out instead of made convex
# Allowed at the ends, where the curve itself is hardly more; no run is long enough for it to matter
_NOTHING = 1e-26
_LARGEST_EXPONENT = 600.0
_STEEP = 0.25  # share of the curve by which it may be lowered
_WIDENINGS = (0.0, 2.0, 8.0, 32.0)  # spacings by which more is contracted, until a polygon fits
_CHUNK = 250_000  # panels at a time


@dataclass(frozen=True)
class LossGrid:
    """Masses of a law on losses offset + spacing * k.

    Attributes:
        offset: loss at the first point.
        mass: (n_points,) probability under Q of each point; under P it is mass * exp(loss).
    """

    offset: float
    mass: FloatArray


@dataclass(frozen=True)
class Step:
    """One step's law between two ends of z.

    Attributes:
        shift: above 0.
        sample_rate: in (0, 1].
        low, high: the law is followed for z in [low, high].
    """

    shift: float
    sample_rate: float
    low: float
    high: float

    @property
    def floor(self) -> float:
        """The smallest loss, log(1 - q); 0, as an origin only, where every step is sampled."""
        return float(np.log1p(-self.sample_rate)) if self.sample_rate < 1 else 0.0

    @property
    def logit(self) -> float:
        """Log odds of the sampling rate."""
        return float(np.log(self.sample_rate) - np.log1p(-self.sample_rate))

    def rise(self, z: FloatArray | float) -> FloatArray:
        """Loss above the floor at z, to full relative precision."""
        exponent = np.asarray(z, np.float64) * self.shift - self.shift**2 / 2
        if self.sample_rate >= 1:
            return exponent
        exponent = exponent + self.logit
        large = np.maximum(exponent, 0.0) + np.log1p(np.exp(-np.abs(exponent)))
        return np.where(exponent < 0, np.log1p(np.exp(np.minimum(exponent, 0.0))), large)

    def z_at(self, rise: FloatArray | float) -> FloatArray:
        """The z at which the loss is this far above the floor; -inf for 0."""
        value = np.asarray(rise, np.float64)
        if self.sample_rate < 1:
            with np.errstate(divide="ignore"):
                near = np.log(np.expm1(np.minimum(value, 30.0)))
            value = np.where(value > 30, value, near) - self.logit
        return np.asarray(value / self.shift + self.shift / 2)


def upper_grid(step: Step, spacing: float) -> LossGrid:
    """The law for z below `high`, spread to grid points; the caller adds what is beyond."""
    start = float(step.rise(step.low))
    whole = step.sample_rate < 1 and start < spacing
    first_z, first_rise = (_FAR_LEFT, 0.0) if whole else (step.low, start)
    low, high, _ = _bucket_sums(step, spacing, first_z, first_rise)
    mass = np.append(low, 0.0)
    mass[1:] += high
    if not whole:  # what is below moves up to the first point: exact where it does not count
        mass[0] += ndtr(first_z)
    return LossGrid(step.floor + first_rise, mass)


def lower_grid(step: Step, spacing: float) -> LossGrid:
    """A law below the step's law: contracted on the left, a polygon below the curve to its right.

    It has no mass near or beyond `high`.
    """
    highest = float(step.rise(step.high))
    for more in _WIDENINGS:
        break_z = _contracted_end(step, spacing)
        break_rise = float(step.rise(break_z)) + more * spacing
        if break_rise >= highest:
            break
        grid = _lower_polygon(step, spacing, float(step.z_at(break_rise)) if more else break_z)
        if grid is not None:
            return grid
    return LossGrid(step.floor + _mean_rise(step, step.high), np.array([float(ndtr(step.high))]))


def _lower_polygon(step: Step, spacing: float, break_z: float) -> LossGrid | None:
    """The lower law with all mass left of break_z contracted; None if the grid is too coarse."""
    first_rise = _mean_rise(step, break_z)
    below, above, spread = _bucket_sums(step, spacing, break_z, first_rise)
    mass = np.append(below, 0.0)
    mass[1:] += above
    mass[0] += ndtr(break_z)
    # Widths of the buckets above and below x_k, over x_k
    up, down = np.expm1(spacing), -np.expm1(-spacing)
    call, put = _curves(mass, spacing)
    falling, rising = _steep(call, put, spread, spacing)
    rising[0] = True  # from the first point the polygon must leave along the curve's tangent
    lift = np.zeros(len(mass))  # D_k / x_k
    lift[:-1] = np.where(rising, 0.0, np.where(falling, above, spread)) * up
    lift[1:] = np.maximum(lift[1:], np.where(rising, below, np.where(falling, 0.0, spread)) * down)
    following, before = np.append(lift[1:], 0.0), np.append(0.0, lift[:-1])
    kinks = mass - (following / down - lift / up - lift / down + before / up)
    kinks = kinks[:-2]  # the lift of the last two depends on what is beyond the last bucket
    scale = np.exp(np.minimum(spacing * np.arange(len(mass)), _LARGEST_EXPONENT))
    if float(np.sum(np.maximum(-kinks, 0.0) * (1 + scale[:-2]))) > _NEGLIGIBLE:
        kinks = _convex(kinks, spacing)
    kinks = np.maximum(kinks, 0.0)
    allowed = lift * scale
    curves = _curves(np.append(kinks, [0.0, 0.0]), spacing)
    fits = all(
        np.all(found - (curve - allowed) <= LOWER_EXCESS * curve + _NOTHING)
        for found, curve in zip(curves, (call, put), strict=True)
    )
    return LossGrid(step.floor + first_rise, kinks) if fits else None


def _mean_rise(step: Step, z: float) -> float:
    """How far the mean of X below z is above the floor, as a loss."""
    log_ratio = float(log_ndtr(z - step.shift) - log_ndtr(z))  # of E[exp(exponent) | below z]
    return log_ratio if step.sample_rate >= 1 else float(np.log1p(np.exp(step.logit + log_ratio)))


def _contracted_end(step: Step, spacing: float) -> float:
    """The z below which all mass is contracted to its mean.

    It is the point whose loss is one spacing above that of the mean, so that the first bucket holds
    no other mass; `low` where the grid resolves the law down to there, and `high` where the whole
    law is within one spacing.
    """

    def excess(z: float) -> float:
        return float(step.rise(z)) - _mean_rise(step, z) - spacing

    if excess(step.low) >= 0:
        return step.low
    if excess(step.high) <= 0:
        return step.high
    return float(brentq(excess, step.low, step.high, xtol=1e-9))


def _curves(mass: FloatArray, spacing: float) -> tuple[FloatArray, FloatArray]:
    """E[(X - x_k)_+] and E[(x_k - X)_+] at every grid point x_k, in units of the first point.

    At these points the law that is spread to the grid has the curves of the law itself.
    """
    width = np.diff(np.exp(np.minimum(spacing * np.arange(len(mass)), _LARGEST_EXPONENT)))
    beyond = np.cumsum(mass[::-1])[::-1]
    call = np.append(np.cumsum((width * beyond[1:])[::-1])[::-1], 0.0)
    put = np.append(0.0, np.cumsum(width * np.cumsum(mass)[:-1]))
    return call, put


def _steep(
    call: FloatArray, put: FloatArray, spread: FloatArray, spacing: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Buckets over which the curve falls or rises too steeply to lower it at both of their points.

    E[(X - c)_+] at the bucket's upper point, or E[(c - X)_+] at its lower one, must stay positive.
    """
    width = np.diff(np.exp(np.minimum(spacing * np.arange(len(call)), _LARGEST_EXPONENT)))
    falling = spread * width > _STEEP * call[1:]
    rising = ~falling & (spread * width > _STEEP * put[:-1])
    return falling, rising


def _bucket_sums(
    step: Step, spacing: float, first_z: float, first_rise: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """For each bucket of losses the sums of 1 - u, u and u (1 - u) over the law.

    u is the position of X in its bucket, from 0 to 1. The first bucket begins at first_z.
    """
    n_buckets = int(np.ceil((float(step.rise(step.high)) - first_rise) / spacing)) + 2
    knots = np.maximum(step.z_at(first_rise + spacing * np.arange(1.0, n_buckets + 1)), first_z)
    plain = np.arange(first_z, knots[-1], _PANEL / max(1.0, step.shift))[1:]
    edges = np.concatenate([[first_z], knots, plain])
    is_knot = np.concatenate([[False], np.ones(n_buckets, bool), np.zeros(len(plain), bool)])
    order = np.argsort(edges, kind="stable")
    edges, bucket = edges[order], np.cumsum(is_knot[order])
    sums = np.zeros((3, n_buckets))
    width = np.expm1(spacing)
    for start in range(0, len(edges) - 1, _CHUNK):
        stop = min(start + _CHUNK, len(edges) - 1)
        left, half = edges[start:stop, None], np.diff(edges[start : stop + 1])[:, None] / 2
        z = left + half * (1 + _NODES)
        index = np.minimum(bucket[start:stop], n_buckets - 1)
        inside = np.clip(step.rise(z) - (first_rise + spacing * index[:, None]), 0.0, spacing)
        law = half * _WEIGHTS * np.exp(-np.square(z) / 2) / np.sqrt(2 * np.pi)
        upper = np.expm1(inside) / width
        lower = np.exp(inside) * np.expm1(spacing - inside) / width
        for row, share in enumerate((lower, upper, lower * upper)):
            sums[row] += np.bincount(index, weights=(law * share).sum(axis=1), minlength=n_buckets)
    return sums[0], sums[1], sums[2]


def _convex(mass: FloatArray, spacing: float) -> FloatArray:
    """Kinks of the greatest convex minorant of the polygon with these (partly negative) kinks.

    Its slopes are the isotonic regression of the polygon's slopes, weighted by the bucket widths.
    """
    from_right = np.cumsum(mass[::-1])[::-1]
    slopes = -from_right[1:]
    widths = np.exp(np.minimum(spacing * np.arange(len(slopes)), _LARGEST_EXPONENT))
    fit = isotonic_regression(slopes, weights=widths)
    pooled = np.repeat(np.diff(fit.blocks) > 1, np.diff(fit.blocks))
    kinks = np.diff(np.concatenate([[-from_right[0]], np.where(pooled, fit.x, slopes), [0.0]]))
    touched = np.append(pooled, False) | np.append(False, pooled)
    return np.where(touched, kinks, mass)
