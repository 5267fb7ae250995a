"""What drives individual epsilon: gradient norms over training, by class. Sensitive.

After the paper's Figure 3: an example's epsilon adds up its norms, and norms fall as the model
learns.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from indpriv._columns import Grouping, Rows, as_rows, label_grouping
from indpriv._files import ROW_GROUP_SIZE
from indpriv._types import BoolArray, FloatArray, IntArray, NDArray
from indpriv.analysis.statistics import Condensed, quantiles_by_cell
from indpriv.analysis.summary import Finding, record
from indpriv.epsilon_table import Epsilons
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import Codes

_MOST_RECORDS = 60  # points of a line; of more records, evenly spaced ones are read
_MOST_CLASSES = 20  # more labels are not classes, or a figure cannot distinguish them
_AT_EACH_END = 10  # number of examples named


Drivers: Any = record("drivers")


def describe_drivers(
    log: NormLog, epsilons: Epsilons, train: pd.DataFrame | Rows | None
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
        pairs = n.tolist()
        shares.append(
            [above / (below + above) if below + above else None for below, above in pairs]
        )
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
    """The norms of all examples in the record at one position.

    Returns:
        (n_examples,) codes of norms, the norms over max_grad_norm, and which are above it.
    """
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


def _ends(epsilons: Epsilons) -> tuple[tuple[Any, ...], tuple[Any, ...], int, int]:
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
    Finding("norms", lambda run: {"drivers": describe_drivers(run.log, run.epsilons, run.rows)}),
    # The report has single examples where the page can be searched; audit.json has none.
    Finding("lookup", lambda run: {}),
)
