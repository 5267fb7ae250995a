"""Membership inference from the losses of a final model on its examples. Output is sensitive.

Each attack takes training examples (members) and test examples, and says beforehand what it lacks.
The regression is after Bertran, Tang, Roth, Kearns, Morgenstern and Wu 2023, "Scalable Membership
Inference Attacks via Quantile Regression" (arXiv:2307.03694), in its normal form: mean and scale of
the confidence are regressed on what is known of an example other than its membership.
"""

import numpy as np
import pandas as pd

from indpriv._arrays import BoolArray, FloatArray
from indpriv._columns import groupable_columns, to_floats
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import from_losses
from indpriv.example_table import ExampleTable

_MOST_VALUES = 50  # of a column that becomes one indicator for each value
_LEAST = 20  # hold-out examples to regress on
_RIDGE = 1e-3
_SIDES = {
    "loss": "a loss of a training and of a test example",
    "correct": "training and test predictions that are right or wrong",
}
_SEED = 0  # of the half of the hold-out that the regression uses


def loss_scores(examples: ExampleTable) -> AttackScores:
    """Minus the loss of each example that has one; an infinite loss is never a member's.

    A model has a small loss on what it has memorised.

    >>> import pandas as pd
    >>> from indpriv.example_table import ExampleTable
    >>> frame = pd.DataFrame({"example_id": [0, 0], "unit_id": [0, 0], "split": ["train", "test"],
    ...                       "label": [1, 1], "loss": [0.1, 0.9], "correct": [True, False]})
    >>> loss_scores(ExampleTable(frame)).scores
    array([-0.1, -0.9])
    """
    scores = -_column(examples, "loss")
    return _scores(examples, scores, ~np.isnan(scores))


def label_scores(examples: ExampleTable) -> AttackScores:
    """1 or 0 for each example: whether the model gets its label right, where that is known.

    Their AUC is 1/2 plus half the gap between training and test accuracy.
    """
    scores = _column(examples, "correct")
    return _scores(examples, scores, ~np.isnan(scores))


def lacks(examples: ExampleTable, column: str) -> str | None:
    """What the attack on a column lacks: correct is not known in a task without accuracy."""
    known = all(split[column].notna().any() for split in (examples.train, examples.test))
    return None if known else _SIDES[column]


def quantile_scores(examples: ExampleTable) -> AttackScores:
    """How far the confidence of an example lies above that of similar non-members.

    A random half of the test examples gives the regression; the scores are of the training examples
    and of the other half. The label and every metadata column with at most 50 values, or of
    numbers, are its features.
    """
    confidence = from_losses(_column(examples, "loss"))
    known, n_train = ~np.isnan(confidence), len(examples.train)
    fitting = _half(examples.test["example_id"].to_numpy(), known[n_train:])
    fitting = np.concatenate([np.zeros(n_train, dtype=bool), fitting])
    finite = confidence[np.isfinite(confidence)]
    confidence = np.clip(confidence, finite.min(), finite.max())
    columns = groupable_columns(examples.frame)
    splits = [examples.train[columns], examples.test[columns]]
    features = _centred(_features(pd.concat(splits, ignore_index=True)), fitting)
    mean = _fit(features, confidence, fitting)
    residual = np.log(np.abs(confidence - mean) + 1e-6)
    scale = np.exp(_fit(features, residual, fitting))
    return _scores(examples, (confidence - mean) / scale, known & ~fitting)


def lacks_for_regression(examples: ExampleTable) -> str | None:
    """What `quantile_scores` needs and the examples lack; None if nothing."""
    losses = to_floats(examples.test["loss"])
    fitted = int((np.isfinite(losses) & (losses > 0)).sum())
    if (losses < 0).any() or (to_floats(examples.train["loss"]) < 0).any():
        return "cross-entropy losses, none of them below 0"
    if fitted >= 2 * _LEAST:
        return lacks(examples, "loss")
    return f"{2 * _LEAST} test examples with a finite loss above 0 (there are {fitted})"


def _column(examples: ExampleTable, name: str) -> FloatArray:
    """A column of training and then of test examples."""
    return np.concatenate([to_floats(split[name]) for split in (examples.train, examples.test)])


def _scores(examples: ExampleTable, scores: FloatArray, used: BoolArray) -> AttackScores:
    """Scores of the examples that are used, from those of all, training examples first."""
    ids = np.concatenate([examples.train["example_id"], examples.test["example_id"]])[used]
    member = (np.arange(len(scores)) < len(examples.train))[used]
    return AttackScores(scores[used], member, "", example_ids=ids)


def _half(ids: np.ndarray, known: BoolArray) -> BoolArray:
    """A random half of the known examples, which depends on their ids and not on their order."""
    order = np.argsort(ids, kind="stable")
    order = order[known[order]]
    chosen = np.random.default_rng(_SEED).permutation(len(order))[: len(order) // 2]
    return np.asarray(np.isin(np.arange(len(ids)), order[chosen]))


def _features(frame: pd.DataFrame) -> FloatArray:
    """Indicators of texts and standardised numbers; a number that is not finite is the mean."""
    columns = [np.empty((0, len(frame)))]
    for name in groupable_columns(frame):
        values = frame[name]
        if values.nunique() <= _MOST_VALUES:
            columns.append(pd.get_dummies(values.astype(str)).to_numpy(np.float64).T)
        elif pd.api.types.is_numeric_dtype(values):
            numbers = to_floats(values)
            finite = np.isfinite(numbers)
            numbers = np.where(finite, numbers, numbers[finite].mean() if finite.any() else 0.0)
            columns.append((numbers - numbers.mean())[None] / (numbers.std() or 1.0))
    return np.ascontiguousarray(np.concatenate(columns).T)


def _centred(features: FloatArray, used: BoolArray) -> FloatArray:
    """Features, changed in place: cut off at the range of the used rows, less their means.

    An example unlike all of these rows then gets their mean. Otherwise values that only training
    examples have, as of a split by year, would give members away without the model.
    """
    fitted = features[used]
    np.clip(features, fitted.min(axis=0), fitted.max(axis=0), out=features)
    features -= fitted.mean(axis=0)
    return features


def _fit(x: FloatArray, values: FloatArray, used: BoolArray) -> FloatArray:
    """Ridge regression of the used values on centred features, predicted for all.

    The intercept is not shrunk.
    """
    mean = values[used].mean()
    fitted = x[used]
    squares = fitted.T @ fitted + _RIDGE * len(fitted) * np.eye(x.shape[1])
    return np.asarray(mean + x @ np.linalg.solve(squares, fitted.T @ (values[used] - mean)))
