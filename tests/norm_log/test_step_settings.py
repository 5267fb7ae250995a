"""Settings of steps."""

import numpy as np

from indpriv.norm_log.step_settings import StepSettings


def test_between_records_the_smallest_clipping_norm_is_counted():
    clip = [5.0, 4.0, 6.0, 3.0, 7.0, 2.0, 8.0]
    given = StepSettings.from_values(7, 1.0, clip, 0.1)
    steady = given.steady_between(np.array([1, 4])).max_grad_norm
    np.testing.assert_array_equal(steady, [4.0, 4.0, 3.0, 3.0, 7.0, 2.0, 2.0])
    np.testing.assert_array_equal(given.steady_between(np.arange(7)).max_grad_norm, clip)
