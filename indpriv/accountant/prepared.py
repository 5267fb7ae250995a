"""An account that is ready to be made block by block; what does not depend on the example is done. Sensitive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv.accountant.blocks import in_blocks
from indpriv.accountant.claims import claim_of, uses_batch_norms
from indpriv.accountant.histogram.cells import Cells, Mechanisms
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.governing_records import (
    Participations,
    segments_of,
    worst_case_participations,
)
from indpriv.accountant.histogram.governing_rows import Block
from indpriv.accountant.histogram.grid import condensed
from indpriv.accountant.histogram.layout import Governing, cells_of, governing_of, whole_cells_of
from indpriv.accountant.method import Method
from indpriv.accountant.pld.brackets import pld_epsilon
from indpriv.accountant.rdp_orders import RdpAccountant
from indpriv.epsilon_table import Account
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

_HISTOGRAM_BYTES = 1 << 26  # of one block of examples: constant memory whatever their number
_SEARCH_BYTES = 4096  # that the search for the best order takes for one example
_MANY_MECHANISMS = (
    5000  # distinct settings beyond which the worst case is summed over nodes, within 1e-6
)


@dataclass(frozen=True)
class PreparedLog:
    """A log whose steps are laid out, and what a result of it may be called.

    Attributes:
        log: what is accounted. governing: what governs its steps.
        cells: for RDP.
        whole_cells: whose counts are whole numbers, for loss distributions; two, rounded up and down, where cells are
            nodes of a grid; none for RDP alone.
        claim, claim_reason, account: what every result carries.
    """

    log: NormLog
    governing: Governing
    cells: Cells
    whole_cells: tuple[Cells, ...]
    claim: str
    claim_reason: str
    account: Account

    @classmethod
    def of(cls, log: NormLog, method: Method) -> PreparedLog:
        """Check that a log can be accounted, and lay out its steps; raises and warns as `indpriv.account`."""
        _check_units(log)
        if method.delta * log.n_examples >= 1:
            _checks.warn_caller(
                f"delta={method.delta:g} is at least 1/n = {1 / log.n_examples:g}: it would allow publishing a random "
                "example in full; pass a delta well below 1/n"
            )
        if not uses_batch_norms(log, method.between_records):
            log = replace(log, batch_norms=None)
        governing = governing_of(log, method.between_records)
        cells = cells_of(governing)
        claim, reason = claim_of(log, method.between_records)
        account = account_of(log, method)
        whole = () if method.accountant == "rdp" else whole_cells_of(governing, cells)
        return cls(log, governing, cells, whole, claim, reason, account)

    @property
    def block_size(self) -> int:
        """Examples whose histograms are held at a time."""
        dense = max((8 * len(cells.mechanisms) for cells in self.whole_cells), default=0)
        return max(
            1,
            _HISTOGRAM_BYTES
            // (
                max(self.cells.bytes_per_example, dense)
                + self.governing.bytes_per_example
                + _SEARCH_BYTES
            ),
        )


def account_of(log: NormLog, method: Method) -> Account:
    """What an epsilon of this log by this method means."""
    return Account(
        delta=method.delta,
        unit=log.unit,
        neighbouring=log.neighbouring,
        sampler=log.sampler,
        accountant=method.accountant,
        conversion=method.conversion,
        between_records=method.between_records,
        rounding=0.0 if log.levels is None else log.levels.rounding,
        rounding_mode="none" if log.levels is None else log.levels.rounding_mode,
        total_steps=log.total_steps,
        recorded_share=log.coverage,
    )


def _check_units(log: NormLog) -> None:
    """Refuse units of several rows, which only `indpriv.account` takes together; warn where rows share people."""
    if log.unit_ids is None:
        return
    n_units = len(pd.unique(log.unit_ids))
    if n_units == log.n_examples:
        return
    if log.unit == "example":
        _checks.warn_caller(
            f'unit="example", but the {log.n_examples} rows belong to {n_units} units (unit_ids): each epsilon is of one row, '
            'and a person with several rows has more; declare unit="user" for the epsilon of people'
        )
        return
    raise InputError(
        f'unit="{log.unit}" has {n_units} units for {log.n_examples} rows: only indpriv.account takes several rows of one '
        f'{log.unit} together; account rows with unit="example"'
    )


@dataclass(frozen=True)
class WorstSteps:
    """The steps of an example that is clipped in each: the histogram of one example.

    Attributes:
        shared: for RDP. up, down: in whole numbers of steps, never better and never worse than the run.
    """

    shared: Participations
    up: Participations
    down: Participations

    @classmethod
    def of(cls, log: NormLog) -> WorstSteps:
        """The steps of a run; very many settings are summed over the nodes of a grid."""
        exact = worst_case_participations(segments_of(log, "last"))
        if len(exact.sample_rate) <= _MANY_MECHANISMS:
            return cls(exact, exact, exact)
        return cls(*(condensed(exact, between_nodes=rule) for rule in ("share", "up", "down")))

    def rdp_epsilon(self, method: Method) -> float:
        """The Rényi bound of epsilon; InputError where there is none."""
        steps = self.shared
        mechanisms = Mechanisms(steps.relative_norms, steps.noise_multiplier, steps.sample_rate)
        rdp = RdpAccountant(
            mechanisms, delta=method.delta, conversion=method.conversion, orders=method.rdp_orders
        )
        bound = float(rdp.epsilons(DenseCounts(steps.counts)).epsilon[0])
        if not np.isfinite(bound):
            raise InputError(
                f"noise_multiplier={steps.noise_multiplier.min():g} leaves no finite epsilon; a run with next to no "
                "noise has no privacy to account: check the optimizer's noise multiplier"
            )
        return bound


@dataclass(frozen=True)
class WorstCase:
    """Epsilon of an example at max_grad_norm in every step, its lower end, and its RDP bound."""

    epsilon: float
    epsilon_lower: float
    rdp_epsilon: float

    @classmethod
    def of(cls, log: NormLog, method: Method) -> WorstCase:
        """The worst case of a run, which depends on its settings alone."""
        steps = WorstSteps.of(log)
        bound = steps.rdp_epsilon(method)
        if method.accountant == "rdp":
            return cls(bound, 0.0, bound)
        upper = pld_epsilon(steps.up, delta=method.delta, rdp_upper=np.array([bound]))
        lower = upper
        if steps.down is not steps.up:
            lower = pld_epsilon(steps.down, delta=method.delta, rdp_upper=np.array([bound]))
        return cls(float(upper.epsilon[0]), float(lower.epsilon_lower[0]), bound)


@dataclass(frozen=True)
class EpsilonBlock:
    """Epsilons of the examples at positions start to stop of the log; arrays have shape (stop - start,)."""

    start: int
    stop: int
    epsilon: FloatArray
    epsilon_lower: FloatArray
    epsilon_upper: FloatArray
    details: dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class PreparedAccount:
    """Everything about an account that does not depend on the example; make one with `prepare_account`.

    Attributes:
        prepared: the log, laid out.
        method: how it is accounted. rdp: the RDP accountant of its cells.
        worst_case: of its settings.
    """

    prepared: PreparedLog
    method: Method
    rdp: RdpAccountant
    worst_case: WorstCase

    def blocks(
        self, start: int = 0, stop: int | None = None, *, workers: int | None = None
    ) -> Iterator[EpsilonBlock]:
        """Yield the epsilons of consecutive blocks of the examples at positions start to stop.

        Memory does not grow with their number. workers: threads, default one for each core.
        """
        size = self.prepared.block_size
        yield from in_blocks(
            self.prepared.log, self._block, size=size, start=start, stop=stop, workers=workers
        )

    def _block(self, start: int, stop: int, block: Block) -> EpsilonBlock:
        rows = self.prepared.governing.read(block)
        found = self.rdp.epsilons(self.prepared.cells.counts(rows))
        worst = self.worst_case
        # The divergence grows with the norm, so the worst case bounds everybody; its search may have found a better
        # order than an example's own.
        epsilon = np.minimum(found.epsilon, worst.rdp_epsilon)
        lower = np.zeros(stop - start)
        details: dict[str, NDArray[np.generic]] = {
            "best_order": found.best_order,
            "order_at_boundary": found.order_at_boundary,
        }
        if self.method.accountant == "pld":
            ends = [
                pld_epsilon(cells.participations(rows), delta=self.method.delta, rdp_upper=epsilon)
                for cells in self.prepared.whole_cells
            ]
            details = {"bracket": ends[0].bracket, "rdp_epsilon": epsilon}
            epsilon = np.minimum(ends[0].epsilon, worst.epsilon)
            lower = np.minimum(ends[-1].epsilon_lower, epsilon)
        close = np.flatnonzero(epsilon >= worst.epsilon * (1 - 1e-3))
        if len(close):
            clipped = close[self.prepared.governing.always_clipped(block.take(close))]
            epsilon[clipped], lower[clipped] = worst.epsilon, worst.epsilon_lower
        return EpsilonBlock(start, stop, epsilon, lower, epsilon, details)
