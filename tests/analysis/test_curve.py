"""Accuracy at an epsilon and epsilon at an accuracy, read off the checkpoints of a run."""

import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indpriv.analysis.schedule import Curve

CURVE = Curve((0, 100, 200, 300), (0.1, 0.8, 0.7, 0.9), (0.0, 1.0, 1.5, 2.0))


def test_values_between_checkpoints_are_on_a_line():
    assert CURVE.accuracy_at(0.5) == pytest.approx(0.45)
    assert CURVE.epsilon_at(0.45) == pytest.approx(0.5)
    assert CURVE.step_at(0.45) == pytest.approx(50)
    assert CURVE.epsilon_at(0.8) == 1.0
    assert CURVE.epsilon_at(0.85) == pytest.approx(1.875)  # 0.8 was reached before, and lost


def test_nothing_is_said_beyond_the_checkpoints():
    assert CURVE.accuracy_at(2.01) is None
    assert CURVE.epsilon_at(0.91) is None
    assert CURVE.epsilon_at(0.05) == 0.0


def test_a_run_without_privacy_has_no_epsilon():
    columns = {"step": [0, 5], "test_accuracy": [0.1, 0.5], "worst_case_epsilon": [math.nan] * 2}
    void = Curve.of(pd.DataFrame(columns))
    assert void.epsilon == ()
    assert void.epsilon_at(0.3) is None
    assert void.accuracy_at(0.0) is None
    assert void.step_at(0.3) == pytest.approx(2.5)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(0, 1))
@settings(max_examples=50, derandomize=True)
def test_an_accuracy_is_first_reached_at_its_epsilon(accuracies, wanted):
    curve = Curve(tuple(range(len(accuracies))), tuple(accuracies), tuple(range(len(accuracies))))
    found = curve.epsilon_at(wanted)
    assert (found is None) == (max(accuracies) < wanted)
    if found is not None:
        assert curve.accuracy_at(found) >= wanted - 1e-9
        before = [a for step, a in enumerate(accuracies) if step < found]
        assert all(accuracy < wanted for accuracy in before)
