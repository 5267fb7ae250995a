"""Analysing the artifacts of one run, all in memory: from its epsilons and examples to a summary.

Sensitive.
"""

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pandas as pd

from indpriv._columns import MAX_NUMERIC_VALUES, MISSING, groupable_columns, to_floats
from indpriv.analysis.attacks.by_epsilon import AttackByEpsilon, attack_by_epsilon
from indpriv.analysis.attacks.measures import measure_attack
from indpriv.analysis.attacks.threshold_attack import AttackRow, ThresholdAttack, threshold_attack
from indpriv.analysis.disclosures import disclosures
from indpriv.analysis.distribution import describe
from indpriv.analysis.duplicates import undeclared_people
from indpriv.analysis.groups.group_table import GroupTable, group_tables
from indpriv.analysis.guarantee import guarantee_of, worst_case_membership
from indpriv.analysis.hazards import hazards
from indpriv.analysis.loss import LossRelation, relate_to_loss
from indpriv.analysis.norms_over_training import describe_drivers
from indpriv.analysis.run_facts import run_facts
from indpriv.analysis.summary import (
    AttackFindings,
    AuditSummary,
    FidelityFindings,
    Notes,
    Provenance,
)
from indpriv.analysis.units import unit_sizes
from indpriv.attack_scores import AttackScores
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.loss_threshold import LOSS_THRESHOLD
from indpriv.audit.run_directory import Evidence, in_rows_of
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import EXAMPLES, EXAMPLES_NON_DP

_NO_FIDELITY = FidelityFindings()


def summarise(
    log: NormLog,
    table: EpsilonTable,
    evidence: Evidence,
    *,
    name: str,
    by: Sequence[str] = (),
    fidelity: FidelityFindings = _NO_FIDELITY,
    holdout: EpsilonTable | None = None,
    members: EpsilonTable | None = None,
    seed: int = 0,
    command: str = "",
) -> AuditSummary:
    """Analyse the artifacts of one run, all in memory.

    Args:
        log: what the table was made of.
        table: epsilons of all its examples.
        evidence: what else is known.
        name: of the run.
        by: columns to group by; see `audit`.
        fidelity: how far the epsilons can lie from exact ones.
        holdout: epsilons that the test examples would have had on the same trajectory.
        members: what the hold-out is compared with: the table, or, where that rests on batch norms,
            which no test example has, the account of full records alone.
        seed: of the attack's random choices.
        command: reproduces the audit.
    """
    missing = _missing(
        evidence, log, known=bool(fidelity.against_k) or fidelity.batch_norms is not None
    )
    run = run_facts(log, evidence.examples, evidence.recorder, evidence.declared)
    found, rows = _Examined(), None
    if evidence.examples is not None:
        rows = evidence.examples.aligned(log.example_ids)
        missing += undeclared_people(log, rows)
        train = in_rows_of(table, evidence.examples).aligned(table.example_ids)
        columns, left_out = choose_groups(rows, by, evidence.declared.groups)
        missing += left_out
        if columns and (table.account.rows_per_unit or 1) > 1:
            missing.append(
                f"A {table.account.unit} whose rows differ in a column is in its group {MISSING}."
            )
        found = _examined(
            table,
            evidence,
            evidence.examples,
            train,
            columns,
            (table if members is None else members, holdout),
            seed,
        )
        missing += _groups_without_test(found.groups, evidence.examples.test)
    elif by:
        raise InputError(
            f"--by {by[0]}: this run has no {EXAMPLES}, which holds the groups; audit it without "
            "--by"
        )
    versions = {
        library: _version(library) for library in ("indpriv", "numpy", "scipy", "pandas", "pyarrow")
    }
    versions["python"] = platform.python_version()
    guarantee = guarantee_of(
        table, evidence.checks, evidence.recorder, worst_case_membership(log, table.account.delta)
    )
    brackets = Counter(table.details.get("bracket", np.array([])).tolist())
    canaries = evidence.canaries
    return AuditSummary(
        name=name,
        provenance=Provenance(datetime.now(UTC).isoformat(timespec="seconds"), versions, command),
        account=table.account,
        claim=table.claim,
        claim_reason=table.claim_reason,
        guarantee=guarantee,
        run=run,
        individual=describe(table),
        unit_sizes=unit_sizes(log, table),
        drivers=describe_drivers(log, table, rows),
        loss=found.loss,
        groups=found.groups,
        attacks=AttackFindings(
            by_group=found.attacks,
            by_epsilon=found.by_epsilon,
            canaries=None
            if canaries is None
            else measure_attack(canaries, delta=table.account.delta, seed=seed),
        ),
        fidelity=fidelity,
        notes=Notes(
            checks=tuple(evidence.checks),
            disclosures=disclosures(
                run, table.account, guarantee, evidence.checks, versions, brackets
            ),
            hazards=hazards(
                run,
                table.account,
                guarantee,
                evidence.checks,
                caveats=dict.fromkeys(attack.caveat for attack in found.attacks),
            ),
            missing=tuple(missing),
        ),
    )


@dataclass(frozen=True)
class _Examined:
    """What an example table adds to an audit; nothing without one."""

    loss: LossRelation | None = None
    groups: tuple[GroupTable, ...] = ()
    attacks: tuple[ThresholdAttack, ...] = ()
    by_epsilon: AttackByEpsilon | None = None


def _examined(
    table: EpsilonTable,
    evidence: Evidence,
    examples: ExampleTable,
    train: pd.DataFrame,
    columns: Sequence[str],
    compared: tuple[EpsilonTable, EpsilonTable | None],
    seed: int,
) -> _Examined:
    return _Examined(
        loss=relate_to_loss(table, to_floats(train["loss"])),
        groups=group_tables(table, train, examples.test, columns, seed=seed),
        attacks=_attacks(evidence, columns, seed),
        by_epsilon=_by_epsilon(*compared, examples, seed),
    )


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed (run from its source)"


def _missing(evidence: Evidence, log: NormLog, *, known: bool) -> list[str]:
    """What the audit lacks; known: how far the estimate lies from the truth."""
    found = []
    if evidence.examples is None:
        found.append(
            f"{EXAMPLES} is absent: the run ended before the final model's losses were taken. "
            "Epsilons are complete for "
            "the steps logged; loss, groups and attack are not shown."
        )
    elif evidence.examples.test.empty:
        found.append(
            "No test examples: test accuracy and the attack are not shown. Pass test_set to the "
            "Recorder."
        )
    elif evidence.non_dp is None:
        found.append(
            f"No twin trained without DP ({EXAMPLES_NON_DP}): the attack has nothing to be "
            "compared with."
        )
    if not known and not log.individually_clipped:
        found.append(
            "No exact values to hold an estimate against: record every step, some reference "
            "examples, or batch norms."
        )
    return found


def _groups_without_test(groups: Sequence[GroupTable], test: pd.DataFrame) -> list[str]:
    """Columns that no test example has a value in, so that nothing is known of their groups' test accuracy."""
    names = dict.fromkeys(name for table in groups for name in table.columns)
    lacking = [name for name in names if name not in test or test[name].isna().all()]
    if test.empty or not lacking:
        return []
    return [
        f"Test examples have no {', '.join(lacking)}: test accuracy and the attack are not shown "
        "by that. Pass test_metadata "
        "beside metadata."
    ]


def choose_groups(
    train: pd.DataFrame, by: Sequence[str], declared: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Columns to group by, and what was left out and why.

    What was asked for comes first, then those declared beforehand, then the label and every
    metadata column that reads as groups: numeric ones with many values in ten bins, others with
    many values left out.
    """
    if by:
        return list(dict.fromkeys(by)), []
    if declared:
        return list(declared), []
    chosen, left_out = [], []
    for column in groupable_columns(train):
        distinct = train[column].nunique()
        many = distinct > MAX_NUMERIC_VALUES
        numeric = pd.api.types.is_numeric_dtype(train[column])
        if many and numeric:
            chosen.append(f"{column}:bins=10")
        elif many:
            left_out.append(
                f"{column} has {distinct:,} distinct values and was not grouped by; ask with --by "
                f"{column}."
            )
        else:
            chosen.append(column)
    return chosen, left_out


def _by_epsilon(
    table: EpsilonTable, holdout: EpsilonTable | None, examples: ExampleTable, seed: int
) -> AttackByEpsilon | None:
    """The loss threshold by epsilon, of the examples that have a loss; None without epsilons of the hold-out."""
    if holdout is None or examples.test.empty:
        return None
    mine = to_floats(examples.aligned(table.example_ids)["loss"])
    test = examples.test.set_index(examples.test["example_id"].astype(str))[
        "loss"
    ]  # texts where training ids are
    others = to_floats(test.reindex(holdout.example_ids.astype(str)))
    kept = [~np.isnan(loss) for loss in (mine, others)]
    scores = AttackScores(
        scores=-np.concatenate([mine[kept[0]], others[kept[1]]]),
        member=np.repeat([True, False], [int(part.sum()) for part in kept]),
        method=LOSS_THRESHOLD,
    )
    return attack_by_epsilon(scores, table.take(kept[0]), holdout.epsilon[kept[1]], seed=seed)


def _attacks(evidence: Evidence, columns: Sequence[str], seed: int) -> tuple[ThresholdAttack, ...]:
    """Every attack whose needs are met, by column, on the DP model and then on the non-private baseline."""
    models = (("dp", _material(evidence.examples)), ("non_dp", _material(evidence.non_dp)))
    found = []
    for attack in ATTACKS.values():
        overall: dict[str, AttackRow] = {}
        for column in columns:
            for model, material in models:
                if attack.can_use(material):
                    scores = attack.scores(material, column)
                    result = threshold_attack(
                        scores,
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
