"""Norms from checkpoints: of a run that was not recorded, or to challenge a log. Sensitive.

A checkpoint of step t has the parameters that step t starts from, so its norms are the record of
step t, from the same norm pass as a Recorder's. Nothing is known between checkpoints: an account of
a replayed log is always an estimate.

A challenge asks whether the norms of a log, at steps drawn in secret, are those of checkpoints and
data. A signature says whose log it is, this whether it is of the training that left these
checkpoints. It does not see how batches were drawn, or steps without a checkpoint or norms.
"""

import importlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from indpriv import _checks
from indpriv._facts import FAILED, FILES, NOT_CHECKED, PASSED, Fact, refused, text
from indpriv._files import first_at, write_json
from indpriv._reading import named
from indpriv._storage import location_on_disk
from indpriv._types import StageProgress, silent
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log import session_counts
from indpriv.norm_log.evidence import CHECKS, SEEDED
from indpriv.norm_log.journal_state import LogState, counts_at, read_ids, read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import EXAMPLES, JOURNAL, RUN_JSON, seal
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.recording.checkpoints import safe_files, saved_models
from indpriv.recording.checkpoints.saved_models import Discovery, RunSettings, SavedModel
from indpriv.recording.norms.batches import FAULTS, with_targets
from indpriv.recording.norms.model_checks import check_memory
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.norms.shadow_model import described_parameters
from indpriv.recording.process import deferred_interrupts
from indpriv.recording.training_data import Measured, TrainingData, length, norms_of

_EXAMPLE = "my_package.training:spec or path/to/file.py:spec"
AUTO, REPLAYING = "auto", "replaying checkpoints"
_IMPORT_FAULTS: tuple[type[Exception], ...] = (*FAULTS, ImportError, SyntaxError, OSError)
_CHECKED = 256  # examples on which norms are checked
TOLERANCE = 5e-3  # of a norm, beside the log's rounding: machines and backends differ by less
_CLIPPINGS = ("flat", "individual", "quantile")  # under which the log has norms of gradients
_SHARE = 0.2  # of the steps: a forgery of as many is what the odds are about
_HALF = 0.25, 0.05  # of a norm and of the clipping norm: half precision moves few norms by more
_MOVED = 0.05  # share of the norms that are not that few any more
_HALF_SLACK = 2**-5  # that a recorder adds to norms in half precision, at most


@dataclass(frozen=True, kw_only=True)
class AuditSpec(TrainingData):
    """The model, data and loss of a run, which the user writes once, like the training code.

    Attributes:
        model: `model()` -> the module that was trained, without Opacus's wrapper, with the same
            parameters frozen and in the same mode.
        dataset: the training set: map-style, of (inputs, targets), in the order used in training,
            without random augmentation.
        load: `load(state)` -> state_dict, for checkpoints of an unusual layout; state is the saved
            object.
        collate_fn: collate function of the data loader used in training; default torch's.
        loss_fn, test_set, metadata, test_metadata, unit, unit_ids, example_ids, unpack: as of
            `Recorder`.

    Raises:
        InputError: a value has the wrong type, or does not fit the dataset.

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from indpriv.recording import AuditSpec
    >>> inputs = torch.arange(60.0).reshape(20, 3) / 60
    >>> train_set = TensorDataset(inputs, (inputs[:, 0] > 0.5).long())
    >>> def build_model():
    ...     return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> loss_fn = nn.CrossEntropyLoss(reduction="none")
    >>> spec = AuditSpec(model=build_model, dataset=train_set, loss_fn=loss_fn)
    >>> spec.n_examples
    20
    """

    model: Callable[[], nn.Module]
    load: safe_files.LoadFn | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss_fn", *(["load"] if self.load is not None else [])):
            if not callable(found := getattr(self, name)):
                kind = type(found).__name__
                raise refused("refusal.checkpoints", "no_function", name=name, kind=kind)
        if isinstance(self.model, nn.Module):
            raise refused("refusal.checkpoints", "model_is_a_module")
        object.__setattr__(self, "model", partial(_built, self.model))
        object.__setattr__(self, "loss_fn", with_targets(self.loss_fn))
        super().__post_init__()
        if self.test_set is not None and length(self.test_set, "test_set") == 0:
            raise InputError("AuditSpec: test_set is empty; leave it out")

    @property
    def n_examples(self) -> int:
        """Number of training examples."""
        return len(self.ids)


def _built(build: Callable[[], Any]) -> nn.Module:
    """What a user's function builds; InputError if it fails, or that is no module."""
    try:
        if isinstance(found := build(), nn.Module):
            return found
    except InputError:
        raise
    except _IMPORT_FAULTS as error:
        raise refused("refusal.checkpoints", "model_fails", error=error) from error
    raise refused("refusal.checkpoints", "no_model", kind=type(found).__name__)


def load_spec(reference: str) -> AuditSpec:
    """Import an AuditSpec from "package.module:spec" or "file.py:spec", which runs it."""
    found = load_name(f"--spec {reference}", reference, _EXAMPLE)[1]
    return checked_spec(f"--spec {reference}", reference.rpartition(":")[2], found)


def checked_spec(said: str, name: str, found: Any) -> AuditSpec:
    """What a file calls by this name, if it is an AuditSpec; said: begins the message."""
    if not isinstance(found, AuditSpec):
        raise InputError(f"{said}: {name} is a {type(found).__name__}, not an AuditSpec")
    return found


def load_name(said: str, reference: str, example: str) -> tuple[ModuleType, Any]:
    """The module of "module:name" or "file.py:name", and what has that name there."""
    place, colon, name = reference.rpartition(":")
    path, is_file = Path(place), place.endswith(".py")
    if not (colon and place and name):
        raise InputError(f"{said}: expected module and name, e.g. {example}")
    if is_file and not path.is_file():
        raise InputError(f"{said}: {place} does not exist; expected e.g. {example}")
    # Import from there too, and keep doing so: building a model may import more.
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if is_file:
            found: Any = spec_from_file_location(f"_indpriv_spec_{path.stem}", path.absolute())
            module = module_from_spec(found)
            sys.modules[found.name] = module  # dataclasses and pickle look up modules there
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except InputError:
        raise
    except _IMPORT_FAULTS as error:
        values = {"place": place, "kind": type(error).__name__, "error": error, "example": example}
        # Behind this call and importlib's own: where the user's file failed.
        frames = [one for one in extract_tb(error.__traceback__)[1:] if one.filename[0] != "<"]
        own = [one for one in frames if one.filename != importlib.__file__]
        at: Any = own[0] if own else error  # one of syntax has a place itself
        case = "its_own" if own or isinstance(error, SyntaxError) else "no_module"
        values |= {"file": at.filename, "line": at.lineno} if case == "its_own" else {}
        raise refused("refusal.checkpoints", case, said=said, **values) from error
    if not hasattr(module, name):
        made = "AuditSpec(...)" if name == "spec" else "..."
        raise InputError(f"{said}: {place} has no {name!r}; define it there, e.g. {name} = {made}")
    return module, getattr(module, name)


def replay(
    checkpoints: str | Path,
    spec: AuditSpec | str | None,
    run_dir: str | Path,
    *,
    options: saved_models.StepOptions | None = None,
    device: str = "cpu",
    batch_size: int | str = AUTO,
    rounding: float = 0.01,
    rounding_mode: str = "up",
    progress: StageProgress = silent,
    tell: Callable[[str], object] = lambda _: None,
) -> None:
    """Compute every example's gradient norm at every checkpoint, and write a run directory.

    A replay that was interrupted, or whose run has grown since, continues at the next checkpoint
    when it is called again. Nothing in a checkpoint is run, see `read_content`. Where a Recorder's
    log lies in the folder or above it, settings, parameters and labels are compared with it, and
    what a check of it refuted is refuted of the replay too.

    Args:
        checkpoints: folder of the checkpoints, in any order; for their steps see `StepOptions`.
        spec: how to rebuild model and data, or where that stands: "module:spec" or "file.py:spec".
        run_dir: directory of log, run.json and examples.parquet; created (0700).
        options: settings that neither run.json nor the checkpoints contain.
        device: device to compute on, e.g. "cpu" or "cuda".
        batch_size: examples at once, or "auto" for what memory takes; halved if it runs out.
        rounding: rounding of norms, as a fraction of max_grad_norm; 0 keeps float64.
        rounding_mode: "up" (never under-reports) or "nearest" (as in the paper).
        progress: called as progress(stage, done, total) after each checkpoint.
        tell: called with each text that a user should read before the work starts: gaps, accuracy
            of the last checkpoint, dropout.

    Raises:
        InputError: everything that is missing, contradictory, unsafe or does not fit, in one
            message. Checkpoints that were replayed before stay in the log.
    """
    run_dir, folder = location_on_disk(run_dir, "a replay is"), Path(checkpoints)
    if isinstance(batch_size, int):
        _checks.check_positive_int("batch_size", batch_size)
    else:
        _checks.check_choice("batch_size", batch_size, (AUTO,))
    rebuilt, found, settings = _checked(folder, spec, options or saved_models.StepOptions())
    for note in (*found.notes, *settings.caveats):
        tell(note)
    last = found.models[-1].path
    made = CheckpointPass(rebuilt, last, device, batch_size)
    with made.norm_pass:
        examples = made.example_table()
        correct = examples.frame.dropna(subset="correct")
        accuracy = correct["correct"].astype(float).groupby(correct["split"], sort=False).mean()
        shares = [f"{share:.1%} of the {split} examples" for split, share in accuracy.items()]
        unknown = "an unknown share of the examples: the task has no accuracy"
        tell(f"the last checkpoint, {last.name}, is correct on {' and '.join(shares) or unknown}")
        for caveat in made.caveats:
            tell(caveat)
        of_clip = "clipping_norm_epsilon"  # cost of the private release that it was set to
        paths = (of_clip,), ("training", of_clip), ("recorder", of_clip)
        paid, seeds = first_at(settings.declared, *paths), (("seeded",), ("recorder", "seeded"))
        live, clip = settings.live, options and options.max_grad_norm
        if live:
            paid, same = max(paid or 0.0, live.clipping_norm_epsilon), made.same(live, found.models)
            tell(text("sentence.replay", "live", log=live.run_dir, same=same, n=len(found.models)))
        header = LogHeader(
            rounding=_checks.check_rounding(rounding),
            rounding_mode=_checks.check_choice("rounding_mode", rounding_mode, ("up", "nearest")),
            unit=rebuilt.unit,
            neighbouring=live.header["neighbouring"] if live else "add_remove",
            sampler=settings.sampler,
            individually_clipped=False,
            norm_pass=made.norm_pass.to_header(made.caveats),
            run={
                "replayed": True,
                "seeded": any(first_at(settings.declared, path) for path in seeds)
                or bool(live and live.seeded),
                of_clip: _checks.check_clipping_norm_epsilon(0.0 if paid is None else paid, clip),
                **described_parameters(made.model),
            },
        )
        _write_log(run_dir, made, found.models, settings, header, progress)
    write_json(run_dir / RUN_JSON, _run_json(folder.resolve(), settings))
    examples.to_parquet(run_dir / EXAMPLES)
    seal(run_dir)


def _checked(
    folder: Path, spec: AuditSpec | str | None, options: saved_models.StepOptions
) -> tuple[AuditSpec, Discovery, RunSettings]:
    """Everything that the work needs; one InputError with all that is missing."""
    unknown, rebuilt, model = Discovery(), None, None
    with unknown.collecting():
        if spec is None:
            raise refused("refusal.checkpoints", "no_spec")
        rebuilt = load_spec(spec) if isinstance(spec, str) else spec
        model = rebuilt.model()
    load, n = (None, None) if rebuilt is None else (rebuilt.load, rebuilt.n_examples)
    found = saved_models.discover(folder, load, options.step_of or (), model)
    found.problems[:0] = unknown.problems
    settings = saved_models.resolve(folder, found, options, n)
    if rebuilt is not None and settings is not None and (live := settings.live) is not None:
        ids, units, _ = read_ids(live)
        pairs = (
            (live.header["unit"], rebuilt.unit),
            (ids, rebuilt.ids),
            (units, rebuilt.ids_of_units),
        )
        if not all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs):
            said = {"log": live.run_dir, "unit": live.header["unit"]}
            found.problems.append(text("refusal.checkpoints", "other_ids", **said))
    found.check(folder)
    if rebuilt is None or settings is None:  # never: each adds a problem
        raise refused("refusal.checkpoints", "no_spec")
    return rebuilt, found, settings


def _run_json(folder: Path, settings: RunSettings) -> dict[str, Any]:
    """run.json of the replay: what the training run declared, and the settings of the account."""
    declared = {key: value for key, value in settings.declared.items() if key != "recorder"}
    columns = vars(settings.steps).items()
    constant = {name: float(column[0]) for name, column in columns if np.ptp(column) == 0}
    said = {**constant, "delta": settings.delta, "sampler": settings.sampler}
    return {
        "name": folder.parent.name if folder.name == "checkpoints" else folder.name,
        **declared,
        "training": {**(declared.get("training") or {}), **said},
        "replayed": {"checkpoints": str(folder), "sources": dict(settings.sources)},
    }


def _write_log(
    run_dir: Path,
    made: "CheckpointPass",
    models: Sequence[SavedModel],
    settings: RunSettings,
    header: LogHeader,
    progress: StageProgress,
) -> None:
    """Append every record that is not in the log yet, and the settings of all steps."""
    steps, total, seeded = settings.steps, len(settings.steps), header.run["seeded"]
    models = [model for model in models if model.step < total]  # that a step starts from
    n_done, logged = _already_done(run_dir, models, settings, made)
    caveats = (
        f"norms were computed from {len(models)} saved checkpoints, not recorded in training",
        *settings.caveats,
        *made.caveats,
        *([SEEDED] if seeded else []),
    )
    live = settings.live
    failed = [one for one in (verify(live) if live else ()) if one.status == FAILED]
    refuted = {
        one.key: f"by {saved_models.LIVE}: {one.detail}"
        for one in failed
        if one.key in CHECKS and CHECKS[one.key].line
    }

    def counts(weights: str | None = None) -> SessionCounts:
        """Where steps come from. No Recorder watched the training, so nothing was counted."""
        sources, all_counted = settings.sources, settings.accountant_counted_all
        replayed = session_counts.Replay(
            sources=sources,
            accountant_counted_all=all_counted,
            weights_fingerprint=weights,
            refuted=refuted,
        )
        return SessionCounts(
            from_step=0, seeded=seeded, caveats=caveats, sampler=settings.sampler, replayed=replayed
        )

    ends = [*(model.step for model in models), total]
    ids = made.spec.ids, made.spec.ids_of_units
    with closing(NormLogWriter(run_dir, header, *ids)) as writer:
        progress(REPLAYING, n_done, len(models))
        writer.spans(steps, logged, ends[n_done], counts())
        for number, model in enumerate(models[n_done:], n_done):
            taken, weights = made.norms_at(model.path)
            with deferred_interrupts():
                writer.record(
                    model.step,
                    taken.norms,
                    max_grad_norm=float(steps.max_grad_norm[model.step]),
                    targets_fingerprint=taken.targets_fingerprint,
                    seconds=taken.seconds,
                )
                first = max(model.step, logged)
                writer.spans(steps, first, ends[number + 1], counts(weights))
            progress(REPLAYING, number + 1, len(models))
        if n_done < len(models) or logged < total:
            writer.finish(counts())


def _already_done(
    run_dir: Path, models: Sequence[SavedModel], settings: RunSettings, made: "CheckpointPass"
) -> tuple[int, int]:
    """Number of checkpoints and steps in the log of an earlier replay of these; else InputError."""
    journal = run_dir / JOURNAL
    if not journal.is_file() or not journal.stat().st_size:
        return 0, 0
    state = read_state(run_dir)
    again = f"{run_dir}: choose another directory, or remove this one to start again"
    if not state.header["run"].get("replayed"):
        raise InputError(f"there is the log of a recorded run in {again}")
    recorded, logged = [entry["step"] for entry in state.lines["record"]], state.total_steps
    weights = {
        entry["first"]: entry["evidence"]["replayed"]["weights_fingerprint"]
        for entry in state.steps
    }
    done, now = models[: len(recorded)], vars(settings.steps)
    then = vars(state.settings()) if logged else {}
    same = {name: np.array_equal(column, now[name][:logged]) for name, column in then.items()}
    same["sampler"] = state.header["sampler"] == settings.sampler
    same["the steps of the checkpoints"] = [model.step for model in done] == recorded
    for model in done if all(same.values()) else ():
        same[str(model.path)] = weights.get(model.step) in (None, made.move_to(model.path))
    if not all(same.values()):
        other = ", ".join(name for name, holds in same.items() if not holds)
        raise InputError(f"not as in the replay before: {other}. Its log is in {again}")
    return len(recorded), logged


class CheckpointPass:
    """Model, data and norm pass, which move from checkpoint to checkpoint."""

    def __init__(
        self, spec: AuditSpec, first: Path, device: str = "cpu", batch_size: int | str = AUTO
    ) -> None:
        """Build the model, load a first checkpoint, and check at it how norms are computed."""
        self.spec, self.model = spec, spec.model().to(device)
        self._examples, self._test = spec.examples(spec.collate_fn, torch.device(device))
        self.move_to(first)
        inputs, targets = next(self._examples.batches(_CHECKED))
        self.norm_pass = NormPass(self.model, spec.loss_fn, inputs, targets)
        check_memory(self.model, inputs)
        spec.check_test_set(self.norm_pass, self._test)
        if isinstance(batch_size, int):
            self.norm_pass.batch_size = batch_size
        random = any(self._examples.random_parts)
        # Why these norms differ from training's.
        self.caveats = (*self.norm_pass.caveats, *[text("sentence.replay", "augmented")] * random)

    def move_to(self, path: Path) -> str:
        """Load a checkpoint into the model, and return a fingerprint of its weights."""
        return safe_files.fingerprint_of(safe_files.load_into(self.model, path, self.spec.load))

    def same(self, log: LogState, models: Sequence[SavedModel]) -> int:
        """How many models have a log's parameters of their steps; InputError if one has others."""
        same = 0
        for model in models:
            logged = counts_at(log, model.step).get("weights")
            if logged is not None and self.move_to(model.path) != logged.partition(" ")[0]:
                of = {"path": model.path, "step": model.step, "log": log.run_dir}
                raise refused("refusal.checkpoints", "other_log", **of)
            same += logged is not None
        return same

    def norms_at(self, path: Path) -> tuple[Measured, str]:
        """Every example's norm at a checkpoint, in seconds that include reading it; its weights."""
        start = time.perf_counter()
        weights = self.move_to(path)
        with named(path, broken=()):
            try:
                taken = norms_of(self.norm_pass, self._examples, self.spec.ids)
            except RuntimeError as error:
                first = safe_files.first_line(error)
                raise InputError(f"its norms cannot be computed: {first}") from error
        return replace(taken, seconds=time.perf_counter() - start), weights

    def example_table(self) -> ExampleTable:
        """Losses of training and test examples; InputError if one is not finite."""
        with self.norm_pass.evaluation() as model:
            table = self.spec.example_table(model, self._examples, self._test)
        bad = table.frame[~np.isfinite(table.frame["loss"].to_numpy(np.float64))]
        if len(bad):
            one = {"split": bad["split"].iloc[0], "example": bad["example_id"].iloc[0]}
            raise refused("refusal.checkpoints", "losses", count=len(bad), **one)
        return table


def challenge(
    checkpoints: str | Path,
    spec: AuditSpec | str,
    run_dir: str | Path,
    n: int = 10,
    *,
    step_of: saved_models.StepOf = (),
    device: str = "cpu",
    tell: StageProgress = silent,
) -> list[Fact]:
    """Compute norms at n steps, drawn in secret, from checkpoints and data, and compare the log's.

    If training used `torch.autocast`, call it under the same: otherwise norms that half precision
    can explain are "not checked". Details of the checks are sensitive.

    Args:
        checkpoints: folder of the checkpoints, as of `replay`.
        spec: how to rebuild model and data, as of `replay`.
        run_dir: directory of the log that is challenged.
        n: steps to draw, of those with norms in the log and a checkpoint; all if these are fewer.
        step_of: step of each checkpoint, see `StepOptions`.
        device: device to compute on, e.g. "cpu" or "cuda".
        tell: called as tell("challenging", done, total) after each step.

    Returns:
        three checks: of the examples, of their norms, and of noise, which is never seen.

    Raises:
        InputError: something cannot be read, no step has norms and a checkpoint, or norms under
            this clipping, of this model or of this data set cannot be compared.
    """
    _checks.check_positive_int("challenges", n)
    spec = load_spec(spec) if isinstance(spec, str) else spec
    run = open_run(run_dir)
    log, header = run.log, run.header
    if (kind := header["run"].get("clipping", "flat")) not in _CLIPPINGS:
        raise InputError(f"{run_dir}: norms under {kind} clipping cannot be challenged; replay it")
    found = saved_models.discover(Path(checkpoints), spec.load, step_of)
    found.check(checkpoints)
    saved = {model.step: model.path for model in found.models}
    with_norms = {*log.recorded_steps.tolist()}
    with_norms |= {*log.batch_norms.steps.tolist()} if log.batch_norms else set()
    there = sorted(with_norms & saved.keys())
    if not there:
        firsts = {"saved": sorted(saved)[:5], "logged": sorted(with_norms)[:5]}
        of = {"checkpoints": checkpoints, "run_dir": run_dir}
        raise refused("refusal.checkpoints", "none_has_both", **firsts, **of)
    drawn = sorted(secrets.SystemRandom().sample(there, min(n, len(there))))
    made = CheckpointPass(spec, saved[drawn[0]], device)
    if made.caveats:
        raise InputError(f"norms cannot be compared with training's: {'; '.join(made.caveats)}")
    own, data = (np.asarray(ids).astype(str) for ids in (log.example_ids, spec.ids))
    place = pd.Index(data).get_indexer(pd.Index(own))  # of the log's examples in the data, or -1
    differ, n_norms, far = list[str](), 0, 0
    half = any(one.training and one.training.clip_rounding for one in run.sessions)
    batches = None if log.batch_norms is None else log.batch_norms.read(0, log.n_examples)
    headroom = (header["run"].get("clip_headroom") or 0.0) * log.individually_clipped
    slack = made.norm_pass.slack  # of both, and what a log says without half precision is not more
    said = min(header["norm_pass"].get("slack") or 0.0, slack + _HALF_SLACK * half)
    slack += TOLERANCE + said

    def differs(codes: Any, norms: Any, clip: float, share: float, of_clip: float) -> Any:
        """Whether each code is none that its norm, give or take this room, is rounded to."""
        room = norms * share + of_clip * clip
        bounds = np.maximum(norms - room, 0), norms + room
        low, high = (log.levels.encode(one, clip) for one in bounds)
        return (codes < low) | (codes > high)

    with made.norm_pass:
        for number, step in enumerate(drawn, 1):
            norms = made.norms_at(saved[step])[0].norms
            clip = float(log.settings.max_grad_norm[step])
            # Positions and codes of each group of norms, and what was added to these norms.
            groups = [
                (np.arange(log.n_examples), codes, headroom)
                for codes in log.records[log.recorded_steps == step].read(0, log.n_examples)
            ]
            if batches is not None:
                at = batches.step == step
                groups.append((batches.position[at], batches.norm[at], 0.0))
            for positions, codes, added in groups:
                known = place[positions] >= 0
                positions, codes = positions[known], codes[known]
                now = norms[place[positions]] + added * clip
                wrong = differs(codes, now, clip, slack, 1e-6)
                far += int(differs(codes, now, clip, *_HALF).sum())
                differ += [f"{own[one]} at step {step}" for one in positions[wrong]]
                n_norms += len(now)
            tell("challenging", number, len(drawn))
    counts = {"n": n_norms, "drawn": len(drawn), "there": len(there), "total": log.total_steps}
    steps, one = ", ".join(map(str, drawn)), differ[0] if differ else ""
    compared = text("sentence.challenge", "compared", steps=steps, **counts)
    missed = max(100 * (1 - _SHARE) ** len(drawn), 0.01) if len(drawn) < len(there) else 0
    status, case = (FAILED, "differ") if differ else (PASSED if n_norms else NOT_CHECKED, "missed")
    said = {"compared": compared, "example": one}
    verdict = text("sentence.challenge", case, missed=missed, differ=len(differ), **said)
    if differ and half and far <= _MOVED * n_norms:
        status, verdict = NOT_CHECKED, text("sentence.challenge", "half", found=verdict)
    only = [*own[place < 0].tolist(), *np.setdiff1d(data, own).tolist()]
    few = f"{len(only):,} are only in the log or only in the data, e.g. {only[0]}" if only else ""
    checks = (
        ("examples", FAILED if few else PASSED, few or "the same in log and data"),
        ("norms", status, verdict),
        ("noise", NOT_CHECKED, "a forged noise multiplier is not seen"),
    )
    return [Fact("challenge", "check", *one, bears_on=FILES, private=True) for one in checks]
