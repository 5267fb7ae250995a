"""Pairs between nodes: an example's bounds are those of its own pairs, or a little wider."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from indpriv import NormLog, account
from indpriv.accountant.pairs import Pairs
from indpriv.accountant.steps import StepKinds
from indpriv.accountant.tight import Met
from oracles import one_step_delta

STEPS, DELTA = 1000, 1e-5
LEVELS = np.linspace(0.05, 1.0, 150)


def grid(order):
    """Pairs at each level with two rates, in this order."""
    shift, rate = np.tile(LEVELS, 2), np.repeat([0.02, 0.001], len(LEVELS))
    return shift[order], rate[order]


def scattered():
    """Pairs between whose values no node need lie."""
    rng = np.random.default_rng(0)
    return rng.uniform(0.01, 1.0, 400), 10 ** rng.uniform(-3, -1, 400)


def among_and_alone(shift, rate, chosen):
    """What a few examples met, among all pairs and among their own."""
    counts = np.zeros((len(chosen), len(shift)))
    counts[np.arange(len(chosen)), chosen] = STEPS
    many, own = (
        Pairs(kinds, delta=DELTA, most_steps=STEPS)
        for kinds in (StepKinds(shift, rate), StepKinds(shift[chosen], rate[chosen]))
    )
    return (many, Met.of(csr_array(counts))), (own, Met.of(csr_array(np.eye(len(chosen)) * STEPS)))


def test_the_order_of_pairs_that_are_nodes_does_not_matter():
    order = np.random.default_rng(1).permutation(2 * len(LEVELS))
    (many, met), (own, own_met) = among_and_alone(*grid(order), np.array([0, 149, 299]))
    alone = own.epsilons(own_met)
    np.testing.assert_allclose(many.epsilons(met), alone, rtol=1e-3)


@pytest.mark.parametrize("steps", [1, 10])
def test_who_is_hardly_ever_drawn_has_epsilon_0(steps):
    log = NormLog.from_arrays(
        [[1.0, 0.3]],
        [0],
        total_steps=steps,
        noise_multiplier=0.3,
        max_grad_norm=1.0,
        sample_rate=1e-4 / steps,
    )
    assert account(log, delta=1.01e-4, accountant="pld").epsilon.tolist() == [0, 0]
    assert account(log, delta=0.9e-4, accountant="pld").epsilon[0] > 0


@pytest.mark.slow
def test_a_pair_between_nodes_costs_a_little_more_and_its_lower_end_is_lower():
    (many, met), (own, own_met) = among_and_alone(*scattered(), np.array([3]))
    alone, among = own.epsilons(own_met), many.epsilons(met)
    assert own.lower_epsilons(own_met, alone) <= among <= 1.01 * alone
    assert 0.8 * alone <= many.lower_epsilons(met, among) <= alone


@pytest.mark.slow
def test_a_pair_between_nodes_of_a_level_curve_is_never_below_the_truth():
    """Beyond ten standard deviations 2 Phi(s/2) - 1 is nearly 1 at every node, and its differences cancel."""
    norms = np.append(
        0.985, np.arange(1, 400) / 1000
    )  # more settings than may have laws of their own
    log = NormLog.from_arrays(
        norms[None],
        [0],
        total_steps=1,
        noise_multiplier=0.0602,
        max_grad_norm=1.0,
        sample_rate=0.5,
        rounding=0.001,
    )
    epsilon = account(log, delta=DELTA, accountant="pld").epsilon[0]
    exact = max(
        one_step_delta(0.985, 0.0602, 0.5, epsilon, direction) for direction in ("remove", "add")
    )
    assert exact <= DELTA
