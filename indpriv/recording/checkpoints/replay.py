"""Norms of a run that was never recorded, taken again from its checkpoints into a NormLog. Its output is sensitive.

A checkpoint of step t holds the parameters that step t starts from, so its norms are the record of step t, by the same
norm pass as a Recorder's. Between checkpoints nothing is known: an account of a replayed log is always an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from indpriv import _checks
from indpriv._files import write_json
from indpriv._journal import NAME as JOURNAL
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.reader import LogState, read_state
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.recording.checkpoints.audit_spec import AuditSpec, load_spec
from indpriv.recording.checkpoints.discovery import SavedModel, discover
from indpriv.recording.checkpoints.norms_at import (
    AUTO,
    Measured,
    Measuring,
    Workers,
    naming,
    norms_in_order,
)
from indpriv.recording.checkpoints.run_settings import NAMES, RunSettings, StepOptions, resolve
from indpriv.recording.checkpoints.safe_files import read_content
from indpriv.recording.checkpoints.weights import fit, state_of
from indpriv.recording.interrupts import deferred_interrupts

REPLAYING = "replaying checkpoints"


@dataclass(frozen=True)
class Replay:
    """What a replay found and did.

    Attributes:
        run_dir: the run directory: log, run.json, examples.parquet.
        n_checkpoints: checkpoints of the run; those before its last step are records of the log.
        total_steps: steps of the run.
        train_accuracy, test_accuracy: of the last checkpoint; None where the task has none or there is no test set.
        notes: what was found about the checkpoints and the settings.
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
    progress: Callable[[str, int, int], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Replay:
    """Take every example's gradient norm at every checkpoint, and write the run directory that a Recorder would have.

    A replay that was interrupted, or whose run has grown since, continues at the next checkpoint when it is called again.
    Nothing in a checkpoint is run: see `read_content`.

    Args:
        checkpoints: folder of the checkpoints, in any order and naming.
        spec: how to build model and data again; "package.module:spec" or "file.py:spec" where processes is above 1.
        run_dir: directory of the log; created (0700).
        options: step settings that neither run.json nor an accountant in the checkpoints tells.
        device: where to compute, e.g. "cpu" or "cuda".
        batch_size: of the norm pass; "auto" starts from what usually fits and halves it where memory does not suffice.
        processes: checkpoints to work on at a time, each in a process of its own (a script then needs
            `if __name__ == "__main__":`).
        rounding: of norms, as a fraction of max_grad_norm; 0 keeps float64.
        rounding_mode: "up" (never under-reports) or "nearest" (the paper's).
        progress: called as progress(stage, done, total) after each checkpoint.
        tell: called with what a person should know before the work starts: gaps, accuracy, dropout.

    Raises:
        InputError: what is missing, contradictory, unsafe or does not fit, all in one message. Checkpoints that were
            replayed before stay in the log.
    """
    _checks.check_positive_int("processes", processes)
    if isinstance(batch_size, int):
        _checks.check_positive_int("batch_size", batch_size)
    else:
        _checks.check_choice("batch_size", batch_size, (AUTO,))
    if processes > 1 and not isinstance(spec, str):
        raise InputError(
            f"processes={processes}: pass the spec by name, e.g. 'train.py:spec', so that each can import it"
        )
    audit_spec = load_spec(spec) if isinstance(spec, str) else spec
    say = tell or _unheard
    plan = _make_plan(Path(checkpoints), audit_spec, options or StepOptions())
    for note in plan.notes:
        say(note)
    last = plan.models[-1].path
    measuring = Measuring(audit_spec, last, device=device, batch_size=batch_size)
    try:
        examples = measuring.example_table()
        accuracy = {split: _accuracy(examples, split) for split in ("train", "test")}
        say(f"the last checkpoint, {last.name}, is right on {_shares(accuracy)}")
        for caveat in measuring.caveats:
            say(caveat)
        workers = None
        if processes > 1 and isinstance(spec, str):
            workers = Workers(processes, spec, device, batch_size, measuring.norm_pass.backend)
        header = _header(plan.settings, audit_spec, measuring, rounding, rounding_mode)
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_log(run_dir, plan, audit_spec, header, measuring, workers, progress or _unseen)
    finally:
        measuring.close()
    write_json(run_dir / "run.json", _run_json(Path(checkpoints), plan.settings))
    examples.to_parquet(run_dir / "examples.parquet")
    total = len(plan.settings.steps)
    return Replay(run_dir, len(plan.models), total, accuracy["train"], accuracy["test"], plan.notes)


@dataclass(frozen=True)
class _Plan:
    """Checkpoints by step, the settings of every step, and what a reader should know of them."""

    models: tuple[SavedModel, ...]
    settings: RunSettings
    notes: tuple[str, ...]
    caveats: tuple[str, ...]

    @property
    def to_record(self) -> tuple[SavedModel, ...]:
        """Checkpoints that a step starts from; that of the end of the run is none."""
        return tuple(model for model in self.models if model.step < len(self.settings.steps))


def _make_plan(folder: Path, spec: AuditSpec, options: StepOptions) -> _Plan:
    """Look at everything before any work; one InputError with all that is wrong."""
    found = discover(folder, spec.load)
    problems = list(found.problems)
    model = spec.model()
    problems += [problem for saved in found.models if (problem := _misfit(saved.path, spec, model))]
    problems += _frozen(found.models, model)
    if found.models:
        resolved = resolve(folder, found, options, spec.n_examples)
        problems += resolved.problems
        if not problems and resolved.settings is not None:
            notes = (*found.notes, *resolved.notes, *resolved.caveats)
            return _Plan(found.models, resolved.settings, notes, resolved.caveats)
    if len(problems) == 1:
        raise InputError(problems[0])
    raise InputError(
        f"{folder} cannot be replayed yet:\n" + "\n".join(f"- {problem}" for problem in problems)
    )


def _misfit(path: Path, spec: AuditSpec, model: nn.Module) -> str:
    try:
        fit(state_of(read_content(path), spec.load), model)
    except InputError as error:
        return naming(path, error)
    return ""


def _frozen(models: Sequence[SavedModel], model: nn.Module) -> list[str]:
    """Whether the model trains as many parameters as the optimizer in the checkpoints did: a norm is of those alone."""
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    for saved in models:
        if saved.n_trained is not None and saved.n_trained != trainable:
            return [
                f"the optimizer in {saved.path.name} trained {saved.n_trained} parameter tensors, the spec's model has "
                f"{trainable} that require a gradient: freeze in model() what was frozen in training, and nothing else"
            ]
    return []


def _header(
    settings: RunSettings,
    spec: AuditSpec,
    measuring: Measuring,
    rounding: float,
    rounding_mode: str,
) -> LogHeader:
    norm_pass = measuring.norm_pass
    trainable = {
        name: p.numel() for name, p in measuring.model.named_parameters() if p.requires_grad
    }
    return LogHeader(
        rounding=_checks.check_rounding(rounding),
        rounding_mode=_checks.check_choice("rounding_mode", rounding_mode, ("up", "nearest")),
        unit=spec.unit,
        neighbouring="add_remove",
        sampler=settings.sampler,
        individually_clipped=False,
        norm_pass={
            "backend": norm_pass.backend,
            "fallback": norm_pass.fallback,
            "slack": norm_pass.slack,
            "caveats": list(measuring.caveats),
        },
        run={
            "replayed": True,
            "seeded": settings.seeded,
            "n_parameters": sum(trainable.values()),
            "trainable": sorted(trainable),
        },
    )


def _write_log(
    run_dir: Path,
    plan: _Plan,
    spec: AuditSpec,
    header: LogHeader,
    measuring: Measuring,
    workers: Workers | None,
    progress: Callable[[str, int, int], None],
) -> None:
    """Append every record that is not in the log yet, and the settings of all steps."""
    done, logged = _already_done(run_dir, plan, measuring)
    to_do = plan.to_record[done:]
    ends = [*(model.step for model in plan.to_record[1:]), len(plan.settings.steps)]
    unit_ids = None if spec.unit_ids is None else np.asarray(spec.unit_ids)
    no_positions = np.zeros(0, dtype=np.int64)
    writer = NormLogWriter(run_dir, header, spec.ids, unit_ids, no_positions)
    log = _LogOfSteps(writer, plan, header.norm_pass["caveats"], logged)
    try:
        progress(REPLAYING, done, len(plan.to_record))
        log.write_until(to_do[0].step if to_do else len(plan.settings.steps), None)
        measured = norms_in_order(measuring, [model.path for model in to_do], workers)
        for number, (model, result) in enumerate(zip(to_do, measured, strict=True), done):
            with deferred_interrupts():
                clip = float(plan.settings.steps.max_grad_norm[model.step])
                writer.record(
                    model.step,
                    result.norms,
                    max_grad_norm=clip,
                    targets_fingerprint=result.targets_fingerprint,
                    seconds=result.seconds,
                )
                log.write_until(ends[number], result)
            progress(REPLAYING, number + 1, len(plan.to_record))
        if to_do or logged < len(plan.settings.steps):
            writer.finish(log.evidence(None))
    finally:
        writer.close()


class _LogOfSteps:
    """Writes the settings of steps in order, in spans of equal ones."""

    def __init__(
        self, writer: NormLogWriter, plan: _Plan, caveats: Sequence[str], logged: int
    ) -> None:
        self._writer, self._plan, self._logged = writer, plan, logged
        steps = plan.settings.steps
        columns = np.stack([getattr(steps, name) for name in NAMES])
        self._changes = np.flatnonzero((np.diff(columns) != 0).any(axis=0)) + 1
        replayed = f"norms were taken again from {len(plan.to_record)} saved checkpoints, not recorded in training"
        self._caveats = [
            replayed,
            *plan.caveats,
            *caveats,
            *([SEEDED] if plan.settings.seeded else []),
        ]

    def write_until(self, stop: int, measured: Measured | None) -> None:
        """Log the settings of the steps from where the log stands to `stop`."""
        steps = self._plan.settings.steps
        for start, end in self._spans(stop):
            values = {name: float(getattr(steps, name)[start]) for name in NAMES}
            self._writer.steps(start, end - start, **values, evidence=self.evidence(measured))
        self._logged = max(self._logged, stop)

    def _spans(self, stop: int) -> Iterator[tuple[int, int]]:
        inside = self._changes[(self._changes > self._logged) & (self._changes < stop)].tolist()
        edges = [self._logged, *inside, stop]
        return ((start, end) for start, end in pairwise(edges) if end > start)

    def evidence(self, measured: Measured | None) -> dict[str, Any]:
        """What stands behind these steps: nothing was observed, so only where it comes from."""
        settings = self._plan.settings
        return {
            "from_step": 0,
            "seeded": settings.seeded,
            "caveats": self._caveats,
            "sampler": settings.sampler,
            "replayed": {
                "sources": dict(settings.sources),
                "accountant_counted_all": settings.accountant_counted_all,
                "weights_fingerprint": None if measured is None else measured.weights_fingerprint,
            },
        }


def _already_done(run_dir: Path, plan: _Plan, measuring: Measuring) -> tuple[int, int]:
    """How many checkpoints the log in run_dir holds, and how many steps; (0, 0) where there is none.

    Raises:
        InputError: it is of another run, or of other checkpoints or settings.
    """
    if not (run_dir / JOURNAL).is_file() or not (run_dir / JOURNAL).stat().st_size:
        return 0, 0
    state = read_state(run_dir)
    again = f"{run_dir}: choose another directory, or remove this one to begin again"
    if not state.header["run"].get("replayed"):
        raise InputError(f"{run_dir} holds the log of a recorded run; {again}")
    planned = [model.step for model in plan.to_record]
    recorded = [entry["step"] for entry in state.records]
    if planned[: len(recorded)] != recorded:
        raise InputError(
            f"the checkpoints before step {recorded[-1]} are not those replayed into {again}"
        )
    _check_settings(state, plan.settings, again)
    fingerprints = {
        entry["first"]: entry["evidence"]["replayed"]["weights_fingerprint"]
        for entry in state.steps
    }
    for model in plan.to_record[: len(recorded)]:
        known = fingerprints.get(model.step)
        if known is not None and measuring.move_to(model.path) != known:
            raise InputError(f"{model.path} has changed since it was replayed into {again}")
    return len(recorded), state.total_steps


def _check_settings(state: LogState, settings: RunSettings, again: str) -> None:
    logged = state.settings()
    if state.header["sampler"] != settings.sampler or state.total_steps > len(settings.steps):
        raise InputError(f"sampler or number of steps are not those of the replay in {again}")
    for name in NAMES:
        if not np.array_equal(logged[name], getattr(settings.steps, name)[: state.total_steps]):
            raise InputError(f"{name} is not that of the replay in {again}")


def _run_json(folder: Path, settings: RunSettings) -> dict[str, Any]:
    """run.json of the replayed run: what the trained run declared, with the settings of the account."""
    folder = folder.resolve()
    declared = {key: value for key, value in settings.declared.items() if key != "recorder"}
    training = declared.get("training")
    name = folder.parent.name if folder.name == "checkpoints" else folder.name
    return {
        "name": name,
        **declared,
        "training": {**(training if isinstance(training, Mapping) else {}), **_constants(settings)},
        "replayed": {"checkpoints": str(folder), "sources": dict(settings.sources)},
    }


def _constants(settings: RunSettings) -> dict[str, Any]:
    """Settings as numbers: those that did not move."""
    columns = {name: getattr(settings.steps, name) for name in NAMES}
    still = {name: float(column[0]) for name, column in columns.items() if np.ptp(column) == 0}
    return {**still, "delta": settings.delta, "sampler": settings.sampler}


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


def _unheard(_text: str) -> None:
    """Nobody listens."""


def _unseen(_stage: str, _done: int, _total: int) -> None:
    """Nobody looks."""
