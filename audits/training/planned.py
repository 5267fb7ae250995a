"""What rules of lint are applied to before any training: the settings of an audit file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from indpriv.analysis.lint import Plan, SgdSettings, TrainingFacts, is_number


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
    return TrainingFacts(
        n_examples=n_examples,
        delta=delta,
        plan=plan,
        max_grad_norm=clip if is_number(clip) else None,
        epsilon_cap=training.get("filter_epsilon"),
        sgd=SgdSettings(
            training["learning_rate"],
            training.get("momentum", 0.0),
            training.get("weight_decay", 0.0),
        ),
        layers=layers,
        views=1,
    )
