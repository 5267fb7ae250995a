"""How much better an attribute of a training example is guessed with the model. Sensitive.

The advantage of an attack is its accuracy on members less that of imputation without the model,
minus the same difference on non-members. What is true of the population, so that it helps alike for
both, is no leak. A right guess is a test of membership, and imputation does not depend on who was
trained on, so no attack has an advantage above the largest membership advantage that the run allows
(Yeom et al. 2018, section 5; its total variation).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr

from indpriv._arrays import BoolArray, FloatArray
from indpriv._plain import Columns, Count, Share, records
from indpriv.analysis.attacks.ceilings import Ceilings, mu_of
from indpriv.analysis.attacks.membership import (
    WRONG,
    epsilon_edges,
    materials,
    tables_of_both_sides,
)
from indpriv.analysis.attacks.rates import table
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.statistics.intervals import CONFIDENCE, clopper_pearson
from indpriv.analysis.summary import Audit, Finding
from indpriv.attacks import Material
from indpriv.attacks.attributes import GUESSERS, AttributeKnowledge, guesses
from indpriv.epsilon_table import EpsilonTable

_RATES = 4  # that an interval of an advantage is made of


BY_EPSILON = "individual epsilon"
_INDIVIDUAL = (
    "Mean over the members of the largest advantage that a Gaussian mechanism of their epsilon "
    "allows. It describes this run and is no guarantee. Null without DP."
)
_ABOVE = (
    "The advantage over all examples is above the ceiling by more than chance, corrected for all "
    "attacks on attributes: the run or its account is wrong, if the test examples were split off "
    "at random."
)
ATTRIBUTES = Columns(
    "AttributeAttack",
    "One attack that guesses one attribute of some examples of one model.",
    {
        "attribute": (str, "Its name."),
        "n_values": (Count, "Number of its values."),
        "guesser": (str, "Name of the attack in indpriv.attacks.attributes.GUESSERS."),
        "title": (str, "Of the attack, in a few words."),
        "model": (str, 'The audited model ("dp"), or the non-private baseline ("non_dp").'),
        "by": (str, f'"" of all examples; the column of the group; "{BY_EPSILON}" of bins.'),
        "name": (str, 'Of the group or bin, which has members and others; "all".'),
        "n_members": (Count, "Number of members."),
        "n_others": (Count, "Number of others."),
        "imputed": (Share, "Share of members that imputation guesses, without the model."),
        "guessed": (Share, "Share of members that the attack guesses."),
        "others_imputed": (Share, "The share of others that imputation guesses."),
        "others_guessed": (Share, "The share of others that the attack guesses."),
        "advantage": (float, "(guessed - imputed) - (others_guessed - others_imputed)."),
        "low": (float, "Lower end of its interval, at least 95 % by itself: four exact rates."),
        "high": (float, "Upper end of that interval."),
        "individual_ceiling": (Share | None, _INDIVIDUAL),
        "ceiling": (Share | None, "Largest advantage that the worst case allows; null without DP."),
        "above_ceiling": (bool, _ABOVE),
    },
)


@dataclass(frozen=True)
class EpsilonsOfExamples:
    """What an account says of the examples of an attack.

    Attributes:
        members: epsilons of the members.
        mu: (n,) of a Gaussian mechanism with each member's epsilon; NaN of others.
        epsilon: (n,) of members, and what it would have been for others; None where the norms of
            the hold-out were not recorded.
    """

    members: EpsilonTable
    mu: FloatArray
    epsilon: FloatArray | None


def measure_attribute(
    known: AttributeKnowledge,
    guesser: str,
    *,
    model: str,
    groups: Mapping[str, NDArray[np.generic]],
    account: EpsilonsOfExamples | None = None,
    ceiling: float | None = None,
    tests: int = 1,
) -> pd.DataFrame:
    """Measure one attack on one attribute: rows of `ATTRIBUTES`, of all examples first.

    groups: (n,) the group of each example, by column; account: epsilons of the examples, None
    without DP; ceiling: largest advantage that the worst case allows; tests: number of attacks.
    Bins need the norms of the hold-out, and groups without members or others are left out.
    """
    right = guesses(GUESSERS[guesser].logs(known)) == known.truth
    imputed = guesses(known.imputed) == known.truth
    mu = np.full(len(right), np.nan) if account is None else account.mu
    measured = _Measured(known.member, right, imputed, mu, 1.0 if ceiling is None else ceiling)
    everyone = np.ones(len(right), dtype=bool)
    parts = [("", "all", everyone)]
    for column, names in groups.items():
        found = names.astype(str)
        parts += [(column, name, found == name) for name in np.unique(found).tolist()]
    if account is not None and account.epsilon is not None:
        edges = epsilon_edges(account.members)
        place = np.clip(np.searchsorted(edges, account.epsilon, side="left"), 1, len(edges) - 1)
        bins = [f"{low:.3f} to {high:.3f}" for low, high in itertools.pairwise(edges)]
        each = np.array(bins, dtype=object)[place - 1]
        parts += [(BY_EPSILON, name, each == name) for name in dict.fromkeys(bins)]
    least = measured.row(everyone, 1 - (1 - CONFIDENCE) / tests)["low"]
    about = {"attribute": known.name, "n_values": len(known.values), "guesser": guesser}
    about |= {"title": GUESSERS[guesser].title, "model": model, "ceiling": ceiling}
    about |= {"above_ceiling": model == "dp" and ceiling is not None and least > ceiling}
    return table(
        ATTRIBUTES,
        [
            about | {"by": by, "name": name} | measured.row(part)
            for by, name, part in parts
            if not by or ((part & known.member).any() and (part & ~known.member).any())
        ],
    )


@dataclass(frozen=True)
class _Measured:
    member: BoolArray
    right: BoolArray
    imputed: BoolArray
    mu: FloatArray
    most: float

    def row(self, part: BoolArray, confidence: float = CONFIDENCE) -> dict[str, Any]:
        """The attack on some of the examples."""
        inside, outside = part & self.member, part & ~self.member
        level = 1 - (1 - confidence) / _RATES
        gain, loss = self.right & ~self.imputed, self.imputed & ~self.right
        limits = [
            clopper_pearson(int((of & side).sum()), int(side.sum()), level)
            for side in (inside, outside)
            for of in (gain, loss)
        ]
        rates = [
            float(of[side].mean())
            for side in (inside, outside)
            for of in (self.imputed, self.right)
        ]
        of_members, of_others = rates[1] - rates[0], rates[3] - rates[2]
        mu, individual = self.mu[inside], None
        if not np.isnan(mu).any():
            individual = float(np.minimum(2 * ndtr(mu / 2) - 1, self.most).mean())
        names = ("imputed", "guessed", "others_imputed", "others_guessed")
        return {
            "n_members": int(inside.sum()),
            "n_others": int(outside.sum()),
            **dict(zip(names, rates, strict=True)),
            "advantage": of_members - of_others,
            "low": limits[0].low - limits[1].high - limits[2].high + limits[3].low,
            "high": limits[0].high - limits[1].low - limits[2].low + limits[3].high,
            "individual_ceiling": individual,
        }


def attribute_attacks(
    materials: Mapping[str, Material],
    columns: Sequence[str] = (),
    *,
    members: EpsilonTable | None = None,
    holdout: EpsilonTable | None = None,
    ceilings: Ceilings | None = None,
) -> pd.DataFrame:
    """Every attack on every attribute that a run names, on the run and on its baseline.

    An attribute is not grouped by itself. `members` and `holdout` are epsilons of both sides.
    """
    tasks = [
        (model, material, known, guesser)
        for model, material in materials.items()
        for known in material.attributes or ()
        for guesser in GUESSERS
    ]
    found, most = [], None if ceilings is None else ceilings.advantage
    for model, material, known, guesser in tasks:
        groups = {
            column: material.groups(column, known.example_ids, known.member)
            for column in columns
            if column != known.name
        }
        ours = (_epsilons(known, members, holdout), most) if model == "dp" else (None, None)
        account, ceiling, n = *ours, len(tasks)
        key: dict[str, Any] = {"model": model, "groups": groups, "tests": n}
        found.append(measure_attribute(known, guesser, **key, account=account, ceiling=ceiling))
    return pd.concat(found, ignore_index=True) if found else table(ATTRIBUTES)


def _epsilons(
    known: AttributeKnowledge, members: EpsilonTable | None, holdout: EpsilonTable | None
) -> EpsilonsOfExamples | None:
    """The account of these examples; None of units of several rows."""
    if members is None or members.account.rows_per_unit is not None:
        return None
    inside, ids = known.member, known.example_ids
    mine = pd.Index(members.example_ids).get_indexer(ids[inside])
    mu, epsilon = np.full(len(ids), np.nan), None
    mu[inside] = mu_of(members)[mine]
    if holdout is not None:
        others = pd.Index(holdout.example_ids).get_indexer(ids[~inside])
        epsilon = np.empty(len(ids))
        epsilon[inside], epsilon[~inside] = members.epsilon[mine], holdout.epsilon[others]
    return EpsilonsOfExamples(members, mu, epsilon)


def _find(run: AuditedRun) -> dict[str, Any]:
    members, holdout = run.once(tables_of_both_sides)
    columns = [found.by for found in run.audit.groups]
    basis = {"members": members, "holdout": holdout, "ceilings": run.audit.ceilings}
    return {"attribute_attacks": attribute_attacks(materials(run.attacked), columns, **basis)}


def _alarms(audit: Audit) -> Iterator[str]:
    found = audit.attribute_attacks
    for one in records(found[found["above_ceiling"] & (found["by"] == "")]):
        if one.model == "dp":
            yield f"{one.attribute}: the advantage exceeds the worst case: {WRONG}"


FINDING = Finding(
    "attributes",
    45,
    _find,
    alarms=_alarms,
    watched="attacks on attributes above the worst case",
    attribute_attacks=(
        Annotated[pd.DataFrame, ATTRIBUTES],
        "Attacks that guess attributes, if any.",
    ),
)
