"""Membership inference from the losses of a final model. Output is sensitive."""

import numpy as np
from numpy.typing import NDArray

from indpriv._columns import partition, to_floats
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

LOSS_THRESHOLD = "loss threshold"


def loss_scores(examples: ExampleTable, *, by: str | None = None) -> AttackScores:
    """Score every training and test example by minus its loss: what the model has learned by heart has a small loss.

    Args:
        examples: losses of one model on its training examples (members) and on test examples (non-members).
        by: group the scores by "label" or a metadata column; see `indpriv._columns`.

    Returns:
        one score an example that has a loss (an infinite one counts as never a member), training examples first.

    Raises:
        InputError: no training or no test example has a loss.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"example_id": [0, 0], "unit_id": [0, 0], "split": ["train", "test"], "label": [1, 1],
    ...                       "loss": [0.1, 0.9], "correct": [True, False]})
    >>> loss_scores(ExampleTable(frame)).scores
    array([-0.1, -0.9])
    """
    train, test = examples.train, examples.test
    parts = []
    for split, frame in (("training", train), ("test", test)):
        loss = to_floats(frame["loss"])
        if not (~np.isnan(loss)).any():
            raise InputError(
                f"no {split} example has a loss; a loss threshold needs members and non-members"
            )
        parts.append(loss)
    loss = np.concatenate(parts)
    known = ~np.isnan(loss)
    groups: NDArray[np.generic] | None = None
    if by is not None:
        split_up = partition(train, test, by)
        codes = np.concatenate([split_up.train_codes, split_up.test_codes])
        groups = np.array(split_up.names, dtype=object)[codes][known]
    return AttackScores(
        scores=-loss[known],
        member=(np.arange(len(loss)) < len(train))[known],
        method=LOSS_THRESHOLD,
        groups=groups,
    )
