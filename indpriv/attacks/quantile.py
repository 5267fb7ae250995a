"""Is an example's confidence high for what it is? A regression on non-members. Sensitive.

After Bertran, Tang, Roth, Kearns, Morgenstern and Wu 2023, "Scalable Membership Inference Attacks
via Quantile Regression" (arXiv:2307.03694), in its normal form: mean and scale of the confidence
are regressed on what is known of an example other than its membership.
"""

import numpy as np
import pandas as pd

from indpriv._arrays import BoolArray, FloatArray
from indpriv._columns import groupable_columns, to_floats
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import from_losses
from indpriv.attacks.loss_threshold import (
    column_of,
    examples_of,
    needs_of_losses,
    scores_of_examples,
)
from indpriv.attacks.material import Material
from indpriv.errors import InputError

QUANTILE = "regression on hold-out losses"
_MOST_VALUES = 50  # of a column that becomes one indicator for each value
_LEAST = 20  # hold-out examples to regress on
_RIDGE = 1e-3
_SEED = 0  # of the half of the hold-out that the regression uses


def quantile_scores(material: Material) -> AttackScores:
    """Score examples by how far their confidence lies above that of similar non-members.

    A random half of the test examples gives the regression; the scores are of the training examples
    and of the other half. The label and every metadata column with at most 50 values, or of
    numbers, are its features.

    Args:
        material: must have `final_losses`.

    Raises:
        InputError: no losses, a loss below 0, or fewer than 40 test examples with a finite one
            above 0.
    """
    examples = examples_of(material)
    lacking = needs_of_regression(material)
    if lacking is not None:
        raise InputError(f"a regression on half of the test examples needs {lacking}")
    confidence = from_losses(column_of(examples, "loss"))
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
    return scores_of_examples(material, (confidence - mean) / scale, known & ~fitting, QUANTILE)


def needs_of_regression(material: Material) -> str | None:
    """What `quantile_scores` needs and the examples lack; None if nothing."""
    examples = examples_of(material)
    losses = to_floats(examples.test["loss"])
    fitted = int((np.isfinite(losses) & (losses > 0)).sum())
    if (losses < 0).any() or (to_floats(examples.train["loss"]) < 0).any():
        return "cross-entropy losses, none of them below 0"
    if fitted >= 2 * _LEAST:
        return needs_of_losses(material)
    return f"{2 * _LEAST} test examples with a finite loss above 0 (there are {fitted})"


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
