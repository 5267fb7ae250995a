"""The norms that govern the steps of a log: those of full records and of batches. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv.accountant.blocks import Block
from indpriv.accountant.histogram.governing_records import AT_CLIPPING_NORM, GoverningRecords
from indpriv.accountant.histogram.norm_codes import NormCodes, counted_max_grad_norm
from indpriv.accountant.histogram.spans import KnownNorms
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.step_settings import StepSettings

_NORM_BYTES = 64  # that the spans of one norm take while they are made


@dataclass(frozen=True)
class GoverningNorms:
    """Which norm of an example counts in which step; its methods read blocks of examples.

    Attributes:
        log: the log.
        between_records: what governs steps between records.
        codes: the bounds at which norms are counted.
        records: which record governs which steps; with batch norms, each step has its own.
    """

    log: NormLog
    between_records: str
    codes: NormCodes
    records: GoverningRecords

    @classmethod
    def of(cls, log: NormLog, between_records: str, between_nodes: str = "share") -> GoverningNorms:
        """See Histogram.of."""
        codes, seen, rule = NormCodes.of(log, between_nodes), log, between_records
        if not codes.exact:
            noise, rate = log.settings.noise_multiplier, log.settings.sample_rate
            counted = counted_max_grad_norm(log.settings.max_grad_norm, between_nodes)
            seen = replace(log, settings=StepSettings(noise, counted, rate))
        if log.batch_norms is not None:
            steps = np.arange(log.total_steps)
            seen, rule = replace(seen, recorded_steps=steps, rows=steps, batch_norms=None), "last"
        return cls(log, between_records, codes, GoverningRecords.of(seen, rule))

    @property
    def bytes_per_example(self) -> int:
        """Memory that reading one example takes."""
        values = 1 if self.codes.direct else 64
        if self.log.batch_norms is None:
            return values * (self.log.n_records + len(self.records.pairs))
        norms = self.log.n_records + 1 + int(self.log.settings.sample_rate.sum())
        return _NORM_BYTES * norms + values * self.log.total_steps

    def read(self, block: Block) -> NDArray[Any]:
        """(n_rows, n_examples) values that govern: of each record, then of each tied pair.

        With batch norms: of each step.
        """
        if self.log.batch_norms is not None:
            return self.known(block).spans(self.between_records, self.log.total_steps).by_step()
        rows, pairs = self.full(block), self.records.pairs
        if not len(pairs):
            return rows
        return np.concatenate([rows, np.maximum(rows[pairs], rows[pairs + 1])])

    def known(self, block: Block) -> KnownNorms:
        """The norms of full records and batch norms together."""
        entries = block.batch_norms
        units = self.log.settings.max_grad_norm[entries.step]
        entries = replace(entries, norm=self.codes.read(entries.norm, units))
        return KnownNorms.of(
            self.full(block),
            self.log.recorded_steps,
            entries,
            clipped=self.codes.clipped,
            total_steps=self.log.total_steps,
        )

    def always_clipped(self, block: Block) -> NDArray[np.bool_]:
        """(n_examples,) whether an example counts at max_grad_norm in every step of the run."""
        values, records = self.read(block), self.records
        largest = np.zeros(len(values))  # max_grad_norm that a row governs
        known = records.record != AT_CLIPPING_NORM
        clips = records.max_grad_norm[records.setting[known]]
        np.maximum.at(largest, records.record[known], clips)
        largest = np.broadcast_to(np.maximum(largest, 1e-300)[:, None], values.shape)
        return np.asarray((self.codes.relative(values, largest) >= 1.0).all(axis=0))

    def full(self, block: Block) -> NDArray[Any]:
        """(n_records, n_examples) comparable values of full records."""
        units = self.log.settings.max_grad_norm[self.log.recorded_steps]
        return self.codes.read(block.rows, units)
