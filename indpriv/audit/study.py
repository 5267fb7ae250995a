"""Attacks on the models of a study, each with the others as references. Sensitive."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from indpriv._checks import check_choice
from indpriv.analysis.attacks.membership import material_of
from indpriv.analysis.attacks.rates import rates_over_models
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Attack
from indpriv.attacks.references import finite_signal, scores_of_target
from indpriv.attacks.train_references import CONFIDENCE
from indpriv.attacks.units import unit_scores
from indpriv.errors import InputError


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
