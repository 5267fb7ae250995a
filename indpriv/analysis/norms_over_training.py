"""What drives individual epsilon: gradient norms over training, by class. Sensitive.

After the paper's Figure 3: an example's epsilon adds up its norms, and norms fall as the model
learns.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from indpriv._arrays import BoolArray, FloatArray, IntArray
from indpriv._columns import partition
from indpriv.analysis.groups.group_rows import mean_by_group
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.levels import Codes
from indpriv.norm_log.norm_log import NormLog

_MOST_RECORDS = 60  # points of a line; of more records, evenly spaced ones are read
_MOST_CLASSES = 20  # more labels are not classes, or a figure cannot distinguish them
_AT_EACH_END = 10  # number of examples named


@dataclass(frozen=True)
class Drivers:
    """Norms over training, and the examples at both ends.

    Where training clipped individually, the log holds clip levels, headroom included, not norms.

    Attributes:
        steps: (n_steps,) of the records shown.
        classes: names; empty where labels are unknown or too many to be classes.
        median_norm: (n_classes, n_steps) median gradient norm of each class over max_grad_norm,
            before clipping; clipped norms are known up to the log's scale. None without examples.
        clipped_share: (n_steps,) share of all examples whose norm is above max_grad_norm.
        clipped_share_by_class: (n_classes, n_steps).
        most_protected, least_protected: ids of the examples with the smallest and the largest
            epsilon.
        n_at_most, n_at_least: number of examples that share the largest and the smallest of these
            epsilons.
    """

    steps: tuple[int, ...]
    classes: tuple[str, ...]
    median_norm: tuple[tuple[float | None, ...], ...]
    clipped_share: tuple[float, ...]
    clipped_share_by_class: tuple[tuple[float | None, ...], ...]
    most_protected: tuple[Any, ...]
    least_protected: tuple[Any, ...]
    n_at_least: int
    n_at_most: int


def describe_drivers(log: NormLog, table: EpsilonTable, train: pd.DataFrame | None) -> Drivers:
    """Describe what made the epsilons of a table.

    `train` holds the training examples in the log's order; None where labels are unknown.
    """
    classes, codes = _classes(train, log.n_examples)
    shown = evenly_spaced_records(log, _MOST_RECORDS)
    medians: list[list[float | None]] = []
    clipped: list[tuple[float, list[float | None]]] = []
    for row in shown:
        record = read_one(log, row)
        medians.append(_medians(record, codes, len(classes)))
        shares = mean_by_group(record.clipped.astype(np.float64), codes, len(classes))
        clipped.append((float(record.clipped.mean()), shares))
    order = np.argsort(table.epsilon, kind="stable")
    lowest, highest = table.epsilon[order[0]], table.epsilon[order[-1]]
    return Drivers(
        steps=tuple(log.recorded_steps[shown].tolist()),
        classes=classes,
        median_norm=tuple(
            tuple(record[code] for record in medians) for code in range(len(classes))
        ),
        clipped_share=tuple(share for share, _ in clipped),
        clipped_share_by_class=tuple(
            tuple(shares[code] for _, shares in clipped) for code in range(len(classes))
        ),
        most_protected=tuple(table.example_ids[order[:_AT_EACH_END]].tolist()),
        least_protected=tuple(table.example_ids[order[::-1][:_AT_EACH_END]].tolist()),
        n_at_least=int((table.epsilon == lowest).sum()),
        n_at_most=int((table.epsilon == highest).sum()),
    )


def _classes(train: pd.DataFrame | None, n: int) -> tuple[tuple[str, ...], IntArray]:
    if train is None:
        return (), np.zeros(n, dtype=np.int64)
    labels = partition(train, train.iloc[:0], "label", max_values=None)
    if len(labels.names) > _MOST_CLASSES:
        return (), np.zeros(n, dtype=np.int64)
    return labels.names, labels.train_codes


@dataclass(frozen=True)
class Record:
    """The norms of all examples at one step.

    Attributes:
        codes: (n_examples,) into norms.
        norms: over max_grad_norm, increasing.
        clipped: (n_examples,) whether the norm is above max_grad_norm.
    """

    codes: IntArray
    norms: FloatArray
    clipped: BoolArray


def evenly_spaced_records(log: NormLog, most: int) -> list[int]:
    """Positions of at most this many readable records, with the first and the last of them."""
    rows = np.flatnonzero(~np.isin(log.recorded_steps, log.unreadable_steps))
    places = np.linspace(0, len(rows) - 1, most).round() if len(rows) else np.zeros(0)
    return [int(row) for row in rows[np.unique(places.astype(np.int64))]]


def read_one(log: NormLog, row: int) -> Record:
    """The record at one position."""
    found = log.records.read(log.rows[[row]], 0, log.n_examples)[0]
    if log.levels is not None:
        every_code: Codes = np.arange(log.levels.max_code + 1, dtype=np.uint16)
        codes = found.astype(np.int64)
        return Record(codes, log.levels.norms(every_code, 1.0), codes > log.levels.top)
    clip = float(log.settings.max_grad_norm[log.recorded_steps[row]])
    norms, codes = np.unique(found.astype(np.float64) / clip, return_inverse=True)
    return Record(codes, norms, norms[codes] > 1)


def _medians(record: Record, classes: IntArray, n_classes: int) -> list[float | None]:
    """Median norm of each class, from how often it has each code."""
    found: list[float | None] = []
    for code in range(n_classes):
        counts = np.bincount(record.codes[classes == code], minlength=len(record.norms))
        up_to = np.cumsum(counts)
        if not up_to[-1]:
            found.append(None)
            continue
        middle = [(int(up_to[-1]) - 1) // 2, int(up_to[-1]) // 2]
        found.append(float(record.norms[np.searchsorted(up_to, middle, side="right")].mean()))
    return found
