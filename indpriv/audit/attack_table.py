"""One row for each example: its epsilon, what that allows, its loss and every attack's score.

Sensitive, and no accusation: decisions about single examples change from model to model.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from indpriv._columns import to_floats
from indpriv.analysis.attacks.ceilings import Ceilings, mu_of, true_positive_rate
from indpriv.audit.run_attacks import ScoredAttack
from indpriv.audit.run_directory import RecordedRun
from indpriv.epsilon_table import EpsilonTable

_RATE = 0.01  # false-positive rate of the ceiling


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
