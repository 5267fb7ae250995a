"""Risk of a log: individual figures beside the worst case."""

import numpy as np
import pytest
from scipy.stats import norm

import oracles
from indpriv import InputError, NormLog, account
from indpriv.accountant import blocks, membership_risk
from indpriv.accountant.risk import worst_case_risk
from indpriv.analysis.guarantee import true_positive_bound
from indpriv.errors import PrivacyWarning

RUN = {"total_steps": 60, "noise_multiplier": 1.2, "max_grad_norm": 1.0, "sample_rate": 0.1}
FIGURES = ("advantage", "true_positive_rate", "delta", "mu")


def make_log(n_examples=6, **changes):
    rng = np.random.default_rng(0)
    norms = rng.exponential(0.5, (6, n_examples))
    norms[:, 0], norms[:, -1] = 0.0, 3.0
    return NormLog.from_arrays(norms, np.arange(6) * 10, **{**RUN, **changes})


@pytest.fixture(scope="module")
def table():
    return membership_risk(
        make_log(), delta=1e-5, false_positive_rate=[1e-3, 0.1], epsilon=[0.5, 2.0]
    )


def test_no_example_exceeds_the_worst_case_which_always_clipped_ones_reach(table):
    for name in FIGURES:
        individual, worst = getattr(table.individual, name), getattr(table.worst_case, name)
        assert np.all(individual <= worst)
        assert np.array_equal(individual[-1], worst[0])
    assert np.all(table.individual.advantage[:-1] < table.worst_case.advantage)


def test_an_example_without_gradient_takes_no_risk(table):
    assert table.individual.advantage[0] == 0
    assert table.individual.mu[0] == 0
    assert np.all(table.individual.delta[0] == 0)
    np.testing.assert_allclose(table.individual.true_positive_rate[0], [1e-3, 0.1], rtol=1e-13)


def test_delta_belongs_to_the_epsilon_that_the_tight_account_reports():
    log = make_log(1)
    epsilons = account(log, delta=1e-5, accountant="pld")
    worst = membership_risk(log, delta=1e-5, epsilon=epsilons.worst_case_epsilon).worst_case
    assert worst.delta[0, 0] == pytest.approx(1e-5, rel=1e-3)  # a bound of a bound


def test_figures_of_an_unsampled_run_are_those_of_its_gaussian():
    log = make_log(sample_rate=1.0, rounding=0)
    found = membership_risk(log, delta=1e-5, false_positive_rate=0.01, epsilon=1.0)
    mu = np.linalg.norm(np.repeat(np.minimum(log.read(), 1.0), 10, axis=0), axis=0) / 1.2
    rate = norm.cdf(norm.ppf(0.01) + mu)
    assert np.all(found.individual.true_positive_rate[:, 0] >= rate * (1 - 1e-9))
    assert np.all(found.individual.true_positive_rate[:, 0] <= rate * 1.01)
    delta = [oracles.one_step_delta(float(m), 1.0, 1.0, 1.0, "remove") if m else 0.0 for m in mu]
    assert np.all(found.individual.delta[:, 0] >= np.array(delta) * (1 - 1e-9))
    advantage = 2 * norm.cdf(mu / 2) - 1
    assert np.all(found.individual.advantage >= advantage * (1 - 1e-9))
    assert np.all(found.individual.advantage <= advantage * 1.01)
    assert np.all(found.individual.mu >= mu * (1 - 1e-9))
    assert np.all(found.individual.mu <= mu * 1.01)


@pytest.mark.slow  # epsilons of such norms are tested in test_account.py and test_steps.py
def test_figures_of_norms_that_are_not_rounded_are_near_those_of_finely_rounded_ones():
    options = {"delta": 1e-5, "false_positive_rate": 0.1, "epsilon": 0.5}
    fine = membership_risk(make_log(3, rounding=1e-4), **options).individual
    found = membership_risk(make_log(3, rounding=0), **options).individual
    for name in ("advantage", "true_positive_rate", "delta"):
        ratio = getattr(found, name)[1:] / getattr(fine, name)[1:]
        assert np.all((ratio >= 1 - 3e-4) & (ratio <= 1.05))  # both are rounded up


def test_the_frame_names_rates_and_carries_what_the_figures_mean(table):
    frame = table.to_frame()
    assert list(frame.columns) == [
        "example_id",
        "advantage",
        "true_positive_rate_at_0.001",
        "true_positive_rate_at_0.1",
        "delta_at_0.5",
        "delta_at_2",
        "mu",
    ]
    assert len(frame) == len(table) == 6
    assert frame.attrs["claim"] == table.claim == "estimate"
    assert (frame.attrs["null_hypothesis"], frame.attrs["account"]["neighbouring"]) == (
        "absent",
        "add_remove",
    )
    assert frame.attrs["worst_case"]["advantage"] == table.worst_case.advantage[0]
    assert "no" in frame.attrs["disclaimer"]


@pytest.mark.slow
def test_blocks_do_not_change_the_answer_and_progress_is_reported(table, monkeypatch):
    monkeypatch.setattr(blocks, "_READ_BYTES", 6 * 4)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 2 * 5000)
    seen = []
    parted = membership_risk(
        make_log(),
        delta=1e-5,
        false_positive_rate=0.1,
        epsilon=0.5,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(seen) > 2
    assert seen[-1] == (6, 6)
    columns = {"true_positive_rate": [1], "delta": [0]}  # of what the table has
    for name in FIGURES:
        whole = getattr(table.individual, name)
        whole = whole[:, columns[name]] if name in columns else whole
        np.testing.assert_allclose(getattr(parted.individual, name), whole, rtol=3e-6)
    part = membership_risk(make_log().part(3, 5), delta=1e-5).individual
    np.testing.assert_allclose(part.advantage, table.individual.advantage[3:5], rtol=3e-6)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"delta": 0.0}, "delta"),
        ({"false_positive_rate": 0.0}, "false_positive_rate"),
        ({"false_positive_rate": [0.1, np.nan]}, "false_positive_rate"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": np.inf}, "epsilon"),
        ({"epsilon": ["one"]}, "epsilon"),
        ({"epsilon": [[1.0]]}, "epsilon"),
        ({"between_records": "next"}, "between_records"),
        ({"workers": 0}, "workers"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(InputError, match=match):
        membership_risk(make_log(), **{"delta": 1e-5, **arguments})


@pytest.mark.parametrize("participation", ["secret", "known"])
def test_a_test_that_nearly_always_accuses_may_always_be_right(participation):
    """Curves are not read that far: the figure was that of a smaller false-positive rate."""
    rate = 1 - 1e-12
    found = membership_risk(
        make_log(3), delta=1e-5, false_positive_rate=rate, participation=participation
    )
    for risk in (found.individual, found.worst_case):
        assert np.all(risk.true_positive_rate >= rate)


def test_next_to_no_noise_is_refused_and_a_large_delta_warned_about():
    with pytest.raises(InputError, match="leaves no finite epsilon"):
        membership_risk(make_log(noise_multiplier=1e-200), delta=1e-5)
    with pytest.warns(PrivacyWarning, match="at least 1/n") as caught:
        membership_risk(make_log(), delta=0.2)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("changes", [{}, {"sample_rate": 1.0, "noise_multiplier": 8.0}])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_limit_of_an_account_is_above_the_curve_and_near_it(changes, accountant):
    log = make_log(**changes)
    table = account(log, delta=1e-5, accountant=accountant)
    limit = table.details["true_positive_limit"]
    curve = membership_risk(log, delta=1e-5).individual.true_positive_rate[:, 0]
    assert np.all(limit >= curve * (1 - 2e-3))
    assert np.all(limit <= 1.5 * curve)
    by_epsilon = [true_positive_bound(one, 1e-5, 0.01) for one in table.epsilon[1:]]
    assert np.all(limit[1:] < by_epsilon)
    assert limit[0] == 0.01  # an example without gradient


def test_the_limit_counts_all_rows_of_a_unit_and_is_the_curve_with_known_participation():
    run = {
        **RUN,
        "sample_rate": 1.0,
        "noise_multiplier": 4.0,
        "unit": "user",
        "unit_ids": ["a", "a", "b"],
    }
    log = NormLog.from_arrays(np.full((60, 3), 0.2), np.arange(60), **run)
    rates = norm.cdf(norm.ppf(0.01) + np.array([0.4, 0.2]) * np.sqrt(60) / 4)
    for accountant in ("rdp", "pld"):
        limit = account(log, delta=1e-5, accountant=accountant).details["true_positive_limit"]
        assert np.all((rates <= limit) & (limit <= 1.5 * rates))
    known = account(log, delta=1e-5, participation="known").details["true_positive_limit"]
    risk = membership_risk(log, delta=1e-5, participation="known").individual
    np.testing.assert_allclose(known, risk.true_positive_rate[:, 0], rtol=1e-9)


@pytest.mark.parametrize("noise", [0.6, 1.2, 5.0])
def test_the_worst_case_of_many_different_steps_lies_between_its_mildest_and_its_harshest(noise):
    """Also of more kinds of steps than curves were once read of."""
    rng, n = np.random.default_rng(0), 1500
    options = {"delta": 1e-5, "false_positive_rate": [1e-3, 0.1, 0.5]}
    moving = noise * rng.uniform(1, 1.1, n), rng.uniform(0.001, 0.0011, n)
    ends = [(moving[0].max(), moving[1].min()), moving, (moving[0].min(), moving[1].max())]
    mild, found, harsh = (
        worst_case_risk(
            make_log(total_steps=n, noise_multiplier=sigma, sample_rate=rate), **options
        )
        for sigma, rate in ends
    )
    for name in ("advantage", "true_positive_rate", "mu"):
        low, value, high = (getattr(one, name) for one in (mild, found, harsh))
        assert np.all((low <= value * (1 + 1e-9)) & (value <= high * (1 + 1e-3))), name


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [pytest.param(1.2, 1e-3, 1500, marks=pytest.mark.slow), (1.2, 0.1, 60)],
)
def test_true_positive_rates_are_those_of_the_best_point_of_the_curve(noise, rate, steps):
    """Before, the search passed it by where examples are rarely drawn: they were up to a third too large."""
    log = make_log(total_steps=steps, noise_multiplier=noise, sample_rate=rate)
    points, rates = np.geomspace(1e-3, 5, 60), np.array([1e-3, 0.01, 0.1])
    table = membership_risk(log, delta=1e-5, false_positive_rate=rates, epsilon=points)
    best = (table.worst_case.delta[0][:, None] + np.exp(points)[:, None] * rates).min(axis=0)
    assert np.all(table.worst_case.true_positive_rate[0] <= best * (1 + 1e-3))
