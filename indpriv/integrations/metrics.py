"""Figures of a run while it trains: to a tracker what is public, and to the terminal what its curator may see.

A tracker is often a service that others read. By default it gets the worst-case epsilon, coverage and cost, which depend
on settings alone. Statistics of individual epsilons depend on the data: they are sent only where they are asked for by
name. Values of single examples are never sent. What is printed is sensitive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from indpriv._formatting import format_epsilon
from indpriv.accountant import account
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import NormLog

PREFIX = "indpriv/"
# Of individual epsilons: sensitive.
STATISTICS: Mapping[str, Callable[[EpsilonTable], float]] = {
    "epsilon_mean": lambda table: float(table.epsilon.mean()),
    "epsilon_median": lambda table: float(np.median(table.epsilon)),
    "epsilon_p95": lambda table: float(np.quantile(table.epsilon, 0.95)),
    "epsilon_max": lambda table: float(table.epsilon.max()),
    "share_at_worst_case": lambda table: float(table.at_worst_case.mean()),
}


class Recording(Protocol):
    """A Recorder inside its attached block."""

    run_dir: Path

    def state_dict(self) -> dict[str, Any]:
        """Bring the log up to date; what to save with a checkpoint."""
        ...


def metrics_of(recorder: Recording, *, delta: float, also: Sequence[str] = ()) -> dict[str, float]:
    """Figures of the steps so far.

    Args:
        recorder: inside its attached block; its log is brought up to date.
        delta: of every epsilon.
        also: names in STATISTICS, which are sensitive: whoever reads the tracker learns about the data.

    Returns:
        worst_case_epsilon (what the steps so far guarantee everybody), coverage, steps, norm_pass_seconds, and `also`,
        each under "indpriv/"; empty before the first step.

    Raises:
        InputError: a name that is not in STATISTICS.
    """
    for name in also:
        if name not in STATISTICS:
            raise InputError(
                f"also={name!r} is not a statistic that can be sent; choose from {', '.join(STATISTICS)}. Values of single "
                "examples are never sent to a tracker"
            )
    table, log = _account_so_far(recorder, delta)
    if table is None or log is None:
        return {}
    found = {
        "worst_case_epsilon": table.worst_case_epsilon,
        "coverage": log.coverage,
        "steps": float(log.total_steps),
        "norm_pass_seconds": read_state(recorder.run_dir).pass_seconds,
        **{name: STATISTICS[name](table) for name in also},
    }
    return {PREFIX + name: value for name, value in found.items()}


def send(tracker: Any, metrics: Mapping[str, float], step: int) -> None:
    """Send figures to any object with log(dict), log_metrics(dict, step=) or add_scalar(name, value, step).

    That is wandb or a run of it, a Lightning logger, or a TensorBoard SummaryWriter.

    Raises:
        InputError: it has none of them.
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
            f"{type(tracker).__name__} has neither log(dict), log_metrics nor add_scalar; pass a tracker"
        )


def print_epsilons(recorder: Recording, *, delta: float, file: Any = None) -> None:
    """Print one line about the individual epsilons of the steps so far, for the curator; nothing before the first step.

    Args:
        recorder: inside its attached block.
        delta: of every epsilon.
        file: where to; default standard error.
    """
    table, log = _account_so_far(recorder, delta)
    if table is None or log is None:
        return
    median, high, largest = (
        format_epsilon(STATISTICS[f"epsilon_{name}"](table)) for name in ("median", "p95", "max")
    )
    line = (
        f"step {log.total_steps}: worst case {format_epsilon(table.worst_case_epsilon)} is the guarantee; individual epsilon "
        f"so far, {table.claim}, sensitive: median {median}, 95 % at most {high}, largest {largest} "
        f"({table.account.describe()})\n"
    )
    (file or sys.stderr).write(line)


def _account_so_far(
    recorder: Recording, delta: float
) -> tuple[EpsilonTable | None, NormLog | None]:
    if not recorder.state_dict()["step"] or not read_state(recorder.run_dir).total_steps:
        return None, None
    log = NormLog.open(recorder.run_dir)
    return account(log, delta=delta), log
