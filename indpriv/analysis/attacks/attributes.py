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
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr

from indpriv._arrays import BoolArray, FloatArray
from indpriv._plain import Count, Share
from indpriv.analysis.attacks.ceilings import Ceilings, mu_of
from indpriv.analysis.attacks.membership import (
    WRONG,
    epsilon_edges,
    materials,
    tables_of_both_sides,
)
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.statistics.intervals import CONFIDENCE, Interval, clopper_pearson
from indpriv.analysis.summary import Audit, Finding
from indpriv.attacks import Material
from indpriv.attacks.attributes import GUESSERS, AttributeKnowledge, guesses
from indpriv.epsilon_table import EpsilonTable

_RATES = 4  # that an interval of an advantage is made of


@dataclass(frozen=True)
class AttributeRow:
    """An attack on some examples.

    Attributes:
        name: of the group or bin; "all".
        n_members, n_others: number of examples.
        imputed: share of members whose attribute imputation guesses, without the model.
        guessed: share of members whose attribute the attack guesses.
        others_imputed, others_guessed: the same of non-members.
        advantage: (guessed - imputed) - (others_guessed - others_imputed).
        interval: of the advantage, at least 95 percent by itself: exact intervals of four rates.
        individual_ceiling: mean over the members of the largest advantage that a Gaussian mechanism
            of their epsilon allows. It describes this run and is no guarantee. None without DP.
    """

    name: str
    n_members: Count
    n_others: Count
    imputed: Share
    guessed: Share
    others_imputed: Share
    others_guessed: Share
    advantage: float
    interval: Interval
    individual_ceiling: Share | None


@dataclass(frozen=True)
class AttributeFindings:
    """One attack that guesses one attribute of the examples of one model.

    Attributes:
        attribute: its name.
        n_values: number of its values.
        guesser: name of the attack in `indpriv.attacks.attributes.GUESSERS`.
        title: of the attack, in a few words.
        model: "dp", or "non_dp" for the non-private baseline.
        overall: over all examples.
        groups: by column, then by group; groups without members or others are left out.
        bins: by individual epsilon; empty where the norms of the hold-out were not recorded.
        ceiling: largest advantage that the worst case allows; None without DP, and of units of
            several rows.
        above_ceiling: the advantage is above it by more than chance, corrected for all attacks on
            attributes: the run or its account is wrong, if the test examples were split off at
            random.
    """

    attribute: str
    n_values: Count
    guesser: str
    title: str
    model: str
    overall: AttributeRow
    groups: Mapping[str, tuple[AttributeRow, ...]]
    bins: tuple[AttributeRow, ...]
    ceiling: Share | None
    above_ceiling: bool


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
) -> AttributeFindings:
    """Measure one attack on one attribute.

    groups: (n,) the group of each example, by column; account: epsilons of the examples, None
    without DP; ceiling: largest advantage that the worst case allows; tests: number of attacks.
    """
    right = guesses(GUESSERS[guesser].logs(known)) == known.truth
    imputed = guesses(known.imputed) == known.truth
    mu = np.full(len(right), np.nan) if account is None else account.mu
    measured = _Measured(known.member, right, imputed, mu, 1.0 if ceiling is None else ceiling)
    everyone = np.ones(len(right), dtype=bool)
    by_group = {
        column: measured.rows(names, np.unique(names.astype(str)).tolist())
        for column, names in groups.items()
    }
    bins: tuple[AttributeRow, ...] = ()
    if account is not None and account.epsilon is not None:
        edges = epsilon_edges(account.members)
        place = np.clip(np.searchsorted(edges, account.epsilon, side="left"), 1, len(edges) - 1)
        names = [f"{low:.3f} to {high:.3f}" for low, high in itertools.pairwise(edges)]
        bins = measured.rows(np.array(names, dtype=object)[place - 1], list(dict.fromkeys(names)))
    least = measured.row("all", everyone, 1 - (1 - CONFIDENCE) / tests).interval.low
    return AttributeFindings(
        attribute=known.name,
        n_values=len(known.values),
        guesser=guesser,
        title=GUESSERS[guesser].title,
        model=model,
        overall=measured.row("all", everyone),
        groups=by_group,
        bins=bins,
        ceiling=ceiling,
        above_ceiling=model == "dp" and ceiling is not None and least > ceiling,
    )


@dataclass(frozen=True)
class _Measured:
    member: BoolArray
    right: BoolArray
    imputed: BoolArray
    mu: FloatArray
    most: float

    def rows(self, names: NDArray[np.generic], order: list[str]) -> tuple[AttributeRow, ...]:
        """A row for each name that members and others have."""
        parts = ((name, names.astype(str) == name) for name in order)
        return tuple(
            self.row(name, part)
            for name, part in parts
            if (part & self.member).any() and (part & ~self.member).any()
        )

    def row(self, name: str, part: BoolArray, confidence: float = CONFIDENCE) -> AttributeRow:
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
        mu = self.mu[inside]
        individual = None
        if not np.isnan(mu).any():
            individual = float(np.minimum(2 * ndtr(mu / 2) - 1, self.most).mean())
        return AttributeRow(
            name=name,
            n_members=int(inside.sum()),
            n_others=int(outside.sum()),
            imputed=rates[0],
            guessed=rates[1],
            others_imputed=rates[2],
            others_guessed=rates[3],
            advantage=of_members - of_others,
            interval=Interval(
                limits[0].low - limits[1].high - limits[2].high + limits[3].low,
                limits[0].high - limits[1].low - limits[2].low + limits[3].high,
            ),
            individual_ceiling=individual,
        )


def attribute_attacks(
    materials: Mapping[str, Material],
    columns: Sequence[str] = (),
    *,
    members: EpsilonTable | None = None,
    holdout: EpsilonTable | None = None,
    ceilings: Ceilings | None = None,
) -> tuple[AttributeFindings, ...]:
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
    return tuple(found)


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
    for one in audit.attribute_attacks:
        if one.model == "dp" and one.above_ceiling:
            yield f"{one.attribute}: the advantage exceeds the worst case: {WRONG}"


FINDING = Finding(
    "attributes",
    45,
    _find,
    alarms=_alarms,
    watched="attacks on attributes above the worst case",
    attribute_attacks=(tuple[AttributeFindings, ...], "Attacks that guess attributes, if any."),
)
