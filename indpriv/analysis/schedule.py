"""Noise, clipping, accuracy and norms over training.

Norms by class show what drives individual epsilon, after the paper's Figure 3: an example's epsilon
adds up its norms, and norms fall as the model learns.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv._columns import Grouping, Rows, as_rows, label_grouping
from indpriv._files import ROW_GROUP_SIZE, read_parquet
from indpriv._reading import named
from indpriv._types import BoolArray, FloatArray, IntArray, NDArray
from indpriv.analysis.statistics import Condensed, quantiles_by_cell
from indpriv.analysis.summary import Audit, Finding, record
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import EvidenceError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import Codes

_SHOWN = 200  # steps
_SAME = 1e-9  # a relative difference that rounding explains


class _Curve:
    @classmethod
    def read(cls: Any, path: Path) -> Any:
        """RUN/curve.parquet."""
        with named(path):
            kinds = {"step": "i", "test_accuracy": "fi", "worst_case_epsilon": "fi"}
            return cls.of(read_parquet(path, kinds=kinds))

    @classmethod
    def of(cls: Any, table: pd.DataFrame) -> Any:
        """From the columns of RUN/curve.parquet."""
        if table["step"].lt(0).any() or not table["test_accuracy"].between(0, 1).all():
            raise EvidenceError("steps are at least 0, and accuracies from 0 to 1")
        epsilon = table["worst_case_epsilon"].tolist()
        return cls(
            tuple(table["step"].tolist()),
            tuple(table["test_accuracy"].tolist()),
            () if np.isnan(epsilon).any() else tuple(epsilon),
        )

    def accuracy_at(self: Any, epsilon: float) -> float | None:
        """Test accuracy when the worst case was this epsilon; None beyond the checkpoints.

        Between two checkpoints it is interpolated on a line.
        """
        if not self.epsilon or not self.epsilon[0] <= epsilon <= self.epsilon[-1]:
            return None
        return float(np.interp(epsilon, self.epsilon, self.test_accuracy))

    def epsilon_at(self: Any, accuracy: float) -> Any:
        """Worst case when test accuracy first reached this value; None if it never did."""
        return self._first(accuracy, self.epsilon)

    def step_at(self: Any, accuracy: float) -> Any:
        """Number of steps after which test accuracy first reached this value."""
        return self._first(accuracy, self.steps)

    def _first(self: Any, accuracy: float, values: tuple[float, ...]) -> Any:
        reached = np.flatnonzero(np.array(self.test_accuracy) >= accuracy)
        if not values or not len(reached):
            return None
        around = slice(max(reached[0] - 1, 0), reached[0] + 1)
        return float(np.interp(accuracy, self.test_accuracy[around], values[around]))


Curve: Any = record("curve", _Curve)


class _Schedule:
    @property
    def moves(self: Any) -> bool:
        """Whether noise or clipping changed while training."""
        return any(len(set(column)) > 1 for column in (self.max_grad_norm, self.noise_multiplier))

    @property
    def held_fixed(self: Any) -> str:
        """What stayed the same at all steps: noise multiplier, standard deviation, or both."""
        columns = {
            "noise multiplier": self.noise_multiplier,
            "noise standard deviation": self.noise_std,
        }
        still = [name for name, column in columns.items() if np.ptp(column) <= _SAME * max(column)]
        return " and ".join(still) or "neither"


ScheduleFindings: Any = record("schedule_findings", _Schedule)


def schedule_of(log: NormLog, curve: Curve | None) -> ScheduleFindings:
    """Settings over the training of a log."""
    settings, n = log.settings, log.total_steps
    shown = np.unique(np.linspace(0, n - 1, min(n, _SHOWN)).astype(np.int64))
    clip, noise = settings.max_grad_norm[shown], settings.noise_multiplier[shown]
    columns = (shown, clip, noise, clip * noise)
    return ScheduleFindings(*(tuple(column.tolist()) for column in columns), curve)


def read_curve(
    audit: Audit, at_epsilon: float | None, at_accuracy: float | None
) -> dict[str, Any] | None:
    """What the checkpoints of an audited run say; None where it kept no curve.

    held_fixed, see `ScheduleFindings`; accuracy, of the test when the worst case was at_epsilon;
    epsilon and step, worst case and number of steps when test accuracy first reached at_accuracy;
    worst_case_epsilon and median_epsilon of the whole run. A value is None where it was not asked
    for or lies beyond the checkpoints, and each epsilon for a run that has no privacy.
    """
    if audit.schedule is None or audit.schedule.curve is None:
        return None
    curve, private = audit.schedule.curve, bool(audit.schedule.curve.epsilon)
    return {
        "held_fixed": audit.schedule.held_fixed,
        "accuracy": None if at_epsilon is None else curve.accuracy_at(at_epsilon),
        "epsilon": None if at_accuracy is None else curve.epsilon_at(at_accuracy),
        "step": None if at_accuracy is None else curve.step_at(at_accuracy),
        "worst_case_epsilon": audit.guarantee.worst_case_epsilon if private else None,
        "median_epsilon": audit.individual.median if private else None,
    }


# --- norms

Drivers: Any = record("drivers")
_MOST_RECORDS = 60  # points of a line; of more records, evenly spaced ones are read
_MOST_CLASSES = 20  # more labels are not classes, or a figure cannot distinguish them
_AT_EACH_END = 10  # number of examples named


def describe_drivers(
    log: NormLog, epsilons: EpsilonTable, train: pd.DataFrame | Rows | None
) -> Drivers:
    """Describe what made epsilons.

    `train` holds the training examples in the log's order; None where labels are unknown.
    """
    rows = None if train is None else as_rows(train)
    labels = None if rows is None else label_grouping(rows, rows.read(0, 0))
    if labels is not None and len(labels.names) > _MOST_CLASSES:
        labels = None
    classes = () if labels is None else labels.names
    shown = evenly_spaced_records(log, _MOST_RECORDS)
    size = max(1, len(classes))
    medians, shares, overall = [], [], []
    for norms in _norms_at(log, shown, rows, labels, size):
        weight, of_class = norms["weight"].to_numpy(), norms["cell"].to_numpy() // 2
        median = quantiles_by_cell(norms["norm"].to_numpy(), weight, of_class, size, (0.5,))
        n = np.bincount(norms["cell"], weight, 2 * size).reshape(size, 2)
        medians.append([None if np.isnan(value) else value for value in median[:, 0].tolist()])
        shares.append([float(own[1] / own.sum()) if own.any() else None for own in n])
        overall.append(float(n[:, 1].sum() / n.sum()))
    lowest, highest, n_lowest, n_highest = _ends(epsilons)

    def by_class(columns: list[list[float | None]]) -> tuple[tuple[float | None, ...], ...]:
        return tuple(tuple(one[code] for one in columns) for code in range(len(classes)))

    return Drivers(
        steps=tuple(log.recorded_steps[shown].tolist()),
        classes=classes,
        median_norm=by_class(medians),
        clipped_share=tuple(overall),
        clipped_share_by_class=by_class(shares),
        most_protected=lowest,
        least_protected=highest,
        n_at_least=n_lowest,
        n_at_most=n_highest,
    )


def evenly_spaced_records(log: NormLog, most: int) -> list[int]:
    """Positions of at most this many readable records, with the first and the last of them."""
    rows = np.flatnonzero(~np.isin(log.recorded_steps, log.unreadable_steps))
    places = np.linspace(0, len(rows) - 1, most).round() if len(rows) else np.zeros(0)
    return [int(row) for row in rows[np.unique(places.astype(np.int64))]]


def read_one(log: NormLog, row: int) -> tuple[NDArray[np.integer], FloatArray, BoolArray]:
    """(n_examples,) codes of norms in one record, the norms over max_grad_norm, which are above."""
    found = log.records[[row]].read(0, log.n_examples)[0]
    if log.levels.rounding:
        every_code: Codes = np.arange(log.levels.max_code + 1, dtype=np.uint16)
        return found, log.levels.norms(every_code, 1.0), every_code > log.levels.top
    clip = float(log.settings.max_grad_norm[log.recorded_steps[row]])
    norms, codes = np.unique(found.astype(np.float64) / clip, return_inverse=True)
    return codes, norms, norms > 1


def _norms_at(
    log: NormLog, shown: Sequence[int], rows: Rows | None, labels: Grouping | None, n_classes: int
) -> Iterator[pd.DataFrame]:
    """Yield the norms of all examples at each record shown, read a range of examples at a time.

    Columns are norm, over max_grad_norm, weight, the number of examples that have it, and cell,
    twice the class plus whether the norm is above max_grad_norm. Norms without rounding are
    condensed.
    """

    def classes() -> Iterator[tuple[int, int, IntArray]]:
        for start in range(0, log.n_examples, ROW_GROUP_SIZE):
            stop = min(start + ROW_GROUP_SIZE, log.n_examples)
            if labels is None or rows is None:
                yield start, stop, np.zeros(stop - start, np.int64)
            else:
                yield start, stop, labels.codes(rows.read(start, stop, ["label"]))

    if not log.levels.rounding:
        for row in shown:
            clip = float(log.settings.max_grad_norm[log.recorded_steps[row]])
            found = Condensed("norm", n=log.n_examples)
            for start, stop, of_class in classes():
                read = log.records[[row]].read(start, stop)[0]
                norms = np.minimum(read.astype(np.float64) / clip, np.finfo(np.float64).max)
                found.add(2 * of_class + (norms > 1), norms)
            yield found.frame()
        return
    codes: Codes = np.arange(log.levels.max_code + 1, dtype=np.uint16)
    counts = np.zeros((len(shown), n_classes * len(codes)), np.int64)
    for start, stop, of_class in classes():
        read = log.records[list(shown)].read(start, stop)
        for weight, one in zip(counts, read, strict=True):
            weight += np.bincount(of_class * len(codes) + one, minlength=len(weight))
    above = np.tile(codes > log.levels.top, n_classes)
    cell = 2 * np.repeat(np.arange(n_classes), len(codes)) + above
    norm = np.tile(log.levels.norms(codes, 1.0), n_classes)
    for weight in counts:
        yield pd.DataFrame({"norm": norm, "weight": weight, "cell": cell})


def _ends(epsilons: EpsilonTable) -> tuple[tuple[Any, ...], tuple[Any, ...], int, int]:
    """Ids of the smallest epsilons and of the largest, and how many share the outermost.

    Among equal ones the first in the table come first at the lower end, the last at the upper.
    """
    near, sharing = [], Counter[float]()
    for table in epsilons.tables():
        order = np.argsort(table.epsilon, kind="stable")
        kept = np.union1d(order[:_AT_EACH_END], order[-_AT_EACH_END:])
        named = pd.Series(table.example_ids[kept].tolist(), dtype=object)
        near.append(pd.DataFrame({"epsilon": table.epsilon[kept], "id": named}))
        outermost = {float(table.epsilon[order[end]]) for end in (0, -1)}
        sharing.update({end: int((table.epsilon == end).sum()) for end in outermost})
    found = pd.concat(near).sort_values("epsilon", kind="stable")
    ids, ends = found["id"].tolist(), found["epsilon"].iloc[[0, -1]]
    n_lowest, n_highest = (sharing[end] for end in ends)
    return tuple(ids[:_AT_EACH_END]), tuple(ids[: -_AT_EACH_END - 1 : -1]), n_lowest, n_highest


FINDINGS = (
    Finding("schedule", lambda run: {"schedule": schedule_of(run.log, run.recorded.curve)}),
    Finding("norms", lambda run: {"drivers": describe_drivers(run.log, run.epsilons, run.rows)}),
    # The report has single examples where the page can be searched; audit.json has none.
    Finding("lookup", lambda run: {}),
)
