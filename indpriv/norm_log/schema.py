"""What the lines of a journal and run.json may hold, as far as anything here reads them.

What is not named may be there, and may be anything. Words that a log may use, and what its lines
say together, are checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from indpriv._files import read_json
from indpriv._reading import Number, Text, Whole, YesNo, check
from indpriv.errors import EvidenceError
from indpriv.norm_log.run_files import RUN_JSON, Line

MOST_STEPS = 10**7  # settings of all steps are held in memory
_COLUMN_BYTES = 32  # a column of a Parquet file takes more

Count = Annotated[Whole, Field(ge=1)]
Positive = Annotated[Number, Field(gt=0)]
AtLeastZero = Annotated[Number, Field(ge=0)]


class _Table(BaseModel):
    """A JSON object of which some keys are read."""

    model_config = ConfigDict(extra="allow")


class _Run(_Table):
    """What else a header knows of the run."""

    id: Text | None = None
    seeded: YesNo = False
    no_privacy: Text | None = None
    clipping: Text | None = None
    max_batch_size: Count | None = None
    clipping_norm_epsilon: AtLeastZero = 0.0
    clip_headroom: AtLeastZero = 0.0
    expected_batch_size: Annotated[Whole, Field(ge=0)] | None = None
    steps_per_epoch: Count | None = None
    n_parameters: Whole | None = None
    ranks: Count = 1
    loss_reduction: Text | None = None
    sampler_class: Text | None = None
    optimizer: Text | None = None
    learning_rate: Number | None = None
    momentum: Number | None = None
    weight_decay: Number | None = None
    secure_mode: YesNo | None = None
    start: Text | None = None
    layers: dict[str, Whole] | None = None
    versions: dict[str, Text] = {}


class _NormPass(_Table):
    backend: Text | None = None
    slack: AtLeastZero | None = None
    caveats: list[Text] = []
    fallback: Text | None = None


class _Header(_Table):
    n_examples: Whole
    ids_fingerprint: Text
    ids_sha256: Text
    n_exact: Whole
    rounding: Number
    rounding_mode: Text
    unit: Text
    neighbouring: Text
    sampler: Text
    individually_clipped: YesNo
    norm_pass: _NormPass
    run: _Run
    policy: dict[str, Any]
    privacy_filter: dict[str, Number]


class _File(_Table):
    """One file with its bytes and sha256, or the same of several parts."""

    file: Text
    bytes: Whole = 0
    sha256: Text = ""
    parts: list[tuple[Whole, Text]] | None = None


class _Record(_File):
    step: Whole
    n_examples: Whole
    max_grad_norm: Positive
    ids_fingerprint: Text
    targets_fingerprint: Text
    seconds: AtLeastZero


class _Span(_File):
    first: Whole
    count: Annotated[Whole, Field(le=MOST_STEPS)]


class _Exact(_Span):
    seconds: AtLeastZero


class _BatchNorms(_Span):
    missing: list[Whole]
    examples: Count | None = None


class _Evidence(_Table):
    from_step: Whole


class _Close(_Table):
    evidence: _Evidence = _Evidence(from_step=0)


class _Steps(_Close):
    first: Whole
    count: Annotated[Count, Field(le=MOST_STEPS)]
    noise_multiplier: Positive
    max_grad_norm: Positive
    sample_rate: Annotated[Positive, Field(le=1)]


class _Truncate(_Table):
    step: Whole


_LINES = {
    kind: TypeAdapter(table)
    for kind, table in {
        "header": _Header,
        "record": _Record,
        "exact": _Exact,
        "free": _BatchNorms,
        "divided": _BatchNorms,
        "filter": _Span,
        "steps": _Steps,
        "close": _Close,
        "truncate": _Truncate,
    }.items()
}


def check_line(line: Line, where: str) -> None:
    """Compare a line of a journal with the schema of its kind; one of no known kind has none.

    Raises:
        EvidenceError: what it lacks, or a value that it may not have.
    """
    if (kind := _LINES.get(line["kind"])) is None:
        return
    check(kind, line, where)
    if "file" in line and not {"bytes", "sha256"} <= line.keys() and "parts" not in line:
        raise EvidenceError(f"{where}: it says neither bytes and sha256 of {line['file']} nor parts")
    if line["kind"] == "exact" and line["count"] * _COLUMN_BYTES > line["bytes"]:
        raise EvidenceError(
            f"{where}: {line['count']:,} steps cannot be in {line['bytes']:,} bytes; restore the "
            "file from a copy"
        )


OneOrEach = Number | list[Number]


class _Settings(_Table):
    noise_multiplier: OneOrEach | None = None
    max_grad_norm: OneOrEach | None = None
    sample_rate: OneOrEach | None = None
    delta: Number | None = None


class _AuditOptions(_Table):
    participation: Text | None = None
    neighbouring: Text | None = None
    tolerance: Number | None = None
    groups: list[Text] | None = None


class _Config(_Table):
    audit: _AuditOptions | None = None


class _Data(_Table):
    fingerprint: Text | None = None
    class_names: list[Any] | None = None


class _Guarantee(_Table):
    epsilon: Number | None = None
    delta: Number | None = None


class _RunJson(_Table):
    """run.json: settings, and what somebody said."""

    delta: Number | None = None
    groups: list[Any] | None = None
    class_names: list[Any] | None = None
    on_trust: dict[str, Any] | None = None
    training: _Settings | None = None
    config: _Config | None = None
    data: _Data | None = None
    guarantee: _Guarantee | None = None


_RUN_JSON = TypeAdapter(_RunJson)


def checked_run_json(content: Any, where: Path | str = RUN_JSON) -> Mapping[str, Any]:
    """The content of run.json, if what is read of it is of the right kinds; else EvidenceError."""
    check(_RUN_JSON, content, str(where))
    found: Mapping[str, Any] = content
    return found


def read_run_json(run_dir: Path) -> Mapping[str, Any]:
    """What run.json of a run holds; nothing where there is none. EvidenceError as above."""
    path = run_dir / RUN_JSON
    return checked_run_json(read_json(path), path) if path.is_file() else {}
