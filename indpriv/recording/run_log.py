"""The logs of a run while it trains: of training and, if asked for, test examples. Sensitive.

Test examples are never trained on. The log of their norms tells what their epsilon would have been
on the same trajectory, with which the training examples' epsilons are compared if an attack is
judged by epsilon.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from indpriv._arrays import FloatArray
from indpriv._folders import make_folder
from indpriv.errors import PrivacyWarning
from indpriv.norm_log.run_files import HOLDOUT
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.step_settings import StepSetting
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.recording.clipping.filtered import FilteredClipping
from indpriv.recording.clipping.individual import with_headroom
from indpriv.recording.data_passes import Measured
from indpriv.recording.opacus.ranks import Batch
from indpriv.recording.plan import Plan
from indpriv.recording.training_data import length

FLUSH_STEPS = 256  # number of steps that a crash may lose


@dataclass(frozen=True)
class TakenNorms:
    """Norms at the parameters that the coming step starts from."""

    reference: FloatArray  # (n_reference,) of the reference examples
    full: Measured | None  # of all training examples, if a full record is due
    holdout: Measured | None  # of all test examples, if they are recorded at this step
    seconds: float  # of the pass over training examples

    def map(self, function: Callable[[FloatArray], FloatArray]) -> TakenNorms:
        """The same with a function of every norm in their place."""
        full, holdout = (
            measured and replace(measured, norms=function(measured.norms))
            for measured in (self.full, self.holdout)
        )
        return TakenNorms(function(self.reference), full, holdout, self.seconds)


@contextmanager
def opened_log(plan: Plan, header: LogHeader, *, writes: bool) -> Iterator[RunLog]:
    """Start or continue the logs of a run, on the rank that writes, and close them at the end."""
    with ExitStack() as files:
        writers: list[NormLogWriter] = []

        def start(folder: str, *arguments: Any) -> None:
            path = make_folder(make_folder(plan.run_dir), folder)
            writers.append(NormLogWriter(path, *arguments))
            files.callback(writers[-1].close)

        if writes:
            data = plan.data
            start("", header, data.ids, data.ids_of_units, plan.reference_positions)
        if writes and plan.record_holdout:
            # A batch or the reference examples hold no test example, and no filter charges one.
            policy = {**header.policy, "free_records": False, "exact_examples": 0}
            ids = np.arange(length(plan.data.test_set, "test_set"))
            no_positions = np.zeros(0, dtype=np.int64)
            test_header = replace(header, policy=policy, privacy_filter={})
            start(HOLDOUT, test_header, ids, None, no_positions)
        yield RunLog(plan, writers)


class RunLog:
    """What was seen since the last line of the log, and the writing of it."""

    def __init__(self, plan: Plan, writers: Sequence[NormLogWriter]) -> None:
        """Begin; writers: of training, then test examples; none on ranks that do not write."""
        self._plan = plan
        self._writers = list(writers)
        self._first = plan.resume_at or 0  # the first step that is not logged yet
        self._logged = [self._first] * len(self._writers)  # the same of each writer
        self._settings: list[StepSetting] = []  # of the steps that are not logged yet
        self._batches: list[Batch | None] = []  # of the same steps, if batch norms are kept
        self._reference_rows: list[FloatArray] = []
        self._reference_seconds = 0.0
        self.is_lost = False  # a disk error ended the log, and training goes on

    @property
    def writes(self) -> bool:
        """Whether this rank writes, and no disk error has ended the log."""
        return bool(self._writers)

    @property
    def is_due(self) -> bool:
        """Whether as many steps wait as a crash may lose."""
        return len(self._settings) >= FLUSH_STEPS

    @contextmanager
    def disk_errors_handled(self) -> Iterator[None]:
        """Let a disk error in the block end training, or only the log: see on_write_error."""
        try:
            yield
        except OSError as error:
            if self._plan.on_write_error == "stop":
                raise
            self.is_lost = True
            self._writers, self._settings, self._batches, self._reference_rows = [], [], [], []
            # At this line: a warning at a line of torch, which calls us, would be filtered out.
            warnings.warn(
                f"the log in {self._plan.run_dir} cannot be written ({error}): it ends before step "
                f"{self._first}, and training goes on; no account contains the later steps",
                PrivacyWarning,
                stacklevel=1,
            )

    def truncate(self, step: int) -> None:
        """Declare void what was logged beyond a step."""
        with self.disk_errors_handled():
            for writer in self._writers:
                writer.truncate(step)

    def add_record(self, step: int, taken: TakenNorms, setting: StepSetting) -> None:
        """Log the norms taken before a step, once its settings are known."""
        with self.disk_errors_handled():
            for writer, measured in zip(self._writers, (taken.full, taken.holdout), strict=False):
                if measured is None:
                    continue
                clip = setting.max_grad_norm
                writer.record(
                    step,
                    with_headroom(measured.norms, self._plan.clip_headroom, clip),
                    max_grad_norm=clip,
                    targets_fingerprint=measured.targets_fingerprint,
                    seconds=measured.seconds,
                )
        if self._writers and len(taken.reference):
            self._reference_rows.append(taken.reference)
            self._reference_seconds += taken.seconds if taken.full is None else 0.0

    def add_step(self, setting: StepSetting, batch: Batch | None) -> None:
        """Keep the settings and the batch of a step for the next flush."""
        if self._writers:
            self._settings.append(setting)
            if self._plan.policy.batch_norms:
                self._batches.append(batch)

    def flush(self, counts: Callable[[], SessionCounts], filtered: FilteredClipping | None) -> None:
        """Log what was seen since the last flush; counts: what has been counted so far."""
        if self._writers:
            with self.disk_errors_handled():
                self._write_details(self._writers[0], filtered)
                self._write_steps(counts())

    def _write_details(self, writer: NormLogWriter, filtered: FilteredClipping | None) -> None:
        """Batch norms, rows of the reference examples, and which examples the filter left out."""
        clips = np.array([setting.max_grad_norm for setting in self._settings])
        if self._batches:
            writer.free(self._first, self._batches, clips)
            self._batches = []
        if self._reference_rows:
            rows = np.stack(self._reference_rows)
            writer.exact(self._first, rows, clips, self._reference_seconds)
            self._reference_rows, self._reference_seconds = [], 0.0
        if filtered is not None:
            positions, steps = filtered.newly_left_out()
            if len(positions):
                writer.left_out(self._first, len(self._settings), positions, steps)
                filtered.logged()

    def _write_steps(self, counts: SessionCounts) -> None:
        """One line for each run of equal settings."""
        for setting, equal in [(one, list(same)) for one, same in groupby(self._settings)]:
            # Counted now, since a later line may fail, and none must be logged twice.
            for number, writer in enumerate(self._writers):
                if self._logged[number] == self._first:
                    writer.steps(self._first, len(equal), **vars(setting), counts=counts)
                    self._logged[number] += len(equal)
            self._first += len(equal)
            del self._settings[: len(equal)]

    def finish(self, counts: SessionCounts) -> None:
        """Say that the run ended as its loop meant it to."""
        with self.disk_errors_handled():
            for writer in self._writers:
                writer.finish(counts)
