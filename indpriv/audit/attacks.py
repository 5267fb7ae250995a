"""Attacks on a finished run or on the models of a study, without an audit. Sensitive."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from indpriv._checks import check_choice
from indpriv._files import first_at
from indpriv.accountant.account import table_for
from indpriv.accountant.risk import PredictedEvidence, predicted_evidence
from indpriv.analysis.attacks.attributes import attribute_attacks
from indpriv.analysis.attacks.canaries import CanaryResults, measure_gradient_canaries
from indpriv.analysis.attacks.evidence import Evidence
from indpriv.analysis.attacks.membership import material_of, materials, scored_attacks, tried
from indpriv.analysis.attacks.rates import rates_over_models
from indpriv.analysis.recorded_run import (
    RecordedRun,
    knowledge_of,
    read_references,
    recorded_run,
    unchecked_facts,
)
from indpriv.analysis.summary import Audit
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Attack
from indpriv.attacks.references import finite_signal, scores_of_target
from indpriv.attacks.train_references import CONFIDENCE
from indpriv.attacks.units import unit_scores
from indpriv.audit.method_of_run import method_of_run
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import NormLog, open_run
from indpriv.norm_log.run_files import (
    ATTRIBUTES,
    ATTRIBUTES_NON_DP,
    EXAMPLES,
    GRADIENT_CANARIES,
    HOLDOUT,
    WHITE_BOX,
    holds_log,
    read_run_json,
)


def attributes_of_run(run_dir: Path) -> pd.DataFrame:
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
        references=read_references(signals, run_dir, examples),
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
        recorded = recorded_run(opened)
        account = table_for(opened.log, method_of_run(opened.log, recorded, run_dir, {})[0])
        epsilon, delta = account.worst_case_epsilon, account.account.delta
    found = tried(scored_attacks(run, names), (float(epsilon), float(delta)), 0)
    return found.replace(unchecked=tuple(dict.fromkeys(unchecked_facts(run_dir, run.references))))


# --- the models of a study


def attack_study(
    signals: Mapping[str, AttackSignals], names: Collection[str] = (), *, unit_rule: str = "mean"
) -> pd.DataFrame:
    """Run attacks on every model of a study, leaving that model out of the references.

    Args:
        signals: of the same models, by name (see `indpriv.attacks.train_references`).
        names: attacks of the registry; default all whose needs are met.
        unit_rule: how the scores of a unit's rows become one, where units have several rows.

    Returns:
        mean rates over the models (rows of `indpriv.analysis.attacks.rates.RATES`), the attack with
        the largest AUC first; without names, a loss threshold too.

    Raises:
        InputError: an unknown attack, or one whose needs are not met.
    """
    if any(part.audited is not None for part in signals.values()):
        raise InputError(
            "these signals are of references for a run, which alone can be attacked with them; "
            "type: indpriv attack RUN --signals DIR"
        )
    first = material_of(None, {name: _target(part, 0) for name, part in signals.items()})
    for name in names:
        check_choice("attack", name, ATTACKS)
        lacking = ATTACKS[name].lacks(first)
        if lacking is not None:
            raise InputError(f"{name} needs {lacking}, which these signals do not have")
    used = [ATTACKS[name] for name in names or ATTACKS if ATTACKS[name].can_use(first)]
    found = [rates_over_models(_scores(attack, signals, unit_rule)) for attack in used]
    if not names and CONFIDENCE in signals:
        found.append(rates_over_models(_thresholds(signals[CONFIDENCE])))
    order = np.argsort([-one["value"].iloc[0] for one in found], kind="stable")
    rates: pd.DataFrame = pd.concat([found[place] for place in order], ignore_index=True)
    return rates


def _scores(
    attack: Attack, signals: Mapping[str, AttackSignals], unit_rule: str
) -> Iterator[AttackScores]:
    """Scores of one model after the other; of units, where units have several rows."""
    n_models = next(iter(signals.values())).n_models
    units = next(iter(signals.values())).unit_ids
    for target in range(n_models):
        chosen = {name: _target(part, target) for name, part in signals.items()}
        found = attack.scores(material_of(None, chosen))
        if units is None or found.example_ids is None:
            yield found
            continue
        rows = pd.Index(next(iter(signals.values())).example_ids).get_indexer(found.example_ids)
        yield unit_scores(found, np.asarray(units)[rows], unit_rule)


def _thresholds(signals: AttackSignals) -> Iterator[AttackScores]:
    """The loss threshold on each model, which all other attacks are compared with."""
    for target in range(signals.n_models):
        signal = finite_signal(signals, target)
        yield scores_of_target(signals, target, signal, ATTACKS["loss_threshold"].title)


def _target(signals: AttackSignals, target: int) -> AttackSignals:
    return replace(signals, audited=target)


# --- attacks that runs made on themselves while they trained


def white_box_of_run(run_dir: Path) -> tuple[AttackScores, PredictedEvidence]:
    """Evidence of a run's white-box attack, and what its log predicts, row by row.

    Raises:
        InputError: the run was not attacked by `WhiteBox`, or test examples were attacked whose
            norms were not recorded.
    """
    path = run_dir / WHITE_BOX
    if not path.is_file():
        raise InputError(
            f"{run_dir} has no {WHITE_BOX}; record a run with attack=WhiteBox() and "
            "record_holdout=True"
        )
    scores = AttackScores.from_file(path)
    if scores.example_ids is None:
        raise InputError(f"{path} lacks the column example_id; it is not what a Recorder wrote")
    inside = predicted_evidence(log := NormLog.open(run_dir))
    place = {example: k for k, example in enumerate(np.asarray(log.example_ids).tolist())}
    rows = np.array([place[k] for k in scores.example_ids[scores.member].tolist()], dtype=np.int64)
    parts = [inside.take(rows)]
    if not scores.member.all():
        if not holds_log(run_dir / HOLDOUT):
            raise InputError(
                f"{run_dir} attacked test examples, but has no log of their norms; record it with "
                "record_holdout=True"
            )
        outside = predicted_evidence(NormLog.open(run_dir / HOLDOUT))
        parts.append(outside.take(scores.example_ids[~scores.member].astype(np.int64)))
    return scores, PredictedEvidence.concatenated(parts)


def evidence_of_runs(run_dirs: Sequence[Path]) -> Evidence:
    """Evidence of the white-box attacks on several runs, beside what their logs predict."""
    found = [white_box_of_run(Path(run_dir)) for run_dir in run_dirs]
    return Evidence(
        np.concatenate([scores.scores for scores, _ in found]),
        np.concatenate([scores.member for scores, _ in found]),
        np.repeat(np.arange(len(found)), [len(scores.scores) for scores, _ in found]),
        PredictedEvidence.concatenated([predicted for _, predicted in found]),
    )


def canaries_of_run(run_dir: Path, *, delta: float = 1e-5) -> CanaryResults:
    """What the gradient canaries of a run say, for each of their lengths.

    Raises:
        InputError: the run had none, or too few of each length.
    """
    path = run_dir / GRADIENT_CANARIES
    if not path.is_file():
        raise InputError(
            f"{run_dir} has no {GRADIENT_CANARIES}; record a run with attack=GradientCanaries(...)"
        )
    settings = NormLog.open(run_dir).settings
    found = measure_gradient_canaries(AttackScores.from_file(path), settings, delta=delta)
    if not found.lengths:
        raise InputError(" ".join(found.left_out) or f"{path} holds no canaries")
    return found
