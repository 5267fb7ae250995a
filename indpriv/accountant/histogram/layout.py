"""Lays out the cells of a log: exact ones where they are few, sums over nodes of a grid where they are not."""

from __future__ import annotations

from indpriv.accountant.histogram.cells import Cells
from indpriv.accountant.histogram.composite_cells import CompositeCells
from indpriv.accountant.histogram.governing_records import segments_of
from indpriv.accountant.histogram.governing_rows import GoverningRows
from indpriv.accountant.histogram.level_cells import LevelCells, distinct_settings
from indpriv.accountant.histogram.node_cells import NodeCells
from indpriv.accountant.histogram.span_cells import (
    CountedSpans,
    SpanCells,
    UnrolledSpans,
    governing_spans,
)
from indpriv.norm_log.norm_log import NormLog

Governing = GoverningRows | CountedSpans | UnrolledSpans

MAX_LEVEL_CELLS = 2048  # beyond so many (level, setting) cells, other layouts are cheaper


def governing_of(log: NormLog, between_records: str) -> Governing:
    """What governs the steps of a log: its full records, together with its free ones where it has any."""
    if log.batch_norms is None:
        return GoverningRows.of(log, segments_of(log, between_records))
    return governing_spans(log, between_records)


def cells_of(governing: Governing, *, between_nodes: str = "share") -> Cells:
    """Lay out the cells of a log.

    Args:
        governing: what governs its steps.
        between_nodes: where mechanisms are nodes of a grid, "share" a step between neighbours, which suits RDP alone, or
            count it at the node "up" or "down" (norms at most 0.5 percent too large or too small; sample rates, where there
            are more than 32, by under 1 percent if they vary by a factor 2 at 101 levels; where norms are not rounded
            either, both by a few percent).
    """
    if isinstance(governing, CountedSpans):
        return SpanCells.of(governing)
    if isinstance(governing, UnrolledSpans):
        governing = governing.steps
    if governing.codes is None:
        return NodeCells.of(governing, between_nodes=between_nodes)
    keys, key_of = distinct_settings(governing, governing.codes)
    if len(keys) * governing.codes.n_codes <= MAX_LEVEL_CELLS:
        return LevelCells.of(governing, governing.codes, keys, key_of)
    return CompositeCells.of(governing, governing.codes, keys, between_nodes=between_nodes)


def whole_cells_of(governing: Governing, cells: Cells) -> tuple[Cells, ...]:
    """Cells whose counts are whole numbers: those of `cells_of` where they are levels, else rounded up, and down."""
    if isinstance(cells, LevelCells | SpanCells):
        return (cells,)
    return cells_of(governing, between_nodes="up"), cells_of(governing, between_nodes="down")
