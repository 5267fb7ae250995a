"""Opening a run directory: its log, and what is known of the run besides. Sensitive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv._files import read_json
from indpriv._journal import NAME as JOURNAL
from indpriv.analysis.declared import Declared
from indpriv.attack_scores import AttackScores
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.evidence import Check
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.reader import read_state

EXAMPLES, EXAMPLES_NON_DP, CANARIES = (
    "examples.parquet",
    "examples-non-dp.parquet",
    "canaries.parquet",
)
HOLDOUT = "holdout"

_RUN_DIRECTORY = f"a run directory is what a Recorder writes: {JOURNAL}, ids.parquet, records/, run.json, and at the end {EXAMPLES}"


@dataclass(frozen=True)
class Evidence:
    """What is known about a run besides its log.

    Attributes:
        examples: losses of the final model; None where the run ended before they were taken.
        non_dp: the same of the same model trained without DP.
        declared: run.json, on the word of whoever trained.
        recorder: what the recorder read from the optimizer and the loader.
        checks: assumptions held against the evidence.
        holdout: norms of the test examples on the same trajectory; None where they were not
            recorded.
        canaries: scores of examples that fair coins included or left out; None where the run had
            none.
    """

    examples: ExampleTable | None = None
    non_dp: ExampleTable | None = None
    declared: Declared = field(default_factory=Declared)
    recorder: Mapping[str, Any] = field(default_factory=dict)
    checks: Sequence[Check] = ()
    canaries: AttackScores | None = None
    holdout: NormLog | None = None


def open_run(path: Path, unreadable: str = "refuse") -> tuple[NormLog, Evidence]:
    """The log of a run directory and the evidence beside it, checks not yet taken; see `NormLog.open`."""
    if not path.is_dir():
        raise InputError(f"{path} is not a directory; {_RUN_DIRECTORY}")
    if not (path / JOURNAL).is_file():
        found = sorted(item.name for item in path.iterdir())[:5]
        holds = f"it holds {', '.join(found)}" if found else "it is empty"
        raise InputError(
            f"{path} holds no {JOURNAL} ({holds}); {_RUN_DIRECTORY}. A folder of checkpoints is "
            "replayed with an AuditSpec, "
            f"which builds model and data again: indpriv audit {path} --spec train.py:spec"
        )
    log = NormLog.open(path, unreadable=unreadable)
    state = read_state(path)
    header = state.header
    declared = (
        Declared.from_run_json(read_json(path / "run.json"))
        if (path / "run.json").is_file()
        else Declared()
    )
    return log, Evidence(
        examples=_table(path / EXAMPLES, declared),
        non_dp=_table(path / EXAMPLES_NON_DP, declared),
        declared=declared,
        canaries=AttackScores.from_file(path / CANARIES) if (path / CANARIES).is_file() else None,
        holdout=NormLog.open(path / HOLDOUT, unreadable=unreadable)
        if (path / HOLDOUT / JOURNAL).is_file()
        else None,
        recorder={
            **header["run"],
            "seeded": header["run"].get("seeded", False)
            or any(session["seeded"] for session in state.evidence),
            **{key: header["norm_pass"].get(key) for key in ("backend", "slack")},
            "policy": header.get("policy") or None,
            "pass_seconds": state.pass_seconds,
            "training_seconds": state.training_seconds,
        },
    )


def _table(path: Path, declared: Declared) -> ExampleTable | None:
    return (
        name_labels(ExampleTable.from_parquet(path), declared.class_names)
        if path.is_file()
        else None
    )


def in_rows_of(table: EpsilonTable, examples: ExampleTable) -> ExampleTable:
    """The example table with a training row for each row of an epsilon table: of units, where that is of units."""
    return examples if table.account.rows_per_unit is None else examples.by_unit()


def name_labels(examples: ExampleTable, class_names: Sequence[str]) -> ExampleTable:
    """The table with integer labels replaced by their names; unchanged where the names do not fit the labels."""
    labels = examples.frame["label"]
    known = labels.dropna()
    if (
        not class_names
        or not pd.api.types.is_integer_dtype(labels)
        or not known.between(0, len(class_names) - 1).all()
    ):
        return examples
    names = np.array([*class_names, None], dtype=object)
    codes = labels.fillna(len(class_names)).astype(int).to_numpy()
    return ExampleTable(examples.frame.assign(label=pd.array(names[codes], dtype="string")))
