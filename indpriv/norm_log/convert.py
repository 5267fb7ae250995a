"""Norms written by any trainer (JAX, TensorFlow, ...) into the log of a run directory, wholly checked. Sensitive.

Two files say everything. One holds the norms, as Parquet (a row for each example; a column for each record, named by
its step; example_id, unit_id and participations where known) or as npz (arrays norms (n_records, n_examples) and
recorded_steps (n_records,); example_ids, unit_ids and participations where known). The other, run.json, holds the
settings that accounting needs. Nobody watched that training, so that an account of the log is an estimate.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._files import read_json, write_json
from indpriv.errors import InputError
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.run_files import RUN_JSON, holds_log
from indpriv.norm_log.session_counts import Conversion, DrawCounts, SessionCounts
from indpriv.norm_log.step_settings import StepSettings
from indpriv.norm_log.validation import (
    NEIGHBOURING,
    SAMPLERS,
    UNITS,
    check_ids,
    check_norms,
    check_recorded_steps,
    check_unit_ids,
)
from indpriv.norm_log.writer import LogHeader, NormLogWriter

DECLARED = "norms and settings are as another trainer wrote them: nobody watched its sampling, clipping and noise"
_NARROW = (
    "norms came as {dtype}: sums of squares in such precision can come out too small (by up to 0.00055 of the norm was "
    "seen in float32)"
)
_REQUIRED = (
    "steps",
    "noise_multiplier",
    "max_grad_norm",
    "sample_rate",
    "sampler",
    "unit",
    "neighbouring",
)
_CLIPPING = ("flat", "individual")
_BESIDES = (
    "example_id",
    "unit_id",
    "participations",
)  # columns of a Parquet file that are no records
_UNPACKED_BYTES, _UNPACKED_TIMES = (
    1 << 30,
    100,
)  # an archive that grows beyond both is taken for a zip bomb


@dataclass(frozen=True)
class _Settings:
    """What run.json says, checked."""

    steps: StepSettings
    sampler: str
    unit: str
    neighbouring: str
    individually_clipped: bool
    seeded: bool
    content: Mapping[str, Any]


@dataclass(frozen=True)
class _Norms:
    """A file of norms: records are read one at a time.

    recorded_steps: (n_records,); read: norms (n_examples,) of the record of that number, as they are in the file.
    participations: (n_examples,) how often each example was drawn, or None.
    """

    path: Path
    recorded_steps: NDArray[np.int64]
    example_ids: NDArray[np.generic]
    unit_ids: NDArray[np.generic] | None
    participations: NDArray[np.generic] | None
    read: Callable[[int], NDArray[np.generic]]


def convert(
    norms_file: str | Path,
    run_json: str | Path,
    output_dir: str | Path,
    *,
    rounding: float = 0.01,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Write the log of a run that another trainer recorded into a new run directory.

    Everything is checked before anything is written. Of a Parquet file one record is in memory at a time.

    Args:
        norms_file: norms.parquet or norms.npz, as the module's docstring says. A record of step t (0-based) holds the
            norms, before clipping, at the parameters that step t starts from.
        run_json: an object with steps, noise_multiplier (standard deviation of the noise on the sum of clipped
            gradients over max_grad_norm), max_grad_norm, sample_rate (each one number, or a list of one for each step),
            sampler ("poisson", "shuffled", "other"), unit ("example", "user", "client") and neighbouring
            ("add_remove"); where it applies also clipping ("individual" where each example was clipped at its last
            recorded norm, rounded up), microbatch_size, seeded, delta. Other keys are kept.
        output_dir: the run directory: new, or empty of a log.
        rounding: as a fraction of max_grad_norm, upwards; 0 keeps float64.
        progress: called with (stage, records done, records in all).

    Raises:
        InputError: a value that is missing, of the wrong kind or out of range, NaN or negative norms, microbatches.
    """
    norms_file, run_dir = Path(norms_file), Path(output_dir)
    _checks.check_rounding(rounding)
    settings = _read_settings(Path(run_json))
    norms = _read_norms(norms_file)
    total_steps = len(settings.steps)
    _check_norms_file(norms, total_steps, unit=settings.unit)
    if holds_log(run_dir):
        raise InputError(
            f"{run_dir} already holds the log of a run; choose another directory, or remove it"
        )
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    header = LogHeader(
        rounding=rounding,
        rounding_mode="up",
        unit=settings.unit,
        neighbouring=settings.neighbouring,
        sampler=settings.sampler,
        individually_clipped=settings.individually_clipped,
        norm_pass={"backend": "another trainer", "slack": 0.0, "caveats": []},
        run={
            "converted": True,
            "clipping": settings.content.get("clipping", "flat"),
            "seeded": settings.seeded,
        },
    )
    no_positions = np.zeros(0, dtype=np.int64)
    writer = NormLogWriter(run_dir, header, norms.example_ids, norms.unit_ids, no_positions)
    try:
        dtypes = _write_records(writer, norms, settings.steps, progress)
        counts = _counts(norms, settings, dtypes)
        for start, stop in settings.steps.spans():
            writer.steps(start, stop - start, **vars(settings.steps.at(start)), counts=counts)
        write_json(run_dir / RUN_JSON, {"name": run_dir.name, **settings.content})
        writer.finish(counts)
    finally:
        writer.close()


def _write_records(
    writer: NormLogWriter,
    norms: _Norms,
    steps: StepSettings,
    progress: Callable[[str, int, int], None] | None,
) -> set[str]:
    """Append every record; return the types that norms came in and are narrower than float64."""
    narrow: set[str] = set()
    for number, step in enumerate(norms.recorded_steps.tolist()):
        values = norms.read(number)
        exact = values.astype(np.float64)
        if values.dtype.kind == "f" and values.dtype.itemsize < exact.dtype.itemsize:
            narrow.add(str(values.dtype))
            exact *= 1 + float(
                np.finfo(str(values.dtype)).eps
            )  # what was rounded to this type may have been above it
        writer.record(
            step,
            exact,
            max_grad_norm=float(steps.max_grad_norm[step]),
            targets_fingerprint="unknown",
            seconds=0.0,  # not known
        )
        if progress is not None:
            progress("converting", number + 1, len(norms.recorded_steps))
    return narrow


def _counts(norms: _Norms, settings: _Settings, narrow: set[str]) -> SessionCounts:
    """Nothing was watched, except if the trainer counted how often it drew each example."""
    caveats = [DECLARED, *(_NARROW.format(dtype=dtype) for dtype in sorted(narrow))]
    draws, rates = None, settings.steps.sample_rate
    if norms.participations is not None:
        draws = DrawCounts.of(
            norms.participations.astype(np.int64),
            draws=len(rates),
            expected=float(rates.sum()),
            variance=float((rates * (1 - rates)).sum()),
        )
    return SessionCounts(
        from_step=0,
        seeded=settings.seeded,
        caveats=(*caveats, SEEDED) if settings.seeded else tuple(caveats),
        sampler=settings.sampler,
        conversion=Conversion(norms.path.name),
        draws=draws,
    )


def _check_norms_file(norms: _Norms, total_steps: int, *, unit: str) -> None:
    try:
        check_ids(norms.example_ids, len(norms.example_ids))
        check_recorded_steps(norms.recorded_steps, len(norms.recorded_steps), total_steps)
        check_unit_ids(norms.unit_ids, len(norms.example_ids), unit)
    except InputError as error:
        raise InputError(f"{norms.path}: {error}") from error
    drawn = norms.participations
    if drawn is not None and (
        drawn.shape != norms.example_ids.shape
        or not np.issubdtype(drawn.dtype, np.integer)
        or drawn.min() < 0
        or drawn.max() > total_steps
    ):
        raise InputError(
            f"{norms.path}: participations must be one whole number for each example, from 0 to steps={total_steps}: how "
            "often it was drawn"
        )
    for number, step in enumerate(norms.recorded_steps.tolist()):
        values = norms.read(number)
        if values.dtype.kind not in "fiu":
            raise InputError(
                f"{norms.path}: the norms of step {step} are {values.dtype}; they must be numbers"
            )
        try:
            check_norms(values, norms.example_ids)
        except InputError as error:
            raise InputError(f"{norms.path}, step {step}: {error}") from error


def _read_settings(path: Path) -> _Settings:
    """run.json, checked; everything that is missing is asked for at once."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}; it is one JSON object")
    missing = [name for name in _REQUIRED if name not in content]
    if missing:
        raise InputError(
            f"{path} lacks {', '.join(missing)}; an epsilon means nothing without them. Write e.g. "
            '{"steps": 300, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.02, "sampler": "poisson", '
            '"unit": "example", "neighbouring": "add_remove"}'
        )
    microbatch = content.get("microbatch_size", 1)
    if microbatch != 1:
        raise InputError(
            f"{path}: microbatch_size={microbatch!r}: a microbatch of several examples has no gradient of one example, and "
            "clipping its average doubles the sensitivity; train with microbatches of 1"
        )
    seeded = content.get("seeded", False)
    if not isinstance(seeded, bool):
        raise InputError(f"{path}: seeded={seeded!r} is not true or false")
    try:
        numbers = {
            name: _numbers(name, content[name])
            for name in ("noise_multiplier", "max_grad_norm", "sample_rate")
        }
        total_steps = _checks.check_positive_int("steps", content["steps"])
        return _Settings(
            steps=StepSettings.from_values(total_steps, **numbers),
            sampler=_checks.check_choice("sampler", content["sampler"], SAMPLERS),
            unit=_checks.check_choice("unit", content["unit"], UNITS),
            neighbouring=_checks.check_choice(
                "neighbouring", content["neighbouring"], NEIGHBOURING
            ),
            individually_clipped=_checks.check_choice(
                "clipping", content.get("clipping", "flat"), _CLIPPING
            )
            == "individual",
            seeded=seeded,
            content=content,
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _numbers(name: str, value: object) -> NDArray[np.float64]:
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in rows):
        raise InputError(
            f"{name}={str(value)[:60]} is neither a number nor a list of one for each step"
        )
    return np.asarray(value, dtype=np.float64)


def _read_norms(path: Path) -> _Norms:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    raise InputError(f"{path} is neither .parquet nor .npz; write the norms as one of them")


def _read_parquet(path: Path) -> _Norms:
    """Columns are read one at a time; page checksums are checked where the file has them."""
    try:
        names = pq.ParquetFile(path).schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error
    steps = {name: int(name) for name in names if name.isascii() and name.isdecimal()}
    unknown = [name for name in names if name not in steps and name not in _BESIDES]
    if unknown or len(set(steps.values())) < len(steps) or len(set(names)) < len(names):
        raise InputError(
            f"{path} has columns {', '.join(map(repr, (unknown or names)[:5]))}; a record is a column named by its step, e.g. "
            f"'200', and the others are {', '.join(_BESIDES)}"
        )

    def column(name: str) -> NDArray[np.generic]:
        try:
            found = pq.read_table(path, columns=[name], page_checksum_verification=True).column(0)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: column {name!r} is damaged: {error}") from error
        if found.null_count:
            raise InputError(
                f"{path}: column {name!r} has {found.null_count} missing values; each row needs one"
            )
        values: NDArray[np.generic] = found.to_numpy()
        return values

    recorded = sorted(steps, key=steps.__getitem__)
    found = {name: column(name) if name in names else None for name in _BESIDES}
    n_examples = pq.ParquetFile(path).metadata.num_rows
    ids = found["example_id"]
    return _Norms(
        path,
        np.array([steps[name] for name in recorded], dtype=np.int64),
        np.arange(n_examples) if ids is None else ids,
        found["unit_id"],
        found["participations"],
        lambda number: column(recorded[number]),
    )


def _read_npz(path: Path) -> _Norms:
    """Arrays of numbers and texts only: nothing in the file is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(item.file_size for item in archive.infolist())
        bomb = unpacked > max(_UNPACKED_BYTES, _UNPACKED_TIMES * path.stat().st_size)
        with np.load(path, allow_pickle=False) as archive:
            found = {} if bomb else {name: archive[name] for name in archive.files}
    except (
        ValueError,
        OSError,
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        EOFError,
        KeyError,
    ) as error:
        raise InputError(f"{path} cannot be read as npz of numbers: {error}") from error
    if bomb:
        raise InputError(
            f"{path} would unpack to {unpacked:,} bytes, more than {_UNPACKED_TIMES} times its size; write it without "
            "compression if that is meant, with np.savez"
        )
    known = ("norms", "recorded_steps", "example_ids", "unit_ids", "participations")
    unknown = [name for name in found if name not in known]
    if unknown or not {"norms", "recorded_steps"} <= set(found):
        raise InputError(
            f"{path} has arrays {', '.join(found) or 'none'}; it needs norms and recorded_steps, and may have "
            f"{', '.join(known[2:])}"
        )
    norms, steps = found["norms"], found["recorded_steps"]
    if (
        norms.ndim != 2
        or steps.shape != norms.shape[:1]
        or not np.issubdtype(steps.dtype, np.integer)
    ):
        raise InputError(
            f"{path}: norms has shape {norms.shape} and recorded_steps {steps.shape} of {steps.dtype}; pass "
            "(n_records, n_examples) norms, and one whole number a record"
        )
    ids = found.get("example_ids", np.arange(norms.shape[1]))
    if ids.shape != norms.shape[1:]:
        raise InputError(
            f"{path}: example_ids has shape {ids.shape} for {norms.shape[1]} examples; pass one id each"
        )
    units, drawn = found.get("unit_ids"), found.get("participations")
    return _Norms(path, steps.astype(np.int64), ids, units, drawn, lambda number: norms[number])
