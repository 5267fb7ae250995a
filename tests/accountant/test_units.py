"""Units of several rows: the bound holds, costs little, and is exact where it should be."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld import privacy_loss_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from indpriv import NormLog, account, membership_risk
from indpriv.accountant import Method, cap_rows, compose
from indpriv.accountant.rdp import RdpAccountant, epsilon_offsets, renyi_divergences
from indpriv.accountant.units import UnitCells, row_numbers, unit_epsilon
from indpriv.errors import InputError, PrivacyWarning
from tests import oracles

DELTA = 1e-5
ORDERS = np.array([1.05, 1.5, 2.0, 3.7, 8.0, 20.0])
RUN = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.02}


def unit_log(norms, units, **changes):
    norms = np.atleast_2d(norms)
    run = {
        **RUN,
        "recorded_steps": np.arange(len(norms)),
        "total_steps": len(norms),
        "unit": "user",
        **changes,
    }
    return NormLog.from_arrays(norms, unit_ids=units, **run)


def cost(norms, order, *, largest_unit=0, **changes):
    """RDP of all steps of one unit at one order, among units of up to so many rows; a record at every step."""
    n_rows = np.shape(norms)[-1]
    log = unit_log(norms, np.zeros(n_rows), **changes)
    cells = UnitCells.of(log, "last", max(n_rows, largest_unit))
    counts = cells.counts(log.part(0, n_rows), np.array([0]))
    met = np.flatnonzero(counts.sum(axis=0))
    table = np.zeros((1, cells.laws.n_cells))
    table[0, met] = cells.laws.divergences_at(met, np.full(len(met), order))
    return (counts @ table.T)[0, 0]


def true_cost(norms, order, noise_multiplier=1.0, sample_rate=0.02):
    steps = np.minimum(np.atleast_2d(norms), 1.0)
    return sum(oracles.unit_divergence(row / noise_multiplier, sample_rate, order) for row in steps)


@pytest.mark.parametrize("k", [1, 2, 5, 17, 64])
@pytest.mark.parametrize(
    ("shift", "rate"), [(0.02, 0.3), (0.3, 0.01), (1.0, 0.001), (1.0, 0.5), (3.0, 0.05)]
)
def test_divergence_of_equal_rows(k, shift, rate):
    j = np.arange(k + 1)
    law = j * shift, stats.binom.pmf(j, k, rate)
    kept = law[1] > 0
    orders = ORDERS[ORDERS * k * shift < 400]
    truth = [oracles.log_moment_of_mixture(law[0][kept], law[1][kept], a) / (a - 1) for a in orders]
    found = renyi_divergences(np.array([shift]), np.array([rate]), orders, k)[0]
    np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-13)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6),
    st.sampled_from([0.003, 0.05, 0.4]),
    st.sampled_from(ORDERS),
)
@settings(max_examples=15, deadline=None)
def test_a_unit_never_costs_less_than_all_sets_of_its_rows(norms, rate, order):
    truth = true_cost(norms, order, sample_rate=rate)
    found = cost(norms, order, sample_rate=rate, rounding=0)
    assert found >= truth - 1e-9


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "median", "worst"),
    [(4.0, 0.1, 2000, 0.03, 0.1), (1.0, 0.01, 1000, 0.3, 0.5)],
)
def test_what_equal_rows_add_to_epsilon_beyond_all_sets_of_rows(sigma, rate, steps, median, worst):
    """Where sampling is rare and noise small, the bound is loose: the largest order it can use is lower."""
    rng = np.random.default_rng(3)
    orders = 1 + np.geomspace(0.05, 40, 30)
    excess = []
    for _ in range(8):
        norms = (
            np.ceil(np.minimum(rng.lognormal(-0.7, 0.6, int(rng.integers(2, 9))), 1) * 100) / 100
        )
        run = {
            "noise_multiplier": sigma,
            "sample_rate": rate,
            "recorded_steps": [0],
            "total_steps": steps,
        }
        found = account(
            unit_log(norms, np.zeros(len(norms)), **run), delta=DELTA, orders=orders
        ).epsilon[0]
        rdp = [steps * true_cost(norms, order, sigma, rate) for order in orders]
        excess.append(found / np.min(rdp + epsilon_offsets(orders, DELTA, "canonne2020")) - 1)
    assert min(excess) >= -1e-9
    assert np.median(excess) < median
    assert max(excess) < worst


@pytest.mark.parametrize("k", [2, 8, 64])
def test_equal_rows_cost_nothing_beyond_the_mixture(k):
    norms = np.full((2, k), 0.37)
    found = cost(norms, 4.0)
    j = np.arange(k + 1)
    truth = 2 * oracles.log_moment_of_mixture(j * 0.37, stats.binom.pmf(j, k, 0.02), 4.0) / 3
    assert found == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("k", [2, 7, 20, 64])
@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_dp_accounting_has_the_same_pair(k, sigma):
    """RDP of its mixture of Gaussians, from its own loss and laws: within 1e-4, never above ours by more than quadrature."""
    j = np.arange(k + 1)
    weights = stats.binom.pmf(j, k, 0.02)
    kept = weights > 0
    loss = privacy_loss_mechanism.MixtureGaussianPrivacyLoss(sigma, j[kept], weights[kept])
    x = np.arange(-(14 * sigma + 3 * k), 14 * sigma, sigma / 100)
    values = np.array([loss.privacy_loss(float(at)) for at in x])
    for order in (2.0, 3.0):
        log_moment = special.logsumexp(order * values - x**2 / (2 * sigma**2)) - np.log(
            np.sqrt(2 * np.pi) * 100
        )
        truth = log_moment / (order - 1)
        found = cost(np.ones(k), order, noise_multiplier=sigma)
        assert found == pytest.approx(truth, rel=1e-4)
        assert found >= truth * (1 - 1e-9)


@pytest.mark.parametrize("k", [3])
def test_epsilon_is_above_the_loss_distribution_of_the_mixture(k):
    j = np.arange(k + 1)
    mixture = pld.from_mixture_gaussian_mechanism(
        1.0, j.astype(float), stats.binom.pmf(j, k, 0.02), value_discretization_interval=1e-3
    )
    truth = mixture.self_compose(50).get_epsilon_for_delta(DELTA)
    table = account(unit_log(np.ones((50, k)), np.zeros(k)), delta=DELTA)
    assert truth <= table.epsilon[0] <= 1.5 * truth  # what RDP costs with so few steps
    assert table.epsilon[0] == pytest.approx(table.worst_case_epsilon, rel=1e-9)


def test_rate_q_with_the_full_sum_is_below_the_truth_for_losses_and_is_not_what_is_done():
    """Some row of k is sampled with probability 1 - (1 - q)^k: taking q for it halves delta where k = 2."""
    k, sigma, rate, delta = 2, 0.25, 0.01, 0.015
    exact = pld.from_mixture_gaussian_mechanism(
        sigma,
        np.array([0.0, 1.0, 2.0]),
        stats.binom.pmf(np.arange(3), k, rate),
        value_discretization_interval=1e-2,
    ).get_epsilon_for_delta(delta)
    wrong = pld.from_gaussian_mechanism(
        sigma, sensitivity=float(k), sampling_prob=rate, value_discretization_interval=1e-2
    ).get_epsilon_for_delta(delta)
    mine = account(
        unit_log(np.ones((1, k)), [0, 0], noise_multiplier=sigma, sample_rate=rate), delta=delta
    ).epsilon[0]
    assert wrong < 0.5 * exact
    assert mine >= exact


def test_removal_costs_at_least_what_addition_costs():
    rng = np.random.default_rng(0)
    for _ in range(60):
        shifts, rate = (
            rng.exponential(rng.choice([0.1, 1.0]), int(rng.integers(1, 7))),
            10 ** rng.uniform(-3, -0.1),
        )
        sums, weights = oracles.law_of_sum(shifts, rate)
        order = 1 + 10 ** rng.uniform(-2, 1)
        removal = oracles.log_moment_of_mixture(sums, weights, order)
        addition = oracles.log_moment_of_mixture(sums, weights, 1 - order)
        assert removal >= addition - 1e-10


def mixture_divergence(k, shift, rate, order):
    j = np.arange(k + 1)
    return oracles.log_moment_of_log_weights(j * shift, stats.binom.logpmf(j, k, rate), order) / (
        order - 1
    )


@pytest.mark.parametrize("k", [65, 101, 317, 530, 537])
@pytest.mark.parametrize(
    ("norm", "rate", "order"), [(0.02, 0.01, 8.0), (0.1, 0.01, 3.0), (0.5, 0.05, 1.2)]
)
def test_hundreds_of_rows_cost_the_mixture_or_a_little_more_where_their_number_has_no_cells(
    k, norm, rate, order
):
    truth = mixture_divergence(k, norm, rate, order)
    found = cost(np.full(k, norm), order, sample_rate=rate)
    among_larger = cost(np.full(k, norm), order, sample_rate=rate, largest_unit=999)
    assert found == pytest.approx(among_larger, rel=1e-9)
    most = 1e-9 if k in row_numbers(k) else 2e-3
    assert truth * (1 - 1e-9) <= found <= truth * (1 + most)


@given(
    st.integers(2, 300),
    st.sampled_from([0.003, 0.05, 0.4, 0.9]),
    st.floats(0.001, 0.5),
    st.sampled_from([1.05, 1.5, 2.5, 6.0]),
)
@settings(max_examples=15, deadline=None)
def test_the_divergence_of_equal_rows_is_convex_in_their_number(k, rate, shift, order):
    """What lets a step be shared between numbers of rows that lie apart."""
    found = [mixture_divergence(n, shift, rate, order) for n in (k - 1, k, k + 1)]
    assert found[0] + found[2] >= 2 * found[1] * (1 - 1e-9)


def test_more_rows_than_a_cell_holds_are_bounded_from_above():
    k = 1300
    truth = mixture_divergence(k, 0.02, 0.01, 3.0)
    at_once = renyi_divergences(
        np.array([k * 0.02]), np.array([1 - (1 - 0.01) ** k]), np.array([3.0])
    )[0, 0]
    found = cost(np.full(k, 0.02), 3.0, sample_rate=0.01)
    assert truth < found < 1.1 * truth < at_once


def test_divergences_are_computed_only_where_units_have_steps():
    """Else people with hundreds of rows would cost minutes at orders that none of them can use."""
    log = unit_log(np.full((1, 201), 0.3), [0] * 198 + [1, 1, 2])
    cells = UnitCells.of(log, "last", 198)
    counts = cells.counts(log.part(0, 201), np.array([0, 198, 200]))
    asked = []

    def counted(index, orders):
        asked.append((cells.laws.rows[index], orders))
        return cells.laws.divergences_at(index, orders)

    lazy = RdpAccountant(counted, Method(delta=DELTA), slow=2.0)
    found = lazy.epsilons(counts)
    n_rows, orders = (np.concatenate(part) for part in zip(*asked, strict=True))
    assert set(n_rows.tolist()) == {
        1,
        2,
        3,
        198,
    }  # 3: sums of norms are rounded up in their last place
    assert orders[n_rows == 198].max() < 10 < orders[n_rows == 1].max()
    everything = cells.laws.rows, np.arange(cells.laws.n_cells)
    each = 1 + np.geomspace(1e-2, 1e2, 4000)
    for unit, k in enumerate((198, 2, 1)):
        cell = everything[1][(everything[0] == k) & np.isclose(cells.laws.shift, 0.3)]
        rdp = cells.laws.divergences_at(np.repeat(cell, 4000), each)
        least = (rdp + epsilon_offsets(each, DELTA, "canonne2020")).min()
        assert found["epsilon"][unit] == pytest.approx(least, rel=1e-3)


def test_one_row_is_the_example_itself():
    rng = np.random.default_rng(1)
    norms = rng.lognormal(-1, 1, (5, 6))
    run = {"recorded_steps": [0, 3, 6, 9, 12], "total_steps": 20, **RUN}
    examples = account(NormLog.from_arrays(norms, **run), delta=DELTA)
    alone = account(
        NormLog.from_arrays(norms, unit="user", unit_ids=list("fedcba"), **run), delta=DELTA
    )
    np.testing.assert_array_equal(alone.epsilon, examples.epsilon)
    assert alone.example_ids.tolist() == list("fedcba")
    mixed = account(
        NormLog.from_arrays(norms, unit="user", unit_ids=["a", "b", "a", "c", "d", "a"], **run),
        delta=DELTA,
    )
    assert mixed.example_ids.tolist() == ["a", "b", "c", "d"]
    np.testing.assert_array_equal(mixed.epsilon[1:], examples.epsilon[[1, 3, 4]])
    assert mixed.epsilon[0] > examples.epsilon[[0, 2, 5]].max()
    assert mixed.details["n_rows"].tolist() == [3, 1, 1, 1]
    assert mixed.details["unit_worst_case"][1] == examples.worst_case_epsilon
    assert (
        mixed.worst_case_epsilon
        == mixed.details["unit_worst_case"][0]
        > examples.worst_case_epsilon
    )


def test_more_rows_and_larger_norms_never_cost_less():
    rng = np.random.default_rng(2)
    norms = rng.lognormal(-1, 1, (4, 7))
    units = np.zeros(7)
    all_rows = account(unit_log(norms, units), delta=DELTA).epsilon[0]
    assert account(unit_log(norms[:, :6], units[:6]), delta=DELTA).epsilon[0] <= all_rows
    assert account(unit_log(norms * 1.3, units), delta=DELTA).epsilon[0] >= all_rows
    assert all_rows <= account(unit_log(norms, units), delta=DELTA).worst_case_epsilon


@pytest.mark.parametrize("between_records", ["last", "closest", "worst_case"])
@pytest.mark.parametrize("rounding", [0, 0.01, 0.07])
def test_settings_that_move(between_records, rounding):
    rng = np.random.default_rng(5)
    total, recorded = 9, np.array([1, 3, 7])
    norms = rng.lognormal(-1, 1, (3, 5))
    run = {
        "noise_multiplier": np.linspace(0.8, 1.4, total),
        "max_grad_norm": np.linspace(1.0, 0.7, total),
        "sample_rate": np.where(np.arange(total) < 4, 0.02, 0.05),
    }
    units = [0, 1, 0, 1, 0]
    log = NormLog.from_arrays(
        norms, recorded, total_steps=total, unit="user", unit_ids=units, rounding=rounding, **run
    )
    table = account(
        log, delta=1e-12, orders=[4.0], conversion="mironov2017", between_records=between_records
    )
    relative = oracles.governing_norms(
        norms, recorded, total, run["max_grad_norm"], between_records
    )
    for unit in (0, 1):
        truth = sum(
            oracles.unit_divergence(
                relative[t][np.array(units) == unit] / run["noise_multiplier"][t], q, 4.0
            )
            for t, q in enumerate(run["sample_rate"])
        )
        found = table.epsilon[unit] - epsilon_offsets(np.array([4.0]), 1e-12, "mironov2017")[0]
        assert truth - 1e-9 <= found <= truth * (1.3 if rounding < 0.05 else 1.6)


def test_very_many_sample_rates_are_rounded_up():
    rng = np.random.default_rng(6)
    rates = rng.uniform(0.01, 0.03, 60)
    norms = rng.uniform(0.2, 1.0, (60, 2))
    truth = sum(oracles.unit_divergence(row, q, 3.0) for row, q in zip(norms, rates, strict=True))
    found = cost(norms, 3.0, sample_rate=rates, rounding=0)
    assert truth <= found <= 1.3 * truth


def test_people_in_a_run_of_many_settings_have_at_least_what_its_halves_cost_together():
    rng = np.random.default_rng(0)
    norms, units = rng.gamma(1.5, 0.4, (20, 120)), np.sort(rng.integers(0, 40, 120))
    steps, rates = np.arange(0, 200, 10), np.repeat(np.linspace(0.01, 0.02, 40), 5)
    noise = np.repeat([1.0, 1.1], 100)
    halves = [
        unit_log(
            norms[steps // 100 == half],
            units,
            recorded_steps=steps[:10],
            total_steps=100,
            noise_multiplier=noise[100 * half],
            sample_rate=rates[100 * half :][:100],
        )
        for half in range(2)
    ]
    settings = {"noise_multiplier": noise, "sample_rate": rates}
    log = unit_log(norms, units, recorded_steps=steps, total_steps=200, **settings)
    together = compose(halves, delta=DELTA, by="unit_id").epsilon
    above = account(log, delta=DELTA).epsilon / together - 1
    assert -1e-9 < above.min() < above.max() < 1e-2  # rates are rounded up


def test_rows_of_one_unit_may_lie_anywhere_and_blocks_do_not_matter(monkeypatch):
    rng = np.random.default_rng(7)
    norms, units = rng.lognormal(-1, 1, (6, 60)), rng.integers(0, 12, 60)
    table = account(unit_log(norms, units), delta=DELTA)
    order = np.argsort(units, kind="stable")
    sorted_table = account(unit_log(norms[:, order], units[order]), delta=DELTA)
    by_id = dict(zip(sorted_table.example_ids.tolist(), sorted_table.epsilon.tolist(), strict=True))
    np.testing.assert_allclose(
        table.epsilon, [by_id[unit] for unit in table.example_ids.tolist()], rtol=1e-12
    )
    monkeypatch.setattr("indpriv.accountant.blocks._MOST_ROWS", 7)
    np.testing.assert_allclose(
        account(unit_log(norms, units), delta=DELTA).epsilon, table.epsilon, rtol=1e-5
    )


def test_rows_that_share_people_are_warned_about():
    log = NormLog.from_arrays([[0.3, 0.4]], [0], total_steps=3, unit_ids=["a", "a"], **RUN)
    with pytest.warns(PrivacyWarning, match='rows belong to 1 units.*declare unit="user"') as said:
        table = account(log, delta=DELTA)
    assert said[0].filename == __file__  # not a line of contextlib, where it would be said once
    assert table.account.unit == "example"


def test_what_cannot_take_several_rows_together_refuses_them():
    log = unit_log([[0.3, 0.4]], ["a", "a"])
    with pytest.raises(InputError, match=r"only indpriv\.account takes several rows of one user"):
        membership_risk(log, delta=DELTA)


def test_units_that_are_not_known_are_refused():
    with pytest.raises(InputError, match="unit_ids lacks a value for 1 of 2 rows"):
        unit_log([[0.3, 0.4]], np.array(["a", None], dtype=object))


def test_more_rows_than_the_noise_can_cover_are_refused():
    log = unit_log(np.full((1, 4), 0.3), np.zeros(4), noise_multiplier=1e-160)
    with pytest.raises(InputError, match="no finite epsilon"):
        account(log, delta=DELTA)


def test_the_table_says_what_its_rows_are():
    table = account(unit_log([[0.3, 0.4, 0.5]], ["a", "b", "a"]), delta=DELTA)
    frame = table.to_frame()
    assert frame["unit_id"].tolist() == ["a", "b"]
    assert "example_id" not in frame
    assert table.account.rows_per_unit == 2
    assert "one user of at most 2 rows" in table.account.describe()
    again = type(table).of_rows(frame).table()
    assert again.example_ids.tolist() == ["a", "b"]
    assert again.details["n_rows"].tolist() == [2, 1]
    np.testing.assert_array_equal(again.at_worst_case, table.at_worst_case)


def test_what_a_cap_on_rows_costs_and_buys():
    log = unit_log(np.full((2, 9), 0.3), list("aaaaabbbc"))
    method = Method(delta=DELTA)
    one, three, ten = cap_rows(log, method, [1, 3, 10]).itertuples()
    assert [(cap.rows_kept, cap.rows_dropped, cap.units_affected) for cap in (one, three, ten)] == [
        (3, 6, 2),
        (7, 2, 1),
        (9, 0, 0),
    ]
    table = account(log, delta=DELTA)
    assert (
        one.worst_case_epsilon
        < three.worst_case_epsilon
        < ten.worst_case_epsilon
        == table.worst_case_epsilon
    )
    assert three.worst_case_epsilon == table.details["unit_worst_case"][1]
    with pytest.raises(InputError, match="no units to cap"):
        cap_rows(NormLog.from_arrays([[0.3]], [0], total_steps=1, **RUN), method, [1])


def test_rows_that_share_a_coin_have_no_account_with_secret_participation():
    clients = unit_log([0.5, 0.5, 0.2, 0.2], ["a", "a", "b", "b"], sampler="by_client")
    for use in (
        lambda: account(clients, delta=DELTA),
        lambda: cap_rows(clients, Method(delta=DELTA), [1]),
    ):
        with pytest.raises(InputError, match="share one coin"):
            use()


def test_a_cap_on_rows_is_of_secret_poisson_samples():
    people = unit_log([0.5, 0.5, 0.2], ["a", "a", "b"])
    for method, message in (
        (Method(delta=DELTA, participation="known"), "of secret participation"),
        (Method(delta=DELTA, neighbouring="replace_one"), "added or removed example"),
    ):
        with pytest.raises(InputError, match=message):
            cap_rows(people, method, [1])


def test_delta_is_compared_with_the_number_of_people():
    people = unit_log(np.full(6, 0.5), ["a", "a", "b", "b", "c", "c"])
    with pytest.warns(PrivacyWarning, match="at least 1/n = 0.333333"):
        account(people, delta=0.34)


def test_rare_sums_of_many_rows_are_not_bounded_by_renyi_divergences_alone():
    """Rows that are rarely sampled and cost much: a line at the best Rényi order shows nothing."""
    n_rows, shift, rate, steps, delta = 28, 0.9129, 1e-4, 236, 1e-12
    number = np.arange(n_rows + 1)
    law = stats.binom.pmf(number, n_rows, rate)
    step = pld.from_mixture_gaussian_mechanism(
        1 / shift, number[law > 0], law[law > 0], value_discretization_interval=1e-3,
        log_mass_truncation_bound=-90,
    )  # fmt: skip
    theirs = step.self_compose(steps).get_epsilon_for_delta(delta)  # 0.1 % too small at this width
    ours = unit_epsilon(np.full((1, n_rows), shift), np.array([rate]), np.array([236.0]), delta)
    assert theirs <= ours <= theirs * 1.01
