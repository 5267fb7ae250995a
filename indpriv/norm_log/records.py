"""Records: where the rows of a log live, in memory or in Parquet files. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from indpriv import _files
from indpriv._arrays import IntArray
from indpriv.errors import EvidenceError
from indpriv.norm_log.levels import Levels


class Records(Protocol):
    """Rows of a log."""

    def read(self, rows: IntArray, start: int, stop: int) -> NDArray[np.generic]:
        """(len(rows), stop - start) codes, or float64 norms if rounding is 0."""
        ...


@dataclass(frozen=True)
class ArrayRecords:
    """Rows (n_rows, n_examples) in memory."""

    rows: NDArray[np.generic]

    def read(self, rows: IntArray, start: int, stop: int) -> NDArray[np.generic]:
        """See Records."""
        block = self.rows[:, start:stop]
        return block if len(rows) == len(self.rows) else block[rows]


@dataclass(frozen=True)
class FileRecords:
    """Rows in Parquet files; reads only the row groups that a block of examples needs.

    Attributes:
        rows: path and column of each; a path of None is an unreadable record, which counts at
            max_grad_norm.
        levels: of the log; None if rounding is 0.
    """

    rows: list[tuple[Path | None, str]]
    levels: Levels | None

    def read(self, rows: IntArray, start: int, stop: int) -> NDArray[np.generic]:
        """See Records."""
        largest = np.inf if self.levels is None else self.levels.max_code
        dtype = np.float64 if self.levels is None else self.levels.dtype
        block: NDArray[np.generic] = np.empty((len(rows), stop - start), dtype)
        for out, row in enumerate(rows):
            path, column = self.rows[row]
            if path is None:
                block[out] = largest
                continue
            block[out] = _read_column(path, column, start, stop)
            if not np.all(block[out] <= largest):  # nor is a NaN
                raise EvidenceError(
                    f"{path}: code {block[out].max()} is above the top code {largest} of its "
                    "rounding"
                )
        return block


def _read_column(path: Path, column: str, start: int, stop: int) -> NDArray[np.generic]:
    size = _files.ROW_GROUP_SIZE
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            groups = list(range(start // size, -(-stop // size)))
            table = file.read_row_groups(groups, columns=[column], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise EvidenceError(f"record {path} cannot be read: {error}") from error
    values: NDArray[np.generic] = table.column(column).to_numpy()
    offset = start - groups[0] * size
    return values[offset : offset + stop - start]
