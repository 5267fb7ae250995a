"""Computes the norms of a run that was not recorded, from its checkpoints. Output is sensitive.

A checkpoint of step t has the parameters that step t starts from, so its norms are the record of
step t, from the same norm pass as a Recorder's. Nothing is known between checkpoints: an account of
a replayed log is always an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from indpriv import _checks
from indpriv._files import first_at, write_json
from indpriv._progress import StageProgress, silent
from indpriv._storage import location_on_disk
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES, RUN_JSON
from indpriv.norm_log.sealing import seal
from indpriv.norm_log.step_settings import SETTING_NAMES
from indpriv.norm_log.writer import LogHeader
from indpriv.recording.checkpoints.audit_spec import AuditSpec, load_spec
from indpriv.recording.checkpoints.discovery import SavedModel, discover
from indpriv.recording.checkpoints.norms_at import AUTO, CheckpointPass, Workers, naming
from indpriv.recording.checkpoints.replay_log import ReplayPlan, write_log
from indpriv.recording.checkpoints.run_settings import RunSettings, StepOptions, resolve
from indpriv.recording.checkpoints.safe_files import read_content
from indpriv.recording.checkpoints.weights import fit, state_of
from indpriv.recording.norms.shadow_model import described_parameters


@dataclass(frozen=True)
class Replay:
    """What a replay found and did.

    Attributes:
        run_dir: the run directory: log, run.json, examples.parquet.
        n_checkpoints: number of checkpoints; those before the last step are records of the log.
        total_steps: number of steps of the run.
        train_accuracy, test_accuracy: accuracy of the last checkpoint; None if the task has none or
            there is no test set.
        notes: what was found out about the checkpoints and the settings.
    """

    run_dir: Path
    n_checkpoints: int
    total_steps: int
    train_accuracy: float | None
    test_accuracy: float | None
    notes: tuple[str, ...]


def replay(
    checkpoints: str | Path,
    spec: AuditSpec | str,
    run_dir: str | Path,
    *,
    options: StepOptions | None = None,
    device: str = "cpu",
    batch_size: int | str = AUTO,
    processes: int = 1,
    rounding: float = 0.01,
    rounding_mode: str = "up",
    progress: StageProgress | None = None,
    tell: Callable[[str], None] | None = None,
) -> Replay:
    """Compute every example's gradient norm at every checkpoint, and write a run directory.

    A replay that was interrupted, or whose run has grown since, continues at the next checkpoint
    when it is called again. Nothing in a checkpoint is run, see `read_content`.

    Args:
        checkpoints: folder of the checkpoints, in any order; for their steps see `StepOptions`.
        spec: how to rebuild model and data; "module:spec" or "file.py:spec" for several processes.
        run_dir: directory of the log; created (0700).
        options: settings that neither run.json nor the checkpoints contain.
        device: device to compute on, e.g. "cpu" or "cuda".
        batch_size: examples at once, or "auto" for the fastest; halved if memory runs out.
        processes: number of processes, each of which works on one checkpoint at a time (a script
            then needs `if __name__ == "__main__":`).
        rounding: rounding of norms, as a fraction of max_grad_norm; 0 keeps float64.
        rounding_mode: "up" (never under-reports) or "nearest" (as in the paper).
        progress: called as progress(stage, done, total) after each checkpoint.
        tell: called with each text that a user should read before the work starts: gaps, accuracy,
            dropout.

    Raises:
        InputError: everything that is missing, contradictory, unsafe or does not fit, in one
            message. Checkpoints that were replayed before stay in the log.
    """
    run_dir = location_on_disk(run_dir, "a replay is")
    workers = _make_workers(spec, batch_size, processes, device)
    audit_spec = load_spec(spec) if isinstance(spec, str) else spec
    plan = _make_plan(Path(checkpoints), audit_spec, options or StepOptions())
    _tell_each(tell, plan.notes)
    last = plan.models[-1].path
    checkpoint_pass = CheckpointPass(audit_spec, last, device=device, batch_size=batch_size)
    with checkpoint_pass.norm_pass:
        examples = checkpoint_pass.example_table()
        accuracy = {split: _accuracy(examples, split) for split in ("train", "test")}
        correct = f"the last checkpoint, {last.name}, is correct on {_shares(accuracy)}"
        _tell_each(tell, (correct, *checkpoint_pass.caveats))
        header = _header(plan.settings, audit_spec, checkpoint_pass, rounding, rounding_mode)
        write_log(run_dir, plan, audit_spec, header, checkpoint_pass, workers, progress or silent)
    write_json(run_dir / RUN_JSON, _run_json(Path(checkpoints), plan.settings))
    examples.to_parquet(run_dir / EXAMPLES)
    seal(run_dir)
    total = len(plan.settings.steps)
    return Replay(run_dir, len(plan.models), total, accuracy["train"], accuracy["test"], plan.notes)


def _make_workers(
    spec: AuditSpec | str, batch_size: int | str, processes: int, device: str
) -> Workers | None:
    """Check batch_size and processes; None stands for this process alone."""
    _checks.check_positive_int("processes", processes)
    if isinstance(batch_size, int):
        _checks.check_positive_int("batch_size", batch_size)
    else:
        _checks.check_choice("batch_size", batch_size, (AUTO,))
    if processes == 1:
        return None
    if not isinstance(spec, str):
        raise InputError(
            f"processes={processes}: pass the spec by name, e.g. 'train.py:spec', so that each "
            "process can import it"
        )
    return Workers(processes, spec, device, batch_size)


def _make_plan(folder: Path, spec: AuditSpec, options: StepOptions) -> ReplayPlan:
    """Check everything before any work; one InputError with all problems."""
    found = discover(folder, spec.load, options.step_of or ())
    problems = list(found.problems)
    model = spec.model()
    for saved in found.models:
        try:
            with naming(saved.path):
                fit(state_of(read_content(saved.path), spec.load), model)
        except InputError as error:
            problems.append(str(error))
    problems += _frozen(found.models, model)
    resolved = resolve(folder, found, options, spec.n_examples)
    problems += resolved.problems
    if not problems and resolved.settings is not None:
        notes = (*found.notes, *resolved.notes, *resolved.caveats)
        return ReplayPlan(found.models, resolved.settings, notes, resolved.caveats)
    if len(problems) == 1:
        raise InputError(problems[0])
    raise InputError("\n- ".join([f"{folder} cannot be replayed yet:", *problems]))


def _frozen(models: Sequence[SavedModel], model: nn.Module) -> list[str]:
    """Compare the number of trained parameters: norms are over the trainable ones only."""
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    for saved in models:
        if saved.n_trained is not None and saved.n_trained != trainable:
            return [
                f"the optimizer in {saved.path.name} trained {saved.n_trained} parameter tensors, "
                f"the spec's model has {trainable} that require a gradient: freeze in model() "
                "exactly what was frozen in training"
            ]
    return []


def _header(
    settings: RunSettings,
    spec: AuditSpec,
    checkpoint_pass: CheckpointPass,
    rounding: float,
    rounding_mode: str,
) -> LogHeader:
    return LogHeader(
        rounding=_checks.check_rounding(rounding),
        rounding_mode=_checks.check_choice("rounding_mode", rounding_mode, ("up", "nearest")),
        unit=spec.unit,
        neighbouring="add_remove",
        sampler=settings.sampler,
        individually_clipped=False,
        norm_pass=checkpoint_pass.norm_pass.to_header(checkpoint_pass.caveats),
        run={
            "replayed": True,
            "seeded": settings.seeded,
            "clipping_norm_epsilon": _clipping_norm_epsilon(settings.declared),
            **described_parameters(checkpoint_pass.model),
        },
    )


def _clipping_norm_epsilon(declared: Mapping[str, Any]) -> float:
    """Cost of the private release that run.json says the clipping norm was set to; 0 if none."""
    name = "clipping_norm_epsilon"
    said = first_at(declared, (name,), ("training", name), ("recorder", name))
    return _checks.check_clipping_norm_epsilon(0.0 if said is None else said)


def _run_json(folder: Path, settings: RunSettings) -> dict[str, Any]:
    """run.json of the replay: what the training run declared, and the settings of the account."""
    folder = folder.resolve()
    declared = {key: value for key, value in settings.declared.items() if key != "recorder"}
    columns = {name: getattr(settings.steps, name) for name in SETTING_NAMES}
    constant = {name: float(column[0]) for name, column in columns.items() if np.ptp(column) == 0}
    return {
        "name": folder.parent.name if folder.name == "checkpoints" else folder.name,
        **declared,
        "training": {
            **(declared.get("training") or {}),
            **constant,
            "delta": settings.delta,
            "sampler": settings.sampler,
        },
        "replayed": {"checkpoints": str(folder), "sources": dict(settings.sources)},
    }


def _tell_each(tell: Callable[[str], None] | None, texts: Sequence[str]) -> None:
    if tell is not None:
        for text in texts:
            tell(text)


def _accuracy(examples: ExampleTable, split: str) -> float | None:
    correct = examples.frame.loc[examples.frame["split"] == split, "correct"].dropna()
    return float(correct.astype(bool).mean()) if len(correct) else None


def _shares(accuracy: Mapping[str, float | None]) -> str:
    known = [
        f"{value:.1%} of the {split} examples"
        for split, value in accuracy.items()
        if value is not None
    ]
    return " and ".join(known) or "an unknown share of the examples: the task has no accuracy"
