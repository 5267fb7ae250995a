"""Attacks on members and on attributes: all of the registry whose needs are met. Sensitive."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pandas as pd

from indpriv.accountant.per_example import table_for
from indpriv.analysis.attacks import rates
from indpriv.analysis.attacks.attack_table import ScoredAttack, rates_of_units
from indpriv.analysis.attacks.attributes import (
    AttributeFindings,
    EpsilonsOfExamples,
    measure_attribute,
)
from indpriv.analysis.attacks.by_epsilon import BINS, attack_by_epsilon
from indpriv.analysis.attacks.ceilings import Ceilings, ceilings_of, mu_of
from indpriv.analysis.attacks.threshold_attack import UnequalAttack, threshold_attack
from indpriv.analysis.audited_run import AuditedRun, attacked_table
from indpriv.analysis.groups import GroupTable
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.analysis.summary import Audit, Finding, attacks_on
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.attributes import GUESSERS, AttributeKnowledge
from indpriv.attacks.train_references import CHECKPOINTS, CONFIDENCE, LABELS
from indpriv.epsilon_table import EpsilonTable
from indpriv.example_table import ExampleTable

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


def attacks_of(run: AuditedRun) -> list[ScoredAttack]:
    """The attacks on a run and on its baseline, on all examples or on some."""
    return scored_attacks(run.attacked)


def tables_of_both_sides(run: AuditedRun) -> tuple[EpsilonTable, EpsilonTable | None]:
    """Epsilons of members and of the hold-out, of those who are attacked if not all are.

    Test examples are never sampled, so the hold-out has no batch norms, and members are compared
    with it by full records alone. No hold-out: None.
    """
    log, method, table, attacked = run.log, run.method, run.once(attacked_table), run.attacked
    known = method is not None and method.participation == "known"  # they take part in no step
    by_row = table.account.rows_per_unit is None
    if method is None or known or attacked.holdout is None or not by_row:
        return table, run.holdout
    holdout = table_for(attacked.holdout, method)
    if log.batch_norms is None:
        return table, holdout
    positions = None if isinstance(run.epsilons, EpsilonTable) else run.recorded.attacked(run.seed)
    log = replace(log, batch_norms=None)
    return table_for(log if positions is None else log.take(positions), method), holdout


def _find(run: AuditedRun) -> dict[str, Any]:
    """Every attack, by group and by unit, beside its ceilings."""
    scored, seed, groups = run.once(attacks_of), run.seed, run.audit.groups
    (members, _), epsilons = run.once(tables_of_both_sides), run.once(attacked_table)
    columns, delta = [found.by for found in groups], members.account.delta
    found = tried(scored, (members.worst_case_epsilon, delta), seed)
    best, materials_of = _strongest(found, scored), materials(run.attacked)
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
    frames.append(rates_of_units(run.recorded, scored, epsilons, seed))
    if run.recorded.gradient_canaries is not None:
        frames.append(rates.rates_on_updates(run.recorded.gradient_canaries))
    return {
        "attacks": found.attacks,
        "rates": pd.concat(frames, ignore_index=True),
        "unchecked": tuple(dict.fromkeys(run.recorded.unchecked)),
        "roc": {each.model: rates.roc(each.scores) for each in by_loss},
        "most_exposed": tuple(most_exposed),
    }


def _ceilings(run: AuditedRun) -> dict[str, Any]:
    if not (run.recorded.references or run.recorded.attributes):
        return {}
    return {"ceilings": ceilings_of(run.log, run.once(attacked_table))}


def _in_bins(run: AuditedRun) -> dict[str, Any]:
    scored, audit = run.once(attacks_of), run.audit
    members, holdout = run.once(tables_of_both_sides)
    chosen_from = len(attacks_on(audit, "dp"))
    best = _strongest(audit, scored)
    return {"attack_by_epsilon": _by_epsilon(best, scored, members, holdout, chosen_from, run.seed)}


def _attributes(run: AuditedRun) -> dict[str, Any]:
    members, holdout = run.once(tables_of_both_sides)
    columns, ceilings = [found.by for found in run.audit.groups], run.audit.ceilings
    found = attribute_attacks(
        materials(run.attacked), columns, members=members, holdout=holdout, ceilings=ceilings
    )
    return {"attribute_attacks": found}


def tried(scored: Sequence[ScoredAttack], guarantee: tuple[float, float], seed: int) -> Audit:
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


_WRONG = (
    "the run or its account is wrong, unless training and test examples differ in other ways too: "
    "was the split random?"
)


def _attacks_above(audit: Audit) -> Iterator[str]:
    for one in attacks_on(audit, "dp"):
        if one.above_worst_case:
            yield f"{one.title} exceeds what the worst case allows: {_WRONG}"


def _bins_above(audit: Audit) -> Iterator[str]:
    if above := int(audit.attack_by_epsilon["above_worst_case"].sum()):
        yield f"In {above} bins of epsilon an attack exceeds what the worst case allows: {_WRONG}"


def _bins_to_look_at(audit: Audit) -> Iterator[str]:
    bins = audit.attack_by_epsilon
    if look := int((bins["above_reference"] & ~bins["above_worst_case"]).sum()):
        yield f"In {look} bins of epsilon an attack exceeds what their epsilon would allow."


def _advantages_above(audit: Audit) -> Iterator[str]:
    for one in audit.attribute_attacks:
        if one.model == "dp" and one.above_ceiling:
            yield f"{one.attribute}: the advantage exceeds the worst case: {_WRONG}"


FINDINGS = (
    Finding(
        "membership",
        40,
        {
            "attacks": (
                Annotated[pd.DataFrame, rates.TRIED],
                "Every attack on this model and on the non-private baseline; those on this model "
                "first, the strongest by AUC first.",
            ),
            "rates": (
                Annotated[pd.DataFrame, rates.RATES],
                "Of these attacks over all examples, by group and by unit, and of gradient "
                "canaries.",
            ),
            "unchecked": (
                tuple[str, ...],
                "What could not be checked about the reference models, in sentences.",
            ),
            "roc": (
                Mapping[str, tuple[tuple[float, float], ...]],
                "(false-positive rate, true-positive rate) of thresholds on the loss, by model.",
            ),
            "most_exposed": (
                tuple[UnequalAttack, ...],
                "Tests of the group with the largest mean epsilon, by model and column.",
            ),
        },
        _find,
        alarms=_attacks_above,
        watched="attacks above the worst case",
        notes=lambda audit: audit.unchecked,
    ),
    Finding(
        "ceilings",
        41,
        {
            "ceilings": (
                Ceilings | None,
                "What any attack can reach; null where the unit has several rows.",
            )
        },
        _ceilings,
    ),
    Finding(
        "attributes",
        45,
        {
            "attribute_attacks": (
                tuple[AttributeFindings, ...],
                "Attacks that guess attributes; empty where the run says nothing of them.",
            )
        },
        _attributes,
        alarms=_advantages_above,
        watched="attacks on attributes above the worst case",
    ),
    Finding(
        "by_epsilon",
        50,
        {
            "attack_by_epsilon": (
                Annotated[pd.DataFrame, BINS],
                "One attack in bins of epsilon; empty where the norms of the hold-out were not "
                "recorded.",
            )
        },
        _in_bins,
        alarms=_bins_above,
        watched="bins of epsilon above the worst case",
        notes=_bins_to_look_at,
    ),
)
