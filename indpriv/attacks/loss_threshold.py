"""Membership inference from the losses of a final model. Output is sensitive."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._columns import partition, to_floats
from indpriv.attack_scores import AttackScores
from indpriv.attacks.material import Material
from indpriv.errors import InputError

LOSS_THRESHOLD = "loss threshold"


def loss_scores(material: Material, by: str | None = None) -> AttackScores:
    """Score every training and test example by minus its loss.

    A model has a small loss on what it has memorised.

    Args:
        material: must have `final_losses`.
        by: group the scores by "label" or a metadata column; see `indpriv._columns`.

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
    examples = material.final_losses
    if examples is None:
        raise InputError("the losses of the final model are not known; a loss threshold needs them")
    train, test = examples.train, examples.test
    loss = np.concatenate([_losses("training", train["loss"]), _losses("test", test["loss"])])
    known = ~np.isnan(loss)
    groups: NDArray[np.generic] | None = None
    if by is not None:
        parts = partition(train, test, by)
        codes = np.concatenate([parts.train_codes, parts.test_codes])
        groups = np.array(parts.names, dtype=object)[codes][known]
    return AttackScores(
        scores=-loss[known],
        member=(np.arange(len(loss)) < len(train))[known],
        method=LOSS_THRESHOLD,
        groups=groups,
        example_ids=np.concatenate([train["example_id"], test["example_id"]])[known],
    )


def _losses(split: str, column: "pd.Series[Any]") -> NDArray[np.float64]:
    loss = to_floats(column)
    if np.isnan(loss).all():
        raise InputError(
            f"no {split} example has a loss; a loss threshold needs members and non-members"
        )
    return loss
