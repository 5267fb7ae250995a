"""Laws on grids: each one's curve lies on its side of the step's own curve, however coarse the grid."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indpriv.accountant.pld.closed_form import one_step_delta
from indpriv.accountant.pld.loss_grid import Step, lower_grid, upper_grid

FAR = 10.0


def curve(grid, spacing, epsilon, direction):
    """Delta of a law on a grid; mass is probability under Q, where X = exp(loss) is a density ratio."""
    loss = grid.offset + spacing * np.arange(len(grid.mass))
    if direction == "remove":
        return np.sum(grid.mass * np.maximum(np.exp(loss) - np.exp(epsilon), 0.0))
    return np.sum(grid.mass * np.maximum(1 - np.exp(epsilon + loss), 0.0))


@settings(max_examples=40, deadline=None)
@given(
    shift=st.sampled_from([0.02, 0.3, 1.0, 3.0]),
    rate=st.sampled_from([1e-4, 0.02, 0.4, 1.0]),
    spacing=st.sampled_from([1e-3, 0.02, 0.3]),
    epsilon=st.floats(0.0, 6.0),
    direction=st.sampled_from(["remove", "add"]),
)
def test_one_step_lies_between_its_laws(shift, rate, spacing, epsilon, direction):
    if spacing < 0.01 * shift**2:
        return  # a large grid, and nothing new
    step = Step(shift, rate, low=-FAR, high=shift + FAR)
    truth = one_step_delta(np.array(epsilon), shift, rate, direction)
    above = curve(upper_grid(step, spacing), spacing, epsilon, direction)
    below = curve(lower_grid(step, spacing), spacing, epsilon, direction)
    assert above >= truth * (1 - 1e-10) - 1e-20
    assert below <= truth * (1 + 1e-10) + 1e-20


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_both_laws_close_in_with_the_square_of_the_spacing(direction):
    step = Step(0.8, 0.2, low=-FAR, high=0.8 + FAR)
    gaps = []
    for spacing in (4e-2, 2e-2, 1e-2):
        ends = [
            curve(law(step, spacing), spacing, 0.1003, direction)
            for law in (lower_grid, upper_grid)
        ]
        gaps.append(ends[1] - ends[0])
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2] > 0
