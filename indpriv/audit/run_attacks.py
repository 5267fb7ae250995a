"""Running the attacks of the registry on a recorded run. Sensitive."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv._checks import check_choice
from indpriv._files import first_at
from indpriv.accountant.per_example import table_for
from indpriv.analysis.attacks import rates
from indpriv.analysis.attacks.attributes import (
    AttributeFindings,
    EpsilonsOfExamples,
    measure_attribute,
)
from indpriv.analysis.attacks.by_epsilon import BINS, attack_by_epsilon
from indpriv.analysis.attacks.canary_findings import measure_gradient_canaries
from indpriv.analysis.attacks.ceilings import Ceilings, ceilings_of, mu_of
from indpriv.analysis.attacks.threshold_attack import UnequalAttack, threshold_attack
from indpriv.analysis.groups import GroupTable
from indpriv.analysis.reconstruction import reconstructions_of
from indpriv.analysis.summary import Audit, attacks_on
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.attributes import GUESSERS, AttributeKnowledge
from indpriv.attacks.train_references import CHECKPOINTS, CONFIDENCE, LABELS
from indpriv.audit.attack_table import ScoredAttack, rates_of_units
from indpriv.audit.method_of_run import method_of_run
from indpriv.audit.references import read_references, unchecked_facts
from indpriv.audit.run_directory import RecordedRun, knowledge_of, recorded_run
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import NormLog, open_run
from indpriv.norm_log.run_files import ATTRIBUTES, ATTRIBUTES_NON_DP, EXAMPLES
from indpriv.norm_log.schema import read_run_json

BY_GROUP = "loss_threshold"  # the attack of the paper's protocol


def scored_attacks(run: RecordedRun, names: Collection[str] = ()) -> list[ScoredAttack]:
    """Every attack whose needs are met, over all examples, on the run and on its baseline.

    names: the attacks to choose from; all if empty.
    """
    return [
        ScoredAttack(attack, model, attack.references_in(material), attack.scores(material))
        for model, material in materials(run).items()
        for attack in ATTACKS.values()
        if attack.can_use(material) and attack.name in (names or ATTACKS)
    ]


def run_attacks(
    run: RecordedRun,
    log: NormLog,
    epsilons: EpsilonTable,
    groups: Sequence[GroupTable],
    scored: Sequence[ScoredAttack] | None,
    *,
    members: EpsilonTable | None,
    holdout: EpsilonTable | None,
    seed: int,
) -> dict[str, Any]:
    """What the attacks on a run found, by key of audit.json.

    Args:
        run: what is known about the run.
        log: its norm log.
        epsilons: of the log.
        groups: tables of mean epsilon, which say what to group by and who is most exposed.
        scored: attacks with their scores; None for all whose needs are met.
        members: epsilons of the training examples, to compare with those of the hold-out, as far as
            they are not those of the log; canaries test the guarantee at their delta.
        holdout: epsilons that the test examples would have had on the same trajectory.
        seed: of the random choices.
    """
    members = epsilons if members is None else members
    scored = scored_attacks(run) if scored is None else scored
    columns, delta = [found.by for found in groups], members.account.delta
    found = _tried(scored, (members.worst_case_epsilon, delta), seed)
    best, materials_of = _strongest(found, scored), materials(run)
    frames, most_exposed = [found.rates], []
    if best is not None:
        for by in columns if best.scores.example_ids is not None else ():
            scores = _in_groups(best, materials_of["dp"], by)
            frames.append(rates.accused(scores, attack=best.attack.name, by=by))
            frames.append(rates.rates_of(scores, attack=best.attack.name, by=by))
    by_loss = [each for each in scored if each.attack.name == BY_GROUP] if groups else []
    for each in by_loss:
        success, tests = _success(each, materials_of[each.model], groups, seed)
        frames += success
        most_exposed += tests
    frames.append(rates_of_units(run, scored, epsilons, seed))
    if run.gradient_canaries is not None:
        frames.append(rates.rates_on_updates(run.gradient_canaries))
    ceilings = ceilings_of(log, epsilons) if run.references or run.attributes else None
    chosen_from = len(attacks_on(found, "dp"))
    return {
        "attacks": found.attacks,
        "rates": pd.concat(frames, ignore_index=True),
        "ceilings": ceilings,
        "unchecked": tuple(dict.fromkeys(run.unchecked)),
        "roc": {each.model: rates.roc(each.scores) for each in by_loss},
        "most_exposed": tuple(most_exposed),
        "attack_seed": seed,
        "attack_by_epsilon": _by_epsilon(best, scored, members, holdout, chosen_from, seed),
        "canaries": None
        if run.canaries is None
        else rates.measure_attack(run.canaries, delta=delta, seed=seed),
        "attribute_attacks": attribute_attacks(
            materials_of, columns, members=members, holdout=holdout, ceilings=ceilings
        ),
        "gradient_canaries": None
        if run.gradient_canaries is None
        else measure_gradient_canaries(run.gradient_canaries, log.settings, delta=delta, seed=seed),
        "reconstruction": reconstructions_of(run.leakage, epsilons),
    }


def _tried(scored: Sequence[ScoredAttack], guarantee: tuple[float, float], seed: int) -> Audit:
    """Every attack over all examples, those on the audited model first, the largest AUC first."""
    rows, frames, tests = [], [], len(scored)
    for each in scored:
        attack, scores, ours = each.attack, each.scores, each.model == "dp"
        frames.append(rates.rates_of(scores, attack=attack.name, model=each.model, tests=tests))
        auc = frames[-1].loc[frames[-1]["rate"] == "auc", "value"].sum()  # 0 where there is none
        row = {name: getattr(attack, name) for name in ("title", "sees", "source", "caveat")}
        row |= {"attack": attack.name, "model": each.model, "references": each.references}
        row |= {"title": scores.method, "adversary": scores.adversary}
        n = int(scores.member.sum())
        row |= {"n_members": n, "n_others": len(scores.member) - n}
        row["above_worst_case"] = rates.exceeds(scores, guarantee, tests=tests, seed=seed) and ours
        rows.append(((not ours, -auc, attack.name), row))
    tried = rates.table(rates.TRIED, [row for _, row in sorted(rows, key=lambda found: found[0])])
    frames = frames or [rates.table(rates.RATES)]
    return Audit(rates=pd.concat(frames, ignore_index=True), attacks=tried, attack_seed=seed)


def _strongest(found: Audit, scored: Sequence[ScoredAttack]) -> ScoredAttack | None:
    """The strongest attack on the run; None unless it uses reference models."""
    best = next(iter(attacks_on(found, "dp")), None)
    if best is None or not best.references:
        return None
    return next(of for of in scored if (of.model, of.attack.name) == ("dp", best.attack))


def _in_groups(each: ScoredAttack, material: Material, by: str) -> AttackScores:
    ids = np.asarray(each.scores.example_ids)
    return replace(each.scores, groups=material.groups(by, ids, each.scores.member))


def _success(
    each: ScoredAttack, material: Material, groups: Sequence[GroupTable], seed: int
) -> tuple[list[pd.DataFrame], list[UnequalAttack]]:
    """Success of the loss threshold on one model, over all examples and by column."""
    name, model = each.attack.name, each.model
    frames, tests = [threshold_attack(each.scores, attack=name, model=model, seed=seed)[0]], []
    for of in groups:
        readable = of.rows["name"][~of.rows["too_small"]].tolist()
        scores = _in_groups(each, material, of.by)
        success, test = threshold_attack(
            scores, attack=name, model=model, by=of.by, seed=seed, by_epsilon=readable
        )
        frames += [success, rates.rates_of(scores, attack=name, model=model, by=of.by)]
        tests += [] if test is None else [test]
    return frames, tests


def attributes_of_run(run_dir: Path) -> tuple[AttributeFindings, ...]:
    """Attacks on the attributes that a run names, and on its baseline; empty if it names none."""
    run = RecordedRun(
        attributes=knowledge_of(run_dir / ATTRIBUTES),
        baseline_attributes=knowledge_of(run_dir / ATTRIBUTES_NON_DP),
    )
    return attribute_attacks(materials(run))


def results_of_run(run_dir: Path, signals: Path | None, names: Collection[str] = ()) -> Audit:
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
    if epsilon is None or delta is None:  # of a loop of somebody's own
        opened = open_run(run_dir, unreadable="worst_case")
        recorded = recorded_run(opened, "worst_case")
        account = table_for(opened.log, method_of_run(opened.log, recorded, run_dir, {})[0])
        epsilon, delta = account.worst_case_epsilon, account.account.delta
    found = _tried(scored_attacks(run, names), (float(epsilon), float(delta)), 0)
    return found.replace(unchecked=tuple(dict.fromkeys(unchecked_facts(run_dir, run.references))))


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
    best: ScoredAttack | None,
    scored: Sequence[ScoredAttack],
    members: EpsilonTable,
    holdout: EpsilonTable | None,
    attacks: int,
    seed: int,
) -> pd.DataFrame:
    """The strongest attack, or the loss threshold, in bins of epsilon, which the hold-out has too.

    Empty without epsilons of the hold-out. attacks: number that the strongest was chosen from.
    """
    losses = (of for of in scored if (of.model, of.attack.name) == ("dp", BY_GROUP))
    chosen = next(losses, None) if best is None else best
    if holdout is None or chosen is None or chosen.scores.example_ids is None:
        return rates.table(BINS)
    ids, member = chosen.scores.example_ids, chosen.scores.member
    place = np.empty(len(ids), np.int64)  # training ids may be texts
    place[member] = pd.Index(members.example_ids).get_indexer(ids[member])
    place[~member] = pd.Index(holdout.example_ids.astype(str)).get_indexer(ids[~member].astype(str))
    scores, known = chosen.scores.take(place >= 0), place[place >= 0]
    mine, others = known[scores.member], holdout.epsilon[known[~scores.member]]
    attacks = 1 if best is None else attacks
    return attack_by_epsilon(scores, members.take(mine), others, seed=seed, attacks=attacks)


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
