"""A run with its account: what findings are made of, and the audit that they make. Sensitive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import pandas as pd
from pandas.api.types import is_numeric_dtype

from indpriv import _columns
from indpriv._types import StageProgress, silent
from indpriv.accountant.method import Method
from indpriv.analysis.recorded_run import RecordedRun, in_rows_of
from indpriv.analysis.summary import Audit, finding_of, keys
from indpriv.epsilon_table import Epsilons, EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import EXAMPLES

T = TypeVar("T")
ANALYSING = "analysing"


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
    def rows(self) -> _columns.Rows | None:
        """Of the training examples, in the order of the log; None without an example table."""
        examples = self.recorded.examples
        return None if examples is None else examples.train_rows(self.log.example_ids)

    @cached_property
    def train(self) -> _columns.Rows | None:
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
                f"there are no groups by {self.by[0]}: this run has no {EXAMPLES}, which holds "
                "such columns; leave out --by"
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
    train: pd.DataFrame | _columns.Rows, by: Sequence[str], declared: Sequence[str]
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
    chosen, left_out, rows = [], [], _columns.as_rows(train)
    for column in _columns.groupable_columns(rows):
        distinct, numeric = _distinct(rows, column)
        if not distinct:  # units of rows that differ in it
            continue
        if distinct <= _columns.MAX_NUMERIC_VALUES:
            chosen.append(column)
        elif numeric:
            chosen.append(f"{column}:bins=10")
        else:
            least = (
                "at least " if distinct > _columns.MOST_GROUPS and len(rows.ranges()) > 1 else ""
            )
            left_out.append(
                f"{column} has {least}{distinct:,} distinct values and was not grouped by; ask "
                f"with --by {column}."
            )
    return chosen, left_out


def _distinct(rows: _columns.Rows, column: str) -> tuple[int, bool]:
    """Number of distinct values, and whether they are numbers; counting ends at MOST_GROUPS."""
    values, numeric = set[object](), True
    for frame in _columns.frames_of(rows, [column]):
        known = frame[column].dropna()
        numeric = numeric and (is_numeric_dtype(known) or known.empty)
        values.update(known.unique().tolist())
        if len(values) > _columns.MOST_GROUPS:
            break
    return len(values), numeric
