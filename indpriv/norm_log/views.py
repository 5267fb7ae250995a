"""Views of a NormLog: other logs that the same run could have left. Sensitive.

The first four are methods of NormLog.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._checks import check_positive_int
from indpriv._files import ROW_GROUP_SIZE
from indpriv.errors import InputError
from indpriv.norm_log.batch_norms import ArrayBatchNorms, BatchNormEntries, BatchNorms
from indpriv.norm_log.levels import Codes, Levels
from indpriv.norm_log.records import ArrayRecords, Records

if TYPE_CHECKING:
    from indpriv.norm_log.norm_log import NormLog


def thin(log: NormLog, every: int) -> NormLog:
    """The log that recording only at steps 0, every, 2 * every, ... would have left.

    Steps without a record of their own are skipped, never replaced by a neighbour. If a record is
    dropped, examples were clipped at levels that the thinner log does not hold, so it is not
    individually_clipped. Batch norms stay, since they do not depend on when full records are made.

    Raises:
        InputError: no record is left.
    """
    check_positive_int("every", every)
    keep = log.recorded_steps % every == 0
    if not keep.any():
        raise InputError(
            f"every={every} leaves no record; the log has steps "
            f"{log.recorded_steps[:5].tolist()}..."
        )
    return replace(
        log,
        recorded_steps=log.recorded_steps[keep],
        rows=log.rows[keep],
        individually_clipped=log.individually_clipped and bool(keep.all()),
        filtered=None if log.individually_clipped and not keep.all() else log.filtered,
    )


def part(log: NormLog, start: int, stop: int) -> NormLog:
    """The log of the examples at positions start to stop, in memory."""
    batch_norms = log.batch_norms
    if batch_norms is not None:
        batch_norms = ArrayBatchNorms(batch_norms.steps, batch_norms.read(start, stop))
    filtered = log.filtered
    return replace(
        log,
        example_ids=log.example_ids[start:stop],
        unit_ids=None if log.unit_ids is None else log.unit_ids[start:stop],
        records=ArrayRecords(log.read(start, stop)),
        rows=np.arange(log.n_records),
        reference_positions=None,
        reference_records=None,
        batch_norms=batch_norms,
        filtered=filtered and replace(filtered, left_out_at=filtered.left_out_at[start:stop]),
    )


def take(log: NormLog, positions: ArrayLike) -> NormLog:
    """The log of the examples at these positions only, in memory."""
    index = np.asarray(positions, dtype=np.int64)
    filtered = log.filtered
    return replace(
        log,
        example_ids=log.example_ids[index],
        unit_ids=None if log.unit_ids is None else log.unit_ids[index],
        records=ArrayRecords(_read_at(log, index)),
        rows=np.arange(log.n_records),
        reference_positions=None,
        reference_records=None,
        batch_norms=_taken(log.batch_norms, index, log.n_examples),
        filtered=filtered and replace(filtered, left_out_at=filtered.left_out_at[index]),
    )


def _read_at(log: NormLog, index: IntArray) -> NDArray[np.generic]:
    """(n_records, n) codes or norms at some positions; those of a range are read at once."""
    if log.n_examples <= ROW_GROUP_SIZE or not len(index):
        return log.read(0, log.n_examples if len(index) else 1)[:, index]
    parts = []
    for here, start, stop in _groups_of(index, log.n_examples):
        parts.append((here, log.read(start, stop)[:, index[here] - start]))
    found = np.empty((log.n_records, len(index)), parts[0][1].dtype)
    for here, part in parts:
        found[:, here] = part
    return found


def _groups_of(index: IntArray, n: int) -> Iterator[tuple[IntArray, int, int]]:
    """Yield (which of some positions lie in a row group, its start, its stop)."""
    group = index // ROW_GROUP_SIZE
    for number in np.unique(group).tolist():
        start = number * ROW_GROUP_SIZE
        yield np.flatnonzero(group == number), start, min(start + ROW_GROUP_SIZE, n)


def reference_examples(log: NormLog) -> NormLog | None:
    """The log of the reference examples, with a record at every step; None if there are none."""
    index = log.reference_positions
    if index is None or log.reference_records is None:
        return None
    every_step = np.arange(log.total_steps)
    return replace(
        log,
        example_ids=log.example_ids[index],
        unit_ids=None if log.unit_ids is None else log.unit_ids[index],
        recorded_steps=every_step,
        unreadable_steps=(),
        records=log.reference_records,
        rows=every_step,
        reference_positions=None,
        reference_records=None,
        batch_norms=_taken(log.batch_norms, index, log.n_examples),
        filtered=None,  # levels of every step are not those that the filter charged
    )


def coarser(log: NormLog, rounding: float) -> NormLog:
    """The log that a coarser rounding would have left.

    Args:
        log: without batch norms if its rounding is 0.
        rounding: as a fraction of max_grad_norm, above that of the log.
    """
    finer = log.levels
    levels = Levels(rounding, "up" if finer is None else finer.rounding_mode)
    if finer is not None:
        return _recoded(log, levels, levels.encode(finer.norms(_every_code(finer), 1.0), 1.0))
    norms = log.read().astype(np.float64)
    max_grad_norms = log.settings.max_grad_norm[log.recorded_steps]
    return replace(
        log,
        levels=levels,
        records=ArrayRecords(encode_rows(norms, max_grad_norms, levels)),
        rows=np.arange(log.n_records),
        reference_positions=None,
        reference_records=None,
    )


def noisier(log: NormLog, factor: float | FloatArray) -> NormLog:
    """The log of the same norms, had the noise been larger by a factor, one or of each step."""
    noise = log.settings.noise_multiplier * factor
    return replace(log, settings=replace(log.settings, noise_multiplier=noise))


def clipped_lower(log: NormLog, share: float) -> NormLog:
    """The log of the same norms, had each max_grad_norm been smaller and the noise the same.

    The standard deviation of the noise stays, so that noise_multiplier rises as max_grad_norm
    falls. What an unclipped example contributes beside the noise does not change.

    Args:
        log: the log.
        share: of max_grad_norm, in (0, 1]; one of `log.levels.fractions` where norms are rounded.
    """
    given, finer = log.settings, log.levels
    settings = replace(
        given,
        max_grad_norm=given.max_grad_norm * share,
        noise_multiplier=given.noise_multiplier / share,
    )
    if finer is None:
        return replace(log, settings=settings, reference_positions=None, reference_records=None)
    top = int(np.searchsorted(finer.fractions, share))
    every = _every_code(finer)
    levels = Levels(1 / top, finer.rounding_mode)  # the same levels, of which those above are cut
    above = levels.encode(finer.norms(every, 1.0), share)
    codes: Codes = np.where(every <= top, every, above).astype(levels.dtype)
    return replace(_recoded(log, levels, codes), settings=settings)


def _every_code(levels: Levels) -> Codes:
    return np.arange(levels.max_code + 1, dtype=np.uint16)


def _recoded(log: NormLog, levels: Levels, codes: Codes) -> NormLog:
    """The log whose codes are looked up in `codes`, which are of other levels."""
    batch_norms = log.batch_norms
    if batch_norms is not None:
        entries = batch_norms.read(0, log.n_examples)
        batch_norms = ArrayBatchNorms(batch_norms.steps, replace(entries, norm=codes[entries.norm]))
    return replace(
        log,
        levels=levels,
        records=_RecodedRecords(log.records, codes),
        reference_positions=None,
        reference_records=None,
        batch_norms=batch_norms,
    )


def encode_rows(
    norms: FloatArray, max_grad_norms: FloatArray, levels: Levels | None
) -> Codes | FloatArray:
    """Codes of norms (n_records, n_examples), each row under its own max_grad_norm.

    Without levels, norms are kept as they are.
    """
    if levels is None:
        return norms
    codes = np.empty(norms.shape, levels.dtype)
    for row, max_grad_norm in enumerate(max_grad_norms.tolist()):
        codes[row] = levels.encode(norms[row], max_grad_norm)
    return codes


@dataclass(frozen=True)
class _RecodedRecords:
    """Records whose codes are looked up in a table of others."""

    records: Records
    codes: Codes

    def read(self, rows: IntArray, start: int, stop: int) -> NDArray[np.generic]:
        """See Records."""
        found: NDArray[np.generic] = self.codes[
            self.records.read(rows, start, stop).astype(np.int64)
        ]
        return found


def _taken(
    batch_norms: BatchNorms | None, positions: IntArray, n_examples: int
) -> ArrayBatchNorms | None:
    if batch_norms is None:
        return None
    parts = []
    for here, start, stop in _groups_of(positions, n_examples):
        part = batch_norms.read(start, stop).take(positions[here] - start, stop - start)
        parts.append(replace(part, position=here[part.position].astype(np.int32)))
    if not parts:
        return ArrayBatchNorms(batch_norms.steps, batch_norms.read(0, 0))
    position, step, norm = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("position", "step", "norm")
    )
    entries = BatchNormEntries(position, step, norm)
    return ArrayBatchNorms(batch_norms.steps, entries.select(np.argsort(position, kind="stable")))
