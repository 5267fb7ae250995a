"""The histogram of a log: in how many steps each example met each one-step mechanism. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.blocks import Block
from indpriv.accountant.histogram.cells import Cells
from indpriv.accountant.histogram.counts import Counts
from indpriv.accountant.histogram.governing_norms import GoverningNorms
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.norm_log.norm_log import NormLog


@dataclass(frozen=True)
class Histogram:
    """How the norms of a log are counted.

    Attributes:
        norms: which norm of an example counts in which step.
        cells: what counts are of.
    """

    norms: GoverningNorms
    cells: Cells

    @classmethod
    def of(cls, log: NormLog, between_records: str, between_nodes: str = "share") -> Histogram:
        """Lay out the steps of a log.

        Norms without rounding and very many settings are counted at the nodes of a lattice.

        Args:
            log: the log.
            between_records: what governs steps between records; see `indpriv.account`.
            between_nodes: "share" a step between neighbouring nodes, which is for RDP alone, or
                count it at one of them, "up" or "down".
        """
        norms = GoverningNorms.of(log, between_records, between_nodes)
        return cls(norms, Cells.of(norms.records, norms.codes))

    @property
    def bytes_per_example(self) -> int:
        """Memory that the counts of one example take, and what they are made from."""
        return self.norms.bytes_per_example + self.cells.bytes_per_example

    @property
    def exact(self) -> bool:
        """Whether nothing is counted at the nodes of a lattice."""
        return self.norms.codes.exact and self.cells.exact

    def divergences(self, orders: FloatArray) -> FloatArray:
        """(n_orders, n) Rényi divergences of one count of each column of the counts."""
        return self.cells.divergences(orders)

    def counts(self, block: Block) -> Counts:
        """Counts of a block of examples."""
        norms = self.norms
        if norms.log.batch_norms is not None and self.cells.dense:
            return self._counts_of_spans(block)
        return self.cells.counts(norms.codes.located(norms.read(block)))

    def participations(self, block: Block) -> Participations:
        """The histogram of a block over mechanisms; whole numbers unless nodes share steps."""
        return self.cells.participations(self.counts(block))

    def _counts_of_spans(self, block: Block) -> Counts:
        norms = self.norms
        spans = norms.known(block).spans(norms.between_records, norms.log.total_steps)
        n_codes, n_settings = norms.codes.n_codes, len(norms.records.sample_rate)
        counts = np.zeros((spans.n_examples, n_settings * n_codes))
        tied = np.flatnonzero(spans.tie)
        end = spans.begin + spans.length
        parts = [
            (spans.example, spans.norm, spans.begin, end),
            (spans.example[tied], spans.tie_norm[tied], end[tied], end[tied] + 1),
        ]
        for example, values, begin, stop in parts:
            start = example.astype(np.int64) * n_codes
            for code, share in norms.codes.located(values):
                for setting, before in enumerate(self._steps_before):
                    steps = before[stop] - before[begin]
                    weights = steps if share is None else steps * share
                    seen = np.bincount(
                        start + code, weights=weights, minlength=spans.n_examples * n_codes
                    )
                    first = setting * n_codes
                    counts[:, first : first + n_codes] += seen.reshape(-1, n_codes)
        return self.cells.mechanism_counts(counts)

    @property
    def _steps_before(self) -> IntArray:
        """(n_settings, total_steps + 1) steps under each setting before each step."""
        records = self.norms.records
        setting = np.empty(len(records.record), np.int64)
        setting[records.record] = records.setting
        under = setting == np.arange(len(records.sample_rate))[:, None]
        return np.cumsum(np.pad(under, ((0, 0), (1, 0))), axis=1)


def whole_histograms(log: NormLog, between_records: str) -> tuple[Histogram, Histogram]:
    """Histograms with whole numbers of steps, as loss distributions need: rounded up, and down."""
    up = Histogram.of(log, between_records, "up")
    return up, up if up.exact else Histogram.of(log, between_records, "down")
