"""Figures during training: public ones for a tracker, sensitive ones for the curator's terminal.

Others can often read a tracker. By default it receives the worst-case epsilon, coverage and cost,
which depend on the settings only. Statistics of individual epsilons depend on the data: they are
sent only if they are requested by name. Values of single examples are never sent. What is printed
is sensitive.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from indpriv._formatting import format_epsilon
from indpriv.accountant import account
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import OpenedRun, open_run

PREFIX = "indpriv/"
# Statistics of individual epsilons: sensitive.
STATISTICS: Mapping[str, Callable[[EpsilonTable], float]] = {
    "epsilon_mean": lambda table: float(table.epsilon.mean()),
    "epsilon_median": lambda table: float(np.median(table.epsilon)),
    "epsilon_p95": lambda table: float(np.quantile(table.epsilon, 0.95)),
    "epsilon_max": lambda table: float(table.epsilon.max()),
    "share_at_worst_case": lambda table: float(table.at_worst_case.mean()),
}


def metrics_of(recorder: Any, *, delta: float, also: Sequence[str] = ()) -> dict[str, float]:
    """Figures of the steps so far.

    Args:
        recorder: a `Recorder` inside its attached block; its log is brought up to date.
        delta: delta of every epsilon.
        also: names in STATISTICS. They are sensitive: readers of the tracker learn about the data.

    Returns:
        worst_case_epsilon (the guarantee of the steps so far for every example), coverage, steps,
        norm_pass_seconds and the statistics of `also`, each with the prefix "indpriv/"; empty
        before the first step.

    Raises:
        InputError: a name that is not in STATISTICS.
    """
    for name in also:
        if name not in STATISTICS:
            raise InputError(
                f"also={name!r} is not a statistic that can be sent; choose from "
                f"{', '.join(STATISTICS)}. Values of single examples are never sent to a tracker"
            )
    accounted = _account_so_far(recorder, delta)
    if accounted is None:
        return {}
    table, run = accounted
    found = {
        "worst_case_epsilon": table.worst_case_epsilon,
        "coverage": run.log.coverage,
        "steps": float(run.log.total_steps),
        "norm_pass_seconds": run.state.pass_seconds,
        **{name: STATISTICS[name](table) for name in also},
    }
    return {PREFIX + name: value for name, value in found.items()}


def send(tracker: Any, metrics: Mapping[str, float], step: int) -> None:
    """Send figures to a tracker: wandb or its run, a Lightning logger, a TensorBoard SummaryWriter.

    It has log(dict), log_metrics(dict, step=) or add_scalar(name, value, step), else InputError.
    """
    if hasattr(tracker, "add_scalar"):
        for name, value in metrics.items():
            tracker.add_scalar(name, value, step)
    elif hasattr(tracker, "log_metrics"):
        tracker.log_metrics(dict(metrics), step=step)
    elif hasattr(tracker, "log"):
        tracker.log(dict(metrics))
    else:
        raise InputError(
            f"{type(tracker).__name__} has neither log(dict), log_metrics nor add_scalar; pass a "
            "tracker"
        )


def print_epsilons(recorder: Any, *, delta: float, file: Any = None) -> None:
    """Print one line about the individual epsilons of the steps so far, if any, for the curator.

    Arguments are as for `metrics_of`; file: to write to, by default standard error.
    """
    accounted = _account_so_far(recorder, delta)
    if accounted is None:
        return
    table, run = accounted
    median, high, largest = (
        format_epsilon(STATISTICS[f"epsilon_{name}"](table)) for name in ("median", "p95", "max")
    )
    line = (
        f"step {run.log.total_steps}: worst case {format_epsilon(table.worst_case_epsilon)} is the "
        f"guarantee; individual epsilon so far, {table.claim}, sensitive: median {median}, 95 % at "
        f"most {high}, largest {largest} ({table.account.describe()})\n"
    )
    (file or sys.stderr).write(line)


def _account_so_far(recorder: Any, delta: float) -> tuple[EpsilonTable, OpenedRun] | None:
    """The account of the steps so far; None before the first step."""
    if not recorder.state_dict()["step"]:
        return None
    run = open_run(recorder.run_dir)
    return (account(run.log, delta=delta), run) if run.state.total_steps else None
