"""Attacks on members: all of the registry whose needs are met; in bins of epsilon. Sensitive.

Members are binned by their individual epsilon, non-members by the epsilon they would have had on
the same trajectory. For a random member and a random non-member, (epsilon,
delta)-indistinguishability at the bin's upper edge would imply

    P[in the bin and accused | member] <= e^epsilon P[in the bin and accused | non-member] + delta,

that is, TPR <= e^epsilon FPR Q(bin) / P(bin) + delta / P(bin), where P and Q are the shares of
members and of non-members in the bin. Individual epsilon is output-specific and does not guarantee
this: a bin above its own limit is a place to look. The worst case does guarantee it: a bin above
that limit shows that the run or its account is wrong.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from indpriv._checks import check_choice, check_positive_int
from indpriv._columns import to_floats
from indpriv._facts import refused, text
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.accountant.account import table_for
from indpriv.analysis import summary
from indpriv.analysis.attacks import rates
from indpriv.analysis.guarantee import mu_of, true_positive_rate
from indpriv.analysis.recorded_run import AuditedRun, RecordedRun, in_rows_of
from indpriv.analysis.statistics import clopper_pearson
from indpriv.analysis.summary import Audit, Finding, attacks_on
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import split_units
from indpriv.attacks import ATTACKS, Attack, Material
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

FittedModel: Any = summary.record("fitted_model")
BY_GROUP = "loss_threshold"  # the attack of the paper's protocol
TARGET_RATES = (0.01, 0.1, 0.5)  # false-positive rates that the thresholds aim at, fixed beforehand
_CEILING_AT = 0.01  # false-positive rate of the ceiling in the table of examples
_BINS = 10
_LEAST = 40  # with fewer members or non-members, no bin could show anything
_LARGEST_EXPONENT = 700.0  # e^700 is near the largest float
_DRAWS = 999  # random groups of each size


# --- every attack


class ScoredAttack(NamedTuple):
    """An attack of the registry on one model ("dp" or "non_dp"), what it used, and its scores."""

    attack: Attack
    model: str
    material: Material
    scores: AttackScores

    def in_groups(self, by: str) -> AttackScores:
        """Its scores, with the groups of a column."""
        ids, member = np.asarray(self.scores.example_ids), self.scores.member
        return replace(self.scores, groups=self.material.groups(by, ids, member))


def scored_attacks(run: RecordedRun, names: Collection[str] = ()) -> list[ScoredAttack]:
    """Every attack of these names, or all, whose needs are met, on the run and its baseline."""
    return [
        ScoredAttack(attack, model, material, attack.scores(material))
        for model, material in run.models.items()
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
    log, method, table, attacked = run.log, run.method, run.attacked_epsilons, run.attacked
    known = method is not None and method.participation == "known"  # they take part in no step
    by_row = table.account.rows_per_unit is None
    if method is None or known or attacked.holdout is None or not by_row:
        return table, None
    holdout = table_for(attacked.holdout, method)
    if log.batch_norms is None:
        return table, holdout
    positions = None if run.epsilons.in_memory else run.recorded.attacked(run.seed)[0]
    log = replace(log, batch_norms=None)
    return table_for(log if positions is None else log.take(positions), method), holdout


def tried(scored: Sequence[ScoredAttack], guarantee: tuple[float, float], seed: int) -> Audit:
    """Every attack over all examples, those on the audited model first, the largest AUC first."""
    rows, frames, tests = [], [summary.RATES.of_rows()], len(scored)
    for each in scored:
        attack, scores, ours = each.attack, each.scores, each.model == "dp"
        found = rates.rates_of(scores, attack=attack.name, model=each.model, tests=tests)
        frames.append(found)
        auc = found.loc[found["rate"] == "auc", "value"].sum()  # 0 where there is none
        n = int(scores.member.sum())
        row = {name: getattr(attack, name) for name in ("sees", "source", "caveat")}
        row |= {"attack": attack.name, "title": scores.method, "adversary": scores.adversary}
        row |= {"model": each.model, "references": 0}
        if attack.references:
            row["references"] = getattr(each.material, attack.need).n_models - 1
        row |= {"n_members": n, "n_others": len(scores.member) - n}
        row["above_worst_case"] = ours and rates.exceeds(scores, guarantee, tests=tests)
        rows.append(((not ours, -auc, attack.name), row))
    in_order = [row for _, row in sorted(rows, key=lambda found: found[0])]
    every = pd.concat(frames[bool(scored) :], ignore_index=True)
    losses = {each.model: each.material.losses for each in scored}
    models = [fitted_model(model, one) for model, one in losses.items() if one is not None]
    attacks = summary.TRIED.of_rows(in_order)
    return Audit(rates=every, attacks=attacks, fitted=tuple(models), attack_seed=seed)


def fitted_model(model: str, examples: ExampleTable) -> FittedModel:
    """How well a model fits; None for what is not known."""
    means = {}
    for split, rows in (("train", examples.train), ("test", examples.test)):
        loss, correct = to_floats(rows["loss"]), to_floats(rows["correct"])
        for name, known in (("loss", loss[np.isfinite(loss)]), ("accuracy", correct)):
            known = known[~np.isnan(known)]
            means[f"{split}_{name}"] = float(known.mean()) if len(known) else None
    return FittedModel(model, **means)


def _strongest(found: Audit, scored: Sequence[ScoredAttack]) -> ScoredAttack | None:
    """The strongest attack on the run; None unless it uses reference models."""
    best = next(iter(attacks_on(found, "dp")), None)
    if best is None or not best.references:
        return None
    return next(of for of in scored if (of.model, of.attack.name) == ("dp", best.attack))


def _find(run: AuditedRun) -> dict[str, Any]:
    """Every attack, by group and by unit."""
    scored, seed, groups, recorded = run.once(attacks_of), run.seed, run.audit.groups, run.attacked
    members, _ = run.once(tables_of_both_sides)
    found = tried(scored, (members.worst_case_epsilon, members.account.delta), seed)
    best, frames, most_exposed = _strongest(found, scored), [found.rates], []
    if best is not None and best.scores.example_ids is not None:
        for by in (table.by for table in groups):
            scores = best.in_groups(by)
            frames.append(rates.accused(scores, attack=best.attack.name, by=by))
            frames.append(rates.rates_of(scores, attack=best.attack.name, by=by))
    by_loss = [each for each in scored if each.attack.name == BY_GROUP] if groups else []
    for each in by_loss:  # over all examples, and by column
        names: dict[str, Any] = {"attack": BY_GROUP, "model": each.model}
        frames.append(rates.threshold_attack(each.scores, **names, seed=seed)[0])
        for of in groups:
            names["by"], scores = of.by, each.in_groups(of.by)
            readable = of.rows["name"][~of.rows["too_small"]].tolist()
            success, unequal = rates.threshold_attack(
                scores, **names, seed=seed, by_epsilon=readable
            )
            frames += [success, rates.rates_of(scores, **names)]
            most_exposed += [] if unequal is None else [unequal]
    for name, rule, scores in (by_unit := run.once(scores_of_units)):
        frames.append(rates.rates_of(scores, attack=name, part=rule, tests=len(by_unit)))
    if recorded.gradient_canaries is not None:
        frames.append(rates.rates_on_updates(recorded.gradient_canaries))
    return {
        "attacks": found.attacks,
        "fitted": found.fitted,
        "rates": pd.concat(frames, ignore_index=True),
        "unchecked": tuple(dict.fromkeys(recorded.unchecked)),
        "roc": {each.model: rates.roc(each.scores) for each in by_loss},
        "most_exposed": tuple(most_exposed),
    }


# --- one row for each example or unit; no accusation, as single decisions change with the model


def attack_table(run: AuditedRun) -> pd.DataFrame | None:
    """Every attack's scores on a run whose epsilons are in memory, if it had references.

    Columns: example_id, member, epsilon and ceiling_at_1_percent (NaN for test examples), loss,
    then one column for each attack, NaN where it gave no score. The ceiling is that of a Gaussian
    mechanism with this epsilon, and at most that of the worst case. Of units of several rows:
    unit_id, n_rows, epsilon, loss (mean), then for each attack and rule the rank of the unit among
    random groups of as many non-members, from 0 to 1.
    """
    recorded, table, ceilings = run.recorded, run.attacked_epsilons, run.audit.ceilings
    if recorded.examples is None:
        return None
    if (table.account.rows_per_unit or 1) > 1:
        rows = in_rows_of(table, recorded.examples).aligned(table.example_ids)
        frame = pd.DataFrame({"unit_id": table.example_ids, "n_rows": table.details["n_rows"]})
        frame = frame.astype({"n_rows": np.int64})
        frame["epsilon"], frame["loss"] = table.epsilon, to_floats(rows["loss"])
        for name, rule, scores in run.once(scores_of_units):
            ids = np.asarray(scores.example_ids)[scores.member]
            ranks = pd.Series(scores.scores[scores.member], index=ids)
            frame[f"{name}_{rule}"] = ranks.reindex(table.example_ids.astype(str)).to_numpy()
        return frame
    if recorded.examples.test.empty or recorded.dp.confidence is None:
        return None
    train, test = recorded.examples.train, recorded.examples.test
    limit = 1.0 if ceilings is None else ceilings.worst_case[f"{_CEILING_AT:g}"]
    own_limits = np.minimum(true_positive_rate(mu_of(table), _CEILING_AT), limit)
    own = pd.DataFrame({"epsilon": table.epsilon, "ceiling_at_1_percent": own_limits})
    own = own.set_index(pd.Index(table.example_ids)).reindex(train["example_id"])
    both, member = pd.concat([train, test]), np.arange(len(train) + len(test)) < len(train)
    ids = both["example_id"].to_numpy()
    frame = pd.DataFrame({"example_id": ids, "member": member})
    frame = frame.join(own.reset_index(drop=True))  # members come first
    frame["loss"] = to_floats(both["loss"])
    keys = pd.MultiIndex.from_arrays([member, ids])
    for one in run.once(attacks_of):
        if one.model == "dp":
            of = pd.MultiIndex.from_arrays([one.scores.member, np.asarray(one.scores.example_ids)])
            frame[one.attack.name] = pd.Series(one.scores.scores, of).reindex(keys).to_numpy()
    about = text("sentence.attacks", "no_accusation")
    frame.attrs = {"sensitive": "for the curator only", "meaning": about}
    return frame


def scores_of_units(run: AuditedRun) -> list[tuple[str, str, AttackScores]]:
    """Scores of units by each attack on the run and each rule; none where units have one row."""
    table, found = run.attacked_epsilons, list[tuple[str, str, AttackScores]]()
    if run.attacked.examples is None or (table.account.rows_per_unit or 1) == 1:
        return found
    owners = run.attacked.examples.train.set_index("example_id")["unit_id"]
    for each in run.once(attacks_of):
        if each.model == "dp" and each.scores.example_ids is not None:
            mine = owners.reindex(each.scores.example_ids[each.scores.member]).to_numpy()
            for rule in UNIT_RULES:
                scores = calibrated_unit_scores(each.scores, mine, rule, seed=run.seed)
                found.append((each.attack.name, rule, scores))
    return found


# --- scores of people with several rows, from the scores of their rows


def _folded(by: np.ufunc, scores: FloatArray, codes: IntArray, n: int) -> FloatArray:
    found = np.full(n, -np.inf)
    by.at(found, codes, scores)
    return found


UNIT_RULES: dict[str, Callable[[FloatArray, IntArray, int], FloatArray]] = {
    "max": partial(_folded, np.maximum),
    "mean": lambda score, codes, n: np.bincount(codes, score, n) / np.bincount(codes, minlength=n),
    "log_sum": partial(_folded, np.logaddexp),
}


def _rule(rule: str, scores: AttackScores) -> Callable[[FloatArray, IntArray, int], FloatArray]:
    scores.check_one_model("a score of a unit")
    return UNIT_RULES[check_choice("rule", rule, UNIT_RULES)]


def unit_scores(
    scores: AttackScores, unit_ids: NDArray[np.generic], rule: str = "mean"
) -> AttackScores:
    """One score for each unit, by a rule that must be chosen before looking at the scores.

    unit_ids: (n,) whose row each score is of, by one model; rule: "max", "mean" or "log_sum"
    (logarithm of the sum of exponentials). The example_ids of the result are the units. Groups are
    left out: rows of a unit may differ. InputError for a unit with members and non-members.
    """
    combine = _rule(rule, scores)
    codes, units = pd.factorize(unit_ids)
    if len(codes) != len(scores.scores):
        raise InputError(f"there are {len(codes)} unit ids for {len(scores.scores)} scores")
    n = len(units)
    if split := split_units(codes, scores.member):
        raise refused("refusal.signals", "split", n=split)
    return replace(
        scores,
        scores=combine(scores.scores, codes, n),
        member=np.bincount(codes, scores.member, n) > 0,
        groups=None,
        example_ids=np.asarray(units),
        model=None if scores.model is None else scores.model[:1].repeat(n),
    )


def calibrated_unit_scores(
    scores: AttackScores, owners: NDArray[np.generic], rule: str = "mean", *, seed: int = 0
) -> AttackScores:
    """Scores of units, first, beside random groups of non-members of their sizes, called "".

    A score is the rank, from 0 to 1, of a unit or group among `_DRAWS` random groups of non-members
    of its own size, so that large and small units compare. It is calibrated if rows of a unit are
    no more alike than random rows are; where they are, ranks spread too widely on both sides of
    1/2. owners: (n_members,) whose row each member is; rule: chosen before looking at the scores.
    """
    combine = _rule(rule, scores)
    mine, others = scores.scores[scores.member], scores.scores[~scores.member]
    if len(owners) != len(mine):
        raise InputError(f"there are {len(owners)} owners for {len(mine)} scores of members")
    codes, units = pd.factorize(owners)
    sizes = np.bincount(codes)
    rng = np.random.default_rng(seed)
    wanted = rng.permutation(sizes)
    groups = wanted[np.cumsum(wanted) <= len(others)]
    numbers = np.repeat(np.arange(len(groups)), groups)
    shuffled = rng.permutation(others)[: len(numbers)]
    inside, outside = combine(mine, codes, len(units)), combine(shuffled, numbers, len(groups))
    raw = np.concatenate([inside, outside])
    size_of, ranks = np.concatenate([sizes, groups]), np.zeros(len(raw))
    for size in np.unique(size_of) if len(others) else ():
        drawn = others[rng.integers(0, len(others), _DRAWS * size)]
        null = np.sort(combine(drawn, np.repeat(np.arange(_DRAWS), size), _DRAWS))
        here = size_of == size
        sides = [np.searchsorted(null, raw[here], side) for side in ("left", "right")]
        ranks[here] = (sides[0] + sides[1]) / (2 * _DRAWS)
    return AttackScores(
        scores=ranks,
        member=np.arange(len(raw)) < len(units),
        method=f"{scores.method}, {rule} over the rows of a unit",
        example_ids=np.concatenate([np.asarray(units).astype(str), np.full(len(groups), "")]),
        adversary=scores.adversary,
    )


# --- bins of epsilon


def attack_by_epsilon(
    scores: AttackScores,
    members: EpsilonTable,
    nonmember_epsilon: FloatArray,
    *,
    seed: int = 0,
    attacks: int = 1,
) -> pd.DataFrame:
    """Compare an attack's success in bins of epsilon with what epsilon allows, as rows of `BINS`.

    None with fewer than forty members or non-members. Scores of members are in the order of their
    table, those of others in the order of nonmember_epsilon (n_nonmembers,). A random half of the
    non-members chooses the thresholds; `attacks`: from how many this one was chosen. InputError for
    numbers that do not match, or scores that are not independent.
    """
    check_positive_int("seed", seed, minimum=0)
    scores.check_adversary(rates.INTERVALS, ("updates", "full"))
    mine, others = (scores.scores[scores.member == side] for side in (True, False))
    for side, count, found in (
        ("members", len(members), len(mine)),
        ("non-members", len(nonmember_epsilon), len(others)),
    ):
        if count != found:
            raise refused("refusal.compared", "scores", n=found, side=side, count=count)
    if min(len(mine), len(others)) < _LEAST:
        return summary.BINS.of_rows()
    order, half = np.random.default_rng(seed).permutation(len(others)), len(others) // 2
    choosing, reporting = np.sort(others[order[:half]])[::-1], order[half:]  # the largest first
    edges = epsilon_edges(members)
    level = rates.bonferroni(len(TARGET_RATES) * (len(edges) - 1) * attacks)
    n, n_others, rows = len(mine), len(reporting), []
    for target, (low, high) in itertools.product(TARGET_RATES, itertools.pairwise(edges)):
        threshold = float(choosing[int(target * len(choosing))])
        inside, outside = (
            ((low < epsilon) | (low == 0.0)) & (epsilon <= high)
            for epsilon in (members.epsilon, nonmember_epsilon[reporting])
        )
        hits = int((inside & (mine > threshold)).sum())
        false = int((outside & (others[reporting] > threshold)).sum())
        own, of_others = int(inside.sum()), int(outside.sum())
        threshold = threshold if np.isfinite(threshold) else np.sign(threshold) * 1e308
        row: dict[str, Any] = {"attack": scores.method, "target_fpr": target}
        row |= {"threshold": threshold, "above": low, "up_to": high}
        row |= {"n_members": own, "n_others": of_others}
        least = clopper_pearson(hits, n, level).low
        most = clopper_pearson(false, n_others, level).high
        for prefix, epsilon in (("", high), ("worst_case_", members.worst_case_epsilon)):
            ratio, delta = np.exp(min(epsilon, _LARGEST_EXPONENT)), members.account.delta
            name = "above_worst_case" if prefix else "above_reference"
            row[name] = least > ratio * most + delta
            if own:
                allowed = (ratio * (false / n_others) + delta) / (own / n)
                row[f"{prefix}reference"] = min(1.0, allowed)
        row |= {"tpr": hits / own, **vars(clopper_pearson(hits, own))} if own else {}
        rows.append(row | ({"fpr": false / of_others} if of_others else {}))
    return summary.BINS.of_rows(rows)


def epsilon_edges(members: EpsilonTable, bins: int = _BINS) -> list[float]:
    """Edges of bins with about equal numbers of members; one bin for those at the worst case."""
    below = members.epsilon[~members.at_worst_case]
    shares = np.linspace(0, 1, bins + 1)[1:]
    inner = np.quantile(below, shares, method="higher").tolist() if len(below) else []
    top = max(members.worst_case_epsilon, float(members.epsilon.max()))
    return sorted({0.0, *inner, top})


def _in_bins(run: AuditedRun) -> dict[str, Any]:
    """The strongest attack, or the loss threshold, in bins of epsilon, which the hold-out has too.

    Nothing without epsilons of the hold-out.
    """
    scored, (members, holdout) = run.once(attacks_of), run.once(tables_of_both_sides)
    losses = (of for of in scored if (of.model, of.attack.name) == ("dp", BY_GROUP))
    best = _strongest(run.audit, scored)
    chosen = next(losses, None) if best is None else best
    if holdout is None or chosen is None or chosen.scores.example_ids is None:
        return {}
    ids, member = chosen.scores.example_ids, chosen.scores.member
    place = np.empty(len(ids), np.int64)  # training ids may be texts
    place[member] = pd.Index(members.example_ids).get_indexer(ids[member])
    place[~member] = pd.Index(holdout.example_ids.astype(str)).get_indexer(ids[~member].astype(str))
    scores, known = chosen.scores.take(place >= 0), place[place >= 0]
    mine, others = known[scores.member], holdout.epsilon[known[~scores.member]]
    attacks = 1 if best is None else len(attacks_on(run.audit, "dp"))
    found = attack_by_epsilon(scores, members.take(mine), others, seed=run.seed, attacks=attacks)
    return {"attack_by_epsilon": found}


# --- findings


def _attacks_above(audit: Audit) -> Iterator[str]:
    for one in attacks_on(audit, "dp"):
        if one.above_worst_case:
            what = f"{one.title} exceeds what the worst case allows"
            yield text("sentence.attacks", "wrong", what=what)


def _bins_above(audit: Audit) -> Iterator[str]:
    if above := int(audit.attack_by_epsilon["above_worst_case"].sum()):
        what = f"In {above} bins of epsilon an attack exceeds what the worst case allows"
        yield text("sentence.attacks", "wrong", what=what)


def _bins_to_look_at(audit: Audit) -> Iterator[str]:
    bins = audit.attack_by_epsilon
    if look := int((bins["above_reference"] & ~bins["above_worst_case"]).sum()):
        yield f"In {look} bins of epsilon an attack exceeds what their epsilon would allow."


FINDINGS = (
    Finding(
        "membership",
        _find,
        alarms=_attacks_above,
        watched="attacks above the worst case",
        notes=lambda audit: audit.unchecked,
    ),
    Finding(
        "by_epsilon",
        _in_bins,
        alarms=_bins_above,
        watched="bins of epsilon above the worst case",
        notes=_bins_to_look_at,
    ),
)
