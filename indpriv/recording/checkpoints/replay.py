"""Computes the norms of a run that was not recorded, from its checkpoints. Output is sensitive.

A checkpoint of step t has the parameters that step t starts from, so its norms are the record of
step t, from the same norm pass as a Recorder's. Nothing is known between checkpoints: an account of
a replayed log is always an estimate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from indpriv import _checks
from indpriv._facts import refused
from indpriv._files import first_at, write_json
from indpriv._storage import location_on_disk
from indpriv._types import StageProgress, silent
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log import session_counts
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.run_files import EXAMPLES, JOURNAL, RUN_JSON, seal
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.recording.checkpoints import saved_models
from indpriv.recording.checkpoints.audit_spec import AuditSpec, load_spec
from indpriv.recording.checkpoints.safe_files import fingerprint_of, first_line, load_into, naming
from indpriv.recording.checkpoints.saved_models import (
    Discovery,
    RunSettings,
    SavedModel,
    StepOptions,
)
from indpriv.recording.norms.batches import same_values, tensors_of
from indpriv.recording.norms.model_checks import check_memory
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.norms.shadow_model import described_parameters
from indpriv.recording.process import deferred_interrupts
from indpriv.recording.training_data import Measured, norms_of

AUTO, REPLAYING = "auto", "replaying checkpoints"
_PROBED = 8  # examples that are read twice, to find random augmentation
_CHECKED = 256  # examples on which norms are checked
_AUGMENTED = (
    "the dataset gives other inputs each time (random augmentation?), so the norms belong to other "
    "inputs than training's"
)


def replay(
    checkpoints: str | Path,
    spec: AuditSpec | str | None,
    run_dir: str | Path,
    *,
    options: StepOptions | None = None,
    device: str = "cpu",
    batch_size: int | str = AUTO,
    rounding: float = 0.01,
    rounding_mode: str = "up",
    progress: StageProgress = silent,
    tell: Callable[[str], object] = lambda _: None,
) -> None:
    """Compute every example's gradient norm at every checkpoint, and write a run directory.

    A replay that was interrupted, or whose run has grown since, continues at the next checkpoint
    when it is called again. Nothing in a checkpoint is run, see `read_content`.

    Args:
        checkpoints: folder of the checkpoints, in any order; for their steps see `StepOptions`.
        spec: how to rebuild model and data, or where that stands: "module:spec" or "file.py:spec".
        run_dir: directory of log, run.json and examples.parquet; created (0700).
        options: settings that neither run.json nor the checkpoints contain.
        device: device to compute on, e.g. "cpu" or "cuda".
        batch_size: examples at once, or "auto" for what memory takes; halved if it runs out.
        rounding: rounding of norms, as a fraction of max_grad_norm; 0 keeps float64.
        rounding_mode: "up" (never under-reports) or "nearest" (as in the paper).
        progress: called as progress(stage, done, total) after each checkpoint.
        tell: called with each text that a user should read before the work starts: gaps, accuracy
            of the last checkpoint, dropout.

    Raises:
        InputError: everything that is missing, contradictory, unsafe or does not fit, in one
            message. Checkpoints that were replayed before stay in the log.
    """
    run_dir, folder = location_on_disk(run_dir, "a replay is"), Path(checkpoints)
    if isinstance(batch_size, int):
        _checks.check_positive_int("batch_size", batch_size)
    else:
        _checks.check_choice("batch_size", batch_size, (AUTO,))
    rebuilt, found, settings = _checked(folder, spec, options or StepOptions())
    for note in (*found.notes, *settings.caveats):
        tell(note)
    last = found.models[-1].path
    made = CheckpointPass(rebuilt, last, device, batch_size)
    with made.norm_pass:
        examples = made.example_table()
        correct = examples.frame.dropna(subset="correct")
        accuracy = correct["correct"].astype(float).groupby(correct["split"], sort=False).mean()
        shares = [f"{share:.1%} of the {split} examples" for split, share in accuracy.items()]
        unknown = "an unknown share of the examples: the task has no accuracy"
        tell(f"the last checkpoint, {last.name}, is correct on {' and '.join(shares) or unknown}")
        for caveat in made.caveats:
            tell(caveat)
        of_clip = "clipping_norm_epsilon"  # cost of the private release that it was set to
        paths = (of_clip,), ("training", of_clip), ("recorder", of_clip)
        paid = first_at(settings.declared, *paths)
        header = LogHeader(
            rounding=_checks.check_rounding(rounding),
            rounding_mode=_checks.check_choice("rounding_mode", rounding_mode, ("up", "nearest")),
            unit=rebuilt.unit,
            neighbouring="add_remove",
            sampler=settings.sampler,
            individually_clipped=False,
            norm_pass=made.norm_pass.to_header(made.caveats),
            run={
                "replayed": True,
                "seeded": bool(settings.declared.get("seeded")),
                of_clip: _checks.check_clipping_norm_epsilon(0.0 if paid is None else paid),
                **described_parameters(made.model),
            },
        )
        _write_log(run_dir, made, found.models, settings, header, progress)
    write_json(run_dir / RUN_JSON, _run_json(folder.resolve(), settings))
    examples.to_parquet(run_dir / EXAMPLES)
    seal(run_dir)


def _checked(
    folder: Path, spec: AuditSpec | str | None, options: StepOptions
) -> tuple[AuditSpec, Discovery, RunSettings]:
    """Everything that the work needs; one InputError with all that is missing."""
    unknown, rebuilt, model = Discovery(), None, None
    with unknown.collecting():
        if spec is None:
            raise refused("refusal.checkpoints", "no_spec")
        rebuilt = load_spec(spec) if isinstance(spec, str) else spec
        model = rebuilt.model()
    load, n = (None, None) if rebuilt is None else (rebuilt.load, rebuilt.n_examples)
    found = saved_models.discover(folder, load, options.step_of or (), model)
    found.problems[:0] = unknown.problems
    settings = saved_models.resolve(folder, found, options, n)
    found.check(folder)
    if rebuilt is None or settings is None:  # never: each adds a problem
        raise refused("refusal.checkpoints", "no_spec")
    return rebuilt, found, settings


def _run_json(folder: Path, settings: RunSettings) -> dict[str, Any]:
    """run.json of the replay: what the training run declared, and the settings of the account."""
    declared = {key: value for key, value in settings.declared.items() if key != "recorder"}
    columns = vars(settings.steps).items()
    constant = {name: float(column[0]) for name, column in columns if np.ptp(column) == 0}
    said = {**constant, "delta": settings.delta, "sampler": settings.sampler}
    return {
        "name": folder.parent.name if folder.name == "checkpoints" else folder.name,
        **declared,
        "training": {**(declared.get("training") or {}), **said},
        "replayed": {"checkpoints": str(folder), "sources": dict(settings.sources)},
    }


def _write_log(
    run_dir: Path,
    made: CheckpointPass,
    models: Sequence[SavedModel],
    settings: RunSettings,
    header: LogHeader,
    progress: StageProgress,
) -> None:
    """Append every record that is not in the log yet, and the settings of all steps."""
    steps, total, seeded = settings.steps, len(settings.steps), header.run["seeded"]
    models = [model for model in models if model.step < total]  # that a step starts from
    n_done, logged = _already_done(run_dir, models, settings, made)
    caveats = (
        f"norms were computed from {len(models)} saved checkpoints, not recorded in training",
        *settings.caveats,
        *made.caveats,
        *([SEEDED] if seeded else []),
    )

    def counts(weights: str | None = None) -> SessionCounts:
        """Where steps come from. No Recorder watched the training, so nothing was counted."""
        sources, all_counted = settings.sources, settings.accountant_counted_all
        replayed = session_counts.Replay(
            sources=sources, accountant_counted_all=all_counted, weights_fingerprint=weights
        )
        return SessionCounts(
            from_step=0, seeded=seeded, caveats=caveats, sampler=settings.sampler, replayed=replayed
        )

    def append_steps(first: int, end: int, weights: str | None = None) -> None:
        for start, stop in steps.spans(first, end):
            setting = vars(steps.at(start))
            writer.steps(start, stop - start, **setting, counts=counts(weights))

    ends = [*(model.step for model in models), total]
    unfinished = n_done < len(models) or logged < total
    writer = NormLogWriter(
        run_dir, header, made.spec.ids, made.spec.ids_of_units, np.zeros(0, np.int64)
    )
    try:
        progress(REPLAYING, n_done, len(models))
        append_steps(logged, ends[n_done])
        for number, model in enumerate(models[n_done:], n_done):
            taken, weights = made.norms_at(model.path)
            with deferred_interrupts():
                writer.record(
                    model.step,
                    taken.norms,
                    max_grad_norm=float(steps.max_grad_norm[model.step]),
                    targets_fingerprint=taken.targets_fingerprint,
                    seconds=taken.seconds,
                )
                append_steps(max(model.step, logged), ends[number + 1], weights)
            progress(REPLAYING, number + 1, len(models))
        if unfinished:
            writer.finish(counts())
    finally:
        writer.close()


def _already_done(
    run_dir: Path, models: Sequence[SavedModel], settings: RunSettings, made: CheckpointPass
) -> tuple[int, int]:
    """Number of checkpoints and of steps in the log of an interrupted replay; (0, 0) without one.

    Raises:
        InputError: the log is of another run, or of other checkpoints or settings.
    """
    journal = run_dir / JOURNAL
    if not journal.is_file() or not journal.stat().st_size:
        return 0, 0
    state = read_state(run_dir)
    again = f"{run_dir}: choose another directory, or remove this one to start again"
    if not state.header["run"].get("replayed"):
        raise InputError(f"there is the log of a recorded run in {again}")
    recorded, logged = [entry["step"] for entry in state.lines["record"]], state.total_steps
    weights = {
        entry["first"]: entry["evidence"]["replayed"]["weights_fingerprint"]
        for entry in state.steps
    }
    done, now = models[: len(recorded)], vars(settings.steps)
    then = vars(state.settings()) if logged else {}
    same = {name: np.array_equal(column, now[name][:logged]) for name, column in then.items()}
    same["sampler"] = state.header["sampler"] == settings.sampler
    same["the steps of the checkpoints"] = [model.step for model in done] == recorded
    for model in done if all(same.values()) else ():
        same[str(model.path)] = weights.get(model.step) in (None, made.move_to(model.path))
    if not all(same.values()):
        other = ", ".join(name for name, holds in same.items() if not holds)
        raise InputError(f"not as in the replay before: {other}. Its log is in {again}")
    return len(recorded), logged


class CheckpointPass:
    """Model, data and norm pass, which move from checkpoint to checkpoint."""

    def __init__(
        self, spec: AuditSpec, first: Path, device: str = "cpu", batch_size: int | str = AUTO
    ) -> None:
        """Build the model, load a first checkpoint, and check at it how norms are computed.

        Raises:
            InputError: the checkpoint does not fit the model, the model does not accept the data,
                or its gradients mix examples.
        """
        self.spec, self.model = spec, spec.model().to(device)
        self._examples, self._test = spec.examples(spec.collate_fn, torch.device(device))
        self.move_to(first)
        inputs, targets = next(self._examples.batches(_CHECKED))
        self.norm_pass = NormPass(self.model, spec.loss_fn, inputs, targets)
        check_memory(self.model, inputs)
        if self._test is not None:
            with self.norm_pass.evaluation() as evaluated:
                spec.check_test_set(evaluated, self._test)
        if isinstance(batch_size, int):
            self.norm_pass.batch_size = batch_size
        once, again = (tensors_of(next(self._examples.batches(_PROBED))) for _ in range(2))
        same = all(map(same_values, once, again))
        # Why these norms differ from training's.
        self.caveats = (*self.norm_pass.caveats, *(() if same else (_AUGMENTED,)))

    def move_to(self, path: Path) -> str:
        """Load a checkpoint into the model, and return a fingerprint of its weights."""
        return fingerprint_of(load_into(self.model, path, self.spec.load))

    def norms_at(self, path: Path) -> tuple[Measured, str]:
        """Every example's norm at a checkpoint, in seconds that include reading it; its weights.

        Raises:
            InputError: names the checkpoint if a norm is NaN.
        """
        start = time.perf_counter()
        weights = self.move_to(path)
        with naming(path):
            try:
                taken = norms_of(self.norm_pass, self._examples, self.spec.ids)
            except RuntimeError as error:
                raise InputError(f"its norms cannot be computed: {first_line(error)}") from error
        return replace(taken, seconds=time.perf_counter() - start), weights

    def example_table(self) -> ExampleTable:
        """Losses of training and test examples; InputError if one is not finite."""
        with self.norm_pass.evaluation() as model:
            table = self.spec.example_table(model, self._examples, self._test)
        bad = table.frame[~np.isfinite(table.frame["loss"].to_numpy(np.float64))]
        if len(bad):
            one = {"split": bad["split"].iloc[0], "example": bad["example_id"].iloc[0]}
            raise refused("refusal.checkpoints", "losses", count=len(bad), **one)
        return table
