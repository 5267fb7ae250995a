"""One row of a group table: epsilon, loss and accuracy of a group. Sensitive."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._plain import AtLeastZero, Count, Share
from indpriv.analysis.groups.cells import Cells
from indpriv.analysis.statistics.binomial import clopper_pearson
from indpriv.analysis.statistics.bootstrap import Interval
from indpriv.analysis.statistics.histogram import quantiles_by_cell

MIN_GROUP = 10  # a mean over fewer examples says more about them than about the group
_QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class GroupEpsilon:
    """The epsilons of one group; None where the group has no training examples.

    Attributes:
        mean, median, p95, p99, max: of epsilon.
        mean_interval: bootstrap interval of the mean; None where the group is too small or has no
            spread.
        ratio_to_best: mean over the smallest mean of a readable group; None where that is 0 or
            unknown.
        p_value: of the distance between the group's mean and the mean of all examples, by
            permutation, corrected for all groups of the table; None where the group is too small or
            nothing varies.
        share_at_worst_case: share of its examples at the worst-case epsilon.
    """

    mean: AtLeastZero | None
    mean_interval: Interval | None
    ratio_to_best: AtLeastZero | None
    p_value: Share | None
    median: AtLeastZero | None
    p95: AtLeastZero | None
    p99: AtLeastZero | None
    max: AtLeastZero | None
    share_at_worst_case: Share | None


@dataclass(frozen=True)
class GroupAccuracy:
    """Share of a group's examples that the final model classifies correctly.

    Attributes:
        share: None where unknown.
        interval: exact binomial (Clopper and Pearson 1934).
    """

    share: Share | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class Standardised:
    """A group's mean epsilon at the label shares of the whole training set.

    Attributes:
        mean: None where the group lacks a label, or where labels are not classes.
        interval: bootstrap interval of the mean; None also where the group has too few examples of
            a label.
        p_value: as for the raw mean, of the distance from the means within label.
        lacks_labels: labels that no training example of the group has.
        smallest_label_count: the fewest training examples that the group has of any label, on which
            the mean depends most.
    """

    mean: AtLeastZero | None = None
    interval: Interval | None = None
    p_value: Share | None = None
    lacks_labels: tuple[str, ...] = ()
    smallest_label_count: Count | None = None


@dataclass(frozen=True)
class GroupRates:
    """How the final model errs on the test examples of a group; the rates of equalised odds.

    Of two labels the positive class is the second in sorted order, as in scikit-learn. Of more, the
    true-positive rate is the mean over classes of the share recognised (recall), and the
    false-positive rate is pooled over classes: every example is a negative of all classes but its
    own, so that it follows from the accuracy.

    Attributes:
        true_positive: share of positives that are predicted positive; None without positives, or
            with several classes if the group lacks one.
        true_positive_interval: exact binomial; None also with several classes.
        false_positive: share of negatives that are predicted positive; None without negatives.
        false_positive_interval: exact binomial.
    """

    true_positive: Share | None = None
    true_positive_interval: Interval | None = None
    false_positive: Share | None = None
    false_positive_interval: Interval | None = None


_TRAIN = {"share": "train_accuracy", "interval": "train_accuracy_interval"}
_TEST = {"share": "test_accuracy", "interval": "test_accuracy_interval"}
_RATES = {
    "true_positive": "true_positive_rate",
    "true_positive_interval": "true_positive_rate_interval",
    "false_positive": "false_positive_rate",
    "false_positive_interval": "false_positive_rate_interval",
}
_STANDARDISED = {
    "mean": "standardised_mean",
    "interval": "standardised_interval",
    "p_value": "p_value_within_label",
}


@dataclass(frozen=True)
class GroupRow:
    """One group of training examples.

    Attributes:
        name: the group; "(missing)" where the column has no value.
        n, n_test: number of training and of test examples.
        too_small: the group has fewer training examples than the minimum, too few to read.
        mean_loss: nats, over finite losses; losses_left_out counts the others.
    """

    name: str
    n: Count
    n_test: Count
    too_small: bool
    epsilon: GroupEpsilon = field(metadata={"flatten": True})
    mean_loss: float | None
    losses_left_out: Count
    train_accuracy: GroupAccuracy = field(metadata={"flatten": _TRAIN})
    test_accuracy: GroupAccuracy = field(metadata={"flatten": _TEST})
    standardised: Standardised = field(default=Standardised(), metadata={"flatten": _STANDARDISED})
    test_rates: GroupRates = field(default=GroupRates(), metadata={"flatten": _RATES})


def describe_groups(cells: Cells, names: Sequence[str], *, min_size: int) -> list[GroupRow]:
    """One row per name, without what is resampled; each quantity in one pass over all groups."""
    size, sums = len(names), cells.sums.over_labels()
    found = quantiles_by_cell(cells.epsilon, cells.weights, cells.groups, size, _QUANTILES)
    total = np.bincount(cells.groups, cells.weights * cells.epsilon, minlength=size)
    mean, worst, loss = (
        _quotients(*pair)
        for pair in ((total, sums.n), (sums.at_worst_case, sums.n), (sums.loss, sums.n_losses))
    )
    median, p95, p99 = (_known(column) for column in found.T)
    largest = _known(np.where(sums.n > 0, sums.largest, np.nan))
    train_accuracy = _accuracies(sums.correct, sums.n_known)
    test_accuracy = _accuracies(sums.test_correct, sums.n_test_known)
    smallest = min(
        (mean[index] or 0.0 for index in np.flatnonzero(sums.n >= min_size)), default=0.0
    )
    rows = []
    for index, name in enumerate(names):
        own = mean[index]
        epsilon = GroupEpsilon(
            mean=own,
            mean_interval=None,
            ratio_to_best=None if own is None or smallest <= 0 else own / smallest,
            p_value=None,
            median=median[index],
            p95=p95[index],
            p99=p99[index],
            max=largest[index],
            share_at_worst_case=worst[index],
        )
        rows.append(
            GroupRow(
                name=name,
                n=int(sums.n[index]),
                n_test=int(sums.n_test[index]),
                too_small=bool(sums.n[index] < min_size),
                epsilon=epsilon,
                mean_loss=loss[index],
                losses_left_out=int(sums.n[index] - sums.n_losses[index]),
                train_accuracy=train_accuracy[index],
                test_accuracy=test_accuracy[index],
            )
        )
    return rows


def by_mean_epsilon(rows: Sequence[GroupRow]) -> list[int]:
    """Positions by mean epsilon, largest first, ties by name; groups without examples last."""

    def key(index: int) -> tuple[float, str]:
        mean = rows[index].epsilon.mean
        return (1.0 if mean is None else -mean, rows[index].name)

    return sorted(range(len(rows)), key=key)


def _quotients(totals: NDArray[Any], counts: IntArray) -> list[float | None]:
    """Means (n_groups,); None where nothing was counted."""
    return _known(np.where(counts > 0, totals / np.maximum(counts, 1), np.nan))


def _known(values: FloatArray) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


def _accuracies(correct: FloatArray, known: IntArray) -> list[GroupAccuracy]:
    return [
        GroupAccuracy(hits / n, clopper_pearson(hits, n)) if n else GroupAccuracy()
        for hits, n in zip(correct.tolist(), known.tolist(), strict=True)
    ]
