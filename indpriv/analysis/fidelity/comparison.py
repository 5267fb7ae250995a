"""How far estimated epsilons lie from exact ones of the same examples: bias and tails, not r alone. Sensitive."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv._columns import Partition
from indpriv._plain import AtLeastZero, Count, Share
from indpriv.analysis.groups.group_rows import MIN_GROUP
from indpriv.analysis.statistics.correlation import pearson
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError


@dataclass(frozen=True)
class GroupFidelity:
    """Estimated against exact epsilon of one group; as for `Fidelity`.

    by, name: the column and the group. too_small: fewer than ten compared examples.
    """

    by: str
    name: str
    n: Count
    too_small: bool
    mean_exact: AtLeastZero
    signed_bias: float
    mean_absolute: AtLeastZero
    largest_absolute: AtLeastZero
    share_under_1_percent: Share


@dataclass(frozen=True)
class Fidelity:
    """Estimated against exact epsilon of n examples; errors are estimate minus exact, in epsilon.

    Attributes:
        source: where the exact values come from, e.g. "norms at every step of this log".
        is_this_log: the estimate is this log's own, not what a larger K would have said.
        every: K, steps between records of the estimate.
        epochs: K in epochs of 1 / sample_rate steps.
        between_records: what the estimate assumed between records.
        n: examples compared.
        pearson: Pearson's r; None where undefined. It proves nothing alone: a constant bias leaves it at 1.
        median_exact: median exact epsilon, to read the errors beside.
        signed_bias: mean error; above 0 the estimate is too large.
        mean_absolute, p95_absolute, largest_absolute: of the absolute error.
        largest_under: the most by which an estimate is too small, at least 0.
        share_under: share of examples whose estimate is too small by any amount.
        share_under_1_percent: share whose estimate is too small by more than 1 % of the exact value.
        groups: the same by group, worst exact mean first within each column; empty where not asked for.
    """

    source: str
    is_this_log: bool
    every: Count
    epochs: float
    between_records: str
    n: Count
    pearson: float | None
    median_exact: AtLeastZero
    signed_bias: float
    mean_absolute: AtLeastZero
    p95_absolute: AtLeastZero
    largest_absolute: float
    largest_under: float
    share_under: Share
    share_under_1_percent: Share
    groups: tuple[GroupFidelity, ...] = ()


def compare(
    estimated: EpsilonTable,
    exact: EpsilonTable,
    *,
    source: str,
    every: int,
    epochs: float,
    is_this_log: bool = False,
    groups: Mapping[str, Partition] | None = None,
) -> Fidelity:
    """Compare two tables of the same examples, matched by id.

    Args:
        estimated: the estimate; may hold more examples than exact.
        exact: epsilons of norms known at every step.
        source: where the exact values come from.
        every: steps between records of the estimate.
        epochs: the same in epochs.
        is_this_log: estimated is the table of the log itself.
        groups: partitions of the exact table's examples, in its order, by column.

    Raises:
        InputError: an example is missing from the estimate, or the tables answer different questions (delta, unit,
            neighbouring relation, accountant or conversion).
    """
    for name in ("delta", "unit", "neighbouring", "accountant", "conversion", "total_steps"):
        ours, theirs = getattr(estimated.account, name), getattr(exact.account, name)
        if ours != theirs:
            raise InputError(
                f"{name} is {ours!r} in the estimate and {theirs!r} in the exact table; use one for both"
            )
    positions = _positions(estimated.example_ids, exact.example_ids)
    guess, truth = estimated.epsilon[positions], exact.epsilon
    error = guess - truth
    return Fidelity(
        source=source,
        is_this_log=is_this_log,
        every=every,
        epochs=epochs,
        between_records=estimated.account.between_records,
        n=len(truth),
        pearson=pearson(guess, truth),
        median_exact=float(np.median(truth)),
        signed_bias=float(error.mean()),
        mean_absolute=float(np.abs(error).mean()),
        p95_absolute=float(np.quantile(np.abs(error), 0.95)),
        largest_absolute=float(np.abs(error).max()),
        largest_under=float(max(0.0, (-error).max())),
        share_under=float((error < 0).mean()),
        share_under_1_percent=float((guess < 0.99 * truth).mean()),
        groups=tuple(
            row
            for by, found in (groups or {}).items()
            for row in _by_group(by, found, guess, truth)
        ),
    )


def _by_group(
    by: str, groups: Partition, guess: NDArray[np.float64], truth: NDArray[np.float64]
) -> list[GroupFidelity]:
    order = np.argsort(groups.train_codes, kind="stable")
    codes, starts = np.unique(groups.train_codes[order], return_index=True)
    rows = []
    for code, members in zip(codes.tolist(), np.split(order, starts[1:]), strict=True):
        exact, error = truth[members], (guess - truth)[members]
        rows.append(
            GroupFidelity(
                by=by,
                name=groups.names[code],
                n=len(members),
                too_small=len(members) < MIN_GROUP,
                mean_exact=float(exact.mean()),
                signed_bias=float(error.mean()),
                mean_absolute=float(np.abs(error).mean()),
                largest_absolute=float(np.abs(error).max()),
                share_under_1_percent=float((error < -0.01 * exact).mean()),
            )
        )
    return sorted(rows, key=lambda row: (-row.mean_exact, row.name))


def _positions(ids: NDArray[np.generic], wanted: NDArray[np.generic]) -> NDArray[np.int64]:
    """Where each wanted id stands in ids; InputError where it does not."""
    order = np.argsort(ids, kind="stable")
    found = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
    positions = order[found]
    missing = ids[positions] != wanted
    if missing.any():
        raise InputError(
            f"{int(missing.sum())} reference examples have no estimate, e.g. id {wanted[missing].tolist()[0]!r}"
        )
    return positions.astype(np.int64)
