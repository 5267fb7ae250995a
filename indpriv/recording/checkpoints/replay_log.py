"""Writes the log of a replay, and continues one that was interrupted. Its output is sensitive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indpriv._progress import StageProgress
from indpriv.errors import InputError
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.run_files import JOURNAL
from indpriv.norm_log.session_counts import Replay, SessionCounts
from indpriv.norm_log.step_settings import SETTING_NAMES
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.recording.checkpoints.audit_spec import AuditSpec
from indpriv.recording.checkpoints.discovery import SavedModel
from indpriv.recording.checkpoints.norms_at import (
    CheckpointNorms,
    CheckpointPass,
    Workers,
    norms_in_order,
)
from indpriv.recording.checkpoints.run_settings import RunSettings
from indpriv.recording.process import deferred_interrupts

REPLAYING = "replaying checkpoints"


@dataclass(frozen=True)
class ReplayPlan:
    """Checkpoints in order of their steps, the settings of every step, notes for the reader."""

    models: tuple[SavedModel, ...]
    settings: RunSettings
    notes: tuple[str, ...]
    caveats: tuple[str, ...]

    @property
    def to_record(self) -> tuple[SavedModel, ...]:
        """Checkpoints that a step starts from, so without that of the end of the run."""
        return tuple(model for model in self.models if model.step < len(self.settings.steps))


def write_log(
    run_dir: Path,
    plan: ReplayPlan,
    spec: AuditSpec,
    header: LogHeader,
    checkpoint_pass: CheckpointPass,
    workers: Workers | None,
    progress: StageProgress,
) -> None:
    """Append every record that is not in the log yet, and the settings of all steps."""
    done, logged = _already_done(run_dir, plan, checkpoint_pass)
    total, n_records = len(plan.settings.steps), len(plan.to_record)
    to_do = plan.to_record[done:]
    ends = [*(model.step for model in plan.to_record[1:]), total]
    no_positions = np.zeros(0, dtype=np.int64)
    writer = NormLogWriter(run_dir, header, spec.ids, spec.data.ids_of_units, no_positions)
    steps = _StepWriter(writer, plan, header.norm_pass["caveats"], logged)
    try:
        progress(REPLAYING, done, n_records)
        steps.write_until(to_do[0].step if to_do else total, None)
        norms = norms_in_order(checkpoint_pass, [model.path for model in to_do], workers)
        for number, (model, result) in enumerate(zip(to_do, norms, strict=True), done):
            with deferred_interrupts():
                writer.record(
                    model.step,
                    result.norms,
                    max_grad_norm=float(plan.settings.steps.max_grad_norm[model.step]),
                    targets_fingerprint=result.targets_fingerprint,
                    seconds=result.seconds,
                )
                steps.write_until(ends[number], result)
            progress(REPLAYING, number + 1, n_records)
        if to_do or logged < total:
            writer.finish(steps.counts(None))
    finally:
        writer.close()


class _StepWriter:
    """Writes the settings of the steps in order, equal ones together."""

    def __init__(
        self, writer: NormLogWriter, plan: ReplayPlan, caveats: Sequence[str], logged: int
    ) -> None:
        self._writer, self._settings, self._logged = writer, plan.settings, logged
        self._caveats = (
            f"norms were computed from {len(plan.to_record)} saved checkpoints, not recorded in "
            "training",
            *plan.caveats,
            *caveats,
            *([SEEDED] if plan.settings.seeded else []),
        )

    def write_until(self, stop: int, norms: CheckpointNorms | None) -> None:
        """Write the settings of all steps before `stop` that are not in the log yet."""
        steps = self._settings.steps
        for start, end in steps.spans(self._logged, stop):
            setting = vars(steps.at(start))
            self._writer.steps(start, end - start, **setting, counts=self.counts(norms))
        self._logged = max(self._logged, stop)

    def counts(self, norms: CheckpointNorms | None) -> SessionCounts:
        """Where these steps come from. No Recorder watched the training, so nothing was counted."""
        return SessionCounts(
            from_step=0,
            seeded=self._settings.seeded,
            caveats=self._caveats,
            sampler=self._settings.sampler,
            replayed=Replay(
                sources=self._settings.sources,
                accountant_counted_all=self._settings.accountant_counted_all,
                weights_fingerprint=None if norms is None else norms.weights_fingerprint,
            ),
        )


def _already_done(
    run_dir: Path, plan: ReplayPlan, checkpoint_pass: CheckpointPass
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
    recorded = [entry["step"] for entry in state.records]
    done = plan.to_record[: len(recorded)]
    if [model.step for model in done] != recorded:
        raise InputError(
            f"the checkpoints before step {recorded[-1]} are not those replayed into {again}"
        )
    steps = plan.settings.steps
    if state.header["sampler"] != plan.settings.sampler or state.total_steps > len(steps):
        raise InputError(f"the sampler or the number of steps differs from the replay in {again}")
    logged = state.settings()
    for name in SETTING_NAMES:
        if not np.array_equal(getattr(logged, name), getattr(steps, name)[: state.total_steps]):
            raise InputError(f"{name} differs from the replay in {again}")
    fingerprints = {
        entry["first"]: entry["evidence"]["replayed"]["weights_fingerprint"]
        for entry in state.steps
    }
    for model in done:
        known = fingerprints.get(model.step)
        if known is not None and checkpoint_pass.move_to(model.path) != known:
            raise InputError(f"{model.path} has changed since it was replayed into {again}")
    return len(recorded), state.total_steps
