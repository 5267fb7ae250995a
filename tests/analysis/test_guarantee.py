import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from indpriv._facts import FAILED, NOT_CHECKED, PASSED, WORST_CASE
from indpriv.analysis.guarantee import guarantee_of, membership_of, true_positive_bound
from indpriv.norm_log.evidence import CHECKS
from indpriv.norm_log.norm_log import NormLog
from synthetic import epsilon_table


def test_no_test_beats_the_bound_and_a_gaussian_one_comes_close():
    delta = 1e-5
    for shift in (0.2, 1.0, 3.0):

        def spent(epsilon, shift=shift):  # Balle and Wang 2018, theorem 8, at noise 1/shift
            first = norm.cdf(shift / 2 - epsilon / shift)
            return first - np.exp(epsilon) * norm.cdf(-shift / 2 - epsilon / shift)

        grid = np.linspace(0, 30, 30_001)
        epsilon = grid[np.argmax(spent(grid) <= delta)]
        for false_positive in (0.001, 0.01, 0.3, 0.9):
            right = norm.sf(norm.isf(false_positive) - shift)
            assert right <= true_positive_bound(epsilon, delta, false_positive) <= 1


def test_bounds_by_hand():
    assert true_positive_bound(0, 0, 0.01) == pytest.approx(0.01)
    assert true_positive_bound(3, 1e-5, 0.01) == pytest.approx(0.20086 + 1e-5, abs=1e-5)
    assert true_positive_bound(1, 0, 0.9) == pytest.approx(
        1 - 0.1 / math.e
    )  # e^epsilon FPR is above 1 there


@given(st.floats(0, 1e4), st.floats(1e-12, 0.5), st.floats(0, 1))
def test_a_bound_is_a_rate_and_no_less_than_a_guess(epsilon, delta, false_positive):
    assert false_positive * (1 - 1e-9) <= true_positive_bound(epsilon, delta, false_positive) <= 1


@pytest.mark.parametrize("assumption", CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize("status", [PASSED, FAILED, NOT_CHECKED])
def test_a_guarantee_does_not_depend_on_titles(assumption, status):
    check = assumption.fact(status, "detail")
    table = epsilon_table(np.ones(99))

    def found_with(check):  # a line of evidence names the checks that left it open
        found = guarantee_of(table, [check], {})
        words = tuple((line.key, line.status) for line in found.lines)
        return replace(found, lines=(), reasons=()), len(found.reasons), words

    found = guarantee_of(table, [check], {})
    unproven = status == FAILED and assumption.bears_on == WORST_CASE
    assert (found.status == "unproven") == unproven
    for title in ("record", "coverage", "norm pass", "permissions", "sampler (x)", ""):
        assert found_with(replace(check, title=title)) == found_with(check)


def test_a_delta_of_one_over_n_is_not_publishable():
    fine = guarantee_of(epsilon_table(np.ones(99), delta=0.01), (), {})
    assert fine.publishable
    large = guarantee_of(epsilon_table(np.ones(100), delta=0.01), (), {})
    assert (large.status, large.publishable) == ("declared", False)
    assert "is not to be published" in large.statement
    assert "is not to be published" not in fine.statement
    assert not guarantee_of(
        epsilon_table(np.ones(99), delta=0.01), (), {"seeded": True}
    ).publishable


def settings(**changes):
    return {
        "total_steps": 1,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 1.0,
    } | changes


def test_membership_of_one_gaussian_step_is_what_theory_says():
    log = NormLog.from_arrays(
        np.full((1, 4), 0.1), [0], **settings()
    )  # mu = 1; norms of the run have no part in it
    found = membership_of(log, epsilon_table(np.ones(4)))
    right = norm.sf(norm.isf(0.01) - 1.0)
    assert right <= found.true_positive_rate <= right * 1.01
    advantage = 2 * norm.cdf(0.5) - 1
    assert advantage <= found.advantage <= advantage * 1.01
    assert found.mu == pytest.approx(1.0, rel=0.01)


def test_one_row_says_nothing_of_people_with_several():
    rows = NormLog.from_arrays(
        np.full((1, 4), 0.1), [0], unit="user", unit_ids=[0, 0, 1, 2], **settings()
    )
    assert membership_of(rows, epsilon_table(np.ones(4))) is None
