"""How far inputs are from the decision boundary, by predicted labels only. Sensitive."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from indpriv._checks import check_positive_int
from indpriv._facts import refused
from indpriv._types import ArrayLike, FloatArray, NDArray
from indpriv.attack_scores import AttackScores

_ENDS = 1000  # inputs towards which others move
_HALVINGS = 10  # of a move


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
    ends = np.random.default_rng(0).permutation(len(rows))
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
