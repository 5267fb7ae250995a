"""Convert norms that any trainer (JAX, TensorFlow, ...) wrote into a run directory. Sensitive.

One file holds the norms (see norms_file), the other, run.json, the settings that accounting needs.
No recorder watched the training, so an account of the log is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indpriv import _checks
from indpriv._files import read_json, write_json
from indpriv._progress import StageProgress
from indpriv._storage import location_on_disk
from indpriv.errors import InputError
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.norms_file import NormsFile, check_norms_file, read_norms
from indpriv.norm_log.run_files import RUN_JSON, holds_log
from indpriv.norm_log.schema import checked_run_json
from indpriv.norm_log.sealing import seal
from indpriv.norm_log.session_counts import Conversion, DrawCounts, SessionCounts
from indpriv.norm_log.step_settings import SETTING_NAMES, StepSettings
from indpriv.norm_log.validation import check_words, widened
from indpriv.norm_log.writer import LogHeader, NormLogWriter

DECLARED = (
    "norms and settings are as another trainer wrote them: indpriv did not watch its sampling, "
    "clipping and noise"
)
_REQUIRED = ("steps", *SETTING_NAMES, "sampler", "unit", "neighbouring")
_CLIPPING = ("flat", "individual")


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
        norms_file: a Parquet or npz file; see `indpriv.norm_log.norms_file`. A record of step t
            (0-based) holds the norms, before clipping, at the parameters that step t starts from.
        run_json: an object with steps, noise_multiplier (standard deviation of the noise on the sum
            of clipped gradients over max_grad_norm), max_grad_norm, sample_rate (each one number,
            or a list with one per step), sampler ("poisson", "truncated_poisson", "shuffled",
            "fixed_size", "other"; see `NormLog`), unit ("example", "user", "client", "row") and
            neighbouring ("add_remove", "zero_out", "replace_one"); max_batch_size if batches are
            truncated; optionally clipping ("individual" if each example was clipped at its last
            recorded norm, rounded up), microbatch_size, seeded, delta, clipping_norm_epsilon (of
            a private release that max_grad_norm was set to). Other keys are kept.
        output_dir: the run directory: new, or without a log.
        rounding: as a fraction of max_grad_norm, upwards; 0 keeps float64.
        progress: called as progress(stage, done, total), in records.

    Raises:
        InputError: a value is missing, of the wrong type or out of range, a norm is NaN or
            negative, or there are microbatches.
    """
    norms_file, run_dir = Path(norms_file), location_on_disk(output_dir, "converted norms are")
    _checks.check_rounding(rounding)
    settings = _read_settings(Path(run_json))
    norms = read_norms(norms_file)
    total_steps = len(settings.steps)
    check_norms_file(norms, total_steps, unit=settings.unit)
    if holds_log(run_dir):
        raise InputError(
            f"{run_dir} already holds the log of a run; choose another directory, or remove it"
        )
    no_positions = np.zeros(0, dtype=np.int64)
    header = _header(settings, rounding)
    writer = NormLogWriter(run_dir, header, norms.example_ids, norms.unit_ids, no_positions)
    try:
        narrow = _write_records(writer, norms, settings.steps, progress)
        counts = _counts(norms, settings, narrow)
        for start, stop in settings.steps.spans():
            writer.steps(start, stop - start, **vars(settings.steps.at(start)), counts=counts)
        write_json(run_dir / RUN_JSON, {"name": run_dir.name, **settings.content})
        writer.finish(counts)
    finally:
        writer.close()
    seal(run_dir)


def _header(settings: _Settings, rounding: float) -> LogHeader:
    return LogHeader(
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
            "clipping_norm_epsilon": settings.content.get("clipping_norm_epsilon", 0.0),
            **_truncation(settings),
        },
    )


def _truncation(settings: _Settings) -> dict[str, int]:
    cap = settings.content.get("max_batch_size")
    return {} if cap is None else {"max_batch_size": cap}


def _write_records(
    writer: NormLogWriter,
    norms: NormsFile,
    steps: StepSettings,
    progress: StageProgress | None,
) -> set[str]:
    """Append every record; return caveats of norms that are narrower than float64."""
    narrow: set[str] = set()
    for number, step in enumerate(norms.recorded_steps.tolist()):
        exact, caveat = widened(norms.read(number))
        narrow |= {caveat} - {""}
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


def _counts(norms: NormsFile, settings: _Settings, narrow: set[str]) -> SessionCounts:
    """Nothing was watched, except if the trainer counted how often it drew each example."""
    caveats = [DECLARED, *sorted(narrow)]
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
        converted=Conversion(source=norms.path.name),
        draws=draws,
    )


def _read_settings(path: Path) -> _Settings:
    """Read and check run.json; one message names everything that is missing."""
    content = checked_run_json(read_json(path), path)
    missing = [name for name in _REQUIRED if content.get(name) is None]
    if missing:
        raise InputError(
            f"{path} lacks {', '.join(missing)}; an epsilon means nothing without them. Write e.g. "
            '{"steps": 300, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.02, '
            '"sampler": "poisson", "unit": "example", "neighbouring": "add_remove"}'
        )
    microbatch = content.get("microbatch_size", 1)
    if microbatch != 1:
        raise InputError(
            f"{path}: microbatch_size={microbatch!r}: a microbatch of several examples has no "
            "gradient of one example, and clipping its average doubles the sensitivity; train with "
            "microbatches of 1"
        )
    try:
        numbers = {name: np.asarray(content[name], dtype=np.float64) for name in SETTING_NAMES}
        check_words(
            content["sampler"],
            content["unit"],
            content["neighbouring"],
            content.get("max_batch_size"),
        )
        _checks.check_clipping_norm_epsilon(content.get("clipping_norm_epsilon", 0.0))
        clipping = _checks.check_choice("clipping", content.get("clipping", "flat"), _CLIPPING)
        return _Settings(
            steps=StepSettings.from_values(content["steps"], **numbers),
            sampler=content["sampler"],
            unit=content["unit"],
            neighbouring=content["neighbouring"],
            individually_clipped=clipping == "individual",
            seeded=bool(content.get("seeded")),
            content=content,
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
