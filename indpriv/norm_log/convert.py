"""Convert norms that any trainer (JAX, TensorFlow, ...) wrote into a run directory. Sensitive.

One file holds the norms, as Parquet or npz; the other, run.json, the settings that accounting
needs. Parquet has a row per example and a column per record, named by its step, besides the columns
example_id, unit_id and participations if they are known. An npz file has the arrays norms
(n_records, n_examples) and recorded_steps (n_records,), besides example_ids, unit_ids and
participations. No recorder watched the training, so an account of the log is an estimate.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from indpriv import _checks, _facts, _files, _reading
from indpriv._storage import location_on_disk
from indpriv._types import IntArray, NDArray, StageProgress
from indpriv.errors import InputError
from indpriv.norm_log import evidence, fields, run_files, session_counts
from indpriv.norm_log.fields import SETTING_NAMES, StepSettings
from indpriv.norm_log.writer import LogHeader, NormLogWriter

DECLARED = _facts.text("sentence.claim", "other_trainer")
_WORDS = ("sampler", "unit", "neighbouring")
_DEFAULTS: Mapping[str, Any] = {"clipping": "flat", "clipping_norm_epsilon": 0.0}
_REQUIRED = ("steps", *SETTING_NAMES, *_WORDS)
# Columns of a Parquet file that are no records.
_OTHERS = ("example_id", "unit_id", "participations")


def convert(
    norms_file: str | Path,
    run_json: str | Path,
    output_dir: str | Path,
    *,
    rounding: float = 0.01,
    progress: StageProgress | None = None,
) -> None:
    """Write the log of a run that another trainer recorded into a new run directory.

    Everything is checked before anything is written. For a Parquet file, one record is in memory at
    a time.

    Args:
        norms_file: a Parquet or npz file, see this module. A record of step t (0-based) holds the
            norms, before clipping, at the parameters that step t starts from.
        run_json: an object with steps, noise_multiplier, max_grad_norm and sample_rate (each one
            number, or one for each step), sampler, unit and neighbouring, as of `NormLog`; further
            keys are in docs/how-to/norms-from-elsewhere.md, and others are kept.
        output_dir: the run directory: new, or without a log.
        rounding: as a fraction of max_grad_norm, upwards; 0 keeps float64.
        progress: called as progress(stage, done, total), in records.

    Raises:
        InputError: a value is missing, wrong or out of range, or there are microbatches.
    """
    norms_file, run_dir = Path(norms_file), location_on_disk(output_dir, "converted norms are")
    _checks.check_rounding(rounding)
    content, settings = _read_settings(Path(run_json))
    declared = {**_DEFAULTS, **content}
    kind = norms_file.suffix
    if not norms_file.is_file():
        raise InputError(f"{norms_file} does not exist")
    if kind not in (".parquet", ".npz"):
        raise InputError(f"{norms_file} is neither .parquet nor .npz; write the norms as one")
    norms = _read_parquet(norms_file) if kind == ".parquet" else _read_npz(norms_file)
    steps, seeded = norms.recorded_steps.tolist(), bool(declared.get("seeded"))
    _check_norms_file(norms, len(settings), declared["unit"])
    if run_files.holds_log(run_dir):
        raise _facts.refused("refusal.convert", "in_use", run_dir=run_dir)
    known = ("clipping", "clipping_norm_epsilon", "max_batch_size")
    header = LogHeader(
        rounding=rounding,
        rounding_mode="up",
        **{name: declared[name] for name in _WORDS},
        individually_clipped=declared["clipping"] == "individual",
        norm_pass={"backend": "another trainer", "slack": 0.0, "caveats": []},
        run={"converted": True, "seeded": seeded}
        | {name: declared[name] for name in known if declared.get(name) is not None},
    )
    with closing(NormLogWriter(run_dir, header, norms.example_ids, norms.unit_ids)) as writer:
        narrow = set()
        for number, step in enumerate(steps):
            exact, caveat = fields.widened(norms.read(number))
            narrow.add(caveat)
            writer.record(
                step,
                exact,
                max_grad_norm=float(settings.max_grad_norm[step]),
                targets_fingerprint="unknown",
                seconds=0.0,  # not known
            )
            if progress is not None:
                progress("converting", number + 1, len(steps))
        draws, rates = None, settings.sample_rate
        if norms.participations is not None:
            draws = session_counts.DrawCounts.of(
                norms.participations.astype(np.int64),
                draws=len(rates),
                expected=float(rates.sum()),
                variance=float((rates * (1 - rates)).sum()),
            )
        counts = session_counts.SessionCounts(  # nothing else was watched
            from_step=0,
            seeded=seeded,
            caveats=(DECLARED, *sorted(narrow - {""}), *([evidence.SEEDED] if seeded else [])),
            sampler=declared["sampler"],
            converted=session_counts.Conversion(source=norms_file.name),
            draws=draws,
        )
        writer.spans(settings, 0, len(settings), counts)
        _files.write_json(run_dir / run_files.RUN_JSON, {"name": run_dir.name, **content})
        writer.finish(counts)
    run_files.seal(run_dir)


def _read_settings(path: Path) -> tuple[Mapping[str, Any], StepSettings]:
    """What run.json declares, checked; one message names everything that is missing."""
    content = run_files.check_declared(_files.read_json(path), path)
    declared = {**_DEFAULTS, **content}
    missing = [name for name in _REQUIRED if declared.get(name) is None]
    if missing:
        raise _facts.refused("refusal.convert", "lacks", path=path, missing=", ".join(missing))
    microbatch = declared.get("microbatch_size", 1)
    if microbatch != 1:
        raise _facts.refused("refusal.convert", "microbatches", path=path, microbatch=microbatch)
    with _reading.named(path):
        numbers = {name: np.asarray(declared[name], dtype=np.float64) for name in SETTING_NAMES}
        sampler, unit, neighbouring = (declared[name] for name in _WORDS)
        fields.check_words(sampler, unit, neighbouring, declared.get("max_batch_size"))
        _checks.check_clipping_norm_epsilon(declared["clipping_norm_epsilon"])
        _checks.check_choice("clipping", declared["clipping"], ("flat", "individual"))
        return content, StepSettings.from_values(declared["steps"], **numbers)


class _NormsFile(NamedTuple):
    """A file of norms; records are read one at a time."""

    path: Path
    recorded_steps: IntArray
    example_ids: NDArray[np.generic]
    unit_ids: NDArray[np.generic] | None
    participations: NDArray[np.generic] | None  # how often each example was drawn
    read: Callable[[int], NDArray[np.generic]]  # the norms of a record, by its number


def _check_norms_file(norms: _NormsFile, total_steps: int, unit: str) -> None:
    """Raise InputError unless ids, steps, participations and all norms of a file fit together."""
    n, steps, drawn = len(norms.example_ids), norms.recorded_steps, norms.participations
    with _reading.named(norms.path):
        fields.check_ids(norms.example_ids, n)
        fields.check_recorded_steps(steps, len(steps), total_steps)
        fields.check_unit_ids(norms.unit_ids, n, unit)
        if drawn is not None and (
            drawn.shape != (n,)
            or drawn.dtype.kind not in "iu"
            or drawn.min() < 0
            or drawn.max() > total_steps
        ):
            raise _facts.refused("refusal.convert", "participations", total_steps=total_steps)
        for number, step in enumerate(steps.tolist()):
            values = norms.read(number)
            with _reading.named(f"{norms.path}, step {step}"):
                fields.check_norms(values, norms.example_ids)


def _read_parquet(path: Path) -> _NormsFile:
    """Columns are read one at a time; page checksums are checked if the file has them."""
    with _files.opened_parquet(path) as file:
        names, n_examples = file.schema_arrow.names, file.metadata.num_rows
        _reading.check_size(path, 16 * n_examples, path.stat().st_size)  # ids and one record
    steps = {int(name): name for name in names if name.isascii() and name.isdecimal()}
    others = [name for name in names if name not in steps.values()]
    if unknown := [name for name in others if name not in _OTHERS]:
        raise _facts.refused("refusal.convert", "columns", path=path, unknown=unknown[:5])

    def column(name: str) -> NDArray[np.generic]:
        with _files.opened_parquet(path) as file:
            found = file.read([name]).column(0)
        if found.null_count:
            n = found.null_count
            raise _facts.refused("refusal.convert", "missing", path=path, name=name, n=n)
        values: NDArray[np.generic] = found.to_numpy()
        return values

    recorded = sorted(steps)
    ids, units, drawn = (column(name) if name in names else None for name in _OTHERS)
    ids = np.arange(n_examples) if ids is None else ids
    numbers = np.array(recorded, dtype=np.int64)
    return _NormsFile(path, numbers, ids, units, drawn, lambda row: column(steps[recorded[row]]))


def _read_npz(path: Path) -> _NormsFile:
    """Read arrays of numbers and texts only: nothing in the file is unpickled."""
    found, others = _reading.read_npz(path), ("example_ids", "unit_ids", "participations")
    needed = {"norms", "recorded_steps"}
    if not needed <= set(found) <= needed | set(others):
        raise _facts.refused("refusal.convert", "arrays", path=path, arrays=[*found])
    norms, steps = found["norms"], found["recorded_steps"]
    if norms.ndim != 2 or steps.shape != norms.shape[:1] or steps.dtype.kind not in "iu":
        raise _facts.refused("refusal.convert", "shapes", path=path, norms=norms, steps=steps)
    ids, units, drawn = (found.get(name) for name in others)
    ids = np.arange(norms.shape[1]) if ids is None else ids
    if ids.shape != norms.shape[1:]:
        raise _facts.refused("refusal.convert", "ids", path=path, ids=ids, n=norms.shape[1])
    return _NormsFile(path, steps.astype(np.int64), ids, units, drawn, lambda row: norms[row])
