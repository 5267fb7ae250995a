"""Brackets of epsilon and delta: inverse of each other, and around values known otherwise."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from delta_bounds import delta_bounds
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld import closed_form, laplace, loss_distribution
from indpriv.accountant.pld.brackets import FALLBACK, pld_delta, pld_epsilon
from indpriv.errors import InputError

DIRECTIONS = ["remove", "add"]
ROUNDING = 1e-9  # relative, of the references


def run_of(*steps):
    """One example that took `count` steps of each (relative_norm, noise_multiplier, sample_rate, count)."""
    columns = np.array(steps, float).T
    return Participations(columns[0], columns[1], columns[2], columns[3:])


def epsilon_of(run, delta):
    return pld_epsilon(run, delta=delta, rdp_upper=np.full(len(run.counts), np.inf))


def delta_of(run, epsilon, **changes):
    found = pld_delta(run, np.array([[epsilon]]), **changes)
    assert 0 <= found.lower[0, 0] <= found.upper[0, 0] <= 1
    return found.lower[0, 0], found.upper[0, 0]


steps = st.tuples(
    st.sampled_from([0.05, 0.5, 1.0]),
    st.sampled_from([0.6, 1.0, 4.0]),
    st.sampled_from([0.01, 0.2, 1.0]),
    st.integers(1, 400),
)


@settings(max_examples=6, deadline=None)
@given(run=st.lists(steps, min_size=1, max_size=3), delta=st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_delta_and_epsilon_are_inverse(run, delta):
    run = run_of(*run)
    found = epsilon_of(run, delta)
    below, above = delta_of(run, found.epsilon_lower[0]), delta_of(run, found.epsilon_upper[0])
    assert above[0] <= delta * (1 + ROUNDING)  # delta at the upper end is at most delta
    if found.epsilon_lower[0] > 0:
        assert below[1] >= delta * (1 - ROUNDING)
    width = found.epsilon_upper[0] - found.epsilon_lower[0]
    assert width <= 1e-4 * found.epsilon_upper[0]
    assert above[1] - above[0] <= 1e-4 * above[1]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("epsilon", [-3.0, -0.02, 0.0, 0.4, 2.0])
@pytest.mark.parametrize(
    ("relative_norm", "noise", "rate"), [(1.0, 0.5, 0.01), (0.1, 1.0, 0.3), (0.5, 5.0, 0.05)]
)
def test_delta_of_one_step_is_its_closed_form(relative_norm, noise, rate, epsilon, direction):
    truth = oracles.one_step_delta(relative_norm, noise, rate, epsilon, direction)
    lower, upper = delta_of(
        run_of((relative_norm, noise, rate, 1)), epsilon, directions=(direction,)
    )
    assert lower * (1 - ROUNDING) <= truth <= upper * (1 + ROUNDING)
    assert (
        upper - lower <= 1e-9 * upper or upper == np.finfo(float).tiny
    )  # the least upper end there is


@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 0.7, 6.0])
def test_delta_without_sampling_is_the_gaussian_of_all_steps(epsilon):
    lower, upper = delta_of(run_of((1.0, 2.0, 1.0, 5), (0.3, 0.7, 1.0, 40)), epsilon)
    mu = np.sqrt(5 / 2.0**2 + 40 * (0.3 / 0.7) ** 2)
    truth = oracles.one_step_delta(mu, 1.0, 1.0, epsilon, "remove")
    assert lower * (1 - ROUNDING) <= truth <= upper * (1 + ROUNDING)


@pytest.mark.parametrize(
    ("steps", "epsilon"),
    [
        ([(1.0, 1.0, 0.05, 200)], 3.0),
        ([(1.0, 1.0, 0.05, 200)], 0.0),
        ([(1.0, 1.5, 0.3, 20)], -0.5),
        ([(0.7, 0.7, 0.02, 50), (1.0, 0.8, 0.01, 30)], 1.0),
        ([(1.0, 0.8, 0.01, 1000)], 2.0),
        ([(1.0, 0.8, 0.001, 60)], 0.2),
    ],
)
def test_delta_of_composed_runs(steps, epsilon):
    least, most = delta_bounds(steps, epsilon, precision=1e-3)
    lower, upper = delta_of(run_of(*steps), epsilon)
    assert lower <= most
    assert least <= upper
    assert most - least <= 1e-3 * most  # else the reference would show nothing
    assert upper - lower <= 1e-5 * upper


def test_delta_at_0_is_one_number_in_both_directions():
    """The total variation: the narrower bracket of the two holds, at 0 and nowhere else."""
    one = np.ones(1)
    steps = Participations(one, one, 0.1 * one, np.array([[10.0]]))
    for epsilon, narrower in ((0.0, True), (1e-9, False)):
        whole, remove, add = (
            pld_delta(steps, np.array([[epsilon]]), directions=directions)
            for directions in (("remove", "add"), ("remove",), ("add",))
        )
        choose = min if narrower else max
        assert whole.upper == choose(remove.upper, add.upper)
        assert whole.lower <= whole.upper
        assert remove.lower <= add.upper
        assert add.lower <= remove.upper


def test_several_epsilons_of_several_examples_are_those_of_each_alone():
    run = Participations(
        np.array([0.5, 1.0]), np.ones(2), np.full(2, 0.05), np.array([[300.0, 20.0], [5.0, 4.0]])
    )
    epsilon = np.array([[1.0, 1.1, 1.2], [0.3, 0.31, 0.32]])
    together = pld_delta(run, epsilon)
    for row in range(2):
        for column in range(3):
            alone = run_of(
                (0.5, 1.0, 0.05, run.counts[row, 0]), (1.0, 1.0, 0.05, run.counts[row, 1])
            )
            lower, upper = delta_of(alone, epsilon[row, column])
            assert together.lower[row, column] <= upper
            assert lower <= together.upper[row, column]
            assert together.upper[row, column] == pytest.approx(upper, rel=1e-5)


@pytest.mark.parametrize("method", ["contours", "grids"])
def test_the_rest_of_a_block_moves_an_end_within_the_bracket_only(method):
    """Examples of a block share tilts, spacings and windows: ends move by rounding only."""
    counts = {
        "contours": [[900, 40, 3], [500, 500, 1], [20, 700, 100], [900, 0, 3]],
        "grids": [[9, 4, 0], [3, 5, 0]],
    }
    noise, rate = {"contours": (1.0, 0.05), "grids": (0.5, 0.05)}[method]
    law = np.array([0.2, 0.5, 1.0]), np.full(3, noise), np.full(3, rate)
    run = Participations(*law, np.array(counts[method], float))
    together = epsilon_of(run, 1e-5)
    order = np.arange(len(run.counts))[::-1]
    turned = epsilon_of(run.select(order), 1e-5)
    for example in range(len(run.counts)):
        alone = epsilon_of(run.select(np.array([example])), 1e-5)
        place = int(order[example])
        lowers = (
            together.epsilon_lower[example],
            turned.epsilon_lower[place],
            alone.epsilon_lower[0],
        )
        uppers = (
            together.epsilon_upper[example],
            turned.epsilon_upper[place],
            alone.epsilon_upper[0],
        )
        assert 0 < max(lowers) <= min(uppers)  # some epsilon is in all three brackets
        assert max(uppers) - min(lowers) <= 1e-5 * max(uppers)


def test_delta_falls_with_epsilon_and_is_one_far_below():
    run = run_of((1.0, 0.8, 0.05, 5))
    bounds = [delta_of(run, epsilon) for epsilon in (-30.0, -2.0, 0.0, 4.0, 40.0)]
    assert bounds[0][1] == pytest.approx(1.0)
    assert all(later[0] <= earlier[1] for earlier, later in itertools.pairwise(bounds))
    assert bounds[-1][1] <= 1e-12


@pytest.mark.parametrize(
    "steps",
    [[(1.0, 1.0, 1.0, 1)], [(0.1, 1.0, 0.1, 1)], [(1.0, 2.0, 0.01, 2)], [(1.0, 5.0, 0.2, 40)]],
)
def test_a_delta_too_small_for_a_float_is_not_0(steps):
    lower, upper = delta_of(run_of(*steps), 5000.0)
    assert lower == 0 < upper
    assert upper <= 1e-290


def test_delta_is_0_only_beyond_all_losses():
    assert delta_of(run_of((0.0, 1.0, 0.1, 30)), 0.0) == (0.0, 0.0)
    run, highest = run_of((1.0, 1.0, 0.1, 30)), -30 * np.log1p(-0.1)
    assert delta_of(run, highest * 1.01, directions=("add",))[0] == 0.0
    assert delta_of(run, highest * 0.99, directions=("add",))[1] > 0


def test_next_to_no_noise_falls_back_at_once():
    run = Participations(
        np.linspace(0.1, 1, 10), np.full(10, 1e-3), np.full(10, 0.01), np.ones((1, 10))
    )
    found = pld_epsilon(run, delta=1e-5, rdp_upper=np.array([1e6]))
    assert (found.bracket[0], found.epsilon_lower[0], found.epsilon_upper[0]) == (
        FALLBACK,
        0.0,
        1e6,
    )
    assert delta_of(run, 1.0) == (0.0, 1.0)


def test_brackets_stay_proven_where_no_work_may_be_done(monkeypatch):
    run, delta = run_of((1.0, 0.5, 0.001, 10)), 1e-9
    monkeypatch.setattr(laplace, "_MOST_WORK", 0.0)
    wide = pld_epsilon(run, delta=delta, rdp_upper=np.array([5.9]))  # by grids only
    monkeypatch.setattr(loss_distribution, "_MOST_WORK", 0.0)
    widest = pld_epsilon(run, delta=delta, rdp_upper=np.array([5.9]))
    assert (widest.epsilon_lower[0], widest.epsilon_upper[0], widest.bracket[0]) == (
        0.0,
        5.9,
        FALLBACK,
    )
    assert 5.0 < wide.epsilon_lower[0] <= wide.epsilon_upper[0] < 5.01
    assert delta_bounds([(1.0, 0.5, 0.001, 10)], wide.epsilon_upper[0], precision=1e-3)[0] <= delta
    assert delta_bounds([(1.0, 0.5, 0.001, 10)], wide.epsilon_lower[0], precision=1e-3)[1] >= delta


def test_fractional_counts_and_infinite_epsilons_are_refused():
    with pytest.raises(InputError, match="whole numbers"):
        epsilon_of(run_of((1.0, 1.0, 0.1, 2.5)), 1e-5)
    with pytest.raises(InputError, match="not finite"):
        pld_delta(run_of((1.0, 1.0, 0.1, 2)), np.array([[np.inf]]))


def test_bounds_that_contradict_each_other_are_an_error():
    with pytest.raises(ArithmeticError, match="report it"):
        pld_epsilon(run_of((1.0, 1.0, 0.1, 50)), delta=1e-5, rdp_upper=np.array([0.01]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_reference_agrees_with_the_gaussian(direction):
    assert oracles.one_step_delta(1.0, 0.7, 1.0, 1.3, direction) == pytest.approx(
        float(closed_form.gaussian_delta(np.array(1.3), 1 / 0.7)), rel=1e-12
    )
