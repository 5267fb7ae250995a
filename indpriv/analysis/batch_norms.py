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

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from indpriv._plain import figure
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.accountant.account import worst_case_rdp
from indpriv.accountant.blocks import block_size, in_blocks
from indpriv.accountant.method import Method, uses_batch_norms
from indpriv.accountant.norms import GoverningNorms
from indpriv.accountant.rdp import renyi_divergences
from indpriv.accountant.steps import Steps
from indpriv.analysis.fidelity import other_accounts
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.summary import Finding, record
from indpriv.norm_log.norm_log import NormLog

_BIN = 1e-3  # of relative norms: the 95th percentile is rounded up to a multiple
_NORM_BYTES = 200  # that one norm takes while it is looked at
_GRID = 200  # relative norms between which divergences are interpolated; whole hundredths are on it
_Shift = Annotated[float, figure("+.3f", "max_grad_norm")]
_Error = Annotated[float, figure(".3f", "max_grad_norm", ge=0)]


BatchNormFidelity: Any = record("batch_norm_fidelity")


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
    order = float(worst_case_rdp(log, method)["best_order"][0])
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


def _find(run: AuditedRun) -> dict[str, Any]:
    method, one_row = other_accounts(run), run.epsilons.account.rows_per_unit is None
    return {} if method is None or not one_row else {"batch_norms": free_fidelity(run.log, method)}


FINDING = Finding("batch_norms", _find)
