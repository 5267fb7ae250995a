"""What batch norms prove about an estimate, at no extra cost. Sensitive.

Which steps sample an example is decided by coins that its norm does not depend on. Two things
follow.

* Left out, a batch norm is a fair test of what the account would have used in its place: its error
  has the distribution of the errors at steps that did not sample the example.
* Weighted by 1 / sample_rate (Horvitz and Thompson 1952), the batch norms add up to an estimate
  without bias, over the coins, of the mean RDP of a group at an order fixed beforehand, for a group
  chosen independently of the coins. At a fixed order, epsilon is RDP plus a constant, so that its
  mean is estimated without bias too; the mean of epsilons at each example's own best order is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._plain import AtLeastZero, Count, Share
from indpriv.accountant.blocks import in_blocks
from indpriv.accountant.claims import uses_batch_norms
from indpriv.accountant.histogram.governing_norms import GoverningNorms
from indpriv.accountant.histogram.histogram import Histogram
from indpriv.accountant.method import Method
from indpriv.accountant.prepared import block_size
from indpriv.accountant.rdp import renyi_divergences
from indpriv.accountant.worst_case import worst_case_rdp
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog

_BIN = 1e-3  # of relative norms: the 95th percentile is rounded up to a multiple
_NORM_BYTES = 200  # that one norm takes while it is looked at
_BLOCK_BYTES = 1 << 26
_GRID = 200  # relative norms between which divergences are interpolated; whole hundredths are on it


@dataclass(frozen=True)
class BatchNormFidelity:
    """Batch norms compared with what the account would use in their place.

    Attributes:
        between_records: what the account assumes between records.
        n_entries: number of batch norms compared; those at fully recorded steps test nothing.
        signed_bias, mean_absolute, p95_absolute, largest_absolute: of norms, as fractions of
            max_grad_norm.
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


@dataclass(frozen=True)
class _Errors:
    """Errors of left-out batch norms; histogram: of absolute errors in bins of _BIN."""

    histogram: IntArray
    total: float
    absolute: float
    largest: float
    under: int
    under_1_percent: int

    @classmethod
    def of(cls, estimate: FloatArray, exact: FloatArray) -> _Errors:
        error = estimate - exact
        bins = np.ceil(np.abs(error) / _BIN - 1e-6).astype(np.int64)
        return cls(
            np.bincount(bins, minlength=round(1 / _BIN) + 1),
            float(error.sum()),
            float(np.abs(error).sum()),
            float(np.abs(error).max(initial=0.0)),
            int((error < 0).sum()),
            int((estimate < 0.99 * exact).sum()),
        )

    @classmethod
    def together(cls, parts: list[_Errors]) -> _Errors:
        return cls(
            np.sum([part.histogram for part in parts], axis=0),
            sum(part.total for part in parts),
            sum(part.absolute for part in parts),
            max(part.largest for part in parts),
            sum(part.under for part in parts),
            sum(part.under_1_percent for part in parts),
        )


@dataclass(frozen=True)
class _Found:
    """What one block of examples gives; arrays are (n_examples,)."""

    errors: _Errors
    bias: FloatArray
    bias_variance: FloatArray
    unbiased: FloatArray
    variance: FloatArray


def free_fidelity(log: NormLog, method: Method) -> BatchNormFidelity | None:
    """Compare the batch norms of a log with its account.

    None where the account uses none, where there are none to test, and where batches were not drawn
    by Poisson sampling, since then the coins are not what the weights assume.

    Args:
        log: the log.
        method: how it is accounted; only RDP at one order is looked at.
    """
    if (
        not uses_batch_norms(log, method.between_records)
        or method.preset is not None
        or log.sampler != "poisson"
    ):
        return None
    # The best order for the worst case: a choice that looks at no norm.
    order = float(worst_case_rdp(log, method).best_order[0])
    found = _measure(log, method.between_records, order)
    errors = _Errors.together([part.errors for part in found])
    n_entries, n = int(errors.histogram.sum()), log.n_examples
    if not n_entries:
        return None
    bias, bias_variance, unbiased, variance = (
        np.concatenate([getattr(part, name) for part in found])
        for name in ("bias", "bias_variance", "unbiased", "variance")
    )
    covered = _covered(log)
    p95 = np.searchsorted(np.cumsum(errors.histogram), 0.95 * n_entries)
    return BatchNormFidelity(
        between_records=method.between_records,
        n_entries=n_entries,
        signed_bias=errors.total / n_entries,
        mean_absolute=errors.absolute / n_entries,
        p95_absolute=float(p95) * _BIN,
        largest_absolute=errors.largest,
        share_under=errors.under / n_entries,
        share_under_1_percent=errors.under_1_percent / n_entries,
        order=order,
        mean_rdp=_mean_rdp(log, method, order),
        rdp_bias=float(bias.mean()),
        rdp_bias_error=float(bias_variance.sum() ** 0.5 / n),
        unbiased_mean_rdp=float(unbiased.mean()) if covered else None,
        standard_error=float(variance.sum() ** 0.5 / n) if covered else None,
    )


def unbiased_rdp(log: NormLog, order: float, group_of: IntArray) -> tuple[FloatArray, FloatArray]:
    """Horvitz-Thompson estimates of the mean RDP of groups at one order, and their standard errors.

    Args:
        log: with a full record or batch norms at every step.
        order: fixed before the coins were flipped, above 1.
        group_of: (n_examples,) group of each example, from 0 on; chosen independently of the coins.

    Returns:
        (n_groups,) means and (n_groups,) standard errors, over the coins; they need no account of
        the steps in between.

    Raises:
        InputError: a step without any record, or batches that were not drawn by Poisson sampling.
    """
    if log.sampler != "poisson":
        raise InputError(
            f"batches were drawn by a {log.sampler} sampler: weights of 1 / sample_rate need "
            "Poisson sampling"
        )
    if not _covered(log):
        raise InputError(
            "some steps have neither a full record nor batch norms; their RDP cannot be estimated "
            "without bias"
        )
    found = _measure(log, "last", order)
    size = np.bincount(group_of)
    unbiased, variance = (
        np.bincount(group_of, weights=np.concatenate([getattr(part, name) for part in found]))
        for name in ("unbiased", "variance")
    )
    return unbiased / size, np.sqrt(variance) / size


def _covered(log: NormLog) -> bool:
    known = np.zeros(log.total_steps, bool)
    known[log.recorded_steps] = True
    if log.batch_norms is not None:
        known[log.batch_norms.steps] = True
    return bool(known.all())


@dataclass(frozen=True)
class _StepCost:
    """RDP of one step at one order, by the setting of the step and the norm."""

    setting: IntArray
    value: FloatArray

    @classmethod
    def of(cls, log: NormLog, order: float) -> _StepCost:
        pairs = np.stack([log.settings.noise_multiplier, log.settings.sample_rate], axis=1)
        distinct, setting = np.unique(pairs, axis=0, return_inverse=True)
        norms = np.linspace(0.0, 1.0, _GRID + 1)
        shifts, rates = (norms / distinct[:, :1]).ravel(), np.repeat(distinct[:, 1], len(norms))
        costs = renyi_divergences(shifts, rates, np.array([order]))
        return cls(setting.ravel(), costs.reshape(len(distinct), len(norms)))

    def __call__(self, relative: FloatArray, step: NDArray[np.integer]) -> FloatArray:
        """Of relative norms under the settings of their steps; same shapes."""
        place = relative * _GRID
        lower = np.minimum(place.astype(np.int64), _GRID - 1)
        row = self.setting[step]
        below, above = self.value[row, lower], self.value[row, lower + 1]
        return np.asarray(below + (place - lower) * (above - below))


def _mean_rdp(log: NormLog, method: Method, order: float) -> float:
    """Mean over all examples of the account's RDP at one order."""
    histogram = Histogram.of(log, method.between_records)
    table = histogram.divergences(np.array([order]))

    def work(block: NormLog) -> float:
        return float(histogram.counts(block).totals(table).sum())

    size = block_size(histogram.bytes_per_example)
    return sum(in_blocks(log, work, size=size)) / log.n_examples


def _measure(log: NormLog, between_records: str, order: float) -> list[_Found]:
    """Look at a log block by block."""
    cost, norms = _StepCost.of(log, order), GoverningNorms.of(log, between_records)

    def work(block: NormLog) -> _Found:
        return _look(norms, block, cost)

    each = log.n_records + 1 + int(log.settings.sample_rate.sum())
    return list(in_blocks(log, work, size=max(1, _BLOCK_BYTES // (_NORM_BYTES * each))))


def _look(norms: GoverningNorms, block: NormLog, cost: _StepCost) -> _Found:
    log, known = norms.log, norms.known(block)
    entry, other = known.batch_norms, known.in_place_of_batch_norms(norms.between_records)
    step, example, n = known.step[entry], known.example[entry], len(known.first)
    max_grad_norm, rate = log.settings.max_grad_norm, log.settings.sample_rate[step]
    exact, estimate = (
        norms.codes.relative(known.norm[index], max_grad_norm[step]) for index in (entry, other)
    )
    recorded = max_grad_norm[log.recorded_steps][:, None]
    rows = norms.codes.relative(norms.full(block), recorded)
    exact_cost = cost(exact, step)
    excess = cost(estimate, step) - exact_cost
    full_cost = cost(rows, np.broadcast_to(log.recorded_steps[:, None], rows.shape)).sum(axis=0)

    def summed(weights: FloatArray) -> FloatArray:
        return np.bincount(example, weights=weights, minlength=n).astype(np.float64)

    return _Found(
        errors=_Errors.of(estimate, exact),
        bias=summed(excess * (1 - rate) / rate),
        bias_variance=summed(excess**2 * (1 - rate) / rate**2),
        unbiased=full_cost + summed(exact_cost / rate),
        variance=summed(exact_cost**2 * (1 - rate) / rate**2),
    )
