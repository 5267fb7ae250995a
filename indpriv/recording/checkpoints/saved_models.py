"""The saved models of a run in a folder, and how many updates each has had. Sensitive.

A checkpoint of step t is the model after t updates. Norms at it are those of step t, as in a
Recorder's log. No step is guessed: Opacus's accountant in the file counted it, the user tells it,
or the file states it as `step` or `global_step`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from indpriv._arrays import FloatArray
from indpriv._folders import named_by_person
from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import Content, is_checkpoint, read_content
from indpriv.recording.checkpoints.weights import LoadFn, fingerprint_of, fit, state_of

STEP_OF = "--set step_of"
_FEW = 8  # names in a message
MAX_STEPS = 10**8  # arrays of all steps are held in memory
StepOf = str | Sequence[str | int] | Mapping[str, int]
Span = tuple[
    Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)],
    Annotated[float, Field(strict=True, gt=0, le=1)],
    Annotated[int, Field(strict=True, gt=0, le=MAX_STEPS)],
]
"""(noise_multiplier, sample_rate, steps) of consecutive steps, as in Opacus's accountants."""
_HISTORY = TypeAdapter(list[Span])


@dataclass(frozen=True)
class SavedModel:
    """One checkpoint.

    Attributes:
        path: its file or folder.
        step: number of updates that the model has had.
        said_by: what the step is known from.
        history: what Opacus's accountant counted from the first step on; () if the file has none.
        clipping_moves: the file contains the state of an Opacus clipping scheduler, so
            max_grad_norm is not one number.
    """

    path: Path
    step: int
    said_by: str
    history: tuple[Span, ...] = ()
    clipping_moves: bool = False


@dataclass(frozen=True)
class Discovery:
    """The checkpoints in a folder, in order of their steps, and what was found out about them.

    Attributes:
        models: one for each step.
        notes: what a reader should know: duplicates, gaps, contradictions.
        problems: what prevents a replay, each with a remedy.
    """

    models: list[SavedModel]
    notes: list[str]
    problems: list[str]

    def check(self, folder: str | Path) -> None:
        """Raise one InputError with all problems, if there are any."""
        if len(self.problems) == 1:
            raise InputError(self.problems[0])
        if self.problems:
            raise InputError("\n- ".join([f"{folder} cannot be used yet:", *self.problems]))


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Add the text of an InputError to the problems, and go on."""
    try:
        yield
    except InputError as error:
        problems.append(str(error))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the checkpoint in the message of an InputError."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: {error}") from error


def discover(
    folder: str | Path,
    load: LoadFn | None = None,
    step_of: StepOf = (),
    model: nn.Module | None = None,
) -> Discovery:
    """Find, read and order the checkpoints in a folder, or in its subfolder `checkpoints`.

    Parameters are compared with those of the model, if there is one. The user's function `load`,
    see `state_of`, is called for that, and if two files have the same step. step_of: as of
    `StepOptions`.

    Raises:
        InputError: the folder does not exist, or contains nothing that looks like a checkpoint.
    """
    paths = checkpoint_paths(Path(folder))
    found, unknown, trained = list[SavedModel](), list[str](), list[str]()
    notes, problems, said = list[str](), list[str](), dict[str, int]()
    with collected(problems):
        said = told_steps(step_of, [path.name for path in paths]) if step_of else {}
    for path in paths:  # tensors are released at once: memory does not grow with their number
        with collected(problems), naming(path):
            content = read_content(path)
            saved = _saved_model(content, said.get(path.name), notes)
            found += [saved] if saved else []
            unknown += [] if saved else [path.name]
            if model is not None:
                fit(state_of(content, load), model)
                trained += _other_trained(content, model)
    if unknown and bool(said) == bool(step_of):
        problems.append(
            (f"{STEP_OF} names only some of the checkpoints: " if said else "")
            + f"the step of {listed(unknown)} is not in the file (step, global_step, "
            "trainer_state.json, an Opacus accountant), and no name is read as one; "
            + what_to_type(unknown, len(unknown) == len(paths))
        )
    models = _one_for_each_step(found, load, notes, problems)
    problems += [*trained[:1], *_contradictory_histories(models)]
    return Discovery(models, [*notes, *_gaps(models)], problems)


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
    content = f"it contains {listed(names)}" if names else "it is empty"
    raise InputError(
        f"{folder} contains no checkpoints ({content}); expected are files such as step_10.pt, "
        "epoch=3-step=400.ckpt or model.safetensors, or folders such as checkpoint-500"
    )


def natural_key(name: str) -> str:
    """Sorting key that reads digits as numbers: step_9 comes before step_10."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(255), name)


def listed(names: Sequence[str]) -> str:
    """The names, or the first and last of many, with control characters escaped."""
    few = [*map(repr, names)]
    return ", ".join(few if len(few) <= _FEW else [*few[:3], "...", few[-1]])


def told_steps(step_of: StepOf, names: Sequence[str]) -> dict[str, int]:
    """Step of each name that the user tells, in the order of the names or by name.

    Raises:
        InputError: a step or a name is none, or a list is not as long as the names.
    """
    shown = str(step_of) if isinstance(step_of, str | Mapping) else ",".join(map(str, step_of))
    parts = [part.strip() for part in shown.split(",")]
    try:
        if isinstance(step_of, Mapping):
            told = [(name, str(step)) for name, step in step_of.items()]
        elif any("=" in part for part in parts):
            pairs = (part.rpartition("=") for part in parts)
            told = [(name.strip(), step.strip()) for name, _, step in pairs]
        else:
            if len(parts) == 4 and parts[2] == "...":
                first, second, last = map(_count, (parts[0], parts[1], parts[3]))
                steps = range(first, last + 1, max(second - first, 1))
                if [len(steps), *steps[:2], *steps[-1:]] != [len(names), first, second, last]:
                    raise ValueError(f"these are no {len(names)} steps")
                parts = [*map(str, steps)]
            if len(parts) != len(names):
                raise ValueError(f"{len(parts)} steps for {len(names)} checkpoints")
            told = list(zip(names, parts, strict=True))
        found = {name: _count(step) for name, step in told}
        if wrong := [name for name in found if name not in names]:
            raise ValueError(f"{listed(wrong)} is no checkpoint")
        if len(found) < len(told):
            raise ValueError("a name twice")
    except ValueError as error:
        raise InputError(
            f"{STEP_OF}={shown[:200]!r} cannot be followed ({error}); the checkpoints are "
            f"{listed(names)}; {what_to_type(names)}"
        ) from None
    return found


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", text):
        raise ValueError(f"{text[:20]!r} is not a number of updates")
    return int(text)


def what_to_type(names: Sequence[str], all_of_them: bool = True) -> str:
    """How to tell the steps of these checkpoints, with an example that can be typed."""
    some = [name if name.isprintable() and "," not in name else "FILE" for name in names[:2]]
    by_name = shlex.quote(",".join(f"{name}={20 * i}" for i, name in enumerate(some)))
    if not all_of_them:
        return f"say how many updates each has had, e.g. {STEP_OF}={by_name}"
    last = 20 * (len(names) - 1)
    steps = f"0,20,...,{last}" if last > 60 else ",".join(map(str, range(0, last + 1, 20)))
    return (
        f"say how many updates each has had, in this order, e.g. {STEP_OF}={steps} or, by name, "
        f"step_of={by_name}"
    )


def _saved_model(content: Content, told: int | None, notes: list[str]) -> SavedModel | None:
    """A checkpoint, or None if its step is not known; contradictions about it become notes.

    What its accountant counted comes first, then what the user tells and what the file states.
    """
    path, values = content.path, content.entries
    stated = content.step if content.step is not None else _stated_step(values)
    history = _history(path, values)
    counted = None if history is None else sum(steps for _, _, steps in history)
    words = {"its accountant": counted, STEP_OF: told, "the step stated inside": stated}
    if counted is not None and told is None:
        # No step is read from a name, but an accountant that was started again is betrayed by it.
        numbers = re.findall(r"(?ai)(?<![a-z])(?:global)?step[-_=]?([0-9]{1,12})", path.name)
        words["its name"] = max((int(n) for n in numbers if int(n) > counted), default=None)
    known = {source: step for source, step in words.items() if step is not None}
    if not known:
        return None
    said_by, step = next(iter(known.items()))
    for source, other in known.items():
        if counted is not None and (other > step or (other < step and source == STEP_OF)):
            raise InputError(
                f"{str(path)!r} is of step {other} by {source}, but the Opacus accountant inside "
                f"counted {counted} steps. If it was restarted on resuming, its epsilon is too "
                "small: save these models' state_dict without it, and pass the settings of all "
                f"steps as options. If {source} counts something else, correct it"
            )
        if other != step:
            notes.append(f"{path.name!r} is of step {step} by {said_by}, not {other} by {source}")
    moves = "grad_clip_scheduler_state_dict" in values
    return SavedModel(path, step, said_by, history or (), moves)


def _stated_step(values: Mapping[Any, Any]) -> int | None:
    for value in (values.get("step"), values.get("global_step")):
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
            value = value.item()
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12:
            return value
    return None


def _history(path: Path, values: Mapping[Any, Any]) -> tuple[Span, ...] | None:
    """The checked history of the accountant that Opacus or indpriv saved, or None."""
    opacus = values.get("privacy_accountant_state_dict")
    ours = values.get("accountant_history")
    history = opacus.get("history") if isinstance(opacus, Mapping) else ours
    if history is None:
        return None
    try:
        spans = tuple(_HISTORY.validate_python(history))
        if sum(steps for _, _, steps in spans) > MAX_STEPS:
            raise ValueError
    except ValueError as error:  # pydantic's own is one
        raise InputError(
            f"{path} has an accountant's history that is not a list of (noise_multiplier, "
            "sample_rate, steps); save it again without it, and pass the settings as options"
        ) from error
    return spans


def at_each_step(history: Sequence[Span]) -> FloatArray:
    """(steps, 2) noise multiplier and sampling rate that an accountant counted."""
    spans = np.array(history, dtype=np.float64).reshape(-1, 3)
    values: FloatArray = np.repeat(spans[:, :2], spans[:, 2].astype(np.int64), axis=0)
    return values


def _other_trained(content: Content, model: nn.Module) -> list[str]:
    """Compare the number of trained parameters: norms are over the trainable ones only."""
    values = content.entries
    several = values.get("optimizer_states")  # of Lightning
    first = several[0] if isinstance(several, list) and len(several) == 1 else None
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    for state in (values.get("optimizer_state_dict"), values.get("optimizer"), first):
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups):
            lists = [group.get("params") for group in groups]
            n_trained = sum(len(params) for params in lists if isinstance(params, list))
            if n_trained == trainable:
                return []
            return [
                f"the optimizer in {content.path.name} trained {n_trained} parameter tensors, "
                f"the spec's model has {trainable} that require a gradient: freeze in model() "
                "exactly what was frozen in training"
            ]
    return []


def _one_for_each_step(
    found: Sequence[SavedModel], load: LoadFn | None, notes: list[str], problems: list[str]
) -> list[SavedModel]:
    """Models in order of their steps; different models of one step are a problem."""
    by_step: dict[int, list[SavedModel]] = {}
    for model in sorted(found, key=lambda model: model.step):
        by_step.setdefault(model.step, []).append(model)
    for step, models in by_step.items():
        names = listed([model.path.name for model in models])
        with collected(problems):
            if len(models) > 1 and len({_print_of(model.path, load) for model in models}) > 1:
                raise InputError(
                    f"{names} are all of step {step} by {models[0].said_by}, with different "
                    "parameters: keep one of them, or only the checkpoints of one run, or tell "
                    f"their steps by {STEP_OF}"
                )
            if len(models) > 1:
                notes.append(f"{names} are the same model, of step {step}; it is replayed once")
    return [models[0] for models in by_step.values()]


def _print_of(path: Path, load: LoadFn | None) -> str:
    """Fingerprint of a checkpoint's parameters in their order, whatever a wrapper calls them."""
    tensors = state_of(read_content(path), load).values()
    return fingerprint_of({f"{position:09d}": tensor for position, tensor in enumerate(tensors)})


def _contradictory_histories(models: Sequence[SavedModel]) -> list[str]:
    """Each accountant's history must continue the one before, or the checkpoints mix runs."""
    for earlier, later in pairwise(model for model in models if model.history):
        before = at_each_step(earlier.history)
        if not np.array_equal(before, at_each_step(later.history)[: len(before)]):
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
