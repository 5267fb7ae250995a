"""Several runs on the same people: what their steps cost adds up over all runs. Sensitive.

Rényi divergences and losses add up, also if later runs were planned by looking at earlier ones
(adaptive composition: Mironov 2017, arXiv:1702.07476v3, Proposition 1; Zhu, Dong and Wang 2022,
arXiv:2106.08567v4, Theorem 10). So the cells of all runs lie side by side. Runs with known
participation together are one Gaussian law for each person, whose squared mu adds up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.sparse import csr_array, hstack

from indpriv import _checks
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray, NDArray, Progress
from indpriv.accountant import method as methods
from indpriv.accountant.account import Bounds, checked
from indpriv.accountant.blocks import block_size, epsilon_table, in_order
from indpriv.accountant.known import gaussian_bounds, known_units
from indpriv.accountant.method import Method
from indpriv.accountant.rdp import Columns, epsilon_offsets, joined
from indpriv.accountant.steps import StepKinds, Steps
from indpriv.accountant.units import UnitCells, Units, clipped_rows, rows_together
from indpriv.epsilon_table import Account, EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

BY = ("example_id", "unit_id")
_MOST = 1e9  # runs, or shape of their law, below which floats find its parameter
_ORDERS = 1 + np.geomspace(1e-3, 1e5, 600)  # of the price of tuning


def compose(
    runs: Sequence[NormLog],
    *,
    delta: float,
    by: str = "example_id",
    accountant: str = "rdp",
    conversion: str = "canonne2020",
    between_records: str = "last",
    participation: str | Sequence[str] | None = None,
    neighbouring: str | None = None,
    tuning: "Tuning | None" = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> EpsilonTable:
    """The epsilon of everyone who took part in several runs.

    Args:
        runs: their norm logs, two or more, of the same unit and neighbouring relation.
        delta: of the composed bound, in (0, 1).
        by: what identifies someone in all runs: "example_id", or "unit_id" for owners of rows.
        accountant: "rdp", or "pld" (for runs of single rows only).
        conversion: as in `account`.
        between_records: as in `account`.
        participation: as in `account`, of all runs or one for each.
        neighbouring: of all runs; default that of the logs, or "zero_out" if participation is known
            in one of them. "replace_one" needs known participation in all.
        tuning: the law of the number of runs, if only the best of these is published. The worst
            case is then that of the best of so many runs, none costlier; epsilons are of all tried.
        progress: called with (people done, people in all).
        workers: threads, by default one for each core.

    Returns:
        the table, a row for each id in any run, in the order of first appearance. `account` has
        the steps of all runs; details are those of the accountant, n_runs (how many runs someone
        was in) and unit_worst_case (the worst case of those runs; of as many rows).

    Raises:
        InputError: fewer than two runs, or runs that differ in unit or relation; ids of different
            types; several rows of one unit by example_id, or with accountant="pld"; no unit ids by
            unit_id; secret participation in batches that are not covered.

    >>> log = NormLog.from_arrays([[0.1, 2.0]], [0], total_steps=50, noise_multiplier=1.0,
    ...                           max_grad_norm=1.0, sample_rate=0.1)
    >>> twice = compose([log, log], delta=1e-5)
    >>> round(twice.worst_case_epsilon, 3), twice.details["n_runs"].tolist()
    (7.899, [2, 2])
    """
    _checks.check_choice("by", by, BY)
    method = Method(
        delta=delta,
        accountant=accountant,
        conversion=conversion,
        between_records=between_records,
        neighbouring=neighbouring,
    )
    methods.check_logs(*(runs if isinstance(runs, list | tuple) else [runs]))
    if not isinstance(tuning, Tuning | None):
        raise refused("refusal.composed", "tuning", tuning=tuning)
    by_run = methods_of(runs, method, participation)
    logs = [
        _checked(log, own, by, number)
        for number, (log, own) in enumerate(zip(runs, by_run, strict=True), start=1)
    ]
    ids, n_rows, composed = _laid_out(logs, by_run, by)
    method, largest = by_run[0], n_rows.max(axis=1)
    # Worst cases and costs, first of someone with the most rows of each run, then of everyone
    patterns, pattern = np.unique(np.column_stack([largest, n_rows]), axis=1, return_inverse=True)
    each = zip([run.log for run in composed], patterns.astype(np.float64), strict=True)
    costs = np.stack([methods.clipping_norm_cost(x, x.neighbouring, rows) for x, rows in each])
    first, everyone = pattern.ravel()[0], pattern.ravel()[1:]
    total = costs.sum(axis=0)
    worst_cases = _worst_cases(composed, patterns, method) + total
    worst, most = worst_cases[everyone], float(worst_cases[first])
    found = _epsilons(composed, method, progress, workers)
    if tuning is not None:
        most = _best_published(composed, largest, costs[:, first], tuning, method)
        worst = np.minimum(worst, most)
    found = methods.details_with_release(found, total[everyone])
    epsilon = np.minimum(found["epsilon"] + total[everyone], worst)
    lower = np.minimum(found["epsilon_lower"], epsilon)
    found |= {"epsilon": epsilon, "epsilon_lower": lower}
    found |= {"n_runs": (n_rows > 0).sum(axis=0), "unit_worst_case": worst}
    account = _account(composed, None if by == "example_id" else int(largest.max()))
    account = replace(account, clipping_norm_epsilon=float(total[first]))
    return epsilon_table(most, _claim(composed), account, ids, [found])


def methods_of(
    runs: Sequence[NormLog], method: Method, participation: str | Sequence[str] | None
) -> list[Method]:
    """How each run is accounted, all under one relation.

    The relation is zero-out if a run needs it: secret Poisson sampling has one account for both.
    """
    if isinstance(runs, NormLog) or len(runs) < 2:
        raise InputError("pass a list of two or more runs to compose")
    if participation is None:
        participation = [methods.usual_participation(log) for log in runs]
    each = [participation] * len(runs) if isinstance(participation, str) else list(participation)
    if len(each) != len(runs):
        raise refused("refusal.composed", "participations", n=len(each), of=len(runs))
    by_run = [replace(method, participation=one) for one in each]
    relations = [one.relation_of(log.neighbouring) for one, log in zip(by_run, runs, strict=True)]
    if "known" in each and set(relations) == {"add_remove", "zero_out"}:
        relations = ["zero_out"] * len(runs)
    for name, values in (("unit", [log.unit for log in runs]), ("neighbouring", relations)):
        if len(set(values)) > 1:
            said = {"name": name, "values": ", ".join(map(repr, values))}
            raise refused("refusal.composed", "differ", **said)
    return [replace(one, neighbouring=relations[0]) for one in by_run]


def _checked(log: NormLog, method: Method, by: str, number: int) -> NormLog:
    """The log of a run as it is accounted; InputError where it cannot be composed."""
    if by == "unit_id" and log.unit_ids is None:
        raise refused("refusal.composed", "no_units", number=number)
    units = Units.of(log)
    if by == "example_id" and units is not None and len(units) < log.n_examples:
        raise refused("refusal.composed", "rows", number=number, log=log)
    log = replace(log, neighbouring=method.relation_of(log.neighbouring))
    if method.participation == "secret":
        methods.check_poisson_pairs(log, log.neighbouring, "a composition of runs")
        log = checked(log, method) if by == "example_id" else replace(log, batch_norms=None)
    methods.warn_of(log, method, by_row=by == "example_id")
    return log


@dataclass(frozen=True)
class Tuning:
    """The law from which the number of tried runs was drawn, of which the best is published.

    It must be chosen beforehand; a fixed number can cost as much as publishing all runs. The score
    that picks the best one must be a function of what a run publishes, and of nothing else in these
    data: a score on training data would have to be counted as part of the run. Papernot and Steinke
    2022 (arXiv:2110.03620v2).

    Attributes:
        mean: expected number of runs, at least 1.
        shape: of the truncated negative binomial law: 1 is geometric, 0 logarithmic, and infinity
            the Poisson law (where no run may be published at all if the number is 0).

    Raises:
        InputError: mean is below 1, or shape is negative.

    >>> Tuning(mean=5.0).law
    'geometric'
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        _checks.check_number("mean", self.mean, f"[1, {_MOST:g}]", "the expected number of runs")
        if self.shape != math.inf:  # of the Poisson law
            laws = "pass 0 (logarithmic), 1 (geometric), another number, or inf (Poisson)"
            _checks.check_number("shape", self.shape, f"[0, {_MOST:g}]", laws)

    @property
    def law(self) -> str:
        """The name of the law."""
        names = {0.0: "logarithmic", 1.0: "geometric", math.inf: "Poisson"}
        return names.get(self.shape, f"truncated negative binomial of shape {self.shape:g}")

    def rdp(self, orders: FloatArray, rdp: FloatArray) -> FloatArray:
        """The Rényi curve of publishing the best run: Theorem 2, or 6 for the Poisson law.

        orders: (n_orders,) above 1, ascending. rdp: (n_orders,) curve of one run, or an upper bound
            of the curves of all that could be tried.
        """
        price = math.log(self.mean) / (orders - 1)
        if math.isinf(self.shape):
            return np.asarray(rdp + price + self.mean * _deltas(orders, rdp))
        gamma = self._gamma()
        least = np.min((1 - 1 / orders) * rdp - math.log(gamma) / orders)
        published = rdp + price + (1 + self.shape) * least
        return np.minimum.accumulate(published[::-1])[::-1]  # the divergence grows with the order

    def _gamma(self) -> float:
        """The parameter of the law with this mean, rounded down, which costs more."""
        mean, low = max(self.mean, 1 + 1e-9, self._mean(-1e-12)), -1.0
        while self._mean(low) < mean:
            low *= 2
        log_gamma = brentq(lambda x: self._mean(x) - mean, low, -1e-12, xtol=1e-14)
        return math.exp(float(log_gamma) * (1 + 1e-9) - 1e-12)

    def _mean(self, log_gamma: float) -> float:
        """Expected number of runs at this logarithm of gamma, which falls as gamma grows."""
        odds = math.expm1(-log_gamma)  # 1 / gamma - 1
        if self.shape == 0:
            return odds / -log_gamma
        return self.shape * odds / -math.expm1(self.shape * log_gamma)


def _deltas(orders: FloatArray, rdp: FloatArray) -> FloatArray:
    """(n_orders,) the delta of one run at epsilon log(1 + 1 / (order - 1)); see Theorem 6."""
    epsilon = np.log1p(1 / (orders - 1))
    log_delta = (orders - 1) * (rdp - epsilon[:, None]) + np.log1p(-1 / orders) * orders
    log_delta -= np.log(orders - 1)
    return np.asarray(np.exp(np.minimum(log_delta.min(axis=1), 0.0)))


@dataclass(frozen=True)
class _Run:
    """One run, and what it is to each of the n people of all runs."""

    log: NormLog  # of the run; its rows are in the order of the people if participation is secret
    method: Method  # how it is accounted
    first_row: IntArray  # (n + 1,) where the rows of each person begin in that order
    cells: Steps | UnitCells | None  # how norms are counted; None if participation is known
    # (n,) of the Gaussian law of each person if participation is known, else 0
    squared_mu: FloatArray
    clipped: float  # squared mu of the most exposed person at max_grad_norm

    @property
    def n_cells(self) -> int:
        """Number of columns of the counts."""
        return 0 if self.cells is None else self.cells.laws.n_cells

    def counts(self, start: int, stop: int) -> csr_array:
        """(stop - start, n_cells) counts of the people from start to stop; 0 if not in the run."""
        rows = self.first_row[start : stop + 1]
        inside, shape = np.diff(rows) > 0, (stop - start, self.n_cells)
        if self.cells is None or not inside.any():
            return csr_array(shape)
        block = self.log.part(int(rows[0]), int(rows[-1]))
        if isinstance(self.cells, Steps):
            found = self.cells.counts(block)
        else:
            found = self.cells.counts(block, rows[:-1][inside] - rows[0])
        starts = found.indptr[np.append(0, np.cumsum(inside))]
        return csr_array((found.data, found.indices, starts), shape=shape)


def _laid_out(
    logs: Sequence[NormLog], by_run: Sequence[Method], by: str
) -> tuple[NDArray[np.generic], IntArray, list[_Run]]:
    """All ids in the order of first appearance, (n_runs, n) rows of each, and the runs."""
    owners = [np.asarray(log.unit_ids if by == "unit_id" else log.example_ids) for log in logs]
    if len({own.dtype.kind in "iu" for own in owners}) > 1:
        raise refused("refusal.composed", "types")
    numbers, ids = pd.factorize(np.concatenate(owners))
    people = np.split(numbers, np.cumsum([len(own) for own in owners])[:-1])  # of rows
    n_rows = np.stack([np.bincount(person, minlength=len(ids)) for person in people])
    several = bool((n_rows > 1).any())
    secret = any(method.participation == "secret" for method in by_run)
    if by_run[0].accountant == "pld" and several and secret:
        raise refused("refusal.composed", "several_rows", unit=logs[0].unit, n=n_rows.max())
    runs = []
    for log, method, person, rows in zip(logs, by_run, people, n_rows, strict=True):
        cells: Steps | UnitCells | None = None
        squared_mu, clipped, first_row = np.zeros(len(ids)), 0.0, np.append(0, np.cumsum(rows))
        if method.participation == "known":
            known = known_units(replace(log, unit="user", unit_ids=person), method)
            squared_mu[pd.unique(person)] = known["own"]
            clipped = float(known["clipped"].max())
        else:
            log, _ = rows_together(log, Units(ids, rows, person))
            between, most = method.between_records, int(rows.max())
            cells = UnitCells.of(log, between, most) if several else Steps.of(log, between)
        runs.append(_Run(log, method, first_row, cells, squared_mu, clipped))
    return np.asarray(ids), n_rows, runs


def _epsilons(
    runs: Sequence[_Run], method: Method, progress: Progress | None, workers: int | None
) -> Columns:
    """Bounds of everyone, before they are limited by a worst case."""
    squared_mu = np.sum([run.squared_mu for run in runs], axis=0)
    n = len(squared_mu)
    secret = [run for run in runs if run.cells is not None]
    if not secret:
        return gaussian_bounds(squared_mu, method.delta) | {"epsilon_lower": np.zeros(n)}
    laws = StepKinds.concatenated([run.cells.laws for run in runs if run.cells is not None])
    most_steps = float(sum(run.log.total_steps for run in secret))
    bounds = Bounds.of(laws, method, most_steps)

    def work(start: int, stop: int) -> tuple[int, Columns]:
        counts = hstack([run.counts(start, stop) for run in secret], format="csr")
        return stop, bounds(counts, squared_mu[start:stop])

    width = sum(run.n_cells for run in secret)
    size, done_parts = block_size(8 * width), []
    blocks = ((start, min(start + size, n)) for start in range(0, n, size))
    for done, part in in_order(work, blocks, workers):
        done_parts.append(part)
        if progress is not None:
            progress(done, n)
    return joined(done_parts)


def _worst_cases(runs: Sequence[_Run], patterns: IntArray, method: Method) -> FloatArray:
    """(n_patterns,) epsilon guaranteed to someone with patterns[i, j] rows in run i."""
    squared_mu = np.array([run.clipped for run in runs]) @ (patterns > 0)
    clipped, steps = [], []
    for run, rows in zip(runs, patterns, strict=True):
        if run.cells is not None:
            numbers = np.unique(rows[rows > 0])
            own, each = clipped_rows(run.log, numbers)
            clipped.append(own)
            steps.append((rows[:, None] == numbers) @ each)
    if not clipped:
        return gaussian_bounds(squared_mu, method.delta)["epsilon"]
    laws, counts = StepKinds.concatenated(clipped), np.hstack(steps)
    bounds = Bounds.of(laws, method, float(counts.sum(axis=1).max()))
    return np.asarray(bounds(counts, squared_mu)["epsilon"])


def _best_published(
    runs: Sequence[_Run], n_rows: IntArray, costs: FloatArray, tuning: Tuning, method: Method
) -> float:
    """The worst case of publishing the best of a random number of runs like these.

    n_rows: (n_runs,) most of each. costs: (n_runs,) of their clipping norms: no Rényi divergence
    of one is larger.
    """
    curves = []
    for run, rows in zip(runs, n_rows, strict=True):
        curve = _ORDERS / 2 * run.clipped
        if run.cells is not None:
            laws, (steps,) = clipped_rows(run.log, np.array([rows]))
            cell, order = np.divmod(np.arange(len(steps) * len(_ORDERS)), len(_ORDERS))
            curve = steps @ laws.divergences_at(cell, _ORDERS[order]).reshape(len(steps), -1)
        curves.append(curve)
    most = tuning.rdp(_ORDERS, np.max(np.add(curves, costs[:, None]), axis=0))
    offsets = epsilon_offsets(_ORDERS, method.delta, method.conversion)
    return max(0.0, float((most + offsets).min()))


def _claim(runs: Sequence[_Run]) -> tuple[str, str]:
    """The weakest claim of the runs, with the reasons of those that have it."""
    claims = [methods.claim_of(run.log, run.method) for run in runs]
    found = [claim for claim, _ in claims]
    weakest = methods.ESTIMATE if methods.ESTIMATE in found else found[0]
    numbered = enumerate(claims, start=1)
    reasons = (f"Run {n}: {reason}" for n, (claim, reason) in numbered if claim == weakest)
    return weakest, " ".join(reasons)


def _account(runs: Sequence[_Run], rows_per_unit: int | None) -> Account:
    """What the composed epsilons mean; what differs between runs is named by its weakest form."""
    accounts = [methods.account_of(run.log, run.method) for run in runs]
    secret = [account for account in accounts if account.participation == "secret"]
    samplers = {account.sampler for account in secret or accounts}
    steps = sum(account.total_steps for account in accounts)
    recorded = sum(account.recorded_share * account.total_steps for account in accounts)
    coarsest = max(accounts, key=lambda account: account.rounding)
    some_known = 0 < len(secret) < len(accounts)
    return replace(
        (secret or accounts)[0],
        rounding=coarsest.rounding,
        rounding_mode=coarsest.rounding_mode,
        sampler=samplers.pop() if len(samplers) == 1 else "other",
        participation="known in some runs" if some_known else accounts[0].participation,
        total_steps=steps,
        recorded_share=recorded / steps,
        rows_per_unit=rows_per_unit,
    )
