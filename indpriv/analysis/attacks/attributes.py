"""How much better an attribute of a training example is guessed with the model. Sensitive.

The advantage of an attack is its accuracy on members less that of imputation without the model,
minus the same difference on non-members. What is true of the population, so that it helps alike for
both, is no leak. A right guess is a test of membership, and imputation does not depend on who was
trained on, so no attack has an advantage above the largest membership advantage that the run allows
(Yeom et al. 2018, section 5; its total variation).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtr

from indpriv._facts import refused, text
from indpriv._plain import records
from indpriv._types import BoolArray, FloatArray, IntArray, NDArray
from indpriv.analysis.attacks import membership, rates
from indpriv.analysis.guarantee import Ceilings, mu_of
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.statistics import CONFIDENCE, clopper_pearson
from indpriv.analysis.summary import ATTRIBUTES, Audit, Finding
from indpriv.attacks import Material
from indpriv.attacks.attributes import GUESSERS, AttributeKnowledge, guesses
from indpriv.epsilon_table import EpsilonTable

BY_EPSILON = "individual epsilon"
_RATES = 4  # that an interval of an advantage is made of


def measure_attribute(
    known: AttributeKnowledge,
    guesser: str,
    *,
    model: str,
    groups: Mapping[str, NDArray[np.generic]],
    mu: FloatArray | None = None,
    bins: tuple[FloatArray, Sequence[float]] | None = None,
    ceiling: float | None = None,
    tests: int = 1,
) -> pd.DataFrame:
    """Measure one attack on one attribute: rows of `ATTRIBUTES`, of all examples first.

    groups: (n,) the group of each example, by column; mu: (n,) of a Gaussian mechanism with each
    member's epsilon, any for others; bins: (n,) epsilons, of others what they would have had, and
    the edges of bins; ceiling: largest advantage that the worst case allows; tests: number of
    attacks. Groups and bins without members or others are left out.
    """
    right = guesses(GUESSERS[guesser].logs(known)) == known.truth
    imputed, everyone = guesses(known.imputed) == known.truth, np.ones(len(right), dtype=bool)
    parts = [("", "all", everyone)]
    for column, names in groups.items():
        found = names.astype(str)
        parts += [(column, name, found == name) for name in np.unique(found).tolist()]
    if bins is not None:
        epsilon, edges = bins
        place = np.clip(np.searchsorted(edges, epsilon, side="left"), 1, len(edges) - 1)
        of_bins = [f"{low:.3f} to {high:.3f}" for low, high in itertools.pairwise(edges)]
        each = np.array(of_bins, dtype=object)[place - 1]
        parts += [(BY_EPSILON, name, each == name) for name in dict.fromkeys(of_bins)]
    least = _advantage(known.member, right, imputed, rates.bonferroni(tests))["low"]
    about = {"attribute": known.name, "n_values": len(known.values), "guesser": guesser}
    about |= {"title": GUESSERS[guesser].title, "model": model, "ceiling": ceiling}
    about |= {"above_ceiling": model == "dp" and ceiling is not None and least > ceiling}
    rows = []
    for by, name, part in parts:
        inside = part & known.member
        if by and not (inside.any() and (part & ~known.member).any()):
            continue
        row = _advantage(known.member[part], right[part], imputed[part])
        if mu is not None:
            own = np.minimum(2 * ndtr(mu[inside] / 2) - 1, 1.0 if ceiling is None else ceiling)
            row["individual_ceiling"] = float(own.mean())
        rows.append(about | {"by": by, "name": name} | row)
    return ATTRIBUTES.of_rows(rows)


def _advantage(
    member: BoolArray, right: BoolArray, imputed: BoolArray, confidence: float = CONFIDENCE
) -> dict[str, Any]:
    """The advantage of guesses over imputation, from which of (n,) examples each is right."""
    level, row, limits = 1 - (1 - confidence) / _RATES, dict[str, Any](), []
    for whose, prefix, side in (("members", "", member), ("others", "others_", ~member)):
        n = row[f"n_{whose}"] = int(side.sum())
        for name, hits in (("imputed", imputed), ("guessed", right)):
            row[prefix + name] = float(hits[side].mean())
        for hits in (right & ~imputed, imputed & ~right):
            limits.append(clopper_pearson(int((hits & side).sum()), n, level))
    of_others = row["others_guessed"] - row["others_imputed"]
    return row | {
        "advantage": row["guessed"] - row["imputed"] - of_others,
        "low": limits[0].low - limits[1].high - limits[2].high + limits[3].low,
        "high": limits[0].high - limits[1].low - limits[2].low + limits[3].high,
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
    found = []
    for model, material, known, guesser in tasks:
        groups = {
            column: material.groups(column, known.example_ids, known.member)
            for column in columns
            if column != known.name
        }
        options: dict[str, Any] = {}
        if model == "dp":
            options = _epsilons(known, members, holdout)
            options["ceiling"] = None if ceilings is None else ceilings.advantage
        options |= {"model": model, "groups": groups, "tests": len(tasks)}
        found.append(measure_attribute(known, guesser, **options))
    return pd.concat(found, ignore_index=True) if found else ATTRIBUTES.of_rows()


def _epsilons(
    known: AttributeKnowledge, members: EpsilonTable | None, holdout: EpsilonTable | None
) -> dict[str, Any]:
    """Mu and bins of these examples; without a hold-out no bins, and nothing of units."""
    if members is None or members.account.rows_per_unit is not None:
        return {}
    inside, ids = known.member, known.example_ids
    mine = _places(members, ids[inside])
    mu, epsilon = np.full(len(ids), np.nan), np.empty(len(ids))
    mu[inside] = mu_of(members)[mine]
    if holdout is None:
        return {"mu": mu}
    others = _places(holdout, ids[~inside])
    epsilon[inside], epsilon[~inside] = members.epsilon[mine], holdout.epsilon[others]
    return {"mu": mu, "bins": (epsilon, membership.epsilon_edges(members))}


def _places(table: EpsilonTable, ids: NDArray[np.generic]) -> IntArray:
    """Rows of these examples in a table, either of which may have its ids as texts."""
    rows = pd.Index(table.example_ids.astype(str)).get_indexer(ids.astype(str))
    if (rows < 0).any():
        raise refused("refusal.signals", "other_data", n=int((rows < 0).sum()))
    return np.asarray(rows)


def _find(run: AuditedRun) -> dict[str, Any]:
    members, holdout = run.once(membership.tables_of_both_sides)
    columns = [found.by for found in run.audit.groups]
    basis = {"members": members, "holdout": holdout, "ceilings": run.audit.ceilings}
    known = run.attacked.models
    return {"attribute_attacks": attribute_attacks(known, columns, **basis)}


def _alarms(audit: Audit) -> Iterator[str]:
    found = audit.attribute_attacks
    for one in records(found[found["above_ceiling"] & (found["by"] == "")]):
        if one.model == "dp":
            what = f"{one.attribute}: the advantage exceeds the worst case"
            yield text("sentence.attacks", "wrong", what=what)


FINDING = Finding(
    "attributes", _find, alarms=_alarms, watched="attacks on attributes above the worst case"
)
