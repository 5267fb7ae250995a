"""Checkpoints of a run: tensors and numbers only, so that reading one cannot run code."""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from indpriv._files import write_atomically
from indpriv.errors import EvidenceError, InputError

SCHEMA = 1
FOLDER = "checkpoints"
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
    path.parent.mkdir(mode=0o700, exist_ok=True)
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
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; only tensors and numbers are accepted.

    Raises:
        InputError: no such file, or a newer schema.
        EvidenceError: a damaged file, one that would run code, or one of another program.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EvidenceError(
            f"{path} is damaged, or holds more than tensors and numbers: {reason}"
        ) from error
    if not isinstance(content, dict) or any(key not in content for key in _KEYS):
        raise EvidenceError(
            f"{path} is not a checkpoint of an indpriv run; those hold {', '.join(_KEYS)}"
        )
    if content["schema"] > SCHEMA:
        raise InputError(
            f"{path} has schema {content['schema']}, this version reads up to {SCHEMA}; update "
            "indpriv"
        )
    return Checkpoint(
        int(content["step"]), content["model_state_dict"], content["accountant_history"] or []
    )


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, ordered by the step in their names."""
    found = {}
    for path in (run_dir / FOLDER).glob("step-*.pt"):
        match = re.fullmatch(r"step-(\d+)\.pt", path.name)
        if match:
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]
