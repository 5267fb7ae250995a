"""Rows of examples that are read a range at a time, from memory or from a file. Sensitive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from indpriv._arrays import IntArray


class Rows(Protocol):
    """Rows in one order."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns."""
        ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The rows from start to stop; columns: by default all."""
        ...

    def ranges(self) -> Sequence[tuple[int, int]]:
        """(start, stop) of ranges that are read one after the other; one for rows in memory."""
        ...


@dataclass(frozen=True)
class FrameRows:
    """Rows in memory."""

    frame: pd.DataFrame

    @property
    def columns(self) -> Sequence[str]:
        """See Rows."""
        return list(self.frame.columns)

    def __len__(self) -> int:
        return len(self.frame)

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """See Rows."""
        frame = self.frame if columns is None else self.frame[list(columns)]
        return frame if (start, stop) == (0, len(frame)) else frame.iloc[start:stop]

    def ranges(self) -> Sequence[tuple[int, int]]:
        """See Rows."""
        return [(0, len(self.frame))]


@dataclass(frozen=True)
class RenamedRows:
    """Some columns of rows under other names: name there -> name here."""

    rows: Rows
    names: Mapping[str, str]

    @property
    def columns(self) -> Sequence[str]:
        """See Rows."""
        return list(self.names.values())

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """See Rows."""
        kept = [old for old, new in self.names.items() if columns is None or new in columns]
        return self.rows.read(start, stop, kept).rename(columns=dict(self.names))

    def ranges(self) -> Sequence[tuple[int, int]]:
        """See Rows."""
        return self.rows.ranges()


def as_rows(rows: pd.DataFrame | Rows) -> Rows:
    """A DataFrame as rows in memory; rows as they are."""
    return FrameRows(rows) if isinstance(rows, pd.DataFrame) else rows


def frames_of(rows: Rows, columns: Sequence[str] | None = None) -> Iterator[pd.DataFrame]:
    """Yield all rows in order, a range at a time."""
    for start, stop in rows.ranges():
        yield rows.read(start, stop, columns)


def frames_at(
    rows: Rows, positions: IntArray, columns: Sequence[str] | None = None
) -> Iterator[pd.DataFrame]:
    """Yield the rows at increasing positions, a range at a time."""
    for start, stop in rows.ranges():
        first, last = np.searchsorted(positions, [start, stop])
        if first < last:
            yield rows.read(start, stop, columns).iloc[positions[first:last] - start]


def rows_at(rows: Rows, positions: IntArray, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The rows at increasing positions."""
    found = list(frames_at(rows, positions, columns))
    if not found:
        return rows.read(0, 0, columns)
    return (
        pd.concat(found, ignore_index=True) if len(found) > 1 else found[0].reset_index(drop=True)
    )
