"""Steps as pairs of laws on the line, with the example and without it. Sensitive.

Where an example is added to a Poisson sample, `Pairs` holds those of a run; laws.py has the losses
of single steps, tight.py composes them. Where examples are replaced, batches are truncated or have
a fixed size, a step is another pair: which ones are the worst is proven in
docs/explanation/proofs.md, whose lines the numbers in brackets are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

import numpy as np
from scipy import stats
from scipy.sparse import csr_array
from scipy.special import erf, rel_entr

from indpriv._types import FloatArray, IntArray
from indpriv.accountant import tight
from indpriv.accountant.laws import Cells, Mixture, U, cells_of, tail_of
from indpriv.accountant.method import Method, most_rows
from indpriv.accountant.rdp import divergences_of_pairs
from indpriv.accountant.steps import Law, StepKinds, clipped_steps, condensed, neighbours, on_grid
from indpriv.norm_log.norm_log import NormLog

_SLACK = 1e-9  # relative; of divergences and probabilities, far above the error of sums and logs
_MOST_SETTINGS = 200  # whose loss distributions are composed
_LEAST_LOG = -690.0  # of a probability that floats can hold
_WIDEST = 250.0  # order * (a + b) beyond which the bound without sampling is used
_MOST_OWN = 256  # pairs; more are between nodes
# Ratios of neighbouring nodes above these shares of the largest one
_SHIFT_STEPS = ((0.1, 1.02), (0.005, 1.05), (0.0, 1.3))
_RATE_STEPS = ((0.0, 1.06),)
_LARGEST_SHIFT = 1e150  # far beyond what leaves a finite epsilon
_SMALLEST_SHIFT = 1e-12  # smaller ones, whose squares may be 0 for a float, count as this one


@dataclass(frozen=True)
class Pairs:
    """One-step pairs of laws of a run, both ways, and how often they are met.

    Poisson sampling, where an example is added or removed. Without sampling, a step is Gaussian.
    """

    kinds: StepKinds  # of steps, and cells that are counted
    delta: float  # of the run
    most_steps: float  # of one example

    def _losses(self, below: bool) -> tuple[tight.Losses, tight.Losses]:
        """With the example and without it, and the other way round."""
        shift, rate = self.kinds.shift, self.kinds.rate
        of_kind, gaussian = self.kinds.steps, rate >= 1
        laws = np.flatnonzero(~gaussian & (shift > 0))
        shifts, rates, blend = _nodes(np.maximum(shift[laws], _SMALLEST_SHIFT), rate[laws])
        if below:  # all of each law at the least revealing of its nodes
            first, n = blend.indptr[:-1], len(laws)
            parts = np.ones(n), blend.indices[first], np.arange(n + 1)
            blend = csr_array(parts, shape=blend.shape)
        squares = of_kind @ np.where(gaussian, np.square(np.minimum(shift, _LARGEST_SHIFT)), 0.0)
        with_it, tail = Mixture.sampled(shifts, rates), tail_of(self.delta, self.most_steps)
        without = Mixture.centred(len(shifts))
        removed, added = (
            tight.Losses(
                cells_of(*way, tail, below=below), blend, squares, csr_array(of_kind[:, laws])
            )
            for way in ((with_it, without), (without, with_it.mirrored()))
        )
        return removed, added

    @cached_property
    def above(self) -> tuple[tight.Losses, tight.Losses]:
        """Losses that are never below the truth, of removing an example and of adding it."""
        return self._losses(below=False)

    @cached_property
    def below(self) -> tuple[tight.Losses, tight.Losses]:
        """Losses that are never above the truth."""
        return self._losses(below=True)

    def epsilons(self, met: tight.Met) -> FloatArray:
        """(n,) epsilon, the larger way; may be inf, and 0 if hardly ever drawn [5.2]."""
        drawn = np.where(self.kinds.shift > 0, self.kinds.rate, 0.0)
        drawn = met.counts @ (self.kinds.steps @ drawn)
        ever = (drawn * (1 + 1e-9) > self.delta) | (met.gaussian > 0)
        found = np.zeros(len(met))
        found[ever] = larger_epsilons(self.above, met.take(ever), self.delta)
        return found

    def lower_epsilons(self, met: tight.Met, upper: FloatArray) -> FloatArray:
        """(n,) epsilon from below; upper: (n,) the same from above."""
        ways = (tight.lower_epsilons(way, met, self.delta, upper) for way in self.below)
        return np.maximum(*ways)

    def deltas(self, met: tight.Met, epsilon: FloatArray) -> FloatArray:
        """(n,) delta at an epsilon each, the larger of both ways."""
        return np.maximum(*(tight.deltas(way, met, epsilon) for way in self.above))

    def true_positive_rates(self, met: tight.Met, false_positive_rate: float) -> FloatArray:
        """(n,) the most that any test for the example finds at this false-positive rate."""
        return tight.true_positive_rates(self.above[0], met, false_positive_rate)


def _nodes(shift: FloatArray, rate: FloatArray) -> tuple[FloatArray, FloatArray, csr_array]:
    """Few pairs (shift, rate), and the (n, n_pairs) probabilities of each for the pairs (n,) [1.9].

    They are the pairs themselves where these are few. Otherwise a step is at most as revealing as
    one with a neighbouring shift and rate at random: divergences are convex in the total variation
    of the shift, and in the rate.
    """
    n = len(shift)
    if n <= _MOST_OWN:
        return shift, rate, csr_array(np.eye(n))
    axes, parts = [], []
    for values, steps, curve in (
        (shift, _SHIFT_STEPS, lambda s: erf(s / np.sqrt(8))),
        (rate, _RATE_STEPS, np.positive),
    ):
        nodes = [float(values.max())]
        while nodes[-1] > values.min():
            ratio = next(step for share, step in steps if nodes[-1] > share * nodes[0])
            nodes.append(nodes[-1] / ratio)
        distinct = np.unique(values)
        axis = distinct if len(distinct) <= len(nodes) else np.array(nodes[::-1])
        axes.append(axis)
        below, above, up = neighbours(axis, values, curve)
        low, high = curve(axis[below]), curve(axis[above])
        # Differences cancel where the curve is all but level: at shifts of about 10 and more
        up += np.divide(16 * U * high, high - low, out=np.zeros(n), where=high > low)
        # Below a node, some of it stays at the one below, where lower ends come from
        most = np.where(values < axis[above], 1 - 2.0**-53, 1.0)
        up = np.where(values > axis[below], np.minimum(up * (1 + 1e-12) + 1e-12, most), 0.0)
        parts.append((below, above, up))
    blend = on_grid(parts[0], parts[1], len(axes[0]), len(axes[1]))
    blend.sum_duplicates()
    blend.eliminate_zeros()
    used = np.unique(blend.indices)
    first, second = np.divmod(used, len(axes[1]))
    return axes[0][first], axes[1][second], csr_array(blend[:, used])


def clipped_in_every_step(log: NormLog, delta: float, *, down: bool) -> tuple[Pairs, tight.Met]:
    """The steps of one example that is clipped in each; very many kinds are snapped up, or down."""
    kinds, counts = condensed(*clipped_steps(log), down=down)
    return Pairs(kinds, delta, float(log.total_steps)), tight.Met.of(counts[None])


def larger_epsilons(ways: Sequence[tight.Losses], met: tight.Met, delta: float) -> FloatArray:
    """(n,) epsilon at delta, the larger of both ways; may be inf."""
    removed, added = ways
    found = tight.epsilons(removed, met, delta)
    finite = np.flatnonzero(np.isfinite(found))
    found[finite] = tight.epsilons(added, met.take(finite), delta, found[finite])
    return found


def pair_epsilon(
    ways: tuple[Cells, Cells], steps: FloatArray, delta: float, squared_mu: float = 0.0
) -> float:
    """Epsilon of one example that met n laws, given both ways, in `steps` (n,) steps."""
    met = tight.Met.of(csr_array(steps[None]), np.array([squared_mu]))
    none, each = np.zeros(len(steps)), csr_array(np.eye(len(steps)))
    both = [tight.Losses(cells, each, none, each) for cells in ways]
    return float(larger_epsilons(both, met, delta)[0])


# --- replaced examples, truncated batches, batches of a fixed size


def uses_pairs(log: NormLog, method: Method) -> bool:
    """Whether a step is another pair of laws than that of adding an example to a Poisson sample."""
    return method.relation_of(log.neighbouring) == "replace_one" or log.truncation is not None


def replaced_divergences(
    own: FloatArray, other: FloatArray, sample_rate: FloatArray, order: FloatArray
) -> FloatArray:
    """(n,) Rényi divergences of one step each, of P from Q [9.1]; never too small.

    own, other: (n,) a and b, contributions over the noise of the example and of its replacement,
    which points the other way. Swap them for Q from P.
    """
    # By quasi-convexity, revealing whether the example was sampled can only raise the divergence.
    length = own + other
    found = order * np.square(length) / 2
    summed = (sample_rate < 1) & (length > 0) & (order * length <= _WIDEST)
    # Orders of an octave share a grid, which depends on no order, and so does the result.
    octave = np.ceil(np.log2(order))
    each = np.stack([own, other, sample_rate, octave])[:, summed]
    (first, second, rate, _), row = np.unique(each, axis=1, return_inverse=True)
    values = divergences_of_pairs(first, rate, row.ravel(), order[summed], against=second)
    found[summed] = np.minimum(found[summed], values * (1 + _SLACK))
    return found


def fixed_size_divergences(kinds: StepKinds, which: IntArray, order: FloatArray) -> FloatArray:
    """(n,) bounds of one step of kinds[which[i]] at order[i], both ways [9.3].

    kinds: with the shift 2 * max_grad_norm / noise, and the share of the examples in a batch.
    """
    moment = kinds.divergences_at(which, order) * (order - 1)
    twice = (moment + np.log1p(-np.expm1(-moment))) * (1 + _SLACK) / (order - 1)
    return np.minimum(twice, order * np.square(kinds.shift[which]) / 2)


@dataclass(frozen=True)
class Case:
    """What may happen in a step of each of n mechanisms; arrays have shape (n,)."""

    log_probability: FloatArray  # of the case
    sample_rate: FloatArray  # probability that the example is then in the batch
    displaces: bool  # whether it then takes the place of another example


def cases_of(log: NormLog, sample_rate: FloatArray) -> list[Case]:
    """The cases of a step [9.2]; their log moments less 1 are to be added up.

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
    """Epsilon of an example at max_grad_norm in every step, by losses of these pairs [9.4].

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

    removed, added = (
        Cells.joined([law(k, swapped) for k in range(len(counts))]) for swapped in (False, True)
    )
    return min(pair_epsilon((removed, added), counts, method.delta), limit)


def rare_truncations(log: NormLog) -> float:
    """Probability that in some step so many others are drawn that a unit might meet the cap.

    Until then the run is one of Poisson sampling, so a delta that is smaller by this much accounts
    for the run as if nothing were ever truncated.
    """
    if log.truncation is None:
        return 0.0
    cap, n, rows = log.truncation.max_batch_size, log.truncation.n_examples, most_rows(log) or 1
    kinds, steps = clipped_steps(log)
    each = stats.binom.sf(cap - rows, n, kinds.rate) if cap < n else 0.0
    return float((steps * each).sum() * (1 + _SLACK))


def pair_divergences(
    cases: Sequence[Case],
    own: FloatArray,
    other: FloatArray | None,
    one: FloatArray,
    which: IntArray,
    order: FloatArray,
) -> FloatArray:
    """(n,) bounds of the Rényi divergence of one step of mechanism which[i] at order[i].

    Contributions of mechanisms over the noise: own; other, of what takes the example's place (swap
    them for the other direction); one, of a gradient at max_grad_norm. If nothing takes its place
    (None), removing costs at least as much as adding (Mironov, Talwar and Zhang 2019, Theorem 5).
    """

    def log_excess(case: Case) -> FloatArray:
        """Log of probability * (exp((order - 1) * divergence) - 1)."""
        further = case.displaces * one
        first, second = own + further, 0 * one if other is None else other + further
        if first.any() and second.any():
            ends = first[which], second[which], case.sample_rate[which]
            values = replaced_divergences(*ends, order)
        else:
            values = StepKinds(first + second, case.sample_rate).divergences_at(which, order)
        moments = values * (order - 1)
        with np.errstate(divide="ignore"):
            return np.asarray(case.log_probability[which] + moments + np.log(-np.expm1(-moments)))

    excess = reduce(np.logaddexp, map(log_excess, cases))
    return np.asarray(np.logaddexp(0.0, excess) / (order - 1))


def pair_laws(log: NormLog, method: Method, kinds: StepKinds, one: FloatArray) -> list[Law]:
    """What a step of each kind (n,) costs in each neighbouring direction that may be the larger.

    kinds: with the example's own norms; one: (n,) shift of a gradient at max_grad_norm.
    """
    relation, own = method.relation_of(log.neighbouring), kinds.shift
    if log.sampler == "fixed_size":
        return [partial(fixed_size_divergences, replace(kinds, shift=2 * own))]
    law = partial(pair_divergences, cases_of(log, kinds.rate))
    if relation == "add_remove":
        return [partial(law, own, None, one)]
    other = one if relation == "replace_one" else 0 * one
    return [partial(law, own, other, one), partial(law, other, own, one)]
