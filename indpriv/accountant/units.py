"""Epsilon of units of several rows: all rows of a person together. Sensitive.

A unit owns k rows. Each step samples each row independently and adds the clipped gradients of the
sampled ones, of norm at most s_i (in units of the noise). All in one direction are the worst [8.1],
removing a unit costs at least as much as adding it [8.2], and a step with norms s is bounded by
steps with equal norms: n and n + 1 rows of the largest one [8.3] [8.4]. Such a *cell* is (u, n): n
equal rows of shift u. The accountant "pld" composes the losses of the pairs of [8.1] themselves.

Two sums are no bounds [8.5]: that of the rows' epsilons, and that of their RDP.
Numbers in brackets are lines of docs/explanation/proofs.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from indpriv.accountant.norms import GoverningNorms
from indpriv.accountant.steps import StepKinds, clipped_steps
from indpriv.accountant.unit_cells import MOST_ROWS
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


def unit_steps(
    norms: GoverningNorms, block: NormLog, starts: IntArray
) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
    """The steps of the units whose rows are consecutive examples of a block; see `unit_epsilon`.

    starts: (n_units,) position of each unit's first example.
    """
    values, settings = norms.read(block), norms.settings
    clip = settings.max_grad_norm[norms.setting][:, None]
    noise = settings.noise_multiplier[norms.setting][:, None]
    rate, steps = settings.sample_rate[norms.setting], norms.steps.astype(np.float64)
    for first, last in zip(starts, np.append(starts[1:], block.n_examples), strict=True):
        own = values[norms.record, first:last]
        relative = norms.codes.relative(own, np.broadcast_to(clip, own.shape))
        yield relative / noise, rate, steps


def unit_epsilon(shifts: FloatArray, rate: FloatArray, steps: FloatArray, delta: float) -> float:
    """Epsilon of a unit by the losses of its steps, never below the truth; may be inf.

    There is no lower end: norms do not say how the gradients of a unit's rows point, and if they
    cancel out the unit leaves no trace.

    Args:
        shifts: (n_kinds, n_rows) contributions of its rows over the noise, by kind of step.
        rate: (n_kinds,) sample rates.
        steps: (n_kinds,) number of steps of each kind, whole numbers.
        delta: of the epsilon.
    """
    rows, rate, steps = _few_kinds(shifts, rate, steps)
    if not len(steps):
        return 0.0
    gaussian, tail = rate >= 1, tail_of(delta, float(steps.sum()))
    squares = np.where(gaussian, np.square(rows.sum(axis=1)), 0.0) @ steps
    laws = [
        (row.tobytes(), float(q), tail)
        for row, q in zip(rows[~gaussian], rate[~gaussian], strict=True)
    ]
    removed, added = ([_losses(*law, way) for law in laws] for way in (False, True))
    return pair_epsilon(removed, added, steps[~gaussian], delta, float(squares))


def _few_kinds(
    shifts: FloatArray, rate: FloatArray, steps: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Equal kinds of step put together, and free ones left out.

    More than _MOST_KINDS are put together by similar cost: each then counts at the largest shifts
    and the largest rate among its neighbours.
    """
    costs = shifts.max(axis=1) > 0
    rows = np.column_stack([rate, np.sort(shifts, axis=1)])[costs]
    kinds, place = np.unique(rows, axis=0, return_inverse=True)
    counts = np.bincount(place.ravel(), weights=steps[costs], minlength=len(kinds))
    if len(kinds) > _MOST_KINDS:
        order = np.argsort(kinds[:, 0] * kinds[:, 1:].sum(axis=1), kind="stable")
        parts = np.array_split(order, _MOST_KINDS)
        kinds = np.stack([kinds[part].max(axis=0) for part in parts])
        counts = np.array([counts[part].sum() for part in parts])
    return kinds[:, 1:], kinds[:, 0], counts.astype(np.float64)


@lru_cache(maxsize=1024)
def _losses(shifts: bytes, rate: float, tail: float, added: bool) -> Cells:
    rows, alone = Mixture.of_rows(np.frombuffer(shifts), rate, tail), Mixture.centred(1)
    return cells_of(alone, rows.mirrored(), tail) if added else cells_of(rows, alone, tail)


def clipped_rows(log: NormLog, n_rows: IntArray) -> tuple[StepKinds, FloatArray]:
    """What units with these numbers of rows meet if all rows are clipped in every step.

    More than MOST_ROWS count as that many larger rows.

    Returns:
        the kinds; (len(n_rows), n_kinds) steps of each unit under each.
    """
    kinds, steps = clipped_steps(log)
    rows, kind = np.repeat(n_rows, len(kinds)), np.tile(np.arange(len(kinds)), len(n_rows))
    counted = np.minimum(rows, MOST_ROWS)
    of_rows = StepKinds(rows / counted * kinds.shift[kind], kinds.rate[kind], counted)
    return of_rows, np.asarray(np.kron(np.eye(len(n_rows)), steps))


def worst_cases(log: NormLog, method: Method, n_rows: IntArray) -> FloatArray:
    """(len(n_rows),) epsilon that the run guarantees to units with these numbers of rows.

    All rows count at max_grad_norm in every step, so it depends on the settings of the run alone.
    """
    cells, counts = clipped_rows(log, n_rows)
    epsilon = cells.accountant(method).epsilons(counts).epsilon
    if method.accountant == "pld" and np.isfinite(epsilon).all():
        kinds, steps = clipped_steps(log)
        shifts = (np.repeat(kinds.shift[:, None], k, axis=1) for k in n_rows.tolist())
        tight = [unit_epsilon(shift, kinds.rate, steps, method.delta) for shift in shifts]
        epsilon = np.minimum(tight, epsilon)
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
    ...     [[0.5] * 4], recorded_steps=[0], total_steps=10, noise_multiplier=1.0,
    ...     max_grad_norm=1.0, sample_rate=0.1, unit="user", unit_ids=["a", "a", "a", "b"],
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
