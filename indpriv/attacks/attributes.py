"""Membership by how much better a model tells an example's attributes than imputation. Sensitive.

An attacker who guesses attributes of members better than those of others tells the two apart:
attribute inference is an attack on membership too, and what limits one limits the other.
"""

import numpy as np

from indpriv.attack_scores import AttackScores
from indpriv.attacks.material import Material
from indpriv.errors import InputError

ATTRIBUTES = "attribute inference, beyond imputation"


def attribute_scores(material: Material) -> AttackScores:
    """Score examples by what the model adds to the probability of their true attributes.

    Args:
        material: must have `attributes`.

    Returns:
        for each training example, and each test example that imputation was not fitted on, the
        log-probability of the true value by imputation and model, less that by imputation alone,
        summed over attributes.

    Raises:
        InputError: nothing is known of attributes, or of other examples for each.
    """
    if not material.attributes:
        raise InputError("nothing is known of attributes, and this attack guesses them")
    first = material.attributes[0]
    total = np.zeros(len(first.truth))
    for known in material.attributes:
        if not (
            np.array_equal(known.example_ids, first.example_ids)
            and np.array_equal(known.member, first.member)
        ):
            raise InputError(f"{known.name} is of other examples than {first.name}")
        total += known.of_truth(known.log_posterior()) - known.of_truth(known.imputed)
    return AttackScores(total, first.member, ATTRIBUTES, example_ids=first.example_ids)
