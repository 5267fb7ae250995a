"""The logs of a run while it trains, and what run.json says of machine and code. Sensitive.

Test examples are never trained on. The log of their norms tells what their epsilon would have been
on the same trajectory, with which the training examples' epsilons are compared if an attack is
judged by epsilon. run.json contains no names of machines or people, and no paths.
"""

import platform
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import torch

from indpriv._arrays import IntArray
from indpriv._files import on_failure
from indpriv._folders import make_folder
from indpriv.errors import PrivacyWarning
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.recording_policy import RecordingPolicy
from indpriv.norm_log.run_files import HOLDOUT
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.recording.norms.shadow_model import described_parameters
from indpriv.recording.opacus.ranks import Batch
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.training_data import Measured, TrainingData, length

FLUSH_STEPS = 256  # number of steps that a crash may lose
_CPUINFO = Path("/proc/cpuinfo")
_MOST_REFERENCES, _MOST_BYTES = 5, 1 << 26  # one after the other; of a file of git


def described(run: OpacusRun) -> dict[str, Any]:
    """What the header of a log says about the optimizer, the sampler and the model."""
    optimizer: Any = run.optimizer
    settings: dict[str, float | None] = {}
    for name in ("lr", "momentum", "weight_decay"):
        values = {group.get(name) for group in optimizer.param_groups}
        # None if the groups differ, or the optimizer has no such setting.
        (value,) = values if len(values) == 1 else (None,)
        settings[name] = float(value) if isinstance(value, int | float) else None
    truncated = run.sampler == "truncated_poisson"
    return {
        "optimizer": type(optimizer.original_optimizer).__name__,
        "learning_rate": settings.pop("lr"),
        **settings,
        "loss_reduction": optimizer.loss_reduction,
        "expected_batch_size": optimizer.expected_batch_size,
        "secure_mode": bool(optimizer.secure_mode),
        "sampler_class": run.sampler_class,
        **({"max_batch_size": int(run.batch_sampler.max_batch_size)} if truncated else {}),
        "steps_per_epoch": run.steps_per_epoch,
        **described_parameters(run.whole.module),
        "versions": {
            "torch": torch.__version__,
            "opacus": opacus.__version__,
            "python": platform.python_version(),
        },
    }


class RunLog:
    """What was seen since the last line of the log, and the writing of it. Close it at the end.

    Attributes:
        is_lost: a disk error ended the log, and training goes on.
    """

    def __init__(
        self,
        run_dir: Path,
        header: LogHeader,
        data: TrainingData,
        reference_positions: IntArray,
        *,
        first: int,
        writes: bool,
        resumes: bool,
        of_holdout: bool,
        stops: bool,
    ) -> None:
        """Start or continue the logs of a run at step `first`, on the rank that writes.

        resumes: what was logged beyond that step is void.
        stops: a disk error ends training, not only the log; see on_write_error.
        """
        self._run_dir, self._stops, self.is_lost = run_dir, stops, False
        self._headroom = header.run["clip_headroom"]
        self._batch_norms = RecordingPolicy.from_header(vars(header)).batch_norms
        self._first = first  # the first step that is not logged yet
        self._settings: list[StepSetting] = []  # of the steps that are not logged yet
        self._batches: list[Batch | None] = []  # of the same steps, if batch norms are kept
        self._reference: list[Measured] = []  # norms of the reference examples at these steps
        self._writers: list[NormLogWriter] = []  # of training, then of test examples
        self._files = ExitStack()

        def start(*arguments: Any, folder: str = "") -> None:
            path = make_folder(make_folder(run_dir), folder)
            self._writers.append(NormLogWriter(path, *arguments))
            self._files.callback(self._writers[-1].close)

        with on_failure(self.close):
            if writes:
                start(header, data.ids, data.ids_of_units, reference_positions)
            if writes and of_holdout:
                # A batch or the reference examples hold no test example, and no filter charges one.
                policy = {**header.policy, "free_records": False, "exact_examples": 0}
                test_header = replace(header, policy=policy, privacy_filter={})
                ids = np.arange(length(data.test_set, "test_set"))
                start(test_header, ids, None, np.zeros(0, dtype=np.int64), folder=HOLDOUT)
            with self.disk_errors_handled():
                for writer in self._writers if resumes else ():
                    writer.truncate(first)
        self._logged = [first] * len(self._writers)  # the first step each has not logged yet

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
            if self._stops:
                raise
            self.is_lost = True
            self._writers, self._settings, self._batches, self._reference = [], [], [], []
            # At this line: a warning at a line of torch, which calls us, would be filtered out.
            warnings.warn(
                f"the log in {self._run_dir} cannot be written ({error}): it ends before step "
                f"{self._first}, and training goes on; no account contains the later steps",
                PrivacyWarning,
                stacklevel=1,
            )

    def add_step(
        self,
        setting: StepSetting,
        batch: Batch | None,
        records: Sequence[Measured],
        reference: Measured | None,
    ) -> None:
        """Write the records taken before a step; keep the rest of it for the next flush.

        Args:
            setting: of the step.
            batch: norms that training clipped; None if they are not known.
            records: full ones, of training, then of test examples; empty if none was due.
            reference: norms of the reference examples; None if there are none.
        """
        clip = setting.max_grad_norm
        with self.disk_errors_handled():
            for writer, measured in zip(self._writers, records, strict=False):
                writer.record(
                    self._first + len(self._settings),
                    measured.norms + self._headroom * clip,  # rounded when it is written
                    max_grad_norm=clip,
                    targets_fingerprint=measured.targets_fingerprint,
                    seconds=measured.seconds,
                )
        if self._writers:
            self._settings.append(setting)
            self._batches += [batch] if self._batch_norms else []
            self._reference += [] if reference is None else [reference]

    def flush(
        self, counts: Callable[[], SessionCounts], left_out: list[tuple[int, IntArray]]
    ) -> None:
        """Log what was seen since the last flush.

        Args:
            counts: what has been counted so far.
            left_out: steps, and positions that the privacy filter left out there; it is emptied.
        """
        if not self._writers:
            return
        with self.disk_errors_handled():
            self._write_details(self._writers[0], left_out)
            counted = counts()
            for setting, equal in [(one, len(list(same))) for one, same in groupby(self._settings)]:
                # Counted now, since a later line may fail, and none must be logged twice.
                for number, writer in enumerate(self._writers):
                    if self._logged[number] == self._first:
                        writer.steps(self._first, equal, **vars(setting), counts=counted)
                        self._logged[number] += equal
                self._first += equal
                del self._settings[:equal]

    def _write_details(self, writer: NormLogWriter, left_out: list[tuple[int, IntArray]]) -> None:
        """Batch norms, rows of the reference examples, and which examples the filter left out."""
        clips = np.array([setting.max_grad_norm for setting in self._settings])
        if self._batches:
            writer.free(self._first, self._batches, clips)
            self._batches = []
        if self._reference:
            rows = np.stack([measured.norms for measured in self._reference])
            seconds = sum(measured.seconds for measured in self._reference)
            writer.exact(self._first, rows, clips, seconds)
            self._reference = []
        if left_out:
            positions = np.concatenate([positions for _, positions in left_out])
            steps = np.concatenate([np.full(len(positions), step) for step, positions in left_out])
            writer.left_out(self._first, len(self._settings), positions, steps)
            left_out.clear()

    def finish(self, counts: SessionCounts) -> None:
        """Say that the run ended as its loop meant it to."""
        with self.disk_errors_handled():
            for writer in self._writers:
                writer.finish(counts)

    def close(self) -> None:
        """Release the run directory."""
        self._files.close()


def heard_signals() -> list[signal.Signals]:
    """SIGINT and SIGTERM unless they are ignored; none outside the main thread.

    Scripts start background jobs with SIGINT ignored, so that Ctrl-C in the terminal does not stop
    them; ignored signals stay ignored. Stop such a run with SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    both = signal.SIGINT, signal.SIGTERM
    return [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Deliver Ctrl-C and SIGTERM that arrive inside the block when it ends.

    They wait while the log is written: half a step would contradict itself.
    """
    arrived: list[int] = []
    previous = {
        number: signal.signal(number, lambda late, _: arrived.append(late))
        for number in heard_signals()
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


def environment_of(device: torch.device) -> dict[str, Any]:
    """For run.json: the machine, and code_commit if the working folder is in a git repository."""
    commit = _code_commit()
    return {
        "machine": {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        },
        **({} if commit is None else {"code_commit": commit}),
    }


def processor() -> str:
    """Name of the processor, or at least its architecture."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name[^:\n]*:(.*)$", text, re.M)
    return (named and named[1].strip()) or platform.processor() or platform.machine()


def _code_commit() -> str | None:
    """The commit of the repository around the working folder; None without one.

    Git is not called: it runs programs that the repository's settings name.
    """
    try:
        places = [Path.cwd() / ".git", *(above / ".git" for above in Path.cwd().parents)]
        commit = next((_head(git) for git in places if git.exists()), "")
    except (OSError, ValueError):
        return None
    return f"{commit}, perhaps with uncommitted changes" if commit else None


def _head(git: Path) -> str:
    """The commit that a .git names: a folder, or the file of a worktree; empty if it is none."""
    if git.is_file():
        git = git.parent / _start(git).removeprefix("gitdir:").strip()
    shared, found = git / (_start(git / "commondir") or "."), _start(git / "HEAD")
    for _ in range(_MOST_REFERENCES):
        if found.startswith("ref: refs/"):
            name = found.removeprefix("ref: ")
            packed = re.findall(rf"^(\w+) {re.escape(name)}$", _start(shared / "packed-refs"), re.M)
            found = _start(git / name) or _start(shared / name) or "".join(packed)
    return found if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", found) else ""


def _start(path: Path) -> str:
    """The text of a file, as far as it is read; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
