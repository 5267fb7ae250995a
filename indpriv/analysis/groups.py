"""Who is worse off: epsilon, loss and accuracy by group. Sensitive.

A raw table alone misleads: if groups differ in their labels and labels differ in epsilon, the order
of the groups can reverse within a label (Simpson's paradox). A label-standardised mean is what a
group's mean epsilon would be with the label shares of the whole training set (direct
standardisation).

Intervals and tests treat the examples of the run as a sample: they show how much the composition of
a group matters, not how another training run of the same model would turn out. In a small group any
order can arise by chance. Two groups that were chosen as the extremes of the raw table tend to have
the same order within each label too, so a test of the reverse order errs on the side of finding
nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from indpriv import _columns
from indpriv._checks import check_positive_int
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.analysis import statistics
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.summary import GROUPS, Audit, Finding, record
from indpriv.epsilon_table import EpsilonTable, beside

Ratio: Any = record("ratio")
RankCorrelation: Any = record("rank_correlation")
Spread: Any = record("spread")
WithinLabel: Any = record("within_label")
MIN_GROUP = 10  # a mean over fewer examples says more about them than about the group
_MAX_LABELS = 100  # more distinct labels than this are a regression target, not classes
_MAX_WITHIN_ROWS = 20_000  # rows of all tables within label together; no reader needs more
# A rank correlation is compared with this many random orders; with every order up to seven groups.
_ORDERS = 9_999
_QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}
_SUMS = (
    *("n", "n_worst", "n_losses", "loss", "n_known", "correct"),  # of training examples
    *("n_test", "n_test_known", "test_correct"),
)
_RATES = ("true_positive_rate", "false_positive_rate")


class _Reversal:
    @property
    def beyond_chance(self: Any) -> bool:
        """Whether the test supports it at 95 % confidence."""
        most = 1 - statistics.CONFIDENCE + 1e-12  # 1 - 0.95 is not exactly 0.05
        return bool(self.p_value <= most)


Reversal: Any = record("reversal", _Reversal)


class _Table:
    @property
    def too_small(self: Any) -> int:
        """Number of groups with too few training examples to read."""
        return int(self.rows["too_small"].sum())

    def reversed_labels(self: Any, *, beyond_chance: bool) -> list[str]:
        """Labels within which the order reverses: by more than chance, or not."""
        return [one.label for one in self.reversals if one.beyond_chance == beyond_chance]


GroupTable: Any = record("group_table", _Table)


def group_tables(
    epsilons: EpsilonTable,
    train: pd.DataFrame | _columns.Rows,
    test: pd.DataFrame | _columns.Rows,
    columns: Sequence[str],
    *,
    min_size: int = MIN_GROUP,
    seed: int = 0,
) -> tuple[GroupTable, ...]:
    """One table for each of columns, with tests corrected for their number; see `group_table`."""
    found = [group_table(epsilons, train, test, by, min_size=min_size, seed=seed) for by in columns]
    for name in ("spread", "spread_within_label"):
        tested = [index for index, table in enumerate(found) if getattr(table, name) is not None]
        spreads = [getattr(found[index], name) for index in tested]
        corrected = statistics.holm([spread.p_value for spread in spreads])
        for index, spread, p_value in zip(tested, spreads, corrected, strict=True):
            found[index] = replace(found[index], **{name: replace(spread, corrected=p_value)})
    for index, table in enumerate(found):
        each = (replace(one, p_value=min(1.0, one.p_value * len(found))) for one in table.reversals)
        found[index] = replace(table, reversals=tuple(each))
    return tuple(found)


def group_table(
    epsilons: EpsilonTable,
    train: pd.DataFrame | _columns.Rows,
    test: pd.DataFrame | _columns.Rows,
    by: str,
    *,
    min_size: int = MIN_GROUP,
    seed: int = 0,
) -> GroupTable:
    """Compare the groups of one column, or of the combinations of several.

    train: rows of the training examples in the order of the epsilons; test: those of test examples,
    perhaps none. by: "label", "correct", "loss:bins=10" or a metadata column; "column:bins=10" cuts
    a numeric column at its deciles; "race,sex" takes every combination. Groups with fewer training
    examples than min_size are marked as too small to read, and left out of ratios and tests. seed:
    of the permutations, not of training. InputError for no such column, or a numeric one with many
    values and no bins.
    """
    if len(train) != len(epsilons):
        raise refused("refusal.compared", "rows", n=len(train), of=len(epsilons))
    check_positive_int("min_size", min_size)
    check_positive_int("seed", seed, minimum=0)
    rows, others = _columns.as_rows(train), _columns.as_rows(test)
    groups, classes = _columns.grouping_of(rows, others, by), _columns.label_grouping(rows, others)
    by_label, notes = "label" in groups.columns, []
    if classes is None or len(classes.names) > _MAX_LABELS:
        n = f"More than {_columns.MOST_GROUPS:,}" if classes is None else len(classes.names)
        notes = [f"{n} distinct labels are too many for classes: no table within label"]
        classes = None
    names, labels = groups.names, ("",) if classes is None else classes.names
    within = classes is not None and not by_label
    tabled = within and len(names) * len(labels) <= _MAX_WITHIN_ROWS
    if within and not tabled:
        many = f"{len(names)} groups and {len(labels)} labels"
        notes = [f"{many} are too many for tables within label"]
    rng, top = statistics.generator_of(seed, by), epsilons.worst_case_epsilon
    cells = _cells(epsilons, rows, others, groups, classes)
    whole = cells.over_labels(len(labels))
    counts = cells.sums["n"].reshape(len(names), -1) if within else whole.sums["n"][:, None]
    strata = cells.codes % len(labels) if within else np.zeros_like(cells.codes)
    means = statistics.means_by_cell(cells.epsilon, cells.weights, whole.codes, len(names))
    found = _described(whole, means, min_size, top)
    mean, accuracy, readable = found["mean"], found["test_accuracy"], ~found["too_small"]
    tests = [
        statistics.permutation_test(
            cells.epsilon, whole.codes, own, tested=readable, rng=rng, weights=cells.weights
        )
        for own in ([np.zeros_like(strata), strata] if within else [strata])
    ]
    for name, one in zip(("p_value", "p_value_within_label"), tests, strict=False):
        found[name] = one and one.adjusted
    if within:
        by_cell = statistics.means_by_cell(cells.epsilon, cells.weights, cells.codes, counts.size)
        at_shares = by_cell.summed(counts.sum(axis=0) / counts.sum())
        found |= _standardised(counts, labels, at_shares, min_size, top)
    if classes is not None:
        found |= _rates(cells.sums, labels)
    order = _ascending(np.where(found["n"] > 0, -mean, 1.0), names)
    ends = _ends(_ascending(mean, names, readable))
    accurate = _ascending(accuracy, names, readable & (found["n_test"] >= MIN_GROUP))
    rank = _accuracy_rank(accuracy[accurate], mean[accurate], rng)
    ratio = _ratio(ends, names, mean, means)
    standardised = None
    if within:
        own_mean = found["standardised_mean"]
        known = [interval is not None for interval in found["standardised_interval"]]
        standardised = _ratio(ends, names, own_mean, at_shares, known)
    spreads = [
        None if one is None else Spread(one.p_value, one.p_value, one.permutations) for one in tests
    ]
    outcomes = [name for name in labels if name != _columns.MISSING]
    return GroupTable(
        by=by,
        columns=groups.columns,
        min_size=min_size,
        rows=_frame(found, names, order),
        ratio=ratio,
        standardised_ratio=standardised,
        lowest_accuracy_ratio=_ratio(_ends(accurate[::-1]), names, mean, means),
        accuracy_rank=rank,
        spread=spreads[0],
        spread_within_label=spreads[1] if within else None,
        reversals=_reversals(cells, ends, labels, min_size, rng) if tabled and ends else (),
        within_label=_within(cells, by_cell, names, labels, order, min_size, top) if tabled else (),
        notes=tuple(notes) * (not by_label),
        confidence=statistics.CONFIDENCE,
        seed=seed,
        positive_class=outcomes[1] if len(outcomes) == 2 else None,
    )


class _Cells(NamedTuple):
    """Training examples by group and label, see `Condensed`.

    (n_values,) epsilons, of single examples or means of bins, the largest epsilon among them, the
    number of examples that have each, and codes, group * number of labels + label; (n_cells,) sums
    of what adds up over the examples of a cell, by name.
    """

    epsilon: FloatArray
    largest: FloatArray
    weights: IntArray
    codes: IntArray
    sums: dict[str, FloatArray]

    def over_labels(self, n_labels: int) -> "_Cells":
        """One cell for each group."""
        sums = {name: one.reshape(-1, n_labels).sum(axis=1) for name, one in self.sums.items()}
        return self._replace(codes=self.codes // n_labels, sums=sums)


def _cells(
    epsilons: EpsilonTable,
    train: _columns.Rows,
    test: _columns.Rows,
    groups: _columns.Grouping,
    labels: _columns.Grouping | None,
) -> _Cells:
    """The cells of all examples, read part by part; labels: None for one that all share."""
    n_labels = 1 if labels is None else len(labels.names)
    sums = dict.fromkeys(_SUMS, np.zeros(len(groups.names) * n_labels))

    def codes_of(frame: pd.DataFrame) -> IntArray:
        own = groups.codes(frame) * n_labels
        return own if labels is None else own + labels.codes(frame)

    def add(codes: IntArray, **weights: NDArray[Any]) -> None:
        for name, one in weights.items():
            sums[name] = sums[name] + np.bincount(codes, one, len(sums[name]))

    columns = [*groups.columns, "label", "correct"]
    kept = statistics.Condensed("epsilon", n=len(epsilons))
    for table, frame in beside(epsilons, train, _columns.known_columns(train, [*columns, "loss"])):
        codes = codes_of(frame)
        loss, correct = (_columns.to_floats(frame[name]) for name in ("loss", "correct"))
        finite, known = np.isfinite(loss), np.isfinite(correct)
        add(codes, n=np.ones(len(codes)), n_worst=table.at_worst_case)
        add(codes, n_losses=finite, n_known=known)
        add(codes, loss=np.where(finite, loss, 0), correct=np.where(known, correct, 0))
        kept.add(codes, table.epsilon)
    for frame in _columns.frames_of(test, _columns.known_columns(test, columns)):
        codes, correct = codes_of(frame), _columns.to_floats(frame["correct"])
        known = np.isfinite(correct)
        add(codes, n_test=np.ones(len(codes)), n_test_known=known)
        add(codes, test_correct=np.where(known, correct, 0))
    found = kept.frame()
    epsilon, largest, weights, cells = (
        found[name].to_numpy() for name in ("epsilon", "largest_epsilon", "weight", "cell")
    )
    return _Cells(epsilon, largest, weights, cells, sums)


def _described(
    cells: _Cells, means: statistics.Means, min_size: int, top: float, n_labels: int = 1
) -> dict[str, Any]:
    """Columns of `GROUPS` for each cell; n_labels: of cells that are compared within a label."""
    sums, n = cells.sums, cells.sums["n"]
    size, small, largest = len(n), n < min_size, np.zeros(len(n))
    np.maximum.at(largest, cells.codes, cells.largest)
    quantiles = statistics.quantiles_by_cell(
        cells.largest, cells.weights, cells.codes, size, tuple(_QUANTILES.values())
    )
    mean = means.estimate
    with np.errstate(invalid="ignore", divide="ignore"):
        best = np.where(small, np.inf, mean).reshape(-1, n_labels).min(axis=0)
        to_best = mean / np.tile(
            np.where((best > 0) & (best < np.inf), best, np.nan), size // n_labels
        )
        at_worst_case, loss = sums["n_worst"] / n, sums["loss"] / sums["n_losses"]
    return {
        "n": n,
        "n_test": sums["n_test"],
        "too_small": small,
        "mean": mean,
        "mean_interval": means.intervals(top, ~small),
        "ratio_to_best": to_best,
        **dict(zip(_QUANTILES, quantiles.T, strict=True)),
        "max": np.where(n > 0, largest, np.nan),
        "share_at_worst_case": at_worst_case,
        "mean_loss": loss,
        "losses_left_out": n - sums["n_losses"],
        **_share("train_accuracy", sums["correct"], sums["n_known"]),
        **_share("test_accuracy", sums["test_correct"], sums["n_test_known"]),
        "lacks_labels": [()] * size,
    }


def _frame(columns: dict[str, Any], names: Sequence[str], order: list[int]) -> pd.DataFrame:
    """A table of the groups with these columns (n_groups,) in that order."""
    found = GROUPS.frame({"name": list(names), **columns}, len(names))
    return found.iloc[order].reset_index(drop=True)


def _share(name: str, hits: FloatArray, trials: FloatArray) -> dict[str, Any]:
    """The columns of a share and its exact interval; unknown without trials."""
    intervals = [
        statistics.clopper_pearson(k, n) if n else None
        for k, n in zip(hits.tolist(), trials.tolist(), strict=True)
    ]
    with np.errstate(invalid="ignore"):
        return {name: hits / trials, f"{name}_interval": intervals}


def _standardised(
    counts: FloatArray, labels: Sequence[str], means: statistics.Means, min_size: int, top: float
) -> dict[str, Any]:
    """Columns of label-standardised means; counts: (n_groups, n_labels) training examples."""
    present = np.flatnonzero(counts.sum(axis=0))
    own = counts[:, present]
    least = own.min(axis=1)
    return {
        "standardised_mean": np.where(least > 0, means.estimate, np.nan),
        "standardised_interval": means.intervals(top, least >= min_size),
        "lacks_labels": [tuple(labels[code] for code in present[one == 0]) for one in own],
        "smallest_label_count": least,
    }


def _rates(sums: dict[str, FloatArray], labels: Sequence[str]) -> dict[str, Any]:
    """Columns of true- and false-positive rates; sums by group and label."""
    classes = [code for code, name in enumerate(labels) if name != _columns.MISSING]
    n, right = (
        sums[name].reshape(-1, len(labels))[:, classes] for name in ("n_test_known", "test_correct")
    )
    if len(classes) < 2:
        return {}
    true, false = _RATES
    if len(classes) == 2:
        return _share(true, right[:, 1], n[:, 1]) | _share(false, n[:, 0] - right[:, 0], n[:, 0])
    others = len(classes) - 1  # classes of which an example is a negative
    found = _share(false, (n - right).sum(axis=1), n.sum(axis=1))
    with np.errstate(invalid="ignore"):
        return {
            true: (right / n).mean(axis=1),
            false: found[false] / others,
            f"{false}_interval": [
                one and statistics.Interval(one.low / others, one.high / others)
                for one in found[f"{false}_interval"]
            ],
        }


def _ascending(
    values: FloatArray, names: Sequence[str], chosen: NDArray[np.bool_] | bool = True
) -> list[int]:
    """Codes of the chosen groups with a known value, smallest first, ties by name."""
    codes: list[int] = np.flatnonzero(chosen & ~np.isnan(values)).tolist()
    return sorted(codes, key=lambda code: (values[code], names[code]))


def _ends(ascending: Sequence[int]) -> tuple[int, int] | None:
    """The last and the first of at least two groups."""
    return (ascending[-1], ascending[0]) if len(ascending) > 1 else None


def _ratio(
    pair: tuple[int, int] | None,
    names: Sequence[str],
    mean: FloatArray,
    means: statistics.Means,
    known: Sequence[bool] | None = None,
) -> Ratio | None:
    """Mean of the first group over that of the second; known: whose means have an interval."""
    if pair is None:
        return None
    (high, low), (worst, best) = mean[list(pair)].tolist(), (names[code] for code in pair)
    if np.isnan(high) or np.isnan(low):
        return Ratio(worst, best, None, f"{worst if np.isnan(high) else best} lacks a label")
    if low == 0:
        return Ratio(worst, best, None, f"the mean epsilon of {best} is 0")
    drawn = known is None or all(known[code] for code in pair)
    return Ratio(worst, best, high / low, interval=means.ratio(*pair) if drawn else None)


def _within(
    cells: _Cells,
    means: statistics.Means,
    names: Sequence[str],
    labels: Sequence[str],
    order: list[int],
    min_size: int,
    top: float,
) -> tuple[WithinLabel, ...]:
    """The table of each label."""
    every, found = _described(cells, means, min_size, top, len(labels)), []
    for code, label in enumerate(labels):
        own = {name: values[code :: len(labels)] for name, values in every.items()}
        pair = _ends(_ascending(own["mean"], names, ~own["too_small"]))
        ratio = _ratio(pair, names, own["mean"], means.take(slice(code, None, len(labels))))
        found.append(WithinLabel(label, _frame(own, names, order), ratio))
    return tuple(found)


def _accuracy_rank(
    accuracy: FloatArray, epsilon: FloatArray, rng: np.random.Generator
) -> RankCorrelation | None:
    """Correlate test accuracy and mean epsilon over groups; None where undefined."""
    value = statistics.spearman(accuracy, epsilon) if len(accuracy) else None
    if value is None:
        return None
    centred = stats.rankdata(epsilon) - (len(epsilon) + 1) / 2
    found = stats.permutation_test(
        (stats.rankdata(accuracy),),
        lambda order, axis: np.sum(order * centred, axis=axis),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=_ORDERS,
        batch=max(1, int(1e6) // len(epsilon)),
        rng=rng,
    )
    return RankCorrelation(value, len(epsilon), float(found.pvalue))


def _reversals(
    cells: _Cells,
    pair: tuple[int, int],
    labels: Sequence[str],
    min_size: int,
    rng: np.random.Generator,
) -> tuple[Reversal, ...]:
    """The labels within which the order of two groups reverses, each tested.

    pair: codes of the group with the larger mean over all labels and of the other one; a label with
    fewer than min_size examples of either is too small to read.
    """
    groups, strata = np.divmod(cells.codes, len(labels))
    chosen = np.isin(groups, pair)
    values, weights, strata = cells.epsilon[chosen], cells.weights[chosen], strata[chosen]
    sides = 2 * strata + (groups[chosen] == pair[1])
    n, total = (
        np.bincount(sides, one, 2 * len(labels)).reshape(-1, 2)
        for one in (weights, weights * values)
    )
    readable = n.min(axis=1) >= min_size
    with np.errstate(invalid="ignore"):
        reverse = readable & np.less(*(total / n).T)
    if not reverse.any():
        return ()
    test = statistics.permutation_test(
        values, sides, strata, tested=np.repeat(readable, 2), rng=rng, weights=weights
    )
    p_values = [None] * 2 * len(labels) if test is None else test.adjusted
    found = [(labels[code], p_values[2 * code]) for code in np.flatnonzero(reverse).tolist()]
    return tuple(Reversal(label, 1.0 if p_value is None else p_value) for label, p_value in found)


def _find(run: AuditedRun) -> dict[str, Any]:
    columns, _ = run.grouping
    examples = run.recorded.examples
    if examples is None or run.train is None:
        return {}
    test = examples.rows("test")
    return {"groups": group_tables(run.epsilons, run.train, test, columns, seed=run.seed)}


def _notes(audit: Audit) -> Iterator[str]:
    for table in audit.groups:
        if labels := table.reversed_labels(beyond_chance=True):
            yield f"By {table.by}, the order of the groups reverses among {', '.join(labels)}."
        if table.too_small:
            few = f"fewer than {table.min_size} examples"
            yield f"By {table.by}, groups are too small to read ({few}): {table.too_small:,}."


FINDING = Finding("groups", _find, notes=_notes)
