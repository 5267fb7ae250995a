"""Noise, clipping and sampling of every step of a run that was not recorded: from run.json, accountant, options.

Public values. What is missing or contradictory is collected, so that it can be asked for in one message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv._files import first_at, read_json
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import SAMPLERS, StepSettings
from indpriv.recording.checkpoints.discovery import Discovery, SavedModel

RUN_JSON, ACCOUNTANT, OPTIONS = "run.json", "the accountant in the checkpoints", "the options"
# What a Recorder writes of Opacus's own samplers.
_POISSON_CLASSES = ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler")
_MAX_STEPS = 10**8  # arrays of all steps are kept in memory
_SAME = 1e-9  # relative; the same number, written and read again
_CHECKS = {
    "noise_multiplier": _checks.check_noise_multiplier,
    "max_grad_norm": _checks.check_max_grad_norm,
    "sample_rate": _checks.check_sample_rate,
}
NAMES = tuple(_CHECKS)
_EXAMPLES = {
    "noise_multiplier": "--noise-multiplier 1.1",
    "max_grad_norm": "--max-grad-norm 1.0",
    "sample_rate": "--sample-rate 0.01",
    "steps": "--steps 1000",
    "delta": "--delta 1e-5",
    "sampler": "--sampler poisson",
}


@dataclass(frozen=True)
class StepOptions:
    """What the user says of the steps; None is not said.

    Attributes:
        noise_multiplier: one value, or a schedule: "1.1,0.9@500" is 1.1 for steps 0 to 499, then 0.9.
        max_grad_norm: likewise.
        sample_rate: likewise; the Poisson rate.
        steps: number of steps of the whole run.
        delta: of the guarantee.
        sampler: "poisson", "shuffled" or "other".
    """

    noise_multiplier: float | str | None = None
    max_grad_norm: float | str | None = None
    sample_rate: float | str | None = None
    steps: int | None = None
    delta: float | None = None
    sampler: str | None = None


@dataclass(frozen=True)
class RunSettings:
    """Settings of a whole run.

    Attributes:
        steps: of every step.
        delta: of the guarantee.
        sampler: "poisson", "shuffled" or "other".
        seeded: run.json says that the run is reproducible: no privacy.
        sources: setting -> where it comes from.
        accountant_counted_all: the accountant in the last checkpoint counted every step, so that noise_multiplier and
            sample_rate of each are its own.
        declared: run.json, {} without one.
    """

    steps: StepSettings
    delta: float
    sampler: str
    seeded: bool
    sources: Mapping[str, str]
    accountant_counted_all: bool
    declared: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolved:
    """Settings, or why there are none; notes are for the reader, caveats weaken any account of this run."""

    settings: RunSettings | None
    notes: tuple[str, ...]
    caveats: tuple[str, ...]
    problems: tuple[str, ...]


def resolve(folder: Path, found: Discovery, options: StepOptions, n_examples: int) -> Resolved:
    """Settle every setting: run.json comes first, then Opacus's accountant inside the checkpoints, then the options.

    Args:
        folder: of the checkpoints; run.json stands in it, or beside a folder named checkpoints.
        found: the checkpoints.
        options: what the user says.
        n_examples: length of the training set, held against run.json.

    Returns:
        settings, or everything that is missing or contradictory.
    """
    problems: list[str] = []
    declared = _read_declared(folder, problems)
    history = max((model.history for model in found.models), key=_steps_of, default=())
    total, source = _total_steps(found.models, declared, history, options, problems)
    values: dict[str, FloatArray] = {}
    sources = {"steps": source}
    missing = [] if total else ["steps"]
    for name in NAMES:
        offers = _offers(name, declared, history, options, total, problems)
        combined = _combine(name, offers, total, problems)
        if combined is not None:
            values[name] = combined
            sources[name] = " and ".join(dict.fromkeys(where for where, _ in offers))
        elif not offers:
            missing.append(name)
        elif total:
            missing.append(
                f"{name} of the steps from {max(len(values) for _, values in offers)} on"
            )
    problems += _moving_clip(found.models, values.get("max_grad_norm"))
    delta = _delta(declared, options, problems)
    sampler = _sampler(declared, options, problems)
    missing += [name for name, value in (("delta", delta), ("sampler", sampler)) if value is None]
    problems += _declared_problems(declared, n_examples)
    if missing:
        problems.append(
            f"not known: {', '.join(missing)}. Say so with {' '.join(_EXAMPLES[name.split()[0]] for name in missing)} (your "
            "values), or in a run.json beside the checkpoints"
        )
    if problems or total is None or delta is None:
        return Resolved(None, (), (), tuple(problems))
    settings = RunSettings(
        steps=StepSettings.from_values(total, **values),
        delta=delta,
        sampler=str(sampler),
        seeded=bool(declared.get("seeded")),
        sources={
            **sources,
            "delta": OPTIONS if options.delta is not None else RUN_JSON,
            "sampler": OPTIONS if options.sampler is not None else RUN_JSON,
        },
        accountant_counted_all=_steps_of(history) == total,
        declared=declared,
    )
    caveats = _caveats(found.models, total, source, values["sample_rate"], n_examples)
    return Resolved(settings, tuple(_notes(found.models)), tuple(caveats), ())


def parse_schedule(name: str, value: float | str) -> list[tuple[int, float]]:
    """[(first step, value), ...] of one value or a schedule such as "1.1,0.9@500"; InputError where it reads wrongly."""
    parts: list[tuple[int, float]] = []
    for part in str(value).split(","):
        number, at, start = part.strip().partition("@")
        try:
            parts.append((int(start) if at else 0, float(number)))
        except ValueError as error:
            raise InputError(
                f"{name}={value!r} is no number and no schedule such as 1.1,0.9@500"
            ) from error
    starts = [start for start, _ in parts]
    if starts[0] != 0 or sorted(set(starts)) != starts:
        raise InputError(
            f"{name}={value!r}: a schedule starts at step 0 and names each later step once, in order"
        )
    for _, setting in parts:
        _CHECKS[name](setting)
    return parts


def _read_declared(folder: Path, problems: list[str]) -> Mapping[str, Any]:
    places = [
        folder / RUN_JSON,
        *([folder.parent / RUN_JSON] if folder.resolve().name == "checkpoints" else []),
    ]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return {}
    try:
        content = read_json(path)
    except InputError as error:
        problems.append(str(error))
        return {}
    if not isinstance(content, Mapping):
        problems.append(f"{path} holds a {type(content).__name__}; it is one JSON object")
        return {}
    return content


def _total_steps(
    models: Sequence[SavedModel],
    declared: Mapping[str, Any],
    history: Sequence[tuple[float, float, int]],
    options: StepOptions,
    problems: list[str],
) -> tuple[int | None, str]:
    """Number of steps of the run, and where it comes from; a run is never taken for shorter than anything says."""
    said = {RUN_JSON: declared.get("steps"), OPTIONS: options.steps}
    known: dict[str, int] = {}
    for where, value in said.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_STEPS:
            problems.append(
                f"{where}: steps={value!r} is not a whole number from 1 to {_MAX_STEPS}"
            )
        else:
            known[where] = value
    if len(set(known.values())) > 1:
        problems.append(
            "steps contradict: "
            + ", ".join(f"{value} by {where}" for where, value in known.items())
        )
    counted = _steps_of(history)
    if known:
        source, total = next(iter(known.items()))
        reached = max([counted, *(model.step for model in models)])
        if total < reached:
            problems.append(
                f"steps is {total} by {source}, but a checkpoint has had {reached} updates: give the steps of the whole run"
            )
        return total, source
    return (counted, ACCOUNTANT) if counted else (None, "")


def _offers(
    name: str,
    declared: Mapping[str, Any],
    history: Sequence[tuple[float, float, int]],
    options: StepOptions,
    total: int | None,
    problems: list[str],
) -> list[tuple[str, FloatArray]]:
    """What each source says of a setting: values of the first so many steps, in order of trust."""
    offers: list[tuple[str, FloatArray]] = []
    steps = total or 1
    try:
        value = first_at(declared, (name,), ("training", name))
        if value is not None:
            array = np.atleast_1d(_CHECKS[name](value))
            if array.shape not in ((1,), (steps,)):
                problems.append(
                    f"run.json: {name} has {array.shape[0]} values; write one, or one for each of {total} steps"
                )
            else:
                offers.append((RUN_JSON, np.broadcast_to(array, (steps,))))
        column = {"noise_multiplier": 0, "sample_rate": 1}.get(name)
        if history and column is not None:
            values = np.repeat([span[column] for span in history], [span[2] for span in history])
            offers.append((ACCOUNTANT, np.asarray(values, dtype=np.float64)))
        said = getattr(options, name)
        if said is not None:
            array = np.empty(steps)
            for start, number in parse_schedule(name, said):
                array[start:] = number
            offers.append((OPTIONS, array))
    except InputError as error:
        problems.append(str(error))
    return offers


def _combine(
    name: str, offers: Sequence[tuple[str, FloatArray]], total: int | None, problems: list[str]
) -> FloatArray | None:
    """One value for each step from the first source that knows it; contradictions become problems.

    None where a step has no value, or the number of steps is not known.
    """
    for (where, values), (other, others) in combinations(offers, 2):
        shared = min(len(values), len(others))
        differs = ~np.isclose(values[:shared], others[:shared], rtol=_SAME, atol=0)
        if name == "sample_rate" and ACCOUNTANT in (where, other):
            counted, drawn = (others, values) if other == ACCOUNTANT else (values, others)
            differs &= ~_one_step_less(drawn[:shared], counted[:shared])
        if differs.any():
            step = int(np.argmax(differs))
            problems.append(
                f"{name} contradicts: at step {step} it is {values[step]:.8g} by {where} and {others[step]:.8g} by {other}; "
                "leave out the wrong one"
            )
            return np.full(total or 1, values[0])
    if total is None:
        return None
    combined = np.full(total, np.nan)
    for _, values in reversed(offers):
        combined[: min(total, len(values))] = values[:total]
    return None if np.isnan(combined).any() else combined


def _one_step_less(drawn: FloatArray, counted: FloatArray) -> NDArray[np.bool_]:
    """Where the accountant's rate is 1 / (k - 1) for the sampler's 1 / k: Opacus's int(1 / (1 / n)) can be n - 1."""
    return (counted > drawn) & np.isclose(1 / drawn - 1 / counted, 1.0, rtol=1e-6)


def _moving_clip(models: Sequence[SavedModel], max_grad_norm: FloatArray | None) -> list[str]:
    moving = next((model.path.name for model in models if model.clipping_moves), None)
    if moving is None or max_grad_norm is None or np.ptp(max_grad_norm) > 0:
        return []
    return [
        f"{moving} holds the state of a clipping scheduler, so that max_grad_norm moved, but one value is known; give all of "
        "them, e.g. --max-grad-norm 1.0,0.9@100,0.81@200"
    ]


def _delta(declared: Mapping[str, Any], options: StepOptions, problems: list[str]) -> float | None:
    """The options may ask for another delta than the run declared: it is a choice of the account."""
    said = (
        options.delta
        if options.delta is not None
        else first_at(declared, ("delta",), ("training", "delta"))
    )
    if said is None:
        return None
    try:
        return _checks.check_delta(said)
    except InputError as error:
        problems.append(str(error))
        return math.nan


def _sampler(declared: Mapping[str, Any], options: StepOptions, problems: list[str]) -> str | None:
    said = first_at(declared, ("sampler",), ("training", "sampler"))
    if said is None and first_at(declared, ("recorder", "sampler_class")) in _POISSON_CLASSES:
        said = "poisson"
    known = {
        where: value
        for where, value in ((RUN_JSON, said), (OPTIONS, options.sampler))
        if value is not None
    }
    for where, value in known.items():
        if value not in SAMPLERS:
            problems.append(
                f"{where}: sampler={value!r} is not known; it is one of {', '.join(SAMPLERS)}"
            )
    if len(set(known.values())) > 1:
        problems.append(
            "sampler contradicts: "
            + ", ".join(f"{value} by {where}" for where, value in known.items())
        )
    return next(iter(known.values()), None)


def _declared_problems(declared: Mapping[str, Any], n_examples: int) -> list[str]:
    """What run.json says of data and clipping, and a replay cannot do."""
    problems = []
    n_train = first_at(declared, ("data", "n_train"))
    if isinstance(n_train, int) and n_train != n_examples:
        problems.append(
            f"the spec's dataset has {n_examples} examples, run.json says {n_train}: give the data that was trained on"
        )
    clipping = first_at(declared, ("clipping",), ("training", "clipping"), ("recorder", "clipping"))
    if clipping not in (
        None,
        "flat",
        "individual",
    ):  # clipping individually contributes no more than flat clipping
        problems.append(
            f"run.json says clipping={clipping!r}; only a run that clipped flat can be replayed"
        )
    return problems


def _notes(models: Sequence[SavedModel]) -> list[str]:
    first = models[0].step
    return (
        [f"the first checkpoint is of step {first}: the steps before it count at max_grad_norm"]
        if first
        else []
    )


def _caveats(
    models: Sequence[SavedModel], total: int, source: str, sample_rate: FloatArray, n_examples: int
) -> list[str]:
    caveats = []
    last = models[-1].step
    if last < total:
        caveats.append(
            f"the last checkpoint is of step {last} of {total}, and its norms stand for the steps from it on"
        )
    if source == ACCOUNTANT:
        caveats.append(
            f"the account ends with the {total} steps that the accountant in the last checkpoint counted; if training went on, "
            "give --steps"
        )
    rate = float(sample_rate[0])
    per_epoch, batch = 1 / rate, rate * n_examples
    if not (
        math.isclose(per_epoch, round(per_epoch), rel_tol=1e-6)
        or math.isclose(batch, round(batch), rel_tol=1e-6)
    ):
        caveats.append(
            f"sample_rate={rate:.6g} is neither 1 / (whole steps an epoch), as Opacus samples, nor a whole batch size over "
            f"the {n_examples} examples of the spec's dataset: it may not be the data that was trained on"
        )
    return caveats


def _steps_of(history: Sequence[tuple[float, float, int]]) -> int:
    return sum(steps for _, _, steps in history)
