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

The accountant "pld" composes the losses of the pairs of 1 themselves (laws.py).

Two sums are no bounds: that of the rows' epsilons, and that of their RDP. For loss distributions
the mechanism of rate q with the full sum is no bound either: some row is sampled with probability
1 - (1 - q)^k, not q, so that its delta is too small by up to a factor k. (Its RDP is, by 3, an
upper bound at every order, but a loose one that no account here uses.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.clipping_norm import clipping_norm_cost
from indpriv.accountant.laws import Cells, Mixture, cells_of, tail_of
from indpriv.accountant.loss_pairs import pair_epsilon
from indpriv.accountant.method import Method, check_poisson_pairs, owners_of
from indpriv.accountant.norms import AT_CLIPPING_NORM, GoverningNorms
from indpriv.accountant.rdp import Counts, RdpAccountant
from indpriv.accountant.steps import clipped_steps
from indpriv.accountant.unit_cells import EqualRows
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

_MOST_KINDS = 200  # of steps of one unit whose losses are computed; more are summarised


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
    def numbers(self) -> IntArray:
        """(n_examples,) place in ids of the unit that each row belongs to."""
        numbers = np.empty(len(self.positions), np.int64)
        numbers[self.positions] = np.repeat(np.arange(len(self)), self.n_rows)
        return numbers


def rows_together(log: NormLog, units: Units) -> tuple[NormLog, IntArray]:
    """The log with the rows of each unit together, and where these begin (n_units + 1,).

    If they do not lie like that already, the log is read into memory.
    """
    first_row = np.append(0, np.cumsum(units.n_rows))
    together = bool((np.diff(units.positions) == 1).all())
    return log if together else log.take(units.positions), first_row


def first_rows(block: NormLog) -> IntArray:
    """(n_units,) where the rows of each unit of a block begin; they lie together in it."""
    owners = owners_of(block)
    if owners is None:
        return np.arange(block.n_examples)
    return np.flatnonzero(np.append(True, owners[1:] != owners[:-1]))


@dataclass(frozen=True)
class UnitSteps:
    """The steps of one unit.

    Attributes:
        shifts: (n_kinds, n_rows) contributions of its rows over the noise, by kind of step.
        sample_rate: (n_kinds,).
        counts: (n_kinds,) number of steps of each kind, whole numbers.
    """

    shifts: FloatArray
    sample_rate: FloatArray
    counts: FloatArray

    @classmethod
    def summarised(
        cls, shifts: FloatArray, sample_rate: FloatArray, counts: FloatArray
    ) -> UnitSteps:
        """Equal kinds of step are put together, and free ones are left out.

        More than _MOST_KINDS are put together by similar cost: each then counts at the largest
        shifts and the largest rate among its neighbours.
        """
        rows = np.column_stack([sample_rate, np.sort(shifts, axis=1)])[shifts.max(axis=1) > 0]
        steps = counts[shifts.max(axis=1) > 0]
        kinds, place = np.unique(rows, axis=0, return_inverse=True)
        steps = np.bincount(place.ravel(), weights=steps, minlength=len(kinds))
        if len(kinds) > _MOST_KINDS:
            order = np.argsort(kinds[:, 0] * kinds[:, 1:].sum(axis=1), kind="stable")
            parts = np.array_split(order, _MOST_KINDS)
            kinds = np.stack([kinds[part].max(axis=0) for part in parts])
            steps = np.array([steps[part].sum() for part in parts])
        return cls(kinds[:, 1:], kinds[:, 0], steps)


def unit_steps(norms: GoverningNorms, block: NormLog, starts: IntArray) -> Iterator[UnitSteps]:
    """The steps of the units whose rows are consecutive examples of a block.

    starts: (n_units,) position of each unit's first example.
    """
    values, settings = norms.read(block), norms.settings
    clip = settings.max_grad_norm[norms.setting][:, None]
    known = norms.record != AT_CLIPPING_NORM
    noise = settings.noise_multiplier[norms.setting][:, None]
    rate, steps = settings.sample_rate[norms.setting], norms.steps.astype(np.float64)
    for first, last in zip(starts, np.append(starts[1:], block.n_examples), strict=True):
        relative = np.ones((len(steps), last - first))
        own = values[norms.record[known], first:last]
        relative[known] = norms.codes.relative(own, np.broadcast_to(clip[known], own.shape))
        yield UnitSteps.summarised(relative / noise, rate, steps)


def unit_epsilons(units: Iterable[UnitSteps], delta: float) -> FloatArray:
    """(n,) epsilon of units by the losses of their steps, never below the truth; may be inf.

    There is no lower end: norms do not say how the gradients of a unit's rows point, and if they
    cancel out the unit leaves no trace.
    """
    return np.array([_unit_epsilon(unit, delta) for unit in units])


def _unit_epsilon(unit: UnitSteps, delta: float) -> float:
    steps, gaussian = unit.counts, unit.sample_rate >= 1
    if not len(steps):
        return 0.0
    tail = tail_of(delta, float(steps.sum()))
    squares = np.where(gaussian, np.square(unit.shifts.sum(axis=1)), 0.0) @ steps
    laws = [
        (shifts.tobytes(), float(rate), tail)
        for shifts, rate in zip(unit.shifts[~gaussian], unit.sample_rate[~gaussian], strict=True)
    ]
    removed, added = ([_cells(*law, way) for law in laws] for way in (False, True))
    return pair_epsilon(removed, added, steps[~gaussian], delta, float(squares))


@lru_cache(maxsize=1024)
def _cells(shifts: bytes, rate: float, tail: float, added: bool) -> Cells:
    rows, alone = Mixture.of_rows(np.frombuffer(shifts), rate, tail), Mixture.centred(1)
    return cells_of(alone, rows.mirrored(), tail) if added else cells_of(rows, alone, tail)


def clipped_rows(log: NormLog, n_rows: IntArray) -> tuple[EqualRows, FloatArray]:
    """What units with these numbers of rows meet if all rows are clipped in every step.

    Returns:
        the laws; (len(n_rows), n_laws) steps of each unit under each.
    """
    kinds, steps = clipped_steps(log)
    rows, kind = np.repeat(n_rows, len(kinds)), np.tile(np.arange(len(kinds)), len(n_rows))
    laws = EqualRows.at_clipping_norm(rows, kinds.take(kind))
    return laws, np.asarray(np.kron(np.eye(len(n_rows)), steps))


def worst_cases(log: NormLog, method: Method, n_rows: IntArray) -> FloatArray:
    """(len(n_rows),) epsilon that the run guarantees to units with these numbers of rows.

    All rows count at max_grad_norm in every step, so it depends on the settings of the run alone.
    """
    cells, counts = clipped_rows(log, n_rows)
    epsilon = RdpAccountant(cells, method).epsilons(Counts(counts)).epsilon
    if method.accountant == "pld" and np.isfinite(epsilon).all():
        kinds, steps = clipped_steps(log)
        shifts = (np.repeat(kinds.shift[:, None], k, axis=1) for k in n_rows.tolist())
        units = (UnitSteps.summarised(shift, kinds.rate, steps) for shift in shifts)
        epsilon = np.minimum(unit_epsilons(units, method.delta), epsilon)
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
