"""Each method of bracketing alone: its bracket contains the truth, and brackets of two overlap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from delta_bounds import delta_bounds
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld import closed_form
from indpriv.accountant.pld.laplace import contour_brackets, contour_deltas
from indpriv.accountant.pld.loss_distribution import grid_brackets, grid_deltas
from indpriv.accountant.pld.loss_sum import DIRECTIONS, LossSum

METHODS = {"contours": contour_brackets, "grids": grid_brackets}
ROUNDING = 1e-9  # relative, of exact values


def losses_of(*steps):
    columns = np.array(steps, float).T
    return LossSum.from_participations(
        Participations(columns[0], columns[1], columns[2], columns[3:])
    )


def exact_epsilon(losses, delta, direction):
    return closed_form.invert_delta(
        lambda epsilon, _: closed_form.exact_delta(losses, epsilon, direction), np.array([delta])
    )[1][0]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
@pytest.mark.parametrize(("mu", "count"), [(0.02, 9), (0.5, 4), (1.0, 25)])
def test_gaussian_runs(method, direction, delta, mu, count):
    found = METHODS[method](losses_of((1.0, 1 / mu, 1.0, count)), delta, direction)
    truth = oracles.gaussian_epsilon(mu * count**0.5, delta)
    assert found.lower[0] <= truth * (1 + ROUNDING)
    assert found.upper[0] >= truth * (1 - ROUNDING)
    if method == "contours":  # grids are for rare participation
        assert found.upper[0] - found.lower[0] <= 1e-6 * found.upper[0]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "steps",
    [[(1.0, 1.0, 0.05, 2)], [(0.5, 0.7, 0.3, 1), (1.0, 2.0, 0.01, 1)], [(1.0, 0.5, 0.01, 1)]],
)
def test_grids_contain_runs_of_one_and_two_steps(steps, direction):
    losses = losses_of(*steps)
    truth = exact_epsilon(losses, 1e-5, direction)
    found = grid_brackets(losses, 1e-5, direction)
    assert found.lower[0] <= truth * (1 + ROUNDING)
    assert found.upper[0] >= truth * (1 - ROUNDING)
    assert found.upper[0] - found.lower[0] <= 1e-4 * found.upper[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "steps", [[(1.0, 1.0, 0.05, 200)], [(0.7, 0.7, 0.02, 50), (1.0, 0.8, 0.05, 80)]]
)
def test_composed_runs(method, steps):
    found = [METHODS[method](losses_of(*steps), 1e-5, direction) for direction in DIRECTIONS]
    lower, upper = (
        max(getattr(bracket, end)[0] for bracket in found) for end in ("lower", "upper")
    )
    (least, most), (_, at_lower) = (
        delta_bounds(steps, upper, precision=1e-3),
        delta_bounds(steps, lower, precision=1e-3),
    )
    assert least <= 1e-5 <= at_lower
    assert most - least <= 1e-3 * most


steps = st.tuples(
    st.sampled_from([0.1, 0.6, 1.0]),
    st.sampled_from([0.5, 1.0, 5.0]),
    st.sampled_from([0.005, 0.1]),
    st.integers(3, 300),
)


@settings(max_examples=3, deadline=None)
@given(
    run=st.lists(steps, min_size=1, max_size=2),
    delta=st.sampled_from([1e-4, 1e-8]),
    direction=st.sampled_from(DIRECTIONS),
)
def test_contours_and_grids_overlap(run, delta, direction):
    losses = losses_of(*run)
    contour, grid = (
        contour_brackets(losses, delta, direction),
        grid_brackets(losses, delta, direction),
    )
    assert contour.lower[0] <= grid.upper[0] * (1 + 1e-12)
    assert grid.lower[0] <= contour.upper[0] * (1 + 1e-12)
    epsilon = np.array([[grid.upper[0]]])
    low, high = contour_deltas(losses, epsilon, direction)
    below, above = grid_deltas(losses, epsilon, direction, np.log(high[:, 0]))
    assert low[0, 0] <= above[0, 0] * (1 + 1e-9)
    assert below[0, 0] <= high[0, 0] * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(
    shift=st.floats(0.01, 4.0),
    rate=st.sampled_from([1e-3, 0.2, 1.0]),
    epsilon=st.floats(-5.0, 5.0),
    direction=st.sampled_from(DIRECTIONS),
)
def test_the_closed_form_of_one_step_is_the_reference(shift, rate, epsilon, direction):
    found = closed_form.one_step_delta(np.array(epsilon), shift, rate, direction)
    reference = oracles.one_step_delta(shift, 1.0, rate, epsilon, direction)
    assert found == pytest.approx(reference, rel=closed_form.CLOSED_FORM_ERROR, abs=1e-290)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_quadrature_of_two_steps_is_the_reference(direction):
    first, second = (0.5, 1.0, 0.2), (1.0, 0.8, 0.05)
    found = closed_form.exact_delta(
        losses_of((*first, 1), (*second, 1)), np.array([0.4]), direction
    )
    assert found[0] == pytest.approx(
        oracles.two_step_delta(first, second, 0.4, direction), rel=closed_form.QUADRATURE_ERROR
    )


def test_roots_are_enclosed_to_the_last_digits_and_ends_of_the_range_are_kept():
    """The target itself, one that is met before the range and one that is not met inside it."""
    found = closed_form.invert_delta(
        lambda epsilon, _: np.exp(-epsilon), np.exp([-2.0, 1.0, -9.0]), low=0.0, high=4.0
    )
    lower, upper = found
    assert lower[0] <= 2.0 <= upper[0] <= lower[0] * (1 + 1e-12)
    assert lower[0] < upper[0]
    assert (lower[1], upper[1]) == (0.0, 0.0)
    assert (lower[2], upper[2]) == (4.0, 4.0)
    assert np.exp(-lower[0]) > np.exp(-2.0) >= np.exp(-upper[0])
