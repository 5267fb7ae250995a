"""What an attack on one model can use. Sensitive."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import BoolArray
from indpriv._columns import partition
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.attribute_knowledge import AttributeKnowledge
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable


@dataclass(frozen=True)
class Material:
    """What is known about one model; a field is None where it is not known.

    Attributes:
        final_losses: losses of the final model on its training examples (members) and on test
            examples (non-members).
        signals: confidences of the model (row `audited`) and of reference models.
        label_signals: shares of perturbed copies of each example that get its label, of the same
            models.
        checkpoint_signals: mean confidences over the checkpoints, of the same models.
        attributes: what speaks for each value of attributes of its examples.
    """

    final_losses: ExampleTable | None = None
    signals: AttackSignals | None = None
    label_signals: AttackSignals | None = None
    checkpoint_signals: AttackSignals | None = None
    attributes: tuple[AttributeKnowledge, ...] | None = None

    def groups(
        self, by: str, example_ids: NDArray[np.generic], member: BoolArray
    ) -> NDArray[np.generic]:
        """The group of each example: members are training examples, the others test examples.

        Args:
            by: "label" or a metadata column; see `indpriv._columns`.
            example_ids: (n,) ids within their split.
            member: (n,) whether each is a training example.

        Raises:
            InputError: the examples are not known, or an id is not among them.
        """
        if self.final_losses is None:
            raise InputError(f"there is no example table, which holds the groups by {by}")
        train, test = self.final_losses.train, self.final_losses.test
        parts = partition(train, test, by)
        names = np.array(parts.names, dtype=object)
        found = np.empty(len(example_ids), dtype=object)
        for split, codes, inside in (
            (train, parts.train_codes, member),
            (test, parts.test_codes, ~member),
        ):
            rows = pd.Index(split["example_id"].to_numpy()).get_indexer(example_ids[inside])
            if (rows < 0).any():
                raise InputError(
                    f"{int((rows < 0).sum())} attacked examples are not in the example table of "
                    "the run; signals and run must be of the same data"
                )
            found[inside] = names[codes[rows]]
        return found
