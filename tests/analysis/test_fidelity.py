import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from indpriv.analysis.fidelity import (
    compare_with_exact,
    differences,
    sensitivity_to,
)
from indpriv.errors import InputError
from synthetic import epsilon_table

PLAN = {"source": "norms at every step", "every": 10, "epochs": 1.0}


def test_a_constant_bias_leaves_pearson_at_one():
    exact = epsilon_table([1.0, 2.0, 3.0, 4.0])
    found = compare_with_exact(epsilon_table([1.5, 2.5, 3.5, 4.5]), exact, **PLAN)
    assert found.pearson == pytest.approx(1.0)
    assert found.signed_bias == pytest.approx(0.5)
    assert (found.mean_absolute, found.largest_absolute) == (
        pytest.approx(0.5),
        pytest.approx(0.5),
    )
    assert (found.share_under, found.share_under_1_percent) == (0.0, 0.0)


def test_under_reporting_is_counted():
    exact = epsilon_table([1.0, 1.0, 1.0, 1.0])
    found = compare_with_exact(epsilon_table([0.5, 0.995, 1.0, 1.2]), exact, **PLAN)
    assert (found.share_under, found.share_under_1_percent) == (0.5, 0.25)
    assert found.pearson is None
    assert found.signed_bias == pytest.approx(-0.07625)


@given(arrays(np.float64, (2, 9), elements=st.floats(0, 20)), st.permutations(range(9)))
def test_rows_are_matched_by_id_in_any_order(pair, order):
    guess, truth = pair
    straight = compare_with_exact(epsilon_table(guess), epsilon_table(truth), **PLAN)
    mixed = compare_with_exact(
        epsilon_table(guess), epsilon_table(truth[list(order)], ids=list(order)), **PLAN
    )
    assert mixed.signed_bias == pytest.approx(straight.signed_bias, abs=1e-9)
    assert mixed.share_under == straight.share_under
    assert mixed.largest_absolute == straight.largest_absolute


def test_exact_examples_are_some_of_all():
    exact = epsilon_table([5.0, 1.0], ids=["d", "a"])
    found = compare_with_exact(
        epsilon_table([1.0, 9.0, 9.0, 5.0], ids=["a", "b", "c", "d"]), exact, **PLAN
    )
    assert (found.n, found.largest_absolute) == (2, 0.0)


def test_other_examples_or_other_questions_are_refused():
    with pytest.raises(InputError, match=r"1 reference examples have no estimate, e\.g\. id 7"):
        compare_with_exact(epsilon_table([1.0, 2.0]), epsilon_table([1.0, 2.0], ids=[0, 7]), **PLAN)
    with pytest.raises(InputError, match="delta is 1e-05 in the estimate and 1e-06"):
        compare_with_exact(epsilon_table([1.0]), epsilon_table([1.0], delta=1e-6), **PLAN)


def test_the_95_percent_error_is_one_that_occurs():
    """An interpolated one is below that of the example next to it."""
    errors = np.append(np.zeros(18), [1.0, 2.0])
    assert differences(1 + errors, np.ones(20))["p95_absolute"] == 2.0


def test_differences_are_the_estimate_minus_the_reference():
    found = differences(np.array([1.1, 1.8, 3.4]), np.array([1.0, 2.0, 3.0]))
    assert (found["n"], found["signed_bias"]) == (3, pytest.approx(0.1))
    assert found["largest_absolute"] == pytest.approx(0.4)
    assert found["share_under"] == pytest.approx(1 / 3)


def test_sensitivity_is_the_other_choice_minus_this_one():
    here = epsilon_table([1.0, 2.0, 3.0], rounding=0.01)
    other = epsilon_table([1.1, 1.8, 3.4], rounding=0.1)
    found = sensitivity_to("rounding", 0.01, 0.1, here, other)
    assert (found["here"], found["instead"], found["n"]) == ("0.01", "0.1", 3)
    assert found["mean_shift"] == pytest.approx(0.1)
    assert found["largest_absolute"] == pytest.approx(0.4)
    assert found["share_smaller"] == pytest.approx(1 / 3)
