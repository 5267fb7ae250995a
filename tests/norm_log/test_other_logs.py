"""Other logs that the same norms could have left: with more noise, or a lower clipping norm."""

import numpy as np
import pytest

from indpriv import NormLog, account
from indpriv.norm_log.norm_log import clipped_lower, noisier

STEPS, N, DELTA = 12, 40, 1e-5
NORMS = np.random.default_rng(0).lognormal(-0.7, 0.8, (STEPS, N))


def log_of(norms=NORMS, *, noise=1.1, clip=2.0, rate=0.2, **options):
    every = options.pop("every", 1)
    return NormLog.from_arrays(
        norms[::every],
        np.arange(STEPS)[::every],
        total_steps=STEPS,
        noise_multiplier=noise,
        max_grad_norm=clip,
        sample_rate=rate,
        **options,
    )


def test_more_noise_is_a_log_of_that_noise():
    found, wanted = account(noisier(log_of(), 1.5), delta=DELTA), log_of(noise=1.1 * 1.5)
    assert np.array_equal(found.epsilon, account(wanted, delta=DELTA).epsilon)


@pytest.mark.parametrize("clip", [2.0, np.geomspace(2.0, 0.5, STEPS)], ids=["constant", "falls"])
@pytest.mark.parametrize("rounding", [0, 0.01, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_lower_clipping_norm_is_a_log_of_that_norm_and_the_same_noise(rounding, clip):
    share = 0.6
    log = log_of(clip=clip, rounding=rounding, every=3)
    wanted = log_of(clip=clip * share, noise=1.1 / share, rounding=rounding / share, every=3)
    found, expected = clipped_lower(log, share), account(wanted, delta=DELTA)
    table = account(found, delta=DELTA)
    np.testing.assert_allclose(table.epsilon, expected.epsilon, rtol=1e-9)
    assert table.worst_case_epsilon == pytest.approx(expected.worst_case_epsilon, rel=1e-9)
    now = account(log, delta=DELTA)
    nodes = 1e-9 if rounding else 1e-3  # norms that are not rounded lie between nodes of a lattice
    assert (table.epsilon <= now.epsilon * (1 + nodes)).all()
    assert table.epsilon.max() < now.epsilon.max()


def test_who_is_below_the_lower_norm_keeps_their_epsilon():
    log = log_of(np.minimum(NORMS, np.where(np.arange(N) < 20, 0.9, np.inf)))
    lower, now = (account(one, delta=DELTA).epsilon for one in (clipped_lower(log, 0.5), log))
    np.testing.assert_allclose(lower[:20], now[:20], rtol=1e-9)
    above = (NORMS[:, 20:] > 1.0).any(axis=0)
    assert (lower[20:] < now[20:] * (1 - 1e-6))[above].all()


def test_batch_norms_are_clipped_lower_too():
    rng = np.random.default_rng(1)
    steps, positions = np.nonzero(rng.random((STEPS, N)) < 0.4)
    entries = steps, positions, NORMS[steps, positions]
    options = {"every": 4, "sampler": "shuffled", "batch_norms": entries}
    log, wanted = (
        log_of(clip=clip, noise=noise, rounding=rounding, **options)
        for clip, noise, rounding in ((2.0, 1.1, 0.01), (1.0, 2.2, 0.02))
    )
    for participation in ("known", "secret"):
        found, expected = (
            account(one, delta=DELTA, participation=participation)
            for one in (clipped_lower(log, 0.5), wanted)
        )
        np.testing.assert_allclose(found.epsilon, expected.epsilon, rtol=1e-9)
