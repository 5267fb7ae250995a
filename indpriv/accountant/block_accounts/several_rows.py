"""The account of units of which some have several rows; see units.py for the proofs. Sensitive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv._progress import Advance
from indpriv.accountant.block_accounts.account import (
    BlockAccount,
    first_rows,
    rows_together,
    tables_of_epsilons,
)
from indpriv.accountant.block_accounts.examples import ExampleWork, example_work
from indpriv.accountant.claims import ESTIMATE, claim_of
from indpriv.accountant.engine import Epsilons
from indpriv.accountant.histogram.counts import Counts
from indpriv.accountant.histogram.unit_cells import UnitCells
from indpriv.accountant.method import Method
from indpriv.accountant.pld.unit_losses import unit_steps
from indpriv.accountant.prepared import (
    account_of,
    as_read,
    block_size,
    check_coins,
    warn_of_delta,
    with_norms_it_uses,
)
from indpriv.accountant.rdp_engine import rdp_bounds
from indpriv.accountant.rdp_orders import RdpAccountant
from indpriv.accountant.relations.pairs import uses_pairs
from indpriv.accountant.units import Units, tight_bounds, worst_cases
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

_BLOCK_BYTES = 1 << 26  # of codes and counts of a block of units


@dataclass(frozen=True)
class UnitWork:
    """See BlockWork. Units of one row are accounted like any other example.

    Attributes:
        method: of the account.
        cells: how the norms of units with several rows are counted.
        rdp: turns these counts into epsilons.
        examples: the work of units of one row; None if there are none.
        n_rows: (n,) numbers of rows that units have, ascending.
        worst: (n,) epsilon that the run guarantees to units with as many rows.
    """

    method: Method
    cells: UnitCells
    rdp: RdpAccountant
    examples: ExampleWork | None
    n_rows: IntArray
    worst: FloatArray

    def watched(self, advance: Advance) -> UnitWork:
        """See BlockWork."""
        if self.examples is None:
            return self
        return replace(self, examples=self.examples.watched(advance))

    def filled(self, block: NormLog) -> UnitWork:
        """See BlockWork."""
        n_rows = _rows_of_units(block)
        one, examples = n_rows == 1, self.examples
        if examples is not None and one.any():
            examples = examples.filled(_alone(block, n_rows))
        if not one.all():
            self.rdp.epsilons(self._counts(self._of_several_rows(block, n_rows)))
        return replace(self, examples=examples)

    def block(self, block: NormLog) -> Epsilons:
        """Bounds of each unit; batch norms count for units of one row only."""
        n_rows = _rows_of_units(block)
        worst = self.worst[np.searchsorted(self.n_rows, n_rows)]
        one = n_rows == 1
        parts = []
        if self.examples is not None and one.any():
            parts.append((one, self.examples.block(_alone(block, n_rows))))
        if not one.all():
            found = self._several(self._of_several_rows(block, n_rows))
            # The divergence grows with every norm, so the worst case of as many rows is a bound.
            epsilon = np.minimum(found.epsilon, worst[~one])
            parts.append((~one, replace(found, epsilon=epsilon)))
        found = _interleaved(parts)
        details = {"n_rows": n_rows, "unit_worst_case": worst, **found.details}
        return replace(found, details=details)

    def _of_several_rows(self, block: NormLog, n_rows: IntArray) -> NormLog:
        """The units of several rows, as they are counted."""
        rows, one = replace(block, batch_norms=None), n_rows == 1
        if one.any():
            rows = rows.take(np.flatnonzero(np.repeat(~one, n_rows)))
        return as_read(rows, self.method.preset)

    def _counts(self, block: NormLog) -> Counts:
        return self.cells.counts(block, first_rows(block))

    def _several(self, block: NormLog) -> Epsilons:
        """Bounds of units of several rows, before they are limited by their worst case."""
        found = rdp_bounds(self.rdp.epsilons(self._counts(block)))
        if self.method.accountant != "pld":
            return found
        steps = unit_steps(self.cells.norms, block, first_rows(block))
        tight = tight_bounds(steps, self.method, found.epsilon)
        limit = {"true_positive_limit": found.details["true_positive_limit"]}
        return replace(tight, details={**tight.details, **limit})


def _rows_of_units(block: NormLog) -> IntArray:
    """(n_units,) number of rows of each unit of a block."""
    return np.diff(np.append(first_rows(block), block.n_examples))


def _alone(block: NormLog, n_rows: IntArray) -> NormLog:
    """The units of one row, as examples."""
    return replace(block.take(first_rows(block)[n_rows == 1]), unit_ids=None)


def _interleaved(parts: Sequence[tuple[BoolArray, Epsilons]]) -> Epsilons:
    """The bounds of all units, from those of the ones that each mask (n_units,) chooses."""
    n, names = len(parts[0][0]), parts[0][1].details
    epsilon, lower = np.empty((2, n))
    details = {
        name: np.empty(n, np.result_type(*(found.details[name] for _, found in parts)))
        for name in names
    }
    for chosen, found in parts:
        epsilon[chosen], lower[chosen] = found.epsilon, found.epsilon_lower
        for name, values in details.items():
            values[chosen] = found.details[name]
    return Epsilons(epsilon, lower, details)


def unit_blocks(log: NormLog, units: Units, method: Method) -> BlockAccount[Epsilons]:
    """The account of the units of a log, some of several rows.

    If the rows of a unit are not neighbours in the log, all its records are read into memory, one
    byte per norm.

    Raises:
        InputError: a relation of which there is no account of several rows, or rows share coins.
    """
    if uses_pairs(log, method):
        what = "truncated batches" if log.truncation else 'neighbouring="replace_one"'
        raise InputError(
            f"{what}: there is no account of several rows of one {log.unit} with secret "
            'participation; pass participation="known"'
        )
    check_coins(log)
    warn_of_delta(log, method)
    log, first_row = rows_together(log, units)
    read = as_read(log, method.preset)
    n_rows = np.unique(units.n_rows)
    worst, claim = worst_cases(read, method, n_rows), claim_of(_rows(read), method.between_records)
    cells = UnitCells.of(_rows(read), method.between_records, int(n_rows[-1]))
    size, examples = max(1, _BLOCK_BYTES // cells.bytes_per_unit), None
    batch_norms = None
    if n_rows[0] == 1:
        single = with_norms_it_uses(replace(read, unit_ids=None), method)
        examples, batch_norms = example_work(single, method), single.batch_norms
        worst[0] = examples.engine.worst_case.epsilon[0]
        size = min(size, block_size(examples.engine.bytes_per_example))
        of_single = claim_of(single, method.between_records)
        claim = of_single if of_single[0] == ESTIMATE else claim
    account = replace(account_of(read, method), rows_per_unit=int(n_rows[-1]))
    return BlockAccount(
        replace(log, batch_norms=batch_norms),
        units.ids,
        UnitWork(method, cells, RdpAccountant(cells, method), examples, n_rows, worst),
        tables_of_epsilons(float(worst.max()), claim, account),
        size,
        first_row,
    )


def _rows(log: NormLog) -> NormLog:
    """The log without batch norms: they are norms of single rows at single steps."""
    return replace(log, batch_norms=None)
