"""What the lines of a journal and run.json may hold, as far as anything here reads them.

What is not named may be there, and may be anything. Words that a log may use, and what its lines
say together, are checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from indpriv._files import read_json
from indpriv._reading import AtLeastZero, Number, Text, Whole, YesNo, check, table
from indpriv.errors import EvidenceError
from indpriv.norm_log.run_files import RUN_JSON, Line

MOST_STEPS = 10**7  # settings of all steps are held in memory
_COLUMN_BYTES = 32  # a column of a Parquet file takes more

_Count, _Steps = Annotated[Whole, Field(ge=1)], Annotated[Whole, Field(le=MOST_STEPS)]
_AllSteps = Annotated[Whole, Field(ge=1, le=MOST_STEPS)]
_Positive = Annotated[Number, Field(gt=0)]
_Rate = Annotated[_Positive, Field(le=1)]


def _each_a_number(value: object) -> object:
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in rows):
        raise ValueError("it is one number, or a list with one number per step")
    return value


_OneOrEach = Annotated[Any, AfterValidator(_each_a_number)]

_RUN = table(
    {
        Text: "id? no_privacy? clipping? loss_reduction? sampler_class? optimizer? start?",
        YesNo: "seeded? secure_mode?",
        AtLeastZero: "clipping_norm_epsilon? clip_headroom? expected_batch_size?",
        Number: "learning_rate? momentum? weight_decay?",
        Whole: "max_batch_size? n_parameters?",
        _Count: "steps_per_epoch? ranks?",
        dict[str, Whole]: "layers?",
        dict[str, Text]: "versions?",
    }
)
_FILE: dict[Any, str] = {Text: "file sha256?", Whole: "bytes?", list[tuple[Whole, Text]]: "parts?"}
_SPAN = {**_FILE, Whole: "first bytes?", _Steps: "count"}
_BATCH_NORMS = table({**_SPAN, list[Whole]: "missing"})
_CLOSE = {table({Whole: "from_step"}): "evidence?", dict[str, Any]: "files?"}
_HEADER: dict[Any, str] = {
    Text: "ids_fingerprint ids_sha256 rounding_mode unit neighbouring sampler",
    Whole: "n_examples n_exact",
    Number: "rounding",
    YesNo: "individually_clipped",
    table({Text: "backend? fallback?", AtLeastZero: "slack?", list[Text]: "caveats?"}): "norm_pass",
    _RUN: "run",
    dict[str, Any]: "policy",
    dict[str, Number]: "privacy_filter",
}
_RECORD = _FILE | {
    Text: "file sha256? ids_fingerprint targets_fingerprint",
    Whole: "step n_examples bytes?",
    _Positive: "max_grad_norm",
    AtLeastZero: "seconds",
}
_SETTINGS = {_Positive: "noise_multiplier max_grad_norm", _Rate: "sample_rate"}
_LINES = {
    "header": table(_HEADER),
    "record": table(_RECORD),
    "exact": table({**_SPAN, AtLeastZero: "seconds"}),
    "free": _BATCH_NORMS,
    "divided": _BATCH_NORMS,
    "filter": table(_SPAN),
    "steps": table({**_CLOSE, **_SETTINGS, Whole: "first", _Steps: "count"}),
    "close": table(_CLOSE),
    "truncate": table({Whole: "step"}),
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
        raise EvidenceError(f"{where} lacks bytes and sha256; restore the file from a copy")
    if line["kind"] == "exact" and line["count"] * _COLUMN_BYTES > line["bytes"]:
        raise EvidenceError(f"{where}: {line['bytes']} bytes cannot hold {line['count']} steps")


_AUDIT = table({Text: "participation? neighbouring?", Number: "tolerance?", list[Text]: "groups?"})
_ACCOUNT_WORDS = "participation? neighbouring? accountant? conversion? between_records?"
_RUN_JSON = table(
    {
        table({Text: _ACCOUNT_WORDS, Number: "delta? tolerance?"}): "account?",
        Number: "delta?",
        _AllSteps: "steps?",
        _OneOrEach: "noise_multiplier? max_grad_norm? sample_rate?",
        YesNo: "seeded?",
        list[Any]: "groups? class_names?",
        dict[str, Any]: "on_trust?",
        table({_OneOrEach: "noise_multiplier? max_grad_norm? sample_rate?", Number: "delta?"}): (
            "training?"
        ),
        table({_AUDIT: "audit?"}): "config?",
        table({Text: "fingerprint? dataset?", list[Any]: "class_names?"}): "data?",
        table({Number: "epsilon? delta?"}): "guarantee?",
    }
)


def checked_run_json(content: Any, where: Path | str = RUN_JSON) -> Mapping[str, Any]:
    """The content of run.json, if what is read of it is of the right kinds; else EvidenceError."""
    check(_RUN_JSON, content, str(where))
    found: Mapping[str, Any] = content
    return found


def read_run_json(run_dir: Path) -> Mapping[str, Any]:
    """What run.json of a run holds; nothing where there is none. EvidenceError as above."""
    path = run_dir / RUN_JSON
    return checked_run_json(read_json(path), path) if path.is_file() else {}
