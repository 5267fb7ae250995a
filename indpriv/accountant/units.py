"""Epsilon of units of several rows: all rows of a person together. Sensitive.

A unit owns k rows. Each step samples each row independently with rate q and adds the clipped
gradients g_i of sampled rows, of norm at most s_i (in units of the noise: norm / (max_grad_norm *
noise_multiplier)). Given which rows of other units are sampled, the output of a step has the law
P = E N(sum of B_i g_i, 1) with the unit, for independent coins B_i ~ Bernoulli(q), and Q = N(0, 1)
without it.

1. One dimension is the worst: for every f-divergence, in both directions, (P, Q) is dominated by
   P = E N(M, 1) with M = sum of B_i s_i, against Q = N(0, 1). P/Q is a positive combination of
   exp(X - Var X / 2) for jointly Gaussian X whose covariances <g_S, g_T> are at most |g_S| |g_T| <=
   M_S M_T, and larger covariances make every convex function of it larger on average (Kahane's
   convexity inequality, 1986; for this pair also Choquette-Choo et al. 2023, arXiv:2310.15526,
   Corollary 4.7). Ganesh 2024 (arXiv:2401.10294v3) bounds it by another mixture of Gaussians, with
   the sum of the j largest norms in place of that of the j sampled ones; it is larger unless all
   norms are equal. These laws compose over steps (Zhu, Dong and Wang 2022, arXiv:2106.08567v4,
   Theorem 10).

2. Removal dominates addition: E_Q (f - c)_+ >= E_Q (1 - c f)_+ for all c >= 1, where f = P/Q
   increases in z. Let T = Phi^-1 o G carry P, of distribution function G, to N(0, 1). (log p)'' =
   Var(M | z) - 1 >= -1 implies T' <= 1: at a maximum of T', (log p)'' + T'^2 <= 0, and T' tends to
   1 at both ends. Let N = -T, z* its fixed point and f(s) = 1/c. If s <= z*: N(N(s)) >= s, as both
   are equal at z* and (N o N)' <= 1; so the test z > N(s) has the false positives of z < s under P,
   and at least its power, and it is one that the left side may use. Else the claim holds at c = 1
   (both are the total variation) and along c in [1, c*], f(z*) = 1/c*, the left side falls no
   faster: its slope is -Q(f > c), the other's -P(f < 1/c), and Q(f > c) <= Q(z > z*) = P(z < z*) <=
   P(z < s). Hence E_Q f^a >= E_Q f^(1-a) for every order a > 1: their difference is a (a - 1) *
   integral over c > 1 of (c^(a-2) - c^(-a-1)) * (left side - right side). One direction is enough
   for RDP.

3. log E_Q f^a is a convex, symmetric and increasing function of (s_1, ..., s_k), for every real
   a > 1. By Hölder it is the largest of a log E_P g - (a - 1) log E_Q g^(a/(a-1)) over g > 0, and
   g = f^(a-1) attains it: increasing, log-convex in z. For such a g, E_P g is the mean over coins
   of E g(Z + sum of B_i s_i): log-convex in s, since sums of log-convex functions are.

4. For n equal rows u it is convex in n too. For such a g, E_P g = sum over j of C(n, j) (1-q)^(n-j)
   q^j E g(Z + j u) is the binomial convolution of two log-convex sequences, (1-q)^j and q^j E g(Z +
   j u), and so log-convex in n (Davenport and Pólya 1949, Canadian Journal of Mathematics 1, 1-5,
   on such products of series); E_Q does not depend on n.

So a step of a unit with norms s is bounded by steps with equal norms. Let u be the largest norm and
n the whole number with n u <= sum of s <= (n + 1) u. Then s is majorised by n entries u and one
entry r, the rest of the sum, that is by a mean of n and of n + 1 entries u with weights 1 - r/u and
r/u, and a convex symmetric function is bounded by the same mean. A *cell* is (u, n): n equal rows,
whose divergence rdp.py computes. A step is shared between two cells; by 4 this also holds where n
has no cell of its own (beyond 64 rows, numbers are 2 % apart, which adds at most 0.2 % in tests).
The bound is exact where the rows of a unit are equal, and slightly loose elsewhere
(tests/accountant/test_units.py measures it). Beyond MOST_ROWS rows, u is raised to sum / MOST_ROWS,
which majorises s again and is looser.

The accountant "pld" composes the losses of the pairs of 1 themselves (pld/mixture_law.py).

Two sums are no bounds: that of the rows' epsilons, and that of their RDP. For loss distributions
the mechanism of rate q with the full sum is no bound either: some row is sampled with probability
1 - (1 - q)^k, not q, so that its delta is too small by up to a factor k. (Its RDP is, by 3, an
upper bound at every order, but a loose one that no account here uses.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.blocks import Epsilons
from indpriv.accountant.clipping_norm import clipping_norm_cost
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.unit_cells import EqualRows
from indpriv.accountant.method import Method, check_poisson_pairs, owners_of
from indpriv.accountant.pld.brackets import FALLBACK
from indpriv.accountant.pld.unit_losses import UPPER, UnitSteps, unit_epsilon
from indpriv.accountant.rdp_orders import RdpAccountant
from indpriv.accountant.worst_case import clipped_steps
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog


@dataclass(frozen=True)
class Units:
    """The rows of each unit.

    Attributes:
        ids: (n_units,) in the order of their first rows.
        n_rows: (n_units,) rows of each.
        positions: (n_examples,) positions of the rows in the log, those of one unit together, in
            the order of ids.
    """

    ids: NDArray[np.generic]
    n_rows: IntArray
    positions: IntArray

    @classmethod
    def of(cls, unit_ids: NDArray[np.generic]) -> Units:
        """The units of a log by the unit of each row (n_examples,)."""
        codes, ids = pd.factorize(unit_ids)
        n_rows = np.bincount(codes, minlength=len(ids))
        return cls(np.asarray(ids), n_rows, np.argsort(codes, kind="stable"))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def starts(self) -> IntArray:
        """(n_units,) where a unit's rows begin in positions."""
        return np.cumsum(self.n_rows) - self.n_rows

    @property
    def numbers(self) -> IntArray:
        """(n_examples,) place in ids of the unit that each row belongs to."""
        numbers = np.empty(len(self.positions), np.int64)
        numbers[self.positions] = np.repeat(np.arange(len(self)), self.n_rows)
        return numbers


def rows_together(log: NormLog, units: Units) -> tuple[NormLog, IntArray]:
    """The log with the rows of each unit together, and where these begin (n_units + 1,).

    If they do not lie like that already, the log is read into memory.
    """
    as_they_lie = len(units.positions) == log.n_examples and bool(
        np.all(np.diff(units.positions) == 1)
    )
    first_row = np.append(units.starts, len(units.positions))
    return log if as_they_lie else log.take(units.positions), first_row


def first_rows(block: NormLog) -> IntArray:
    """(n_units,) where the rows of each unit of a block begin; they lie together in it."""
    owners = owners_of(block)
    if owners is None:
        return np.arange(block.n_examples)
    return np.flatnonzero(np.append(True, owners[1:] != owners[:-1]))


def tight_bounds(units: Iterable[UnitSteps], method: Method, limit: FloatArray) -> Epsilons:
    """Bounds by loss distributions, none above the limits."""
    pairs = zip(units, limit, strict=True)
    epsilon = np.array(
        [unit_epsilon(unit, method.delta, float(most), method.tolerance) for unit, most in pairs]
    )
    bracket = np.where(epsilon < limit, UPPER, FALLBACK).astype("<U9")
    return Epsilons(epsilon, np.zeros(len(epsilon)), {"bracket": bracket, "rdp_epsilon": limit})


def clipped_rows(log: NormLog, n_rows: IntArray) -> tuple[EqualRows, FloatArray]:
    """What units with these numbers of rows meet if all rows are clipped in every step.

    Returns:
        the laws; (len(n_rows), n_laws) steps of each unit under each.
    """
    mechanisms, steps = clipped_steps(log)
    noise, rate = mechanisms.noise_multiplier, mechanisms.sample_rate
    n, rows = len(n_rows), np.repeat(n_rows, len(steps))
    laws = EqualRows.at_clipping_norm(rows, np.tile(noise, n), np.tile(rate, n))
    return laws, np.asarray(np.kron(np.eye(n), steps))


def worst_cases(log: NormLog, method: Method, n_rows: IntArray) -> FloatArray:
    """(len(n_rows),) epsilon that the run guarantees to units with these numbers of rows.

    All rows count at max_grad_norm in every step, so it depends on the settings of the run alone.
    """
    cells, counts = clipped_rows(log, n_rows)
    rdp = RdpAccountant(cells, method)
    epsilon = rdp.epsilons(DenseCounts(counts)).epsilon
    if method.accountant == "pld" and np.isfinite(epsilon).all():
        mechanisms, steps = clipped_steps(log)
        shift, rate = 1 / mechanisms.noise_multiplier, mechanisms.sample_rate
        kinds = (np.repeat(shift[:, None], k, axis=1) for k in n_rows.tolist())
        units = (UnitSteps.summarised(kind, rate, steps) for kind in kinds)
        epsilon = tight_bounds(units, method, epsilon).epsilon
    if not np.isfinite(epsilon).all():
        raise InputError(
            f"units of {int(n_rows[~np.isfinite(epsilon)].min())} rows have no finite epsilon with "
            "this noise: cap the rows of a unit (see indpriv.accountant.cap_rows), or train with "
            "more noise"
        )
    return epsilon


@dataclass(frozen=True)
class RowCap:
    """A run in which no unit has more than `cap` rows.

    Attributes:
        cap: the largest number of rows of a unit.
        rows_kept, rows_dropped: rows of all units together if each unit keeps its first `cap` rows.
        units_affected: the number of units that lose rows.
        worst_case_epsilon: the guarantee that the run would give to every unit.
    """

    cap: int
    rows_kept: int
    rows_dropped: int
    units_affected: int
    worst_case_epsilon: float


def cap_rows(log: NormLog, method: Method, caps: Sequence[int]) -> tuple[RowCap, ...]:
    """For each cap: how many rows it would drop, and the worst-case epsilon with it.

    The sample rate stays that of the run. The numbers of rows of the units are private themselves,
    so choose a cap without looking at them.

    Args:
        log: the norm log of a run whose unit is not the example; it needs unit_ids.
        method: how to account.
        caps: numbers of rows, each at least 1.

    Raises:
        InputError: a bad cap, a log in which each row is its own unit, or one whose batches are
            not the Poisson samples that a cap is accounted for.

    >>> log = NormLog.from_arrays(
    ...     [[0.5] * 4], [0], total_steps=10, noise_multiplier=1.0, max_grad_norm=1.0,
    ...     sample_rate=0.1, unit="user", unit_ids=["a", "a", "a", "b"],
    ... )
    >>> (half,) = cap_rows(log, Method(delta=1e-5), [2])
    >>> half.rows_dropped, half.units_affected
    (1, 1)
    """
    if log.unit_ids is None or log.unit == "example":
        raise InputError(
            'this log has no units to cap: it needs unit_ids and a unit such as "user"'
        )
    if method.participation == "known":
        raise InputError(
            "a cap on rows is of secret participation: with known participation the worst case "
            'depends on who took part when; leave out participation="known"'
        )
    check_poisson_pairs(log, method.relation_of(log.neighbouring), "a cap on rows")
    units = Units.of(log.unit_ids)
    wanted = np.array([_checks.check_positive_int("cap", cap) for cap in caps], dtype=np.int64)
    most, place = np.unique(np.minimum(wanted, units.n_rows.max()), return_inverse=True)
    cost = clipping_norm_cost(log, log.neighbouring, most.astype(np.float64))
    epsilon = (worst_cases(log, method, most) + cost)[place]
    kept = [int(np.minimum(units.n_rows, cap).sum()) for cap in wanted.tolist()]
    return tuple(
        RowCap(
            cap=cap,
            rows_kept=rows,
            rows_dropped=log.n_examples - rows,
            units_affected=int((units.n_rows > cap).sum()),
            worst_case_epsilon=float(worst),
        )
        for cap, rows, worst in zip(wanted.tolist(), kept, epsilon, strict=True)
    )
