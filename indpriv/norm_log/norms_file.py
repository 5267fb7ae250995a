"""A file of norms that another trainer wrote, as Parquet or npz. Sensitive.

Parquet has a row per example and a column per record, named by its step, besides the columns
example_id, unit_id and participations if they are known. An npz file has the arrays norms
(n_records, n_examples) and recorded_steps (n_records,), besides example_ids, unit_ids and
participations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import IntArray
from indpriv._files import opened_parquet
from indpriv._reading import check_size, read_npz
from indpriv.errors import InputError
from indpriv.norm_log.validation import (
    check_ids,
    check_norms,
    check_recorded_steps,
    check_unit_ids,
)

_OTHER_COLUMNS = ("example_id", "unit_id", "participations")  # of a Parquet file, not records


@dataclass(frozen=True)
class NormsFile:
    """A file of norms; records are read one at a time.

    Attributes:
        path: the file.
        recorded_steps: (n_records,).
        example_ids, unit_ids: (n_examples,); the latter may be None.
        participations: (n_examples,) how often each example was drawn, or None.
        read: takes a record's number and returns its norms (n_examples,) as the file holds them.
    """

    path: Path
    recorded_steps: IntArray
    example_ids: NDArray[np.generic]
    unit_ids: NDArray[np.generic] | None
    participations: NDArray[np.generic] | None
    read: Callable[[int], NDArray[np.generic]]


def check_norms_file(norms: NormsFile, total_steps: int, *, unit: str) -> None:
    """Raise InputError unless ids, steps, participations and all norms of a file fit together."""
    try:
        check_ids(norms.example_ids, len(norms.example_ids))
        check_recorded_steps(norms.recorded_steps, len(norms.recorded_steps), total_steps)
        check_unit_ids(norms.unit_ids, len(norms.example_ids), unit)
    except InputError as error:
        raise InputError(f"{norms.path}: {error}") from error
    drawn = norms.participations
    if drawn is not None and (
        drawn.shape != norms.example_ids.shape
        or not np.issubdtype(drawn.dtype, np.integer)
        or drawn.min() < 0
        or drawn.max() > total_steps
    ):
        raise InputError(
            f"{norms.path}: participations must be one whole number per example, from 0 to "
            f"steps={total_steps}: how often it was drawn"
        )
    for number, step in enumerate(norms.recorded_steps.tolist()):
        values = norms.read(number)
        if values.dtype.kind not in "fiu":
            raise InputError(
                f"{norms.path}: the norms of step {step} are {values.dtype}; they must be numbers"
            )
        try:
            check_norms(values, norms.example_ids)
        except InputError as error:
            raise InputError(f"{norms.path}, step {step}: {error}") from error


def read_norms(path: Path) -> NormsFile:
    """Open a Parquet or npz file of norms; InputError if it is another file, or damaged."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    raise InputError(f"{path} is neither .parquet nor .npz; write the norms as one of them")


def _read_parquet(path: Path) -> NormsFile:
    """Columns are read one at a time; page checksums are checked if the file has them."""
    with opened_parquet(path) as file:
        names, n_examples = file.schema_arrow.names, file.metadata.num_rows
        check_size(path, 16 * n_examples, path.stat().st_size)  # ids and one record
    steps = {name: int(name) for name in names if name.isascii() and name.isdecimal()}
    unknown = [name for name in names if name not in steps and name not in _OTHER_COLUMNS]
    if unknown or len(set(steps.values())) < len(steps):
        raise InputError(
            f"{path} has columns {', '.join(map(repr, (unknown or names)[:5]))}; a record is a "
            f"column named by its step, e.g. '200', and the others are {', '.join(_OTHER_COLUMNS)}"
        )

    def column(name: str) -> NDArray[np.generic]:
        with opened_parquet(path) as file:
            found = file.read([name]).column(0)
        if found.null_count:
            raise InputError(
                f"{path}: column {name!r} has {found.null_count} missing values; each row needs a "
                f"value"
            )
        values: NDArray[np.generic] = found.to_numpy()
        return values

    recorded = sorted(steps, key=steps.__getitem__)
    found = {name: column(name) if name in names else None for name in _OTHER_COLUMNS}
    ids = found["example_id"]
    return NormsFile(
        path,
        np.array([steps[name] for name in recorded], dtype=np.int64),
        np.arange(n_examples) if ids is None else ids,
        found["unit_id"],
        found["participations"],
        lambda number: column(recorded[number]),
    )


def _read_npz(path: Path) -> NormsFile:
    """Read arrays of numbers and texts only: nothing in the file is unpickled."""
    found = read_npz(path)
    known = ("norms", "recorded_steps", "example_ids", "unit_ids", "participations")
    unknown = [name for name in found if name not in known]
    if unknown or not {"norms", "recorded_steps"} <= set(found):
        raise InputError(
            f"{path} has arrays {', '.join(found) or 'none'}; it needs norms and recorded_steps, "
            f"and may have {', '.join(known[2:])}"
        )
    norms, steps = found["norms"], found["recorded_steps"]
    if (
        norms.ndim != 2
        or steps.shape != norms.shape[:1]
        or not np.issubdtype(steps.dtype, np.integer)
    ):
        raise InputError(
            f"{path}: norms has shape {norms.shape} and recorded_steps {steps.shape} of "
            f"{steps.dtype}; pass (n_records, n_examples) norms, and one whole number per record"
        )
    ids = found.get("example_ids", np.arange(norms.shape[1]))
    if ids.shape != norms.shape[1:]:
        raise InputError(
            f"{path}: example_ids has shape {ids.shape} for {norms.shape[1]} examples; pass one id "
            "per example"
        )
    units, drawn = found.get("unit_ids"), found.get("participations")
    return NormsFile(path, steps.astype(np.int64), ids, units, drawn, lambda number: norms[number])
