"""The rules of `indpriv check`, from facts about a training, planned or recorded, to findings.

Facts of a run are sensitive: the shares of clipped examples depend on the data. What a rule says,
who says so and what to do stand in indpriv/_facts/rules.toml, in the same order. A rule returns
None where it does not know what it needs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import brentq

from indpriv._arrays import FloatArray
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
from indpriv._files import first_at
from indpriv._formatting import format_number
from indpriv.accountant.method import Method
from indpriv.accountant.privacy_filter import PrivacyFilter
from indpriv.accountant.steps import StepKinds
from indpriv.analysis.disclosures import assumptions, run_facts
from indpriv.analysis.norms import evenly_spaced_records, read_one
from indpriv.analysis.recorded_run import Declared
from indpriv.norm_log.evidence import lines_of
from indpriv.norm_log.fields import CONTRIBUTIONS
from indpriv.norm_log.norm_log import NormLog

_MOST_RECORDS = 60  # of more records, evenly spaced ones are read
_LAYER = re.compile(r"(?:\S+: )?(\w+)\(")  # "1: Linear(in_features=64, ...)" in run.json
_LEAST_NOISE, _MOST_NOISE = 0.05, 5000.0
_TINY = 1e-300
_TOLERANCE = 1e-4  # of the noise multiplier, relative; the result is rounded up by it


@dataclass(frozen=True)
class Plan:
    """Steps of equal settings.

    Attributes:
        noise_multiplier: noise standard deviation over max_grad_norm.
        sample_rate: Poisson sampling rate, in (0, 1].
        total_steps: number of steps.
        clipping_norm_epsilon: of a private clipping norm, which every epsilon includes.
    """

    noise_multiplier: float
    sample_rate: float
    total_steps: float
    clipping_norm_epsilon: float = 0.0

    @property
    def epochs(self) -> float:
        """Expected number of times that an example is drawn."""
        return self.sample_rate * self.total_steps

    def epsilon(self, delta: float) -> float:
        """Worst-case epsilon of one example under RDP, for adding or removing it."""
        kind = StepKinds(np.array([1 / self.noise_multiplier]), np.array([self.sample_rate]))
        counts = np.array([[float(self.total_steps)]])
        steps = kind.accountant(Method(delta=delta)).epsilons(counts)["epsilon"][0]
        return float(steps) + self.clipping_norm_epsilon

    def with_epsilon(self, epsilon: float, delta: float) -> Plan | None:
        """The same steps with the noise, rounded up, that gives epsilon.

        None if epsilon is 0 or infinite, or takes a noise multiplier outside 0.05 to 5,000.
        """

        def excess(log_noise: float) -> float:
            return float(np.log(max(self._at(log_noise).epsilon(delta), _TINY) / epsilon))

        ends = np.log(_LEAST_NOISE), np.log(_MOST_NOISE)
        if not 0 < epsilon < np.inf or excess(ends[0]) < 0 or excess(ends[1]) > 0:
            return None
        return self._at(float(brentq(excess, *ends, xtol=_TOLERANCE)) + 2 * _TOLERANCE)

    def _at(self, log_noise: float) -> Plan:
        return replace(self, noise_multiplier=float(np.exp(log_noise)))


@dataclass(frozen=True)
class SgdSettings:
    """Plain SGD, perhaps with momentum, on the average of a batch.

    Attributes:
        learning_rate: at the start.
        momentum: in [0, 1).
        weight_decay: added to the averaged gradient as this times the parameters.
    """

    learning_rate: float
    momentum: float
    weight_decay: float | None


@dataclass(frozen=True)
class TrainingFacts:
    """What is known about a planned or finished training; None for what is not.

    Attributes:
        n_examples: number of training examples.
        delta: of the guarantee.
        plan: noise, sampling rate and steps; None where they change while training.
        max_grad_norm: clipping norm; None where it changes, or is not drawn yet.
        epsilon_cap: the epsilon that a privacy filter lets no example exceed; None without one.
        sgd: settings of the optimizer; None for another optimizer.
        layers: number of layers by the name of their class.
        views: number of augmentations of an example whose gradients are averaged before clipping.
        clipped: (n_records,) share of the examples whose norm was above max_grad_norm, in evenly
            spaced records in order; empty before training.
        hazards: assumptions of the account with their status, by key.
    """

    n_examples: int | None = None
    delta: float | None = None
    plan: Plan | None = None
    max_grad_norm: float | None = None
    epsilon_cap: float | None = None
    sgd: SgdSettings | None = None
    layers: Mapping[str, int] | None = None
    views: int | None = None
    clipped: FloatArray = field(default_factory=lambda: np.empty(0))
    hazards: Mapping[str, Fact] = field(default_factory=dict)


def facts_of_run(
    log: NormLog,
    recorder: Mapping[str, Any],
    declared: Declared,
    checks: Sequence[Fact],
    delta: float | None = None,
) -> TrainingFacts:
    """What a run recorded, and what run.json adds to it.

    Args:
        log: of the run.
        recorder: what the recorder read from optimizer, loader and model.
        declared: what run.json says.
        checks: of the run.
        delta: of the guarantee; None for the run's own.
    """
    delta = declared.delta if delta is None else delta
    run, steps = run_facts(log, None, recorder, declared), log.settings.distinct()[1]
    found = assumptions(run, delta, checks, lines_of(checks, recorder), False)
    constant = len(steps) == 1
    return TrainingFacts(
        n_examples=log.n_examples,
        delta=delta,
        plan=Plan(
            steps.at(0).noise_multiplier,
            steps.at(0).sample_rate,
            log.total_steps,
            log.clipping_norm_epsilon,
        )
        if constant
        else None,
        max_grad_norm=steps.at(0).max_grad_norm if constant else None,
        epsilon_cap=_epsilon_cap(log, delta),
        sgd=_sgd(recorder, declared.content),
        layers=_counted(recorder, declared.content),
        views=_views(declared.content),
        clipped=np.empty(0) if recorder.get("clipping") in CONTRIBUTIONS else _clipped_shares(log),
        hazards={hazard.key: hazard for hazard in found},
    )


def _epsilon_cap(log: NormLog, delta: float | None) -> float | None:
    if log.filtered is None or delta is None:
        return None
    cap = PrivacyFilter(log.filtered.order, log.filtered.rdp_cap).epsilon(delta=delta)
    return cap + log.clipping_norm_epsilon


def _clipped_shares(log: NormLog) -> FloatArray:
    """See `TrainingFacts`; individual clipping records levels, which say nothing of norms."""
    rows = [] if log.individually_clipped else evenly_spaced_records(log, _MOST_RECORDS)
    read = (read_one(log, row) for row in rows)
    return np.array([above[codes].mean() for codes, _, above in read], dtype=np.float64)


def _sgd(recorder: Mapping[str, Any], content: Mapping[str, Any]) -> SgdSettings | None:
    if recorder.get("optimizer") != "SGD" or recorder.get("loss_reduction") != "mean":
        return None
    values = {
        name: recorder.get(name, first_at(content, ("config", "training", name)))
        for name in ("learning_rate", "momentum", "weight_decay")
    }
    if not is_number(values["learning_rate"]) or not is_number(values["momentum"] or 0.0):
        return None
    decay = values["weight_decay"]
    return SgdSettings(
        float(values["learning_rate"]),
        float(values["momentum"] or 0.0),
        float(decay) if is_number(decay) else None,
    )


def _counted(recorder: Mapping[str, Any], content: Mapping[str, Any]) -> Mapping[str, int] | None:
    """As the recorder counted them, else as run.json lists them."""
    recorded = recorder.get("layers")
    if isinstance(recorded, Mapping):
        return recorded
    listed = first_at(content, ("model", "layers"))
    if not isinstance(listed, list):
        return None
    return Counter(found[1] for line in listed if (found := _LAYER.match(str(line))))


def _views(content: Mapping[str, Any]) -> int | None:
    """As run.json says; runs of audit files do not augment."""
    views = first_at(content, ("augmentation_multiplicity",))
    if views is None and first_at(content, ("config", "data", "dataset")) is not None:
        return 1
    return views if isinstance(views, int) and not isinstance(views, bool) else None


def is_number(value: object) -> bool:
    """Whether a value of run.json or an audit file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
