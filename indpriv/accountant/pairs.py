"""Secret sampling where a step is not the Poisson pair of add/remove. Sensitive.

**Replaced examples.** The replacement is unknown, so its gradient has norm max_grad_norm = 1 and
points away from the example's own. Given which other examples are sampled, a step of an example
with clipped gradient g that another with gradient h replaces has the laws P = (1 - q) N(0, 1) + q
N(g, 1) and Q = (1 - q) N(0, 1) + q N(h, 1), in units of the noise, with |g| <= a and |h| <= b. Of
all these pairs the one in one dimension with g = a and h = -b is the worst, for every f-divergence:
with x = exp(<z, g> - g^2 / 2) and y likewise for h, it is E F(x, y) for z ~ N(0, 1) and F(x, y) = r
f(p / r), p = 1 - q + q x, r = 1 - q + q y, a convex function, homogeneous in (p, r), so that F_12
<= 0 <= F_11, F_22. By the heat equation its derivative in <g, h> is E[x y F_12] <= 0: opposite
directions are the worst. Along them its derivative in a is E[a x^2 F_11 - b x y F_12] >= 0, and
likewise in b. These laws compose over steps (Zhu, Dong and Wang 2022, arXiv:2106.08567v4, Theorem
10).

**Truncated batches** (Ganesh 2025, arXiv:2508.15089). A step draws each of n examples with
probability q, and if these are more than B it keeps a random B of them. Let K be the number of the
others that were drawn, on which an example has no influence. If K < B, no one is left out, and the
step is one of Poisson sampling. If K >= B, the batch without the example is a random set of B
others: a random set S of B - 1 of them, and one more, y. The example is in the batch with
probability q' = q E[B / (K + 1) | K >= B], and then takes the place of y beside a random S, since
a random set of random others is a random set of others. So for g = x - y, whose length is at most
|x| + 1, the laws are mixtures over S and y of (1 - q') N(0) + q' N(g) and N(0) if x is removed; of
N(-y) or of N(x' - y) in place of this N(0) with probability q' if x is zeroed or replaced. By joint
convexity mixtures cost at most the most expensive pair, and exp((order - 1) * divergence) is at
most the mean over both cases, as if K >= B were revealed.

**Fixed-size batches** without replacement are the second case alone, with q' = m / n, where one of
n examples is replaced. With u = 2 / noise_multiplier, Wang, Balle and Kasiviswanathan 2019
(arXiv:1808.00087v2, Theorem 27) bound whole orders: exp((order - 1) * divergence) <= 1 + sum over j
= 2..order of C(order, j) q^j t_j, where t_j = min(4 sqrt(B(2 floor(j / 2)) B(2 ceil(j / 2))), 2
exp(j (j - 1) u^2 / 2)) and B(j) = E[(exp(z u - u^2 / 2) - 1)^j], z ~ N(0, 1). Orders in between lie
below the chord of (order - 1) * divergence, which is convex (their Corollary 10). This bound does
not depend on the norm of an example: each one has the worst case.

**Loss distributions** of the second case, if x is zeroed or replaced, need no pair. The laws (1 -
q') N(0) + q' N(g) and (1 - q') N(0) + q' N(h) have |g|, |h|, |g - h| <= 2, so for c >= 1 their
hockey-stick divergence is at most q' times the largest one of N(g) from N(0) or N(h), at 1 + (c -
1) / q' (Balle, Barthe and Gaboardi 2018, arXiv:1807.01647v2, Theorem 2). That is the divergence of
(1 - q') N(0) + q' N(2) from N(0). It holds in both directions, and `Cells.symmetric` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np
from scipy import stats
from scipy.special import gammaln, logsumexp, rel_entr

from indpriv._arrays import FloatArray
from indpriv._files import ROW_GROUP_SIZE
from indpriv.accountant.blocks import BlockAccount, Epsilons, tables_of_epsilons
from indpriv.accountant.claims import claim_of_worst_case
from indpriv.accountant.laws import Cells, Mixture, cells_of, tail_of
from indpriv.accountant.loss_pairs import pair_epsilon
from indpriv.accountant.method import Method, account_of, owners_of, warn_of_delta
from indpriv.accountant.rdp import Counts, RdpAccountant, renyi_divergences
from indpriv.accountant.steps import StepKinds, Steps, clipped_steps, condensed
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

_SLACK = 1e-9  # relative; of divergences and probabilities, far above the error of sums and logs
_MOST_SETTINGS = 200  # whose loss distributions are composed
_LEAST_LOG = -690.0  # of a probability that floats can hold
_REACH = 10.0  # standard deviations beyond the outer peaks of an integrand
_LOG_PRECISION = 45.0  # a trapezoid sum is wrong by less than exp(-45) of itself
_WIDEST = 250.0  # order * (a + b) beyond which the bound without sampling is used
_LARGEST = 256  # powers j whose B(j) is computed, as in dp_accounting
_EXPONENT = 30.0  # of j u^2, above which the other term of t_j is the smaller one


def uses_pairs(log: NormLog, method: Method) -> bool:
    """Whether a step is another pair of laws than that of adding an example to a Poisson sample."""
    return method.relation_of(log.neighbouring) == "replace_one" or log.truncation is not None


def replaced_divergences(
    own: FloatArray, other: FloatArray, sample_rate: FloatArray, orders: FloatArray
) -> FloatArray:
    """Rényi divergences of one step, of P from Q; never too small. Swap a and b for Q from P.

    Args:
        own: (n,) a, the example's contribution over the noise.
        other: (n,) b, that of its replacement, which points the other way.
        sample_rate: (n,) in (0, 1].
        orders: (n_orders,) above 1.

    Returns:
        (n_orders, n) nats.
    """
    # By quasi-convexity, revealing whether the example was sampled can only raise the divergence.
    found = orders[:, None] * np.square(own + other) / 2
    for row in np.flatnonzero((sample_rate < 1) & (own + other > 0)):
        a, b, q = float(own[row]), float(other[row]), float(sample_rate[row])
        # Orders of an octave share a grid, which depends on no order, and so does the result.
        octaves = np.where(orders * (a + b) <= _WIDEST, np.ceil(np.log2(orders)), np.nan)
        for octave in np.unique(octaves[~np.isnan(octaves)]).tolist():
            chosen = np.flatnonzero(octaves == octave)
            moments = _log_moments(a, b, q, orders[chosen], 2.0**octave)
            values = moments * (1 + _SLACK) / (orders[chosen] - 1)
            found[chosen, row] = np.minimum(found[chosen, row], values)
    return found


def _log_moments(a: float, b: float, q: float, orders: FloatArray, most: float) -> FloatArray:
    """(n_orders,) log E_z [p^order r^(1 - order)] by a trapezoid sum over z ~ N(0, 1).

    most: an order that is at least as large as these.
    """
    end, spacing = most * (a + b) + _REACH, _spacing(a, b, most)
    z = np.arange(-_REACH - b, end + spacing, spacing)
    log_weight = -np.square(z) / 2 + np.log(spacing / np.sqrt(2 * np.pi))
    log_p, rise = _log_ratio(z * a - a * a / 2, q)
    log_r, other_rise = _log_ratio(-z * b - b * b / 2, q)
    order = orders[:, None]
    exponent = order * log_p + (1 - order) * log_r
    peak = (exponent + log_weight).max(axis=1, keepdims=True)
    result = np.log(np.exp(exponent + log_weight - peak).sum(axis=1)) + peak[:, 0]
    small = np.flatnonzero((result < 1e-2) & (exponent.max(axis=1) < 600))
    if len(small):
        # Less its tangent at (1, 1), whose mean is 0, so that a small moment keeps its precision.
        tangent = order[small] * rise + (1 - order[small]) * other_rise
        excess = np.expm1(exponent[small]) - tangent
        rounding = 1e-16 * np.abs(tangent)
        result[small] = np.log1p((np.exp(log_weight) * (excess + rounding)).sum(axis=1))
    return np.asarray(np.maximum(result, 0.0))


def _spacing(a: float, b: float, order: float) -> float:
    """Trapezoid spacing for a relative error of exp(-_LOG_PRECISION).

    Where |Im z| <= y, y a <= pi and y b < pi / 2, p has no zero, |p| is at most its value at Re z,
    and |r| at least its value there times cos(y b). So the modulus of the integrand is at most
    exp(y^2 / 2) cos(y b)^(1 - order) times its value at Re z, and a spacing h errs by at most twice
    that times exp(-2 pi y / h) of the result. Any such y is valid; this one is nearly the best.
    """
    y = np.sqrt(2 * _LOG_PRECISION / (1 + (order - 1) * b * b))
    y = min(y, np.pi / max(a, 1e-300), 1.2 / max(b, 1e-300))
    growth = y * y / 2 - (order - 1) * np.log(np.cos(y * b))
    return float(2 * np.pi * y / (_LOG_PRECISION + np.log(2) + growth))


def _log_ratio(tilt: FloatArray, q: float) -> tuple[FloatArray, FloatArray]:
    """log(1 - q + q exp(tilt)), and what is inside less 1, up to e^600."""
    rise = q * np.expm1(np.minimum(tilt, 600.0))
    near = np.abs(rise) < 0.5
    far = np.logaddexp(np.log1p(-q), np.log(q) + tilt)
    return np.where(near, np.log1p(np.where(near, rise, 0.0)), far), rise


def fixed_size_divergences(
    shift: FloatArray, sample_rate: FloatArray, orders: FloatArray
) -> FloatArray:
    """(n_orders, n) bounds of the Rényi divergence of one step, in both neighbouring directions.

    shift: (n,) u, twice the clipping norm over the noise; sample_rate: (n,) q in (0, 1]; orders:
    above 1.
    """
    found = orders[:, None] * np.square(shift) / 2
    low = np.floor(orders).astype(np.int64)
    whole = np.unique(np.append(low, low + 1))
    share, at = orders - low, np.searchsorted(whole, low)
    for row in np.flatnonzero(sample_rate < 1):
        log_terms, q = _log_terms(float(shift[row]), int(whole[-1])), float(sample_rate[row])
        log_moments = np.array([_log_moment(log_terms, q, order) for order in whole.tolist()])
        chord = (1 - share) * log_moments[at] + share * log_moments[at + 1]
        found[:, row] = chord * (1 + _SLACK) / (orders - 1)
    return np.asarray(found)


def _log_terms(shift: float, largest: int) -> FloatArray:
    """(largest - 1,) log t_j of j = 2, 3, ..."""
    j = np.arange(2, max(largest, 2) + 1)
    terms = np.log(2) + j * (j - 1) * (shift**2 / 2)
    near = j[(j <= _LARGEST) & (j * shift**2 <= _EXPONENT)]
    if len(near):
        below, above = near - near % 2, near + near % 2
        log_b = _log_even_moments(shift, int(above.max()))
        mean = (log_b[below // 2] + log_b[above // 2]) / 2
        terms[: len(near)] = np.minimum(terms[: len(near)], np.log(4) + mean)
    return np.asarray(terms)


def _log_even_moments(shift: float, largest: int) -> FloatArray:
    """Log of E[(exp(z u - u^2 / 2) - 1)^j] of j = 0, 2, ..., largest, by the trapezoid rule."""
    spacing = 0.05 / max(1.0, shift)
    z = np.arange(-30.0, largest * shift + 30.0, spacing)
    with np.errstate(divide="ignore"):
        log_loss = np.log(np.abs(np.expm1(shift * z - shift**2 / 2)))
    power = np.arange(0, largest + 1, 2)[:, None]
    log_weight = np.log(spacing / np.sqrt(2 * np.pi)) - np.square(z) / 2
    exponent = np.where(power > 0, power * np.maximum(log_loss, -1e3), 0.0) + log_weight
    return np.asarray(logsumexp(exponent, axis=1))


def _log_moment(log_terms: FloatArray, q: float, order: int) -> float:
    if order < 2:
        return 0.0
    j = np.arange(2, order + 1)
    log_choose = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    sums = logsumexp(log_choose + j * np.log(q) + log_terms[: order - 1])
    return float(np.logaddexp(0.0, sums))


@dataclass(frozen=True)
class Case:
    """What may happen in a step of each of n mechanisms; arrays have shape (n,).

    Attributes:
        log_probability: of the case.
        sample_rate: probability that the example is then in the batch.
        displaces: whether it then takes the place of another example.
    """

    log_probability: FloatArray
    sample_rate: FloatArray
    displaces: bool


def cases_of(log: NormLog, sample_rate: FloatArray) -> list[Case]:
    """The cases of a step; their log moments less 1 are to be added up.

    sample_rate: (n,) of mechanisms: those of the log's steps, or what these were rounded up to. The
    cases of the latter have probabilities that are too large.
    """
    always = np.zeros(len(sample_rate))
    if log.sampler == "fixed_size":
        return [Case(always, sample_rate, True)]
    truncation = log.truncation
    if truncation is None or truncation.n_examples <= truncation.max_batch_size:
        return [Case(always, sample_rate, False)]
    cap, n = truncation.max_batch_size, truncation.n_examples
    # K has the law Binomial(n - 1, q).
    exact = np.isin(sample_rate, log.settings.sample_rate)
    log_cdf = np.maximum(stats.binom.logcdf(cap - 1, n - 1, sample_rate), -1e300)
    whole = np.where(exact, log_cdf, 0.0)
    log_cut = stats.binom.logsf(cap - 1, n - 1, sample_rate)
    likely = exact & (log_cut > _LEAST_LOG)
    share = cap / (n - 1)  # Chernoff's bound, where the tail is too small for floats
    entropy = rel_entr(share, sample_rate) + rel_entr(1 - share, 1 - sample_rate)
    log_cut = np.where(log_cut > _LEAST_LOG, log_cut, (1 - n) * entropy)
    rate = sample_rate * (cap / (cap + 1))
    mean = stats.binom.sf(cap, n, sample_rate[likely]) * cap / n
    rate[likely] = np.minimum(rate[likely], mean / np.exp(log_cut[likely]) * (1 + _SLACK))
    return [
        Case(np.minimum(whole + _SLACK, 0.0), sample_rate, False),
        Case(np.minimum(log_cut + _SLACK, 0.0), rate, True),
    ]


def tight_worst_case(log: NormLog, method: Method, limit: float) -> float:
    """Epsilon of an example at max_grad_norm in every step, by loss distributions of these pairs.

    limit: another upper bound, which is never exceeded; also that of very many settings.
    """
    kinds, counts = clipped_steps(log)
    if len(counts) > _MOST_SETTINGS:
        return limit
    one, tail = kinds.shift, tail_of(method.delta, float(counts.sum()))
    relation = method.relation_of(log.neighbouring)
    cases = cases_of(log, kinds.rate)

    def law(index: int, swapped: bool) -> Cells:
        weights, laws = [], []
        for case in cases:
            weight = float(np.exp(case.log_probability[index]))
            if weight == 0:
                continue
            both_ways = case.displaces and relation != "add_remove"
            lengths = 1.0 + case.displaces, float(relation == "replace_one" and not both_ways)
            own, other = lengths[::-1] if swapped and not both_ways else lengths
            shift, rate = one[index : index + 1], case.sample_rate[index : index + 1]
            replaced = Mixture.sampled(other * shift, rate).mirrored()
            found = cells_of(Mixture.sampled(own * shift, rate), replaced, tail)
            weights.append(weight)
            laws.append(found.symmetric() if both_ways and rate[0] < 1 else found)
        return Cells.mixed(weights, laws)

    removed, added = ([law(k, swapped) for k in range(len(counts))] for swapped in (False, True))
    return min(pair_epsilon(removed, added, counts, method.delta), limit)


def rare_truncations(log: NormLog) -> float:
    """Probability that in some step so many others are drawn that a unit might meet the cap.

    Until then the run is one of Poisson sampling. The coins of the others alone decide, so a delta
    that is smaller by this much accounts for the run as if nothing were ever truncated.
    """
    if log.truncation is None:
        return 0.0
    rows = 1
    if log.unit != "example" and log.unit_ids is not None:
        rows = int(np.unique(log.unit_ids, return_counts=True)[1].max())
    cap, n = log.truncation.max_batch_size, log.truncation.n_examples
    kinds, steps = clipped_steps(log)
    each = stats.binom.sf(cap - rows, n, kinds.rate) if cap < n else 0.0
    return float((steps * each).sum() * (1 + _SLACK))


def pair_divergences(
    cases: list[Case],
    own: FloatArray,
    other: FloatArray | None,
    one: FloatArray,
    orders: FloatArray,
) -> FloatArray:
    """(n_orders, n) bounds of the Rényi divergence of one step of n mechanisms.

    It is that of the law with the example from the law with what takes its place; swap `own` and
    `other` for the other direction. Where nothing takes the example's place, removing it costs at
    least as much as adding it (Mironov, Talwar and Zhang 2019, Theorem 5).

    Args:
        cases: of each mechanism.
        own: (n,) contribution over the noise.
        other: (n,) that of what takes the example's place, which may be 0; None if nothing does.
        one: (n,) that of a gradient at max_grad_norm.
        orders: (n_orders,) above 1.
    """

    def log_excess(case: Case) -> FloatArray:
        """Log of probability * (exp((order - 1) * divergence) - 1)."""
        further = case.displaces * one
        against = 0 * one if other is None else other + further
        ends = np.stack([own + further, against, case.sample_rate], axis=1)
        distinct, inverse = np.unique(ends, axis=0, return_inverse=True)
        first, second, rates = distinct.T
        if first.any() and second.any():
            values = replaced_divergences(first, second, rates, orders)
        else:
            values = renyi_divergences(first + second, rates, orders).T
        moments = values[:, inverse.ravel()] * (orders - 1)[:, None]
        with np.errstate(divide="ignore"):
            return np.asarray(case.log_probability + moments + np.log(-np.expm1(-moments)))

    excess = reduce(np.logaddexp, map(log_excess, cases))
    return np.asarray(np.logaddexp(0.0, excess) / (orders - 1)[:, None])


@dataclass(frozen=True)
class _Law:
    """Divergences of kinds of steps; of the cells of steps, where these are given. See Divergences.

    of_kinds: (n_orders,) orders to (n_orders, n_kinds) divergences of one step.
    """

    of_kinds: Callable[[FloatArray], FloatArray]
    steps: Steps | None = None

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Divergences."""
        found = self.of_kinds(orders)
        return found if self.steps is None else self.steps.per_count(found)


@dataclass(frozen=True)
class PairsEngine:
    """See Engine. Norms and settings between nodes are rounded up.

    Attributes:
        steps: how norms are counted.
        accountants: of each neighbouring direction that may be the larger one.
        alike: of a replacement with the example's own norms, which is no bound; None unless
            examples are replaced.
        worst_case: of the run.
        tight: whether that is by loss distributions.
    """

    steps: Steps
    accountants: Sequence[RdpAccountant]
    alike: RdpAccountant | None
    worst_case: Epsilons
    tight: bool

    @classmethod
    def prepare(cls, log: NormLog, method: Method) -> PairsEngine:
        """See Engine."""
        steps = Steps.of(log, method.between_records)
        relation = method.relation_of(log.neighbouring)

        def accountants(kinds: StepKinds, steps: Steps | None) -> list[RdpAccountant]:
            cases, own = cases_of(log, kinds.rate), kinds.shift
            one = own if steps is None else steps.clipped
            pairs: list[tuple[FloatArray, FloatArray | None]] = [(own, None)]
            if relation != "add_remove":
                other = one if relation == "replace_one" else 0 * one
                pairs = [(own, other), (other, own)]
            if relation == "replace_one" and steps is not None:
                pairs.append((own, own))
            laws = [partial(pair_divergences, cases, *pair, one) for pair in pairs]
            return [RdpAccountant(_Law(law, steps), method) for law in laws]

        of_each = accountants(steps.laws, steps)
        alike = of_each.pop() if relation == "replace_one" else None
        clipped, counts = condensed(*clipped_steps(log))
        worst = _worst_case(log, method, accountants(clipped, None), counts)
        return cls(steps, of_each, alike, worst, method.accountant == "pld")

    @property
    def bytes_per_example(self) -> int:
        """See Engine."""
        return self.steps.bytes_per_example + 8192

    def block(self, block: NormLog) -> Epsilons:
        """See Engine."""
        counts = self.steps.counts(block)
        found = _largest(self.accountants, counts)
        epsilon = np.minimum(found.epsilon, self.worst_case.epsilon)
        found = found.tightened(epsilon) if self.tight else replace(found, epsilon=epsilon)
        if self.alike is None:
            return found
        alike = np.minimum(self.alike.epsilons(counts).epsilon, epsilon)
        return replace(found, details={**found.details, "epsilon_if_replaced_alike": alike})


def fixed_size_blocks(log: NormLog, method: Method) -> BlockAccount[Epsilons]:
    """The account of a log of fixed-size batches under replace-one, whose norms are not read.

    InputError if units have several rows.
    """
    people = owners_of(log)
    if people is not None and len(np.unique(people)) < log.n_examples:
        raise InputError(
            f"fixed-size batches: there is no account of several rows of one {log.unit} with "
            'secret participation; pass participation="known"'
        )
    warn_of_delta(log, method)
    kinds, counts = condensed(*clipped_steps(log))
    law = _Law(partial(fixed_size_divergences, 2 * kinds.shift, kinds.rate))
    worst = _worst_case(log, method, [RdpAccountant(law, method)], counts)
    nothing = replace(
        log, recorded_steps=log.recorded_steps[:0], rows=log.rows[:0], batch_norms=None
    )
    epsilon, claim = float(worst.epsilon[0]), claim_of_worst_case(log)
    table = tables_of_epsilons(epsilon, claim, account_of(log, method))
    work = partial(_same_for_all, worst)
    return BlockAccount(nothing, log.example_ids, work, table, ROW_GROUP_SIZE)


def _same_for_all(one: Epsilons, block: NormLog) -> Epsilons:
    """Every example of a block has the bounds of one."""
    return one.take(np.zeros(block.n_examples, np.int64))


def _worst_case(
    log: NormLog, method: Method, accountants: Sequence[RdpAccountant], counts: FloatArray
) -> Epsilons:
    """Bounds of one example at max_grad_norm in every step; counts: steps of each kind."""
    worst = _largest(accountants, Counts(counts[None]))
    if not np.isfinite(worst.epsilon).all():
        raise InputError("this noise_multiplier leaves no finite epsilon; check the optimizer")
    if method.accountant != "pld":
        return worst
    epsilon = tight_worst_case(log, method, float(worst.epsilon[0]))
    return replace(worst, epsilon=np.array([epsilon]))


def _largest(accountants: Sequence[RdpAccountant], counts: Counts) -> Epsilons:
    """The largest epsilon of all directions."""
    found = [accountant.epsilons(counts) for accountant in accountants]
    epsilons = np.stack([one.epsilon for one in found])
    which, columns = epsilons.argmax(axis=0), np.arange(epsilons.shape[1])
    details = {
        name: np.stack([getattr(one, name) for one in found])[which, columns]
        for name in ("best_order", "order_at_boundary")
    }
    details["true_positive_limit"] = np.max([one.true_positive_limit for one in found], axis=0)
    return Epsilons(epsilons.max(axis=0), np.zeros(len(columns)), details)
