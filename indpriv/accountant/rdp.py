"""Rényi differential privacy of the Poisson-sampled Gaussian mechanism, for many norms and orders.

With shift u = relative_norm / noise_multiplier and z ~ N(0, 1), the density ratio of one step is
f(z) = 1 - q + q * exp(z * u - u**2 / 2), and (order - 1) * rdp = log E[f(z)**order]; for an owner
of k equal rows f is a sum of k + 1 such terms [7.1]. Numbers in brackets are lines of
docs/explanation/proofs.md.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from indpriv import _checks
from indpriv._types import ArrayLike, BoolArray, FloatArray, IntArray, NDArray
from indpriv.accountant.method import Method
from indpriv.epsilon_table import FALSE_POSITIVE_RATE
from indpriv.norm_log.fields import ACCOUNT_WORDS

FLOAT_SLACK = 1e-10  # relative; errors seen against 50-digit arithmetic are far below (tests)
_LOG_PRECISION = 36.0  # quadrature and truncation errors are below exp(-36) = 2e-16 of the result
# Standard deviations beyond the outer peaks, 0 and order * u: 81 * exp(-81 / 2) is 2e-16.
_REACH = 9.0
_DIRECT_ABOVE = 1e-4  # larger log moments are summed directly, smaller ones without the leading 1
_CANCELLING_BELOW, _CANCELLING_TERMS = 0.05, 9  # of a series, for smaller order * |log f|
_ELEMENTS_AT_ONCE = 1 << 19  # of a working array: 4 MB, which stays in cache

# Orders are places on one grid, from 1.0001 to 1.5e5. All examples try every _EVERY-th of them, up
# to a given one where divergences are slow to compute, then some that are _NEARER times as near.
_RATIO, _EVERY, _NEARER = 1.000625, 512, 8
_ORDERS: FloatArray = 1.0 + 1e-4 * np.power(_RATIO, np.arange(66 * _EVERY + 1.0))
_GAIN = 2e-3  # of epsilon; a search ends where no other order of the grid can give more
_KEPT_VALUES = 1 << 24  # divergences kept for further blocks: 128 MB
# In how many steps each example met each cell, (n_examples, n_cells)
Counts = FloatArray | csr_array
MOST_DENSE = 2048  # cells whose counts are summed as a dense array, which is faster there
# What is found about n examples, (n,) each: "epsilon", never below the truth, "epsilon_lower",
# never above it, and further columns of the accountant
Columns = dict[str, NDArray[Any]]
_FILLING = threading.Lock()  # of all accountants, so that one can be sent to another process


def compute_rdp(
    *, sample_rate: float, noise_multiplier: float, relative_norms: ArrayLike, orders: ArrayLike
) -> FloatArray:
    """Rényi divergence of one step, for each relative norm and order.

    Args:
        sample_rate: Poisson sampling rate, in (0, 1].
        noise_multiplier: noise standard deviation over max_grad_norm, above 0.
        relative_norms: (n_norms,) contributions min(norm, C) / C, in [0, 1].
        orders: (n_orders,) Rényi orders, finite and above 1.

    Returns:
        (n_norms, n_orders) in nats, add/remove neighbours. Exactly 0 where the norm is 0; within
        FLOAT_SLACK relative of the truth elsewhere.

    Raises:
        InputError: a value outside its range.

    >>> compute_rdp(sample_rate=1, noise_multiplier=2, relative_norms=[0, 1], orders=[2, 8])
    array([[0.  , 0.  ],
           [0.25, 1.  ]])
    """
    rate = float(_checks.check_setting("sample_rate", sample_rate))
    sigma = float(_checks.check_setting("noise_multiplier", noise_multiplier))
    wanted = "one row of numbers in [0, 1]: min(norm, C) / C"
    norms = _checks.check_row("relative_norms", relative_norms, "[0, 1]", wanted)
    return renyi_divergences(norms / sigma, np.full(len(norms), rate), _checks.check_orders(orders))


def renyi_divergences(
    shifts: FloatArray, sample_rates: FloatArray, orders: FloatArray, k: int = 1
) -> FloatArray:
    """(n, n_orders) of one step, unchecked; k: rows of one owner, each of that shift (n,)."""
    row = np.repeat(np.arange(len(shifts)), len(orders))
    values = divergences_of_pairs(shifts, sample_rates, row, np.tile(orders, len(shifts)), k)
    return values.reshape(len(shifts), len(orders))


def divergences_of_pairs(
    shifts: FloatArray,
    sample_rates: FloatArray,
    row: IntArray,
    order: FloatArray,
    k: int = 1,
    against: FloatArray | None = None,
) -> FloatArray:
    """(n_pairs,) divergences of mechanism row[i] at order[i]; see `renyi_divergences`.

    against: (n,) shifts, the other way, of what takes the example's place [9.1]; rates are then
        below 1, and the orders of a mechanism between the same powers of 2.
    """
    other, most = np.zeros(len(shifts)), np.full(len(shifts), 2.0)
    log_moments, unfilled = np.zeros(len(row)), np.arange(len(row))
    if against is None:
        filled = _fill_closed_form(log_moments, shifts[row], sample_rates[row], order, k)
        unfilled = np.flatnonzero(~filled)
    else:
        other = against
        np.maximum.at(most, row, 2.0 ** np.ceil(np.log2(order)))
    spacing, longest = _spacing(shifts, other, most), np.zeros(len(shifts))  # in nodes, by row
    some = row[unfilled]
    reach = order[unfilled] * (k * shifts + other)[some] + other[some] + 2 * _REACH
    np.maximum.at(longest, some, reach / spacing[some] + 3)
    rows = np.flatnonzero(longest)
    rows = rows[np.argsort(-longest[rows], kind="stable")]
    place = np.zeros(len(shifts), np.int64)
    place[rows] = np.arange(len(rows))
    unfilled = unfilled[np.argsort(place[row[unfilled]], kind="stable")]
    where, begin = place[row[unfilled]], 0
    while begin < len(rows):
        end = begin + max(1, int(_ELEMENTS_AT_ONCE // longest[rows[begin]]))
        batch, pairs = rows[begin:end], slice(*np.searchsorted(where, (begin, end)))
        these = shifts[batch], other[batch], sample_rates[batch], spacing[batch]
        chosen = unfilled[pairs]
        log_moments[chosen] = _log_moments(these, k, where[pairs] - begin, order[chosen])
        begin = end
    return log_moments / (order - 1)


def _log_binomial(k: int, j: int, q: FloatArray) -> FloatArray:
    """Log of the probability that j of k rows are sampled, at rates q below 1."""
    return np.asarray(math.log(math.comb(k, j)) + j * np.log(q) + (k - j) * np.log1p(-q))


def _fill_closed_form(
    out: FloatArray, shifts: FloatArray, q: FloatArray, orders: FloatArray, k: int
) -> BoolArray:
    """Fill pairs (n,) where two closed-form bounds agree; return a mask of those."""
    unsampled = q == 1.0
    with np.errstate(over="ignore"):  # infinity is right where there is almost no noise
        exponent = 0.5 * np.square(k * shifts) * (orders - 1)
        out[unsampled] = orders[unsampled] * exponent[unsampled]
    # E[f^a]^(1/a) <= sum of w_j e^{(a-1)(ju)^2/2} (Minkowski); E[f^a] >= w_k^a e^{a(a-1)(ku)^2/2}.
    rate = np.where(unsampled, 0.5, q)
    log_all = _log_binomial(k, k, rate)
    excess = np.full(out.shape, -np.inf)
    gap = np.zeros(out.shape)
    for j in range(k):
        below = _log_binomial(k, j, rate) - log_all - exponent * (1 - (j / k) ** 2)
        gap += np.exp(np.minimum(below, 0.0))
        np.maximum(excess, below, out=excess)
    upper = orders * (exponent + log_all + gap)
    closed = (
        (excess < -math.log(1e14)) & (orders * gap <= 1e-14 * np.maximum(upper, 1.0)) & ~unsampled
    )
    out[closed] = upper[closed]
    return np.asarray(closed | (shifts == 0) | unsampled)


def _spacing(shift: FloatArray, other: FloatArray, order: FloatArray) -> FloatArray:
    """Trapezoid spacing for a relative error of exp(-_LOG_PRECISION), see [7.2] and [9.1].

    Any height where the integrand is bounded is valid; this one is nearly the best.
    """
    height = np.sqrt(2 * _LOG_PRECISION / (1 + (order - 1) * np.square(other)))
    height = np.minimum(height, math.pi / np.maximum(shift, 1e-300))
    height = np.minimum(height, 1.2 / np.maximum(other, 1e-300))
    growth = np.square(height) / 2 - (order - 1) * np.log(np.cos(height * other))
    return np.asarray(2 * math.pi * height / (_LOG_PRECISION + growth))


def _grid(
    mechanisms: Sequence[FloatArray], k: int, first: FloatArray, n_nodes: int
) -> tuple[FloatArray, ...]:
    """Log f, the log of the weight, the weight, and weight * (f - 1): (n_rows, n_nodes) each.

    They are at the trapezoid nodes from the first of each row on. mechanisms: (n_rows,) shift,
    shift of what is against it, rate, and spacing.
    """
    shift, other, q, h = (column[:, None] for column in mechanisms)
    z = (first[:, None] + np.arange(n_nodes)) * h
    log_weight = -0.5 * np.square(z) + np.log(h / math.sqrt(2 * math.pi))
    weight = np.exp(log_weight)
    log_f, rise = _density_ratio(z, shift, q, k)
    far = rise > 1.0  # f may overflow where its product with the weight does not
    if other.any():  # f is the ratio to a law that is no N(0, 1), which is the weight then
        log_other, other_rise = _density_ratio(-z, other, q, 1)
        far |= other_rise > 1.0
        gain = weight * (rise - other_rise)
        log_f, log_weight = log_f - log_other, log_weight + log_other
        weight = np.exp(log_weight)
    else:
        gain = weight * rise
    gain[far] = np.exp(np.minimum(log_f[far] + log_weight[far], 700.0)) - weight[far]
    return log_f, log_weight, weight, gain


def _density_ratio(
    z: FloatArray, u: FloatArray, q: FloatArray, k: int
) -> tuple[FloatArray, FloatArray]:
    """Log f to full relative precision, and f - 1 up to e^600; z has the shape of u and q."""
    rise, largest = np.zeros(z.shape), np.zeros(z.shape)
    for j in range(1, k + 1):
        tilt = z * (j * u) - 0.5 * np.square(j * u)
        np.maximum(largest, tilt, out=largest)
        rise += np.exp(_log_binomial(k, j, q)) * np.expm1(np.minimum(tilt, 600.0))
    log_f = np.log1p(np.maximum(rise, -0.5))
    odd = (largest > 600.0) | (rise < -0.5)  # e^tilt overflows at 709, and 1 + rise cancels near -1
    if odd.any():
        at, shift, rate = (np.broadcast_to(values, z.shape)[odd] for values in (z, u, q))
        total = k * np.log1p(-rate)
        for j in range(1, k + 1):
            total = np.logaddexp(
                total, _log_binomial(k, j, rate) + at * (j * shift) - 0.5 * np.square(j * shift)
            )
        log_f[odd] = total
    return log_f, rise


def _log_moments(
    mechanisms: Sequence[FloatArray], k: int, row: IntArray, order: FloatArray
) -> FloatArray:
    """(n_cells,) log of E[f^order]: one `_grid` per row serves all its orders."""
    shift, other, _, h = mechanisms
    first = -np.ceil((_REACH + other) / h)
    end = order * (k * shift + other)[row] + _REACH
    needed = np.ceil(end / h[row]) - first[row] + 1
    # A few fixed widths, so that the bits of a sum do not depend on what else is computed.
    n_nodes = np.ceil(1.2 ** np.ceil(np.log(needed) / math.log(1.2))).astype(np.int64)
    grid = _grid(mechanisms, k, first, int(n_nodes.max(initial=1)))
    values = np.zeros(len(row))
    for width in np.unique(n_nodes).tolist():
        alike = np.flatnonzero(n_nodes == width)
        for cells in np.array_split(alike, -(-len(alike) * width // _ELEMENTS_AT_ONCE)):
            at = row[cells]
            exponent = grid[0][at, :width]
            exponent *= order[cells, None]
            exponent += grid[1][at, :width]
            peak = exponent.max(axis=1)
            exponent -= peak[:, None]
            total = peak + np.log(np.exp(exponent, out=exponent).sum(axis=1))
            small = np.flatnonzero(total < _DIRECT_ABOVE)
            if len(small):
                nodes = [column[at[small], :width] for column in grid]
                total[small] = _small_log_moments(nodes, order[cells[small], None])
            values[cells] = total
    return values


def _small_log_moments(nodes: Sequence[FloatArray], order: FloatArray) -> FloatArray:
    """log1p(E[f^a - 1 - a (f - 1)]) of cells: it needs only E[f] = 1; each term is at least 0."""
    log_f, log_weight, weight, gain = nodes
    power = order * log_f
    # f^a - 1 - a (f - 1) = f expm1((a-1) log f) - (a-1) (f-1), which keeps its precision where a
    # is close to 1.
    terms = (weight + gain) * np.expm1((order - 1) * np.minimum(log_f, 2.0 / order))
    terms -= (order - 1) * gain
    far = power > 1.0
    if far.any():
        exponent = power[far] + log_weight[far]
        scaled = np.broadcast_to(order, power.shape)[far] * gain[far]
        terms[far] = np.exp(np.minimum(exponent, 700.0)) - weight[far] - scaled
    tiny = np.abs(power) < _CANCELLING_BELOW
    y, inverse = power[tiny], np.broadcast_to(1 / order, power.shape)[tiny]
    series = np.zeros_like(y)
    for k in range(_CANCELLING_TERMS, 1, -1):  # sum over k of y^k (1 - a^(1-k)) / k!, by Horner
        series = series * y + (1 - inverse ** (k - 1)) / math.factorial(k)
    terms[tiny] = weight[tiny] * np.square(y) * series
    return np.asarray(np.log1p(terms.sum(axis=1)))


def kl_divergences(shifts: FloatArray, sample_rates: FloatArray) -> FloatArray:
    """(2, n) KL(P||Q) = E[f log f] and KL(Q||P) = -E[log f] of one step, by the same quadrature."""
    found = np.tile(np.square(shifts) / 2, (2, 1))  # without sampling
    none, spacing = np.zeros(len(shifts)), _spacing(shifts, 0 * shifts, np.ones(len(shifts)))
    first, last = -np.ceil(_REACH / spacing), np.ceil((shifts + _REACH) / spacing)
    sampled = np.flatnonzero((sample_rates < 1) & (shifts > 0))
    n_nodes = int((last - first).max(initial=0)) + 1
    for part in np.array_split(sampled, -(-len(sampled) * n_nodes // _ELEMENTS_AT_ONCE) or 1):
        some = shifts[part], none[part], sample_rates[part], spacing[part]
        log_f, _, weight, gain = _grid(some, 1, first[part], n_nodes)
        # E[f] - 1 = 0 is taken off each: its terms cancel most of the rounding.
        found[0, part] = ((weight + gain) * log_f - gain).sum(axis=1)
        found[1, part] = (gain - weight * log_f).sum(axis=1)
    return found


def epsilon_offsets(orders: FloatArray, delta: float, conversion: str) -> FloatArray:
    """(n_orders,) what a conversion adds to the RDP of each order to bound epsilon at delta.

    "mironov2017": arXiv 1702.07476v3, Proposition 3. "canonne2020": arXiv 2004.00010v3, Proposition
    12, tighter.
    """
    _checks.check_choice("conversion", conversion, ACCOUNT_WORDS["conversion"])
    if conversion == "mironov2017":
        return np.asarray(-math.log(delta) / (orders - 1))
    return np.asarray(np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1))


def true_positive_limit(rdp: FloatArray, orders: FloatArray) -> FloatArray:
    """(n_examples,) largest true-positive rate of a membership test at FALSE_POSITIVE_RATE.

    A divergence rho at order alpha leaves a test with false-positive rate k a true-positive rate of
    at most (k e^rho)^((alpha - 1) / alpha): arXiv 1702.07476v3, Proposition 10. Every order holds.
    rdp: (n_examples, n_orders); may be infinite.
    """
    log_rates = (np.log(FALSE_POSITIVE_RATE) + rdp) * (1 - 1 / orders)
    limit = np.exp(np.minimum(log_rates.min(axis=1), 0.0))
    return np.where(rdp.any(axis=1), np.maximum(limit, FALSE_POSITIVE_RATE), FALSE_POSITIVE_RATE)


def joined(parts: Sequence[Columns]) -> Columns:
    """The examples of all parts, which have the same columns."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def taken(columns: Columns, examples: IntArray) -> Columns:
    """The columns of the examples at these positions."""
    return {name: values[examples] for name, values in columns.items()}


def tightened(bounds: Columns, epsilon: FloatArray) -> Columns:
    """Rényi bounds, lowered to tight ones (n,) where those are smaller."""
    return {
        "epsilon": np.minimum(epsilon, bounds["epsilon"]),
        "epsilon_lower": bounds["epsilon_lower"],
        "rdp_epsilon": bounds["epsilon"],
        "true_positive_limit": bounds["true_positive_limit"],
    }


class RdpAccountant:
    """Turns counts over fixed cells into epsilons. Threads may share it.

    Every order gives a bound, so the choice of one can only be loose, never wrong. The bound of an
    example has one valley over the orders: it is looked for at few orders, then nearer by [7.3].

    divergences: of one count, from orders to the (n_orders, n_cells) of all cells. slow: where they
    are slow to compute, the largest order that all examples try; divergences are then from (n,)
    cells and an order each to (n,), of those that are needed.
    """

    def __init__(
        self, divergences: Callable[..., FloatArray], method: Method, *, slow: float | None = None
    ) -> None:
        """Compute the divergences that every block needs."""
        own = method.orders
        self._divergences, self._stride = divergences, _EVERY if own is None else 1
        self._orders = _ORDERS if own is None else np.unique(np.asarray(own, np.float64))
        self._offsets = epsilon_offsets(self._orders, method.delta, method.conversion)
        self._first = np.arange(0, len(self._orders), self._stride)
        self._rows: dict[int, FloatArray] = {}  # divergences of all cells, by place
        self._slow = slow is not None
        if slow is not None:
            self._first = self._first[: max(1, int((self._orders[self._first] <= slow).sum()))]
        else:
            table = divergences(self._orders[self._first])
            self._rows |= zip(self._first.tolist(), table, strict=True)
        self._kept = dict(self._rows)

    def epsilons(self, counts: Counts, gaussian: FloatArray | None = None) -> Columns:
        """Upper bounds; gaussian: (n,) squared mu of mechanisms that each met besides."""
        if isinstance(counts, csr_array) and counts.shape[1] <= MOST_DENSE:
            counts = counts.toarray()
        n, last = counts.shape[0], len(self._orders) - 1
        bound, limit, place = np.full(n, np.inf), np.ones(n), np.zeros(n, np.int64)
        costs = np.zeros(n, bool)
        todo = [(np.arange(n), self._first, self._stride)]
        while todo:
            examples, places, stride = todo.pop()
            rdp = self._totals(counts if len(examples) == n else counts[examples], places)
            if gaussian is not None:
                rdp += gaussian[examples, None] / 2 * self._orders[places]
            each, bounds = np.arange(len(examples)), rdp + self._offsets[places]
            best = np.argmin(bounds, axis=1)
            bound[examples], place[examples] = least, here = bounds[each, best], places[best]
            costs[examples] = rdp.any(axis=1)
            tried = true_positive_limit(rdp, self._orders[places])
            limit[examples] = np.minimum(limit[examples], tried)
            # Of slow cells, larger orders are tried where the first ones are too small. Others are
            # tried between the neighbours of the best one, where these can give enough [7.3]
            larger = (best == len(places) - 1) & (here < last)
            sides = np.pad(bounds, ((0, 0), (1, 1)), "edge")
            with np.errstate(invalid="ignore"):  # of infinite bounds
                below, above = sides[each, best] - least, sides[each, best + 2] - least
                gain = np.maximum(below / _RATIO**stride, above * _RATIO**stride)
            nearer = ~larger & (gain > _GAIN * least) & (stride > 1)
            for some, step in ((larger, stride), (nearer, stride // _NEARER)):
                some &= costs[examples] & (least > 0)
                for centre in np.unique(here[some]).tolist():
                    ends = max(centre - stride, 0), min(centre + stride, last) + 1
                    todo.append((examples[some & (here == centre)], np.arange(*ends, step), step))
        epsilon = np.where(costs, np.maximum(bound, 0.0), 0.0)
        boundary = (place == 0) | (place == last)
        return {
            "epsilon": epsilon,
            "epsilon_lower": np.zeros(n),
            "best_order": self._orders[place],
            "order_at_boundary": boundary & (epsilon > 0),
            "true_positive_limit": limit,
        }

    def _totals(self, counts: Counts, places: IntArray) -> FloatArray:
        """(n_examples, n_places) divergence of the run of each, at the orders of these places."""
        table = self._table(counts, places)
        if isinstance(counts, np.ndarray) and not np.array_equal(places, self._first):
            # Slower than a product, whose last bits depend on how many examples there are
            return np.asarray(np.einsum("ij,kj->ik", counts, table))
        return np.asarray(counts @ np.ascontiguousarray(table.T))

    def _table(self, counts: Counts, places: IntArray) -> FloatArray:
        """(n_places, n_cells) divergences, of slow cells those that the examples met."""
        unknown, wanted = np.full(counts.shape[1], np.nan), places.tolist()
        with _FILLING:
            if (len(self._rows) + len(wanted)) * len(unknown) > _KEPT_VALUES:
                self._rows = dict(self._kept)
            if not self._slow:
                new = [one for one in wanted if one not in self._rows]
                if new:
                    self._rows |= zip(new, self._divergences(self._orders[new]), strict=True)
                return np.stack([self._rows[one] for one in wanted])
            table = np.stack([self._rows.get(one, unknown) for one in wanted])
            row, cell = np.nonzero(np.isnan(table) & np.asarray(counts.sum(axis=0) > 0))
            table[row, cell] = self._divergences(cell, self._orders[places[row]])
            self._rows |= zip(wanted, map(np.copy, table), strict=True)
        return np.asarray(np.nan_to_num(table, posinf=np.inf))
