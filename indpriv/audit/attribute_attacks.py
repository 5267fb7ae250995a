"""Attacks that guess attributes of the examples of a run. Sensitive."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from indpriv.analysis.attacks.attributes import (
    AttributeFindings,
    EpsilonsOfExamples,
    measure_attribute,
)
from indpriv.analysis.attacks.ceilings import Ceilings, mu_of
from indpriv.attacks import Material
from indpriv.attacks.attribute_knowledge import GUESSERS, AttributeKnowledge
from indpriv.epsilon_table import EpsilonTable


def attribute_attacks(
    materials: dict[str, Material],
    columns: Sequence[str] = (),
    *,
    members: EpsilonTable | None = None,
    holdout: EpsilonTable | None = None,
    ceilings: Ceilings | None = None,
) -> tuple[AttributeFindings, ...]:
    """Every attack on every attribute that a run names, on the run and on its baseline.

    Args:
        materials: what attacks can use of the audited model ("dp") and of the baseline ("non_dp").
        columns: to group by; an attribute is not grouped by itself.
        members: epsilons of the training examples.
        holdout: epsilons that the test examples would have had on the same trajectory.
        ceilings: what any attack can reach.
    """
    tasks = [
        (model, material, known, guesser)
        for model, material in materials.items()
        for known in material.attributes or ()
        for guesser in GUESSERS
    ]
    found = []
    for model, material, known, guesser in tasks:
        ours = model == "dp"
        found.append(
            measure_attribute(
                known,
                guesser,
                model=model,
                groups={
                    column: material.groups(column, known.example_ids, known.member)
                    for column in columns
                    if column != known.name
                },
                account=_epsilons(known, members, holdout) if ours else None,
                ceiling=ceilings.advantage if ours and ceilings is not None else None,
                tests=len(tasks),
            )
        )
    return tuple(found)


def _epsilons(
    known: AttributeKnowledge, members: EpsilonTable | None, holdout: EpsilonTable | None
) -> EpsilonsOfExamples | None:
    """The account of these examples; None of units of several rows."""
    if members is None or members.account.rows_per_unit is not None:
        return None
    inside, ids = known.member, known.example_ids
    mine = pd.Index(members.example_ids).get_indexer(ids[inside])
    mu = np.full(len(ids), np.nan)
    mu[inside] = mu_of(members)[mine]
    epsilon = None
    if holdout is not None:
        others = pd.Index(holdout.example_ids).get_indexer(ids[~inside])
        epsilon = np.empty(len(ids))
        epsilon[inside], epsilon[~inside] = members.epsilon[mine], holdout.epsilon[others]
    return EpsilonsOfExamples(members, mu, epsilon)
