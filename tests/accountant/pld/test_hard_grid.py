"""Hard runs: few steps, rare participation, very little noise or very much, up to a million steps.

If a run has an exact delta, both ends of its bracket are compared with it, in 30 digits or more;
others are compared with the proven bounds of delta_bounds, which share no code with the accountant.
"""

import itertools

import numpy as np
import pytest

import oracles
from delta_bounds import delta_bounds
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.mechanisms import Mechanisms, Participations
from indpriv.accountant.method import Method
from indpriv.accountant.pld.brackets import FALLBACK, pld_epsilon
from indpriv.accountant.rdp_orders import RdpAccountant

CELLS = list(
    itertools.product(
        (1, 2, 10, 1_000, 1_000_000),
        (1e-5, 1e-3, 0.05, 0.5, 1.0),
        (0.3, 0.5, 1.0, 5.0, 50.0),
        (0.01, 0.1, 0.5, 1.0),
        (1e-5, 1e-9),
    )
)
ROUNDING = 1e-8  # relative, of exact values
# Shares of delta: how undecided the reference may be to count as sure, and as nearly sure
SURE, NEARLY = 1e-3, 0.1
# Of the reference; a finer one decides few more runs and takes ten times as long
RESOLUTIONS = (1 << 13, 1 << 16)
# Shares of all cells in which the reference is sure, and nearly sure, of the upper and of the lower
# end: slightly less than was measured. One and two steps, and unsampled ones, have exact values
DECIDED = {
    1: [(1.0, 1.0), (1.0, 1.0)],
    2: [(1.0, 1.0), (1.0, 1.0)],
    10: [(0.95, 0.98), (0.96, 0.98)],
    1_000: [(0.88, 0.98), (0.91, 0.96)],
    1_000_000: [(0.59, 0.88), (0.71, 0.94)],
}
PLAIN = [
    cell
    for cell in CELLS
    if (cell[0] == 1 or cell[1] == 1.0) or (cell[0] * cell[1] >= 10 and cell[0] < 1e6)
]


def bracket_of(cell):
    steps, rate, noise, norm, delta = cell
    law = (np.array([norm]), np.array([noise]), np.array([rate]))
    counts = np.array([[float(steps)]])
    rdp = RdpAccountant(Mechanisms(*law), Method(delta=delta))
    bound = rdp.epsilons(DenseCounts(counts)).epsilon
    found = pld_epsilon(Participations(*law, counts), delta=delta, rdp_upper=bound)
    return float(found.epsilon_lower[0]), float(found.epsilon_upper[0]), str(found.bracket[0])


def exact_delta(cell, epsilon):
    """Delta of a run of unsampled steps, of one step or of two, the larger direction; None for other runs."""
    steps, rate, noise, norm, _ = cell
    if rate == 1.0:
        return oracles.one_step_delta(norm * steps**0.5, noise, 1.0, epsilon, "remove")
    step = (norm, noise, rate)
    if steps == 1:
        return max(
            oracles.one_step_delta(*step, epsilon, direction) for direction in ("remove", "add")
        )
    if steps == 2:
        return max(
            oracles.two_step_delta(step, step, epsilon, direction)
            for direction in ("remove", "add")
        )
    return None


def assert_right(cell):
    """Check one bracket; returns by how much of delta the reference is undecided at each end."""
    steps, rate, noise, norm, delta = cell
    lower, upper, bracket = bracket_of(cell)
    assert 0 <= lower <= upper < np.inf
    assert bracket != FALLBACK
    width = (upper - lower) / max(upper, 1e-300)
    if steps * rate >= 10:
        assert width <= 1e-4
    if steps <= 2 or rate == 1.0:
        assert width <= 1e-6
        assert exact_delta(cell, upper) <= delta * (1 + ROUNDING)
        if lower > 0:
            assert exact_delta(cell, lower) >= delta * (1 - ROUNDING)
        elif upper > 0:
            assert exact_delta(cell, 0.0) > delta
        return [0.0, 0.0]
    run, n_points = [(norm, noise, rate, steps)], RESOLUTIONS if steps < 1e6 else RESOLUTIONS[-1:]
    least, most = delta_bounds(run, upper, precision=SURE, n_points=n_points)
    assert least <= delta
    missing = [0.0 if most <= delta else min(1 - least / delta, 1 - least / most)]
    least, most = (
        delta_bounds(run, lower, precision=SURE, n_points=n_points) if lower > 0 else (delta, delta)
    )
    assert most >= delta
    return [*missing, min(most / delta - 1, 1 - least / most)]


@pytest.mark.parametrize(
    "cell",
    [PLAIN[k] for k in np.random.default_rng(0).permutation(len(PLAIN))[:24]]
    + [(1_000_000, 0.05, 5.0, 0.5, 1e-9)],
    ids=str,
)
def test_some_hard_cells(cell):
    assert max(assert_right(cell)) <= SURE


@pytest.mark.parametrize("steps", [(1.0, 1.0, 0.01, 1), (0.5, 0.7, 0.3, 2), (1.0, 1.0, 1.0, 25)])
@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_the_reference_bounds_contain_exact_deltas(steps, epsilon):
    lower, upper = delta_bounds([steps], epsilon, precision=1e-4)
    truth = exact_delta((steps[3], steps[2], steps[1], steps[0], None), epsilon)
    assert lower <= truth <= upper
    assert upper - lower <= 1e-4 * upper


@pytest.mark.slow
@pytest.mark.parametrize("steps", DECIDED)
def test_every_hard_cell(steps):
    missing = np.array([assert_right(cell) for cell in CELLS if cell[0] == steps])
    for end, (surely, nearly) in zip(
        missing.T, DECIDED[steps], strict=True
    ):  # the upper end, then the lower one
        assert np.mean(end <= SURE) >= surely
        assert np.mean(end <= NEARLY) >= nearly
