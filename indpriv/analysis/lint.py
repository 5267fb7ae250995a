"""The rules of `indpriv check`, from facts about a training to findings.

What a rule says, who says so and what to do stand in indpriv/_facts/rules.toml, in the same order.
A rule returns None where it does not know what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from indpriv._facts import (
    FAILED,
    NOT_CHECKED,
    PASSED,
    SEVERITIES,
    VERIFIED,
    Fact,
    fact,
    templates,
)
from indpriv._formatting import format_number
from indpriv.analysis.training_facts import Plan, TrainingFacts

_REASONABLE_EPSILON = 10.0
_MOST_NOISE_SAVED = 0.1  # by twice the batch
_FEWEST_EPOCHS = 10
_FEWEST_CLIPPED, _MOST_CLIPPED = 0.05, 0.95
_SHORTEST_REACH = 1.0
_MOST_DRIFT = 0.5
_MOST_DECAY = 1.0
_MIXING = frozenset({"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "BatchNorm"})
_PER_EXAMPLE = frozenset(
    {"GroupNorm", "LayerNorm", "RMSNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"}
)
_CONVOLUTIONS = frozenset({"Conv2d", "StandardisedConv2d", "Conv3d"})
_WEIGHTS = _CONVOLUTIONS | {"Linear", "Conv1d"}
_UNBOUNDED = frozenset({"ReLU", "LeakyReLU", "PReLU", "ELU", "GELU", "SiLU"})
_DEEP = 8  # layers with weights
_STATUSES = (FAILED, NOT_CHECKED, PASSED)


def lint(facts: TrainingFacts) -> tuple[Fact, ...]:
    """What every rule finds: failed ones first, errors before warnings before notes."""
    found = [RULES[key](facts) or fact(f"rule.{key}", NOT_CHECKED) for key in templates("rule")]
    return tuple(
        sorted(found, key=lambda one: (_STATUSES.index(one.status), SEVERITIES.index(one.kind)))
    )


def _holds(holds: bool) -> str:
    return PASSED if holds else FAILED


def _delta(facts: TrainingFacts) -> Fact | None:
    if facts.delta is None or facts.n_examples is None:
        return None
    found = facts.hazards.get("delta")
    status = _holds(found is None or found.status != FAILED)
    return fact("rule.delta", status, facts=facts, limit=1 / facts.n_examples)


def _small_delta(facts: TrainingFacts) -> Fact | None:
    if facts.delta is None or facts.n_examples is None:
        return None
    limit = facts.n_examples**-1.1
    return fact("rule.small_delta", _holds(facts.delta <= limit), facts=facts, limit=limit)


def _confirmed(facts: TrainingFacts, hazard: str) -> Fact | None:
    """Whether the log of a run confirms or refutes an assumption; None if it does neither."""
    found = facts.hazards.get(hazard)
    status = {VERIFIED: PASSED, FAILED: FAILED}.get("" if found is None else found.status)
    return None if status is None else fact(f"rule.{hazard}", status)


def _epsilon(facts: TrainingFacts) -> Fact | None:
    plan, cap = facts.plan, facts.epsilon_cap
    if cap is not None:
        return fact("rule.epsilon", _holds(cap <= _REASONABLE_EPSILON), "capped", facts=facts)
    if plan is None or facts.delta is None:
        return None
    epsilon = plan.epsilon(facts.delta)
    status = _holds(epsilon <= _REASONABLE_EPSILON)
    return fact("rule.epsilon", status, facts=facts, epsilon=epsilon)


def _batch_size(facts: TrainingFacts) -> Fact | None:
    """Noise in the mean of all updates' gradients, here and at twice the batch and half the steps.

    It is in proportion to noise_multiplier / (sample_rate * sqrt(steps)), which Sander et al. 2023
    hold constant when they change the batch.
    """
    plan, n, delta = facts.plan, facts.n_examples, facts.delta
    if plan is None or n is None or delta is None:
        return None
    batch = plan.sample_rate * n
    if 2 * plan.sample_rate > 1:
        return fact("rule.batch_size", PASSED, "more_than_all", facts=facts, batch=batch)
    twice = replace(plan, sample_rate=2 * plan.sample_rate, total_steps=plan.total_steps / 2)
    found = twice.with_epsilon(plan.epsilon(delta), delta)
    if found is None:
        return None
    saved = 1 - _noise_of_the_mean(found) / _noise_of_the_mean(plan)
    status = _holds(saved <= _MOST_NOISE_SAVED)
    return fact("rule.batch_size", status, facts=facts, batch=batch, saved=max(saved, 0.0))


def _noise_of_the_mean(plan: Plan) -> float:
    return plan.noise_multiplier / (plan.sample_rate * math.sqrt(plan.total_steps))


def _epochs(facts: TrainingFacts) -> Fact | None:
    plan = facts.plan
    if plan is None or facts.delta is None:
        return None
    longer = replace(plan, total_steps=2 * plan.total_steps)
    found = longer.with_epsilon(plan.epsilon(facts.delta), facts.delta)
    if found is None:
        return None
    status = _holds(round(plan.epochs, 6) >= _FEWEST_EPOCHS)
    return fact("rule.epochs", status, facts=facts, needed=found.noise_multiplier)


def _clipping(facts: TrainingFacts) -> Fact | None:
    shares = facts.clipped
    if not len(shares):
        return None
    middle = float(np.median(shares))
    status = _holds(_FEWEST_CLIPPED <= middle <= _MOST_CLIPPED)
    return fact("rule.clipping", status, first=shares[0], median=middle, last=shares[-1])


def _learning_rate(facts: TrainingFacts) -> Fact | None:
    """Reach: how far gradients can move the parameters. Drift: how far noise moves each of them.

    A step adds to the parameters, over time, at most learning_rate / (1 - momentum) times the
    averaged gradient: clipped gradients of a batch as large as expected are no longer than
    max_grad_norm, and the noise of each coordinate has the standard deviation noise_multiplier *
    max_grad_norm / batch size.
    """
    sgd, plan, clip, n = facts.sgd, facts.plan, facts.max_grad_norm, facts.n_examples
    if sgd is None or plan is None or clip is None or n is None:
        return None
    longest = sgd.learning_rate * clip / (1 - sgd.momentum)
    reach = longest * plan.total_steps
    rounded = round(reach) if reach >= 10 else reach
    noise = plan.noise_multiplier * math.sqrt(plan.total_steps) / (plan.sample_rate * n)
    drift = longest * noise
    return fact(
        "rule.learning_rate",
        _holds(reach >= _SHORTEST_REACH and drift <= _MOST_DRIFT),
        facts=facts,
        reach=format_number(rounded, 2),
        drift=format_number(drift, 2),
    )


def _weight_decay(facts: TrainingFacts) -> Fact | None:
    sgd, plan = facts.sgd, facts.plan
    if sgd is None or sgd.weight_decay is None:
        return None
    if sgd.weight_decay == 0:
        return fact("rule.weight_decay", PASSED, "none")
    if plan is None:
        return None
    rate = sgd.learning_rate * sgd.weight_decay * plan.total_steps / (1 - sgd.momentum)
    left = math.exp(-rate)
    return fact("rule.weight_decay", _holds(rate <= _MOST_DECAY), facts=facts, left=left)


def _batch_norm(facts: TrainingFacts) -> Fact | None:
    if facts.layers is None:
        return None
    mixing = _count(facts.layers, _MIXING)
    return fact("rule.batch_norm", _holds(not mixing), mixing=_layers(mixing))


def _normalisation(facts: TrainingFacts) -> Fact | None:
    if facts.layers is None:
        return None
    weights, norms = _count(facts.layers, _WEIGHTS), _count(facts.layers, _PER_EXAMPLE)
    status = _holds(norms > 0 or weights <= _DEEP)
    return fact("rule.normalisation", status, weights=_layers(weights), norms=_layers(norms))


def _activations(facts: TrainingFacts) -> Fact | None:
    if facts.layers is None:
        return None
    unbounded, norms = _count(facts.layers, _UNBOUNDED), _count(facts.layers, _PER_EXAMPLE)
    status = _holds(norms > 0 or not unbounded)
    return fact("rule.activations", status, unbounded=_layers(unbounded), norms=_layers(norms))


def _augmentation(facts: TrainingFacts) -> Fact | None:
    if facts.layers is None or facts.views is None:
        return None
    if not _count(facts.layers, _CONVOLUTIONS):
        return fact("rule.augmentation", PASSED, "no_pictures")
    views = "one view" if facts.views == 1 else f"{facts.views} views"
    return fact("rule.augmentation", _holds(facts.views > 1), views=views)


def _count(layers: Mapping[str, int], names: frozenset[str]) -> int:
    return sum(layers.get(name, 0) for name in names)


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


RULES: Mapping[str, Callable[[TrainingFacts], Fact | None]] = {
    "delta": _delta,
    "small_delta": _small_delta,
    "sampler": partial(_confirmed, hazard="sampler"),
    "seeds": partial(_confirmed, hazard="seeds"),
    "epsilon": _epsilon,
    "batch_size": _batch_size,
    "epochs": _epochs,
    "clipping": _clipping,
    "learning_rate": _learning_rate,
    "weight_decay": _weight_decay,
    "batch_norm": _batch_norm,
    "normalisation": _normalisation,
    "activations": _activations,
    "augmentation": _augmentation,
}
"""By key, in the order of rules.toml."""
