"""What batch norms prove, on made-up runs whose every norm is known, over simulated coins."""

import numpy as np
import pytest

from indpriv import NormLog, account
from indpriv.accountant import Method
from indpriv.accountant.account import table_for
from indpriv.accountant.rdp import renyi_divergences
from indpriv.analysis import fidelity
from summaries import run_of

N, STEPS, RATE, NOISE = 60, 120, 0.15, 1.1
ORDER = 3.0
AT_ORDER = Method(delta=1e-5, orders=[ORDER])


def norms_of(seed=0):
    """(STEPS, N) norms that wander and fall, whole hundredths."""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(rng.normal(0, 0.1, (STEPS, N)), axis=0) - np.linspace(0, 1, STEPS)[:, None]
    return np.ceil(100 * np.exp(walk + rng.normal(-0.7, 0.6, N))) / 100


def sampled(norms, rng, rounding=0.01, rows=(0,), **changes):
    options = {"noise_multiplier": NOISE, "max_grad_norm": 1.0, "sample_rate": RATE, **changes}
    steps, positions = np.nonzero(
        rng.random(norms.shape) < np.reshape(options["sample_rate"], (-1, 1))
    )
    return NormLog.from_arrays(
        norms[list(rows)],
        list(rows),
        total_steps=STEPS,
        rounding=rounding,
        batch_norms=(steps, positions, norms[steps, positions]),
        **options,
    )


def mean_rdp(norms, order, noise=NOISE, rate=RATE):
    """The mean over examples of the RDP of the whole run, one step after the other."""
    shape = (STEPS,)
    noise, rate = np.broadcast_to(noise, shape), np.broadcast_to(rate, shape)
    total = sum(
        renyi_divergences(np.minimum(row, 1) / sigma, np.full(N, q), np.array([order]))[:, 0]
        for row, sigma, q in zip(norms, noise, rate, strict=True)
    )
    return total


def free_fidelity(log, method):
    table = table_for(log, Method(delta=method.delta, between_records=method.between_records))
    return fidelity.free_fidelity(run_of(log, method, table))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [0.01, 0.0])
def test_the_weighted_sum_is_unbiased_over_coins(rounding):
    norms, rng = norms_of(), np.random.default_rng(1)
    noise, rate = (
        np.where(np.arange(STEPS) % 2, 1.1, 1.4),
        np.where(np.arange(STEPS) < 50, 0.1, 0.2),
    )
    options = {"noise_multiplier": noise, "sample_rate": rate}
    runs = [
        free_fidelity(sampled(norms, rng, rounding, (0, 40), **options), AT_ORDER)
        for _ in range(100)
    ]
    means = np.array([run.unbiased_mean_rdp for run in runs])
    errors = np.array([run.standard_error for run in runs])
    expected = mean_rdp(norms, ORDER, noise, rate).mean()
    assert abs(means.mean() - expected) < 4 * means.std() / 100**0.5
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.25)


def test_the_weight_matters():
    """Without it, the sum would miss by far more than its standard error."""
    norms = norms_of()
    found = free_fidelity(sampled(norms, np.random.default_rng(1)), AT_ORDER)
    truth = mean_rdp(norms, ORDER).mean()
    assert abs(found.unbiased_mean_rdp - truth) < 5 * found.standard_error
    assert abs(RATE * found.unbiased_mean_rdp - truth) > 15 * found.standard_error


@pytest.mark.parametrize("rule", ["last", pytest.param("closest", marks=pytest.mark.slow)])
def test_left_out_records_tell_the_bias_of_the_account(rule):
    norms, rng = norms_of(), np.random.default_rng(2)
    method = Method(delta=1e-5, between_records=rule, orders=[ORDER])
    differences, claimed = [], []
    for _ in range(50):
        found = free_fidelity(sampled(norms, rng), method)
        actual = found.mean_rdp - mean_rdp(norms, found.order).mean()
        differences.append(found.rdp_bias - actual)
        claimed.append(found.rdp_bias_error)
    assert abs(np.mean(differences)) < 4 * np.std(differences) / 50**0.5
    assert np.std(differences) == pytest.approx(np.mean(claimed), rel=0.4)


def test_errors_by_hand():
    # Example 0 is sampled at steps 4, 6 and 9, with norms 0.3, 0.5 and 2; example 1 never. One full record at step 2.
    log = NormLog.from_arrays(
        [[0.1, 0.1]],
        [2],
        total_steps=12,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.25,
        batch_norms=([2, 4, 6, 9], [0, 0, 0, 0], [0.11, 0.3, 0.5, 2.0]),
    )
    last = free_fidelity(log, Method(delta=1e-5, between_records="last"))
    errors = np.array([0.1 - 0.3, 0.3 - 0.5, 0.5 - 1.0])
    assert (last.n_entries, last.share_under, last.share_under_1_percent) == (
        3,
        1.0,
        1.0,
    )
    assert last.signed_bias == pytest.approx(errors.mean())
    assert last.mean_absolute == pytest.approx(np.abs(errors).mean())
    assert (last.p95_absolute, last.largest_absolute) == (
        pytest.approx(0.5),
        pytest.approx(0.5),
    )
    closest = free_fidelity(log, Method(delta=1e-5, between_records="closest"))
    errors = np.array(
        [0.5 - 0.3, 0.3 - 0.5, 0.5 - 1.0]
    )  # step 4: steps 2 and 6 tie, and the larger counts
    assert closest.signed_bias == pytest.approx(errors.mean())
    assert closest.share_under == pytest.approx(2 / 3)
    cost = renyi_divergences(
        np.array([0.1, 0.3, 0.5, 1.0]), np.full(4, 0.25), np.array([closest.order])
    )[:, 0]
    estimate, exact = cost[[2, 1, 2]], cost[[1, 2, 3]]
    assert closest.rdp_bias == pytest.approx(3 * (estimate - exact).sum() / 2)
    assert closest.unbiased_mean_rdp == pytest.approx((2 * cost[0] + 4 * exact.sum()) / 2)
    assert closest.standard_error == pytest.approx((12 * (exact**2).sum()) ** 0.5 / 2)
    assert closest.rdp_bias_error == pytest.approx(
        (12 * ((estimate - exact) ** 2).sum()) ** 0.5 / 2
    )


def test_a_norm_that_never_moves_has_no_error():
    log = sampled(np.full((STEPS, N), 0.25), np.random.default_rng(0))
    found = free_fidelity(log, Method(delta=1e-5))
    assert (
        found.signed_bias,
        found.largest_absolute,
        found.share_under,
        found.rdp_bias,
    ) == (
        0,
        0,
        0,
        0,
    )
    assert found.mean_rdp == pytest.approx(mean_rdp(np.full((STEPS, N), 0.25), found.order).mean())


def test_a_clipping_norm_that_moves():
    clip = np.linspace(0.5, 1.5, STEPS)
    norms = np.full((STEPS, N), 0.4)
    log = sampled(norms, np.random.default_rng(0), rounding=0.0, max_grad_norm=clip)
    found = free_fidelity(log, Method(delta=1e-5, between_records="closest"))
    assert found.largest_absolute == pytest.approx(0, abs=1e-12)
    truth = mean_rdp(norms / clip[:, None], found.order).mean()
    assert truth * (1 - 1e-6) <= found.mean_rdp <= truth * (1 + 2.5e-3)  # norms are snapped up
    assert abs(found.unbiased_mean_rdp - truth) < 5 * found.standard_error


def test_there_is_nothing_to_tell_where_the_account_uses_no_free_records():
    norms, rng = norms_of(), np.random.default_rng(0)
    log = sampled(norms, rng)
    assert free_fidelity(log, Method(delta=1e-5, between_records="worst_case")) is None
    assert free_fidelity(log, Method(delta=1e-5, preset="yu2023")) is None
    assert free_fidelity(sampled(norms, rng, sampler="shuffled"), Method(delta=1e-5)) is None
    assert free_fidelity(sampled(norms, rng, individually_clipped=True), Method(delta=1e-5)) is None
    assert free_fidelity(sampled(norms, rng, rows=range(STEPS)), Method(delta=1e-5)) is None


def test_steps_without_any_record_leave_the_sum_out():
    batches = sampled(norms_of(), np.random.default_rng(0))
    entries = batches.batch_norms.read(0, batches.n_examples)
    kept = entries.select(entries.step != 7)
    changed = type(batches.batch_norms)(np.delete(np.arange(STEPS), 7), [kept.block])
    log = NormLog(**{**vars(batches), "batch_norms": changed})
    found = free_fidelity(log, Method(delta=1e-5))
    assert found.unbiased_mean_rdp is None
    assert found.standard_error is None


def test_the_paper_has_no_batch_norms():
    log = sampled(norms_of(), np.random.default_rng(0), rounding=0.0)
    bare = NormLog(**{**vars(log), "batch_norms": None})
    ours, theirs = (account(each, delta=1e-5, preset="yu2023").epsilon for each in (log, bare))
    assert np.array_equal(ours, theirs)
