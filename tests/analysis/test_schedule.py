"""Settings over training, and historical rules beside the account."""

import numpy as np
import pytest

import indpriv
from indpriv.analysis.schedule import composed_epsilons, schedule_of


def log_of(noise, clip, sampler="poisson"):
    steps = len(np.broadcast_to(noise, 300))
    return indpriv.NormLog.from_arrays(
        [[1.0]],
        [0],
        total_steps=steps,
        noise_multiplier=noise,
        max_grad_norm=clip,
        sample_rate=0.01,
        sampler=sampler,
    )


def test_settings_of_evenly_spaced_steps():
    noise, clip = np.linspace(3, 1, 300), np.linspace(4, 2, 300)
    found = schedule_of(log_of(noise, clip), 1e-5, None)
    assert (found.steps[0], found.steps[-1]) == (0, 299)
    assert len(found.steps) == 200
    index = list(found.steps)
    np.testing.assert_array_equal(found.noise_multiplier, noise[index])
    np.testing.assert_allclose(found.noise_std, (noise * clip)[index])
    assert found.moves
    assert found.rules == composed_epsilons(noise, 0.01, total_steps=300, delta=1e-5)


def test_rules_need_poisson_sampling():
    found = schedule_of(log_of(1.0, 1.0, "shuffled"), 1e-5, None)
    assert not found.moves
    assert found.rules is None


def test_the_moments_accountant_is_no_smaller_than_the_account():
    """The other rules are formulas, and may be below it."""
    log = log_of(np.linspace(2, 1, 300), 1.0)
    rules = schedule_of(log, 1e-5, None).rules
    assert rules.moments > indpriv.account(log, delta=1e-5).worst_case_epsilon
    assert rules.optimal == pytest.approx(rules.advanced_as_printed, rel=0.5)


@pytest.mark.parametrize(
    ("noise", "clip", "held"),
    [
        ([2.0, 2.0], [4.0, 2.0], "noise multiplier"),
        ([2.0, 4.0], [4.0, 2.0], "noise standard deviation"),
        ([2.0, 2.0], [4.0, 4.0], "noise multiplier and noise standard deviation"),
        ([2.0, 1.0], [4.0, 3.0], "neither"),
    ],
)
def test_what_noise_was_held_fixed(noise, clip, held):
    found = schedule_of(log_of(np.repeat(noise, 150), np.repeat(clip, 150)), 1e-5, None)
    assert found.held_fixed == held
