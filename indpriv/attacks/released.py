"""Attacks on a released model by its parameters and inputs, without references. Sensitive.

Suri, Zhang and Evans 2024, "Do Parameters Reveal More than Loss for Membership Inference?"
(arXiv:2406.11544), with other data than the training set. Bertran, Tang, Roth, Kearns, Morgenstern
and Wu 2023 (arXiv:2307.03694), on inputs. Steinke, Nasr, Ganesh et al. 2024, "The Last Iterate
Advantage" (arXiv:2410.06186), whose heuristic bounds nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.util import hash_pandas_object
from scipy import optimize, special, stats

from indpriv._checks import check_delta, check_positive_int
from indpriv._columns import to_floats
from indpriv._facts import refused
from indpriv._reading import named, read_npz
from indpriv._types import ArrayLike, BoolArray, FloatArray, IntArray, NDArray
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import from_losses, write_arrays
from indpriv.example_table import ExampleTable
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.run_files import KEPT, RELEASED

LEAST = 20  # hold-out examples that the attacker fits on
_QUANTILES = (0.5, 0.84)  # a median, and one standard deviation above it
_DAMPING = 0.01  # fixed on made-up data, before the first real result
_FAR = 40.0  # standard deviations within which thresholds lie
_ENDS = 1000  # inputs towards which others move
_HALVINGS = 10  # of a move
_TREES: dict[str, Any] = {"max_leaf_nodes": 15, "max_iter": 100, "random_state": 0}


@dataclass(frozen=True)
class ReleasedModel:
    """What its parameters tell of a model, by `indpriv.recording.released_model`.

    Rows are the n examples: training examples, then test examples.

    Attributes:
        examples: their labels and final losses.
        norms: (n,) norms of the gradients of their losses.
        holdout: (n,) the test examples that the attacker fits on, and does not score.
        columns: (h,) rows of those whose gradients span the attacker's Fisher matrix.
        products: (n, h + 1) inner products of each gradient with theirs, and with the mean gradient
            of the hold-out.
        inputs: (n, k) flattened inputs; None if inputs are more than one tensor of numbers.
    """

    examples: ExampleTable
    norms: FloatArray
    holdout: BoolArray
    columns: IntArray
    products: FloatArray
    inputs: NDArray[Any] | None = None

    def save(self, run_dir: Path, model: str) -> None:
        """Write all but the examples, and their losses, beside a model that a run kept."""
        arrays = {name: value for name, value in vars(self).items() if name != "examples"}
        path = (run_dir / KEPT[model][0]).with_name(RELEASED)
        write_arrays(path, loss=column(self.examples, "loss"), **arrays)

    def scored(self, scores: FloatArray) -> AttackScores:
        """Scores of all but the hold-out and those that are NaN."""
        return scores_of(self.examples, scores, ~self.holdout & ~np.isnan(scores))


def column(examples: ExampleTable, name: str) -> NDArray[Any]:
    """(n,) a column of training and then of test examples; ids as they are, else numbers."""
    parts = [part[name] for part in (examples.train, examples.test)]
    return np.concatenate(parts if name == "example_id" else [to_floats(one) for one in parts])


def scores_of(examples: ExampleTable, scores: FloatArray, used: BoolArray) -> AttackScores:
    """Scores of the examples that are used, from those of all, training examples first."""
    member, ids = np.arange(len(scores)) < examples.n_train, column(examples, "example_id")
    return AttackScores(scores[used], member[used], "", example_ids=ids[used])


def finite_confidences(examples: ExampleTable) -> FloatArray:
    """(n,) of losses; infinite ones are those of the largest and smallest finite loss."""
    confidence = from_losses(column(examples, "loss"))
    finite = confidence[np.isfinite(confidence)]
    return np.asarray(np.clip(confidence, finite.min(), finite.max()))


def released_of_run(run_dir: Path) -> dict[str, ReleasedModel]:
    """What lies beside the models that a run kept, "dp" and "non_dp", if it is of their losses.

    EvidenceError if it is damaged.
    """
    found = {}
    for model, (file, table) in KEPT.items():
        path = (run_dir / file).with_name(RELEASED)
        if path.is_file() and (run_dir / table).is_file():
            remedy = f"delete {path}; indpriv attack {run_dir} --references writes it again"
            arrays, examples = read_npz(path, remedy), ExampleTable.from_parquet(run_dir / table)
            with named(path, remedy):
                loss, known = arrays.pop("loss"), ReleasedModel(examples, **arrays)
                known.products[:, len(arrays.pop("columns"))]  # that of the mean
                if any(len(one) != len(loss) for one in arrays.values()):
                    raise ValueError("arrays of different lengths")
            if np.array_equal(loss, column(examples, "loss"), equal_nan=True):
                found[model] = known
    return found


def gradient_scores(released: ReleasedModel) -> AttackScores:
    """Log-likelihood ratio of each example's membership, as if the model were stationary.

    Where training has converged, gradients over its n examples sum up to 0, so less their mean m
    over the population they sum up to -n m. By the central limit theorem that sum is N(0, n F)
    without the example, and N(g - m, n F) with it, for its gradient g and the covariance F of
    gradients. The ratio is -(g - m)' F^-1 m - (g - m)' F^-1 (g - m) / (2 n). The attacker knows m
    and F from its hold-out; F is damped by its trace over h, the number of gradients that span it.
    Noise and an early end of training weaken the attack.
    """
    n, h = len(released.examples.train), len(released.columns)
    products = released.products.astype(np.float64)
    towards = products[:, -1]  # g . m; m is the mean over the hold-out
    square = float(towards[released.holdout].mean())  # m . m
    along = products[:, :-1] - towards[:, None] - towards[released.columns] + square
    along /= np.sqrt(h)  # A (g - m), where F is A' A, damped
    lengths = released.norms**2 - 2 * towards + square
    gram = along[released.columns] / np.sqrt(h)
    damping = max(_DAMPING * float(np.trace(gram)) / h, np.finfo(np.float64).tiny)
    # Woodbury: F^-1 = (1 - A' (damping + A A')^-1 A) / damping
    inverse = np.linalg.inv(gram + damping * np.eye(h))
    of_mean = inverse @ ((towards[released.columns] - square) / np.sqrt(h))
    first = towards - square - along @ of_mean
    second = lengths - ((along @ inverse) * along).sum(axis=1)
    return released.scored(-(first + second / (2 * n)) / damping)


def lacks_for_gradients(released: ReleasedModel) -> str | None:
    """What is missing for `gradient_scores`; None if nothing."""
    known = len(released.columns)
    return None if known >= LEAST else f"gradients of {LEAST} hold-out examples (there are {known})"


def input_scores(released: ReleasedModel) -> AttackScores:
    """How far the confidence of an example lies above that of similar non-members.

    Boosted trees of scikit-learn regress the median and the 84 % quantile of the hold-out's
    confidences on inputs and label; a score is the distance to the median, in their difference.
    Trees are constant beyond the hold-out, so values that only members have give nobody away.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor

    confidence, labels = finite_confidences(released.examples), column(released.examples, "label")
    features = np.column_stack([np.asarray(released.inputs, np.float32), labels])
    fitted = np.flatnonzero(released.holdout & ~np.isnan(confidence))
    # In the order of their ids, as sums of floats depend on the order.
    ids = column(released.examples, "example_id")[fitted]
    fitted = fitted[np.argsort(ids, kind="stable")]
    low, high = (
        HistGradientBoostingRegressor(loss="quantile", quantile=quantile, **_TREES)
        .fit(features[fitted], confidence[fitted])
        .predict(features)
        for quantile in _QUANTILES
    )
    spread = np.abs(high - low)
    return released.scored((confidence - low) / np.maximum(spread, np.median(spread) / 10 + 1e-12))


def lacks_for_inputs(released: ReleasedModel) -> str | None:
    """What is missing for `input_scores`; None if nothing."""
    if released.inputs is None:
        return "inputs that are one tensor of numbers"
    if find_spec("sklearn") is None:
        return "scikit-learn: pip install 'indpriv[attacks]'"
    losses = column(released.examples, "loss")
    if (losses < 0).any():
        return "cross-entropy losses, none of them below 0"
    known = int(np.isfinite(losses[released.holdout]).sum())
    return None if known >= LEAST else f"losses of {LEAST} hold-out examples (there are {known})"


# --- by predicted labels only


@dataclass(frozen=True)
class LabelQueries:
    """A model that an attacker asks for labels, and what for: arguments of `boundary_scores`."""

    predict: Callable[[Any], ArrayLike]
    inputs: ArrayLike
    labels: ArrayLike
    member: ArrayLike
    about: Mapping[str, Any] = field(default_factory=dict)

    def scores(self) -> AttackScores:
        """Those of `boundary_scores`."""
        given = self.predict, self.inputs, self.labels, self.member
        return boundary_scores(*given, **self.about)


def boundary_scores(
    predict: Callable[[Any], ArrayLike],
    inputs: ArrayLike,
    labels: ArrayLike,
    member: ArrayLike,
    *,
    moves: int = 50,
    **about: Any,
) -> AttackScores:
    """Score examples by how far inputs move, towards others, until their predicted label changes.

    After Choquette-Choo et al. 2021 (arXiv:2007.14321). A wrong label scores 0.

    Args:
        predict: from floats, shaped as inputs, to labels; asked 10 * moves times of each.
        inputs: (n, ...) numbers; distances are Euclidean, so scale columns.
        labels: (n,) the right ones.
        member: (n,) 0 or 1.
        moves: of each input; the shortest counts.
        about: groups, example_ids, fair_coins of `AttackScores`.

    Raises:
        InputError: what does not fit, or a model that is never right or predicts one label.
    """
    given, right, inside = np.asarray(inputs), np.asarray(labels), np.asarray(member)
    if not given.size or not given.shape[:1] == right.shape == inside.shape:
        shapes = {"inputs": given.shape, "labels": right.shape, "members": inside.shape}
        raise refused("refusal.attacks", "rows", **shapes)
    numbers = given.dtype.kind in "biuf" and np.isfinite(given).all()
    if not (numbers and np.isin(inside, (0, 1)).all()):
        raise refused("refusal.attacks", "numbers")
    check_positive_int("moves", moves)
    rows, kind = given.reshape(len(given), -1), np.result_type(given.dtype, np.float32)

    def told(points: FloatArray) -> NDArray[Any]:
        return np.asarray(predict(points.reshape(-1, *given.shape[1:]).astype(kind)))

    predicted = told(rows)
    if predicted.shape != (len(rows),):
        raise refused("refusal.attacks", "predict", n=len(rows), shape=predicted.shape)
    if (predicted == predicted[0]).all():
        raise refused("refusal.attacks", "one_label", label=predicted[0])
    if not (known := predicted == right).any():
        raise refused("refusal.attacks", "never_right", kind=predicted.dtype, right=right.dtype)
    start, label = rows[known].astype(np.float64), right[known]
    # In the order of hashes, so that no score depends on that of the rows.
    ends = hash_pandas_object(pd.DataFrame(rows), index=False).to_numpy().argsort(kind="stable")
    turns = pd.Series(predicted[ends]).groupby(predicted[ends]).cumcount()  # labels take turns
    ends = ends[np.argsort(turns, kind="stable")][:_ENDS]  # so that a rare one is among them
    squares = (rows[ends].astype(np.float64) ** 2).sum(axis=1) - 2 * start @ rows[ends].T
    squares[predicted[ends] == label[:, None]] = np.inf
    nearest, scores = np.argsort(squares, axis=1)[:, :moves], np.zeros(len(rows))
    scores[known] = np.inf
    for end in ends[nearest.T]:
        away, low, high = rows[end] - start, np.zeros(len(start)), np.ones(len(start))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            lost = told(start + middle[:, None] * away) != label
            low, high = np.where(lost, low, middle), np.where(lost, middle, high)
        shorter = np.minimum(scores[known], high * np.linalg.norm(away, axis=1))
        scores[known] = np.where(predicted[end] == label, scores[known], shorter)
    return AttackScores(scores, inside.astype(bool), "distance to the decision boundary", **about)


# --- the last iterate


def last_iterate_epsilon(settings: StepSettings, *, delta: float = 1e-5) -> float:
    """HEURISTIC, no bound: epsilon of the released model if every loss were linear.

    Steinke, Nasr, Ganesh et al. 2024 (arXiv:2410.06186), section 3: the last iterate then shows the
    sum of all steps, N(0, T sigma^2) without an example of full gradients, and with it the same
    plus how often it was drawn, binomial of T and q. It can lie below or above the truth of a
    model that is not linear, and often lies far below what every update shows.

    InputError for a delta outside (0, 1), and for settings that change between steps.
    """
    delta, (drawn, weights, noise) = check_delta(delta), _last_iterate(settings)

    def sides(x: float) -> tuple[float, FloatArray]:
        """The log ratio of densities at x, and delta of the tests that accuse above, and below."""
        ratio = float(special.logsumexp((drawn * x - drawn**2 / 2) / noise**2, b=weights))
        above, below = (weights @ special.ndtr(sign * (drawn - x) / noise) for sign in (1, -1))
        others = special.ndtr(np.array([-x, x]) / noise)
        factor = np.exp(np.minimum([ratio, -ratio], 700.0))
        return ratio, np.array([above - factor[0] * others[0], others[1] - factor[1] * below])

    def excess(x: float, side: int) -> float:
        return float(sides(x)[1][side]) - delta

    found, width = [0.0], float(drawn[-1]) + _FAR * noise
    middle = float(optimize.brentq(lambda x: sides(x)[0], -width, width))  # epsilon 0
    for side, sign in enumerate((1.0, -1.0)):
        if excess(middle, side) > 0:
            x = optimize.brentq(excess, middle, middle + sign * width, args=(side,))
            found.append(sign * sides(float(x))[0])
    return max(found)


def last_iterate_rate(settings: StepSettings, false_positive_rate: float) -> float:
    """HEURISTIC: the largest true-positive rate of an attack on that last iterate."""
    drawn, weights, noise = _last_iterate(settings)
    threshold = -noise * special.ndtri(false_positive_rate)
    return float(weights @ special.ndtr((drawn - threshold) / noise))


def _last_iterate(settings: StepSettings) -> tuple[FloatArray, FloatArray, float]:
    """How often an example may be drawn, the probability of each, and the sum's noise."""
    if settings.distinct()[0] is not None:
        raise refused("refusal.attacks", "last_iterate")
    steps, one = len(settings), settings.at(0)
    drawn = np.arange(steps + 1.0)
    weights = stats.binom.pmf(drawn, steps, one.sample_rate)
    kept = weights > 1e-300
    return drawn[kept], weights[kept], one.noise_multiplier * np.sqrt(steps)
