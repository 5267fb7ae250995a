import numpy as np
import pandas as pd
import pytest

from indpriv.attacks.loss_threshold import loss_scores
from indpriv.attacks.material import Material
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from synthetic import rows


def losses(train_loss, test_loss, **columns):
    train = rows("train", [0] * len(train_loss), loss=train_loss)
    test = rows("test", [0] * len(test_loss), loss=test_loss)
    examples = ExampleTable(pd.concat([train, test], ignore_index=True).assign(**columns))
    return Material(final_losses=examples)


def test_a_small_loss_is_a_high_score():
    found = loss_scores(losses([0.1, np.inf], [0.9]))
    assert found.scores.tolist() == [-0.1, -np.inf, -0.9]
    assert found.member.tolist() == [True, True, False]
    assert found.groups is None


def test_examples_without_a_loss_are_left_out():
    material = losses([0.1, np.nan], [np.nan, 0.9], sex=["f", "m", "m", None])
    found = loss_scores(material)
    assert found.scores.tolist() == [-0.1, -0.9]
    assert found.member.tolist() == [True, False]
    groups = material.groups("sex", found.example_ids, found.member)
    assert groups.tolist() == ["f", "(missing)"]


@pytest.mark.parametrize(
    ("train", "test", "named"), [([np.nan], [1.0], "training"), ([1.0], [], "test")]
)
def test_both_sides_are_needed(train, test, named):
    with pytest.raises(InputError, match=f"no {named} example has a loss"):
        loss_scores(losses(train, test))
