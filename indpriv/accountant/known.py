"""The account against anyone who knows who took part in which step. Sensitive.

Given who took part when, a unit meets one Gaussian mechanism whose squared mu is the sum over its
steps, by [9.7] of docs/explanation/proofs.md. Its neighbour contributes nothing ("zero_out"), or
has other rows ("replace_one"). Columns of units, whose squared mu are rounded up:

* n_rows, and participations: number of steps that it took part in.
* own: squared mu at its own norms; a replacement points away from each row.
* clipped: squared mu at max_grad_norm.
* least: squared mu that recorded norms show; 0 for units of several rows, which may cancel out.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray, NDArray, Progress
from indpriv.accountant.blocks import BlockAccount, Workers, epsilon_table
from indpriv.accountant.laws import gaussian_epsilons
from indpriv.accountant.method import Method, account_of, claim_of, most_rows
from indpriv.accountant.rdp import Columns, joined
from indpriv.accountant.units import Units, first_rows, rows_together
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, EpsilonTable
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import BatchNormEntries

_AT_ONCE = 1 << 15  # examples: what is made of their entries stays in cache
_REPEATING = ("with_replacement", "other")  # samplers that may draw an example twice for a step


def known_blocks(log: NormLog, method: Method) -> BlockAccount:
    """The account of a log with known participation; the worst case of a table is of its units."""
    units, first_row = Units.of(log), None
    # Full records are not read: they hold norms of steps that an example took no part in.
    log = log.only(slice(0))
    if units is None:
        log = replace(log, unit_ids=None)
    else:
        log, first_row = rows_together(log, units)
    claim = claim_of(log, method)
    account = account_of(log, method, most_rows(log))

    def table(ids: NDArray[np.generic], blocks: Sequence[Columns]) -> EpsilonTable:
        known = _in_all_steps(log, method, blocks)
        own, most = gaussian_bounds(known["own"], method.delta), known["clipped"].max()
        lower = own["epsilon_lower"]
        if not np.array_equal(known["least"], known["own"]):
            lower = gaussian_epsilons(np.sqrt(known["least"]), method.delta)[0]
        worst = float(gaussian_bounds(np.array([most]), method.delta)["epsilon"][0])
        clipped = own["mu"] >= np.sqrt(most)
        epsilon = np.where(clipped, worst, np.minimum(own["epsilon"], worst))
        found = {"participations": known["participations"], **own}
        found |= {"epsilon": epsilon, "epsilon_lower": np.minimum(lower, epsilon)}
        if units is not None:
            found |= {"n_rows": known["n_rows"], "unit_worst_case": np.full(len(ids), worst)}
        return epsilon_table(worst, claim, account, ids, [found])

    of_all = log.example_ids if units is None else units.ids
    return BlockAccount(log, of_all, partial(_in_batches, method), table, _AT_ONCE, first_row)


def gaussian_bounds(squared_mu: FloatArray, delta: float) -> Columns:
    """Of Gaussian mechanisms with these squared mu (n,)."""
    mu = np.sqrt(squared_mu)
    lower, upper = gaussian_epsilons(mu, delta)
    limit = ndtr(ndtri(FALSE_POSITIVE_RATE) + mu)
    return {"epsilon": upper, "epsilon_lower": lower, "mu": mu, "true_positive_limit": limit}


def known_units(
    log: NormLog, method: Method, *, progress: Progress | None = None, workers: Workers = None
) -> Columns:
    """What is known about each example or unit, in all steps; see `known_blocks`."""
    blocks = known_blocks(log, method).blocks(workers=workers, progress=progress)
    return _in_all_steps(log, method, list(blocks))


def _in_batches(method: Method, block: NormLog) -> Columns:
    """What batch norms tell about the units of a block."""
    starts = first_rows(block)
    n_rows = np.diff(np.append(starts, block.n_examples))
    n, nothing = len(n_rows), np.zeros(len(n_rows))
    found = nothing, nothing, np.zeros(n, np.int64)
    if block.batch_norms is not None:
        owners = None if n == block.n_examples else np.repeat(np.arange(n), n_rows)
        entries = block.batch_norms.read(0, block.n_examples)
        found = _squared_shifts(block, entries, owners, n, _opposite(block, method))
    return {"n_rows": n_rows, **dict(zip(("own", "clipped", "participations"), found, strict=True))}


def _opposite(log: NormLog, method: Method) -> float:
    """Length of the gradient in the place of each row, as a fraction of max_grad_norm."""
    return 1.0 if method.relation_of(log.neighbouring) == "replace_one" else 0.0


def _in_all_steps(log: NormLog, method: Method, blocks: Sequence[Columns]) -> Columns:
    """What is known about the units of some blocks, with the steps that have no batch norms."""
    known = joined(blocks)
    rows, own, clipped = known["n_rows"].astype(np.float64), known["own"], known["clipped"]
    # Anyone may have taken part in a step without batch norms, with all rows at max_grad_norm.
    weight = (1 + _opposite(log, method)) ** 2 / np.square(log.settings.noise_multiplier)
    recorded = np.zeros(0, np.int64) if log.batch_norms is None else log.batch_norms.steps
    missing = np.delete(weight, recorded)
    least = np.where(rows > 1, 0.0, own)
    if len(missing):
        anybody, most = np.square(rows) * missing.sum(), log.most_participations
        by_counts = np.full_like(rows, np.inf)
        if log.sampler in _REPEATING:  # one row may be drawn any number of times for a step
            anybody = np.full_like(rows, np.inf)
            if most is not None:
                by_counts = np.square(rows * most) * weight.max()
        elif most is not None:
            by_counts = np.square(rows) * np.sort(weight)[::-1][:most].sum() * (1 + 1e-12)
        # Counts limit what batch norms leave open, and never what they show.
        clipped = np.minimum(clipped + anybody, np.maximum(by_counts, clipped))
        if not np.isfinite(clipped).all():
            raise refused("refusal.account", "repeating", n=len(missing), log=log)
        own = np.minimum(own + anybody, clipped)
    return known | {"own": own, "clipped": clipped, "least": np.minimum(least, own)}


def _squared_shifts(
    log: NormLog, entries: BatchNormEntries, owners: IntArray | None, n: int, opposite: float
) -> tuple[FloatArray, FloatArray, IntArray]:
    """(n,) own, clipped and participations of n units over the steps that they took part in.

    entries: ordered by position, then by step. owners: (n_rows,) units; None if rows are units.
    """
    unit = entries.position if owners is None else owners[entries.position]
    if owners is not None:
        order = np.lexsort((entries.step, unit))
        unit, entries = unit[order], entries.select(order)
    step, shift = entries.step, _shifts(log, entries, opposite)
    again = step[1:] == step[:-1]
    if again.any():
        again &= unit[1:] == unit[:-1]
    most = np.array((1 + opposite) ** 2)
    if again.any():  # several rows of a unit in a step, or one row several times
        starts = np.flatnonzero(np.append(True, ~again))
        most = most * np.square(np.diff(np.append(starts, len(unit))))
        unit, step, shift = unit[starts], step[starts], np.add.reduceat(shift, starts)
    squares = np.square(shift, out=shift)
    weight = 1 / np.square(log.settings.noise_multiplier)
    factor = 1 + np.finfo(np.float64).eps * (log.total_steps + 8)  # rounding of sums
    if weight.min() == weight.max():
        factor *= float(weight[0])
    else:
        squares, most = squares * weight[step], most * weight[step]
    ends = np.searchsorted(unit, np.arange(n + 1, dtype=unit.dtype))
    participations = np.diff(ends)
    clipped = _sums(most, ends) if most.ndim else most * participations
    return _sums(squares, ends) * factor, clipped * factor, participations


def _sums(values: FloatArray, ends: IntArray) -> FloatArray:
    """(n,) sums of consecutive parts of values, which begin and end at (n + 1,) positions."""
    found, some = np.zeros(len(ends) - 1), np.flatnonzero(ends[1:] > ends[:-1])
    if len(some):
        found[some] = np.add.reduceat(values, ends[some])
    return found


def _shifts(log: NormLog, entries: BatchNormEntries, opposite: float) -> FloatArray:
    """(n_entries,) contributions as fractions of max_grad_norm, plus `opposite`."""
    norm: NDArray[Any] = entries.norm
    if log.levels.rounding:
        relative = log.levels.relative(norm)
    else:
        relative = np.minimum(norm / log.settings.max_grad_norm[entries.step], 1.0)
    return np.asarray(relative + opposite if opposite else relative, np.float64)
