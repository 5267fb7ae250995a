"""Callbacks for Hugging Face's Trainer and Lightning, and figures for trackers and the terminal.

The training call is inside the block of `Recorder.attach`, so that the log of a run that fails
contains its steps up to the failure. By default a tracker, which many can read, receives figures
that depend on the settings only; statistics of individual epsilons are sensitive, and sent only if
they are requested by name; values of single examples never are.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from indpriv._checks import check_delta
from indpriv._facts import refused
from indpriv._files import write_json
from indpriv._formatting import format_epsilon
from indpriv.accountant import account
from indpriv.analysis.guarantee import usual_relation
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import check_installed
from indpriv.norm_log.norm_log import OpenedRun, open_run
from indpriv.norm_log.run_files import declared_account, read_run_json

STATE = "indpriv.json"  # in a Hugging Face checkpoint; in a Lightning one it is the key "indpriv"
# Statistics of individual epsilons: sensitive.
STATISTICS: Mapping[str, Callable[[EpsilonTable], float]] = {
    "epsilon_mean": lambda table: float(table.epsilon.mean()),
    "epsilon_median": lambda table: float(np.median(table.epsilon)),
    "epsilon_p95": lambda table: float(np.quantile(table.epsilon, 0.95, method="higher")),
    "epsilon_max": lambda table: float(table.epsilon.max()),
    "share_at_worst_case": lambda table: float(table.at_worst_case.mean()),
}


def hugging_face_callback(
    recorder: Any, *, delta: float, tracker: Any = None, also: Sequence[str] = (), show: bool = True
) -> Any:
    """A `transformers.TrainerCallback` that saves the recorder's state and reports figures.

    It is required: the Trainer does not clear the gradients that Opacus sums, and seeds the noise
    with 42. Let its `get_train_dataloader` return the loader of make_private, pass
    `optimizers=(optimizer, None)`, and keep gradient_accumulation_steps at 1.

    Args:
        recorder: a `Recorder`, attached around trainer.train().
        delta: delta of every epsilon.
        tracker: receives the figures of `metrics_of` whenever the Trainer logs; see `send`.
        also: see `metrics_of`; sensitive.
        show: whether to print a line about individual epsilons whenever the Trainer logs.
    """
    check_installed("Callbacks for Hugging Face", "hf", "transformers")
    from transformers import TrainerCallback

    report = partial(_report, recorder, check_delta(delta), _names(also))
    if tracker is not None:
        _method_of(tracker)  # an error now, not after hours of training

    class IndprivCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            recorder.draw_privately()  # on the device to which the Trainer moved the model

        def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            # The Trainer itself calls model.zero_grad(), which does not clear what Opacus summed.
            if optimizer is not None:
                optimizer.zero_grad()

        def on_log(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            report([tracker], int(state.global_step), show=show)

        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            saved = recorder.state_dict()
            if state.is_world_process_zero:
                write_json(Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE, saved)

    recorder.draw_privately()
    return IndprivCallback()


def lightning_callback(
    recorder: Any, *, delta: float, also: Sequence[str] = (), show: bool = True
) -> Any:
    """A `lightning.pytorch.Callback` that sends figures to the trainer's loggers after each epoch.

    Arguments, and the generators of noise and batches, are as for `hugging_face_callback`.
    """
    check_installed("Callbacks for Lightning", "integrations", "lightning")
    from lightning.pytorch import Callback

    report = partial(_report, recorder, check_delta(delta), _names(also))

    class IndprivCallback(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_start(self, *_: Any) -> None:
            recorder.draw_privately()

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            step = int(trainer.global_step)
            report(trainer.loggers, step, show=show and trainer.is_global_zero)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["indpriv"] = recorder.state_dict()

    recorder.draw_privately()
    return IndprivCallback()


def _report(
    recorder: Any, delta: float, also: Sequence[str], trackers: Any, step: int, *, show: bool
) -> None:
    for tracker in (one for one in trackers if one is not None):
        send(tracker, metrics_of(recorder, delta=delta, also=also), step)
    if show:
        print_epsilons(recorder, delta=delta)


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
    names, found = _names(also), {}
    for table, run in _account_so_far(recorder, delta):
        found = {
            "worst_case_epsilon": table.worst_case_epsilon,
            "coverage": run.log.coverage,
            "steps": float(run.log.total_steps),
            "norm_pass_seconds": run.pass_seconds,
            **{name: STATISTICS[name](table) for name in names},
        }
    return {f"indpriv/{name}": value for name, value in found.items()}


def send(tracker: Any, metrics: Mapping[str, float], step: int) -> None:
    """Send figures to a tracker: wandb or its run, a Lightning logger, a TensorBoard SummaryWriter.

    Any object works that has log(dict), log_metrics(dict, step=) or add_scalar(name, value, step).

    Raises:
        InputError: the tracker has none of these methods.
    """
    method = _method_of(tracker)
    if method == "add_scalar":
        for name, value in metrics.items():
            tracker.add_scalar(name, value, step)
    elif method == "log_metrics":
        tracker.log_metrics(dict(metrics), step=step)
    else:
        tracker.log(dict(metrics))


def _method_of(tracker: Any) -> str:
    for name in ("add_scalar", "log_metrics", "log"):
        if hasattr(tracker, name):
            return name
    raise refused("refusal.trackers", "tracker", kind=type(tracker).__name__)


def _names(also: Sequence[str]) -> Sequence[str]:
    """One name or several of STATISTICS; InputError for any other."""
    names = [also] if isinstance(also, str) else also
    if unknown := [name for name in names if name not in STATISTICS]:
        raise refused("refusal.trackers", "also", name=unknown[0], known=", ".join(STATISTICS))
    return names


def print_epsilons(recorder: Any, *, delta: float, file: Any = None) -> None:
    """Print one line about the individual epsilons of the steps so far, for the curator.

    Before the first step nothing is printed.

    Args:
        recorder: a `Recorder` inside its attached block.
        delta: delta of every epsilon.
        file: file to write to; default: standard error.
    """
    for table, run in _account_so_far(recorder, delta):
        names = ("epsilon_median", "epsilon_p95", "epsilon_max")
        median, high, largest = (format_epsilon(STATISTICS[name](table)) for name in names)
        print(
            f"step {run.log.total_steps}: worst case {format_epsilon(table.worst_case_epsilon)} is "
            f"the guarantee; individual epsilon so far, {table.claim}, sensitive: median {median}, "
            f"95 % at most {high}, largest {largest} ({table.account.describe()})",
            file=file or sys.stderr,
        )


def _account_so_far(recorder: Any, delta: float) -> list[tuple[EpsilonTable, OpenedRun]]:
    """The account of the steps so far; none before the first step."""
    if not recorder.state_dict()["step"]:
        return []
    run = open_run(recorder.run_dir)
    told: Any = {"neighbouring": usual_relation(run.log, run.header["run"])}  # as an audit has it
    told |= declared_account(read_run_json(run.run_dir))
    said = {key: told.get(key) for key in ("participation", "neighbouring")}
    return [(account(run.log, delta=delta, **said), run)] if run.total_steps else []
