"""Rules about the guarantee itself. Three of them are hazards of every audit, seen from here."""

from __future__ import annotations

from indpriv._formatting import format_delta, format_epsilon
from indpriv.analysis.disclosures import VERIFIED
from indpriv.analysis.hazards import DELTA, SAMPLING, SEEDS, Hazard
from indpriv.analysis.lint.rule import (
    ERROR,
    N_AND_DELTA,
    NOTE,
    PLAN_AND_DELTA,
    WARNING,
    Judgement,
    Rule,
)
from indpriv.analysis.lint.training_facts import TrainingFacts
from indpriv.norm_log.evidence import FAILED

_DWORK_ROTH = (
    "Dwork and Roth 2014, The Algorithmic Foundations of Differential Privacy, section 2.3"
)
_REASONABLE_EPSILON = 10.0
_SEEN = {
    VERIFIED: "The log of this run confirms it.",
    FAILED: "It does not hold for this run; `indpriv check` says why.",
}


def _delta(facts: TrainingFacts) -> Judgement | None:
    if facts.delta is None or facts.n_examples is None:
        return None
    limit = 1 / facts.n_examples
    figures = (
        f"Delta is {format_delta(facts.delta)}, and 1/n is {limit:.3g} for "
        f"{facts.n_examples:,} examples."
    )
    found = facts.hazards.get(DELTA.key)
    return Judgement(found is None or found.status != FAILED, figures)


def _small_delta(facts: TrainingFacts) -> Judgement | None:
    if facts.delta is None or facts.n_examples is None:
        return None
    limit = facts.n_examples**-1.1
    figures = f"Delta is {format_delta(facts.delta)}, and n^-1.1 is {limit:.3g}."
    return Judgement(facts.delta <= limit, figures)


def _status(hazard: Hazard, facts: TrainingFacts) -> Judgement | None:
    found = facts.hazards.get(hazard.key)
    if found is None or found.status not in _SEEN:
        return None
    return Judgement(found.status != FAILED, _SEEN[found.status])


def _epsilon(facts: TrainingFacts) -> Judgement | None:
    if facts.epsilon_cap is not None:
        figures = f"A privacy filter caps it at {format_epsilon(facts.epsilon_cap)}."
        return Judgement(facts.epsilon_cap <= _REASONABLE_EPSILON, figures)
    if facts.plan is None or facts.delta is None:
        return None
    epsilon = facts.plan.epsilon(facts.delta)
    figures = (
        f"The worst-case epsilon of one row is {format_epsilon(epsilon)} at delta "
        f"{format_delta(facts.delta)} (noise multiplier {facts.plan.noise_multiplier:.3g}, "
        f"{facts.plan.total_steps:,} steps at a sampling rate of {facts.plan.sample_rate:.3g})."
    )
    return Judgement(epsilon <= _REASONABLE_EPSILON, figures)


RULES = (
    Rule(
        key=DELTA.key,
        severity=ERROR,
        title=DELTA.title,
        literature=DELTA.detail,
        source=_DWORK_ROTH,
        advice="Choose a delta well below 1/n.",
        needs=N_AND_DELTA,
        judge=_delta,
    ),
    Rule(
        key="small_delta",
        severity=NOTE,
        title="Delta is at most n^-1.1",
        literature="McMahan et al. chose a delta of n^-1.1 for n users: a rule of thumb.",
        source="McMahan, Ramage, Talwar and Zhang 2018 (arXiv:1710.06963)",
        advice="Choose a smaller delta: epsilon grows only slowly as delta falls.",
        needs=N_AND_DELTA,
        judge=_small_delta,
    ),
    Rule(
        key=SAMPLING.key,
        severity=ERROR,
        title=SAMPLING.title,
        literature=SAMPLING.detail,
        source="Abadi et al. 2016 (arXiv:1607.00133)",
        advice="Draw Poisson batches (in Opacus, make_private(poisson_sampling=True)); "
        "`indpriv check` says which check failed.",
        needs="a run whose log verifies or refutes it",
        judge=lambda facts: _status(SAMPLING, facts),
    ),
    Rule(
        key=SEEDS.key,
        severity=ERROR,
        title=SEEDS.title,
        literature=SEEDS.detail,
        source="the definition: epsilon counts on noise that the attacker does not know",
        advice="Train without a seed; use a seeded run for debugging only.",
        needs="a run whose log verifies or refutes it",
        judge=lambda facts: _status(SEEDS, facts),
    ),
    Rule(
        key="epsilon",
        severity=WARNING,
        title="The worst-case epsilon is at most 10",
        literature="An epsilon of at most 1 is called a strong guarantee, of at most 10 a "
        "reasonable one, and above that a weak one or none. A rule of thumb for one training run, "
        "per example.",
        source="Ponomareva et al. 2023, How to DP-fy ML (arXiv:2303.00654)",
        advice="Add noise, train fewer steps, or collect more data and keep the batch size.",
        needs=PLAN_AND_DELTA,
        judge=_epsilon,
    ),
)
