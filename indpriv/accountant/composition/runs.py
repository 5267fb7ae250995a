"""Several runs on the same people: what their steps cost adds up over all runs. Sensitive.

Rényi divergences add up, and `joined_losses` composes loss distributions. Runs may choose their
settings by looking at earlier ones (adaptive composition: Mironov 2017, arXiv:1702.07476v3,
Proposition 1). Someone who was in one run only keeps the account of that run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv._progress import Progress
from indpriv.accountant.account import rdp_bounds
from indpriv.accountant.blocks import Epsilons, block_size, in_order
from indpriv.accountant.claims import ESTIMATE, claim_if_known, claim_of
from indpriv.accountant.clipping_norm import details_with_release
from indpriv.accountant.composition.checked_runs import (
    checked_logs,
    clipping_norm_costs,
    methods_of,
)
from indpriv.accountant.composition.joined_losses import JoinedLosses
from indpriv.accountant.composition.joined_runs import (
    JoinedCells,
    JoinedCounts,
    JoinedUnitCells,
    KnownCells,
    RunPart,
)
from indpriv.accountant.composition.tuning import Tuning, least_epsilon
from indpriv.accountant.gaussian import gaussian_epsilons
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.mechanisms import Mechanisms
from indpriv.accountant.histogram.unit_cells import EqualRows, UnitCells
from indpriv.accountant.known import GAUSSIAN
from indpriv.accountant.method import Method, account_of
from indpriv.accountant.pld.engine import bracketed, labelled
from indpriv.accountant.rdp_orders import RdpAccountant
from indpriv.accountant.units import Units
from indpriv.accountant.worst_case import clipped_steps
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, Account, EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

BY = ("example_id", "unit_id")
_ORDERS = 1 + np.geomspace(1e-3, 1e5, 600)  # of the price of tuning


def compose(
    runs: Sequence[NormLog],
    *,
    delta: float,
    by: str = "example_id",
    accountant: str = "rdp",
    conversion: str = "canonne2020",
    between_records: str = "last",
    participation: str | Sequence[str] = "secret",
    neighbouring: str | None = None,
    tuning: Tuning | None = None,
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
        tuning: the law of the number of runs, if these runs were tried and only the best one is
            published. The worst case is then that of publishing the best of a random number of
            runs, none of which costs more than these; each epsilon is still of all tried runs.
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
    methods = methods_of(runs, method, participation)
    return _composed(checked_logs(runs, methods, by), by, methods, tuning, progress, workers)


def _composed(
    logs: list[NormLog],
    by: str,
    methods: Sequence[Method],
    tuning: Tuning | None,
    progress: Progress | None,
    workers: int | None,
) -> EpsilonTable:
    """The table of logs that were checked; methods: of each."""
    method = methods[0]
    groups = [_group(log, by) for log in logs]
    ids, places = _matched([units.ids for units in groups])
    n_rows = np.stack([_rows_of(units, place) for units, place in zip(groups, places, strict=True)])
    largest = n_rows.max(axis=1)
    whole = bool((largest == 1).all())
    every_known = all(own.participation == "known" for own in methods)
    if method.accountant == "pld" and not (whole or every_known):
        raise InputError(
            f'accountant="pld" composes runs of single rows, and one {logs[0].unit} has '
            f'{largest.max()} rows in a run; pass accountant="rdp"'
        )
    parts = [
        RunPart.of(log, units, place, own, None if whole else int(most))
        for log, units, place, own, most in zip(logs, groups, places, methods, largest, strict=True)
    ]
    patterns, pattern = np.unique(np.column_stack([largest, n_rows]), axis=1, return_inverse=True)
    costs = clipping_norm_costs(logs, methods, patterns).sum(axis=0)
    if every_known:
        worst_cases = _known_worst_cases(parts, patterns, method) + costs
    else:
        worst_cases = _worst_cases(parts, patterns, method) + costs
    worst, most = worst_cases[pattern.ravel()[1:]], float(worst_cases[pattern.ravel()[0]])
    if every_known:
        found = _known_epsilons(parts, len(ids), method)
    else:
        found = _epsilons(parts, len(ids), method, progress, workers)
    cost = costs[pattern.ravel()]
    if tuning is not None:
        of_largest = clipping_norm_costs(logs, methods, largest[:, None])
        most = _best_published(parts, largest, of_largest, tuning, method)
        worst = np.minimum(worst, most)
    epsilon = np.minimum(found.epsilon + cost[1:], worst)
    account = _account(logs, methods, None if by == "example_id" else int(largest.max()))
    claim, reason = _claim(logs, methods)
    table = EpsilonTable(
        example_ids=ids,
        epsilon=epsilon,
        epsilon_lower=np.minimum(found.epsilon_lower, epsilon),
        epsilon_upper=epsilon,
        worst_case_epsilon=most,
        claim=claim,
        claim_reason=reason,
        account=replace(account, clipping_norm_epsilon=float(cost[0])),
        details={
            **details_with_release(found.details, cost[1:]),
            "n_runs": (n_rows > 0).sum(axis=0),
            "unit_worst_case": worst,
        },
    )
    return labelled(table)


def _group(log: NormLog, by: str) -> Units:
    if by == "unit_id" and log.unit_ids is not None:
        return Units.of(log.unit_ids)
    ones = np.ones(log.n_examples, np.int64)
    return Units(np.asarray(log.example_ids), ones, np.arange(log.n_examples))


def _matched(ids: Sequence[NDArray[np.generic]]) -> tuple[NDArray[np.generic], list[IntArray]]:
    """All ids in the order of first appearance, and each id's place in each run, or -1."""
    if len({own.dtype.kind in "iu" for own in ids}) > 1:
        raise InputError(
            "ids are numbers in some runs and texts in others, so no one can be found in both; "
            "record them in one type"
        )
    every = pd.unique(np.concatenate(ids))
    return np.asarray(every), [pd.Index(own).get_indexer(every).astype(np.int64) for own in ids]


def _rows_of(units: Units, place: IntArray) -> IntArray:
    """(n_people,) rows of each in one run; 0 of those who were not in it."""
    return np.where(place >= 0, units.n_rows[place], 0)


def _epsilons(
    parts: Sequence[RunPart],
    n: int,
    method: Method,
    progress: Progress | None,
    workers: int | None,
) -> Epsilons:
    """Bounds of everyone, before they are limited by a worst case."""
    slow = any(isinstance(part.cells, UnitCells) for part in parts)
    accountant = RdpAccountant(JoinedUnitCells(parts) if slow else JoinedCells(parts), method)
    ends = np.cumsum([part.n_columns for part in parts]).tolist()
    columns = [slice(end - part.n_columns, end) for part, end in zip(parts, ends, strict=True)]
    losses = JoinedLosses.of(parts, method) if method.accountant == "pld" else None

    def work(start: int, stop: int) -> tuple[int, Epsilons]:
        counted = [
            (*part.counts(start, stop), own) for part, own in zip(parts, columns, strict=True)
        ]
        found = rdp_bounds(accountant.epsilons(JoinedCounts(stop - start, counted)))
        return stop, found if losses is None else losses.epsilons(start, stop, found.epsilon)

    width = max(ends[-1], 0 if losses is None else len(losses.mechanisms))
    found = []
    for done, part in in_order(work, _ranges(n, block_size(8 * width)), workers):
        found.append(part)
        if progress is not None:
            progress(done, n)
    return Epsilons.joined(found)


def _known_epsilons(parts: Sequence[RunPart], n: int, method: Method) -> Epsilons:
    """Those of Gaussian mechanisms alone, which are one: their squared mu add up."""
    squared = np.zeros(n)
    for part in parts:
        if isinstance(part.cells, KnownCells):
            squared[np.diff(part.first) > 0] += part.cells.squared_mu
    mu = np.sqrt(squared)
    epsilon = gaussian_epsilons(mu, method.delta)[1]
    limit = ndtr(ndtri(FALSE_POSITIVE_RATE) + mu)
    return Epsilons(epsilon, np.zeros(n), {"mu": mu, "true_positive_limit": limit})


def _known_worst_cases(parts: Sequence[RunPart], patterns: IntArray, method: Method) -> FloatArray:
    """The same as `_worst_cases` where participation is known in all runs."""
    worst = np.array([part.cells.worst for part in parts if isinstance(part.cells, KnownCells)])
    return gaussian_epsilons(np.sqrt(worst @ (patterns > 0)), method.delta)[1]


def _ranges(n: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, n)) for start in range(0, n, size))


def _worst_cases(parts: Sequence[RunPart], patterns: IntArray, method: Method) -> FloatArray:
    """(n_patterns,) epsilon guaranteed to someone with patterns[i, j] rows in run i."""
    cells, counts = [], []
    for part, rows in zip(parts, patterns, strict=True):
        if isinstance(part.cells, KnownCells):  # at most that of the most exposed one
            cells.append((np.ones(1, np.int64), part.cells.mechanisms))
            counts.append((rows > 0)[:, None] * part.cells.most)
            continue
        mechanisms, steps = clipped_steps(part.log)
        for k in np.unique(rows[rows > 0]).tolist():
            cells.append((np.full(len(steps), k), mechanisms))
            counts.append((rows == k)[:, None] * steps)
    every, met = Mechanisms.concatenated([own for _, own in cells]), np.hstack(counts)
    if patterns.max() == 1:
        accountant = RdpAccountant(every, method)
    else:
        accountant = RdpAccountant(
            EqualRows.at_clipping_norm(
                np.concatenate([rows for rows, _ in cells]),
                every.noise_multiplier,
                every.sample_rate,
            ),
            method,
        )
    epsilon = accountant.epsilons(DenseCounts(met)).epsilon
    if method.accountant == "pld":
        clipped = every.participations(met)
        epsilon = bracketed(clipped, clipped, method.delta, epsilon).epsilon
    return epsilon


def _best_published(
    parts: Sequence[RunPart], n_rows: IntArray, costs: FloatArray, tuning: Tuning, method: Method
) -> float:
    """The worst case of publishing the best of a random number of runs like these.

    costs: (n_runs, 1) of their clipping norms: no Rényi divergence of one is larger.
    """
    curves = []
    for part, rows in zip(parts, n_rows.tolist(), strict=True):
        if isinstance(part.cells, KnownCells):
            curves.append(_ORDERS / 2 * part.cells.worst)
            continue
        mechanisms, steps = clipped_steps(part.log)
        if rows == 1:
            curves.append(mechanisms.divergences(_ORDERS) @ steps)
            continue
        each = EqualRows.at_clipping_norm(
            np.full(len(steps), rows), mechanisms.noise_multiplier, mechanisms.sample_rate
        )
        cell, order = np.divmod(np.arange(len(steps) * len(_ORDERS)), len(_ORDERS))
        curves.append(steps @ each.divergences_at(cell, _ORDERS[order]).reshape(len(steps), -1))
    curve = tuning.rdp(_ORDERS, np.max(np.add(curves, costs), axis=0))
    return least_epsilon(_ORDERS, curve, method.delta, method.conversion)


def _claim(logs: Sequence[NormLog], methods: Sequence[Method]) -> tuple[str, str]:
    """The weakest claim of the runs, with the reasons of those that have it."""
    claims = [
        claim_if_known(log)
        if method.participation == "known"
        else claim_of(log, method.between_records)
        for log, method in zip(logs, methods, strict=True)
    ]
    claim = ESTIMATE if any(found == ESTIMATE for found, _ in claims) else claims[0][0]
    reasons = [f"Run {number}: {reason}" for number, (found, reason) in enumerate(claims, start=1)
               if found == claim]  # fmt: skip
    return claim, " ".join(reasons)


def _account(
    logs: Sequence[NormLog], methods: Sequence[Method], rows_per_unit: int | None
) -> Account:
    """What the composed epsilons mean; what differs between runs is named by its weakest form."""
    accounts = [account_of(log, method) for log, method in zip(logs, methods, strict=True)]
    secret = [account for account in accounts if account.participation == "secret"]
    samplers = {account.sampler for account in secret or accounts}
    steps = sum(account.total_steps for account in accounts)
    recorded = sum(account.recorded_share * account.total_steps for account in accounts)
    coarsest = max(accounts, key=lambda account: account.rounding)
    if not secret:
        coarsest = replace(
            coarsest, accountant=GAUSSIAN, conversion="none", between_records="none", tolerance=0.0
        )
    some_known = 0 < len(secret) < len(accounts)
    return replace(
        coarsest,
        sampler=samplers.pop() if len(samplers) == 1 else "other",
        participation="known in some runs" if some_known else coarsest.participation,
        total_steps=steps,
        recorded_share=recorded / steps,
        rows_per_unit=rows_per_unit,
    )
