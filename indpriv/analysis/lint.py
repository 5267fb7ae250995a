"""The rules of `indpriv check`, from facts about a training, planned or recorded, to findings.

Facts of a run are sensitive: the shares of clipped examples depend on the data. What a rule says,
who says so and what to do stand in indpriv/_facts/rules.toml, in the same order. A rule returns
None where it does not know what it needs.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from scipy.optimize import brentq

from indpriv import _facts
from indpriv._facts import Fact, Template, fact, templates
from indpriv._files import first_at
from indpriv._formatting import format_number
from indpriv._types import FloatArray
from indpriv.accountant.method import Method
from indpriv.accountant.privacy_filter import PrivacyFilter
from indpriv.accountant.steps import StepKinds
from indpriv.analysis.recorded_run import Declared
from indpriv.analysis.schedule import evenly_spaced_records, read_one
from indpriv.norm_log.fields import CONTRIBUTIONS
from indpriv.norm_log.norm_log import NormLog

_MOST_RECORDS = 60  # of more records, evenly spaced ones are read
_LAYER = re.compile(r"(?:\S+: )?(\w+)\(")  # "1: Linear(in_features=64, ...)" in run.json
_LEAST_NOISE, _MOST_NOISE = 0.05, 5000.0
_TINY = 1e-300
_TOLERANCE = 1e-4  # of the noise multiplier, relative; the result is rounded up by it


@dataclass(frozen=True)
class Plan:
    """Steps of equal settings, and the cost of a private clipping norm, in every epsilon."""

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

    def with_epsilon(self, epsilon: float, delta: float) -> "Plan | None":
        """The same steps with the noise, rounded up, that gives epsilon.

        None if epsilon is 0 or infinite, or takes a noise multiplier outside 0.05 to 5,000.
        """

        def at(log_noise: float) -> "Plan":
            return replace(self, noise_multiplier=float(np.exp(log_noise)))

        def excess(log_noise: float) -> float:
            return float(np.log(max(at(log_noise).epsilon(delta), _TINY) / epsilon))

        ends = np.log(_LEAST_NOISE), np.log(_MOST_NOISE)
        if not 0 < epsilon < np.inf or excess(ends[0]) < 0 or excess(ends[1]) > 0:
            return None
        return at(float(brentq(excess, *ends, xtol=_TOLERANCE)) + 2 * _TOLERANCE)


@dataclass(frozen=True)
class SgdSettings:
    """Plain SGD, perhaps with momentum, on the average of a batch; the learning rate at the start.

    weight_decay: added to the averaged gradient as this times the parameters.
    """

    learning_rate: float
    momentum: float
    weight_decay: float | None


@dataclass(frozen=True)
class TrainingFacts:
    """What is known about a planned or finished training; None for what is not, or changes."""

    n_examples: int | None = None
    delta: float | None = None
    plan: Plan | None = None
    max_grad_norm: float | None = None
    epsilon_cap: float | None = None  # the epsilon that a privacy filter lets no example exceed
    sgd: SgdSettings | None = None  # settings of the optimizer; None for another optimizer
    layers: Mapping[str, int] | None = None  # number of layers by the name of their class
    # number of augmentations of an example whose gradients are averaged before clipping
    views: int | None = None
    # (n_records,) share of the examples whose norm was above max_grad_norm, in evenly spaced
    # records in order; empty before training
    clipped: FloatArray = field(default_factory=lambda: np.empty(0))
    poisson: bool | None = None  # whether a log verifies that batches are Poisson samples
    unseeded: bool | None = None


def facts_of_run(
    log: NormLog,
    recorder: Mapping[str, Any],
    declared: Declared,
    delta: float | None = None,
    lines: Iterable[Fact] = (),  # of evidence, of an account by Poisson sampling
) -> TrainingFacts:
    """What a run recorded, and what run.json adds to it; delta: None for the run's own."""
    decided = {one.key: _DECIDED.get(one.status) for one in lines}
    delta = declared.delta if delta is None else delta
    steps = log.settings.distinct()[1]
    first, plan, epsilon_cap, cost = steps.at(0), None, None, log.clipping_norm_epsilon
    others = {declared.participation, declared.neighbouring or log.neighbouring}
    # Plans and filters have the epsilon of secret Poisson samples of which an example is left out
    sampled = log.sampler == "poisson" and not others & {"known", "replace_one"}
    if sampled and log.filtered is not None and delta is not None:
        epsilon_cap = PrivacyFilter(log.filtered.order, log.filtered.rdp_cap).epsilon(delta=delta)
        epsilon_cap += cost
    if sampled and len(steps) == 1:
        plan = Plan(first.noise_multiplier, first.sample_rate, log.total_steps, cost)
    return TrainingFacts(
        n_examples=log.n_examples,
        delta=delta,
        plan=plan,
        max_grad_norm=first.max_grad_norm if len(steps) == 1 else None,
        epsilon_cap=epsilon_cap,
        sgd=_sgd(recorder, declared.content),
        layers=_counted(recorder, declared.content),
        views=_views(declared.content),
        clipped=np.empty(0) if recorder.get("clipping") in CONTRIBUTIONS else _clipped_shares(log),
        poisson=decided.get("batch"),
        unseeded=decided.get("source"),
    )


def _clipped_shares(log: NormLog) -> FloatArray:
    """See `TrainingFacts`; individual clipping records levels, which say nothing of norms."""
    rows = [] if log.individually_clipped else evenly_spaced_records(log, _MOST_RECORDS)
    read = (read_one(log, row) for row in rows)
    return np.array([above[codes].mean() for codes, _, above in read], dtype=np.float64)


def _sgd(recorder: Mapping[str, Any], content: Mapping[str, Any]) -> SgdSettings | None:
    if recorder.get("optimizer") != "SGD" or recorder.get("loss_reduction") != "mean":
        return None
    learning_rate, momentum, decay = (
        recorder.get(name, first_at(content, ("config", "training", name)))
        for name in ("learning_rate", "momentum", "weight_decay")
    )
    if not (is_number(learning_rate) and is_number(momentum := momentum or 0.0)):
        return None
    decay = float(decay) if is_number(decay) else None
    return SgdSettings(float(learning_rate), float(momentum), decay)


def _counted(recorder: Mapping[str, Any], content: Mapping[str, Any]) -> Mapping[str, int] | None:
    """As the recorder counted them, else as run.json lists them."""
    if isinstance(recorded := recorder.get("layers"), Mapping):
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
_DECIDED = {_facts.VERIFIED: True, _facts.REFUTED: False}
_STATUSES = (_facts.FAILED, _facts.NOT_CHECKED, _facts.PASSED)
# Whether a rule holds, and what its text names; "case" names a text of its own. None: not known.
Judged = tuple[bool, dict[str, Any]] | None


def lint(facts: TrainingFacts) -> tuple[Fact, ...]:
    """What every rule finds: failed ones first, errors before warnings before notes."""
    found = [_judged(rule, facts) for rule in templates("rule").values()]
    found.sort(key=lambda one: (_STATUSES.index(one.status), _facts.SEVERITIES.index(one.kind)))
    return tuple(found)


def _judged(rule: Template, facts: TrainingFacts) -> Fact:
    known = all(attrgetter(name)(facts) is not None for name in rule.needs)
    judged = RULES[rule.key](facts) if known else None
    if judged is None:
        return fact(f"rule.{rule.key}", _facts.NOT_CHECKED)
    holds, values = judged
    status, case = _facts.PASSED if holds else _facts.FAILED, values.pop("case", "")
    return fact(f"rule.{rule.key}", status, case, facts=facts, **values)


# What a rule needs, in rules.toml, is there when it is asked: hence facts without a type.
def _epsilon(facts: Any) -> Judged:
    if facts.epsilon_cap is not None:
        return facts.epsilon_cap <= _REASONABLE_EPSILON, {"case": "capped"}
    if facts.plan is None or facts.delta is None:
        return None
    epsilon = facts.plan.epsilon(facts.delta)
    return epsilon <= _REASONABLE_EPSILON, {"epsilon": epsilon}


def _batch_size(facts: Any) -> Judged:
    """Noise in the mean of all updates' gradients, here and at twice the batch and half the steps.

    It is in proportion to noise_multiplier / (sample_rate * sqrt(steps)), which Sander et al. 2023
    hold constant when they change the batch.
    """
    plan = facts.plan
    batch = plan.sample_rate * facts.n_examples
    if 2 * plan.sample_rate > 1:
        return True, {"case": "more_than_all", "batch": batch}
    twice = replace(plan, sample_rate=2 * plan.sample_rate, total_steps=plan.total_steps / 2)
    found = twice.with_epsilon(plan.epsilon(facts.delta), facts.delta)
    if found is None:
        return None
    saved = 1 - found.noise_multiplier / (plan.noise_multiplier * math.sqrt(2))
    return saved <= _MOST_NOISE_SAVED, {"batch": batch, "saved": max(saved, 0.0)}


def _epochs(facts: Any) -> Judged:
    longer = replace(facts.plan, total_steps=2 * facts.plan.total_steps)
    found = longer.with_epsilon(facts.plan.epsilon(facts.delta), facts.delta)
    if found is None:
        return None
    return round(facts.plan.epochs, 6) >= _FEWEST_EPOCHS, {"needed": found.noise_multiplier}


def _clipping(facts: Any) -> Judged:
    if not len(facts.clipped):
        return None
    middle = float(np.median(facts.clipped))
    ends = {"first": facts.clipped[0], "median": middle, "last": facts.clipped[-1]}
    return _FEWEST_CLIPPED <= middle <= _MOST_CLIPPED, ends


def _learning_rate(facts: Any) -> Judged:
    """Reach: how far gradients can move the parameters. Drift: how far noise moves each of them.

    A step adds to the parameters, over time, at most learning_rate / (1 - momentum) times the
    averaged gradient: clipped gradients of a batch as large as expected are no longer than
    max_grad_norm, and the noise of each coordinate has the standard deviation noise_multiplier *
    max_grad_norm / batch size.
    """
    sgd, plan = facts.sgd, facts.plan
    longest = sgd.learning_rate * facts.max_grad_norm / (1 - sgd.momentum)
    reach = longest * plan.total_steps
    rounded = round(reach) if reach >= 10 else reach
    noise = plan.noise_multiplier * math.sqrt(plan.total_steps)
    drift = longest * (noise / (plan.sample_rate * facts.n_examples))
    shown = {"reach": format_number(rounded, 2), "drift": format_number(drift, 2)}
    return reach >= _SHORTEST_REACH and drift <= _MOST_DRIFT, shown


def _weight_decay(facts: Any) -> Judged:
    sgd, plan = facts.sgd, facts.plan
    if sgd.weight_decay == 0:
        return True, {"case": "none"}
    if plan is None:
        return None
    rate = sgd.learning_rate * sgd.weight_decay * plan.total_steps / (1 - sgd.momentum)
    return rate <= _MOST_DECAY, {"left": math.exp(-rate)}


def _layers(facts: Any, *, least: int = 0, **kinds: frozenset[str]) -> Judged:
    """Whether at most `least` layers are of the first kind, or some are of the second, if any."""
    of = {key: sum(facts.layers.get(name, 0) for name in names) for key, names in kinds.items()}
    first, *second = of.values()
    shown = {key: f"{n} layer" if n == 1 else f"{n} layers" for key, n in of.items()}
    return first <= least or sum(second) > 0, shown


def _augmentation(facts: Any) -> Judged:
    if not any(facts.layers.get(name, 0) for name in _CONVOLUTIONS):
        return True, {"case": "no_pictures"}
    views = "one view" if facts.views == 1 else f"{facts.views} views"
    return facts.views > 1, {"views": views}


RULES: Mapping[str, Callable[[Any], Judged]] = {
    "delta": lambda of: (of.delta * of.n_examples < 1, {"limit": 1 / of.n_examples}),
    "small_delta": lambda of: (of.delta <= of.n_examples**-1.1, {"limit": of.n_examples**-1.1}),
    "sampler": lambda of: (of.poisson, {}),
    "seeds": lambda of: (of.unseeded, {}),
    "epsilon": _epsilon,
    "batch_size": _batch_size,
    "epochs": _epochs,
    "clipping": _clipping,
    "learning_rate": _learning_rate,
    "weight_decay": _weight_decay,
    "batch_norm": partial(_layers, mixing=_MIXING),
    "normalisation": partial(_layers, least=_DEEP, weights=_WEIGHTS, norms=_PER_EXAMPLE),
    "activations": partial(_layers, unbounded=_UNBOUNDED, norms=_PER_EXAMPLE),
    "augmentation": _augmentation,
}
"""By key, in the order of rules.toml."""
