"""How far inputs are from the decision boundary, by predicted labels only. Sensitive."""

from collections.abc import Callable
from typing import Any

import numpy as np

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
    """Score examples by how far their inputs move until the model changes its label.

    After Choquette-Choo et al. 2021 (arXiv:2007.14321), but not by the nearest boundary: an input
    moves towards the nearest ones with another label. A wrong label scores 0.

    Args:
        predict: from floats, shaped as inputs, to labels; asked about 10 * moves times of each.
        inputs: (n, ...) numbers; distances are Euclidean, so scale the columns of a table.
        labels: (n,) the right ones.
        member: (n,) bool, whether the model was trained on each.
        moves: of each input; the shortest counts.
        about: further fields of `AttackScores`: groups, example_ids, fair_coins.
    """
    given, right, kept = np.asarray(inputs), np.asarray(labels), np.asarray(member, dtype=bool)
    if not len(given) == len(right) == len(kept) > 0:
        raise refused("refusal.attacks", "rows", n=len(given), labels=len(right), members=len(kept))
    check_positive_int("moves", moves)
    rows, kind = given.reshape(len(given), -1), np.result_type(given.dtype, np.float32)

    def told(points: FloatArray) -> NDArray[Any]:
        return np.asarray(predict(points.reshape(-1, *given.shape[1:]).astype(kind)))

    predicted = told(rows)
    if predicted.shape != (len(rows),):
        raise refused("refusal.attacks", "predict", n=len(rows), shape=predicted.shape)
    if (predicted == predicted[0]).all():
        raise refused("refusal.attacks", "one_label", label=predicted[0])
    known = predicted == right
    start, label = rows[known].astype(np.float64), right[known]
    ends = np.random.default_rng(0).permutation(len(rows))[:_ENDS]
    squares = (rows[ends].astype(np.float64) ** 2).sum(axis=1) - 2 * start @ rows[ends].T
    squares[predicted[ends] == label[:, None]] = np.inf
    nearest, scores = np.argsort(squares, axis=1)[:, :moves], np.zeros(len(rows))
    scores[known] = np.inf
    for end in ends[nearest.T] if len(start) else ():
        away, low, high = rows[end] - start, np.zeros(len(start)), np.ones(len(start))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            lost = told(start + middle[:, None] * away) != label
            low, high = np.where(lost, low, middle), np.where(lost, middle, high)
        shorter = np.minimum(scores[known], high * np.linalg.norm(away, axis=1))
        scores[known] = np.where(predicted[end] == label, scores[known], shorter)
    return AttackScores(scores, kept, "distance to the decision boundary", **about)
