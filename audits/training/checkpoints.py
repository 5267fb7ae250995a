"""Checkpoints of a run, and what it needs to go on from the last one.

Files hold tensors and numbers only, so that reading one cannot run code.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from audits.training.config import AuditConfig
from audits.training.datasets import Dataset
from audits.training.private_setting import PrivateSetting
from audits.training.run_record import record_to_resume
from indpriv._files import write_atomically
from indpriv._folders import make_folder
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.run_files import RESUME
from indpriv.recording.checkpoints.safe_files import read_content
from indpriv.recording.clipping import ClippingRule

SCHEMA = 1
FOLDER = "checkpoints"
MEDIAN = "median"
_KEYS = ("schema", "step", "model_state_dict", "accountant_history")


@dataclass(frozen=True)
class Checkpoint:
    """A saved model.

    Attributes:
        step: number of updates so far; norms recorded at this step are norms of this model.
        model_state_dict: parameters by name, on the CPU.
        accountant_history: (noise_multiplier, sample_rate, steps) of all steps so far, as counted
            by Opacus's accountant.
    """

    step: int
    model_state_dict: dict[str, Tensor]
    accountant_history: list[tuple[float, float, int]]


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """RUN/checkpoints/step-000340.pt."""
    return run_dir / FOLDER / f"step-{step:06d}.pt"


def save_checkpoint(
    run_dir: Path, module: nn.Module, step: int, accountant_history: list[Any] | None
) -> Path:
    """Save a model after `step` updates, atomically and with permissions 0600.

    Args:
        run_dir: the run's directory.
        module: the model itself, without Opacus's wrapper.
        step: number of updates so far.
        accountant_history: history of Opacus's accountant; None if it counts nothing of this run.

    Returns:
        path of the checkpoint.
    """
    path = checkpoint_path(run_dir, step)
    make_folder(run_dir, path.parent.name)
    content = {
        "schema": SCHEMA,
        "step": step,
        "model_state_dict": {
            name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()
        },
        "accountant_history": None
        if accountant_history is None
        else [(float(noise), float(rate), int(steps)) for noise, rate, steps in accountant_history],
    }
    _write(path, content)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; only tensors and numbers are accepted.

    Raises:
        InputError: no such file, or a newer schema.
        EvidenceError: a damaged file, one that would run code, or one of another program.
    """
    content = _read(path, _KEYS, "a checkpoint")
    return Checkpoint(
        int(content["step"]), content["model_state_dict"], content["accountant_history"] or []
    )


@dataclass(frozen=True)
class TrainingState:
    """What a run needs to go on. Sensitive if it is seeded: then it says the coming noise.

    Attributes:
        step: number of updates so far.
        recorder: what `Recorder.state_dict` returned.
        curve: rows of the curve so far, by column.
        model, optimizer: their state_dict.
        clipping: state of the clipping rule; or, as MEDIAN, the private median that was drawn when
            the run began.
        accountant_history: as that of a checkpoint.
        lost: the most steps that crashes may have lost: run, and replaced by others.
        seed: of the run; None if it is not seeded.
        generators: states of the generators of batches and of noise, if it is seeded: it then goes
            on as if it had not stopped. Else none is kept, and new random numbers are drawn, so
            that this file tells nothing about noise.
    """

    step: int
    recorder: Mapping[str, Any]
    curve: Mapping[str, list[float]]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    clipping: Mapping[str, Any]
    accountant_history: list[tuple[float, float, int]]
    lost: int
    seed: int | None
    generators: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        private: PrivateSetting,
        recorder: Mapping[str, Any],
        curve: pd.DataFrame,
        *,
        lost: int,
        seed: int | None,
    ) -> TrainingState:
        """Of a run between two steps."""
        rule, norm = private.optimizer, private.planned.at(0).max_grad_norm
        drawn = {MEDIAN: norm} if private.clipping_norm_epsilon else {}
        found = {} if seed is None else _generators(private)
        return cls(
            step=private.steps_taken,
            recorder=recorder,
            curve={str(name): column.tolist() for name, column in curve.items()},
            model=private.module.state_dict(),
            optimizer=private.optimizer.state_dict(),
            clipping=rule.state() if isinstance(rule, ClippingRule) else drawn,
            accountant_history=list(private.accountant.history),
            lost=lost,
            seed=seed,
            generators={name: found[name].get_state() for name in found},
        )

    def write(self, run_dir: Path) -> None:
        """Write RUN/resume.state, for its owner only, in place of an earlier one."""
        _write(run_dir / RESUME, {"schema": SCHEMA, **vars(self)})

    @classmethod
    def read(cls, run_dir: Path) -> TrainingState:
        """Read it; errors are those of `load_checkpoint`."""
        names = [field.name for field in fields(cls)]
        content = _read(run_dir / RESUME, ("schema", *names), "what is needed to resume a run")
        return cls(**{name: content[name] for name in names})

    def restore(self, private: PrivateSetting) -> None:
        """Put a model, its optimizer, accountant and generators where they were."""
        private.module.load_state_dict(self.model)
        private.optimizer.load_state_dict(self.optimizer)
        if isinstance(private.optimizer, ClippingRule):
            private.optimizer.restore(self.clipping)
        private.accountant.history = [tuple(span) for span in self.accountant_history]
        found = _generators(private)
        for name, state in self.generators.items():
            found[name].set_state(state)
        if self.step < private.total_steps:
            private.set_step(self.step)


def state_to_resume(
    run_dir: Path, config: AuditConfig, dataset: Dataset, seed: int | None
) -> TrainingState:
    """Where a run of this audit, data and seed goes on.

    A run that crashed may have lost all steps up to the next checkpoint.

    Raises:
        InputError: there is no such run, it is finished, or it cannot be resumed.
    """
    if config.attacks.in_run:
        raise InputError(
            f"{config.name} attacks its own run ([attacks] white_box or gradient_canaries), and "
            "what the attack saw of the first steps is lost; train it anew in another directory"
        )
    record = record_to_resume(run_dir, config, RESUME)
    if record["data"]["fingerprint"] != dataset.fingerprint():
        raise InputError(
            f"{run_dir} was trained on other data than {dataset.name} as it is now (canaries, "
            "labels drawn anew by label_epsilon, or another version?); resume it with the data "
            "that it was begun with"
        )
    state = TrainingState.read(run_dir)
    if state.seed != seed:
        before = "no seed" if state.seed is None else f"seed={state.seed}"
        now = "without one" if seed is None else f"with seed={seed}"
        raise InputError(f"{run_dir} was begun with {before}; it cannot go on {now}")
    if record["status"] == "interrupted":
        return state
    every, facts = config.checkpoints.every, record["training"]
    gap = facts["steps_per_epoch"] if isinstance(every, str) else every
    next_saved = min((state.step // gap + 1) * gap, facts["planned_steps"])
    return replace(state, lost=state.lost + next_saved - state.step)


def can_resume(run_dir: Path, config: AuditConfig) -> bool:
    """Whether a directory holds a run of this audit that can go on."""
    try:
        record_to_resume(run_dir, config, RESUME)
    except InputError:
        return False
    return True


def check_new(run_dir: Path) -> None:
    """Raise InputError if a directory holds a run that could be resumed."""
    if (run_dir / RESUME).is_file():
        raise InputError(
            f"{run_dir} already holds a run that has not ended; go on with it (--resume), or "
            "choose another directory"
        )


def _generators(private: PrivateSetting) -> dict[str, torch.Generator]:
    return {"batches": private.loader.generator, "noise": private.optimizer.generator}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    write_atomically(path, buffer.getvalue())


def _read(path: Path, keys: Collection[str], what: str) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        content = read_content(path).values
    except InputError as error:
        raise EvidenceError(
            f"{path} is damaged, or holds more than tensors and numbers: {error}"
        ) from error
    if not isinstance(content, dict) or any(key not in content for key in keys):
        raise EvidenceError(f"{path} is not {what} of an indpriv run; those hold {', '.join(keys)}")
    if content["schema"] not in range(1, SCHEMA + 1):
        raise InputError(
            f"{path} has schema {content['schema']}, this version reads up to {SCHEMA}; update "
            "indpriv"
        )
    return content


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, ordered by the step in their names."""
    found = {}
    for path in (run_dir / FOLDER).glob("step-*.pt"):
        match = re.fullmatch(r"step-(\d+)\.pt", path.name)
        if match:
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]
