"""Running the attacks of the registry on a recorded run. Sensitive."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from indpriv._checks import check_choice
from indpriv._files import first_at
from indpriv.analysis.attacks.attributes import AttributeFindings
from indpriv.analysis.attacks.by_epsilon import AttackByEpsilon, attack_by_epsilon
from indpriv.analysis.attacks.canary_findings import measure_gradient_canaries
from indpriv.analysis.attacks.ceilings import Ceilings, ceilings_of
from indpriv.analysis.attacks.measures import measure_attack
from indpriv.analysis.attacks.results import (
    AttackResults,
    attack_result,
    ranked,
    rates_on_updates,
)
from indpriv.analysis.attacks.strongest import StrongestAttack, strongest_attack
from indpriv.analysis.attacks.threshold_attack import AttackRow, ThresholdAttack, threshold_attack
from indpriv.analysis.groups import GroupTable
from indpriv.analysis.reconstruction import reconstructions_of
from indpriv.analysis.summary import AttackFindings
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.attribute_knowledge import AttributeKnowledge
from indpriv.attacks.train_references import CHECKPOINTS, CONFIDENCE, LABELS
from indpriv.audit.attack_table import ScoredAttack, rates_of_units
from indpriv.audit.attribute_attacks import attribute_attacks
from indpriv.audit.references import read_references, unchecked_facts
from indpriv.audit.run_directory import RecordedRun, knowledge_of
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import ATTRIBUTES, ATTRIBUTES_NON_DP, EXAMPLES, RUN_JSON
from indpriv.norm_log.schema import read_run_json

BY_GROUP = "loss_threshold"  # the attack of the paper's protocol


def scored_attacks(run: RecordedRun, names: Collection[str] = ()) -> list[ScoredAttack]:
    """Every attack whose needs are met, over all examples, on the run and on its baseline.

    names: the attacks to choose from; all if empty.
    """
    return [
        ScoredAttack(attack, model, attack.references_in(material), attack.scores(material, None))
        for model, material in materials(run).items()
        for attack in ATTACKS.values()
        if attack.can_use(material) and attack.name in (names or ATTACKS)
    ]


def run_attacks(
    run: RecordedRun,
    log: NormLog,
    table: EpsilonTable,
    groups: Sequence[GroupTable],
    scored: Sequence[ScoredAttack] | None,
    *,
    members: EpsilonTable | None,
    holdout: EpsilonTable | None,
    seed: int,
) -> AttackFindings:
    """What the attacks on a run found.

    Args:
        run: what is known about the run.
        log: its norm log.
        table: epsilons of the log.
        groups: tables of mean epsilon, which say what to group by and who is most exposed.
        scored: attacks with their scores; None for all whose needs are met.
        members: epsilons of the training examples, to compare with those of the hold-out, as far as
            they are not the table; canaries test the guarantee at their delta.
        holdout: epsilons that the test examples would have had on the same trajectory.
        seed: of the random choices.
    """
    members = table if members is None else members
    scored = scored_attacks(run) if scored is None else scored
    columns = [found.by for found in groups]
    ceilings = ceilings_of(log, table) if run.references or run.attributes else None
    canaries, delta = run.canaries, members.account.delta
    guarantee = (members.worst_case_epsilon, delta)
    every = _ranked(scored, guarantee, seed, ceilings, run.unchecked)
    strongest = _strongest(every, scored, run, columns)
    return AttackFindings(
        every=every,
        strongest=strongest,
        by_group=_by_group(run, groups, seed),
        by_epsilon=_by_epsilon(every, strongest, scored, members, holdout, seed),
        canaries=None if canaries is None else measure_attack(canaries, delta=delta, seed=seed),
        attributes=attribute_attacks(
            materials(run), columns, members=members, holdout=holdout, ceilings=ceilings
        ),
        updates=None if run.gradient_canaries is None else rates_on_updates(run.gradient_canaries),
        gradient_canaries=None
        if run.gradient_canaries is None
        else measure_gradient_canaries(run.gradient_canaries, log.settings, delta=delta, seed=seed),
        by_unit=rates_of_units(run, scored, table, seed),
        reconstruction=reconstructions_of(run.leakage, table),
    )


def _strongest(
    every: AttackResults,
    scored: Sequence[ScoredAttack],
    run: RecordedRun,
    columns: Sequence[str],
) -> StrongestAttack | None:
    """Whom the strongest attack reaches; None unless it uses reference models."""
    best = next(iter(every.of("dp")), None)
    if best is None or not best.references:
        return None
    (scores,) = (of.scores for of in scored if (of.model, of.attack.name) == ("dp", best.name))
    material, ids = materials(run)["dp"], scores.example_ids
    groups = {} if ids is None else {by: material.groups(by, ids, scores.member) for by in columns}
    return strongest_attack(best.name, scores, groups)


def _by_group(
    run: RecordedRun, groups: Sequence[GroupTable], seed: int
) -> tuple[ThresholdAttack, ...]:
    """Success by column, on the DP model and then on the non-private baseline."""
    attack, found = ATTACKS[BY_GROUP], []
    overall: dict[str, AttackRow] = {}
    for table in groups:
        column = table.by
        readable = table.rows["name"][~table.rows["too_small"]].tolist()
        for model, material in materials(run).items():
            if attack.can_use(material):
                result = threshold_attack(
                    attack.scores(material, column),
                    model=model,
                    by=column,
                    caveat=attack.caveat,
                    seed=seed,
                    overall=overall.get(model),
                    by_epsilon=readable,
                )
                overall[model] = result.overall
                found.append(result)
    return tuple(found)


def attributes_of_run(run_dir: Path) -> tuple[AttributeFindings, ...]:
    """Attacks on the attributes that a run names, and on its baseline; empty if it names none."""
    run = RecordedRun(
        attributes=knowledge_of(run_dir / ATTRIBUTES),
        baseline_attributes=knowledge_of(run_dir / ATTRIBUTES_NON_DP),
    )
    return attribute_attacks(materials(run))


def results_of_run(
    run_dir: Path, signals: Path | None, names: Collection[str] = ()
) -> AttackResults:
    """Attacks on a finished run, without an audit of it.

    Args:
        run_dir: the run.
        signals: of references for it; None for attacks without references.
        names: attacks of the registry; default all whose needs are met.

    Raises:
        InputError: an unknown attack, one whose needs are not met, or signals of something else.
    """
    examples = ExampleTable.from_parquet(run_dir / EXAMPLES)
    run = RecordedRun(
        examples=examples,
        references={} if signals is None else read_references(signals, run_dir, examples),
        attributes=knowledge_of(run_dir / ATTRIBUTES),
    )
    material = materials(run)["dp"]
    for name in names:
        check_choice("attack", name, ATTACKS)
        lacking = ATTACKS[name].lacks(material)
        if lacking is not None:
            raise InputError(
                f"{name} needs {lacking}, which this run and its signals do not have"
                + "; indpriv.attacks.train_references takes them, for --signals"
                * bool(ATTACKS[name].references)
            )
    record = read_run_json(run_dir)
    epsilon, delta = (first_at(record, ("guarantee", key)) for key in ("epsilon", "delta"))
    if epsilon is None or delta is None:
        raise InputError(f"{run_dir / RUN_JSON} has no guarantee; is the run finished?")
    unchecked = unchecked_facts(run_dir, run.references)
    guarantee = (float(epsilon), float(delta))
    return _ranked(scored_attacks(run, names), guarantee, 0, None, unchecked)


def _ranked(
    scored: Sequence[ScoredAttack],
    guarantee: tuple[float, float],
    seed: int,
    ceilings: Ceilings | None,
    unchecked: Sequence[str],
) -> AttackResults:
    results = [
        attack_result(
            each.scores,
            name=each.attack.name,
            model=each.model,
            references=each.references,
            guarantee=guarantee,
            tests=len(scored),
            source=each.attack.source,
            caveat=each.attack.caveat,
            sees=each.attack.sees,
            seed=seed,
        )
        for each in scored
    ]
    return ranked(results, ceilings, unchecked)


def materials(run: RecordedRun) -> dict[str, Material]:
    """What attacks can use of the audited model ("dp") and of the baseline ("non_dp")."""
    return {
        "dp": material_of(run.examples, run.references, run.attributes),
        "non_dp": material_of(run.non_dp, run.baseline_references, run.baseline_attributes),
    }


def material_of(
    examples: ExampleTable | None,
    references: Mapping[str, AttackSignals],
    attributes: tuple[AttributeKnowledge, ...] | None = None,
) -> Material:
    """What attacks can use of a model: losses, signals by name, and what is known of attributes."""
    known = examples is not None and not examples.test.empty
    return Material(
        final_losses=examples if known else None,
        signals=references.get(CONFIDENCE),
        label_signals=references.get(LABELS),
        checkpoint_signals=references.get(CHECKPOINTS),
        attributes=attributes,
    )


def _by_epsilon(
    every: AttackResults,
    strongest: StrongestAttack | None,
    scored: Sequence[ScoredAttack],
    table: EpsilonTable,
    holdout: EpsilonTable | None,
    seed: int,
) -> AttackByEpsilon | None:
    """The strongest attack, or the loss threshold, in bins of epsilon, which the hold-out has too.

    None without epsilons of the hold-out.
    """
    name, attacks = (BY_GROUP, 1) if strongest is None else (strongest.name, len(every.of("dp")))
    chosen = [of.scores for of in scored if (of.model, of.attack.name) == ("dp", name)]
    if holdout is None or not chosen or chosen[0].example_ids is None:
        return None
    ids, member = chosen[0].example_ids, chosen[0].member
    place = np.empty(len(ids), np.int64)  # training ids may be texts
    place[member] = pd.Index(table.example_ids).get_indexer(ids[member])
    place[~member] = pd.Index(holdout.example_ids.astype(str)).get_indexer(ids[~member].astype(str))
    scores, known = chosen[0].take(place >= 0), place[place >= 0]
    mine, others = known[scores.member], holdout.epsilon[known[~scores.member]]
    return attack_by_epsilon(scores, table.take(mine), others, seed=seed, attacks=attacks)
