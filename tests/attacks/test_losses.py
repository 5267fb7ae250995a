import numpy as np
import pandas as pd
import pytest

from indpriv.attacks import ATTACKS, Material
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from synthetic import rows


def losses(train_loss, test_loss, **columns):
    train = rows("train", [0] * len(train_loss), loss=train_loss)
    test = rows("test", [0] * len(test_loss), loss=test_loss)
    examples = ExampleTable(pd.concat([train, test], ignore_index=True).assign(**columns))
    return Material(losses=examples)


def scores_of(name, *args, **columns):
    return ATTACKS[name].scores(losses(*args, **columns))


def test_a_small_loss_is_a_high_score():
    found = scores_of("loss_threshold", [0.1, np.inf], [0.9])
    assert found.scores.tolist() == [-0.1, -np.inf, -0.9]
    assert found.member.tolist() == [True, True, False]
    assert found.groups is None


def test_examples_without_a_loss_are_left_out():
    material = losses([0.1, np.nan], [np.nan, 0.9], sex=["f", "m", "m", None])
    found = ATTACKS["loss_threshold"].scores(material)
    assert found.scores.tolist() == [-0.1, -0.9]
    assert found.member.tolist() == [True, False]
    groups = material.groups("sex", found.example_ids, found.member)
    assert groups.tolist() == ["f", "(missing)"]


@pytest.mark.parametrize(("train", "test"), [([np.nan], [1.0]), ([1.0], [])])
def test_both_sides_are_needed(train, test):
    with pytest.raises(InputError, match="needs a loss of a training and of a test example"):
        scores_of("loss_threshold", train, test)


def test_what_is_hard_for_its_group_does_not_count():
    """Losses of one group are ten times as large; each group has members of smaller losses."""
    rng = np.random.default_rng(0)
    hard = np.arange(800) % 2 == 1
    loss = np.where(hard, 1.0, 0.1) * np.exp(rng.normal(0, 0.1, 800))
    loss[:400] *= 0.8
    found = scores_of("quantile", loss[:400], loss[400:], sex=np.where(hard, "f", "m"))
    members = found.scores[found.member]
    assert len(found.scores) == 600  # half of the test examples gave the regression
    assert np.median(members) > np.quantile(found.scores[~found.member], 0.8)
    assert abs(np.median(members[::2]) - np.median(members[1::2])) < 0.5


@pytest.mark.parametrize("test_loss", [[0.5] * 39, [0.0] * 50, [np.nan] * 50, [np.inf] * 50])
def test_too_few_test_examples_are_refused_and_audits_leave_the_attack_out(test_loss):
    given = losses([0.1] * 50, [*test_loss, 0.4])
    enough = len(test_loss) == 39
    assert ATTACKS["quantile"].can_use(given) == enough
    if not enough:
        with pytest.raises(InputError, match=r"needs 40 test examples .* \(there are 1\)"):
            ATTACKS["quantile"].scores(given)


def test_without_predictions_no_attack_reads_labels():
    given = losses([0.1] * 50, [0.5] * 50, correct=pd.array([None] * 100, dtype="boolean"))
    assert not ATTACKS["label_gap"].can_use(given)
    assert ATTACKS["label_gap"].lacks(given).startswith("training and test predictions")
    assert ATTACKS["loss_threshold"].can_use(given)


@pytest.mark.parametrize(
    "year",
    [
        np.repeat(["2023", "2024"], 500),
        np.arange(1000.0),
        np.r_[np.inf, np.nan, np.arange(998.0)],
    ],
)
@pytest.mark.parametrize("middle", [0.05, 3.0])
def test_values_that_only_training_examples_have_do_not_give_members_away(year, middle):
    """The losses know nothing of membership, so a member scores above an other half the time."""
    loss = middle * np.exp(np.random.default_rng(1).normal(0, 0.3, 1000))
    found = scores_of("quantile", loss[:500], loss[500:], year=year)
    members, others = found.scores[found.member], found.scores[~found.member]
    assert abs((members[:, None] > others).mean() - 0.5) < 0.15


@pytest.mark.parametrize("row", [3, 70])
def test_losses_below_0_are_refused_and_audits_leave_the_attack_out(row):
    loss = np.full(100, 0.5)
    loss[row] = -0.1
    given = losses(loss[:50], loss[50:])
    assert ATTACKS["loss_threshold"].can_use(given)
    assert not ATTACKS["quantile"].can_use(given)
    with pytest.raises(InputError, match="none of them below 0"):
        ATTACKS["quantile"].scores(given)


def test_without_any_training_loss_audits_leave_out_what_reads_losses():
    given = losses([np.nan] * 50, [0.5] * 50)
    for name in ("loss_threshold", "quantile"):
        assert ATTACKS[name].lacks(given) == "a loss of a training and of a test example"
