"""A run with its account: what findings are made of, and the audit that they make. Sensitive."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import pandas as pd
from pandas.api.types import is_numeric_dtype

from indpriv._columns import (
    MAX_NUMERIC_VALUES,
    MISSING,
    MOST_GROUPS,
    Rows,
    as_rows,
    frames_of,
    groupable_columns,
)
from indpriv._progress import StageProgress, silent
from indpriv.accountant.method import Method
from indpriv.analysis.duplicates import undeclared_people
from indpriv.analysis.recorded_run import RecordedRun, in_rows_of
from indpriv.analysis.summary import Audit, Finding, finding_of, keys
from indpriv.epsilon_table import Epsilons, EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import EXAMPLES, EXAMPLES_NON_DP

T = TypeVar("T")
ANALYSING = "analysing"
NO_EXACT_VALUES = (
    "There are no exact values to compare the estimate with: record every step, some reference "
    "examples, or batch norms."
)
_LIBRARIES = ("indpriv", "numpy", "scipy", "pandas", "pyarrow")


@dataclass(frozen=True)
class AuditedRun:
    """A recorded run, its account, and how it is to be analysed.

    Epsilons in memory are analysed at once. Epsilons in parts are read part by part, several times,
    each part with the rows of its examples, so that memory does not grow with their number.

    Attributes:
        log: what the epsilons were made of.
        epsilons: of all its examples; in parts only if rows were accounted one by one, and the
            example table has them in the log's order.
        recorded: what else is known about the run.
        name: of the run.
        by: columns to group by; default those in run.json, else label and all metadata.
        method: how the epsilons were computed; None for no other accounts beside them.
        seed: of the random choices of attacks and group tables.
        command: reproduces the audit.
        tell: called as tell(stage, done, total).
        holdout: epsilons of the test examples on the same trajectory; None for those by the method.
        known: values by key of audit.json that are not to be found.
    """

    log: NormLog
    epsilons: Epsilons
    recorded: RecordedRun
    name: str = ""
    by: Sequence[str] = ()
    method: Method | None = None
    seed: int = 0
    command: str = ""
    tell: StageProgress = silent
    holdout: EpsilonTable | None = None
    known: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def audit(self) -> Audit:
        """What is found about the run, each value when it is first asked for."""
        return _BeingMade(self)

    @cached_property
    def _computed(self) -> dict[Any, Any]:
        return {}

    def once(self, compute: Callable[["AuditedRun"], T]) -> T:
        """What a function of the run gives, which is called once."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        found: T = self._computed[compute]
        return found

    @cached_property
    def rows(self) -> Rows | None:
        """Of the training examples, in the order of the log; None without an example table."""
        examples = self.recorded.examples
        return None if examples is None else examples.train_rows(self.log.example_ids)

    @cached_property
    def train(self) -> Rows | None:
        """The same in the order of the epsilons: one row for each unit."""
        if self.recorded.examples is None or self.epsilons.account.rows_per_unit is None:
            return self.rows
        if not isinstance(self.epsilons, EpsilonTable):
            return self.rows
        units = in_rows_of(self.epsilons, self.recorded.examples)
        return units.train_rows(self.epsilons.example_ids)

    @cached_property
    def attacked(self) -> RecordedRun:
        """The same with those examples that are attacked: random ones where there are very many."""
        return self.recorded.for_attacks(self.seed)

    @cached_property
    def grouping(self) -> tuple[list[str], list[str]]:
        """Columns to group by, and sentences on what was left out."""
        if self.rows is not None:
            return choose_groups(self.rows, self.by, self.recorded.declared.groups)
        if self.by:
            raise InputError(
                f"--by {self.by[0]}: this run has no {EXAMPLES}, which holds the groups; audit it "
                "without --by"
            )
        return [], []


class _BeingMade(Audit):
    """The audit of a run, whose values are found when they are asked for."""

    def __init__(self, run: AuditedRun) -> None:
        super().__init__(**run.known)
        self._run = run

    def _value(self, key: str) -> Any:
        if key not in self._values:
            finding = finding_of(key)
            found = dict(finding.find(self._run))
            self._values = {**dict.fromkeys(finding.keys), **found, **self._values}
        return super()._value(key)


def attacked_table(run: AuditedRun) -> EpsilonTable:
    """Epsilons of the members that are attacked."""
    if isinstance(run.epsilons, EpsilonTable):
        return run.epsilons
    if (positions := run.recorded.attacked(run.seed)[0]) is not None:
        return run.epsilons.take(positions)
    return run.epsilons.table(run.epsilons.details)


def find_all(run: AuditedRun) -> Audit:
    """Everything that can be found about a run.

    Raises:
        InputError: a column that does not exist, or groups without an example table.
    """
    for key in ("fidelity", "sensitivity"):  # other accounts, which tell how far they are
        getattr(run.audit, key)
    run.tell(ANALYSING, 0, 1)
    for key in keys():
        getattr(run.audit, key)
    run.tell(ANALYSING, 1, 1)
    return run.audit.replace()


def choose_groups(
    train: pd.DataFrame | Rows, by: Sequence[str], declared: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Columns to group by, and sentences on what was left out.

    The columns asked for, else those declared before training, else the label and every metadata
    column that can be read as groups: numeric columns with many values in ten bins; other columns
    with many values are left out.
    """
    if by:
        return list(dict.fromkeys(by)), []
    if declared:
        return list(declared), []
    chosen, left_out, rows = [], [], as_rows(train)
    for column in groupable_columns(rows):
        distinct, numeric = _distinct(rows, column)
        if not distinct:  # units of rows that differ in it
            continue
        if distinct <= MAX_NUMERIC_VALUES:
            chosen.append(column)
        elif numeric:
            chosen.append(f"{column}:bins=10")
        else:
            least = "at least " if distinct > MOST_GROUPS and len(rows.ranges()) > 1 else ""
            left_out.append(
                f"{column} has {least}{distinct:,} distinct values and was not grouped by; ask "
                f"with --by {column}."
            )
    return chosen, left_out


def _distinct(rows: Rows, column: str) -> tuple[int, bool]:
    """Number of distinct values, and whether they are numbers; counting ends at MOST_GROUPS."""
    values, numeric = set[object](), True
    for frame in frames_of(rows, [column]):
        known = frame[column].dropna()
        numeric = numeric and (is_numeric_dtype(known) or known.empty)
        values.update(known.unique().tolist())
        if len(values) > MOST_GROUPS:
            break
    return len(values), numeric


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed (run from its source)"


def _made(run: AuditedRun) -> dict[str, Any]:
    versions = {name: _version(name) for name in _LIBRARIES}
    return {
        "name": run.recorded.declared.name or run.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions | {"python": platform.python_version()},
        "command": run.command,
        "attack_seed": run.seed,
    }


def _missing(run: AuditedRun) -> dict[str, Any]:
    """What the audit lacks, in sentences."""
    found, recorded, account = [], run.recorded, run.epsilons.account
    if recorded.examples is None:
        why = (
            "a RoundRecorder knows no losses"
            if recorded.recorder.get("rounds")
            else "the run ended before the losses of the final model were taken"
        )
        found.append(
            f"{EXAMPLES} is absent: {why}. Epsilons cover all logged steps; loss, groups and "
            "attacks are not shown."
        )
    elif not len(recorded.examples.rows("test")):
        found.append(
            "There are no test examples: test accuracy and attacks are not shown. Pass test_set to "
            "the Recorder."
        )
    elif recorded.non_dp is None:
        found.append(
            f"There is no non-private baseline ({EXAMPLES_NON_DP}): the attack cannot be compared "
            "with one on a model trained without DP."
        )
    assumes_norms = not run.log.individually_clipped and account.participation == "secret"
    if assumes_norms and not has_exact_values(run.audit):
        found.append(NO_EXACT_VALUES)
    if run.rows is not None:
        found += [*undeclared_people(run.log, run.rows), *run.grouping[1], *_of_groups(run)]
    return {"missing": tuple(found)}


def has_exact_values(audit: Audit) -> bool:
    """Whether the estimate could be compared with exact values."""
    return bool(audit.fidelity) or audit.batch_norms is not None


def _of_groups(run: AuditedRun) -> list[str]:
    """What a reader of the group tables must know about them."""
    account, groups = run.epsilons.account, run.audit.groups
    examples, notes = run.recorded.examples, list[str]()
    if examples is None:
        return notes
    test = examples.rows("test")
    if groups and (account.rows_per_unit or 1) > 1:
        notes.append(f"A {account.unit} whose rows differ in a column is in its group {MISSING}.")
    lacking = [
        name
        for name in dict.fromkeys(name for found in groups for name in found.columns)
        if name not in test.columns
        or all(frame[name].isna().all() for frame in frames_of(test, [name]))
    ]
    if lacking and len(test):
        notes.append(
            f"Test examples have no {', '.join(lacking)}: test accuracy and attacks are not shown "
            "by these columns. Pass test_metadata together with metadata."
        )
    return notes


FINDINGS = (
    Finding(
        "reproduce",
        95,
        _made,
        name=(str, "Of the run."),
        created=(str, "ISO 8601, UTC."),
        versions=(Mapping[str, str], "Of the tool and its libraries."),
        command=(str, "Reproduces the audit."),
        attack_seed=(int, "Of the random choices of attacks; not a seed of training."),
    ),
    Finding(
        "missing",
        0,
        _missing,
        notes=lambda audit: audit.missing,
        missing=(tuple[str, ...], "What this audit lacks, and why."),
    ),
)
