"""Attacks on people with several rows, from the scores of their rows. Sensitive."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from indpriv._columns import to_floats
from indpriv.analysis.attacks.strongest import UnitRates, unit_rates
from indpriv.attack_scores import AttackScores
from indpriv.attacks.units import UNIT_RULES, calibrated_unit_scores
from indpriv.audit.run_attacks import ScoredAttack
from indpriv.audit.run_directory import RecordedRun, in_rows_of
from indpriv.epsilon_table import EpsilonTable


def rates_of_units(
    recorded: RecordedRun, scored: Sequence[ScoredAttack], table: EpsilonTable, seed: int
) -> tuple[UnitRates, ...]:
    """Rates of every attack on the run by every rule; empty unless the unit has several rows."""
    found = list(_scores(recorded, scored, table, seed))
    return tuple(unit_rates(name, rule, scores, tests=len(found)) for name, rule, scores in found)


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
