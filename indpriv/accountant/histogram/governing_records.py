"""Which record governs which step. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indpriv import _checks
from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.step_settings import StepSettings

BETWEEN_RECORDS = ("last", "closest", "worst_case")


AT_CLIPPING_NORM = -1  # in place of a record: every example counts at max_grad_norm


@dataclass(frozen=True)
class GoverningRecords:
    """The steps of a log, grouped by the record that governs them and by their settings.

    A step half-way between two records counts at the larger of both norms, example by example: the
    pair is one more record, whose number is n_records + its place in `pairs`.

    Attributes:
        pairs: (n_pairs,) records r such that a step lies half-way between r and r + 1.
        record: (n_groups,) number of a record or pair, ascending, or AT_CLIPPING_NORM.
        setting: (n_groups,) index into the distinct settings.
        steps: (n_groups,) number of steps.
        noise_multiplier, max_grad_norm, sample_rate: (n_settings,) distinct settings.
    """

    pairs: IntArray
    record: IntArray
    setting: IntArray
    steps: IntArray
    noise_multiplier: FloatArray
    max_grad_norm: FloatArray
    sample_rate: FloatArray

    @classmethod
    def of(cls, log: NormLog, between_records: str) -> GoverningRecords:
        """Group the steps of a log.

        between_records: "last" (the last known norm), "closest" (the record closest in time; of two
        equally close ones the larger norm) or "worst_case" (max_grad_norm). Steps before the first
        record count at max_grad_norm in each case.
        """
        _checks.check_choice("between_records", between_records, BETWEEN_RECORDS)
        record, starts, pairs = _governing(log.recorded_steps, log.total_steps, between_records)
        lengths = np.diff(np.append(starts, log.total_steps))
        setting, settings = _distinct_settings(log.settings)
        if setting is None:
            setting = np.zeros(len(record), np.int64)
        else:
            record, lengths = np.repeat(record, lengths), np.ones(log.total_steps, np.int64)
        n_settings = len(settings["noise_multiplier"])
        keys, inverse = np.unique((record + 1) * n_settings + setting, return_inverse=True)
        steps = np.bincount(inverse, weights=lengths, minlength=len(keys)).astype(np.int64)
        keys, steps = keys[steps > 0], steps[steps > 0]
        return cls(pairs, keys // n_settings - 1, keys % n_settings, steps, **settings)

    def always_clipped(self) -> Participations:
        """The histogram of one example that is clipped in every step."""
        pairs = np.stack([self.noise_multiplier, self.sample_rate], axis=1)
        distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
        steps = np.bincount(inverse.ravel()[self.setting], weights=self.steps)
        return Participations(
            np.ones(len(distinct)),
            distinct[:, 0],
            distinct[:, 1],
            steps[None, :].astype(np.float64),
        )


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


def _distinct_settings(settings: StepSettings) -> tuple[IntArray | None, dict[str, FloatArray]]:
    """Index of each step's setting (None if all steps share one), and the distinct settings."""
    columns = {
        "noise_multiplier": settings.noise_multiplier,
        "max_grad_norm": settings.max_grad_norm,
        "sample_rate": settings.sample_rate,
    }
    index: IntArray | None = None
    for column in columns.values():
        if column.strides == (0,) or column.min() == column.max():
            continue
        values, inverse = np.unique(column, return_inverse=True)
        joint = inverse if index is None else index * len(values) + inverse
        index = np.unique(joint, return_inverse=True)[1]
    if index is None:
        return None, {name: column[:1].copy() for name, column in columns.items()}
    example = np.zeros(int(index.max()) + 1, np.int64)
    example[index] = np.arange(len(index))
    return index, {name: column[example] for name, column in columns.items()}
