"""One row for each example or unit: its epsilon, its loss and every attack's score.

Sensitive, and no accusation: decisions about single examples change from model to model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from indpriv._columns import to_floats
from indpriv.analysis.attacks.ceilings import Ceilings, mu_of, true_positive_rate
from indpriv.analysis.attacks.rates import RATES, rates_of, table
from indpriv.analysis.recorded_run import RecordedRun, in_rows_of
from indpriv.attack_scores import AttackScores
from indpriv.attacks import Attack
from indpriv.attacks.units import UNIT_RULES, calibrated_unit_scores
from indpriv.epsilon_table import EpsilonTable

_RATE = 0.01  # false-positive rate of the ceiling


@dataclass(frozen=True)
class ScoredAttack:
    """An attack of the registry, the model it was run on ("dp" or "non_dp"), and its scores."""

    attack: Attack
    model: str
    references: int
    scores: AttackScores


def attack_table(
    table: EpsilonTable,
    recorded: RecordedRun,
    scored: Sequence[ScoredAttack],
    ceilings: Ceilings | None = None,
) -> pd.DataFrame | None:
    """Training and test examples with every attack's score on the run; None without losses.

    Columns: example_id, member, epsilon and ceiling_at_1_percent (NaN for test examples), loss,
    then one column for each attack, NaN where it gave no score. The ceiling is that of a Gaussian
    mechanism with this epsilon, and at most that of the worst case.
    """
    if recorded.examples is None or recorded.examples.test.empty:
        return None
    train, test = recorded.examples.train, recorded.examples.test
    both = pd.concat([train, test], ignore_index=True)
    member = np.arange(len(both)) < len(train)
    frame = pd.DataFrame({"example_id": both["example_id"], "member": member})
    limit = 1.0 if ceilings is None else ceilings.worst_case[f"{_RATE:g}"]
    rows = pd.Index(table.example_ids).get_indexer(train["example_id"].to_numpy())
    for name, values in (
        ("epsilon", table.epsilon),
        ("ceiling_at_1_percent", np.minimum(true_positive_rate(mu_of(table), _RATE), limit)),
    ):
        frame[name] = np.nan
        frame.loc[member, name] = np.where(rows >= 0, values[rows], np.nan)
    frame["loss"] = to_floats(both["loss"])
    keys = pd.MultiIndex.from_arrays([member, frame["example_id"]])
    for each in scored:
        if each.model == "dp":
            scores = each.scores
            found = pd.MultiIndex.from_arrays([scores.member, np.asarray(scores.example_ids)])
            frame[each.attack.name] = pd.Series(scores.scores, index=found).reindex(keys).to_numpy()
    frame.attrs = {
        "sensitive": "for the curator only",
        "meaning": "No row is an accusation: decisions about single examples change from model to "
        "model.",
    }
    return frame


def rates_of_units(
    recorded: RecordedRun, scored: Sequence[ScoredAttack], epsilons: EpsilonTable, seed: int
) -> pd.DataFrame:
    """Rates of every attack on the run by every rule; no rows unless the unit has several rows."""
    found = list(_scores(recorded, scored, epsilons, seed))
    frames = [
        rates_of(scores, attack=name, part=rule, tests=len(found)) for name, rule, scores in found
    ]
    return pd.concat(frames) if frames else table(RATES)


def unit_attack_table(
    table: EpsilonTable, recorded: RecordedRun, scored: Sequence[ScoredAttack], seed: int = 0
) -> pd.DataFrame | None:
    """One row for each unit; None unless units have several rows.

    Columns: unit_id, n_rows, epsilon, loss (mean), then for each attack and rule the rank of the
    unit among random groups of as many non-members, from 0 to 1.
    """
    if recorded.examples is None or not _by_unit(table):
        return None
    rows = in_rows_of(table, recorded.examples).aligned(table.example_ids)
    frame = pd.DataFrame(
        {
            "unit_id": table.example_ids,
            "n_rows": np.asarray(table.details["n_rows"]).astype(np.int64),
            "epsilon": table.epsilon,
            "loss": to_floats(rows["loss"]),
        }
    )
    for name, rule, scores in _scores(recorded, scored, table, seed):
        ids = np.asarray(scores.example_ids)[scores.member]
        ranks = pd.Series(scores.scores[scores.member], index=ids)
        frame[f"{name}_{rule}"] = ranks.reindex(frame["unit_id"].astype(str)).to_numpy()
    return frame


def _by_unit(table: EpsilonTable) -> bool:
    return (table.account.rows_per_unit or 1) > 1


def _scores(
    recorded: RecordedRun, scored: Sequence[ScoredAttack], table: EpsilonTable, seed: int
) -> Iterator[tuple[str, str, AttackScores]]:
    """Scores of units by each attack on the run and each rule."""
    if recorded.examples is None or not _by_unit(table):
        return
    owners = recorded.examples.train.set_index("example_id")["unit_id"]
    for each in scored:
        if each.model == "dp" and each.scores.example_ids is not None:
            ids = each.scores.example_ids[each.scores.member]
            for rule in UNIT_RULES:
                mine = owners.reindex(ids).to_numpy()
                yield (
                    each.attack.name,
                    rule,
                    calibrated_unit_scores(each.scores, mine, rule, seed=seed),
                )
