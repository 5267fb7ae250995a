"""Running the attacks of the registry on a recorded run. Sensitive."""

from collections.abc import Sequence

import numpy as np

from indpriv._columns import to_floats
from indpriv.analysis.attacks.by_epsilon import AttackByEpsilon, attack_by_epsilon
from indpriv.analysis.attacks.measures import measure_attack
from indpriv.analysis.attacks.threshold_attack import AttackRow, ThresholdAttack, threshold_attack
from indpriv.analysis.summary import AttackFindings
from indpriv.attack_scores import AttackScores
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.loss_threshold import LOSS_THRESHOLD
from indpriv.audit.run_directory import RecordedRun
from indpriv.epsilon_table import EpsilonTable
from indpriv.example_table import ExampleTable


def run_attacks(
    run: RecordedRun,
    columns: Sequence[str],
    *,
    members: EpsilonTable,
    holdout: EpsilonTable | None,
    delta: float,
    seed: int,
) -> AttackFindings:
    """Run every attack whose needs are met.

    Args:
        run: what is known about the run.
        columns: to group by.
        members: epsilons of the training examples, to compare with those of the hold-out.
        holdout: epsilons that the test examples would have had on the same trajectory.
        delta: of the guarantee that canaries test.
        seed: of the random choices.
    """
    canaries = run.canaries
    return AttackFindings(
        by_group=_by_group(run, columns, seed),
        by_epsilon=_by_epsilon(members, holdout, run.examples, seed),
        canaries=None if canaries is None else measure_attack(canaries, delta=delta, seed=seed),
    )


def _by_group(run: RecordedRun, columns: Sequence[str], seed: int) -> tuple[ThresholdAttack, ...]:
    """Success by column, on the DP model and then on the non-private baseline."""
    models = (("dp", _material(run.examples)), ("non_dp", _material(run.non_dp)))
    found = []
    for attack in ATTACKS.values():
        overall: dict[str, AttackRow] = {}
        for column in columns:
            for model, material in models:
                if attack.can_use(material):
                    result = threshold_attack(
                        attack.scores(material, column),
                        model=model,
                        by=column,
                        caveat=attack.caveat,
                        seed=seed,
                        overall=overall.get(model),
                    )
                    overall[model] = result.overall
                    found.append(result)
    return tuple(found)


def _material(examples: ExampleTable | None) -> Material:
    known = examples is not None and not examples.test.empty
    return Material(final_losses=examples if known else None)


def _by_epsilon(
    table: EpsilonTable, holdout: EpsilonTable | None, examples: ExampleTable | None, seed: int
) -> AttackByEpsilon | None:
    """The loss threshold in bins of epsilon; None without epsilons of the hold-out."""
    if holdout is None or examples is None or examples.test.empty:
        return None
    mine = to_floats(examples.aligned(table.example_ids)["loss"])
    ids = examples.test["example_id"].astype(str)  # training ids may be texts
    test = examples.test.set_index(ids)["loss"]
    others = to_floats(test.reindex(holdout.example_ids.astype(str)))
    kept = [~np.isnan(loss) for loss in (mine, others)]
    scores = AttackScores(
        scores=-np.concatenate([mine[kept[0]], others[kept[1]]]),
        member=np.repeat([True, False], [int(part.sum()) for part in kept]),
        method=LOSS_THRESHOLD,
    )
    return attack_by_epsilon(scores, table.take(kept[0]), holdout.epsilon[kept[1]], seed=seed)
