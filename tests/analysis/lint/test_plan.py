"""Epsilon before training: equal to an account of a log with the same settings, and inverted."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indpriv import NormLog, account
from indpriv.analysis.lint import Plan

PLANS = st.builds(
    Plan,
    noise_multiplier=st.floats(0.4, 20.0),
    sample_rate=st.floats(0.001, 1.0),
    total_steps=st.integers(1, 5000),
)


@settings(max_examples=10, deadline=None)
@given(PLANS)
def test_the_epsilon_is_the_worst_case_of_such_a_run(plan):
    log = NormLog.from_arrays(np.ones((1, 1)), [0], **vars(plan), max_grad_norm=1.0)
    expected = account(log, delta=1e-5).worst_case_epsilon
    assert plan.epsilon(1e-5) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=10, deadline=None)
@given(PLANS, st.floats(0.5, 20.0))
def test_the_noise_reaches_the_target_and_hardly_more(plan, target):
    found = plan.with_epsilon(target, 1e-5)
    assert (found.sample_rate, found.total_steps) == (plan.sample_rate, plan.total_steps)
    assert found.epsilon(1e-5) <= target
    less = Plan(found.noise_multiplier * 0.999, found.sample_rate, found.total_steps)
    assert less.epsilon(1e-5) > target


@pytest.mark.parametrize("target", [1e-12, 1e9, math.inf])
def test_a_target_out_of_reach_has_no_plan(target):
    assert Plan(1.0, 0.1, 100).with_epsilon(target, 1e-5) is None
