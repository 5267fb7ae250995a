"""Rules about noise and steps: batch size, epochs, clipping, learning rate, weight decay."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from indpriv._formatting import format_number, format_share
from indpriv.analysis.lint.plan import Plan
from indpriv.analysis.lint.rule import NOTE, PLAN_AND_DELTA, WARNING, Judgement, Rule
from indpriv.analysis.lint.training_facts import TrainingFacts

_MOST_NOISE_SAVED = 0.1  # by twice the batch
_FEWEST_EPOCHS = 10
_FEWEST_CLIPPED, _MOST_CLIPPED = 0.05, 0.95
_SHORTEST_REACH = 1.0
_MOST_DRIFT = 0.5
_MOST_DECAY = 1.0


def _batch_size(facts: TrainingFacts) -> Judgement | None:
    """Noise in the mean of all updates' gradients, here and at twice the batch and half the steps.

    It is in proportion to noise_multiplier / (sample_rate * sqrt(steps)), which Sander et al. 2023
    hold constant when they change the batch.
    """
    plan, n, delta = facts.plan, facts.n_examples, facts.delta
    if plan is None or n is None or delta is None:
        return None
    drawn = (
        f"A step draws {plan.sample_rate * n:,.0f} of {n:,} examples, at a noise multiplier of "
        f"{plan.noise_multiplier:.3g}."
    )
    if 2 * plan.sample_rate > 1:
        return Judgement(True, f"{drawn} Twice as many would be more than all.")
    twice = replace(plan, sample_rate=2 * plan.sample_rate, total_steps=plan.total_steps / 2)
    found = twice.with_epsilon(plan.epsilon(delta), delta)
    if found is None:
        return None
    saved = 1 - _noise_of_the_mean(found) / _noise_of_the_mean(plan)
    figures = (
        f"{drawn} At twice the batch, with the same epochs and epsilon, the noise in the mean of "
        f"all updates would be {format_share(max(saved, 0.0))} smaller."
    )
    return Judgement(saved <= _MOST_NOISE_SAVED, figures)


def _noise_of_the_mean(plan: Plan) -> float:
    return plan.noise_multiplier / (plan.sample_rate * math.sqrt(plan.total_steps))


def _epochs(facts: TrainingFacts) -> Judgement | None:
    plan = facts.plan
    if plan is None or facts.delta is None:
        return None
    longer = replace(plan, total_steps=2 * plan.total_steps)
    found = longer.with_epsilon(plan.epsilon(facts.delta), facts.delta)
    if found is None:
        return None
    figures = (
        f"The number of epochs is {plan.epochs:.3g}. Twice as many at the same epsilon would need "
        f"a noise multiplier of {found.noise_multiplier:.3g} instead of "
        f"{plan.noise_multiplier:.3g}."
    )
    return Judgement(round(plan.epochs, 6) >= _FEWEST_EPOCHS, figures)


def _clipping(facts: TrainingFacts) -> Judgement | None:
    shares = facts.clipped
    if not len(shares):
        return None
    middle = float(np.median(shares))
    first, median, last = (format_share(x) for x in (shares[0], middle, shares[-1]))
    figures = (
        f"The norm is above the clipping norm for {first} of the examples in the first record, "
        f"{median} in the median one and {last} in the last one."
    )
    return Judgement(_FEWEST_CLIPPED <= middle <= _MOST_CLIPPED, figures)


def _learning_rate(facts: TrainingFacts) -> Judgement | None:
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
    figures = (
        f"Learning rate {format_number(sgd.learning_rate)}, momentum {sgd.momentum:g}, C "
        f"{clip:g}: gradients can move the parameters by at most {format_number(rounded, 2)} in "
        f"all, and noise alone moves each of them by about {format_number(drift, 2)}."
    )
    return Judgement(reach >= _SHORTEST_REACH and drift <= _MOST_DRIFT, figures)


def _weight_decay(facts: TrainingFacts) -> Judgement | None:
    sgd, plan = facts.sgd, facts.plan
    if sgd is None or sgd.weight_decay is None:
        return None
    if sgd.weight_decay == 0:
        return Judgement(True, "There is no weight decay.")
    if plan is None:
        return None
    rate = sgd.learning_rate * sgd.weight_decay * plan.total_steps / (1 - sgd.momentum)
    figures = (
        f"Weight decay {sgd.weight_decay:g} alone would shrink each parameter to "
        f"{format_share(math.exp(-rate))} over the run."
    )
    return Judgement(rate <= _MOST_DECAY, figures)


RULES = (
    Rule(
        key="batch_size",
        severity=WARNING,
        title="The batch is large enough for the noise",
        literature="With a noise multiplier above about 2, epsilon depends only on the total "
        "amount of noise, whatever the batch; below, the same noise costs more epsilon (Sander et "
        "al.). Large batches were essential to the accuracy of De et al., who use 4,096 on "
        "CIFAR-10; Abadi et al. advised about the square root of n.",
        source="Sander, Stock and Sablayrolles 2023 (arXiv:2210.03403); De et al. 2022 "
        "(arXiv:2204.13650); Abadi et al. 2016 (arXiv:1607.00133)",
        advice="Double the batch, and let target_epsilon find the noise; max_physical_batch_size "
        "(in a loop of your own, BatchMemoryManager) bounds the memory.",
        needs=PLAN_AND_DELTA,
        judge=_batch_size,
    ),
    Rule(
        key="epochs",
        severity=NOTE,
        title="Training takes at least 10 epochs",
        literature="At a fixed epsilon the noise has to grow only like the square root of the "
        "number of steps, so that longer training often pays (Abadi et al., theorem 1). The "
        "number 10 is a rule of thumb of ours.",
        source="Abadi et al. 2016 (arXiv:1607.00133)",
        advice="Try more epochs at the same target_epsilon.",
        needs=PLAN_AND_DELTA,
        judge=_epochs,
    ),
    Rule(
        key="clipping",
        severity=WARNING,
        title="Some gradients are clipped, but not nearly all",
        literature="Abadi et al. choose C as the median norm of the unclipped gradients over "
        "training. If hardly any gradient reaches C, a smaller C would take less noise and clip "
        "hardly more. If nearly all are clipped, gradients are normalised (Bu et al.): that can "
        "train well, but each example then has nearly the worst-case epsilon. The limits of 5 % "
        "and 95 % are rules of thumb of ours.",
        source="Abadi et al. 2016 (arXiv:1607.00133); Bu et al. 2023 (arXiv:2206.07136)",
        advice="Change C, and the learning rate the other way; choose C on public data, since a "
        "quantile of the private norms is not covered by the account.",
        needs="a run with readable records and without individual clipping",
        judge=_clipping,
    ),
    Rule(
        key="learning_rate",
        severity=WARNING,
        title="The learning rate fits the clipping norm and the noise",
        literature="Where gradients are clipped, the learning rate and C act as one product (Bu et "
        "al.), and the noisier the updates, the lower the learning rate has to be (TensorFlow "
        "Privacy). That gradients should be able to move the parameters by 1, and that noise "
        "should move none by more than 0.5, are rules of thumb of ours.",
        source="Bu et al. 2023 (arXiv:2206.07136); TensorFlow Privacy, tutorials/README.md",
        advice="Raise the learning rate if the gradients reach too little, and lower it, or take "
        "larger batches, if the noise moves too much.",
        needs="SGD on averaged gradients, its learning rate, the number of examples, and settings "
        "that do not change",
        judge=_learning_rate,
    ),
    Rule(
        key="weight_decay",
        severity=NOTE,
        title="Weight decay does not outweigh the gradients",
        literature="DP-SGD keeps the gap between training and test accuracy small by itself "
        "(Abadi et al.), so that there is little for weight decay to do. In the "
        "optimizer it costs no privacy; in the loss it uses up a part of C. That parameters should "
        "not shrink below 37 % is a rule of thumb of ours.",
        source="Abadi et al. 2016 (arXiv:1607.00133)",
        advice="Leave weight decay out, or lower it.",
        needs="SGD on averaged gradients and its weight decay",
        judge=_weight_decay,
    ),
)
