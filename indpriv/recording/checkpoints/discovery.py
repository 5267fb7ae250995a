"""Finds the checkpoints of a run in a folder and their steps, without guessing. Sensitive.

A checkpoint of step t is the model after t updates. Norms at it are those of step t, as in a
Recorder's log.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from indpriv._folders import named_by_person
from indpriv.errors import InputError
from indpriv.recording.checkpoints import step_names
from indpriv.recording.checkpoints.safe_files import is_checkpoint, read_content
from indpriv.recording.checkpoints.weights import LoadFn, fingerprint_of, state_of

# Keys of indpriv and most scripts, of Lightning, and of others.
_STEP_KEYS = ("step", "global_step", "steps", "iteration")
_MAX_STEP = step_names.MAX_STEP
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer")

Span = tuple[float, float, int]
"""(noise_multiplier, sample_rate, steps) of consecutive steps, as in Opacus's accountants."""


@dataclass(frozen=True)
class SavedModel:
    """One checkpoint.

    Attributes:
        path: its file or folder.
        step: number of updates that the model has had.
        history: history of Opacus's accountant from the first step; () if the file has none.
        clipping_moves: the file contains the state of an Opacus clipping scheduler, so
            max_grad_norm is not one number.
        n_trained: number of parameter tensors in the optimizer state of the file, or None.
        said_by: what the step is known from.
    """

    path: Path
    step: int
    history: tuple[Span, ...]
    clipping_moves: bool
    n_trained: int | None = None
    said_by: str = ""


@dataclass(frozen=True)
class Discovery:
    """The checkpoints in a folder.

    Attributes:
        models: one for each step, in order.
        notes: what a reader should know: duplicates, gaps, names that contradict the step inside.
        problems: what prevents a replay, each with a remedy.
    """

    models: tuple[SavedModel, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def discover(
    folder: str | Path, load: LoadFn | None = None, step_of: str | Sequence[str] = ()
) -> Discovery:
    """Find, read and order the checkpoints in a folder, or in its subfolder `checkpoints`.

    The user's function `load` is called only if two files have the same step, see `state_of`.

    Raises:
        InputError: the folder does not exist, or contains nothing that looks like a checkpoint, or
            `step_of`, as of `StepOptions`, cannot be followed.
    """
    paths = checkpoint_paths(Path(folder))
    said = step_names.steps_said(step_of, [path.name for path in paths]) if step_of else {}
    found: list[SavedModel] = []
    unknown: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    for path in paths:
        try:
            if model := _read_model(path, said, notes):
                found.append(model)
            else:
                unknown.append(path.name)
        except InputError as error:
            problems.append(str(error))
    if unknown:
        some = f"{step_names.STEP_OF} matches only some of the checkpoints: " if said else ""
        problems.append(
            f"{some}the step of {step_names.listed(unknown)} is neither in the file (step, "
            "global_step, trainer_state.json, an Opacus accountant) nor after the word step in its "
            f"name. Say how many updates it has had, e.g. {step_names.what_to_type(unknown)}"
        )
    models = _one_for_each_step(found, load, notes, problems)
    problems += _contradictory_histories(models)
    return Discovery(tuple(models), (*notes, *_gaps(models)), tuple(problems))


def checkpoint_paths(folder: Path) -> list[Path]:
    """Paths of what looks like a checkpoint, in natural order; InputError if nothing does."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; pass the folder of the checkpoints")
    named_by_person(folder)
    for place in (folder, folder / "checkpoints"):
        paths = [path for path in place.iterdir() if is_checkpoint(path)] if place.is_dir() else []
        # A link to another checkpoint there, such as last.ckpt, is the same once more.
        paths = [p for p in paths if not p.is_symlink() or p.resolve().parent != place.resolve()]
        if paths:
            return sorted(paths, key=lambda path: natural_key(path.name))
    names = sorted(item.name for item in folder.iterdir())
    content = f"it contains {step_names.listed(names)}" if names else "it is empty"
    raise InputError(
        f"{folder} contains no checkpoints ({content}); expected are files such as step_10.pt, "
        "epoch=3-step=400.ckpt or model.safetensors, or folders such as checkpoint-500"
    )


def natural_key(name: str) -> str:
    """Sorting key that reads digits as numbers: step_9 comes before step_10."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(255), name)


def _read_model(path: Path, said: Mapping[str, int], notes: list[str]) -> SavedModel | None:
    """A checkpoint, or None if its step is not known; contradictions about it become notes.

    What its accountant counted comes first, then what the user says, the step stored inside, and
    its name. The tensors are released at once, so that memory does not grow with the number of
    checkpoints.
    """
    content = read_content(path)
    values = content.values if isinstance(content.values, Mapping) else {}
    stored = content.step if content.step is not None else _stored_step(values)
    history = _history(path, values)
    counted = None if history is None else sum(steps for _, _, steps in history)
    named = None if said else step_names.step_in_name(path.name)
    words = "its accountant", step_names.STEP_OF, "the step stored inside", "its name"
    steps = zip(words, (counted, said.get(path.name), stored, named), strict=True)
    known = {source: step for source, step in steps if step is not None}
    if not known:
        return None
    decided, step = next(iter(known.items()))
    for source, other in known.items():
        impossible = other > step or (other < step and source == step_names.STEP_OF)
        if counted is not None and impossible:
            raise InputError(
                f"{str(path)!r} is of step {other} by {source}, but the Opacus accountant inside "
                f"counted {counted} steps. If it was restarted on resuming, its epsilon is too "
                "small: save these models' state_dict without it, and pass the settings of all "
                f"steps as options. If {source} counts something else, correct it"
            )
        if other != step:
            notes.append(f"{path.name!r} is of step {step} by {decided}, not {other} by {source}")
    moves = "grad_clip_scheduler_state_dict" in values
    return SavedModel(path, step, history or (), moves, _n_trained(values), decided)


def _n_trained(values: Mapping[Any, Any]) -> int | None:
    """The number of parameter tensors that the optimizer in a file trained."""
    several = values.get("optimizer_states")  # of Lightning
    first = several[0] if isinstance(several, list) and len(several) == 1 else None
    for state in (*(values.get(key) for key in _OPTIMIZER_KEYS), first):
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups):
            lists = [group.get("params") for group in groups]
            return sum(len(params) for params in lists if isinstance(params, list))
    return None


def _stored_step(values: Mapping[Any, Any]) -> int | None:
    for key in _STEP_KEYS:
        value = values.get(key)
        if isinstance(value, Tensor):
            value = value.item() if value.numel() == 1 and not value.is_floating_point() else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_STEP:
            return value
    return None


def _history(path: Path, values: Mapping[Any, Any]) -> tuple[Span, ...] | None:
    """The checked history of the accountant that Opacus or indpriv saved, or None."""
    opacus = values.get("privacy_accountant_state_dict")
    ours = values.get("accountant_history")
    history = opacus.get("history") if isinstance(opacus, Mapping) else ours
    if history is None:
        return None
    if not isinstance(history, list | tuple) or not all(_is_span(span) for span in history):
        raise InputError(
            f"{path} has an accountant's history that is not a list of (noise_multiplier, "
            "sample_rate, steps); save it again without it, and pass the settings as options"
        )
    merged: list[Span] = []  # consecutive spans of equal settings become one
    for noise, rate, steps in history:
        before = merged.pop() if merged and merged[-1][:2] == (noise, rate) else (0.0, 0.0, 0)
        merged.append((float(noise), float(rate), before[2] + int(steps)))
    return tuple(merged)


def _is_span(span: Any) -> bool:
    match span:
        case [int() | float() as noise, int() | float() as rate, int() as steps]:
            in_range = 0 < noise < math.inf and 0 < rate <= 1 and 0 < steps <= _MAX_STEP
            return in_range and bool not in map(type, span)
    return False


def _one_for_each_step(
    found: Sequence[SavedModel], load: LoadFn | None, notes: list[str], problems: list[str]
) -> list[SavedModel]:
    """Models in order of their steps; different models of one step are a problem."""
    by_step: dict[int, list[SavedModel]] = {}
    for model in found:
        by_step.setdefault(model.step, []).append(model)
    several = {step: models for step, models in sorted(by_step.items()) if len(models) > 1}
    for step, models in several.items():
        names = [model.path.name for model in models]
        try:
            different = len({_nameless_fingerprint(model.path, load) for model in models}) > 1
        except InputError as error:
            problems.append(str(error))
            continue
        if different:
            problems.append(
                f"{step_names.listed(names)} are all of step {step} by {models[0].said_by}, with "
                "different parameters: keep one of them, or only the checkpoints of one run, or "
                f"say their steps, e.g. {step_names.what_to_type(names)}"
            )
        else:
            listed = step_names.listed(names)
            notes.append(f"{listed} are the same model, of step {step}; it is replayed once")
    return [models[0] for _, models in sorted(by_step.items())]


def _nameless_fingerprint(path: Path, load: LoadFn | None) -> str:
    """Fingerprint of a checkpoint's parameters in their order, whatever a wrapper calls them."""
    tensors = state_of(read_content(path), load).values()
    return fingerprint_of({f"{position:09d}": tensor for position, tensor in enumerate(tensors)})


def _contradictory_histories(models: Sequence[SavedModel]) -> list[str]:
    """Each accountant's history must continue the one before, or the checkpoints mix runs."""
    for earlier, later in pairwise(model for model in models if model.history):
        *whole, last = earlier.history
        *same, after = later.history[: len(earlier.history)]
        if same != whole or after[:2] != last[:2] or after[2] < last[2]:
            return [
                f"the accountant's history in {later.path.name!r} does not continue that in "
                f"{earlier.path.name!r}: they are from two runs, or the accountant was restarted; "
                "pass the checkpoints of one run"
            ]
    return []


def _gaps(models: Sequence[SavedModel]) -> list[str]:
    """A note on neighbours that are further apart than usual."""
    gaps = [(later.step - earlier.step, earlier.step) for earlier, later in pairwise(models)]
    usual = sorted(gaps)[len(gaps) // 2][0] if gaps else 0
    wide = [f"{start} and {start + gap}" for gap, start in gaps if gap > 1.5 * usual]
    some = "; ".join(wide[:3]) + "; ..." * (len(wide) > 3)
    text = f"checkpoints are usually {usual} steps apart, but there is none between {some}"
    return [text] if wide else []
