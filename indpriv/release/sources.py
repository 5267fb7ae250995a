"""What a release is about: one value for each person on a public grid.

Everything but the grid and the texts is sensitive.

    EpsilonTable -> individual epsilons in [0, worst case]
    NormLog -> gradient norms before the first step, to choose a clipping norm by
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._columns import partition
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import EPSILON, SUMMARY
from indpriv.epsilon_table import DISCLAIMER, EpsilonParts, EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import holds_log
from indpriv.norm_log.validation import CONTRIBUTIONS
from indpriv.norm_log.writer import fingerprint
from indpriv.release.assumptions import (
    check_noise,
    check_releasable,
    epsilon_assumptions,
    norm_assumptions,
)
from indpriv.release.clipping_norm import norm_grid, to_norm_cells
from indpriv.release.mechanisms import N_CELLS
from indpriv.release.request import Budget, Request


@dataclass(frozen=True)
class Source:
    """One value for each person, and what may be said about them.

    Attributes:
        counts: group -> (n_cells,) number of people at each value of the grid; one group "" if
            there is no partition. Sensitive.
        fingerprint: of the values. Sensitive.
        grid: (n_cells,) values that an answer can take, increasing; public.
        grid_text: the grid in words.
        name: of the run.
        quantity: what one value is, in a few words.
        meaning: what it means, and its claim.
        unit, neighbouring: what one record is, and what neighbours are.
        training: the guarantee that the release composes with; None if the values do not depend on
            training.
        assumptions: of the release.
    """

    counts: Mapping[str, IntArray]
    fingerprint: str
    grid: FloatArray
    grid_text: str
    name: str
    quantity: str
    meaning: str
    unit: str
    neighbouring: str
    training: Budget | None
    assumptions: tuple[str, ...]


def open_source(path: Path, request: Request) -> Source:
    """The individual epsilons of an audit directory, or the first norms of a run directory.

    Raises:
        InputError: neither is there, or its values cannot be released (see `assumptions`).
    """
    if (path / SUMMARY).is_file():
        return _epsilons(path, request)
    if holds_log(path):
        return _norms(path, request)
    raise InputError(
        f"{path} holds no {SUMMARY}; make an audit first: indpriv audit RUN --output-dir {path} "
        "(or pass a run directory and --norms, for norms before the first step)"
    )


def to_cells(values: FloatArray, upper: float, n_cells: int = N_CELLS) -> IntArray:
    """Cell of each value on the grid upper * (1, 2, ..., n_cells) / n_cells, rounded up.

    Values are clamped to [0, upper].

    Raises:
        InputError: NaN or infinite values, which no mechanism may see; a range without width.
    """
    odd = ~np.isfinite(values)
    if odd.any():
        raise InputError(
            f"{int(odd.sum())} of the values are NaN or infinite, so nothing is released; make the "
            "audit again"
        )
    if not (np.isfinite(upper) and upper > 0):
        raise InputError(
            f"the worst case is {upper}; a release needs a finite range of values above 0"
        )
    cells = np.ceil(values / upper * n_cells - 1e-9)  # a value on the grid stays there
    clamped: IntArray = (np.clip(cells, 1, n_cells) - 1).astype(np.int64)
    return clamped


def _epsilons(audit_dir: Path, request: Request) -> Source:
    summary = read_summary(audit_dir)
    check_releasable(summary)
    frame = EpsilonParts.open(audit_dir / EPSILON).frame()
    table = EpsilonTable.from_frame(frame)
    upper = table.worst_case_epsilon
    if (
        upper != summary["guarantee"]["worst_case_epsilon"]
        or vars(table.account) != summary["account"]
    ):
        raise InputError(
            f"{audit_dir}: {EPSILON} and {SUMMARY} come from different audits; make the audit again"
        )
    cells = to_cells(table.epsilon, upper)
    if request.by:
        groups = partition(frame, frame.iloc[:0], request.by, max_values=None)
        counts = _count_groups(cells, groups.names, groups.train_codes, request.groups)
    else:
        counts = {"": np.bincount(cells, minlength=N_CELLS)}
    return Source(
        counts=counts,
        fingerprint=fingerprint(table.example_ids) + fingerprint(table.epsilon),
        grid=upper * np.arange(1, N_CELLS + 1) / N_CELLS,
        grid_text=f"{N_CELLS:,} equally spaced values from {upper / N_CELLS:.3g} to the worst "
        f"case, {upper:.6g}; epsilons are rounded up to them",
        name=str(summary["name"]),
        quantity="individual epsilon",
        meaning=f"Individual epsilon ({summary['claim']}) at {table.account.describe()}. "
        f"{DISCLAIMER}",
        unit=table.account.unit,
        neighbouring=table.account.neighbouring,
        training=Budget.of(upper, table.account.delta),
        assumptions=tuple(epsilon_assumptions(summary, request)),
    )


def _count_groups(
    cells: IntArray, names: Sequence[str], codes: IntArray, wanted: Sequence[str]
) -> dict[str, IntArray]:
    """Counts of the requested groups; an empty one is counted like any other, so as not to show."""
    found = {name: cells[codes == code] for code, name in enumerate(names)}
    empty = np.array([], dtype=np.int64)
    return {name: np.bincount(found.get(name, empty), minlength=N_CELLS) for name in wanted}


def _norms(run_dir: Path, request: Request) -> Source:
    if request.by or request.mean:
        raise InputError(
            "of gradient norms only quantiles of all people can be released; leave --by and --mean "
            "out"
        )
    run = open_run(run_dir)
    log, recorder = run.log, run.state.header["run"]
    check_noise(recorder)
    if log.n_records == 0 or log.recorded_steps[0] != 0:
        raise InputError(
            f"{run_dir} has no record before the first step, and a clipping norm is chosen by "
            "norms at the initial parameters; record norms at step 0"
        )
    if log.unit_ids is not None and len(np.unique(log.unit_ids)) != log.n_examples:
        raise InputError(
            f"{run_dir}: several rows belong to one person, and a release of norms needs one row "
            "for each person; release individual epsilons of an audit by people instead"
        )
    row = log.records.read(log.rows[:1], 0, log.n_examples)[0]
    grid, codes, grid_text = _norm_grid(row, log.levels, float(log.settings.max_grad_norm[0]))
    return Source(
        counts={"": np.bincount(codes, minlength=len(grid))},
        fingerprint=fingerprint(np.asarray(log.example_ids)) + fingerprint(codes),
        grid=grid,
        grid_text=grid_text,
        name=run_dir.resolve().name,
        quantity="gradient norm before the first step",
        meaning=_meaning(str(recorder.get("clipping", "flat"))),
        unit=log.unit,
        neighbouring=log.neighbouring,
        training=None,
        assumptions=tuple(norm_assumptions(log.unit, log.neighbouring, request)),
    )


def _meaning(clipping: str) -> str:
    """What the norms of a log are, by its kind of clipping."""
    if clipping in CONTRIBUTIONS:
        return f"Of the first step: {CONTRIBUTIONS[clipping]}."
    headroom = ", and the headroom of individual clipping" if clipping == "individual" else ""
    return f"Norm of one example's gradient at the initial parameters, before clipping{headroom}."


def _norm_grid(
    row: NDArray[np.generic], levels: Levels | None, max_grad_norm: float
) -> tuple[FloatArray, IntArray, str]:
    """A public grid of norms, the cell of each norm (rounded up), and the grid in words.

    Norms kept in full are put on values in equal ratios, so that a median far above the clipping
    norm is as precise as one below; norms of a log with levels are known up to its levels only.
    """
    if levels is None:
        grid = norm_grid(max_grad_norm)
        codes = to_norm_cells(row.astype(np.float64), grid)
        text = (
            f"{N_CELLS:,} values in equal ratios from {grid[0]:.4g} to {grid[-1]:.4g}; norms are "
            "rounded up to them"
        )
        return grid, codes, text
    every_code = np.arange(levels.max_code + 1, dtype=np.int64)
    grid = levels.norms(every_code.astype(levels.dtype), max_grad_norm)
    text = (
        f"{len(grid):,} values: steps of {levels.rounding:g} of the clipping norm "
        f"{max_grad_norm:g} up to it, then eighths of an octave up to {grid[-1]:.4g}"
    )
    return grid, row.astype(np.int64), text
