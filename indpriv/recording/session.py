"""One attachment of a Recorder: from what Opacus shows at each step to the lines of the log. Sensitive.

Norms are taken right after an update and written right after the next one, since only then is it known which
max_grad_norm their step ran at (schedulers change it in between).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from indpriv.errors import EvidenceError, PrivacyWarning
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import NormLog, check_norms
from indpriv.norm_log.reader import read_left_out
from indpriv.norm_log.recording_policy import RecordingPolicy
from indpriv.norm_log.writer import NormLogWriter
from indpriv.recording.clipping.filtered import Filter, FilteredClipping
from indpriv.recording.clipping.individual import ClipLevels, with_headroom
from indpriv.recording.data_passes import SharedPass
from indpriv.recording.holdout import HoldoutLog
from indpriv.recording.interrupts import deferred_interrupts
from indpriv.recording.opacus.clipping_watch import Thresholds
from indpriv.recording.opacus.ranks import Batch, check_together, whole_batch
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.opacus.tally import StepSetting
from indpriv.recording.opacus.watch import TrainedBatch, Watch
from indpriv.recording.random_states import fingerprint_of_state

FLUSH_STEPS = 256  # steps that a crash may lose


@dataclass(frozen=True)
class Plan:
    """What a Recorder was asked to do, checked; as of `Recorder`.

    Attributes:
        run_id: of the run directory.
        ids: (n,) of the data set.
        exact: (n_exact,) positions of the examples that are recorded at every step.
        policy: when norms are taken.
        levels: rounding of the log; None where it keeps norms in full.
        individual_clipping: clip each example at its recorded level.
        clip_headroom: how far above its norm that is.
        privacy_filter: or None.
        units: (n,) number of the unit each row belongs to, from 0 on; None where a row is a unit.
        seeded: no privacy, and labelled so.
        resume_at: step to go on at; None where the log is new.
        stops_on_write_error: else training goes on without recording.
    """

    run_id: str
    ids: NDArray[np.generic]
    exact: NDArray[np.int64]
    policy: RecordingPolicy
    levels: Levels | None
    individual_clipping: bool
    clip_headroom: float
    privacy_filter: Filter | None
    units: NDArray[np.int64] | None
    seeded: bool
    resume_at: int | None
    stops_on_write_error: bool


class Session:
    """What has been seen since the last line of the log."""

    def __init__(
        self,
        run_dir: Path,
        plan: Plan,
        run: OpacusRun,
        shared_pass: SharedPass,
        writer: NormLogWriter | None,
        caveats: list[str],
        holdout: HoldoutLog | None,
    ) -> None:
        self._run_dir, self._plan, self._ids, self._exact = run_dir, plan, plan.ids, plan.exact
        self._policy = plan.policy.in_steps(run.steps_per_epoch)
        self._run, self._pass, self._ranks, self._writer = (
            run,
            shared_pass,
            shared_pass.ranks,
            writer,
        )
        self._watch = Watch(run, steps_before=plan.resume_at or 0)
        self._holdout = holdout
        self._from_step = self._step = plan.resume_at or 0
        self._taken: _Taken | None = None
        self._caveats = caveats
        self._clip_levels = (
            ClipLevels(plan.levels, plan.clip_headroom) if plan.individual_clipping else None
        )
        self._filtered: FilteredClipping | None = None
        if plan.privacy_filter is not None:
            self._filtered = FilteredClipping(
                plan.privacy_filter, self._clip_levels, len(plan.ids), plan.units
            )
        self._lost = False  # an error of the disk ended the log, and training goes on
        self._training_seconds = self._training_since = 0.0
        self._first_draw = ""
        self._unlogged: list[StepSetting] = []
        self._exact_rows: list[NDArray[np.float64]] = []
        self._exact_seconds = 0.0
        self._trained: Batch | None = None  # of the step under way
        self._free: list[Batch | None] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch the run while the block trains; what was seen is logged when it ends."""
        if self._plan.resume_at is not None:
            self.write(lambda writer: writer.truncate(self._step))
            if self._holdout is not None:
                self._holdout.truncate(self._step)
            self._ranks.gather("the start", None)  # nobody reads on before the log was cut
            if self._clip_levels is not None and self._step:
                self._clip_levels.restore(self._run_dir)
            if self._filtered is not None and self._step:
                self._filtered.restore(NormLog.open(self._run_dir), read_left_out(self._run_dir))
        self._take()
        try:
            with self._watch.watching(
                self._before_step, self._after_step, thresholds=self._thresholds()
            ):
                self._training_since = time.perf_counter()
                yield
            self._tell("the end of the block", None, None)  # what was drawn since the last step
        finally:  # also on Ctrl-C and errors: the steps that were taken are logged
            with deferred_interrupts():
                self.write(self._flush)

    def write(self, write: Callable[[NormLogWriter], None]) -> None:
        """Write to disk, where this rank does and no error there has ended the log; see `Recorder`, on_write_error."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            if self._plan.stops_on_write_error:
                raise
            self._lost, self._writer, self._taken = True, None, None
            self._unlogged, self._free, self._exact_rows = [], [], []
            warnings.warn(
                f"the log in {self._run_dir} cannot be written ({error}): it ends before step {self._step}, and training goes "
                "on; later steps are in no account",
                PrivacyWarning,
                stacklevel=2,
            )

    def bring_up_to_date(self) -> int:
        """Log every step that was taken, and return their number."""
        with deferred_interrupts():
            self.write(self._flush)
        return self._step

    def finish(self, writer: NormLogWriter) -> None:
        """Say that the run ended as its loop meant it to."""
        writer.finish(self.evidence())
        if self._holdout is not None:
            self._holdout.finish(self.evidence())

    def evidence(self) -> dict[str, Any]:
        """What has been counted in this session."""
        self._first_draw = self._first_draw or fingerprint_of_state(
            self._watch.first_random_state, self._plan.run_id
        )
        return {
            "from_step": self._from_step,
            "seeded": self._plan.seeded,
            "caveats": self._caveats,
            "training_seconds": round(self._training_seconds, 6),
            "ranks": self._ranks.size,
            "first_draw": self._first_draw,
            **self._watch.evidence(),
        }

    def _thresholds(self) -> Thresholds | None:
        """What examples are clipped at where it is not max_grad_norm."""
        filtered = self._filtered
        if filtered is None:
            return None if self._clip_levels is None else self._clip_levels.thresholds

        def charged(positions: NDArray[np.int64], max_grad_norm: float) -> Tensor:
            # Before the first batch of the step is clipped.
            filtered.charge(self._step, self._watch.coming_setting(max_grad_norm))
            return filtered.thresholds(positions, max_grad_norm)

        return charged

    def _before_step(self, setting: StepSetting, trained: TrainedBatch | None) -> None:
        """Keep the norms that training clips at this step, and hold them against those recorded for it."""
        self._trained = None
        recorded = None if self._taken is None else self._taken.everybody
        needed = recorded is not None or self._policy.batch_norms or self._filtered is not None
        batch = self._tell(f"step {self._step}", setting, trained, needed=needed)
        if self._filtered is not None:
            self._filtered.charge(self._step, setting)  # also where nobody was drawn
            if batch is not None and not np.isfinite(batch[1]).all():
                raise EvidenceError(
                    f"a gradient of step {self._step} is infinite or NaN: even clipped at 0 it would reach the parameters; "
                    "look at the loss, or clamp it"
                )
        if batch is None or (recorded is None and not self._policy.batch_norms):
            return
        positions, norms = batch
        check_norms(norms, self._ids[positions])  # before a NaN reaches the parameters
        slack = self._pass.norm_pass.slack
        if (
            recorded is not None and not self._pass.norm_pass.caveats
        ):  # of another draw of dropout they say nothing
            self._watch.tally.compare(
                recorded[positions],
                norms,
                setting.max_grad_norm,
                ghost_slack=slack if self._run.is_ghost else None,
            )
        self._trained = positions, norms * (1 + slack)

    def _tell(
        self,
        moment: str,
        setting: StepSetting | None,
        trained: TrainedBatch | None,
        *,
        needed: bool = False,
    ) -> Batch | None:
        """Tell the other ranks what this one saw, and take in what they saw: the whole batch, where its norms are needed."""
        norms = trained.norms.cpu().numpy() if trained is not None and needed else None
        mine = self._watch.to_message(
            setting, None if trained is None else trained.positions, norms
        )
        parts = self._ranks.gather(moment, mine)
        check_together(
            moment, [part.shared for part in parts], [part.sampling_seed for part in parts]
        )
        for rank, part in enumerate(parts):
            if rank != self._ranks.rank:
                self._watch.tally.add(part.counted)
        return whole_batch(moment, parts)

    def _after_step(self, setting: StepSetting) -> None:
        self._training_seconds += time.perf_counter() - self._training_since
        with deferred_interrupts():
            if self._clip_levels is not None:
                self._clip_levels.settle(setting.max_grad_norm)
            taken, self._taken = self._taken, None
            if taken is not None:
                self.write(lambda writer: self._write_taken(writer, taken, setting))
            if self._writer is not None:
                self._unlogged.append(setting)
                if self._policy.batch_norms:
                    self._free.append(self._trained)
            self._step += 1
            if self._policy.due(self._step) or len(self._unlogged) >= FLUSH_STEPS:
                self.write(self._flush)
        if not self._lost:
            self._take()
        self._training_since = time.perf_counter()

    def _take(self) -> None:
        """Take the norms that the step about to start depends on: of everybody if due, else of the reference examples."""
        start = time.perf_counter()
        if self._policy.due(self._step):
            norms, targets = self._pass.norms(f"the pass before step {self._step}")
            self._taken = _Taken(norms, norms[self._exact], targets, time.perf_counter() - start)
            if self._clip_levels is not None:
                self._clip_levels.take(norms)
            if self._holdout is not None:
                self._holdout.take()
        elif len(self._exact):
            norms, targets = self._pass.norms(f"the pass before step {self._step}", self._exact)
            self._taken = _Taken(None, norms, targets, time.perf_counter() - start)

    def _write_taken(self, writer: NormLogWriter, taken: _Taken, setting: StepSetting) -> None:
        if taken.everybody is not None:
            writer.record(
                self._step,
                with_headroom(taken.everybody, self._plan.clip_headroom, setting.max_grad_norm),
                max_grad_norm=setting.max_grad_norm,
                targets_fingerprint=taken.targets_fingerprint,
                seconds=taken.seconds,
            )
        else:
            self._exact_seconds += taken.seconds
        if self._holdout is not None:
            self._holdout.write(self._step, setting)
        if len(self._exact):
            self._exact_rows.append(taken.exact)

    def _flush(self, writer: NormLogWriter) -> None:
        """Log the steps, the reference examples' rows and the batch norms seen since the last flush."""
        first = self._step - len(self._unlogged)
        clips = np.array([setting.max_grad_norm for setting in self._unlogged])
        if self._free:
            writer.free(first, self._free, clips)
            self._free = []
        if self._exact_rows:
            writer.exact(first, np.stack(self._exact_rows), clips, self._exact_seconds)
            self._exact_rows, self._exact_seconds = [], 0.0
        if self._filtered is not None:
            positions, steps = self._filtered.newly_left_out()
            if len(positions):
                writer.left_out(first, len(self._unlogged), positions, steps)
                self._filtered.logged()
        evidence = self.evidence()
        for setting, count in list(_runs(self._unlogged)):
            writer.steps(first, count, **vars(setting), evidence=evidence)
            if self._holdout is not None:
                self._holdout.steps(first, count, setting, evidence)
            first += count
            del self._unlogged[
                :count
            ]  # one by one: what fails after this line must not be logged twice


@dataclass(frozen=True)
class _Taken:
    """Norms at the parameters of the step about to start; `everybody` where a full record is due."""

    everybody: NDArray[np.float64] | None
    exact: NDArray[np.float64]
    targets_fingerprint: str
    seconds: float


def _runs(settings: list[StepSetting]) -> Iterator[tuple[StepSetting, int]]:
    """Group consecutive equal settings."""
    start = 0
    for stop in range(1, len(settings) + 1):
        if stop == len(settings) or settings[stop] != settings[start]:
            yield settings[start], stop - start
            start = stop
