"""epsilon.parquet by parts: a file, or a folder of parts where the table is long. Sensitive.

A folder holds `_account.json`, which says what its parts belong to and how many there are, and
part-00000.parquet, part-00001.parquet and so on, each with the next PART_ROWS rows and the columns
and metadata of a file. A part exists whole or not at all. Readers of Parquet data sets leave out
names that begin with an underscore, and read the rows in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from indpriv import _files
from indpriv._arrays import IntArray
from indpriv._columns import Rows, as_rows
from indpriv._folders import make_folder, remove_file
from indpriv._reading import Whole, check, named, table
from indpriv.epsilon_table.table import KEPT_DETAILS, Account, EpsilonTable
from indpriv.errors import EvidenceError

PART_ROWS = _files.ROW_GROUP_SIZE
LARGEST_FILE = 4 * PART_ROWS  # rows: a longer table is a folder of parts
MARKER = "_account.json"
_PARTS = table({Annotated[Whole, Field(ge=1)]: "rows"})
KINDS = {
    **dict.fromkeys(("epsilon", "epsilon_lower", "epsilon_upper"), "f"),
    **{"n_rows?": "i", "unit_worst_case?": "f", "true_positive_limit?": "f"},
}


def ranges(n_rows: int) -> list[tuple[int, int]]:
    """(start, stop) of the rows of each part."""
    starts = range(0, n_rows, PART_ROWS)
    return [(start, min(start + PART_ROWS, n_rows)) for start in starts]


@dataclass(frozen=True)
class EpsilonParts:
    """An epsilon.parquet that is read part by part, so that memory does not grow with its rows.

    Attributes:
        path: the file, or the folder of parts.
        n_rows: of all parts together.
        about: a table without rows: worst case, claim and account of all.
        columns: names of the columns.
    """

    path: Path
    n_rows: int
    about: EpsilonTable
    columns: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> EpsilonParts:
        """Open a file or a folder of parts.

        Raises:
            InputError: there is none, or it is no table of epsilons.
            EvidenceError: a part is missing, or what is read is damaged.
        """
        if not path.is_dir():
            rows = _files.ParquetRows.open(path, KINDS)
            n_rows, empty = len(rows), rows.empty
        else:
            marker = _files.read_json(path / MARKER)
            check(_PARTS, marker, str(path / MARKER))
            n_rows = marker["rows"]
            for number in range(len(ranges(n_rows))):
                if not (path / part_name(number)).is_file():
                    raise EvidenceError(
                        f"{path} lacks {part_name(number)} of {len(ranges(n_rows))} parts; restore "
                        "it, or type the command again that makes the audit"
                    )
            empty = _files.ParquetRows.open(path / part_name(0), KINDS).empty
        with named(path):
            if n_rows == 0:
                raise EvidenceError("it has no rows")
            return cls(path, n_rows, EpsilonTable.from_frame(empty), tuple(empty.columns))

    def __len__(self) -> int:
        return self.n_rows

    @property
    def details(self) -> tuple[str, ...]:
        """Columns after the bracket of epsilon: those of the accountant, then further ones."""
        return self.columns[4:]

    @property
    def account(self) -> Account:
        """What the epsilons mean."""
        return self.about.account

    @property
    def worst_case_epsilon(self) -> float:
        """The run's guarantee."""
        return self.about.worst_case_epsilon

    @property
    def claim(self) -> str:
        """See `EpsilonTable`."""
        return self.about.claim

    @property
    def claim_reason(self) -> str:
        """See `EpsilonTable`."""
        return self.about.claim_reason

    def frames(self, columns: Sequence[str] | None = None) -> Iterator[pd.DataFrame]:
        """Yield the rows in order, PART_ROWS at a time, as `EpsilonTable.to_frame` gives them.

        columns: those that are read, by default all; further ones follow those of `to_frame`.
        """
        if not self.path.is_dir():
            rows = _files.ParquetRows.open(self.path)
            yield from (rows.read(start, stop, columns) for start, stop in rows.ranges())
            return
        for number, (start, stop) in enumerate(ranges(self.n_rows)):
            part = self.path / part_name(number)
            frame = _files.read_parquet(part, columns, kinds=KINDS)
            if len(frame) != stop - start:
                raise EvidenceError(
                    f"{part} has {len(frame):,} rows instead of {stop - start:,}; make the audit "
                    "again"
                )
            yield frame

    def tables(self, details: Collection[str] = KEPT_DETAILS) -> Iterator[EpsilonTable]:
        """Yield a table of each part, with the claim of all; details: columns that it keeps."""
        kept = [name for name in self.details if name in details]
        for frame in self.frames([*self.columns[:4], *kept]):
            with named(self.path):
                table = EpsilonTable.from_frame(frame, kept)
            yield self._claimed(table)

    def take(self, positions: IntArray) -> EpsilonTable:
        """A table of the rows at increasing positions, in memory, with all columns as details."""
        found, start = [], 0
        for frame in self.frames():
            first, last = np.searchsorted(positions, [start, start + len(frame)])
            found.append(frame.iloc[positions[first:last] - start])
            start += len(frame)
        return self._claimed(EpsilonTable.from_frame(_whole(found), self.details))

    def frame(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """All rows in memory."""
        return _whole(list(self.frames(columns)))

    def table(self, details: Collection[str] = KEPT_DETAILS) -> EpsilonTable:
        """All rows in memory as a table; details: see `EpsilonTable.from_frame`."""
        with named(self.path):
            return self._claimed(EpsilonTable.from_frame(self.frame(), details))

    def _claimed(self, table: EpsilonTable) -> EpsilonTable:
        return replace(table, claim=self.claim, claim_reason=self.claim_reason)


Epsilons = EpsilonTable | EpsilonParts


def beside(
    epsilons: Epsilons, rows: Rows, columns: Sequence[str] | None = None
) -> Iterator[tuple[EpsilonTable, pd.DataFrame]]:
    """Yield each part of the epsilons with the rows of its examples.

    Args:
        epsilons: one part if they are in memory.
        rows: of the same examples in the same order.
        columns: those that are read, by default all.
    """
    start = 0
    for part in epsilons.tables():
        stop = start + len(part)
        yield part, rows.read(start, stop, columns)
        start = stop


def _whole(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    whole = pd.concat(frames, ignore_index=True)
    whole.attrs = frames[0].attrs
    return whole


def part_name(number: int) -> str:
    """The file of a part, from 0."""
    return f"part-{number:05d}.parquet"


class PartsWriter:
    """Writes a folder of parts, in any order, and goes on with one that was stopped.

    Attributes:
        folder: of the parts.
        discarded: number of parts of another account that lay there, and were removed.
    """

    def __init__(self, folder: Path, n_rows: int, belongs_to: Mapping[str, Any]) -> None:
        """Begin a folder, or keep the parts that it has of the same account.

        belongs_to: JSON that two accounts share only if their parts have the same bits.
        """
        self.folder, self._ranges = folder, ranges(n_rows)
        marker = {"rows": n_rows, "rows_per_part": PART_ROWS, "belongs_to": dict(belongs_to)}
        make_folder(folder)
        self.discarded = 0
        if not (folder / MARKER).is_file() or _files.read_json(folder / MARKER) != marker:
            for part in sorted(folder.glob("part-*.parquet")):
                remove_file(part)
                self.discarded += 1
            _files.write_json(folder / MARKER, marker)
        for leftover in folder.glob(".part-*.tmp"):
            remove_file(leftover)

    def missing(self) -> list[tuple[int, int, int]]:
        """Numbers of parts that are not there, each with the range of its rows."""
        return [
            (number, start, stop)
            for number, (start, stop) in enumerate(self._ranges)
            if not (self.folder / part_name(number)).is_file()
        ]

    def share_worst_case(self) -> None:
        """Give each part the worst case of all, once all are there: the largest of theirs."""
        paths = [self.folder / part_name(number) for number in range(len(self._ranges))]
        own = [_files.ParquetRows.open(path).empty.attrs["worst_case_epsilon"] for path in paths]
        for path, worst in zip(paths, own, strict=True):
            if worst != max(own):
                frame = _files.read_parquet(path)
                table = EpsilonTable.from_frame(frame, frame.columns[4:])
                table.with_worst_case(max(own)).to_parquet(path)

    def write(self, number: int, table: EpsilonTable, columns: pd.DataFrame | None = None) -> None:
        """Write a part; columns: as in `EpsilonTable.to_parquet`."""
        table.to_parquet(self.folder / part_name(number), columns=columns)


def write_epsilons(
    epsilons: Epsilons,
    path: Path,
    rows: pd.DataFrame | Rows | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Write epsilons as a file, or above LARGEST_FILE rows as a folder of parts.

    Args:
        epsilons: in memory or in another folder of parts.
        path: of the file or folder; what lies there is replaced.
        rows: further columns, one row per example in the order of the epsilons.
        names: column of rows -> its name in the file; default all, under their names.
    """

    def further(start: int, stop: int) -> pd.DataFrame | None:
        if rows is None:
            return None
        read = as_rows(rows).read(start, stop, None if names is None else list(names))
        return read.rename(columns=dict(names or {}))

    n_rows = len(epsilons)
    if path.is_dir():
        rmtree(path, ignore_errors=True)
    if n_rows <= LARGEST_FILE:
        epsilons.table(epsilons.details).to_parquet(path, columns=further(0, n_rows))
        return
    remove_file(path)
    writer = PartsWriter(path, n_rows, {"account": dict(vars(epsilons.account))})
    tables = epsilons.tables(epsilons.details)
    if isinstance(epsilons, EpsilonTable):
        tables = (epsilons.take(slice(*each)) for each in ranges(n_rows))
    for (number, start, stop), part in zip(writer.missing(), tables, strict=True):
        writer.write(number, part, further(start, stop))
