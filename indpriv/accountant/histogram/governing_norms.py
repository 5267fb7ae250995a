"""The norms that govern the steps of a log: those of full records and of batches. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import IntArray
from indpriv.accountant.histogram.norm_codes import NormCodes, counted_max_grad_norm
from indpriv.accountant.histogram.spans import KnownNorms
from indpriv.norm_log.batch_norms import BatchNorms
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.step_settings import StepSettings

BETWEEN_RECORDS = ("last", "closest", "worst_case")
AT_CLIPPING_NORM = -1  # in place of a record: every example counts at max_grad_norm

_NORM_BYTES = 64  # that the spans of one norm take while they are made


@dataclass(frozen=True)
class GoverningNorms:
    """Which norm of an example counts in which step; its methods read blocks of examples.

    Steps are grouped by the record that governs them and by their settings. A step half-way between
    two records counts at the larger of both norms, example by example: the pair is one more record,
    whose number is n_records + its place in `pairs`. With batch norms, each step is a record.

    Attributes:
        log: the log.
        between_records: what governs steps between records.
        codes: the bounds at which norms are counted.
        pairs: (n_pairs,) records r such that a step lies half-way between r and r + 1.
        record: (n_groups,) number of a record or pair, ascending, or AT_CLIPPING_NORM.
        setting: (n_groups,) index into the distinct settings.
        steps: (n_groups,) number of steps.
        settings: the distinct ones, (n_settings,) each.
    """

    log: NormLog
    between_records: str
    codes: NormCodes
    pairs: IntArray
    record: IntArray
    setting: IntArray
    steps: IntArray
    settings: StepSettings

    @classmethod
    def of(cls, log: NormLog, between_records: str, between_nodes: str = "share") -> GoverningNorms:
        """Group the steps of a log; see `Histogram.of`."""
        _checks.check_choice("between_records", between_records, BETWEEN_RECORDS)
        codes, settings = NormCodes.of(log, between_nodes), log.settings
        if not codes.exact:
            counted = counted_max_grad_norm(settings.max_grad_norm, between_nodes)
            settings = replace(settings, max_grad_norm=counted)
        recorded, rule = log.recorded_steps, between_records
        if log.batch_norms is not None:
            recorded, rule = np.arange(log.total_steps), "last"
        record, starts, pairs = _governing(recorded, log.total_steps, rule)
        lengths = np.diff(np.append(starts, log.total_steps))
        setting, distinct = settings.distinct()
        if setting is None:
            setting = np.zeros(len(record), np.int64)
        else:
            record, lengths = np.repeat(record, lengths), np.ones(log.total_steps, np.int64)
        keys, inverse = np.unique((record + 1) * len(distinct) + setting, return_inverse=True)
        steps = np.bincount(inverse, weights=lengths, minlength=len(keys)).astype(np.int64)
        keys, steps = keys[steps > 0], steps[steps > 0]
        record, setting = keys // len(distinct) - 1, keys % len(distinct)
        return cls(log, between_records, codes, pairs, record, setting, steps, distinct)

    @property
    def bytes_per_example(self) -> int:
        """Memory that reading one example takes."""
        values = 1 if self.codes.direct else 64
        if self.log.batch_norms is None:
            return values * (self.log.n_records + len(self.pairs))
        norms = self.log.n_records + 1 + int(self.log.settings.sample_rate.sum())
        return _NORM_BYTES * norms + values * self.log.total_steps

    def read(self, block: NormLog) -> NDArray[Any]:
        """(n_rows, n_examples) values that govern: of each record, then of each tied pair.

        With batch norms: of each step.
        """
        if self.log.batch_norms is not None:
            return self.known(block).spans(self.between_records, self.log.total_steps).by_step()
        rows = self.full(block)
        if not len(self.pairs):
            return rows
        return np.concatenate([rows, np.maximum(rows[self.pairs], rows[self.pairs + 1])])

    def known(self, block: NormLog) -> KnownNorms:
        """The norms of full records and batch norms together, of a log with batch norms."""
        entries = cast(BatchNorms, block.batch_norms).read(0, block.n_examples)
        units = self.log.settings.max_grad_norm[entries.step]
        return KnownNorms.of(
            self.full(block),
            self.log.recorded_steps,
            replace(entries, norm=self.codes.read(entries.norm, units)),
            clipped=self.codes.clipped,
            total_steps=self.log.total_steps,
        )

    def always_clipped(self, block: NormLog) -> NDArray[np.bool_]:
        """(n_examples,) whether an example counts at max_grad_norm in every step of the run."""
        values, known = self.read(block), self.record != AT_CLIPPING_NORM
        largest = np.full(len(values), 1e-300)  # max_grad_norm that a row governs
        clips = self.settings.max_grad_norm[self.setting[known]]
        np.maximum.at(largest, self.record[known], clips)
        relative = self.codes.relative(values, np.broadcast_to(largest[:, None], values.shape))
        return np.asarray((relative >= 1.0).all(axis=0))

    def full(self, block: NormLog) -> NDArray[Any]:
        """(n_records, n_examples) comparable values of full records."""
        units = self.log.settings.max_grad_norm[self.log.recorded_steps]
        return self.codes.read(block.read(), units)


def _governing(
    recorded: IntArray, total_steps: int, between_records: str
) -> tuple[IntArray, IntArray, IntArray]:
    """Records that govern consecutive stretches of steps, the first step of each, and the pairs."""
    n_records, nothing = len(recorded), np.zeros(0, np.int64)
    records = np.arange(n_records)
    if n_records == 0:
        return np.array([AT_CLIPPING_NORM]), np.array([0]), nothing
    if between_records == "last":
        governing, starts, pairs = records, recorded, nothing
    elif between_records == "worst_case":
        clipped = np.full(n_records, AT_CLIPPING_NORM)
        governing = np.stack([records, clipped], axis=1).ravel()
        starts, pairs = np.stack([recorded, recorded + 1], axis=1).ravel(), nothing
    else:
        gaps = np.diff(recorded)
        pairs = np.flatnonzero(gaps % 2 == 0)
        closer_to_next = recorded[:-1] + gaps // 2 + 1
        half_way = recorded[pairs] + gaps[pairs] // 2
        starts = np.concatenate([recorded[:1], closer_to_next, half_way])
        governing = np.append(records, n_records + np.arange(len(pairs)))
        order = np.argsort(starts, kind="stable")
        governing, starts = governing[order], starts[order]
    if starts[0] > 0:
        governing, starts = np.append(AT_CLIPPING_NORM, governing), np.append(0, starts)
    return governing, starts, pairs
