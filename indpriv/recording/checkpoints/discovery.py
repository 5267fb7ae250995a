"""Finds the checkpoints of a run in a folder and their steps, whatever their names. Sensitive.

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

from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import is_checkpoint, read_content
from indpriv.recording.checkpoints.weights import LoadFn, fingerprint_of, state_of

# Keys of indpriv and most scripts, of Lightning, and of others.
_STEP_KEYS = ("step", "global_step", "steps", "iteration")
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer")
_STEP_WORDS = ("step", "steps", "iter", "iteration", "checkpoint", "ckpt", "globalstep")
_EPOCH_WORDS = ("epoch", "epochs", "ep", "e")
_MAX_STEP = 10**12
_NAMED = 3  # files or gaps listed in a message

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
    """

    path: Path
    step: int
    history: tuple[Span, ...]
    clipping_moves: bool
    n_trained: int | None = None


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


def discover(folder: str | Path, load: LoadFn | None = None) -> Discovery:
    """Find, read and order the checkpoints in a folder, or in its subfolder `checkpoints`.

    The user's function `load` is called only if two files have the same step, see `state_of`.

    Raises:
        InputError: the folder does not exist, or contains nothing that looks like a checkpoint.
    """
    paths = checkpoint_paths(Path(folder))
    found: list[SavedModel] = []
    notes: list[str] = []
    problems: list[str] = []
    for path, name_step in zip(paths, steps_in_names([path.name for path in paths]), strict=True):
        try:
            model, contradictions = _read_model(path, name_step)
        except InputError as error:
            problems.append(str(error))
            continue
        found.append(model)
        notes += contradictions
    models = _one_for_each_step(found, load, notes, problems)
    problems += _contradictory_histories(models)
    return Discovery(tuple(models), (*notes, *_gaps(models)), tuple(problems))


def checkpoint_paths(folder: Path) -> list[Path]:
    """Paths of what looks like a checkpoint, in natural order; InputError if nothing does."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; pass the folder of the checkpoints")
    for place in (folder, folder / "checkpoints"):
        paths = [path for path in place.iterdir() if is_checkpoint(path)] if place.is_dir() else []
        if paths:
            return sorted(paths, key=lambda path: natural_key(path.name))
    names = sorted(item.name for item in folder.iterdir())[:_NAMED]
    content = f"it contains {', '.join(names)}" if names else "it is empty"
    raise InputError(
        f"{folder} contains no checkpoints ({content}); expected are files such as step_10.pt, "
        "epoch=3-step=400.ckpt or model.safetensors, or folders such as checkpoint-500"
    )


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorting key that reads digits as numbers: step_9 comes before step_10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def steps_in_names(names: Sequence[str]) -> list[int | None]:
    """The step in each file name, or None if there is none.

    A number after a word for step counts; else the only number that is not an epoch; else the only
    number in which names of the same pattern differ (resnet20_400.pt, resnet20_800.pt).
    """
    steps: list[int | None] = []
    patterns: dict[str, list[int]] = {}
    numbers: list[list[tuple[str, int]]] = []
    for position, name in enumerate(names):
        found = re.findall(r"([A-Za-z]*)[^A-Za-z\d]*(\d+)", name)
        numbers.append([(word.lower(), int(digits)) for word, digits in found])
        patterns.setdefault(re.sub(r"\d+", "#", name), []).append(position)
        stepped = [number for word, number in numbers[-1] if word in _STEP_WORDS]
        others = [number for word, number in numbers[-1] if word not in _EPOCH_WORDS]
        steps.append(stepped[-1] if stepped else others[0] if len(others) == 1 else None)
    for positions in patterns.values():
        columns = zip(*(numbers[position] for position in positions), strict=True)
        varying = [index for index, column in enumerate(columns) if len(set(column)) > 1]
        if len(varying) == 1 and numbers[positions[0]][varying[0]][0] not in _EPOCH_WORDS:
            for position in positions:
                if steps[position] is None:
                    steps[position] = numbers[position][varying[0]][1]
    return [step if step is not None and step <= _MAX_STEP else None for step in steps]


def _read_model(path: Path, name_step: int | None) -> tuple[SavedModel, list[str]]:
    """A checkpoint, and notes on contradictions about its step.

    What its accountant counted comes first, then the step stored inside, then its name. The tensors
    are released at once, so that memory does not grow with the number of checkpoints.
    """
    content = read_content(path)
    values = content.values if isinstance(content.values, Mapping) else {}
    stored = content.step if content.step is not None else _stored_step(values)
    history = _history(path, values)
    counted = None if history is None else sum(steps for _, _, steps in history)
    step = next((value for value in (counted, stored, name_step) if value is not None), None)
    if step is None:
        raise InputError(
            f"the step of {path} is not known, neither from the file (step, global_step, an Opacus "
            "accountant) nor from its name; name it after the number of updates that the model has "
            "had, e.g. step_400.pt"
        )
    notes = []
    decided = "its accountant" if counted is not None else "the step stored inside"
    for other, source in ((stored, "the step stored inside"), (name_step, "its name")):
        if other is None or other == step:
            continue
        if counted is not None and other > counted:
            raise InputError(
                f"{path} is of step {other} by {source}, but the Opacus accountant inside counted "
                f"{counted} steps. If the accountant was restarted on resuming, its epsilon is too "
                "small: save these models' state_dict without it, and pass the settings of all "
                f"steps as options. If {source} counts something else, rename the file or save it "
                "again"
            )
        notes.append(f"{path.name} is of step {step} by {decided}, not {other} as {source} says")
    moves = "grad_clip_scheduler_state_dict" in values
    return SavedModel(path, step, history or (), moves, _n_trained(values)), notes


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
    history = (
        opacus.get("history") if isinstance(opacus, Mapping) else values.get("accountant_history")
    )
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
    if not (isinstance(span, list | tuple) and len(span) == 3):
        return False
    noise, rate, steps = span
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in span):
        return False
    return (
        isinstance(steps, int)
        and 0 < steps <= _MAX_STEP
        and math.isfinite(noise)
        and noise > 0
        and 0 < rate <= 1
    )


def _one_for_each_step(
    found: Sequence[SavedModel], load: LoadFn | None, notes: list[str], problems: list[str]
) -> list[SavedModel]:
    """Models in order of their steps; different models of one step are a problem."""
    by_step: dict[int, list[SavedModel]] = {}
    for model in found:
        by_step.setdefault(model.step, []).append(model)
    for step, models in sorted(by_step.items()):
        if len(models) == 1:
            continue
        names = ", ".join(model.path.name for model in models)
        try:
            different = len({_nameless_fingerprint(model.path, load) for model in models}) > 1
        except InputError as error:
            problems.append(str(error))
            continue
        if different:
            problems.append(
                f"{names} are all of step {step}, with different parameters: keep one of them, or "
                "only the checkpoints of one run"
            )
        else:
            notes.append(f"{names} are the same model, of step {step}; it is replayed once")
    return [models[0] for _, models in sorted(by_step.items())]


def _nameless_fingerprint(path: Path, load: LoadFn | None) -> str:
    """Fingerprint of a checkpoint's parameters in their order, whatever a wrapper calls them."""
    tensors = state_of(read_content(path), load).values()
    return fingerprint_of({f"{position:09d}": tensor for position, tensor in enumerate(tensors)})


def _contradictory_histories(models: Sequence[SavedModel]) -> list[str]:
    """Each accountant's history must continue the one before, or the checkpoints mix runs."""
    known = [model for model in models if model.history]
    for earlier, later in pairwise(known):
        if not _continues(earlier.history, later.history):
            return [
                f"the accountant's history in {later.path.name} does not continue that in "
                f"{earlier.path.name}: they are from two runs, or the accountant was restarted; "
                "pass the checkpoints of one run"
            ]
    return []


def _continues(earlier: Sequence[Span], later: Sequence[Span]) -> bool:
    if len(earlier) > len(later):
        return False
    *whole, last = earlier
    same = later[len(whole)]
    return whole == list(later[: len(whole)]) and last[:2] == same[:2] and last[2] <= same[2]


def _gaps(models: Sequence[SavedModel]) -> list[str]:
    """A note on neighbours that are further apart than usual."""
    distances = [(later.step - earlier.step, earlier.step) for earlier, later in pairwise(models)]
    if len(distances) < 2:
        return []
    usual = sorted(distance for distance, _ in distances)[len(distances) // 2]
    wide = [
        f"{start} and {start + distance}" for distance, start in distances if distance > 1.5 * usual
    ]
    if not wide:
        return []
    listed = "; ".join(wide[:_NAMED]) + ("; ..." if len(wide) > _NAMED else "")
    return [f"checkpoints are usually {usual} steps apart, but there is none between {listed}"]
