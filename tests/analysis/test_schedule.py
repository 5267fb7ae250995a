"""Settings over training."""

import numpy as np
import pytest

import indpriv
from indpriv.analysis.schedule import schedule_of


def log_of(noise, clip):
    steps = len(np.broadcast_to(noise, 300))
    return indpriv.NormLog.from_arrays(
        [[1.0]],
        [0],
        total_steps=steps,
        noise_multiplier=noise,
        max_grad_norm=clip,
        sample_rate=0.01,
    )


def test_settings_of_evenly_spaced_steps():
    noise, clip = np.linspace(3, 1, 300), np.linspace(4, 2, 300)
    found = schedule_of(log_of(noise, clip), None)
    assert (found.steps[0], found.steps[-1]) == (0, 299)
    assert len(found.steps) == 200
    index = list(found.steps)
    np.testing.assert_array_equal(found.noise_multiplier, noise[index])
    np.testing.assert_allclose(found.noise_std, (noise * clip)[index])
    assert found.moves


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
    found = schedule_of(log_of(np.repeat(noise, 150), np.repeat(clip, 150)), None)
    assert found.held_fixed == held
