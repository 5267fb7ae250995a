"""Which record governs which step, and how often each example met which one-step mechanism. Sensitive.

A *cell* is one step mechanism: (relative_norm, noise_multiplier, sample_rate). An accountant sees only the cells of a
run and, per block of examples, in how many steps each example was in each cell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.step_settings import StepSettings

BETWEEN_RECORDS = ("last", "closest", "worst_case")


AT_CLIPPING_NORM = -1  # stands for a row of a log in which every example is clipped


@dataclass(frozen=True)
class Participations:
    """The histogram of one block of examples over the cells of a run.

    Attributes:
        relative_norms: (n_cells,) contribution as a fraction of max_grad_norm, in [0, 1].
        noise_multiplier: (n_cells,).
        sample_rate: (n_cells,) in (0, 1].
        counts: (n_examples, n_cells) number of steps an example spent in a cell; rows sum to total_steps.
    """

    relative_norms: FloatArray
    noise_multiplier: FloatArray
    sample_rate: FloatArray
    counts: FloatArray

    def select(self, examples: NDArray[np.intp]) -> Participations:
        """The histogram of some examples only."""
        return replace(self, counts=self.counts[examples])


@dataclass(frozen=True)
class Segments:
    """Steps grouped by what governs them.

    Attributes:
        pairs: (n_pairs,) rows r such that steps halfway between records r and r + 1 count at the larger norm.
        row: (n_segments,) a record, or n_records + index into pairs, or AT_CLIPPING_NORM.
        setting: (n_segments,) index into the distinct settings.
        count: (n_segments,) number of steps.
        noise_multiplier, max_grad_norm, sample_rate: (n_settings,) distinct settings.
    """

    pairs: IntArray
    row: IntArray
    setting: IntArray
    count: IntArray
    noise_multiplier: FloatArray
    max_grad_norm: FloatArray
    sample_rate: FloatArray


def segments_of(log: NormLog, between_records: str) -> Segments:
    """Group the steps of a log by governing record and setting.

    Args:
        log: the log.
        between_records: "last" (the last known norm), "closest" (the record closest in time; of two equally close ones
            the larger norm, per example) or "worst_case" (max_grad_norm). Steps before the first record count at
            max_grad_norm whatever is chosen.
    """
    _checks.check_choice("between_records", between_records, BETWEEN_RECORDS)
    rows, starts, pairs = _governing_rows(log.recorded_steps, log.total_steps, between_records)
    lengths = np.diff(np.append(starts, log.total_steps))
    setting_of_step, settings = _distinct_settings(log.settings)
    if setting_of_step is None:
        row, setting, weight = rows, np.zeros(len(rows), np.int64), lengths
    else:
        row, setting, weight = (
            np.repeat(rows, lengths),
            setting_of_step,
            np.ones(log.total_steps, np.int64),
        )
    n_settings = len(settings["noise_multiplier"])
    keys, inverse = np.unique((row + 1) * n_settings + setting, return_inverse=True)
    count = np.bincount(inverse, weights=weight, minlength=len(keys)).astype(np.int64)
    filled = count > 0
    keys, count = keys[filled], count[filled]
    return Segments(
        pairs=pairs, row=keys // n_settings - 1, setting=keys % n_settings, count=count, **settings
    )


def _governing_rows(
    recorded: IntArray, total_steps: int, between_records: str
) -> tuple[IntArray, IntArray, IntArray]:
    """Rows of consecutive runs of steps, the step at which each run starts, and the tied pairs."""
    n_records = len(recorded)
    records = np.arange(n_records)
    no_pairs = np.zeros(0, np.int64)
    if n_records == 0:
        return np.array([AT_CLIPPING_NORM]), np.array([0]), no_pairs
    if between_records == "last":
        rows, starts, pairs = records, recorded, no_pairs
    elif between_records == "worst_case":
        ends = recorded + 1
        rows = np.stack([records, np.full(n_records, AT_CLIPPING_NORM)], axis=1).ravel()
        starts = np.stack([recorded, ends], axis=1).ravel()
        pairs = no_pairs
    else:
        gaps = np.diff(recorded)
        pairs = np.flatnonzero(gaps % 2 == 0)
        switch = (
            recorded[:-1] + gaps // 2 + 1
        )  # the first step that is closer to the later record, without a tie
        tie_starts = recorded[pairs] + gaps[pairs] // 2
        starts = np.concatenate([recorded[:1], switch, tie_starts])
        rows = np.concatenate([records, n_records + np.arange(len(pairs))])
        order = np.argsort(starts, kind="stable")
        rows, starts = rows[order], starts[order]
    if starts[0] > 0:
        rows, starts = np.append(AT_CLIPPING_NORM, rows), np.append(0, starts)
    return rows, starts, pairs


def _distinct_settings(settings: StepSettings) -> tuple[IntArray | None, dict[str, FloatArray]]:
    """Index of each step's setting (None where all steps share one), and the distinct settings."""
    columns = {
        "noise_multiplier": settings.noise_multiplier,
        "max_grad_norm": settings.max_grad_norm,
        "sample_rate": settings.sample_rate,
    }
    index: IntArray | None = None
    for column in columns.values():
        if column.strides == (0,) or column.min() == column.max():  # one value for all steps
            continue
        values, inverse = np.unique(column, return_inverse=True)
        if len(values) > 1:
            index = (
                inverse
                if index is None
                else np.unique(index * len(values) + inverse, return_inverse=True)[1]
            )
    if index is None:
        return None, {name: column[:1].copy() for name, column in columns.items()}
    representative = np.zeros(int(index.max()) + 1, np.int64)
    representative[index] = np.arange(len(index))
    return index, {name: column[representative] for name, column in columns.items()}


def worst_case_participations(segments: Segments) -> Participations:
    """The histogram of one example that is clipped in every step."""
    steps = np.bincount(
        segments.setting, weights=segments.count, minlength=len(segments.noise_multiplier)
    )
    mechanisms, inverse = np.unique(
        np.stack([segments.noise_multiplier, segments.sample_rate], axis=1),
        axis=0,
        return_inverse=True,
    )
    return Participations(
        relative_norms=np.ones(len(mechanisms)),
        noise_multiplier=mechanisms[:, 0],
        sample_rate=mechanisms[:, 1],
        counts=np.bincount(inverse.ravel(), weights=steps)[None, :].astype(np.float64),
    )
