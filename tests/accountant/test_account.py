import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant

import oracles
from indpriv import InputError, NormLog, account, membership_risk
from indpriv.accountant import Method, blocks
from indpriv.accountant.account import row_account
from indpriv.accountant.pairs import Pairs
from indpriv.accountant.steps import StepKinds
from indpriv.accountant.tight import Met
from indpriv.errors import PrivacyWarning

OPACUS_ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
CIFAR = {
    "total_steps": 3660,
    "noise_multiplier": 3.0,
    "max_grad_norm": 1.0,
    "sample_rate": 4096 / 50000,
}


def opacus_epsilon(settings, delta):
    """Opacus's own accountant, step by step."""
    accountant = RDPAccountant()
    for noise_multiplier, sample_rate in settings:
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return accountant.get_epsilon(delta, alphas=OPACUS_ORDERS)


def test_published_values():
    log = NormLog.from_arrays([[1.0]], [0], **CIFAR)
    assert account(log, delta=1e-5, orders=OPACUS_ORDERS).epsilon[0] == pytest.approx(
        8.88058, abs=5e-6
    )
    thirds = NormLog.from_arrays([[0.2], [0.5], [1.0]], [0, 1220, 2440], **CIFAR)
    assert account(thirds, delta=1e-5, orders=OPACUS_ORDERS).epsilon[0] == pytest.approx(
        5.39490, abs=5e-6
    )


def test_low_orders_alone_cannot_report_a_small_epsilon():
    log = NormLog.from_arrays([[0.01]], [0], **CIFAR)
    low, high = account(log, delta=1e-5, orders=OPACUS_ORDERS), account(log, delta=1e-5)
    assert low.epsilon[0] == pytest.approx(0.1115, abs=5e-5)
    assert low.details["order_at_boundary"][0]
    assert 0.0475 <= high.epsilon[0] < 0.0535  # the tight value is 0.0475
    assert not high.details["order_at_boundary"][0]


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_worst_case_equals_opacus():
    log = NormLog.from_arrays([[0.3]], [0], **CIFAR)
    theirs = opacus_epsilon([(3.0, 4096 / 50000)] * 3660, 1e-5)
    assert account(log, delta=1e-5, orders=OPACUS_ORDERS).worst_case_epsilon == pytest.approx(
        theirs, rel=1e-6
    )


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_worst_case_equals_opacus_under_scheduled_settings():
    rng = np.random.default_rng(1)
    noise, rate = rng.choice([0.8, 1.0, 1.7], 60), rng.choice([0.01, 0.02], 60)
    log = NormLog.from_arrays(
        [[0.3]],
        [0],
        total_steps=60,
        noise_multiplier=noise,
        sample_rate=rate,
        max_grad_norm=rng.uniform(0.5, 2, 60),
    )
    theirs = opacus_epsilon(sorted(zip(noise, rate, strict=True)), 1e-5)  # equal ones at once
    assert account(log, delta=1e-5, orders=OPACUS_ORDERS).worst_case_epsilon == pytest.approx(
        theirs, rel=1e-6
    )


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_equals_the_slow_reference(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    total_steps = data.draw(st.integers(1, 8))
    recorded = sorted(data.draw(st.sets(st.integers(0, total_steps - 1), min_size=1)))
    between_records = data.draw(st.sampled_from(["last", "closest", "worst_case"]))
    conversion = data.draw(st.sampled_from(["canonne2020", "mironov2017"]))
    norms = np.ceil(np.exp(rng.normal(-1, 1, (len(recorded), 3))) * 16) / 16
    noise, rate = rng.choice([0.7, 2.0], total_steps), rng.choice([0.05, 1.0], total_steps)
    orders = [1.5, 2.5, 4, 8, 16, 32]
    log = NormLog.from_arrays(
        norms,
        recorded,
        rounding=1 / 16,
        total_steps=total_steps,
        noise_multiplier=noise,
        sample_rate=rate,
        max_grad_norm=1.0,
    )
    table = account(
        log, delta=1e-6, orders=orders, between_records=between_records, conversion=conversion
    )
    relative = oracles.governing_norms(norms, recorded, total_steps, 1.0, between_records)
    for example in range(3):
        expected = oracles.rdp_epsilon(relative[:, example], noise, rate, 1e-6, orders, conversion)
        assert table.epsilon[example] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "conversion", ["canonne2020", pytest.param("mironov2017", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [
        (3.0, 0.082, 3660),
        (0.5, 1e-3, 100),
        (0.4, 1e-5, 10_000),
        (50.0, 0.5, 10),
        (0.3, 1.0, 3),
        (1.0, 1e-4, 10**7),
    ],
)
def test_default_orders_come_close_to_the_continuous_minimum(noise, rate, steps, conversion):
    """Including cliffs, where a grid with steps of 1 or 2 loses 1 to 5 percent."""
    norms = [[1.0, 0.6, 0.1]]
    log = NormLog.from_arrays(
        norms, [0], total_steps=steps, noise_multiplier=noise, sample_rate=rate, max_grad_norm=1.0
    )
    ours = account(log, delta=1e-5, conversion=conversion)
    centre = ours.details["best_order"]
    dense = np.unique(np.concatenate([1 + (c - 1) * np.geomspace(0.7, 1.4, 1001) for c in centre]))
    dense = account(log, delta=1e-5, conversion=conversion, orders=dense)
    assert np.all(ours.epsilon <= dense.epsilon * (1 + 2e-3))
    for example, order in enumerate(centre):  # and no lower than the order it names allows
        named = account(log, delta=1e-5, conversion=conversion, orders=[order])
        assert ours.epsilon[example] == pytest.approx(named.epsilon[example], rel=1e-9)


@pytest.mark.parametrize("rounding", [0.01, 0.0])
def test_zero_norm_costs_exactly_nothing_and_the_top_exactly_the_worst_case(rounding):
    rng = np.random.default_rng(0)
    rate = rng.uniform(0.01, 0.02, 20) if rounding else 0.015
    log = NormLog.from_arrays(
        [[0.0, 1.0, 7.0, 0.999999, 0.5]] * 3,
        [0, 5, 9],
        rounding=rounding,
        total_steps=20,
        max_grad_norm=1.0,
        noise_multiplier=rng.uniform(0.9, 1.1, 20),
        sample_rate=rate,
    )
    table = account(log, delta=1e-5)
    assert table.epsilon[0] == 0.0
    assert np.all(table.epsilon[1:3] == table.worst_case_epsilon)
    assert np.all(table.epsilon <= table.worst_case_epsilon)
    assert table.epsilon[4] < table.worst_case_epsilon
    assert np.all(table.epsilon_lower == 0)
    assert np.array_equal(table.epsilon_upper, table.epsilon)


def test_rounding_up_never_under_reports_and_nearest_does():
    rng = np.random.default_rng(3)
    norms = np.exp(rng.normal(-1.5, 0.8, 60)) * np.exp(rng.normal(0, 0.3, (40, 60)))
    recorded = np.arange(0, 3660, 92)[:40]
    epsilon = {
        (rounding, mode): account(
            NormLog.from_arrays(norms, recorded, rounding=rounding, rounding_mode=mode, **CIFAR),
            delta=1e-5,
        ).epsilon
        for rounding, mode in [(0.01, "up"), (0.01, "nearest"), (0.0, "up")]
    }
    truth = epsilon[0.0, "up"]
    assert np.all(epsilon[0.01, "up"] >= truth * (1 - 1e-5))
    assert np.max(epsilon[0.01, "up"] - truth) < 0.06
    assert np.mean(epsilon[0.01, "nearest"] < truth - 1e-5) > 0.2


def test_blocks_do_not_change_the_answer_and_progress_is_reported(monkeypatch):
    rng = np.random.default_rng(0)
    log = NormLog.from_arrays(rng.exponential(0.4, (5, 103)), [0, 1, 2, 30, 31], **CIFAR)
    whole = account(log, delta=1e-5)
    monkeypatch.setattr(blocks, "_READ_BYTES", 5 * 40)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 8 * 102 * 7)
    seen = []
    parted = account(log, delta=1e-5, progress=lambda done, total: seen.append((done, total)))
    np.testing.assert_allclose(
        whole.epsilon, parted.epsilon, rtol=1e-12
    )  # sums of other shapes round otherwise
    assert seen[-1] == (103, 103)
    assert len(seen) > 14
    method = Method(delta=1e-5)
    parts = list(row_account(log, method).blocks(ranges=[(10, 60)]))
    np.testing.assert_allclose(
        np.concatenate([part["epsilon"] for part in parts]), whole.epsilon[10:60], rtol=1e-12
    )


@pytest.mark.parametrize("rounding", [0.25, pytest.param(0.0, marks=pytest.mark.slow)])
def test_tight_epsilons_under_hundreds_of_sample_rates_are_near_those_of_every_step_for_itself(
    rounding,
):
    rng = np.random.default_rng(0)
    rate, norms = rng.uniform(0.06, 0.1, 400), rng.choice([0.25, 0.5, 0.75, 1.0], (10, 2))
    run = {"total_steps": 400, "noise_multiplier": 1.5, "max_grad_norm": 1.0, "sample_rate": rate}
    log = NormLog.from_arrays(norms, np.arange(10) * 40, rounding=rounding, **run)
    table = account(log, delta=1e-5, accountant="pld", brackets=True)
    for example in range(2):
        kinds = StepKinds(np.repeat(norms[:, example], 40) / 1.5, rate)
        pairs = Pairs(kinds, delta=1e-5, most_steps=400.0)
        own = Met.of(np.ones((1, 400)))
        exact = pairs.epsilons(own)
        assert pairs.lower_epsilons(own, exact)[0] <= table.epsilon[example]
        # Unrounded norms under hundreds of rates are snapped up twice
        assert table.epsilon[example] == pytest.approx(exact[0], rel=3e-3 if rounding else 1.1e-2)
    assert np.all(table.epsilon_lower <= table.epsilon)
    assert np.all(table.epsilon_lower > (0.95 if rounding else 0.94) * table.epsilon)


def test_preset_reproduces_the_paper():
    rng = np.random.default_rng(0)
    norms = rng.exponential(0.4, (5, 20))
    full, rounded, raised = (
        NormLog.from_arrays(norms, [0, 1, 2, 30, 31], rounding=r, rounding_mode=mode, **CIFAR)
        for r, mode in [(0, "up"), (0.01, "nearest"), (0.01, "up")]
    )
    table = account(full, delta=1e-5, preset="yu2023")
    assert np.array_equal(table.epsilon, account(rounded, delta=1e-5, preset="yu2023").epsilon)
    explicit = account(rounded, delta=1e-5, conversion="mironov2017", between_records="last")
    assert np.array_equal(table.epsilon, explicit.epsilon)
    assert (table.claim, table.account.conversion, table.account.rounding_mode) == (
        "estimate",
        "mironov2017",
        "nearest",
    )
    thinned = account(full.thin(2), delta=1e-5, preset="yu2023")
    assert np.array_equal(
        thinned.epsilon, account(rounded.thin(2), delta=1e-5, preset="yu2023").epsilon
    )
    with pytest.raises(InputError, match=r"record with rounding=0\.01"):
        account(raised, delta=1e-5, preset="yu2023")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": np.nan}, "delta"),
        ({"accountant": "prv"}, "accountant='prv'"),
        ({"conversion": "best"}, "conversion='best'"),
        ({"between_records": "next"}, "between_records='next'"),
        ({"preset": "yu2024"}, "preset='yu2024'"),
        ({"orders": [0.5]}, "orders"),
        ({"orders": []}, "orders"),
        ({"orders": "many"}, "orders"),
        ({"workers": 0}, "workers=0"),
    ],
)
def test_bad_arguments(arguments, match):
    log = NormLog.from_arrays([[0.3]], [0], **CIFAR)
    with pytest.raises(InputError, match=match):
        account(log, **{"delta": 1e-5, **arguments})


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_next_to_no_noise_is_refused(rate):
    log = NormLog.from_arrays(
        [[0.0, 0.3]],
        [0],
        total_steps=3,
        noise_multiplier=1e-200,
        max_grad_norm=1.0,
        sample_rate=rate,
    )
    with pytest.raises(InputError, match="noise_multiplier=1e-200 leaves no finite epsilon"):
        account(log, delta=1e-5)


def test_a_delta_of_one_over_n_is_warned_about():
    log = NormLog.from_arrays(np.full((1, 100), 0.3), [0], **CIFAR)
    with pytest.warns(PrivacyWarning, match="delta=0.01 is at least 1/n"):
        account(log, delta=0.01)


def test_each_warning_is_given_once_and_of_the_whole_log():
    """Comparisons account for a few of the examples, whose number is not n."""
    log = NormLog.from_arrays(np.full((2, 100), 0.3), [0, 1], unit_ids=[0] * 100, **CIFAR)
    for ask in (account, membership_risk):
        with pytest.warns(PrivacyWarning) as caught:
            ask(log, delta=0.01)
        said = [str(one.message) for one in caught]
        assert [text.split(",")[0] for text in said] == [
            'unit="example"',
            "delta=0.01 is at least 1/n = 0.01: it would allow publishing a random example in full; pass a delta well below 1/n",
        ]


def test_the_path_of_a_run_is_no_log():
    with pytest.raises(InputError, match=r"'runs/mine' is not a NormLog; .* NormLog.open\(RUN\)"):
        account("runs/mine", delta=1e-5)
