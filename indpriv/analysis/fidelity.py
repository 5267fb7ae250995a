"""How far estimated epsilons lie from exact ones, and how much depends on choices. Sensitive.

Two accounts of the same examples are compared to see how far estimates lie from exact epsilons
(fidelity), how far epsilons move under another choice, such as the rounding of norms (sensitivity),
and how far an estimate still moves with the spacing of its records, where no exact values exist.

Batch norms test an estimate at no extra cost. Which steps sample an example is decided by coins
that its norm does not depend on. Two things follow.

* Left out, a batch norm is a fair test of what the account would have used in its place: its error
  has the distribution of the errors at steps that did not sample the example.
* Weighted by 1 / sample_rate (Horvitz and Thompson 1952), the batch norms add up to an estimate
  without bias, over the coins, of the mean RDP at an order fixed beforehand. At a fixed order,
  epsilon is RDP plus a constant, so that its mean is estimated without bias too; the mean of
  epsilons at each example's own best order is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._columns import Partition
from indpriv._plain import AtLeastZero, Columns, Count, Share
from indpriv.accountant.account import worst_case_rdp
from indpriv.accountant.blocks import block_size, in_blocks
from indpriv.accountant.method import Method, uses_batch_norms
from indpriv.accountant.norms import GoverningNorms
from indpriv.accountant.rdp import renyi_divergences
from indpriv.accountant.steps import Steps
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics.weighted import pearson
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

_BIN = 1e-3  # of relative norms: the 95th percentile is rounded up to a multiple
_NORM_BYTES = 200  # that one norm takes while it is looked at
_GRID = 200  # relative norms between which divergences are interpolated; whole hundredths are on it


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Two epsilons of each of n examples; a difference is the estimate minus the reference.

    Attributes:
        n: number of examples.
        pearson: Pearson's r; None where undefined. A high r proves little: a constant bias leaves
            it at 1.
        signed_bias: mean difference; above 0, the estimate is larger.
        mean_absolute, p95_absolute, largest_absolute: of the absolute difference.
        largest_under: the most by which an estimate is smaller, at least 0.
        share_under: share of examples whose estimate is smaller by any amount.
        share_under_1_percent: share whose estimate is smaller by more than 1 % of the reference.
    """

    n: Count
    pearson: float | None
    signed_bias: float
    mean_absolute: AtLeastZero
    p95_absolute: AtLeastZero
    largest_absolute: AtLeastZero
    largest_under: AtLeastZero
    share_under: Share
    share_under_1_percent: Share


def differences(estimate: FloatArray, reference: FloatArray) -> dict[str, Any]:
    """The fields of `Differences` of two arrays (n_examples,) in the same order."""
    difference = estimate - reference
    size = np.abs(difference)
    return {
        "n": len(difference),
        "pearson": pearson(estimate, reference),
        "signed_bias": float(difference.mean()),
        "mean_absolute": float(size.mean()),
        "p95_absolute": float(np.quantile(size, 0.95)),
        "largest_absolute": float(size.max()),
        "largest_under": float(max(0.0, (-difference).max())),
        "share_under": float((difference < 0).mean()),
        "share_under_1_percent": float((estimate < 0.99 * reference).mean()),
    }


def _some(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names}


@dataclass(frozen=True)
class GroupFidelity:
    """Estimated and exact epsilons of one group; figures as in `Differences`.

    Attributes:
        by, name: the column and the group.
        too_small: fewer than ten examples were compared.
        mean_exact: mean exact epsilon.
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


@dataclass(frozen=True, kw_only=True)
class Fidelity(Differences):
    """Estimated and exact epsilons of the same examples.

    Attributes:
        source: where the exact values come from, e.g. "norms at every step of this log".
        is_this_log: the estimate is this log's own, not what a larger K would have given.
        every: K, the number of steps between records of the estimate.
        epochs: K in epochs of 1 / sample_rate steps.
        between_records: what the estimate assumed between records.
        median_exact: median exact epsilon, to compare the errors with.
        groups: the same by group, largest exact mean first within each column; empty where not
            asked for.
    """

    source: str
    is_this_log: bool
    every: Count
    epochs: float
    between_records: str
    median_exact: AtLeastZero
    groups: tuple[GroupFidelity, ...] = ()


SENSITIVITY = Columns(
    "Sensitivity",
    "The same log accounted under another choice.",
    {
        "choice": (str, '"rounding" or "between_records".'),
        "here": (str, "Its value in this audit."),
        "instead": (str, "Its other value."),
        "n": (Count, "Number of examples."),
        "pearson": (float | None, "Pearson's r of both epsilons; None where undefined."),
        "mean_shift": (float, "Epsilon under the other choice minus that here, on average."),
        "p95_absolute": (AtLeastZero, "The 95 % quantile of the absolute shift."),
        "largest_absolute": (AtLeastZero, "The largest absolute shift."),
        "share_smaller": (Share, "Share of examples to which the other choice gives less."),
    },
)


def sensitivity_to(choice: str, here: EpsilonTable, instead: EpsilonTable) -> dict[str, Any]:
    """A row of `SENSITIVITY`: two accounts of the same examples that differ in this field."""
    found = differences(instead.epsilon, here.epsilon)
    values = {"here": str(getattr(here.account, choice))}
    values |= {"instead": str(getattr(instead.account, choice))}
    shifts = {"mean_shift": found["signed_bias"], "share_smaller": found["share_under"]}
    return {"choice": choice, **values, **found, **shifts}


@dataclass(frozen=True)
class Spacing:
    """The account of every second record compared with the account of all.

    A shift is no bound: the error of the estimate is of the same order, and may be larger. In the
    Adult demo with 40 checkpoints, half an epoch apart, the mean shift was +0.05 and the mean error
    +0.09.

    Attributes:
        n_records: number of records of the log.
        n_kept: number of records that were kept.
        every: median number of steps between records of the log.
        between_records: what both accounts assume between records.
        pearson: Pearson's r of both epsilons; None where undefined.
        mean_shift: epsilon from every second record minus epsilon from all, on average.
        mean_absolute, p95_absolute, largest_absolute: of the absolute shift.
        share_larger: share of examples that get a larger epsilon from fewer records.
    """

    n_records: Count
    n_kept: Count
    every: Count
    between_records: str
    pearson: float | None
    mean_shift: float
    mean_absolute: AtLeastZero
    p95_absolute: AtLeastZero
    largest_absolute: AtLeastZero
    share_larger: Share


def spacing_of(every_record: EpsilonTable, fewer: EpsilonTable, **counts: int) -> Spacing:
    """Compare two accounts of the same examples, in the same order."""
    found = differences(fewer.epsilon, every_record.epsilon)
    return Spacing(
        between_records=every_record.account.between_records,
        mean_shift=found["signed_bias"],
        share_larger=float((fewer.epsilon > every_record.epsilon).mean()),
        **_some(found, "pearson", "mean_absolute", "p95_absolute", "largest_absolute"),
        **counts,
    )


def compare_with_exact(
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
        exact: epsilons from norms known at every step.
        source: where the exact values come from.
        every: number of steps between records of the estimate.
        epochs: the same in epochs.
        is_this_log: estimated is the table of the log itself.
        groups: partitions of the exact table's examples, in its order, by column.

    Raises:
        InputError: an example is missing from the estimate, or the tables answer different
            questions (delta, unit, neighbouring relation, accountant or conversion).
    """
    names = ("delta", "unit", "neighbouring", "participation", "accountant", "conversion")
    for name in (*names, "total_steps"):
        ours, theirs = getattr(estimated.account, name), getattr(exact.account, name)
        if ours != theirs:
            raise InputError(
                f"{name} is {ours!r} in the estimate and {theirs!r} in the exact table; use the "
                "same in both"
            )
    estimate = estimated.epsilon[_positions(estimated.example_ids, exact.example_ids)]
    return Fidelity(
        source=source,
        is_this_log=is_this_log,
        every=every,
        epochs=epochs,
        between_records=estimated.account.between_records,
        median_exact=float(np.median(exact.epsilon)),
        **differences(estimate, exact.epsilon),
        groups=tuple(
            row
            for by, found in (groups or {}).items()
            for row in _by_group(by, found, estimate, exact.epsilon)
        ),
    )


def _by_group(
    by: str, groups: Partition, estimate: FloatArray, exact: FloatArray
) -> list[GroupFidelity]:
    rows = []
    for code in np.unique(groups.train_codes).tolist():
        mine = groups.train_codes == code
        found = differences(estimate[mine], exact[mine])
        rows.append(
            GroupFidelity(
                by=by,
                name=groups.names[code],
                too_small=found["n"] < MIN_GROUP,
                mean_exact=float(exact[mine].mean()),
                **_some(found, "n", "signed_bias", "mean_absolute", "largest_absolute"),
                **_some(found, "share_under_1_percent"),
            )
        )
    return sorted(rows, key=lambda row: (-row.mean_exact, row.name))


def _positions(ids: NDArray[np.generic], wanted: NDArray[np.generic]) -> NDArray[np.int64]:
    """The position of each wanted id in ids."""
    order = np.argsort(ids, kind="stable")
    found = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
    positions = order[found]
    missing = ids[positions] != wanted
    if missing.any():
        raise InputError(
            f"{int(missing.sum())} reference examples have no estimate, e.g. id "
            f"{wanted[missing].tolist()[0]!r}"
        )
    return positions.astype(np.int64)


@dataclass(frozen=True)
class BatchNormFidelity:
    """Batch norms compared with what the account would use in their place.

    Attributes:
        between_records: what the account assumes between records.
        n_entries: number of batch norms compared; those at fully recorded steps test nothing.
        signed_bias, mean_absolute, p95_absolute, largest_absolute: of estimates of left-out batch
            norms minus the norms themselves, as fractions of max_grad_norm.
        share_under: share of entries whose estimate is too small by any amount.
        share_under_1_percent: by more than 1 % of the exact norm.
        order: the Rényi order, the best one for the worst case; it depends on the settings of the
            run alone.
        mean_rdp: mean over all examples of the account's RDP at this order.
        rdp_bias, rdp_bias_error: of mean_rdp, from the errors of left-out records, and its standard
            error.
        unbiased_mean_rdp, standard_error: the Horvitz-Thompson estimate of what mean_rdp should be;
            None where some step has neither a full record nor batch norms.
    """

    between_records: str
    n_entries: Count
    signed_bias: float
    mean_absolute: AtLeastZero
    p95_absolute: AtLeastZero
    largest_absolute: AtLeastZero
    share_under: Share
    share_under_1_percent: Share
    order: float
    mean_rdp: AtLeastZero
    rdp_bias: float
    rdp_bias_error: AtLeastZero
    unbiased_mean_rdp: AtLeastZero | None
    standard_error: AtLeastZero | None


def free_fidelity(log: NormLog, method: Method) -> BatchNormFidelity | None:
    """Compare the batch norms of a log with its account; only RDP at one order is looked at.

    None where the account uses none, where there are none to test, and where batches were not drawn
    by Poisson sampling, since then the coins are not what the weights assume.
    """
    if (
        not uses_batch_norms(log, method.between_records)
        or method.preset is not None
        or log.sampler != "poisson"
    ):
        return None
    # The best order for the worst case: a choice that looks at no norm.
    order = float(worst_case_rdp(log, method).details["best_order"][0])
    cost, norms = _step_costs(log, order), GoverningNorms.of(log, method.between_records)
    each = log.n_records + 1 + int(log.settings.sample_rate.sum())
    size = block_size(_NORM_BYTES * each)
    blocks = in_blocks(log, lambda block: _look(norms, block, cost), size=size)
    histograms, sums, largest = zip(*blocks, strict=True)
    histogram, n = sum(histograms), log.n_examples
    entries = int(histogram.sum())
    if not entries:
        return None
    bias, absolute, under, under_1_percent = (sum(sums)[:4] / entries).tolist()
    excess, excess_variance, unbiased, variance = sum(sums)[4:].tolist()
    known = np.zeros(log.total_steps, bool)
    known[log.recorded_steps] = True
    if log.batch_norms is not None:
        known[log.batch_norms.steps] = True
    return BatchNormFidelity(
        between_records=method.between_records,
        n_entries=entries,
        signed_bias=bias,
        mean_absolute=absolute,
        p95_absolute=float(np.searchsorted(np.cumsum(histogram), 0.95 * entries)) * _BIN,
        largest_absolute=max(largest),
        share_under=under,
        share_under_1_percent=under_1_percent,
        order=order,
        mean_rdp=_mean_rdp(log, method, order),
        rdp_bias=excess / n,
        rdp_bias_error=excess_variance**0.5 / n,
        unbiased_mean_rdp=unbiased / n if known.all() else None,
        standard_error=variance**0.5 / n if known.all() else None,
    )


def _step_costs(
    log: NormLog, order: float
) -> Callable[[FloatArray, NDArray[np.integer]], FloatArray]:
    """Gives the RDP of single steps at one order, of relative norms and steps of one shape."""
    pairs = np.stack([log.settings.noise_multiplier, log.settings.sample_rate], axis=1)
    distinct, setting = np.unique(pairs, axis=0, return_inverse=True)
    norms, setting = np.linspace(0.0, 1.0, _GRID + 1), setting.ravel()
    shifts, rates = (norms / distinct[:, :1]).ravel(), np.repeat(distinct[:, 1], len(norms))
    value = renyi_divergences(shifts, rates, np.array([order])).reshape(len(distinct), -1)

    def cost(relative: FloatArray, step: NDArray[np.integer]) -> FloatArray:
        place, row = relative * _GRID, setting[step]
        lower = np.minimum(place.astype(np.int64), _GRID - 1)
        below, above = value[row, lower], value[row, lower + 1]
        return np.asarray(below + (place - lower) * (above - below))

    return cost


def _mean_rdp(log: NormLog, method: Method, order: float) -> float:
    """Mean over all examples of the account's RDP at one order."""
    steps = Steps.of(log, method.between_records)
    table = steps.divergences(np.array([order]))

    def work(block: NormLog) -> float:
        return float((steps.counts(block) @ table.T).sum())

    size = block_size(steps.bytes_per_example)
    return sum(in_blocks(log, work, size=size)) / log.n_examples


def _look(
    norms: GoverningNorms,
    block: NormLog,
    cost: Callable[[FloatArray, NDArray[np.integer]], FloatArray],
) -> tuple[IntArray, FloatArray, float]:
    """What some examples give.

    Returns:
        numbers of absolute errors of left-out norms in bins of _BIN; sums of the errors, of their
        absolute values, of those that are too small, at all and by over 1 %, and of the bias of
        each example, its variance, the unbiased estimate and its variance; the largest error.
    """
    log, known = norms.log, norms.known(block)
    entry, other = known.batch_norms, known.in_place_of_batch_norms(norms.between_records)
    step = known.step[entry]
    max_grad_norm, rate = log.settings.max_grad_norm, log.settings.sample_rate[step]
    exact, estimate = (
        norms.codes.relative(known.norm[index], max_grad_norm[step]) for index in (entry, other)
    )
    recorded = max_grad_norm[log.recorded_steps][:, None]
    rows = norms.codes.relative(norms.full(block), recorded)
    exact_cost = cost(exact, step)
    excess = cost(estimate, step) - exact_cost
    full_cost = cost(rows, np.broadcast_to(log.recorded_steps[:, None], rows.shape))
    error, size = estimate - exact, np.abs(estimate - exact)
    sums = (
        error.sum(),
        size.sum(),
        (error < 0).sum(),
        (estimate < 0.99 * exact).sum(),
        np.sum(excess * (1 - rate) / rate),
        np.sum(excess**2 * (1 - rate) / rate**2),
        np.sum(full_cost) + np.sum(exact_cost / rate),
        np.sum(exact_cost**2 * (1 - rate) / rate**2),
    )
    bins = np.ceil(size / _BIN - 1e-6).astype(np.int64)
    histogram = np.bincount(bins, minlength=round(1 / _BIN) + 1)
    return histogram, np.array(sums), float(size.max(initial=0.0))
