"""Secret sampling where a step is not the Poisson pair of add/remove. Sensitive.

**Replaced examples.** The replacement is unknown, so its gradient has norm max_grad_norm = 1 and
points away from the example's own (see `replace_one`).

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

**Fixed-size batches** without replacement are the second case alone, with q' = m / n.

**Loss distributions** of the second case, if x is zeroed or replaced, need no pair. The laws (1 -
q') N(0) + q' N(g) and (1 - q') N(0) + q' N(h) have |g|, |h|, |g - h| <= 2, so for c >= 1 their
hockey-stick divergence is at most q' times the largest one of N(g) from N(0) or N(h), at 1 + (c -
1) / q' (Balle, Barthe and Gaboardi 2018, arXiv:1807.01647v2, Theorem 2). That is the divergence of
(1 - q') N(0) + q' N(2) from N(0). It holds in both directions, and `Cells.symmetric` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats
from scipy.special import rel_entr

from indpriv._arrays import FloatArray
from indpriv.accountant.blocks import Epsilons
from indpriv.accountant.laws import Cells, Mixture, cells_of, tail_of
from indpriv.accountant.loss_pairs import pair_epsilon
from indpriv.accountant.rdp import RdpAccountant, renyi_divergences
from indpriv.accountant.relations.replace_one import replaced_divergences
from indpriv.accountant.steps import Counts, StepKinds, Steps, clipped_steps, condensed
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

if TYPE_CHECKING:
    from indpriv.accountant.method import Method

_SLACK = 1e-9  # relative; of probabilities of truncation
_MOST_SETTINGS = 200  # whose loss distributions are composed
_LEAST_LOG = -690.0  # of a probability that floats can hold


def uses_pairs(log: NormLog, method: Method) -> bool:
    """Whether a step is another pair of laws than that of adding an example to a Poisson sample."""
    return method.relation_of(log.neighbouring) == "replace_one" or log.truncation is not None


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


@dataclass(frozen=True)
class Pairs:
    """Divergences of cells in one neighbouring direction; see Divergences.

    Attributes:
        steps: None for kinds of steps that are counted themselves.
        cases: of each kind.
        own: (n,) contribution over the noise, and `one` that of a gradient at max_grad_norm.
        replacement: (n,) contribution over the noise of what takes the example's place, which may
            be 0; None if nothing takes part instead.
        swapped: whether the divergence is that of the replacement's law from the example's.
    """

    steps: Steps | None
    cases: list[Case]
    own: FloatArray
    one: FloatArray
    replacement: FloatArray | None
    swapped: bool = False

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Divergences."""
        values = [self._excess(case, orders) for case in self.cases]
        found = np.logaddexp(0.0, reduce(np.logaddexp, values)) / (orders - 1)[:, None]
        return found if self.steps is None else self.steps.per_count(found)

    def _excess(self, case: Case, orders: FloatArray) -> FloatArray:
        """(n_orders, n) log of probability * (exp((order - 1) * divergence) - 1).

        Where nothing takes the example's place, removing it costs at least as much as adding it
        (Mironov, Talwar and Zhang 2019, Theorem 5).
        """
        further = case.displaces * self.one
        ends = [self.own + further, case.sample_rate]
        if self.replacement is not None:
            ends.insert(1, self.replacement + further)
        distinct, inverse = np.unique(np.stack(ends, axis=1), axis=0, return_inverse=True)
        own, *other, rates = distinct.T
        if not other or not other[0].any():
            values = renyi_divergences(own, rates, orders).T
        elif self.swapped:
            values = replaced_divergences(other[0], own, rates, orders)
        else:
            values = replaced_divergences(own, other[0], rates, orders)
        moments = values[:, inverse.ravel()] * (orders - 1)[:, None]
        with np.errstate(divide="ignore"):
            return np.asarray(case.log_probability + moments + np.log(-np.expm1(-moments)))


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
    accountants: tuple[RdpAccountant, ...]
    alike: RdpAccountant | None
    worst_case: Epsilons
    tight: bool

    @classmethod
    def prepare(cls, log: NormLog, method: Method) -> PairsEngine:
        """See Engine."""
        counted = Steps.of(log, method.between_records)
        clipped, steps = condensed(*clipped_steps(log))
        relation = method.relation_of(log.neighbouring)

        def accountants(found: StepKinds, counted: Steps | None) -> list[RdpAccountant]:
            cases, own = cases_of(log, found.rate), found.shift
            one = own if counted is None else counted.clipped
            replacement = {"add_remove": None, "zero_out": 0 * one, "replace_one": one}[relation]
            pairs = [Pairs(counted, cases, own, one, replacement)]
            if replacement is not None:
                pairs.append(Pairs(counted, cases, own, one, replacement, swapped=True))
            if relation == "replace_one" and counted is not None:
                pairs.append(Pairs(counted, cases, own, one, own))
            return [RdpAccountant(pair, method) for pair in pairs]

        of_each = accountants(counted.laws, counted)
        alike = of_each.pop() if relation == "replace_one" else None
        worst = _finite(_largest(accountants(clipped, None), Counts(steps[None])))
        tight = method.accountant == "pld"
        if tight:
            epsilon = tight_worst_case(log, method, float(worst.epsilon[0]))
            worst = replace(worst, epsilon=np.array([epsilon]))
        return cls(counted, tuple(of_each), alike, worst, tight)

    @property
    def bytes_per_example(self) -> int:
        """See Engine."""
        return self.steps.bytes_per_example + 8192

    def block(self, block: NormLog) -> Epsilons:
        """See Engine."""
        counts = self.steps.counts(block)
        found = _largest(self.accountants, counts)
        epsilon, details = np.minimum(found.epsilon, self.worst_case.epsilon), found.details
        if self.tight:
            limit = details["true_positive_limit"]
            details = {"rdp_epsilon": found.epsilon, "true_positive_limit": limit}
        if self.alike is not None:
            alike = np.minimum(self.alike.epsilons(counts).epsilon, epsilon)
            details = {**details, "epsilon_if_replaced_alike": alike}
        return Epsilons(epsilon, found.epsilon_lower, details)


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


def _finite(worst: Epsilons) -> Epsilons:
    if not np.isfinite(worst.epsilon).all():
        raise InputError("this noise_multiplier leaves no finite epsilon; check the optimizer")
    return worst
