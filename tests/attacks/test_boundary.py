"""Distances to the decision boundary, by labels only."""

import numpy as np
import pytest

from indpriv import InputError
from indpriv.analysis.attacks.rates import separation
from indpriv.attacks import boundary_scores

RNG = np.random.default_rng


def linear(weights):
    return lambda x: (x.reshape(len(x), -1) @ weights > 0).astype(int)


def test_distances_of_a_linear_model_are_those_on_the_way_and_in_their_order():
    """Never below the exact one, |w . x| / |w|; 0 where the label is wrong."""
    x, weights = RNG(0).normal(size=(800, 5)), np.arange(1.0, 6.0)
    exact = np.abs(x @ weights) / np.linalg.norm(weights)
    labels = linear(weights)(x)
    labels[:40] = 1 - labels[:40]
    scores = boundary_scores(linear(weights), x, labels, np.ones(800, bool)).scores
    assert (scores[:40] == 0).all()
    assert (scores[40:] > 0.999 * exact[40:]).all()
    assert np.corrcoef(scores[40:], exact[40:])[0, 1] > 0.9
    more = boundary_scores(linear(weights), x, labels, np.ones(800, bool), moves=400).scores
    assert (more <= scores).all()
    assert np.median(more[40:] / exact[40:]) < np.median(scores[40:] / exact[40:])


def test_a_rare_class_among_many_inputs_leaves_no_ties_at_infinity():
    x = RNG(4).normal(size=(4000, 2))
    rare = lambda points: (points[:, 0] > 3.2).astype(int)  # noqa: E731
    labels = rare(x)
    assert 0 < labels.sum() < 8
    scores = boundary_scores(rare, x, labels, np.ones(4000, bool), moves=3).scores
    assert np.isfinite(scores).all()
    assert (scores >= np.abs(x[:, 0] - 3.2) * 0.999).all()


def test_who_was_a_member_decides_no_score():
    x, labels = RNG(1).normal(size=(200, 3)), np.arange(200) % 3
    model = lambda points: np.argmax(points, axis=1)  # noqa: E731
    found = [boundary_scores(model, x, labels, RNG(k).random(200) < 0.5).scores for k in (0, 1)]
    assert (found[0] == found[1]).all()


def test_labels_that_a_model_memorised_give_members_away():
    rng, member = RNG(2), np.arange(400) < 200
    x, labels = rng.normal(size=(400, 8)), rng.integers(0, 2, 400)

    def nearest(points):
        return labels[:200][((points[:, None] - x[None, :200]) ** 2).sum(axis=2).argmin(axis=1)]

    scores = boundary_scores(nearest, x, labels, member, moves=5, example_ids=np.arange(400))
    rates = {row["rate"]: row for row in separation(scores.scores[member], scores.scores[~member])}
    assert rates["auc"]["low"] > 0.8
    assert scores.example_ids[-1] == 399


def test_models_get_images_and_integers_as_floats():
    x = RNG(3).integers(0, 255, (30, 1, 4, 4), dtype=np.uint8)

    def model(images):
        assert images.shape[1:] == (1, 4, 4)
        assert images.dtype == np.float32
        return (images.mean(axis=(1, 2, 3)) > 127).astype(int)

    labels = model(x.astype(np.float32))
    scores = boundary_scores(model, x, labels, np.ones(30, bool), moves=100).scores
    assert np.isfinite(scores).all()
    assert (scores > 0).all()


def test_a_model_that_is_mostly_wrong_and_inputs_that_are_alike():
    x, y = np.repeat(np.eye(4), 2, axis=0), np.arange(8) % 2
    model = linear(np.array([-1.0, 1, -1, 1]))
    wrong = np.where(np.arange(8), 1 - model(x), model(x))
    assert (boundary_scores(model, x, wrong, y == 1).scores[1:] == 0).all()
    assert (boundary_scores(model, x, y, y == 1).scores[model(x) == y] > 0).all()


def test_bad_input_is_refused():
    x, y, model = np.eye(4), np.array([0, 1, 0, 1]), linear(np.array([-1.0, 1, -1, 1]))
    for arguments, options, message in (
        ((model, x, y[:3], y == 1), {}, r"shape \(4, 4\), labels \(3,\) and members \(4,\)"),
        ((model, x, y[:, None], y == 1), {}, r"labels \(4, 1\)"),
        ((model, x[:0], y[:0], y[:0]), {}, r"shape \(0, 4\)"),
        ((model, np.full((4, 4), np.nan), y, y == 1), {}, "no finite numbers"),
        ((model, x.astype(str), y, y == 1), {}, "no finite numbers"),
        ((model, x, y, np.arange(4)), {}, "members other than 0 and 1"),
        ((lambda points: points @ np.arange(4) / 9, x, y + 2, y == 1), {}, "of float64, is right"),
        ((model, x, y.astype(str), y == 1), {}, "labels are of <U"),
        ((model, x[:1], y[:1], y[:1]), {}, "all inputs the label"),
        ((lambda points: np.ones(len(points)), x, y, y == 1), {}, "all inputs the label 1"),
        ((model, x, y, y == 1), {"moves": 0}, "moves=0"),
        ((lambda points: points, x, y, y == 1), {}, r"\(4, 4\) values for 4 inputs"),
    ):
        with pytest.raises(InputError, match=message):
            boundary_scores(*arguments, **options)
