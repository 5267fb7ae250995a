"""What batch norms prove about an estimate, at no extra cost. Sensitive.

Which steps sample an example is decided by coins that its norm does not depend on. Two things
follow.

* Left out, a batch norm is a fair test of what the account would have used in its place: its error
  has the distribution of the errors at steps that did not sample the example.
* Weighted by 1 / sample_rate (Horvitz and Thompson 1952), the batch norms add up to an estimate
  without bias, over the coins, of the mean RDP at an order fixed beforehand. At a fixed order,
  epsilon is RDP plus a constant, so that its mean is estimated without bias too; the mean of
  epsilons at each example's own best order is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import add

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
from indpriv.norm_log.norm_log import NormLog

_BIN = 1e-3  # of relative norms: the 95th percentile is rounded up to a multiple
_NORM_BYTES = 200  # that one norm takes while it is looked at
_BLOCK_BYTES = 1 << 26
_GRID = 200  # relative norms between which divergences are interpolated; whole hundredths are on it


@dataclass(frozen=True)
class NormErrors:
    """Estimates of left-out batch norms minus the norms themselves.

    Attributes:
        n_entries: number of batch norms compared; those at fully recorded steps test nothing.
        signed_bias, mean_absolute, p95_absolute, largest_absolute: of norms, as fractions of
            max_grad_norm.
        share_under: share of entries whose estimate is too small by any amount.
        share_under_1_percent: by more than 1 % of the exact norm.
    """

    n_entries: Count
    signed_bias: float
    mean_absolute: AtLeastZero
    p95_absolute: AtLeastZero
    largest_absolute: AtLeastZero
    share_under: Share
    share_under_1_percent: Share


@dataclass(frozen=True)
class BatchNormFidelity:
    """Batch norms compared with what the account would use in their place.

    Attributes:
        between_records: what the account assumes between records.
        errors: of norms.
        order: the Rényi order, the best one for the worst case; it depends on the settings of the
            run alone.
        mean_rdp: mean over all examples of the account's RDP at this order.
        rdp_bias, rdp_bias_error: of mean_rdp, from the errors of left-out records, and its standard
            error.
        unbiased_mean_rdp, standard_error: the Horvitz-Thompson estimate of what mean_rdp should be;
            None where some step has neither a full record nor batch norms.
    """

    between_records: str
    errors: NormErrors = field(metadata={"flatten": True})
    order: float
    mean_rdp: AtLeastZero
    rdp_bias: float
    rdp_bias_error: AtLeastZero
    unbiased_mean_rdp: AtLeastZero | None
    standard_error: AtLeastZero | None


@dataclass(frozen=True)
class _Errors:
    """Errors of left-out batch norms.

    histogram: of absolute errors in bins of _BIN; sums: (4,) of the errors, of their absolute
    values, and the numbers of estimates that are too small, at all and by over 1 %.
    """

    histogram: IntArray
    sums: FloatArray
    largest: float

    @classmethod
    def of(cls, estimate: FloatArray, exact: FloatArray) -> _Errors:
        error = estimate - exact
        bins = np.ceil(np.abs(error) / _BIN - 1e-6).astype(np.int64)
        size, under = np.abs(error), estimate < 0.99 * exact
        return cls(
            np.bincount(bins, minlength=round(1 / _BIN) + 1),
            np.array([error.sum(), size.sum(), (error < 0).sum(), under.sum()]),
            float(size.max(initial=0.0)),
        )

    def __add__(self, other: _Errors) -> _Errors:
        return _Errors(
            self.histogram + other.histogram,
            self.sums + other.sums,
            max(self.largest, other.largest),
        )

    def described(self) -> NormErrors | None:
        """What is said of them; None where there is no entry."""
        n = int(self.histogram.sum())
        if not n:
            return None
        bias, size, under, under_1_percent = self.sums / n
        return NormErrors(
            n_entries=n,
            signed_bias=float(bias),
            mean_absolute=float(size),
            p95_absolute=float(np.searchsorted(np.cumsum(self.histogram), 0.95 * n)) * _BIN,
            largest_absolute=self.largest,
            share_under=float(under),
            share_under_1_percent=float(under_1_percent),
        )


@dataclass(frozen=True)
class _Found:
    """What some examples give.

    sums: (4,) of the bias of each example, its variance, the unbiased estimate and its variance.
    """

    errors: _Errors
    sums: FloatArray

    def __add__(self, other: _Found) -> _Found:
        return _Found(self.errors + other.errors, self.sums + other.sums)


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
    order = float(worst_case_rdp(log, method).best_order[0])
    found = _measure(log, method.between_records, order)
    errors, n = found.errors.described(), log.n_examples
    if errors is None:
        return None
    bias, bias_variance, unbiased, variance = found.sums.tolist()
    covered = _covered(log)
    return BatchNormFidelity(
        between_records=method.between_records,
        errors=errors,
        order=order,
        mean_rdp=_mean_rdp(log, method, order),
        rdp_bias=bias / n,
        rdp_bias_error=bias_variance**0.5 / n,
        unbiased_mean_rdp=unbiased / n if covered else None,
        standard_error=variance**0.5 / n if covered else None,
    )


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


def _measure(log: NormLog, between_records: str, order: float) -> _Found:
    """Look at a log block by block, and add up what is found."""
    cost, norms = _StepCost.of(log, order), GoverningNorms.of(log, between_records)

    def work(block: NormLog) -> _Found:
        return _look(norms, block, cost)

    each = log.n_records + 1 + int(log.settings.sample_rate.sum())
    blocks = in_blocks(log, work, size=max(1, _BLOCK_BYTES // (_NORM_BYTES * each)))
    return reduce(add, blocks)


def _look(norms: GoverningNorms, block: NormLog, cost: _StepCost) -> _Found:
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
    sums = (
        np.sum(excess * (1 - rate) / rate),
        np.sum(excess**2 * (1 - rate) / rate**2),
        np.sum(full_cost) + np.sum(exact_cost / rate),
        np.sum(exact_cost**2 * (1 - rate) / rate**2),
    )
    return _Found(_Errors.of(estimate, exact), np.array(sums))
