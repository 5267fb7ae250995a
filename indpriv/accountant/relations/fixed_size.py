"""Fixed-size batches drawn without replacement, where an example is replaced. Sensitive.

Each step draws a uniform set of m of n examples, so that q = m / n of them take part. One of them
is replaced: the sum of clipped gradients then moves by at most 2 max_grad_norm. With u = 2 /
noise_multiplier, Wang, Balle and Kasiviswanathan 2019 (arXiv:1808.00087v2, Theorem 27) bound whole
orders: exp((order - 1) * divergence) <= 1 + sum over j = 2..order of C(order, j) q^j t_j, where
t_j = min(4 sqrt(B(2 floor(j / 2)) B(2 ceil(j / 2))), 2 exp(j (j - 1) u^2 / 2)) and B(j) = E[(exp(z
u - u^2 / 2) - 1)^j], z ~ N(0, 1). Orders in between lie below the chord of (order - 1) *
divergence, which is convex (their Corollary 10).

The bound does not depend on the norm of an example: each one has the worst case. The accountant
"pld" composes the loss distributions of the pair that `pairs` proves instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.special import gammaln, logsumexp

from indpriv._arrays import FloatArray
from indpriv._files import ROW_GROUP_SIZE
from indpriv.accountant.blocks import BlockAccount, Epsilons, tables_of_epsilons
from indpriv.accountant.claims import claim_of_worst_case
from indpriv.accountant.method import Method, account_of, owners_of, warn_of_delta
from indpriv.accountant.rdp import RdpAccountant
from indpriv.accountant.relations.pairs import tight_worst_case
from indpriv.accountant.steps import Counts, StepKinds, clipped_steps, condensed
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

_SLACK = 1e-9  # relative; far above the error of sums and logarithms
_LARGEST = 256  # powers j whose B(j) is computed, as in dp_accounting
_EXPONENT = 30.0  # of j u^2, above which the other term of t_j is the smaller one


def fixed_size_divergences(shift: float, sample_rate: float, orders: FloatArray) -> FloatArray:
    """(n_orders,) bounds of the Rényi divergence of one step, in both neighbouring directions.

    shift: u, twice the clipping norm over the noise; sample_rate: q in (0, 1]; orders: above 1.
    """
    if sample_rate == 1:
        return orders * shift**2 / 2
    low = np.floor(orders).astype(np.int64)
    whole = np.unique(np.append(low, low + 1))
    log_terms = _log_terms(shift, int(whole[-1]))
    log_moments = np.array([_log_moment(log_terms, sample_rate, order) for order in whole.tolist()])
    share, at = orders - low, np.searchsorted(whole, low)
    chord = (1 - share) * log_moments[at] + share * log_moments[at + 1]
    return np.asarray(chord * (1 + _SLACK) / (orders - 1))


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
class _FixedSize:
    """Kinds of steps of fixed-size batches; see Divergences."""

    kinds: StepKinds

    def divergences(self, orders: FloatArray) -> FloatArray:
        """See Divergences."""
        pairs = zip(2 * self.kinds.shift, self.kinds.rate, strict=True)
        return np.stack([fixed_size_divergences(u, q, orders) for u, q in pairs], axis=1)


def _same_for_all(one: Epsilons, block: NormLog) -> Epsilons:
    """Every example of a block has the bounds of one."""
    return one.take(np.zeros(block.n_examples, np.int64))


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
    clipped, steps = condensed(*clipped_steps(log))
    found = RdpAccountant(_FixedSize(clipped), method).epsilons(Counts(steps[None]))
    worst = float(found.epsilon[0])
    if method.accountant == "pld":
        worst = tight_worst_case(log, method, worst)
    orders = {"best_order": found.best_order, "order_at_boundary": found.order_at_boundary}
    work = partial(_same_for_all, Epsilons(np.array([worst]), np.zeros(1), orders))
    nothing = replace(
        log, recorded_steps=log.recorded_steps[:0], rows=log.rows[:0], batch_norms=None
    )
    table = tables_of_epsilons(worst, claim_of_worst_case(log), account_of(log, method))
    return BlockAccount(nothing, log.example_ids, work, table, ROW_GROUP_SIZE)
