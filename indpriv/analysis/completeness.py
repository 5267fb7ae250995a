"""How an audit is made again, what it lacks, and how exact its figures are. Sensitive."""

import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from indpriv import _columns
from indpriv._columns import numbers_of, repeats
from indpriv._facts import text
from indpriv.analysis import statistics
from indpriv.analysis.fidelity import MOST_COMPARED
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.summary import Finding, record
from indpriv.norm_log.norm_log import NormLog

Exactness: Any = record("exactness")
_LIBRARIES = ("indpriv", "numpy", "scipy", "pandas", "pyarrow")
# Words in a column's name that suggest it says whose row each is.
_LIKELY = re.compile(
    r"(?!.*_(size|type|count|income|age|status|role)$)"  # which many people share
    r"((^|_)(user|person|people|patient|client|customer|subject|owner|household|participant|speaker|"
    r"author|member)s?(_|$)|(^|_)(uuid|ssn|email|name)$|.+_id$)",
    re.IGNORECASE,
)
_MOST_REPEATED = 1 << 17  # rows with a repeated hash that are compared
_NAMED = 5  # number of groups of repeated rows that are named


def undeclared_people(log: NormLog, train: pd.DataFrame | _columns.Rows) -> list[str]:
    """Signs that a person has several rows, in sentences; fewer where unit_ids are known.

    `train` holds the training examples in the log's order.
    """
    rows = _columns.as_rows(train)
    return [*_likely_columns(log, rows), *_repeated_rows(log, rows)]


def _likely_columns(log: NormLog, rows: _columns.Rows) -> Iterator[str]:
    """Columns whose name says that they say whose row each is, and whose values repeat."""
    named = [
        one
        for one in rows.columns
        if one not in _columns.FIXED_COLUMNS and _LIKELY.search(str(one))
    ]
    for column in named if log.unit_ids is None else ():

        def numbers(column: str = column) -> Iterator[NDArray[np.uint64]]:
            for frame in _columns.frames_of(rows, [column]):
                yield numbers_of(frame[column].dropna().reset_index(drop=True))

        _, distinct, known = repeats(numbers, len(rows))
        if 1 < distinct < known:
            yield text("sentence.missing", "owner", column=column, distinct=distinct, known=known)


def _repeated_rows(log: NormLog, rows: _columns.Rows) -> list[str]:
    """Rows that agree in label, loss, metadata and every record, but not in their unit."""
    compared = [name for name in rows.columns if name not in ("example_id", "unit_id")]

    def hashes() -> Iterator[NDArray[np.uint64]]:
        for frame in _columns.frames_of(rows, compared):
            for start in range(0, len(frame), statistics.BLOCK):
                same = frame.iloc[start : start + statistics.BLOCK].apply(_alike)
                yield np.asarray(pd.util.hash_pandas_object(same, index=False), np.uint64)

    positions, *_ = repeats(hashes, len(rows), _MOST_REPEATED)
    repeated = _columns.rows_at(rows, positions, compared)
    known = repeated["loss"].notna().to_numpy()
    positions, repeated = positions[known], repeated[known]
    if not len(positions):
        return []
    codes, units = log.take(positions).read(), log.unit_ids
    seen: dict[tuple[object, ...], list[int]] = {}
    texts = zip(*(_columns.to_texts(repeated[name]) for name in compared), strict=True)
    for place, (position, values) in enumerate(zip(positions.tolist(), texts, strict=True)):
        seen.setdefault((*values, codes[:, place].tobytes()), []).append(position)
    groups = [
        same
        for same in seen.values()
        if len(same) > 1 and (units is None or len(pd.unique(units[same])) > 1)
    ]
    if not groups:
        return []
    ids = [" = ".join(map(str, log.example_ids[same].tolist())) for same in groups[:_NAMED]]
    named = "; ".join([*ids, *["..."] * (len(groups) > _NAMED)])
    n = f"{sum(map(len, groups)):,}"
    count = n if len(positions) < _MOST_REPEATED else f"At least {n}"
    return [text("sentence.missing", "repeats", count=count, named=named)]


def _alike(column: "pd.Series[Any]") -> NDArray[Any]:
    """The values in one type, whichever missing values other ranges of rows have."""
    numbers = is_numeric_dtype(column) and not is_bool_dtype(column)
    return _columns.to_floats(column) if numbers else _columns.to_texts(column)


def _exactness(run: AuditedRun) -> dict[str, Any]:
    attacked = run.recorded.attacked(run.seed)
    members, others = (None if found is None else len(found) for found in attacked)
    n, audit = len(run.epsilons), run.audit
    if n <= statistics.MOST_EXACT and members is None and others is None:
        return {}  # every figure comes from each example
    tried = len(audit.sensitivity) or audit.fidelity
    some = n > MOST_COMPARED and run.epsilons.account.rows_per_unit is None
    found = Exactness(
        most_exact=statistics.MOST_EXACT,
        quantile_error=statistics.BIN_WIDTH,
        related=statistics.MOST_EXACT if audit.loss and n > statistics.MOST_EXACT else None,
        attacked_members=members,
        attacked_nonmembers=others,
        compared=MOST_COMPARED if tried and some else None,
    )
    return {"exactness": found}


def _made(run: AuditedRun) -> dict[str, Any]:
    versions = dict.fromkeys(_LIBRARIES, "not installed (run from its source)")
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
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
    examples, groups = recorded.examples, run.audit.groups
    test = None if examples is None else examples.rows("test")
    if test is None:
        of_rounds, imported = map(recorded.recorder.get, ("rounds", "converted"))
        ended = text("sentence.missing", "converted" if imported else "ended_early")
        why = text("sentence.missing", "rounds") if of_rounds else ended
        found.append(text("sentence.missing", "examples", why=why))
    elif not len(test):
        found.append(text("sentence.missing", "test"))
    elif recorded.non_dp.losses is None:
        found.append(text("sentence.missing", "baseline"))
    assumes_norms = not run.log.individually_clipped and account.participation == "secret"
    if assumes_norms and not run.audit.fidelity and run.audit.batch_norms is None:
        found.append(text("sentence.missing", "exact_values"))
    if run.rows is not None:
        found += [*undeclared_people(run.log, run.rows), *run.grouping[1]]
    if groups and (account.rows_per_unit or 1) > 1:
        found.append(text("sentence.missing", "differs", account=account, missing=_columns.MISSING))
    if test is not None and len(test):
        lacking = [
            name
            for name in dict.fromkeys(name for table in groups for name in table.columns)
            if name not in test.columns
            or all(frame[name].isna().all() for frame in _columns.frames_of(test, [name]))
        ]
        if lacking:
            found.append(text("sentence.missing", "columns", lacking=", ".join(lacking)))
    return {"missing": tuple(found)}


FINDINGS = (
    Finding("reproduce", _made),
    Finding("missing", _missing, notes=lambda audit: audit.missing),
    Finding("exactness", _exactness),
)
