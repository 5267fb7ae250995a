"""Finding the checkpoints of a run in a folder, in any order and naming: the step stored inside decides. Sensitive.

A checkpoint of step t is the model after t updates: norms at it are those of step t, as in a Recorder's log.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import Content, is_checkpoint, read_content
from indpriv.recording.checkpoints.weights import LoadFn, fingerprint_of, state_of

_STEP_KEYS = (
    "step",
    "global_step",
    "steps",
    "iteration",
)  # indpriv and most scripts, Lightning, others
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer")
_STEP_WORDS = ("step", "steps", "iter", "iteration", "checkpoint", "ckpt", "globalstep")
_EPOCH_WORDS = ("epoch", "epochs", "ep", "e")
_MAX_STEP = 10**12
_NAMED = 3  # files named in a message

Span = tuple[float, float, int]
"""(noise_multiplier, sample_rate, steps) of consecutive steps, as Opacus's accountants keep them."""


@dataclass(frozen=True)
class SavedModel:
    """One checkpoint.

    Attributes:
        path: its file or folder.
        step: number of updates the model has had.
        history: of Opacus's accountant, from the first step; () where the file holds none.
        clipping_moves: the file holds the state of an Opacus clipping scheduler: max_grad_norm is not one number.
        n_trained: parameter tensors that the optimizer whose state the file holds trained; None without one.
    """

    path: Path
    step: int
    history: tuple[Span, ...]
    clipping_moves: bool
    n_trained: int | None = None


@dataclass(frozen=True)
class Discovery:
    """What a folder holds.

    Attributes:
        models: by step, each step once.
        notes: what a reader should know: duplicates, gaps, names that contradict the step inside.
        problems: what keeps a replay from starting, each with what to do.
    """

    models: tuple[SavedModel, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorting key that reads digits as numbers: step_9 comes before step_10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def discover(folder: str | Path, load: LoadFn | None = None) -> Discovery:
    """Find, read and order the checkpoints in a folder; subfolders count where they are checkpoints themselves.

    Args:
        folder: of the checkpoints, or one with a subfolder `checkpoints`.
        load: see `state_of`; it is called only where two files claim one step.

    Raises:
        InputError: no folder, or nothing in it that looks like a checkpoint.
    """
    problems: list[str] = []
    inside: list[_Inside] = []
    for path in checkpoint_paths(Path(folder)):
        try:
            inside.append(_look_inside(read_content(path)))
        except InputError as error:
            problems.append(str(error))
    found: list[SavedModel] = []
    notes: list[str] = []
    for saved, name_step in zip(
        inside, steps_in_names([saved.path.name for saved in inside]), strict=True
    ):
        try:
            model, note = _identify(saved, name_step)
        except InputError as error:
            problems.append(str(error))
            continue
        found.append(model)
        notes += note
    models, more_notes, more_problems = _one_each(found, load)
    more_problems += _contradictory_histories(models)
    return Discovery(
        tuple(models), tuple(notes + more_notes + _gaps(models)), tuple(problems + more_problems)
    )


def checkpoint_paths(folder: Path) -> list[Path]:
    """Paths of what looks like a checkpoint, in natural order; InputError where there is none."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; pass the folder that holds the checkpoints")
    for place in (folder, folder / "checkpoints"):
        paths = [path for path in place.iterdir() if is_checkpoint(path)] if place.is_dir() else []
        if paths:
            return sorted(paths, key=lambda path: natural_key(path.name))
    held = sorted(item.name for item in folder.iterdir())[:_NAMED]
    raise InputError(
        f"{folder} holds no checkpoints ({'it holds ' + ', '.join(held) if held else 'it is empty'}); expected are files "
        "such as step_10.pt, epoch=3-step=400.ckpt or model.safetensors, or folders such as checkpoint-500"
    )


def steps_in_names(names: Sequence[str]) -> list[int | None]:
    """The step that each file name tells, None where none does.

    A number after a word for step counts; else the only number that is not an epoch; else the only number in which names
    of the same pattern differ (resnet20_400.pt, resnet20_800.pt).
    """
    steps: list[int | None] = []
    patterns: dict[str, list[int]] = {}
    numbers: list[list[tuple[str, int]]] = []
    for position, name in enumerate(names):
        numbers.append(
            [
                (word.lower(), int(digits))
                for word, digits in re.findall(r"([A-Za-z]*)[^A-Za-z\d]*(\d+)", name)
            ]
        )
        patterns.setdefault(re.sub(r"\d+", "#", name), []).append(position)
        stepped = [number for word, number in numbers[-1] if word in _STEP_WORDS]
        others = [number for word, number in numbers[-1] if word not in _EPOCH_WORDS]
        steps.append(stepped[-1] if stepped else others[0] if len(others) == 1 else None)
    for positions in patterns.values():
        columns = [
            index
            for index, column in enumerate(zip(*(numbers[p] for p in positions), strict=True))
            if len(set(column)) > 1
        ]
        if len(columns) == 1 and numbers[positions[0]][columns[0]][0] not in _EPOCH_WORDS:
            for position in positions:
                if steps[position] is None:
                    steps[position] = numbers[position][columns[0]][1]
    return [step if step is not None and step <= _MAX_STEP else None for step in steps]


@dataclass(frozen=True)
class _Inside:
    """What a file says of itself: the tensors are let go at once, so that memory does not grow with their number."""

    path: Path
    stored_step: int | None
    history: tuple[Span, ...] | None
    clipping_moves: bool
    n_trained: int | None


def _look_inside(content: Content) -> _Inside:
    values = content.values if isinstance(content.values, Mapping) else {}
    return _Inside(
        path=content.path,
        stored_step=content.step if content.step is not None else _stored_step(values),
        history=_history(content.path, values),
        clipping_moves="grad_clip_scheduler_state_dict" in values,
        n_trained=_trained(values),
    )


def _identify(saved: _Inside, name_step: int | None) -> tuple[SavedModel, list[str]]:
    """A checkpoint with its step: what its accountant counted, else the step stored inside, else its name's."""
    path, stored = saved.path, saved.stored_step
    counted = None if saved.history is None else sum(steps for _, _, steps in saved.history)
    step = next((value for value in (counted, stored, name_step) if value is not None), None)
    if step is None:
        raise InputError(
            f"{path} tells no step, neither inside (step, global_step, an Opacus accountant) nor by its name; name it after "
            "the number of updates it has had, e.g. step_400.pt"
        )
    others = [(stored, "the step stored beside it"), (name_step, "its name")]
    beyond = [
        (value, by)
        for value, by in others
        if counted is not None and value is not None and value > counted
    ]
    if beyond:
        value, by = beyond[0]
        raise InputError(
            f"{path} is of step {value} by {by}, but the Opacus accountant inside counted {counted} steps. If the accountant "
            "was started again on resuming, its epsilon is too small: save these models' state_dict without it, and give "
            f"the settings of all steps as options. If {by} counts something else, rename the file or save it again"
        )
    decided = "its accountant" if counted is not None else "the step stored inside"
    notes = [
        f"{path.name} is of step {step} by {decided}, not {other} as {by} says"
        for other, by in others
        if other is not None and other != step
    ]
    return SavedModel(path, step, saved.history or (), saved.clipping_moves, saved.n_trained), notes


def _trained(values: Mapping[Any, Any]) -> int | None:
    """How many parameter tensors the optimizer in a file trained."""
    several = values.get("optimizer_states")  # of Lightning
    first = several[0] if isinstance(several, list) and len(several) == 1 else None
    for state in (*(values.get(key) for key in _OPTIMIZER_KEYS), first):
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups):
            return sum(
                len(group["params"]) for group in groups if isinstance(group.get("params"), list)
            )
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
    """The accountant's history as Opacus's save_checkpoint or indpriv keeps it, checked; None without an accountant."""
    opacus = values.get("privacy_accountant_state_dict")
    history = (
        opacus.get("history") if isinstance(opacus, Mapping) else values.get("accountant_history")
    )
    if history is None:
        return None
    if not isinstance(history, list | tuple) or not all(_is_span(span) for span in history):
        raise InputError(
            f"{path} holds an accountant's history that is not a list of (noise_multiplier, sample_rate, steps); save it "
            "again without it, and give the settings as options"
        )
    return _merged([(float(noise), float(rate), int(steps)) for noise, rate, steps in history])


def _is_span(span: Any) -> bool:
    if not (isinstance(span, list | tuple) and len(span) == 3):
        return False
    noise, rate, steps = span
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in (noise, rate)
    )
    whole = isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps <= _MAX_STEP
    return numbers and whole and math.isfinite(noise) and noise > 0 and 0 < rate <= 1


def _one_each(
    found: Sequence[SavedModel], load: LoadFn | None
) -> tuple[list[SavedModel], list[str], list[str]]:
    """Models by step, each step once; the same model saved twice is noted, two models of one step are a problem."""
    by_step: dict[int, list[SavedModel]] = {}
    for model in found:
        by_step.setdefault(model.step, []).append(model)
    notes, problems = [], []
    for step, models in sorted(by_step.items()):
        if len(models) == 1:
            continue
        names = _names(model.path for model in models)
        try:
            different = len({_bare_fingerprint(model.path, load) for model in models}) > 1
        except InputError as error:
            problems.append(str(error))
            continue
        if different:
            problems.append(
                f"{names} are all of step {step}, with different parameters: keep one of them, or the checkpoints of one run"
            )
        else:
            notes.append(f"{names} hold the same model, of step {step}; it is replayed once")
    return [models[0] for _, models in sorted(by_step.items())], notes, problems


def _bare_fingerprint(path: Path, load: LoadFn | None) -> str:
    """Fingerprint of a checkpoint's parameters, whatever its wrapper calls them."""
    state = state_of(read_content(path), load)
    return fingerprint_of(
        {f"{position:09d}": tensor for position, tensor in enumerate(state.values())}
    )


def _contradictory_histories(models: Sequence[SavedModel]) -> list[str]:
    """Each accountant's history must go on from the one before: else the checkpoints are of several runs."""
    known = [model for model in models if model.history]
    for earlier, later in pairwise(known):
        if not _continues(earlier.history, later.history):
            return [
                f"the accountant's history in {later.path.name} does not go on from that in {earlier.path.name}: they are of "
                "two runs, or the accountant was started again; pass the checkpoints of one run"
            ]
    return []


def _continues(earlier: Sequence[Span], later: Sequence[Span]) -> bool:
    if len(earlier) > len(later):
        return False
    *whole, last = earlier
    same = later[len(whole)]
    return whole == list(later[: len(whole)]) and last[:2] == same[:2] and last[2] <= same[2]


def _merged(history: Sequence[Span]) -> tuple[Span, ...]:
    """Consecutive spans of equal settings as one."""
    merged: list[Span] = []
    for noise, rate, steps in history:
        if merged and merged[-1][:2] == (noise, rate):
            merged[-1] = (noise, rate, merged[-1][2] + steps)
        else:
            merged.append((noise, rate, steps))
    return tuple(merged)


def _gaps(models: Sequence[SavedModel]) -> list[str]:
    """Pairs of neighbours that are further apart than is usual here."""
    distances = [(later.step - earlier.step, earlier.step) for earlier, later in pairwise(models)]
    if len(distances) < 2:
        return []
    usual = sorted(distance for distance, _ in distances)[len(distances) // 2]
    wide = [(start, start + distance) for distance, start in distances if distance > 1.5 * usual]
    if not wide:
        return []
    listed = ", ".join(f"{start} to {stop}" for start, stop in wide[:_NAMED]) + (
        ", ..." if len(wide) > _NAMED else ""
    )
    return [f"checkpoints are usually {usual} steps apart, but there is none between {listed}"]


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)
