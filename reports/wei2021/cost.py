"""Table X and the last column of Table XI: what a step of training costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median

import numpy as np

from audits.training.baseline import fit_without_dp
from audits.training.config import AuditConfig
from audits.training.datasets import Dataset, load_dataset
from audits.training.private_setting import make_private, quiet_opacus
from audits.training.randomness import Randomness
from audits.training.steps import take_steps
from reports.shared.markdown_table import table
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED
from reports.wei2021 import paper
from reports.wei2021.training import METHODS, Method, config_of

RULE = (
    "three claims: a step with privacy costs more than one without, moving parameters cost at most "
    "10 % more than fixed ones, and quantile clipping and AdaClip cost at least 5 % more than these; "
    "reproduced where all hold, differs where some do"
)
_STEPS = 25
_MOVING = Method(
    "moving",
    "dyn[S,sigma], not private",
    lambda norm: {
        "max_grad_norm": {"law": "linear", "start": norm, "end": norm / 2},
        "noise_multiplier": {"law": "inverse_exponential", "start": 15.8, "end": 3.0},
        "noise_scale": "largest_norm",
        "allow_no_privacy": True,
    },
)
_OTHERS = {method.name: method for method in METHODS}
_TITLES = {
    "none": "without privacy",
    **{m.name: m.title for m in (_OTHERS["baseline"], _MOVING)},
    **{name: _OTHERS[name].title for name in paper.TABLE_11},
}


def cost() -> dict[str, float]:
    """Median CPU seconds of a step on MNIST by system, without recording; a minute on a core."""
    data, methods = load_dataset("mnist"), (_OTHERS["baseline"], _MOVING)
    methods += tuple(_OTHERS[name] for name in paper.TABLE_11)
    configs = {m.name: config_of(m, paper.CLIP, epochs=None, steps=_STEPS) for m in methods}
    found = {"none": _seconds(lambda tick: _without(configs["baseline"], data, tick))}
    for name, config in configs.items():
        found[name] = _seconds(lambda tick, config=config: _private(config, data, tick))
    return found


def _seconds(train: Callable[[Callable[[], None]], None]) -> float:
    """Median time between two steps; the first ones are left out."""
    times: list[float] = []
    train(lambda: times.append(time.process_time()))
    return float(median(np.diff(times[2:])))


def _without(config: AuditConfig, data: Dataset, tick: Callable[[], None]) -> None:
    fit_without_dp(config, data, seed=0, after_step=lambda *_: tick())


def _private(config: AuditConfig, data: Dataset, tick: Callable[[], None]) -> None:
    with quiet_opacus():
        private = make_private(config, data, Randomness.from_seed(0), "cpu")
        take_steps(private, config.training, lambda _: tick(), lambda: False, "cpu")


def verdict_of_cost(seconds: Mapping[str, float]) -> str:
    """By `RULE`."""
    if not seconds:
        return NOT_RUN
    moving, fixed = seconds["moving"], seconds["baseline"]
    claims = (
        min(value for name, value in seconds.items() if name != "none") > seconds["none"],
        moving <= 1.1 * fixed,
        min(seconds[name] for name in paper.TABLE_11) >= 1.05 * moving,
    )
    return REPRODUCED if all(claims) else DIFFERS if any(claims) else NOT_REPRODUCED


def cost_section(seconds: Mapping[str, float]) -> Iterator[str]:
    """Table X beside ours; empty without figures."""
    if not seconds:
        return
    yield from ("## Tables X and XI: cost of a step", "")
    yield table(
        ["system", "paper, s", "of the baseline", "ours, s", "of the baseline"],
        [
            [
                title,
                f"{paper.SECONDS[name]:g}",
                f"{paper.SECONDS[name] / paper.SECONDS['baseline']:.2f}",
                f"{seconds[name]:.3f}",
                f"{seconds[name] / seconds['baseline']:.2f}",
            ]
            for name, title in _TITLES.items()
        ],
    )
    yield from (
        "",
        f"Medians of {_STEPS} steps of 600 MNIST images; ours are CPU seconds of Opacus in hooks mode,",
        "the tanh network, without recording; the paper's are of its own network. Seconds cannot be",
        "compared between the two, ratios can.",
        "",
    )
