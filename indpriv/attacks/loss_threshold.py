"""Membership inference from what a final model makes of its examples. Output is sensitive."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import FloatArray
from indpriv._columns import to_floats
from indpriv.attack_scores import AttackScores
from indpriv.attacks.material import Material
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

LOSS_THRESHOLD = "loss threshold"
LABEL_GAP = "right or wrong label"


def loss_scores(material: Material) -> AttackScores:
    """Score every training and test example by minus its loss.

    A model has a small loss on what it has memorised.

    Args:
        material: must have `final_losses`.

    Returns:
        one score for each example with a loss, training examples first. An infinite loss counts as
        never a member.

    Raises:
        InputError: no training example or no test example has a loss.

    >>> import pandas as pd
    >>> from indpriv.example_table import ExampleTable
    >>> frame = pd.DataFrame({"example_id": [0, 0], "unit_id": [0, 0], "split": ["train", "test"],
    ...                       "label": [1, 1], "loss": [0.1, 0.9], "correct": [True, False]})
    >>> loss_scores(Material(final_losses=ExampleTable(frame))).scores
    array([-0.1, -0.9])
    """
    examples = examples_of(material)
    return _scores(material, -column_of(examples, "loss"), LOSS_THRESHOLD)


def label_scores(material: Material) -> AttackScores:
    """Score every training and test example by whether the model gets its label right.

    Args:
        material: must have `final_losses`.

    Returns:
        1 or 0 for each example whose correctness is known, training examples first. Their AUC is
        1/2 plus half the gap between training and test accuracy.

    Raises:
        InputError: no training example or no test example has a prediction, as in a task without
            accuracy.
    """
    examples = examples_of(material)
    return _scores(material, column_of(examples, "correct"), LABEL_GAP)


def needs_of_losses(material: Material) -> str | None:
    """What `loss_scores` needs and the examples lack; None if nothing."""
    examples = examples_of(material)
    known = (examples.train["loss"].notna().any(), examples.test["loss"].notna().any())
    return None if all(known) else "a loss of a training and of a test example"


def needs_of_labels(material: Material) -> str | None:
    """What `label_scores` needs and the examples lack; None if nothing."""
    examples = examples_of(material)
    known = (examples.train["correct"].notna().any(), examples.test["correct"].notna().any())
    return None if all(known) else "training and test predictions that are right or wrong"


def examples_of(material: Material) -> ExampleTable:
    """The example table; InputError where it is not known."""
    if material.final_losses is None:
        raise InputError("the losses of the final model are not known, and this attack needs them")
    return material.final_losses


def column_of(examples: ExampleTable, column: str) -> FloatArray:
    """A column of training and then of test examples; InputError where a split has no value."""
    parts = (("training", examples.train[column]), ("test", examples.test[column]))
    return np.concatenate([_known(split, values, column) for split, values in parts])


def scores_of_examples(
    material: Material, scores: FloatArray, used: NDArray[np.bool_], method: str
) -> AttackScores:
    """Scores of the examples that are used, from those of all, training examples first."""
    examples = examples_of(material)
    ids = np.concatenate([examples.train["example_id"], examples.test["example_id"]])[used]
    member = (np.arange(len(scores)) < len(examples.train))[used]
    return AttackScores(scores[used], member, method, example_ids=ids)


def _scores(material: Material, scores: FloatArray, method: str) -> AttackScores:
    return scores_of_examples(material, scores, ~np.isnan(scores), method)


def _known(split: str, column: "pd.Series[Any]", name: str) -> FloatArray:
    values = to_floats(column)
    if np.isnan(values).all():
        what = "a loss" if name == "loss" else "a prediction that is right or wrong"
        raise InputError(f"no {split} example has {what}; the attack needs members and non-members")
    return values
