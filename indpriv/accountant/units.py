"""Epsilon of units of several rows: all rows of a person together. Sensitive.

Each step samples each row of a unit independently. Clipped gradients in one direction are the worst
[8.1], removing a unit costs at least as much as adding it [8.2], and a step with norms s is bounded
by steps with equal norms: n and n + 1 rows of the largest one [8.3] [8.4]. Such a *cell* is (u, n):
n equal rows of shift u. The accountant "pld" composes the losses of the pairs of [8.1] themselves.

Two sums are no bounds [8.5]: that of the rows' epsilons, and that of their RDP.
Numbers in brackets are lines of docs/explanation/proofs.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.sparse import csr_array

from indpriv import _checks
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.accountant.laws import Mixture, cells_of, tail_of
from indpriv.accountant.method import Method, check_poisson_pairs, clipping_norm_cost, owners_of
from indpriv.accountant.pairs import pair_epsilon
from indpriv.accountant.steps import (
    GoverningNorms,
    StepKinds,
    clipped_steps,
    collected,
    neighbours,
    size_of_blocks,
    snapped_rates,
)
from indpriv.norm_log.norm_log import NormLog

MOST_ROWS = 1000  # equal rows of a cell; a unit with more rows is counted as this many larger ones
# Each number of rows up to the first of these has cells; beyond, numbers in this ratio.
_EVERY_NUMBER, _ROWS_RATIO = 64, 1.02
_MAX_LEVELS = 512  # shifts of all levels and settings; more are between nodes of a grid
_MAX_RATES = 32  # distinct sample rates; if there are more, they are rounded up to this many
# Of a grid of shifts. Between nodes a step is shared, which overstates RDP by 1e-4.
_NODE_RATIO, _SMALLEST = 1.02, 1e-3
_ROUNDING = 1e-12  # relative; far more than the floating-point error of sums of norms
_AT_ONCE = 1 << 19  # norms that are summed together
_MOST_KINDS = 200  # of steps of one unit whose losses are computed; more are summarised


@dataclass(frozen=True)
class Units:
    """The rows of each unit."""

    ids: NDArray[np.generic]  # (n_units,) in the order of their first rows
    n_rows: IntArray  # (n_units,) rows of each
    numbers: IntArray  # (n_examples,) place in ids of the unit that each row belongs to

    @classmethod
    def of(cls, log: NormLog) -> "Units | None":
        """The units of a log; None if each row is accounted for itself."""
        if (owners := owners_of(log)) is None:
            return None
        numbers, ids = pd.factorize(owners)
        return cls(np.asarray(ids), np.bincount(numbers, minlength=len(ids)), numbers)

    def __len__(self) -> int:
        return len(self.ids)


def rows_together(log: NormLog, units: Units) -> tuple[NormLog, IntArray]:
    """The log, maybe read, with the rows of units together; (n_units + 1,) where they begin."""
    if (np.diff(units.numbers) < 0).any():
        log = log.take(np.argsort(units.numbers, kind="stable"))
    return log, np.append(0, np.cumsum(units.n_rows))


def first_rows(block: NormLog) -> IntArray:
    """(n_units,) where the rows of each unit of a block begin; they lie together in it."""
    owners = owners_of(block)
    if owners is None:
        return np.arange(block.n_examples)
    return np.flatnonzero(np.append(True, owners[1:] != owners[:-1]))


def row_numbers(largest: int) -> IntArray:
    """Numbers of rows that have cells, up to the first that is at least `largest`, or MOST_ROWS.

    The series is fixed, so that no epsilon depends on how many rows other units have.
    """
    beyond = math.ceil(math.log(MOST_ROWS / _EVERY_NUMBER) / math.log(_ROWS_RATIO))
    series = np.minimum(np.round(_EVERY_NUMBER * _ROWS_RATIO ** np.arange(beyond + 1)), MOST_ROWS)
    numbers = np.unique(np.concatenate([np.arange(1, _EVERY_NUMBER + 1), series])).astype(np.int64)
    return numbers[: int(np.searchsorted(numbers, min(largest, MOST_ROWS))) + 1]


@dataclass(frozen=True)
class UnitCells:
    """Cells (rate, number of rows, node) of equal rows of one shift: the node runs fastest."""

    laws: StepKinds  # of the cells
    norms: GoverningNorms  # which norm of a row counts in which step
    row_numbers: IntArray  # (n_numbers,) see `row_numbers`
    nodes: FloatArray  # (n_nodes,) shifts, ascending from 0, at or between which those of rows lie
    rate: IntArray  # (n_settings,) place of the rate of a cell, by setting of a step

    @classmethod
    def of(cls, log: NormLog, between_records: str, largest_unit: int) -> "UnitCells":
        """The cells of a log whose largest unit has this number of rows."""
        norms, numbers = GoverningNorms.of(log, between_records), row_numbers(largest_unit)
        noise, rates = norms.settings.noise_multiplier, norms.settings.sample_rate
        few = len(np.unique(rates)) <= _MAX_RATES
        apart = 0.0 if few else np.log(rates.max() / rates.min()) / (_MAX_RATES - 1)
        rates, setting = np.unique(snapped_rates(rates, apart, down=False), return_inverse=True)
        nodes = np.unique(norms.codes.table(norms.settings.max_grad_norm) / noise[:, None])
        few_rows = largest_unit <= MOST_ROWS
        if not (norms.codes.direct and len(nodes) <= _MAX_LEVELS and few_rows):
            # 0, then a geometric series
            ends = _SMALLEST / noise.max(), max(1.0, largest_unit / MOST_ROWS) / noise.min()
            n = max(math.ceil(math.log(ends[1] / ends[0]) / math.log(_NODE_RATIO)) + 1, 2)
            nodes = np.append(0.0, np.geomspace(*ends, n) * (1 + _ROUNDING))
        rate, rows, shift = np.meshgrid(rates, numbers, nodes, indexing="ij")
        laws = StepKinds(shift.ravel(), rate.ravel(), rows.ravel())
        return cls(laws, norms, numbers, nodes, setting)

    @property
    def block_size(self) -> int:
        """Number of units at a time."""
        return size_of_blocks(self.norms, self.laws, 4 * self.norms.steps.nnz)

    def counts(self, block: NormLog, starts: IntArray) -> csr_array:
        """Counts over the cells of the units of a block, whose first examples are at `starts`."""
        return collected(self._entries(self.norms.read(block), starts), len(starts), len(self.laws))

    def _entries(
        self, values: NDArray[np.generic], starts: IntArray
    ) -> Iterator[tuple[IntArray, FloatArray]]:
        """(k, n_units) cells and steps, some groups of steps at a time."""
        norms, met = self.norms, self.norms.steps.tocoo()
        n_nodes, chunk = len(self.nodes), max(1, _AT_ONCE // values.shape[1])
        for begin in range(0, met.nnz, chunk):
            part = slice(begin, begin + chunk)
            setting, steps = met.col[part], met.data[part, None].astype(np.float64)
            clip = norms.settings.max_grad_norm[setting, None]
            shift = norms.codes.relative(values[met.row[part]], clip)
            shift /= norms.settings.noise_multiplier[setting, None]
            largest = np.maximum.reduceat(shift, starts, axis=1)
            total = np.add.reduceat(shift, starts, axis=1) * (1 + _ROUNDING)
            # Sharing a step between neighbouring cells is a bound [8.3] [8.4]
            largest = np.maximum(largest, total / MOST_ROWS)
            below, above, up = neighbours(self.nodes, largest, np.positive)
            rows = np.divide(total, largest, out=np.ones(total.shape), where=largest > 0)
            numbers = self.row_numbers.astype(np.float64)
            fewer, more, rest = neighbours(numbers, rows, np.positive)
            first = self.rate[setting, None] * (len(numbers) * n_nodes)
            for node, share in ((below, 1 - up), (above, up)):
                yield first + fewer * n_nodes + node, steps * share * (1 - rest)
                yield first + more * n_nodes + node, steps * share * rest


def unit_epsilons(
    norms: GoverningNorms, block: NormLog, starts: IntArray, delta: float
) -> FloatArray:
    """(n_units,) `unit_epsilon` of the units of a block, whose first examples are at `starts`."""
    values, settings, met = norms.read(block), norms.settings, norms.steps.tocoo()
    clip = settings.max_grad_norm[met.col, None]
    noise = settings.noise_multiplier[met.col, None]
    rate, steps = settings.sample_rate[met.col], met.data.astype(np.float64)
    shifts = (
        norms.codes.relative(values[met.row, first:last], clip) / noise
        for first, last in zip(starts, np.append(starts[1:], block.n_examples), strict=True)
    )
    return np.array([unit_epsilon(shift, rate, steps, delta) for shift in shifts])


def unit_epsilon(shifts: FloatArray, rate: FloatArray, steps: FloatArray, delta: float) -> float:
    """Epsilon of a unit by the losses of its steps, never below the truth; may be inf.

    There is no lower end: if the gradients of its rows cancel out, the unit leaves no trace.

    shifts: (n_kinds, n_rows) contributions of its rows over the noise, by kind of step. rate and
    steps, whole numbers: (n_kinds,).
    """
    rows, rate, steps = _few_kinds(shifts, rate, steps)
    if not len(steps):
        return 0.0
    gaussian, tail = rate >= 1, tail_of(delta, float(steps.sum()))
    squares = np.where(gaussian, np.square(rows.sum(axis=1)), 0.0) @ steps
    sums = Mixture.of_rows(rows[~gaussian], rate[~gaussian], tail)
    alone = Mixture.centred(1)
    ways = cells_of(sums, alone, tail), cells_of(alone, sums.mirrored(), tail)
    return pair_epsilon(ways, steps[~gaussian], delta, float(squares))


def _few_kinds(
    shifts: FloatArray, rate: FloatArray, steps: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Equal kinds of step put together; very many by similar cost, at their largest values."""
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


def clipped_rows(log: NormLog, n_rows: IntArray) -> tuple[StepKinds, FloatArray]:
    """Kinds, and (len(n_rows), n_kinds) steps, of units whose rows are clipped in every step."""
    kinds, steps = clipped_steps(log)
    rows, kind = np.repeat(n_rows, len(kinds)), np.tile(np.arange(len(kinds)), len(n_rows))
    counted = np.minimum(rows, MOST_ROWS)  # more count as that many larger ones
    of_rows = StepKinds(rows / counted * kinds.shift[kind], kinds.rate[kind], counted)
    return of_rows, np.asarray(np.kron(np.eye(len(n_rows)), steps))


def worst_cases(log: NormLog, method: Method, n_rows: IntArray) -> FloatArray:
    """(len(n_rows),) epsilon that the run guarantees to units with these numbers of rows."""
    cells, counts = clipped_rows(log, n_rows)
    epsilon = cells.accountant(method).epsilons(counts)["epsilon"]
    if method.accountant == "pld" and np.isfinite(epsilon).all():
        kinds, steps = clipped_steps(log)
        shifts = (np.repeat(kinds.shift[:, None], k, axis=1) for k in n_rows.tolist())
        tight = [unit_epsilon(shift, kinds.rate, steps, method.delta) for shift in shifts]
        epsilon = np.minimum(tight, epsilon)
    if not np.isfinite(epsilon).all():
        raise refused("refusal.account", "unit_rows", n=int(n_rows[~np.isfinite(epsilon)].min()))
    return epsilon


def cap_rows(log: NormLog, method: Method, caps: Sequence[int]) -> pd.DataFrame:
    """For each cap on the rows of a unit: what it would drop, and the worst case with it.

    The sample rate stays that of the run. The numbers of rows of the units are private themselves,
    so choose a cap without looking at them.

    Args:
        log: the norm log of a run whose unit is not the example; it needs unit_ids.
        method: how to account.
        caps: numbers of rows, each at least 1.

    Returns:
        a row for each cap: cap; rows_kept and rows_dropped, of all units together, if each keeps
        its first `cap` rows; units_affected, which lose rows; and worst_case_epsilon, that the run
        would guarantee to every unit.

    Raises:
        InputError: a bad cap, a log in which each row is its own unit, or one whose batches are
            not the Poisson samples that a cap is accounted for.

    >>> log = NormLog.from_arrays(
    ...     [[0.5] * 4], recorded_steps=[0], total_steps=10, noise_multiplier=1.0,
    ...     max_grad_norm=1.0, sample_rate=0.1, unit="user", unit_ids=["a", "a", "a", "b"],
    ... )
    >>> half = cap_rows(log, Method(delta=1e-5), [2])
    >>> half[["rows_dropped", "units_affected"]].to_numpy().tolist()
    [[1, 1]]
    """
    if (units := Units.of(log)) is None:
        raise refused("refusal.account", "no_units")
    if method.participation == "known":
        raise refused("refusal.account", "known_cap")
    check_poisson_pairs(log, method.relation_of(log.neighbouring), "a cap on rows")
    wanted = np.array([_checks.check_positive_int("cap", cap) for cap in caps], dtype=np.int64)
    most, place = np.unique(np.minimum(wanted, units.n_rows.max()), return_inverse=True)
    cost = clipping_norm_cost(log, log.neighbouring, most.astype(np.float64))
    epsilon = (worst_cases(log, method, most) + cost)[place]
    kept = np.minimum(units.n_rows, wanted[:, None])
    return pd.DataFrame(
        {
            "cap": wanted,
            "rows_kept": kept.sum(axis=1),
            "rows_dropped": log.n_examples - kept.sum(axis=1),
            "units_affected": (kept < units.n_rows).sum(axis=1),
            "worst_case_epsilon": epsilon,
        }
    )
