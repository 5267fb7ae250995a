"""Several seeded runs of audit files in one directory, made once and several at a time."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from audits.training.commands import filter_for
from indpriv.cli.common import progress_bar
from indpriv.errors import InputError

if TYPE_CHECKING:
    from audits.training.config import AuditConfig


@dataclass(frozen=True)
class Trial:
    """One run of several.

    run_dir, audit_dir: where its finished run and audit lie; audited: whether it needs the audit.
    """

    config: AuditConfig
    seed: int
    run_dir: Path
    audit_dir: Path
    audited: bool = True

    def make(self, data_dir: Path | None, device: str) -> None:
        """Do what is not done yet. A run has its final name only once it has ended."""
        from audits.training.checkpoints import can_resume
        from audits.training.dp_sgd import train
        from indpriv.audit import audit

        if not self.run_dir.exists():
            part = self.run_dir.with_name(f"{self.run_dir.name}.part")
            begun = can_resume(part, self.config)
            if part.exists() and not begun:
                shutil.rmtree(part)
            train(
                self.config,
                part,
                seed=self.seed,
                privacy_filter=filter_for(self.config),
                device=device,
                data_dir=data_dir,
                resume=begun,
            )
            part.rename(self.run_dir)
        if self.audited:
            audit(self.run_dir, self.audit_dir)

    @property
    def done(self) -> bool:
        """Whether nothing is left to make.

        Raises:
            InputError: its run was trained from another audit file.
        """
        from indpriv._files import read_json
        from indpriv.audit.audit_directory import SUMMARY
        from indpriv.norm_log.run_files import RUN_JSON

        if not self.run_dir.exists():
            return False
        if read_json(self.run_dir / RUN_JSON)["config"] != self.config.to_dict():
            raise InputError(
                f"{self.run_dir} was trained from another version of the audit file; choose "
                "another --output-dir"
            )
        return not self.audited or (self.audit_dir / SUMMARY).is_file()


def make_trials(
    trials: Sequence[Trial],
    output_dir: Path,
    command: str,
    *,
    jobs: int | None,
    data_dir: Path | None,
    device: str,
) -> None:
    """Make what is not done yet, while no other such command is at work in the directory.

    Args:
        trials: their directories lie in output_dir.
        output_dir: is made if it does not exist.
        command: its name.
        jobs: runs at the same time, each on its share of the cores; default one for each core.
        data_dir: as in `train`.
        device: as in `train`.
    """
    for folder in {output_dir, *(trial.run_dir.parent for trial in trials)}:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with FileLock(output_dir / f"{command}.lock", timeout=0):
            _make([one for one in trials if not one.done], jobs, data_dir, device)
    except Timeout as error:
        raise InputError(
            f"another {command} is at work in {output_dir}; wait until it ends"
        ) from error


def _make(trials: Sequence[Trial], jobs: int | None, data_dir: Path | None, device: str) -> None:
    from indpriv.accountant.blocks import n_cores

    jobs = min(jobs or n_cores(), len(trials))
    with progress_bar() as progress:
        progress("runs", 0, len(trials))
        if jobs < 2:
            for ended, trial in enumerate(trials, 1):
                trial.make(data_dir, device)
                progress("runs", ended, len(trials))
            return
        pool = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_use_threads,
            initargs=(max(1, n_cores() // jobs),),
        )
        try:
            work = [pool.submit(trial.make, data_dir, device) for trial in trials]
            for ended, future in enumerate(as_completed(work), 1):
                future.result()
                progress("runs", ended, len(trials))
        finally:
            pool.shutdown(cancel_futures=True)


def _use_threads(number: int) -> None:
    import torch

    torch.set_num_threads(number)
