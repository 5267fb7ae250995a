"""The names of the files in a run directory, each once; and what is read of run.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from indpriv import _journal
from indpriv._files import read_json
from indpriv._reading import Number, Text, Whole, YesNo, check, table
from indpriv.errors import InputError

Line = dict[str, Any]  # of the journal
MOST_STEPS = 10**7  # settings of all steps are held in memory

JOURNAL = _journal.NAME
SIGNATURE = f"{JOURNAL}.sig"  # where ssh-keygen -Y sign puts it
IDS = "ids.parquet"
ID_COLUMNS = {"example_id": "it", "unit_id?": "itf", "exact": "b"}  # see `check_columns`
RECORDS = "records"  # a folder: one Parquet file per record, or one for each part of it
RUN_JSON = "run.json"
EXAMPLES, EXAMPLES_NON_DP = "examples.parquet", "examples-non-dp.parquet"
MODEL_NON_DP = "non-dp/parameters.safetensors"  # in a folder: models of the run lie outside it
RESUME = "resume.state"  # of a run that has not ended; its suffix is that of no model
CANARIES, GRADIENT_CANARIES = "canaries.parquet", "gradient-canaries.parquet"
WHITE_BOX = "white-box.parquet"
ATTRIBUTES, ATTRIBUTES_NON_DP = "attributes.parquet", "attributes-non-dp.parquet"
SECRETS = "secrets.parquet"
CURVE = "curve.parquet"
LEAKAGE = "leakage"  # a folder: scores and pictures of reconstructions
HOLDOUT = "holdout"  # a folder: the log of the test examples
# What an audit reads beside the log: hashed when it is closed.
BESIDE = [RUN_JSON, EXAMPLES, EXAMPLES_NON_DP, MODEL_NON_DP, CANARIES, GRADIENT_CANARIES, WHITE_BOX]
BESIDE += [ATTRIBUTES, ATTRIBUTES_NON_DP, SECRETS, CURVE, f"{HOLDOUT}/{JOURNAL}"]
_RECORD_FILE = re.compile(r"((exact|free|divided|filter)-)?\d{12}(-\d{5})?\.parquet")
RUN_DIRECTORY = (
    f"a run directory is what a Recorder writes: {JOURNAL}, {IDS}, {RECORDS}/, {RUN_JSON}, and at "
    f"the end {EXAMPLES}"
)


def part_name(record: str, number: int) -> str:
    """The file of one part of a record whose name is that of a single file."""
    return f"{record.removesuffix('.parquet')}-{number:05d}.parquet"


def files_of(line: Line) -> list[Line]:
    """What a line says of its files: several, where a record is in parts."""
    if "parts" not in line:
        return [line]
    return [
        {**line, "file": part_name(line["file"], number), "bytes": size, "sha256": sha256}
        for number, (size, sha256) in enumerate(line["parts"])
    ]


def unused_records(there: Iterable[str], lines: Iterable[Line]) -> list[str]:
    """Those of the files in RECORDS that a crash left: no line of the journal counts on them.

    A line comes after its files. Files of lines that were declared void later are kept.
    """
    named = {file["file"] for line in lines if "file" in line for file in files_of(line)}
    return [name for name in there if _RECORD_FILE.fullmatch(name) and name not in named]


def holds_log(path: Path) -> bool:
    """Whether a folder holds the log of a run."""
    return (path / JOURNAL).is_file()


def check_holds_log(path: Path) -> None:
    """Raise InputError unless a path is a folder with the log of a run."""
    if not path.is_dir():
        raise InputError(f"{path} is not a directory; {RUN_DIRECTORY}")
    if not holds_log(path):
        found = sorted(item.name for item in path.iterdir())[:5]
        holds = f"it holds {', '.join(found)}" if found else "it is empty"
        raise InputError(f"{path} holds no {JOURNAL} ({holds}); {RUN_DIRECTORY}")


def _each_a_number(value: object) -> object:
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in rows):
        raise ValueError("it is one number, or a list with one number per step")
    return value


_OneOrEach = Annotated[Any, AfterValidator(_each_a_number)]
_AllSteps = Annotated[Whole, Field(ge=1, le=MOST_STEPS)]

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
