"""What rules are applied to: settings of training, planned in an audit file or recorded in a run.

Facts of a run are sensitive: the shares of clipped examples depend on the data.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.optimize import brentq

from indpriv._arrays import FloatArray
from indpriv._facts import FAILED, Fact, fact
from indpriv._files import first_at
from indpriv.accountant.method import Method
from indpriv.accountant.privacy_filter import PrivacyFilter
from indpriv.accountant.steps import StepKinds
from indpriv.analysis.declared import Declared
from indpriv.analysis.disclosures import assumptions, delta_is_too_large
from indpriv.analysis.norms_over_training import evenly_spaced_records, read_one
from indpriv.analysis.run_facts import run_facts
from indpriv.norm_log.evidence import lines_of
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.validation import CONTRIBUTIONS

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
        steps = kind.accountant(Method(delta=delta)).epsilons(counts).epsilon[0]
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


def facts_of_plan(
    config: Mapping[str, Any], n_examples: int | None, layers: Mapping[str, int]
) -> TrainingFacts:
    """What an audit file says before any training.

    Args:
        config: its tables, checked, with defaults filled in.
        n_examples: number of training examples; None if that is not known without the data.
        layers: of its architecture.
    """
    training = config["training"]
    plan, delta, clip = None, training["delta"], training["max_grad_norm"]
    noise = training.get("noise_multiplier", 1.0)
    varies = isinstance(noise, Mapping) or {"noise_std", "stop_at_epsilon"} & training.keys()
    varies = varies or training.get("allow_no_privacy", False)  # with the batch: no epsilon
    if n_examples is not None and not varies:
        steps_per_epoch = math.ceil(n_examples / training["batch_size"])
        steps = training.get("steps") or training["epochs"] * steps_per_epoch
        plan = Plan(noise, 1 / steps_per_epoch, steps, training.get("median_epsilon", 0.0))
        if "target_epsilon" in training:
            plan = plan.with_epsilon(training["target_epsilon"], delta)
    too_large = n_examples is not None and delta_is_too_large(delta, n_examples)
    return TrainingFacts(
        n_examples=n_examples,
        delta=delta,
        plan=plan,
        max_grad_norm=clip if _is_number(clip) else None,
        epsilon_cap=training.get("filter_epsilon"),
        sgd=SgdSettings(
            training["learning_rate"],
            training.get("momentum", 0.0),
            training.get("weight_decay", 0.0),
        ),
        layers=layers,
        views=1,
        hazards={"delta": fact("hazard.delta", FAILED)} if too_large else {},
    )


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
        layers=_layers(recorder, declared.content),
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
    return np.array([read_one(log, row).clipped.mean() for row in rows], dtype=np.float64)


def _sgd(recorder: Mapping[str, Any], content: Mapping[str, Any]) -> SgdSettings | None:
    if recorder.get("optimizer") != "SGD" or recorder.get("loss_reduction") != "mean":
        return None
    values = {
        name: recorder.get(name, first_at(content, ("config", "training", name)))
        for name in ("learning_rate", "momentum", "weight_decay")
    }
    if not _is_number(values["learning_rate"]) or not _is_number(values["momentum"] or 0.0):
        return None
    decay = values["weight_decay"]
    return SgdSettings(
        float(values["learning_rate"]),
        float(values["momentum"] or 0.0),
        float(decay) if _is_number(decay) else None,
    )


def _layers(recorder: Mapping[str, Any], content: Mapping[str, Any]) -> Mapping[str, int] | None:
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
