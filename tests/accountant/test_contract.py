"""What every accountant must satisfy, however it computes."""

import itertools

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from indpriv import NormLog, account
from indpriv.norm_log.fields import ACCOUNT_WORDS

DELTA = 1e-5
ORDERS = np.concatenate([np.arange(1.1, 11, 0.3), [12, 16, 24, 32, 48, 64, 128, 256, 1024]])
SLACK = 1e-9  # relative; below it values may differ by rounding

pytestmark = pytest.mark.parametrize("accountant", ACCOUNT_WORDS["accountant"])


def audit(log, accountant, between_records="last", delta=DELTA):
    """The account with fixed orders: the search for the best order is exact to 1e-5 only."""
    return account(
        log, delta=delta, accountant=accountant, between_records=between_records, orders=ORDERS
    )


def never_above(smaller, larger):
    """Whether an example's epsilon in one account can be at most that in the other, given the brackets."""
    return np.all(smaller.epsilon_lower <= larger.epsilon_upper * (1 + SLACK)) and np.all(
        smaller.epsilon
        <= larger.epsilon * (1 + SLACK)
        + (smaller.epsilon_upper - smaller.epsilon_lower) * (smaller.account.accountant != "rdp")
    )


def make_log(norms, recorded_steps, total_steps, **changes):
    arguments = {
        "noise_multiplier": 1.2,
        "max_grad_norm": 1.0,
        "sample_rate": 0.2,
        "rounding": 0.05,
        **changes,
    }
    return NormLog.from_arrays(norms, recorded_steps, total_steps=total_steps, **arguments)


@st.composite
def runs(draw, n_examples=3):
    """Norms, recorded steps, total steps and realised settings of a small run."""
    total_steps = draw(st.integers(1, 12))
    recorded = np.array(
        sorted(draw(st.sets(st.integers(0, total_steps - 1), min_size=1, max_size=5)))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    norms = np.exp(rng.normal(-0.7, 1.0, (len(recorded), n_examples)))
    scheduled = draw(st.booleans())
    noise = (
        rng.choice([0.8, 1.5], total_steps) if scheduled else draw(st.sampled_from([0.7, 1.0, 4.0]))
    )
    rate = (
        rng.choice([0.05, 0.3], total_steps)
        if scheduled
        else draw(st.sampled_from([0.01, 0.2, 1.0]))
    )
    changes = {
        "noise_multiplier": noise,
        "sample_rate": rate,
        "rounding": draw(st.sampled_from([0.0, 0.05])),
    }
    return norms, recorded, total_steps, changes


def fitted(run, accountant):
    """The run, with rounding for the tight accountant: without, it takes seconds, and a test of its own."""
    norms, recorded, total_steps, changes = run
    return (
        norms.copy(),
        recorded,
        total_steps,
        changes if accountant == "rdp" else {**changes, "rounding": 0.05},
    )


def is_sound(table):
    columns = [table.epsilon_lower, table.epsilon, table.epsilon_upper]
    assert all(np.all(np.isfinite(column)) for column in columns)
    assert np.all(table.epsilon_lower >= 0)
    assert np.all(table.epsilon_lower <= table.epsilon)
    assert np.all(table.epsilon <= table.epsilon_upper)
    assert np.all(table.epsilon_upper <= table.worst_case_epsilon)


@settings(max_examples=6, deadline=None)
@given(
    run=runs(), between_records=st.sampled_from(ACCOUNT_WORDS["between_records"]), data=st.data()
)
def test_monotone_in_every_norm(accountant, run, between_records, data):
    norms, recorded, total_steps, changes = fitted(run, accountant)
    log = make_log(norms, recorded, total_steps, **changes)
    row = data.draw(st.integers(0, len(norms) - 1))
    raised = norms.copy()
    raised[row] *= data.draw(st.floats(1.0, 4.0))
    before = audit(log, accountant, between_records)
    after = audit(make_log(raised, recorded, total_steps, **changes), accountant, between_records)
    is_sound(before)
    is_sound(after)
    assert never_above(before, after)


@settings(max_examples=3, deadline=None)
@given(run=runs(), data=st.data())
def test_examples_may_be_permuted_and_taken_apart(accountant, run, data):
    norms, recorded, total_steps, changes = fitted(run, accountant)
    whole = audit(make_log(norms, recorded, total_steps, **changes), accountant, "closest")
    assert whole.account is not None
    within = max(1e-6, whole.account.tolerance)
    order = np.array(data.draw(st.permutations(range(3))))
    permuted = audit(
        make_log(norms[:, order], recorded, total_steps, **changes), accountant, "closest"
    )
    np.testing.assert_allclose(permuted.epsilon, whole.epsilon[order], rtol=within)
    parts = [
        audit(
            make_log(norms[:, part], recorded, total_steps, **changes), accountant, "closest"
        ).epsilon
        for part in (slice(0, 1), slice(1, 3))
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole.epsilon, rtol=within)


def test_records_of_equal_settings_may_be_permuted(accountant):
    norms = np.random.default_rng(0).exponential(0.4, (6, 4))
    one = audit(make_log(norms, np.arange(6) * 5, 30), accountant)
    other = audit(make_log(norms[::-1], np.arange(6) * 5, 30), accountant)
    np.testing.assert_allclose(other.epsilon, one.epsilon, rtol=SLACK)


@pytest.mark.parametrize("n_steps", [1, 2, 7, 60])
def test_n_compositions_are_the_count_n(accountant, n_steps):
    norms = np.array([[0.05, 0.5, 1.0]])
    held = audit(make_log(norms, [0], n_steps), accountant)
    repeated = audit(
        make_log(np.repeat(norms, n_steps, axis=0), np.arange(n_steps), n_steps), accountant
    )
    np.testing.assert_allclose(repeated.epsilon, held.epsilon, rtol=SLACK)


@settings(max_examples=6, deadline=None)
@given(run=runs(), between_records=st.sampled_from(ACCOUNT_WORDS["between_records"]))
def test_always_clipped_is_the_worst_case_and_never_touched_is_free(
    accountant, run, between_records
):
    norms, recorded, total_steps, changes = fitted(run, accountant)
    norms[:, 0], norms[:, 1] = 1.5, 0.0
    table = audit(make_log(norms, recorded, total_steps, **changes), accountant, between_records)
    assert table.epsilon[0] == table.worst_case_epsilon
    assert np.all(table.epsilon <= table.worst_case_epsilon)
    if between_records != "worst_case" and recorded[0] == 0:
        assert table.epsilon[1] == 0


@settings(max_examples=20, deadline=None)
@given(
    norms=st.lists(st.floats(0.0, 1.5), min_size=1, max_size=6),
    noise=st.floats(0.4, 8.0),
    delta=st.sampled_from([1e-3, 1e-5, 1e-9]),
)
def test_full_batches_are_the_exact_gaussian(accountant, norms, noise, delta):
    levels = np.minimum(np.ceil(np.array(norms) * 16) / 16, 1.0)
    log = make_log(
        levels[:, None],
        np.arange(len(norms)),
        len(norms),
        noise_multiplier=noise,
        sample_rate=1.0,
        rounding=1 / 16,
    )
    truth = oracles.gaussian_epsilon(float(np.linalg.norm(levels)) / noise, delta)
    table = audit(log, accountant, delta=delta)
    assert table.epsilon_upper[0] >= truth * (1 - SLACK)
    assert table.epsilon_lower[0] <= truth * (1 + SLACK)
    if accountant == "pld":
        assert table.epsilon[0] == pytest.approx(truth, rel=1e-6, abs=1e-12)


@settings(max_examples=6, deadline=None)
@given(run=runs(), data=st.data())
def test_another_record_never_raises_epsilon_when_the_rest_counts_at_the_clipping_norm(
    accountant, run, data
):
    norms, recorded, total_steps, changes = fitted(run, accountant)
    unrecorded = sorted(set(range(total_steps)) - set(recorded.tolist()))
    if not unrecorded:
        return
    extra = data.draw(st.sampled_from(unrecorded))
    position = int(np.searchsorted(recorded, extra))
    more = np.insert(norms, position, np.array([0.1, 0.7, 3.0]), axis=0)
    before = audit(make_log(norms, recorded, total_steps, **changes), accountant, "worst_case")
    log = make_log(more, np.insert(recorded, position, extra), total_steps, **changes)
    assert never_above(audit(log, accountant, "worst_case"), before)


def test_a_larger_delta_never_raises_epsilon(accountant):
    log = make_log([[0.1, 0.5, 1.0]], [0], 40)
    tables = [audit(log, accountant, delta=delta) for delta in (1e-9, 1e-7, 1e-5, 1e-3)]
    assert all(never_above(later, earlier) for earlier, later in itertools.pairwise(tables))


@pytest.mark.parametrize(
    ("steps", "rate", "noise", "norm"),
    [(60, 0.1, 1.0, 1.0), (200, 0.05, 1.5, 0.5), (5, 0.3, 0.8, 1.0)],
)
def test_dp_accounting_agrees(accountant, steps, rate, noise, norm):
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise / norm))
    event = dp_accounting.SelfComposedDpEvent(step, steps)
    tight = PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(DELTA)
    whole = np.arange(
        2, 65
    )  # it drops some fractional orders, in which its series does not converge
    rdp = RdpAccountant(whole.tolist()).compose(event).get_epsilon(DELTA)
    log = make_log([[norm]], [0], steps, noise_multiplier=noise, sample_rate=rate)
    table = account(log, delta=DELTA, accountant=accountant, orders=whole)
    assert table.epsilon_upper[0] >= tight * (1 - 1e-3)  # its own discretisation error
    assert table.epsilon_lower[0] <= tight
    if accountant == "rdp":
        assert table.epsilon[0] == pytest.approx(rdp, rel=1e-6)
    else:
        assert table.epsilon[0] == pytest.approx(tight, rel=1e-3)
        assert table.epsilon_upper[0] <= rdp * (1 + SLACK)


def test_norms_without_rounding_lie_between_the_levels_below_and_above(accountant):
    norms = np.array([[0.03, 0.41, 0.99], [0.26, 0.43, 1.2]])
    unrounded = audit(make_log(norms, [0, 5], 20, rounding=0), accountant)
    above = audit(make_log(np.ceil(norms * 100) / 100, [0, 5], 20, rounding=0.01), accountant)
    below = audit(make_log(np.floor(norms * 100) / 100, [0, 5], 20, rounding=0.01), accountant)
    assert np.all(below.epsilon_lower <= unrounded.epsilon_upper)
    assert np.all(unrounded.epsilon_lower <= above.epsilon_upper)
    assert np.all(unrounded.epsilon <= above.epsilon * 1.01)
    assert np.all(unrounded.epsilon >= below.epsilon * (1 - SLACK))
    assert np.all(unrounded.epsilon <= below.epsilon * 1.06)
