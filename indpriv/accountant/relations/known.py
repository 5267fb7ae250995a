"""The account against anyone who knows who took part in which step. Sensitive.

Participation is drawn without looking at data, so it may be fixed: see `entries`. That holds for
every sampler whose choices depend on no data, and no amplification by sampling is claimed. Two
neighbouring data sets have the same units, of which one contributes nothing ("zero_out", Kairouz et
al. 2021, arXiv:2103.00039v3, Definition 1.1), or has other rows in its place ("replace_one"); who
takes part when is the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from indpriv._arrays import FloatArray, IntArray
from indpriv._progress import Progress
from indpriv.accountant.blocks import BlockAccount, Workers
from indpriv.accountant.claims import claim_if_known
from indpriv.accountant.method import Method, account_of
from indpriv.accountant.relations.clipping_norm import clipping_norm_cost
from indpriv.accountant.relations.entries import SquaredShifts, squared_shifts
from indpriv.accountant.relations.gaussian import gaussian_epsilons
from indpriv.accountant.units import Units, first_rows, rows_together
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, Account, EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

GAUSSIAN = "gaussian"
_AT_ONCE = 1 << 15  # examples: what is made of their entries stays in cache
_REPEATING = ("with_replacement", "other")  # samplers that may draw an example twice for a step


@dataclass(frozen=True)
class KnownShifts:
    """Squared mu of n units under known participation, and of the most exposed one.

    Attributes:
        shifts: of each unit, none above `worst`; steps without batch norms count at max_grad_norm.
        least: (n,) what recorded norms show; 0 for units of several rows, which may cancel out.
        alike: (n,) squared mu if the replacement has the unit's own norms; None unless rows are
            replaced.
        worst: squared mu of the unit that is most exposed at max_grad_norm.
    """

    shifts: SquaredShifts
    least: FloatArray
    alike: FloatArray | None
    worst: float


@dataclass(frozen=True)
class _BlockShifts:
    """What batch norms tell about the n units of a block.

    Attributes:
        own: squared mu if the replacement, if there is one, points away from each row.
        alike: with no replacement; None unless rows are replaced.
        n_rows: (n,) of each unit.
    """

    own: SquaredShifts
    alike: SquaredShifts | None
    n_rows: IntArray

    def __len__(self) -> int:
        return len(self.own.own)

    @classmethod
    def joined(cls, parts: Sequence[_BlockShifts]) -> _BlockShifts:
        """The units of all parts."""
        alike = [part.alike for part in parts if part.alike is not None]
        return cls(
            SquaredShifts.concatenated([part.own for part in parts]),
            SquaredShifts.concatenated(alike) if alike else None,
            np.concatenate([part.n_rows for part in parts]),
        )


def _recorded_shifts(opposite: float, block: NormLog) -> _BlockShifts:
    """Sums over the steps that have batch norms; opposite: see `squared_shifts`."""
    starts = first_rows(block)
    n_rows = np.diff(np.append(starts, block.n_examples))
    n = len(n_rows)
    owners = None if n == block.n_examples else np.repeat(np.arange(n), n_rows)
    if block.batch_norms is None:
        own = plain = SquaredShifts(np.zeros(n), np.zeros(n), np.zeros(n, np.int64))
    else:
        entries = block.batch_norms.read(0, block.n_examples)
        own = squared_shifts(block, entries, owners, n, opposite=opposite)
        plain = squared_shifts(block, entries, owners, n) if opposite else own
    return _BlockShifts(own, plain if opposite else None, n_rows)


def known_blocks(log: NormLog, method: Method, units: Units | None) -> BlockAccount[_BlockShifts]:
    """The account of a log with known participation; the worst case of a table is of its units.

    If the rows of a unit are not neighbours in the log, its batch norms are read into memory.

    units: those of a log whose unit is not the example.
    """
    # Full records are not read: they hold norms of steps that an example took no part in.
    log = replace(log, recorded_steps=log.recorded_steps[:0], rows=log.rows[:0])
    first_row = None
    if units is None:
        log = replace(log, unit_ids=None)
    else:
        log, first_row = rows_together(log, units)
    claim, reason = claim_if_known(log)
    account = known_account(log, method, units)

    def table(ids: NDArray[np.generic], blocks: Sequence[_BlockShifts]) -> EpsilonTable:
        joined = _BlockShifts.joined(blocks)
        found = _in_all_steps(log, method, joined)
        shifts, mu = found.shifts, np.sqrt(found.shifts.own)
        lower, epsilon = gaussian_epsilons(mu, method.delta)
        if not np.array_equal(found.least, shifts.own):
            lower = gaussian_epsilons(np.sqrt(found.least), method.delta)[0]
        worst = float(gaussian_epsilons(np.sqrt([found.worst]), method.delta)[1][0])
        epsilon = np.where(shifts.own >= found.worst, worst, np.minimum(epsilon, worst))
        limit = ndtr(ndtri(FALSE_POSITIVE_RATE) + mu)
        details = {"participations": shifts.participations, "mu": mu, "true_positive_limit": limit}
        if found.alike is not None:
            alike = gaussian_epsilons(np.sqrt(found.alike), method.delta)[1]
            details["epsilon_if_replaced_alike"] = np.minimum(alike, epsilon)
        if units is not None:
            details |= {"n_rows": joined.n_rows, "unit_worst_case": np.full(len(ids), worst)}
        return EpsilonTable(
            example_ids=ids,
            epsilon=epsilon,
            epsilon_lower=np.minimum(lower, epsilon),
            epsilon_upper=epsilon,
            worst_case_epsilon=worst,
            claim=claim,
            claim_reason=reason,
            account=account,
            details=details,
        )

    of_all = log.example_ids if units is None else units.ids
    work = partial(_recorded_shifts, _opposite(log, method))
    return BlockAccount(log, of_all, work, table, _AT_ONCE, first_row)


def known_account(log: NormLog, method: Method, units: Units | None) -> Account:
    """What such an account means; units: those of a log whose unit is not the example."""
    steps = () if log.batch_norms is None else log.batch_norms.steps
    account, rows = account_of(log, method), None if units is None else int(units.n_rows.max())
    return replace(
        account,
        accountant=GAUSSIAN,
        conversion="none",
        tolerance=0.0,
        between_records="none",
        recorded_share=len(steps) / log.total_steps,
        rows_per_unit=rows,
        clipping_norm_epsilon=clipping_norm_cost(log, account.neighbouring, rows or 1),
    )


def known_shifts(
    log: NormLog,
    method: Method,
    units: Units | None = None,
    *,
    progress: Progress | None = None,
    workers: Workers = None,
) -> KnownShifts:
    """What is known about each example or unit (n,); see `known_blocks`."""
    account = known_blocks(log, method, units)
    found = list(account.blocks(workers=workers, progress=progress))
    return _in_all_steps(log, method, _BlockShifts.joined(found))


def _opposite(log: NormLog, method: Method) -> float:
    return 1.0 if method.relation_of(log.neighbouring) == "replace_one" else 0.0


def _in_all_steps(log: NormLog, method: Method, found: _BlockShifts) -> KnownShifts:
    """What is known about some units, with the steps that have no batch norms."""
    rows = found.n_rows.astype(np.float64)
    # Anyone may have taken part in a step without batch norms, with all rows at max_grad_norm.
    weight = (1 + _opposite(log, method)) ** 2 / np.square(log.settings.noise_multiplier)
    recorded = np.zeros(0, np.int64) if log.batch_norms is None else log.batch_norms.steps
    missing = np.delete(weight, recorded)
    anybody = np.square(rows) * missing.sum() if len(missing) else np.zeros(1)
    if log.sampler in _REPEATING and len(missing):
        anybody = np.full_like(rows, np.inf)  # one row may be drawn any number of times for a step
    shifts = found.own
    clipped = shifts.clipped
    if len(missing):  # counts limit what batch norms leave open, and never what they show
        limit = np.maximum(_by_counts(log, weight, rows), clipped)
        clipped = np.minimum(clipped + anybody, limit)
    if not np.isfinite(clipped).all():
        raise InputError(
            f'{len(missing):,} of {log.total_steps:,} steps have no batch norms, and sampler="'
            f'{log.sampler}" may draw an example several times for one step: record with '
            "batch_norms=True, or pass most_participations"
        )
    own = np.minimum(shifts.own + anybody if len(missing) else shifts.own, clipped)
    least = np.where(rows > 1, 0.0, np.minimum(shifts.own, own))
    alike = None
    if found.alike is not None:
        alike = np.minimum(4 * found.alike.own + anybody, own)
    known = replace(shifts, own=own, clipped=clipped)
    return KnownShifts(known, least, alike, float(clipped.max()))


def _by_counts(log: NormLog, weight: FloatArray, rows: FloatArray) -> FloatArray:
    """(n,) largest squared mu of units with these numbers of rows; infinite without counts.

    weight: (total_steps,) squared mu of one row at max_grad_norm in one step.
    """
    most = log.most_participations
    if most is None:
        return np.full(len(rows), np.inf)
    if log.sampler in _REPEATING:  # all in one step
        return np.asarray(np.square(rows * most) * weight.max())
    largest = np.sort(weight)[::-1][:most]
    return np.asarray(np.square(rows) * largest.sum() * (1 + 1e-12))
