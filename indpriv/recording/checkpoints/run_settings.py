"""Settings of the steps of a run that was not recorded: from run.json, accountant and options.

Public values. Everything that is missing or contradictory is collected, so that the user sees it in
one message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv._files import first_at
from indpriv.errors import InputError
from indpriv.norm_log.run_files import RUN_JSON, read_run_json
from indpriv.norm_log.step_settings import SETTING_NAMES, StepSettings
from indpriv.norm_log.validation import SAMPLERS
from indpriv.recording.checkpoints.saved_models import (
    MAX_STEPS,
    STEP_OF,
    Discovery,
    Span,
    StepOf,
    at_each_step,
    collected,
    what_to_type,
)

ACCOUNTANT, OPTIONS = "the accountant in the checkpoints", "the options"
# The sampler classes of Opacus that a Recorder reports.
_POISSON_CLASSES = ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler")
# A checkpoint does not say at which size batches were truncated.
_REPLAYED = tuple(sampler for sampler in SAMPLERS if sampler != "truncated_poisson")
_SAME = 1e-9  # relative difference of one number that was written and read again
_CHECKS = {
    "noise_multiplier": _checks.check_noise_multiplier,
    "max_grad_norm": _checks.check_max_grad_norm,
    "sample_rate": _checks.check_sample_rate,
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
class RunSettings:
    """Settings of a whole run, as in `StepOptions`, but known for every step.

    Attributes:
        sources: setting -> where it comes from.
        accountant_counted_all: the accountant in the last checkpoint counted every step, so that
            noise_multiplier and sample_rate come from it.
        declared: content of run.json; {} if there is none.
        caveats: what weakens any account of the run.
    """

    steps: StepSettings
    delta: float
    sampler: str
    sources: Mapping[str, str]
    accountant_counted_all: bool
    declared: Mapping[str, Any]
    caveats: list[str]

    @property
    def seeded(self) -> bool:
        """Whether run.json says that the run is reproducible, so that it has no privacy."""
        return bool(self.declared.get("seeded"))


def resolve(
    folder: Path, found: Discovery, options: StepOptions, n_examples: int | None
) -> RunSettings | None:
    """Find every setting: in run.json, in the options and in Opacus's accountant.

    run.json is in the folder of the checkpoints, or beside it if that is named checkpoints. What is
    missing or contradicts another source, or the number of examples, is added to the problems of
    the checkpoints; the result is then None.
    """
    problems, models = found.problems, found.models
    beside = [folder.parent] if folder.resolve().name == "checkpoints" else []
    files = (place for place in (folder, *beside) if (place / RUN_JSON).is_file())
    declared: Mapping[str, Any] = {}
    with collected(problems):
        declared = next(map(read_run_json, files), {})
    counted = at_each_step(max((model.history for model in models), key=_n_steps, default=()))
    said = _said(declared, options, counted)
    total, columns = None, dict[str, FloatArray]()
    with collected(problems):
        total = _total(said["steps"], max([len(counted), *(model.step for model in models)]))
    for name in SETTING_NAMES:
        with collected(problems):
            columns[name] = _column(name, said[name], total or 1)
    with collected(problems):
        for delta in said["delta"].values():
            _checks.check_delta(delta)
    with collected(problems):
        for source, sampler in said["sampler"].items():
            _checks.check_choice(f"{source}: sampler", sampler, _REPLAYED)
        _check_same("sampler", said["sampler"])
    problems += _unfit(declared, found, total or 0, n_examples, columns.get("max_grad_norm"))
    if missing := [name for name in _TO_TYPE if not said[name]]:
        problems.append(
            f"not known: {', '.join(missing)}. Pass {' '.join(_TO_TYPE[name] for name in missing)} "
            "(with your values), or write a run.json beside the checkpoints"
        )
    if problems or total is None or n_examples is None:
        return None
    sources = {name: " and ".join(by_source) for name, by_source in said.items()}
    found.notes.extend(
        f"the first checkpoint is of step {model.step}: steps before it count at max_grad_norm"
        for model in models[:1]
        if model.step
    )
    return RunSettings(
        steps=StepSettings.from_values(total, **columns),
        delta=float([*said["delta"].values()][-1]),  # the user may choose another
        sampler=next(iter(said["sampler"].values())),
        sources={**sources, "steps of checkpoints": models[-1].said_by},
        accountant_counted_all=len(counted) == total,
        declared=declared,
        caveats=_caveats(models[-1].step, sources, total, columns["sample_rate"][0], n_examples),
    )


def _said(
    declared: Mapping[str, Any], options: StepOptions, counted: FloatArray
) -> dict[str, dict[str, Any]]:
    """Name of a setting -> source -> value, the most trusted source first."""
    said = {name: {RUN_JSON: first_at(declared, (name,), ("training", name))} for name in _TO_TYPE}
    if first_at(declared, ("recorder", "sampler_class")) in _POISSON_CLASSES:
        said["sampler"][RUN_JSON] = said["sampler"][RUN_JSON] or "poisson"
    for name, by_source in said.items():
        by_source[OPTIONS] = getattr(options, name)
    said = {name: {s: v for s, v in by.items() if v is not None} for name, by in said.items()}
    if len(counted):
        said["noise_multiplier"][ACCOUNTANT], said["sample_rate"][ACCOUNTANT] = counted.T
        said["steps"] = said["steps"] or {ACCOUNTANT: len(counted)}
    return said


def _n_steps(history: Sequence[Span]) -> int:
    return sum(steps for _, _, steps in history)


def _total(by_source: Mapping[str, int], reached: int) -> int | None:
    """Number of steps of the run, not fewer than a checkpoint has reached; None if none is said."""
    for source, steps in by_source.items():
        if _checks.check_positive_int(f"{source}: steps", steps) > MAX_STEPS:
            raise InputError(f"{source}: steps={steps} is more than {MAX_STEPS}")
    _check_same("steps", by_source)
    for source, steps in by_source.items():
        if steps < reached:
            raise InputError(
                f"steps is {steps} by {source}, but a checkpoint has had {reached} updates: pass "
                f"the number of steps of the whole run, or correct {STEP_OF}"
            )
    return next(iter(by_source.values()), None)


def _check_same(name: str, by_source: Mapping[str, object]) -> None:
    if len({*by_source.values()}) > 1:
        listed = ", ".join(f"{value} by {source}" for source, value in by_source.items())
        raise InputError(f"the values of {name} contradict each other: {listed}")


def _column(name: str, by_source: Mapping[str, Any], total: int) -> FloatArray:
    """(total,) values of a setting; InputError if two sources differ, or steps are left out."""
    column = np.full(total, np.nan)
    for source, value in by_source.items():
        these = np.full(total, np.nan)
        if source == ACCOUNTANT:
            these[: len(value)] = value[:total]
        elif isinstance(value, list):
            if len(value) != total:
                raise InputError(
                    f"{source}: {name} has {len(value)} values; write one, or one for each of "
                    f"{total} steps"
                )
            these[:] = _CHECKS[name](value)
        else:
            for start, number in parse_schedule(name, value):
                these[start:] = number
        differs = ~np.isnan(column) & ~np.isnan(these)
        differs &= ~np.isclose(column, these, rtol=_SAME, atol=0)
        if name == "sample_rate" and source == ACCOUNTANT:
            # Opacus's int(1 / (1 / n)) can be n - 1: it counts 1 / (k - 1) where 1 / k is drawn.
            less = np.isclose(1 / column - 1 / these, 1.0, rtol=1e-6)
            differs &= ~(less & (these > column))
        if differs.any():
            step = int(np.argmax(differs))
            raise InputError(
                f"the values of {name} contradict each other: at step {step} it is "
                f"{column[step]:.8g} by {next(iter(by_source))} and {these[step]:.8g} by {source}; "
                "remove the wrong one"
            )
        column = np.where(np.isnan(column), these, column)
        if name == "sample_rate" and source == ACCOUNTANT and RUN_JSON not in by_source:
            column = np.fmax(column, these)  # what an option says was not read from a sampler
    if by_source and np.isnan(column).any():
        step = int(np.argmax(np.isnan(column)))
        raise InputError(
            f"{name} of the steps from {step} on is not known: pass it for all steps, e.g. "
            f"{_TO_TYPE[name]}, or a schedule such as --set {name}=1.1,0.9@{step}"
        )
    return column


def parse_schedule(name: str, value: float | str) -> list[tuple[int, float]]:
    """[(first step, value), ...] from one value or a schedule such as "1.1,0.9@500"."""
    parts: list[tuple[int, float]] = []
    for part in str(value).split(","):
        number, at, start = part.strip().partition("@")
        try:
            parts.append((int(start) if at else 0, float(number)))
        except ValueError as error:
            raise InputError(
                f"{name}={value!r} is neither a number nor a schedule such as 1.1,0.9@500"
            ) from error
    starts = [start for start, _ in parts]
    if starts[0] != 0 or sorted(set(starts)) != starts:
        raise InputError(
            f"{name}={value!r}: a schedule must start at step 0 and give later steps in order"
        )
    for _, setting in parts:
        _CHECKS[name](setting)
    return parts


def _unfit(
    declared: Mapping[str, Any],
    found: Discovery,
    total: int,
    n_examples: int | None,
    max_grad_norm: FloatArray | None,
) -> Iterator[str]:
    """What a replay cannot handle: other data or checkpoints, clipping that is not flat."""
    n_train = first_at(declared, ("data", "n_train"))
    if isinstance(n_train, int) and n_examples not in (n_train, None):
        yield (
            f"the spec's dataset has {n_examples} examples, run.json says {n_train}: pass the "
            "data used in training"
        )
    places = (), ("training",), ("recorder",)
    clipping = first_at(declared, *((*place, "clipping") for place in places))
    # With individual clipping, no example contributes more than with flat clipping.
    if clipping not in (None, "flat", "individual"):
        yield f"run.json says clipping={clipping!r}; only runs with flat clipping can be replayed"
    if reason := first_at(declared, ("recorder", "no_privacy")):
        yield f"the run has no privacy to account for: {reason}"
    moving = [model.path.name for model in found.models if model.clipping_moves]
    if moving and max_grad_norm is not None and np.ptp(max_grad_norm) == 0:
        yield (
            f"{moving[0]} contains the state of a clipping scheduler, so max_grad_norm changed, "
            "but only one value is known; pass all of them, "
            "e.g. --set max_grad_norm=1.0,0.9@100,0.81@200"
        )
    last = found.models[-1] if found.models and not found.problems else None
    if last and 2 * last.step < total and last.said_by != STEP_OF:
        yield (
            f"the run has {total} steps, but the last checkpoint, {last.path.name!r}, is of step "
            f"{last.step} by {last.said_by}, far below, as where epochs were counted; "
            + what_to_type([model.path.name for model in found.models])
        )


def _caveats(
    last: int, sources: Mapping[str, str], total: int, rate: float, n_examples: int
) -> list[str]:
    """What weakens the account: steps after the last checkpoint, a rate that fits no data."""
    caveats = []
    if last < total:
        caveats.append(
            f"the last checkpoint is of step {last} of {total}, and its norms are used for the "
            "steps from it on"
        )
    if sources["steps"] == ACCOUNTANT:
        caveats.append(
            f"the account ends with the {total} steps that the accountant in the last checkpoint "
            "counted; if training went on, pass --set steps=..."
        )
    if not any(math.isclose(k, round(k), rel_tol=1e-6) for k in (1 / rate, rate * n_examples)):
        caveats.append(
            f"sample_rate={rate:.6g} is neither 1 / (a whole number of steps per epoch), as Opacus "
            f"samples, nor a whole batch size over the {n_examples} examples of the spec's "
            "dataset: it may not be the data used in training"
        )
    return caveats
