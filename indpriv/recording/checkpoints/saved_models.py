"""What the saved models of a run tell: how many updates each has had, and the run's settings.

A checkpoint of step t is the model after t updates. Norms at it are those of step t, as in a
Recorder's log. Nothing is guessed: Opacus's accountant in the file counted the step, the user tells
it, or the file states it as `step` or `global_step`; settings are in run.json, options, the log of
the run and that accountant. What is missing or contradictory is collected, so that the user
sees it in one message.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter
from torch import nn

from indpriv import _checks
from indpriv._facts import refused, text
from indpriv._files import first_at
from indpriv._folders import named_by_person
from indpriv._reading import named
from indpriv._types import FloatArray
from indpriv.errors import InputError
from indpriv.norm_log.evidence import too_small
from indpriv.norm_log.fields import SAMPLERS, SETTING_NAMES, StepSettings
from indpriv.norm_log.norm_log import OpenedRun, open_run
from indpriv.norm_log.run_files import JOURNAL, RUN_JSON, read_run_json
from indpriv.recording.checkpoints import safe_files
from indpriv.recording.checkpoints.safe_files import Content, LoadFn, read_content, state_of

STEP_OF, ACCOUNTANT, OPTIONS = "--set step_of", "the accountant in the checkpoints", "the options"
LIVE = "the log beside the checkpoints"
_FEW = 8  # names in a message
_MOST_STEPS = 10**8  # arrays of all steps are held in memory
StepOf = str | Sequence[str | int] | Mapping[str, int]
Span = tuple[
    Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)],
    Annotated[float, Field(strict=True, gt=0, le=1)],
    Annotated[int, Field(strict=True, gt=0, le=_MOST_STEPS)],
]
"""(noise_multiplier, sample_rate, steps) of consecutive steps, as in Opacus's accountants."""
_HISTORY = TypeAdapter(list[Span])
# The sampler classes of Opacus that a Recorder reports.
_POISSON_CLASSES = ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler")
# A checkpoint does not say at which size batches were truncated.
_REPLAYED = tuple(sampler for sampler in SAMPLERS if sampler != "truncated_poisson")
_MUCH_SMALLER = 0.8  # of a variance: some trainers divide by batches that are a little larger
_SAME = 1e-9  # relative difference of one number that was written and read again
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "steps": partial(_checks.check_positive_int, "steps"),
    "delta": _checks.check_delta,
    "sampler": partial(_checks.check_choice, "sampler", choices=_REPLAYED),
}
_TO_TYPE = {
    "noise_multiplier": "--set noise_multiplier=1.1",
    "max_grad_norm": "--set max_grad_norm=1.0",
    "sample_rate": "--set sample_rate=0.01",
    "steps": "--set steps=1000",
    "delta": "--delta 1e-5",
    "sampler": "--set sampler=poisson",
}


@dataclass(frozen=True)
class StepOptions:
    """Settings of a run that the user states; None leaves one to run.json or the checkpoints.

    Attributes:
        noise_multiplier: one value, or a schedule: "1.1,0.9@500" is 1.1 for steps 0 to 499, then
            0.9.
        max_grad_norm: clipping norm used in training; one value or a schedule.
        sample_rate: Poisson sampling rate; one value or a schedule.
        steps: number of optimizer steps of the whole run.
        delta: delta of the guarantee.
        sampler: "poisson", "shuffled" or "other".
        step_of: step of each checkpoint, as the number of updates that it has had: in the order of
            their names, [0, 20, 40] or "0,20,...,600", or by name, {"a.pt": 0, "b.pt": 20} or
            "a.pt=0,b.pt=20". Needed where the files do not tell it.
    """

    noise_multiplier: float | str | None = None
    max_grad_norm: float | str | None = None
    sample_rate: float | str | None = None
    steps: int | None = None
    delta: float | None = None
    sampler: str | None = None
    step_of: StepOf | None = None


@dataclass(frozen=True)
class SavedModel:
    """One checkpoint."""

    path: Path  # its file or folder
    step: int  # number of updates that the model has had
    said_by: str  # what the step is known from
    # What Opacus's accountant counted from the first step on; () if the file has none.
    history: tuple[Span, ...] = ()
    clipping_moves: bool = False  # it has a clipping scheduler: max_grad_norm is not one number
    gradient: tuple[float, int] | None = None  # see `_gradient`


@dataclass(frozen=True)
class Discovery:
    """The checkpoints in a folder, in order of their steps, and what was found out about them."""

    models: list[SavedModel] = field(default_factory=list)  # one for each step
    notes: list[str] = field(default_factory=list)  # to know: duplicates, gaps, contradictions
    problems: list[str] = field(default_factory=list)  # that prevent a replay, with a remedy each

    def check(self, folder: str | Path) -> None:
        """Raise one InputError with all problems, if there are any."""
        if len(self.problems) == 1:
            raise InputError(self.problems[0])
        if self.problems:
            raise InputError("\n- ".join([f"{folder} cannot be used yet:", *self.problems]))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the text of an InputError to the problems, and go on."""
        try:
            yield
        except InputError as error:
            self.problems.append(str(error))


def discover(
    folder: str | Path,
    load: LoadFn | None = None,
    step_of: StepOf = (),
    model: nn.Module | None = None,
) -> Discovery:
    """Find, read and order the checkpoints in a folder, or in its subfolder `checkpoints`.

    Parameters are compared with those of the model, if there is one, and of files of one step, with
    the user's function `load`, see `state_of`. InputError if nothing looks like a checkpoint.
    """
    paths, found = _paths(Path(folder)), Discovery()
    by_step, unknown = dict[int, list[SavedModel]](), list[str]()
    told, trained = dict[str, int](), ""
    with found.collecting():
        told = told_steps(step_of, [path.name for path in paths]) if step_of else {}
    for path in paths:  # tensors are released at once: memory does not grow with their number
        with found.collecting(), named(path, broken=()):
            content = read_content(path)
            if saved := _saved_model(content, told.get(path.name), found.notes):
                by_step.setdefault(saved.step, []).append(saved)
            else:
                unknown.append(path.name)
            if model is not None:
                safe_files.fit(state_of(content, load), model)
                trained = trained or _other_trained(content, model)
    if unknown and bool(told) == bool(step_of):
        remedy = what_to_type(unknown, len(unknown) == len(paths))
        said = text("refusal.checkpoints", "steps_known", names=listed(unknown), remedy=remedy)
        some = f"{STEP_OF} names only some of the checkpoints: " if told else ""
        found.problems.append(some + said)
    for step, models in sorted(by_step.items()):
        found.models.append(models[0])
        if len(models) == 1:
            continue
        names = listed([model.path.name for model in models])
        with found.collecting():
            states = (state_of(read_content(model.path), load).values() for model in models)
            # By their order, whatever a wrapper calls them.
            numbered = ({f"{k:09d}": one for k, one in enumerate(state)} for state in states)
            if len({*map(safe_files.fingerprint_of, numbered)}) > 1:
                values = {"names": names, "step": step, "source": models[0].said_by}
                raise refused("refusal.checkpoints", "same_step", **values)
            found.notes.append(f"{names} are the same model, of step {step}; it is replayed once")
    found.problems.extend(filter(None, [trained]))
    for earlier, later in pairwise(model for model in found.models if model.history):
        before = _counted(earlier.history)
        if not np.array_equal(before, _counted(later.history)[: len(before)]):
            values = {"later": later.path.name, "earlier": earlier.path.name}
            found.problems.append(text("refusal.checkpoints", "two_runs", **values))
            break
    gaps = [(later.step - earlier.step, earlier.step) for earlier, later in pairwise(found.models)]
    usual = sorted(gaps)[len(gaps) // 2][0] if gaps else 0
    if wide := [f"{start} and {start + gap}" for gap, start in gaps if gap > 1.5 * usual]:
        found.notes.append(
            f"checkpoints are usually {usual} steps apart, but there is none between "
            + "; ".join([*wide[:3], *(["..."] if len(wide) > 3 else [])])
        )
    return found


def _paths(folder: Path) -> list[Path]:
    """Paths of what looks like a checkpoint, in natural order; InputError if nothing does."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; pass the folder of the checkpoints")
    named_by_person(folder)
    for place in (folder, folder / "checkpoints"):
        items = [*place.iterdir()] if place.is_dir() else []
        paths = [path for path in items if safe_files.is_checkpoint(path)]
        # A link to another checkpoint there, such as last.ckpt, is the same once more.
        paths = [p for p in paths if not p.is_symlink() or p.resolve().parent != place.resolve()]
        if paths:
            return sorted(paths, key=lambda path: natural_key(path.name))
    names = sorted(item.name for item in folder.iterdir())
    content = f"it contains {listed(names)}" if names else "it is empty"
    raise refused("refusal.checkpoints", "no_checkpoints", folder=folder, content=content)


def natural_key(name: str) -> str:
    """Sorting key that reads digits as numbers: step_9 comes before step_10."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(255), name)


def listed(names: Sequence[str]) -> str:
    """The names, or the first and last of many, with control characters escaped."""
    few = [*map(repr, names)]
    return ", ".join(few if len(few) <= _FEW else [*few[:3], "...", few[-1]])


def told_steps(step_of: StepOf, names: Sequence[str]) -> dict[str, int]:
    """Step of each name that the user tells, in the order of the names or by name."""
    shown = str(step_of) if isinstance(step_of, str | Mapping) else ",".join(map(str, step_of))
    parts = [part.strip() for part in shown.split(",")]
    try:
        if isinstance(step_of, Mapping):
            told = [(name, str(step)) for name, step in step_of.items()]
        elif "=" in shown:
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
        said = {"shown": shown[:200], "error": error, "names": listed(names)}
        said |= {"option": STEP_OF, "remedy": what_to_type(names)}
        raise refused("refusal.checkpoints", "step_of", **said) from None
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
    """A checkpoint; None if neither accountant, user nor file tells its step."""
    path, values = content.path, content.entries
    history = _history(path, values)
    counted = None if history is None else sum(steps for _, _, steps in history)
    words = {"its accountant": counted, STEP_OF: told, "the step stated inside": content.step}
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
            said = {"path": str(path), "step": other, "source": source, "counted": counted}
            raise refused("refusal.checkpoints", "restarted", **said)
        if other != step:
            notes.append(f"{path.name!r} is of step {step} by {said_by}, not {other} by {source}")
    moves = "grad_clip_scheduler_state_dict" in values
    return SavedModel(path, step, said_by, history or (), moves, _gradient(values))


def _history(path: Path, values: Mapping[Any, Any]) -> tuple[Span, ...] | None:
    """The checked history of the accountant that Opacus or indpriv saved, or None."""
    opacus = values.get("privacy_accountant_state_dict")
    ours = values.get("accountant_history")
    history = opacus.get("history") if isinstance(opacus, Mapping) else ours
    if history is None:
        return None
    try:
        spans = tuple(_HISTORY.validate_python(history))
        if sum(steps for _, _, steps in spans) > _MOST_STEPS:
            raise ValueError
    except ValueError as error:  # pydantic's own is one
        raise refused("refusal.checkpoints", "history", path=path) from error
    return spans


def _counted(history: Sequence[Span]) -> FloatArray:
    """(steps, 2) noise multiplier and sampling rate that an accountant counted."""
    spans = np.array(history, dtype=np.float64).reshape(-1, 3)
    values: FloatArray = np.repeat(spans[:, :2], spans[:, 2].astype(np.int64), axis=0)
    return values


def _optimizers(values: Mapping[Any, Any]) -> list[Any]:
    """What may be the state of the one optimizer in a checkpoint."""
    several = values.get("optimizer_states")  # of Lightning
    lone = several if isinstance(several, list) and len(several) == 1 else []
    return [values.get("optimizer_state_dict"), values.get("optimizer"), *lone]


def _gradient(values: Mapping[Any, Any]) -> tuple[float, int] | None:
    """Mean square of the values of a gradient, and their number, by what its optimizer kept.

    Adam has it; SGD's momentum has no less: a sum with the last one in it, whose noise is fresh.
    """
    for state in _optimizers(values):
        total, n = 0.0, 0
        try:
            for group in state["param_groups"]:
                for one in filter(None, map(state["state"].get, group["params"])):
                    squares = one.get("exp_avg_sq")
                    if squares is None:  # the momentum of others, without dampening, is smaller
                        squares = (one["momentum_buffer"] / (1 - group["dampening"])).square()
                    counted = 1 - group.get("betas", (0, 0))[1] ** int(one.get("step", 1))
                    total += float(squares.double().sum()) / counted
                    n += squares.numel()
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RuntimeError):
            continue  # of another optimizer, or of none
        if n and math.isfinite(total):
            return total / n, n
    return None


def _other_trained(content: Content, model: nn.Module) -> str:
    """Compare the number of trained parameters: norms are over the trainable ones only."""
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    for state in _optimizers(content.entries):
        try:
            n_trained = sum(len(group["params"]) for group in state["param_groups"])
        except (TypeError, LookupError):  # no optimizer's
            continue
        if n_trained == trainable:
            break
        said = {"name": content.path.name, "n_trained": n_trained, "trainable": trainable}
        return text("refusal.checkpoints", "other_trained", **said)
    return ""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a whole run, as in `StepOptions`, but known for every step."""

    steps: StepSettings
    delta: float
    sampler: str
    sources: Mapping[str, str]  # setting -> where it comes from
    accountant_counted_all: bool  # every step, with its noise_multiplier and sample_rate
    declared: Mapping[str, Any]  # content of run.json; {} if there is none
    caveats: list[str]  # what weakens any account of the run
    live: OpenedRun | None  # what a Recorder logged of it


def resolve(
    folder: Path, found: Discovery, options: StepOptions, n_examples: int | None
) -> RunSettings | None:
    """Find every setting: in run.json, options, the log of a Recorder and Opacus's accountant.

    run.json and log are in the folder of the checkpoints, or above it. What is missing or
    contradicts another source is added to the problems of the checkpoints; the result is then None.
    """
    models, above = found.models, folder.absolute().parent
    beside = [above] if folder.resolve().name == "checkpoints" or _has(above, JOURNAL) else []
    places, live = [folder, *beside], None
    declared: Mapping[str, Any] = {}
    with found.collecting():
        declared = next((read_run_json(one) for one in places if _has(one, RUN_JSON)), {})
    with found.collecting():
        logs = (open_run(place) for place in places if _has(place, JOURNAL))
        live = next((run for run in logs if not run.header["run"].get("replayed")), None)
    counted = max((_counted(model.history) for model in models), key=len, default=np.zeros((0, 2)))
    said = _said(declared, options, counted, live)
    one, columns = dict[str, Any](), dict[str, FloatArray]()
    for name, check in _CHECKS.items():
        with found.collecting():
            one[name] = _one(name, said[name], check)
    total: int | None = one.get("steps")
    for name in SETTING_NAMES:
        with found.collecting():
            columns[name] = _column(name, said[name], total or 1)
    logged = live.total_steps if live else 0
    reached = max([len(counted), logged, *(model.step for model in models)])
    if total is not None and total < reached:
        values = {"total": total, "source": next(iter(said["steps"])), "reached": reached}
        found.problems.append(text("refusal.checkpoints", "total", **values))
    found.problems.extend(_unfit(declared, found, total or 0, n_examples, columns, live))
    if missing := [name for name in _TO_TYPE if not said[name]]:
        names, options_ = ", ".join(missing), " ".join(_TO_TYPE[name] for name in missing)
        found.problems.append(text("refusal.checkpoints", "lacks", names=names, options=options_))
    if found.problems or total is None or n_examples is None:
        return None
    if models[0].step:
        found.notes.append(text("sentence.replay", "first", step=models[0].step))
    last, rate = models[-1], columns["sample_rate"][0]
    regular = any(math.isclose(k, round(k), rel_tol=1e-6) for k in (1 / rate, rate * n_examples))
    weak = {"last": last.step < total, "counted": [*said["steps"]] == [ACCOUNTANT]}
    values = {"step": last.step, "total": total, "rate": rate, "n": n_examples}
    cases = [case for case, holds in (weak | {"rate": not regular}).items() if holds]
    sources = {name: " and ".join(by_source) for name, by_source in said.items()}
    if live:  # as accounts of its log count gradients that are clipped too little
        columns["noise_multiplier"] = columns["noise_multiplier"] / (1 + live.clip_excess)
    return RunSettings(
        steps=StepSettings.from_values(total, **columns),
        delta=one["delta"],
        sampler=one["sampler"],
        sources={**sources, "steps of checkpoints": last.said_by},
        accountant_counted_all=len(counted) == total,
        declared=declared,
        caveats=[text("sentence.replay", case, **values) for case in cases],
        live=live,
    )


def _has(folder: Path, name: str) -> bool:
    """Whether a file is there and begun."""
    return (folder / name).is_file() and (folder / name).stat().st_size > 0


def _said(
    declared: Mapping[str, Any], options: StepOptions, counted: FloatArray, live: OpenedRun | None
) -> dict[str, dict[str, Any]]:
    """Of each setting, source -> value, the most trusted source first."""
    written = {name: first_at(declared, (name,), ("training", name)) for name in _TO_TYPE}
    if first_at(declared, ("recorder", "sampler_class")) in _POISSON_CLASSES:
        written["sampler"] = written["sampler"] or "poisson"
    sources: dict[str, dict[str, Any]] = {RUN_JSON: written, OPTIONS: vars(options)}
    if live and live.total_steps:
        sources[LIVE] = {"sampler": live.sampler, **vars(live.settings())}
        if live.closed:
            sources[LIVE]["steps"] = live.total_steps
    if len(counted):
        noise, rate = counted.T
        sources[ACCOUNTANT] = {"noise_multiplier": noise, "sample_rate": rate}
        if not any(said.get("steps") for said in sources.values()):
            sources[ACCOUNTANT]["steps"] = len(counted)
    return {
        name: {of: values[name] for of, values in sources.items() if values.get(name) is not None}
        for name in _TO_TYPE
    }


def _one(name: str, by_source: Mapping[str, Any], check: Callable[[Any], Any]) -> Any:
    """The value of steps, sampler or delta, by every source, or None; of delta the last one's."""
    for source, value in by_source.items():
        try:
            check(value)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
        if name == "steps" and value > _MOST_STEPS:
            raise InputError(f"{source}: steps={value} is more than {_MOST_STEPS}")
    if name != "delta" and len({*by_source.values()}) > 1:
        told = ", ".join(f"{value} by {source}" for source, value in by_source.items())
        raise InputError(f"the values of {name} contradict each other: {told}")
    return [None, *by_source.values()][-1]


def _column(name: str, by_source: Mapping[str, Any], total: int) -> FloatArray:
    """(total,) values of a setting; InputError if two sources differ, or steps are left out."""
    column = np.full(total, np.nan)
    for source, value in by_source.items():
        these = np.full(total, np.nan)
        if source in (LIVE, ACCOUNTANT):
            these[: len(value)] = value[:total]
        elif not isinstance(value, list):
            for start, number in parse_schedule(name, value):
                these[start:] = number
        elif len(value) == total:
            these[:] = _checks.check_setting(name, value)
        else:
            values = {"source": source, "name": name, "count": len(value), "total": total}
            raise refused("refusal.checkpoints", "other_length", **values)
        differs = ~(np.isnan(column) | np.isnan(these))
        differs &= ~np.isclose(column, these, rtol=_SAME, atol=0)
        counted_rate = name == "sample_rate" and source == ACCOUNTANT
        if counted_rate:  # Opacus's int(1 / (1 / n)) can be n - 1: at 1 / k it counts 1 / (k - 1)
            differs &= ~np.isclose(1 / column - 1 / these, 1.0, rtol=1e-6)
        if differs.any():
            step = int(np.argmax(differs))
            values = {"first": column[step], "first_source": next(iter(by_source)), "step": step}
            values |= {"second": these[step], "second_source": source, "name": name}
            raise refused("refusal.checkpoints", "contradiction", **values)
        if counted_rate and not {RUN_JSON, LIVE} & by_source.keys():  # options read no sampler
            column = np.fmax(column, these)
        column = np.where(np.isnan(column), these, column)
    if by_source and np.isnan(column).any():
        step = int(np.argmax(np.isnan(column)))
        of = {"name": name, "step": step, "option": _TO_TYPE[name]}
        raise refused("refusal.checkpoints", "rest_of_steps", **of)
    return column


def parse_schedule(name: str, value: float | str) -> list[tuple[int, float]]:
    """[(first step, value), ...] from one value or a schedule such as "1.1,0.9@500"."""
    try:
        pairs = [part.strip().partition("@") for part in str(value).split(",")]
        parts = [(int(start) if at else 0, float(number)) for number, at, start in pairs]
    except ValueError as error:
        raise refused("refusal.checkpoints", "no_schedule", name=name, value=value) from error
    starts = [start for start, _ in parts]
    if starts[0] != 0 or sorted(set(starts)) != starts:
        raise refused("refusal.checkpoints", "order", name=name, value=value)
    for _, setting in parts:
        _checks.check_setting(name, setting)
    return parts


def _unfit(
    declared: Mapping[str, Any],
    found: Discovery,
    total: int,
    n_examples: int | None,
    columns: Mapping[str, FloatArray],
    live: OpenedRun | None,
) -> Iterator[str]:
    """What a replay cannot handle: other data or checkpoints, clipping that is not flat."""
    said = {RUN_JSON: first_at(declared, ("data", "n_train"))}
    if live:
        said[LIVE] = live.header["n_examples"]
        declared = {**declared, "recorder": live.header["run"]}
    for source, n in said.items():
        if isinstance(n, int) and n_examples not in (n, None):
            values = {"n_examples": n_examples, "n_train": n, "source": source}
            yield text("refusal.checkpoints", "other_data", **values)
    places = ("recorder",), (), ("training",)
    clipping = first_at(declared, *((*place, "clipping") for place in places))
    # With individual clipping, no example contributes more than with flat clipping.
    if clipping not in (None, "flat", "individual"):
        yield f"the run has clipping={clipping!r}; only runs with flat clipping can be replayed"
    if reason := first_at(declared, ("recorder", "no_privacy")):
        yield f"the run has no privacy to account for: {reason}"
    moving = [model.path.name for model in found.models if model.clipping_moves]
    if moving and "max_grad_norm" in columns and np.ptp(columns["max_grad_norm"]) == 0:
        yield text("refusal.checkpoints", "clipping_moves", name=moving[0])
    if total and n_examples and columns.keys() >= {*SETTING_NAMES}:
        noise, clip, rate = (columns[name] for name in SETTING_NAMES)
        least = float((noise * clip / (rate * n_examples)).min())  # of a mean gradient
        for model in found.models:
            seen, n = model.gradient or (math.inf, 0)
            if model.step and too_small(seen / least**2 / _MUCH_SMALLER, n):
                said = {"name": model.path.name, "seen": math.sqrt(seen), "least": least}
                yield text("refusal.checkpoints", "less_noise", **said)
                break
    last = found.models[-1] if found.models and not found.problems else None
    if last and 2 * last.step < total and last.said_by != STEP_OF:
        remedy = what_to_type([model.path.name for model in found.models])
        said = {"total": total, "name": last.path.name, "step": last.step, "source": last.said_by}
        yield text("refusal.checkpoints", "epochs", remedy=remedy, **said)
