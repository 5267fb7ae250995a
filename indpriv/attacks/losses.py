"""Membership inference from the losses of a final model on its examples. Output is sensitive.

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
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

_WHAT = {"loss": "a loss", "correct": "a prediction that is right or wrong"}
_MOST_VALUES = 50  # of a column that becomes one indicator for each value
_LEAST = 20  # hold-out examples to regress on
_RIDGE = 1e-3
_SEED = 0  # of the half of the hold-out that the regression uses


def loss_scores(examples: ExampleTable) -> AttackScores:
    """Score every training and test example by minus its loss.

    A model has a small loss on what it has memorised.

    Returns:
        one score for each example with a loss, training examples first. An infinite loss counts as
        never a member.

    Raises:
        InputError: no training example or no test example has a loss.

    >>> import pandas as pd
    >>> from indpriv.example_table import ExampleTable
    >>> frame = pd.DataFrame({"example_id": [0, 0], "unit_id": [0, 0], "split": ["train", "test"],
    ...                       "label": [1, 1], "loss": [0.1, 0.9], "correct": [True, False]})
    >>> loss_scores(ExampleTable(frame)).scores
    array([-0.1, -0.9])
    """
    scores = -_column(examples, "loss")
    return _scores(examples, scores, ~np.isnan(scores), "loss threshold")


def label_scores(examples: ExampleTable) -> AttackScores:
    """Score every training and test example by whether the model gets its label right.

    Returns:
        1 or 0 for each example whose correctness is known, training examples first. Their AUC is
        1/2 plus half the gap between training and test accuracy.

    Raises:
        InputError: no training example or no test example has a prediction, as in a task without
            accuracy.
    """
    scores = _column(examples, "correct")
    return _scores(examples, scores, ~np.isnan(scores), "right or wrong label")


def quantile_scores(examples: ExampleTable) -> AttackScores:
    """Score examples by how far their confidence lies above that of similar non-members.

    A random half of the test examples gives the regression; the scores are of the training examples
    and of the other half. The label and every metadata column with at most 50 values, or of
    numbers, are its features.

    Raises:
        InputError: no losses, a loss below 0, or fewer than 40 test examples with a finite one
            above 0.
    """
    lacking = needs_of_regression(examples)
    if lacking is not None:
        raise InputError(f"a regression on half of the test examples needs {lacking}")
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
    method = "regression on hold-out losses"
    return _scores(examples, (confidence - mean) / scale, known & ~fitting, method)


def needs_of_losses(examples: ExampleTable) -> str | None:
    """What `loss_scores` needs and the examples lack; None if nothing."""
    known = all(split["loss"].notna().any() for split in (examples.train, examples.test))
    return None if known else "a loss of a training and of a test example"


def needs_of_labels(examples: ExampleTable) -> str | None:
    """What `label_scores` needs and the examples lack; None if nothing."""
    known = all(split["correct"].notna().any() for split in (examples.train, examples.test))
    return None if known else "training and test predictions that are right or wrong"


def needs_of_regression(examples: ExampleTable) -> str | None:
    """What `quantile_scores` needs and the examples lack; None if nothing."""
    losses = to_floats(examples.test["loss"])
    fitted = int((np.isfinite(losses) & (losses > 0)).sum())
    if (losses < 0).any() or (to_floats(examples.train["loss"]) < 0).any():
        return "cross-entropy losses, none of them below 0"
    if fitted >= 2 * _LEAST:
        return needs_of_losses(examples)
    return f"{2 * _LEAST} test examples with a finite loss above 0 (there are {fitted})"


def _column(examples: ExampleTable, name: str) -> FloatArray:
    """A column of training and then of test examples; InputError where a split has no value."""
    parts = []
    for split, frame in (("training", examples.train), ("test", examples.test)):
        parts.append(to_floats(frame[name]))
        if np.isnan(parts[-1]).all():
            raise InputError(
                f"no {split} example has {_WHAT[name]}; the attack needs members and non-members"
            )
    return np.concatenate(parts)


def _scores(
    examples: ExampleTable, scores: FloatArray, used: BoolArray, method: str
) -> AttackScores:
    """Scores of the examples that are used, from those of all, training examples first."""
    ids = np.concatenate([examples.train["example_id"], examples.test["example_id"]])[used]
    member = (np.arange(len(scores)) < len(examples.train))[used]
    return AttackScores(scores[used], member, method, example_ids=ids)


def _half(ids: np.ndarray, known: BoolArray) -> BoolArray:
    """A random half of the known examples, which depends on their ids and not on their order."""
    order = np.argsort(ids, kind="stable")
    order = order[known[order]]
    chosen = np.random.default_rng(_SEED).permutation(len(order))[: len(order) // 2]
    half = np.zeros(len(ids), dtype=bool)
    half[order[chosen]] = True
    return half


def _features(frame: pd.DataFrame) -> FloatArray:
    """Indicators of texts and standardised numbers; a number that is not finite is the mean."""
    columns = []
    for name in groupable_columns(frame):
        values = frame[name]
        if values.nunique() <= _MOST_VALUES:
            columns += list(pd.get_dummies(values.astype(str)).to_numpy().T)
        elif pd.api.types.is_numeric_dtype(values):
            numbers = to_floats(values)
            finite = np.isfinite(numbers)
            numbers = np.where(finite, numbers, numbers[finite].mean() if finite.any() else 0.0)
            columns.append((numbers - numbers.mean()) / (numbers.std() or 1.0))
    found = np.empty((len(frame), len(columns)))
    for number, column in enumerate(columns):
        found[:, number] = column
    return found


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
