"""The Laplace transform of one step's privacy loss, on the real axis and along a vertical line.

With f = 1 - q + q exp(z shift - shift^2 / 2) and z from N(0, 1), the logarithm of the transform,
K(w) = log E[exp(w loss)], is log E[f^a], where a = w + 1 in the remove direction and a = -w in the
add direction. At real w = alpha - 1 the first is (alpha - 1) times the Renyi divergence of order
alpha. A law may be cut off at a z that a run passes so rarely that delta is not affected: else rare
huge losses would dominate the transform where the bulk of the loss decides delta.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, ndtr

from indpriv._arrays import FloatArray
from indpriv.accountant.pld.loss_sum import (
    UNIT_ROUNDOFF,
    ComplexArray,
    Direction,
    StepLaws,
    exponent_of,
    log_density_ratio,
)
from indpriv.accountant.pld.quadrature import (
    QUADRATURE_ERROR,
    count_nodes,
    full_window,
    nodes_and_weights,
)

_CHUNK = 1 << 18  # numbers held at a time: 4 MB
_NOTHING = QUADRATURE_ERROR / 16  # of a law's weights
_KEPT_MULTIPLE = 128  # few different numbers of nodes, so that many laws have the same
_NODES_AT_ONCE = 1024  # summed by one matrix product; sums of sums err less than one long sum


@dataclass(frozen=True)
class Tilted:
    """The loss of each step under its law tilted by exp(tilt * loss), on quadrature nodes in z.

    Attributes:
        losses: (n_laws, n_nodes) loss at each node. weights: (n_laws, n_nodes) probabilities; each
        row sums to 1. log_transform: (n_laws,) K(tilt). error: (n_laws,) bound of the relative
        rounding error of E[exp(w loss)], per unit of |w| + 1.
    """

    losses: FloatArray
    weights: FloatArray
    log_transform: FloatArray
    error: FloatArray


def is_representable(laws: StepLaws, tilt: float, direction: Direction) -> NDArray[np.bool_]:
    """(n_laws,) whether the transform at this tilt is small enough to be of use; else infinite."""
    a = exponent_of(tilt, direction)
    growth = a * (a - 1) / 2 * np.square(laws.shift)
    if direction == "add":
        growth = np.minimum(growth, a * np.log1p(-laws.sample_rate))
    else:
        growth = growth + np.log(laws.sample_rate)
        if laws.cut is not None:
            at_cut = log_density_ratio(laws.cut, laws.shift, laws.sample_rate)
            growth = np.minimum(growth, a * at_cut)
    return growth < 1000.0 + 20.0 * laws.shift


def tilted_law(
    laws: StepLaws,
    tilt: float,
    direction: Direction,
    *,
    highest_frequency: float = 0.0,
    n_nodes: int | None = None,
) -> Tilted:
    """The tilted laws on the nodes of `quadrature.nodes_and_weights`."""
    z, weight = nodes_and_weights(laws, tilt, direction, highest_frequency, n_nodes)
    return law_on(z, weight, laws, exponent_of(tilt, direction), direction)


def law_on(
    z: FloatArray, weight: FloatArray, laws: StepLaws, a: float, direction: Direction
) -> Tilted:
    """The laws tilted by f^a on nodes z with quadrature weights, both (n_laws, n_nodes)."""
    shift, rate = laws.shift[:, None], laws.sample_rate[:, None]
    log_ratio = log_density_ratio(z, shift, rate)
    log_gauss = -np.square(z) / 2 - np.log(2 * np.pi) / 2 + np.log(weight)
    log_mass = log_gauss + a * log_ratio
    peak = log_mass.max(axis=1, keepdims=True)
    mass = np.exp(log_mass - peak)
    total = mass.sum(axis=1, keepdims=True)
    # log E[f^a] = log1p(E[f^a - 1 - a (f - 1)]), since E[f] = 1: nothing cancels when the step is
    # nearly free
    power = a * log_ratio
    excess = rate * np.expm1(np.minimum(z * shift - np.square(shift) / 2, 600.0))
    small = np.sum(np.exp(log_gauss) * (np.expm1(np.minimum(power, 600.0)) - a * excess), axis=1)
    if laws.cut is not None:
        small += _cut_off(laws.shift, laws.sample_rate, laws.cut, a, direction)
    direct = peak[:, 0] + np.log(total[:, 0])
    stable = (power.max(axis=1) < 600.0) & (direct < 1.0)
    if direction == "add":
        stable &= z[:, -1] > full_window(laws) - 0.5
    log_transform = np.where(stable, np.log1p(np.where(stable, small, 0.0)), direct)
    losses, weights = (log_ratio if direction == "remove" else -log_ratio), mass / total
    spread = np.sum(weights * np.abs(losses), axis=1)
    spread += 2 * laws.sample_rate * erf(laws.shift / np.sqrt(8.0))
    # Sums of this number of terms in any order, each of three products (Higham 2002, section 3.1),
    # with a margin
    longest = min(z.shape[1], _NODES_AT_ONCE) + z.shape[1] // _NODES_AT_ONCE
    relative = spread + np.where(stable, 0.0, 1.0 + np.abs(direct))
    return Tilted(losses, weights, log_transform, (3 * longest + 64) * UNIT_ROUNDOFF * relative)


def _cut_off(
    shift: FloatArray, rate: FloatArray, cut: FloatArray, a: float, direction: Direction
) -> FloatArray:
    """(n_laws,) minus what the cut takes from E[1 + a (f - 1)], which is 1 on the whole line."""
    alone = ndtr(-cut)
    sampled = ndtr(shift - cut) if direction == "remove" else ndtr(-shift - cut)
    return np.asarray(-alone - a * rate * (sampled - alone))


def in_classes(
    laws: StepLaws, tilt: float, direction: Direction, highest_frequency: float = 0.0
) -> Iterator[tuple[NDArray[np.intp], Tilted]]:
    """Yield positions of laws that take the same number of nodes, and their tilted laws.

    What is found for a law does not depend on the other laws.
    """
    size = count_nodes(laws, tilt, direction, highest_frequency) if len(laws) else np.zeros(0)
    for value in np.unique(size):
        alike = np.flatnonzero(size == value)
        at_once = max(1, _CHUNK // int(value))
        for start in range(0, len(alike), at_once):
            part = alike[start : start + at_once]
            law = tilted_law(
                laws.select(part),
                tilt,
                direction,
                highest_frequency=highest_frequency,
                n_nodes=int(value),
            )
            yield part, law


def log_transforms(laws: StepLaws, tilt: float, direction: Direction) -> FloatArray:
    """(n_laws,) K at a real tilt."""
    found = np.empty(len(laws))
    for part, law in in_classes(laws, tilt, direction):
        found[part] = law.log_transform
    return found


@dataclass(frozen=True)
class ContourTable:
    """The transform of each one-step law along a contour.

    Attributes:
        logarithm: (n_laws, n_frequencies) K(tilt + i omega) - K(tilt).
        error: (n_laws,) bound of the rounding of E[exp(w loss)], relative to its size at the tilt,
            per unit of |w| + 1.
    """

    logarithm: ComplexArray
    error: FloatArray


def contour_table(
    laws: StepLaws, tilt: float, direction: Direction, frequencies: FloatArray
) -> ContourTable:
    """The transforms at equally spaced frequencies from 0."""
    logarithm = np.empty((len(laws), len(frequencies)), np.complex128)
    error = np.empty(len(laws))
    for part, law in in_classes(laws, tilt, direction, float(frequencies[-1])):
        logarithm[part], error[part] = characteristic_log(law, frequencies), law.error
    return ContourTable(logarithm, error)


def characteristic_log(law: Tilted, frequencies: FloatArray) -> ComplexArray:
    """K(tilt + i omega) - K(tilt) at equally spaced frequencies from 0: (n_laws, n_frequencies).

    Every omega is the sum of a coarse and a fine one, so exp(i omega loss) - 1 = A B + A + B of
    the two parts' own, and all nodes of a contour are one matrix product for each law. Nothing is
    added to 1 before the logarithm: near omega = 0 all terms are small, so that thousands of equal
    steps keep full precision. Nodes that together hold less than _NOTHING of a law are left out.
    """
    fine = int(np.ceil(np.sqrt(len(frequencies))))
    coarse = -(-len(frequencies) // fine)
    spacing = float(frequencies[1]) if len(frequencies) > 1 else 0.0
    sums = np.empty((len(law.losses), coarse, fine), np.complex128)
    n_nodes = law.weights.shape[1]
    light = law.weights < _NOTHING / n_nodes
    n_kept = -(-(n_nodes - light.sum(axis=1)) // _KEPT_MULTIPLE) * _KEPT_MULTIPLE
    for value in np.unique(n_kept):
        alike = np.flatnonzero(n_kept == value)
        laws_at_once = max(1, _CHUNK // (min(int(value), _NODES_AT_ONCE) * (fine + coarse)))
        for start in range(0, len(alike), laws_at_once):
            rows = alike[start : start + laws_at_once]
            kept = np.argsort(light[rows], axis=1, kind="stable")[:, :value]
            angle = spacing * np.take_along_axis(law.losses[rows], kept, axis=1)
            weights = np.take_along_axis(law.weights[rows], kept, axis=1)
            sums[rows] = _excess(angle, weights, coarse, fine)
    return _complex_log1p(sums.reshape(len(sums), -1)[:, : len(frequencies)])


def _excess(angle: FloatArray, weights: FloatArray, coarse: int, fine: int) -> ComplexArray:
    """Sum of weights (exp(i k angle) - 1) for k = fine * row + column: (n_laws, coarse, fine)."""
    sums = np.zeros((len(angle), coarse, fine), np.complex128)
    for first in range(0, angle.shape[1], _NODES_AT_ONCE):
        part = angle[:, first : first + _NODES_AT_ONCE]
        weight = weights[:, first : first + _NODES_AT_ONCE]
        near = _turns(part, fine)
        far = _turns(fine * part, coarse) * weight[:, None]
        sums += far @ near.transpose(0, 2, 1) + far.sum(axis=2)[:, :, None]
        sums += (near @ weight[:, :, None]).transpose(0, 2, 1)
    return sums


def _turns(angle: FloatArray, n_turns: int) -> ComplexArray:
    """exp(i k angle) - 1 for k from 0, (n_laws, n_turns, n_nodes), by doubling.

    Every value has full relative precision.
    """
    turns = np.empty((len(angle), n_turns, angle.shape[1]), np.complex128)
    turns[:, 0], n_done = 0.0, 1
    while n_done < n_turns:
        half = angle * (n_done / 2)
        sine = np.sin(half)
        turn = (2 * sine * (1j * np.cos(half) - sine))[:, None]
        following = turns[:, : min(n_done, n_turns - n_done)]
        added = turns[:, n_done : 2 * n_done]
        np.multiply(following, turn, out=added)
        added += following
        added += turn
        n_done *= 2
    return turns


def _complex_log1p(sums: ComplexArray) -> ComplexArray:
    """log(1 + x); a modulus of 0 becomes exp(-345), which only a zero weight can meet."""
    real, imaginary = sums.real, sums.imag
    square = 2 * real + real * real + imaginary * imaginary
    modulus = np.square(1 + real) + np.square(imaginary)  # without cancellation where it is small
    near, far = np.log1p(np.maximum(square, -0.5)), np.log(np.maximum(modulus, 1e-300))
    result = np.empty(sums.shape, np.complex128)
    result.real = np.where(square > -0.5, near, far) / 2
    result.imag = np.arctan2(imaginary, 1 + real)
    return result
