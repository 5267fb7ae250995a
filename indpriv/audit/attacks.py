"""Attacks on a finished run or on the models of a study, without an audit. Sensitive."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv import _checks, _facts, _files, attack_scores, example_table
from indpriv._types import IntArray
from indpriv.accountant.account import table_for
from indpriv.accountant.risk import predicted_evidence
from indpriv.analysis import recorded_run as recorded_runs
from indpriv.analysis.attacks import attributes, canaries, membership
from indpriv.analysis.attacks.rates import rates_over_models
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.analysis.summary import Audit
from indpriv.attack_signals import CONFIDENCE, AttackSignals
from indpriv.attacks import ATTACKS, Attack, Material
from indpriv.attacks.references import scores_of_target
from indpriv.attacks.released import last_iterate_epsilon
from indpriv.audit.pipeline import method_of_run, read_run
from indpriv.errors import InputError
from indpriv.norm_log import run_files
from indpriv.norm_log.norm_log import NormLog


def guarantee_of_run(run_dir: Path, delta: float | None = None) -> tuple[float, float]:
    """Worst-case epsilon and delta: what run.json says, or, with another delta, by its log."""
    record = run_files.read_run_json(run_dir)
    epsilon, said = (_files.first_at(record, ("guarantee", key)) for key in ("epsilon", "delta"))
    if epsilon is None or said is None or delta not in (None, said):
        _, log, recorded = read_run(run_dir, "worst_case")
        account = table_for(log, method_of_run(log, recorded, run_dir, {"delta": delta})[0])
        epsilon, said = account.worst_case_epsilon, account.account.delta
    return float(epsilon), float(said)


def known_of_run(run_dir: Path, signals: Path | None = None) -> RecordedRun:
    """What attacks may use of a finished run.

    signals: of references for the run; None for those in the run directory, if it has any.
    InputError for signals of something else.
    """
    read = example_table.ExampleTable.from_parquet
    if not (run_dir / run_files.EXAMPLES).is_file():
        read(run_dir / run_files.EXAMPLES)  # refuses
    run = RecordedRun(*recorded_runs.models_of(run_dir, read))
    return recorded_runs.with_references(run, run_dir, signals, None)


def results_of_run(
    run: RecordedRun, names: Collection[str], guarantee: tuple[float, float]
) -> Audit:
    """Attacks on a finished run, without an audit of it: all whose needs are met, or those named.

    run: of `known_of_run`; guarantee: of `guarantee_of_run`. InputError for an unknown attack, or
    one whose needs are not met.
    """
    known = run.models
    remedy = "; indpriv.attacks.train_references takes them, for --signals"
    _check_needs(names, known["dp"], "this run and its signals do not have", remedy)
    found = membership.tried(membership.scored_attacks(run, names), guarantee, 0)
    of = known if "attributes" in (names or ATTACKS) else {}
    return found.replace(
        unchecked=run.unchecked, attribute_attacks=attributes.attribute_attacks(of)
    )


def model_itself(run: RecordedRun, run_dir: Path, delta: float) -> dict[str, Any]:
    """What else is to say of attackers who have the final model of a run.

    "lacking": attacks on its gradients and inputs that lack something; "last_iterate": the
    heuristic epsilon of `indpriv.attacks.released.last_iterate_epsilon`, None where it has none.
    """
    found: dict[str, Any] = {"last_iterate": None}
    found["lacking"] = [
        {"attack": attack.title, "needs": need}
        for attack in ATTACKS.values()
        if (attack.sees == "model" or attack.need == "released") and (need := attack.lacks(run.dp))
    ]
    log = NormLog.open(run_dir) if run_files.holds_log(run_dir) else None
    defined = log and log.sampler == "poisson" and log.unit_ids is None
    if log is not None and defined and log.settings.distinct()[0] is None:
        found["last_iterate"] = last_iterate_epsilon(log.settings, delta=delta)
    return found


def _check_needs(names: Collection[str], known: Material, whose: str, remedy: str = "") -> None:
    """Raise InputError for an attack that is not in the registry, or whose needs are not met."""
    for name in names:
        _checks.check_choice("attack", name, ATTACKS)
        lacking = ATTACKS[name].lacks(known)
        if lacking is not None:
            more = remedy * bool(ATTACKS[name].references)
            raise InputError(f"{name} needs {lacking}, which {whose}{more}")


# --- the models of a study


def attack_study(
    signals: Mapping[str, AttackSignals], names: Collection[str] = (), *, unit_rule: str = "mean"
) -> pd.DataFrame:
    """Run attacks on every model of a study, leaving that model out of the references.

    Signals are of the same models, by name (see `indpriv.attacks.train_references`). unit_rule:
    how the scores of a unit's rows become one. The result is mean rates over the models (rows of
    `RATES`), the attack with the largest AUC first; without names of attacks, all whose needs are
    met and a loss threshold. Of references for a run, the run itself is left out: no coins decided
    on its examples. InputError for an unknown attack, and one whose needs are not met.
    """
    signals = {name: _without_run(part) for name, part in signals.items()}
    first = _attacked(signals, 0)
    _check_needs(names, first, "these signals do not have")
    used = [ATTACKS[name] for name in names or ATTACKS if ATTACKS[name].can_use(first)]
    found = []
    for attack in used:
        scores_of = partial(_scores, attack, signals, unit_rule)
        found.append(rates_over_models(scores_of(), scores_of))
    if not names and CONFIDENCE in signals:  # the threshold that all are compared with
        of, title = signals[CONFIDENCE], ATTACKS["loss_threshold"].title
        thresholds = (
            scores_of_target(of, target, of.finite(target), title) for target in range(of.n_models)
        )
        found.append(rates_over_models(thresholds))
    order = np.argsort([-one["value"].iloc[0] for one in found], kind="stable")
    rates: pd.DataFrame = pd.concat([found[place] for place in order], ignore_index=True)
    return rates


def _without_run(signals: AttackSignals) -> AttackSignals:
    """The same without the audited row, with examples numbered: training and test share ids."""
    if (row := signals.audited) is None:
        return signals
    if signals.n_models == 1:
        raise _facts.refused("refusal.signals", "none", n=0, least=1)
    return replace(
        signals,
        signal=np.delete(signals.signal, row, axis=0),
        member=np.delete(signals.member, row, axis=0),
        example_ids=np.arange(signals.n_examples),
        audited=None,
    )


def _scores(
    attack: Attack,
    signals: Mapping[str, AttackSignals],
    unit_rule: str,
    models: IntArray | None = None,
) -> Iterator[attack_scores.AttackScores]:
    """Scores of one model after the other; of units, where units have several rows.

    models: leave out all others. They are checked where no model is left out.
    """
    used = {name: signals[name] for name in (attack.need, *attack.beside) if name in signals}
    if models is not None:
        used = {
            name: replace(one, signal=one.signal[models], member=one.member[models])
            for name, one in used.items()
        }
    fields: dict[str, Any] = used
    of_models, any_kind = Material(**fields), used[attack.need]
    for target in range(any_kind.n_models):
        if models is None:
            attack.check(_attacked(used, target))
        found = attack.unchecked(of_models, target)
        if any_kind.unit_ids is not None and found.example_ids is not None:
            rows = pd.Index(any_kind.example_ids).get_indexer(found.example_ids)
            found = membership.unit_scores(found, np.asarray(any_kind.unit_ids)[rows], unit_rule)
        yield found


def _attacked(signals: Mapping[str, AttackSignals], target: int) -> Material:
    """What attacks know of one model of a study."""
    of: dict[str, Any] = {name: replace(one, audited=target) for name, one in signals.items()}
    return Material(**of)


# --- attacks that runs made on themselves while they trained


def _recorded_scores(run_dir: Path, file: str, advice: str) -> attack_scores.AttackScores:
    if not (run_dir / file).is_file():
        raise InputError(f"{run_dir} has no {file}; record a run with {advice}")
    return attack_scores.AttackScores.from_file(run_dir / file)


def white_box_of_run(run_dir: Path) -> tuple[attack_scores.AttackScores, pd.DataFrame]:
    """Evidence of a run's white-box attack, and what its log predicts; InputError without one."""
    advice, path = "attack=WhiteBox() and record_holdout=True", run_dir / run_files.WHITE_BOX
    scores = _recorded_scores(run_dir, run_files.WHITE_BOX, advice)
    if scores.example_ids is None:
        raise InputError(f"{path} lacks the column example_id; it is not what a Recorder wrote")
    inside = predicted_evidence(log := NormLog.open(run_dir))
    place = {example: k for k, example in enumerate(np.asarray(log.example_ids).tolist())}
    rows = np.array([place[k] for k in scores.example_ids[scores.member].tolist()], dtype=np.int64)
    parts = [inside.iloc[rows]]
    if not scores.member.all():
        if not run_files.holds_log(run_dir / run_files.HOLDOUT):
            raise _facts.refused("refusal.audits", "no_holdout", run_dir=run_dir)
        outside = predicted_evidence(NormLog.open(run_dir / run_files.HOLDOUT))
        parts.append(outside.iloc[scores.example_ids[~scores.member].astype(np.int64)])
    return scores, pd.concat(parts)


def evidence_of_runs(run_dirs: Sequence[Path]) -> pd.DataFrame:
    """What the white-box attacks on several runs found, for `identities`."""
    found = enumerate(map(white_box_of_run, map(Path, run_dirs)))
    return pd.concat(
        predicted.assign(evidence=scores.scores, member=scores.member, run=number)
        for number, (scores, predicted) in found
    )


def canaries_of_run(run_dir: Path, *, delta: float = 1e-5) -> canaries.CanaryResults:
    """What the gradient canaries of a run say of each length; InputError for none or too few."""
    file = run_files.GRADIENT_CANARIES
    scores = _recorded_scores(run_dir, file, "attack=GradientCanaries(...)")
    found = canaries.measure_gradient_canaries(scores, NormLog.open(run_dir).settings, delta=delta)
    if not found.lengths:
        raise InputError(" ".join(found.left_out) or f"{run_dir / file} holds no canaries")
    return found
