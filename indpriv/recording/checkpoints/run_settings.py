"""Settings of the steps of a run that was not recorded: from run.json, accountant and options.

Public values. Everything that is missing or contradictory is collected, so that the user sees it in
one message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from indpriv.recording.checkpoints.discovery import Discovery, SavedModel, Span
from indpriv.recording.checkpoints.step_names import STEP_OF, what_to_type
from indpriv.recording.checkpoints.step_values import (
    ACCOUNTANT,
    OPTIONS,
    combined,
    known_values,
)

# The sampler classes of Opacus that a Recorder reports.
_POISSON_CLASSES = ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler")
# A checkpoint does not say at which size batches were truncated.
_REPLAYED = tuple(sampler for sampler in SAMPLERS if sampler != "truncated_poisson")
_MAX_STEPS = 10**8  # arrays of all steps are held in memory
_EXAMPLES = {
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
        step_of: rules for the step of a checkpoint, as the number of updates that it has had, from
            its file name: "model_{epoch}.pt=20*epoch", or "model_a.pt=0,model_b.pt=20". Needed
            where neither the files nor the word step in their names tell it.
    """

    noise_multiplier: float | str | None = None
    max_grad_norm: float | str | None = None
    sample_rate: float | str | None = None
    steps: int | None = None
    delta: float | None = None
    sampler: str | None = None
    step_of: str | Sequence[str] | None = None


@dataclass(frozen=True)
class RunSettings:
    """Settings of a whole run, as in `StepOptions`, but known for every step.

    Attributes:
        seeded: run.json says that the run is reproducible, so it has no privacy.
        sources: setting -> where it comes from.
        accountant_counted_all: the accountant in the last checkpoint counted every step, so that
            noise_multiplier and sample_rate come from it.
        declared: content of run.json; {} if there is none.
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
    """Settings, or the problems that prevent them; caveats weaken any account of the run."""

    settings: RunSettings | None
    notes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def resolve(folder: Path, found: Discovery, options: StepOptions, n_examples: int) -> Resolved:
    """Find every setting: first in run.json, then in Opacus's accountant, then in the options.

    run.json is in the folder of the checkpoints, or beside it if that is named checkpoints. The
    number of examples in the training set is compared with run.json.
    """
    sources = _Sources(folder, found.models, options)
    total, said_by = sources.total_steps()
    values = {name: sources.values(name, total) for name in SETTING_NAMES}
    delta, sampler = sources.delta(), sources.sampler()
    for name, value in (("steps", total), ("delta", delta), ("sampler", sampler)):
        if value is None:
            sources.missing.append(name)
    sources.check_clipping(n_examples, values["max_grad_norm"])
    problems = [*sources.problems, *_far_below(found, total or 0)]
    if sources.missing:
        ordered = sorted(sources.missing, key=lambda name: list(_EXAMPLES).index(name.split()[0]))
        examples = " ".join(_EXAMPLES[name.split()[0]] for name in ordered)
        problems.append(
            f"not known: {', '.join(ordered)}. Pass {examples} (with your values), or write a "
            "run.json beside the checkpoints"
        )
    if problems or not found.models or total is None or delta is None or sampler is None:
        return Resolved(None, problems=tuple(problems))
    sources.said_by["steps"] = said_by
    sources.said_by["steps of checkpoints"] = found.models[-1].said_by
    known = {name: value for name, value in values.items() if value is not None}
    settings = RunSettings(
        steps=StepSettings.from_values(total, **known),
        delta=delta,
        sampler=sampler,
        seeded=bool(sources.declared.get("seeded")),
        sources=sources.said_by,
        accountant_counted_all=_n_steps(sources.history) == total,
        declared=sources.declared,
    )
    first, last = found.models[0].step, found.models[-1].step
    notes = [f"the first checkpoint is of step {first}: steps before it count at max_grad_norm"]
    caveats = _end_caveats(last, total, said_by)
    caveats += _rate_caveats(float(settings.steps.sample_rate[0]), n_examples)
    return Resolved(settings, tuple(notes if first else ()), tuple(caveats))


class _Sources:
    """run.json, the accountant in the checkpoints and the options, and the problems with them."""

    def __init__(self, folder: Path, models: Sequence[SavedModel], options: StepOptions) -> None:
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.said_by: dict[str, str] = {}
        self.declared = self._read_declared(folder)
        self.history: Sequence[Span] = max((m.history for m in models), key=_n_steps, default=())
        self._models, self._options = models, options

    def _read_declared(self, folder: Path) -> Mapping[str, Any]:
        beside = folder.resolve().name == "checkpoints"
        folders = [folder, *([folder.parent] if beside else [])]
        try:
            return next((read_run_json(one) for one in folders if (one / RUN_JSON).is_file()), {})
        except InputError as error:
            self.problems.append(str(error))
            return {}

    def total_steps(self) -> tuple[int | None, str]:
        """Number of steps of the run, not fewer than any source says, and its source."""
        known: dict[str, int] = {}
        said = {RUN_JSON: self.declared.get("steps"), OPTIONS: self._options.steps}
        for source, value in said.items():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_STEPS:
                self.problems.append(
                    f"{source}: steps={value!r} is not a whole number from 1 to {_MAX_STEPS}"
                )
            else:
                known[source] = value
        self._check_same("steps", known)
        counted = _n_steps(self.history)
        if not known:
            return (counted, ACCOUNTANT) if counted else (None, "")
        source, total = next(iter(known.items()))
        reached = max([counted, *(model.step for model in self._models)])
        if total < reached:
            self.problems.append(
                f"steps is {total} by {source}, but a checkpoint has had {reached} updates: pass "
                f"the number of steps of the whole run, or correct {STEP_OF}"
            )
        return total, source

    def _check_same(self, name: str, known: Mapping[str, object]) -> None:
        if len(set(known.values())) > 1:
            listed = ", ".join(f"{value} by {source}" for source, value in known.items())
            self.problems.append(f"the values of {name} contradict each other: {listed}")

    def values(self, name: str, total: int | None) -> FloatArray | None:
        """(total,) values of a setting of the steps, or None if one is missing or contradictory."""
        try:
            known = known_values(
                name, self.declared, self.history, getattr(self._options, name), total
            )
            values = combined(name, known, total or 1)
        except InputError as error:
            self.problems.append(str(error))
            return None
        self.said_by[name] = " and ".join(source for source, _ in known)
        unknown = np.isnan(values)
        if not known:
            self.missing.append(name)
        elif total and unknown.any():
            self.missing.append(f"{name} of the steps from {int(unknown.argmax())} on")
        return values if total and not unknown.any() else None

    def delta(self) -> float | None:
        """The delta of the account; the user may choose another than the run declared."""
        declared = first_at(self.declared, ("delta",), ("training", "delta"))
        said = declared if self._options.delta is None else self._options.delta
        self.said_by["delta"] = RUN_JSON if self._options.delta is None else OPTIONS
        if said is None:
            return None
        try:
            return _checks.check_delta(said)
        except InputError as error:
            self.problems.append(str(error))
            return math.nan

    def sampler(self) -> str | None:
        """What drew the batches."""
        said = first_at(self.declared, ("sampler",), ("training", "sampler"))
        if (
            said is None
            and first_at(self.declared, ("recorder", "sampler_class")) in _POISSON_CLASSES
        ):
            said = "poisson"
        known = {RUN_JSON: said, OPTIONS: self._options.sampler}
        known = {source: value for source, value in known.items() if value is not None}
        for source, value in known.items():
            if value not in _REPLAYED:
                self.problems.append(
                    f"{source}: sampler={value!r} is not known; choose one of "
                    f"{', '.join(_REPLAYED)}"
                )
        self._check_same("sampler", known)
        self.said_by["sampler"] = OPTIONS if self._options.sampler is not None else RUN_JSON
        return next(iter(known.values()), None)

    def check_clipping(self, n_examples: int, max_grad_norm: FloatArray | None) -> None:
        """Collect what a replay cannot handle: another data set, clipping that is not flat."""
        n_train = first_at(self.declared, ("data", "n_train"))
        if isinstance(n_train, int) and n_train != n_examples:
            self.problems.append(
                f"the spec's dataset has {n_examples} examples, run.json says {n_train}: pass the "
                "data used in training"
            )
        clipping = first_at(
            self.declared, ("clipping",), ("training", "clipping"), ("recorder", "clipping")
        )
        # With individual clipping, no example contributes more than with flat clipping.
        if clipping not in (None, "flat", "individual"):
            self.problems.append(
                f"run.json says clipping={clipping!r}; only runs with flat clipping can be replayed"
            )
        if reason := first_at(self.declared, ("recorder", "no_privacy")):
            self.problems.append(f"the run has no privacy to account for: {reason}")
        moving = next((model.path.name for model in self._models if model.clipping_moves), None)
        if moving and max_grad_norm is not None and np.ptp(max_grad_norm) == 0:
            self.problems.append(
                f"{moving} contains the state of a clipping scheduler, so max_grad_norm changed, "
                "but only one value is known; pass all of them, "
                "e.g. --set max_grad_norm=1.0,0.9@100,0.81@200"
            )


def _far_below(found: Discovery, total: int) -> list[str]:
    """A last step below half of the run's may count something else, such as epochs."""
    if found.problems:  # perhaps no step is known
        return []
    last = found.models[-1]
    if 2 * last.step >= total or last.said_by == STEP_OF:
        return []
    typed = what_to_type([model.path.name for model in found.models])
    epochs = typed.replace('=step"', '=20*step" if an epoch has 20 steps')
    return [
        f"the run has {total} steps, but the last checkpoint, {last.path.name!r}, is of step "
        f"{last.step} by {last.said_by}, far below. Say how many updates it has had, e.g. "
        + (epochs if epochs == typed else f"{epochs}, or {typed} if {last.step} is right")
    ]


def _end_caveats(last: int, total: int, said_by: str) -> list[str]:
    caveats = []
    if last < total:
        caveats.append(
            f"the last checkpoint is of step {last} of {total}, and its norms are used for the "
            "steps from it on"
        )
    if said_by == ACCOUNTANT:
        caveats.append(
            f"the account ends with the {total} steps that the accountant in the last checkpoint "
            "counted; if training went on, pass --set steps=..."
        )
    return caveats


def _rate_caveats(rate: float, n_examples: int) -> list[str]:
    possible = (1 / rate, rate * n_examples)
    if any(math.isclose(number, round(number), rel_tol=1e-6) for number in possible):
        return []
    return [
        f"sample_rate={rate:.6g} is neither 1 / (a whole number of steps per epoch), as Opacus "
        f"samples, nor a whole batch size over the {n_examples} examples of the spec's dataset: it "
        "may not be the data used in training"
    ]


def _n_steps(history: Sequence[Span]) -> int:
    return sum(steps for _, _, steps in history)
