"""A tolerance widens brackets, never past it, and never off the truth; tables are shared."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indpriv import NormLog, account
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.pld.brackets import pld_epsilon
from indpriv.accountant.pld.loss_sum import SharedLaws, shared_laws


def run_of(*steps):
    """One example that took `count` steps of each (norm, noise_multiplier, sample_rate, count)."""
    columns = np.array(steps, float).T
    return Participations(columns[0], columns[1], columns[2], columns[3:])


def bracket_of(run, delta, tolerance):
    found = pld_epsilon(run, delta=delta, rdp_upper=np.full(1, np.inf), tolerance=tolerance)
    return found.epsilon_lower[0], found.epsilon_upper[0]


def assert_contains_the_narrowest(run, delta, tolerance):
    run = run_of(*run)
    (low, high), (lower, upper) = bracket_of(run, delta, 0.0), bracket_of(run, delta, tolerance)
    assert lower <= high * (1 + 1e-12)
    assert low * (1 - 1e-12) <= upper
    assert upper - lower <= tolerance * upper


steps = st.tuples(
    st.sampled_from([0.05, 0.5, 1.0]),
    st.sampled_from([0.6, 1.0, 4.0]),
    st.sampled_from([0.003, 0.02, 0.2, 1.0]),
    st.integers(1, 400),
)


@settings(max_examples=5, deadline=None)
@given(
    run=st.lists(steps, min_size=1, max_size=3),
    delta=st.sampled_from([1e-3, 1e-5, 1e-9]),
    tolerance=st.sampled_from([0.1, 1e-2, 1e-4]),
)
def test_a_wider_bracket_contains_the_narrowest_one(run, delta, tolerance):
    assert_contains_the_narrowest(run, delta, tolerance)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    run=st.lists(steps, min_size=1, max_size=3),
    delta=st.sampled_from([1e-3, 1e-5, 1e-9]),
    tolerance=st.sampled_from([0.1, 1e-2, 1e-4]),
)
def test_wider_brackets_of_many_runs_contain_the_narrowest_ones(run, delta, tolerance):
    assert_contains_the_narrowest(run, delta, tolerance)


def small_log(n_examples=40):
    norms = np.random.default_rng(0).uniform(0, 1.2, (4, n_examples))
    norms[:, 1] = norms[:, 0]
    return NormLog.from_arrays(
        norms,
        [0, 50, 100, 150],
        total_steps=200,
        noise_multiplier=0.9,
        max_grad_norm=1.0,
        sample_rate=0.02,
        rounding=0.05,
    )


def test_brackets_of_an_account_are_within_the_tolerance_and_the_worst_case_is_exact():
    log = small_log()
    rough = account(log, delta=1e-5, accountant="pld", tolerance=1e-2)
    fine = account(log, delta=1e-5, accountant="pld", tolerance=1e-6)
    assert rough.worst_case_epsilon == fine.worst_case_epsilon
    width = rough.epsilon - rough.epsilon_lower
    assert np.all(width <= 1e-2 * rough.epsilon)
    assert width.max() > (fine.epsilon - fine.epsilon_lower).max()
    assert np.all(rough.epsilon_lower <= fine.epsilon * (1 + 1e-9))
    assert np.all(fine.epsilon_lower * (1 - 1e-9) <= rough.epsilon)
    assert rough.epsilon[0] == rough.epsilon[1]  # equal counts


def test_rows_are_made_once_and_only_where_needed():
    laws, calls = SharedLaws(np.arange(1.0, 4.0), np.full(3, 0.1)), []

    def make(missing):
        calls.append(missing.tolist())
        return np.outer(laws.shift[missing], [1.0, 10.0]), laws.shift[missing]

    for needed in ([True, False, False], [True, False, True], [False, False, True]):
        table, _ = laws.rows("key", np.array(needed), make)
    assert calls == [[0], [2]]
    assert table.tolist() == [[1.0, 10.0], [0.0, 0.0], [3.0, 30.0]]
    assert shared_laws(laws.shift, laws.sample_rate) is shared_laws(
        laws.shift.copy(), laws.sample_rate.copy()
    )


def test_tables_used_longest_ago_are_made_again_where_memory_is_short(monkeypatch):
    monkeypatch.setattr("indpriv._row_tables._MOST_BYTES", 100)
    laws, calls = SharedLaws(np.ones(4), np.full(4, 0.1)), []

    def make(missing):
        calls.append(len(missing))
        return (np.zeros((len(missing), 2)),)

    needed = np.ones(4, bool)
    for key in ("first", "second", "second", "first"):
        laws.rows(key, needed, make)
    assert calls == [4, 4, 4]
