import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from indpriv import NormLog, account
from indpriv.accountant import steps as steps_module
from indpriv.accountant.rdp import epsilon_offsets, renyi_divergences
from indpriv.accountant.steps import StepKinds, Steps, condensed
from indpriv.norm_log.fields import ACCOUNT_WORDS

ORDERS = np.array([1.5, 3.0, 8.0, 40.0])


def whole(log):
    return log.part(0, log.n_examples)


def by_law(steps):
    """(n_examples, n_laws) steps of all examples with each law."""
    return (steps.counts(whole(steps.norms.log)) @ steps.laws.steps).toarray()


def lay_out(log, between_records, *, many=False, down=False):
    """How the steps of a log are counted; `many`: as if its settings were too many for their own laws."""
    with pytest.MonkeyPatch.context() as patch:
        if many:
            for limit in ("_MOST_EXACT", "MOST_DENSE", "_FEW_SHIFTS", "_FEW_RATES"):
                patch.setattr(steps_module, limit, 0)
        steps = Steps.of(log, between_records, down=down)
    assert not (many and steps.exact)
    return steps


def rdp_of(steps):
    """RDP of the examples, by the counts; the other ways to the same number must agree."""
    log = steps.norms.log
    table, counts = steps.laws.per_count(ORDERS), steps.counts(whole(log))
    totals = counts @ table.T
    met = by_law(steps)
    np.testing.assert_array_equal(met, np.round(met))
    np.testing.assert_array_equal(met.sum(axis=1), log.total_steps)
    np.testing.assert_allclose(met @ steps.laws.divergences(ORDERS).T, totals, rtol=1e-12)
    assert np.all(steps.laws.shift <= steps.clipped * (1 + 1e-12))
    return totals


def rdp_of_trajectory(relative, noise, rate):
    """Sum over steps, one step and example at a time."""
    total = np.zeros((relative.shape[1], len(ORDERS)))
    for step, norms in enumerate(relative):
        total += renyi_divergences(norms / noise[step], np.full(len(norms), rate[step]), ORDERS)
    return total


def draw_run(data, *, varying_norm):
    total_steps = data.draw(st.integers(1, 16))
    recorded = sorted(data.draw(st.sets(st.integers(0, total_steps - 1), min_size=1)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    norms = np.exp(rng.normal(-0.5, 1.0, (len(recorded), 4)))
    clip = rng.choice([0.7, 1.0, 1.3], total_steps) if varying_norm else np.full(total_steps, 0.5)
    noise = rng.choice([0.6, 1.0, 2.5], total_steps)
    rate = rng.choice([0.02, 0.3, 1.0], total_steps)
    return (
        norms,
        np.array(recorded),
        {
            "total_steps": total_steps,
            "noise_multiplier": noise,
            "max_grad_norm": clip,
            "sample_rate": rate,
        },
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data(), between_records=st.sampled_from(ACCOUNT_WORDS["between_records"]))
def test_levels_under_few_settings_equal_the_step_by_step_sum(data, between_records):
    norms, recorded, run = draw_run(data, varying_norm=False)
    norms = np.ceil(norms * 32) / 32  # already on the levels: rounding changes nothing
    log = NormLog.from_arrays(norms, recorded, rounding=1 / 16, **run)
    steps = lay_out(log, between_records)
    relative = oracles.governing_norms(
        norms, recorded, run["total_steps"], run["max_grad_norm"], between_records
    )
    expected = rdp_of_trajectory(relative, run["noise_multiplier"], run["sample_rate"])
    np.testing.assert_allclose(rdp_of(steps), expected, rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), between_records=st.sampled_from(ACCOUNT_WORDS["between_records"]))
def test_a_moving_clipping_norm_never_lowers_a_contribution(data, between_records):
    norms, recorded, run = draw_run(data, varying_norm=True)
    log = NormLog.from_arrays(norms, recorded, rounding=0.1, **run)
    relative = oracles.governing_norms(
        norms, recorded, run["total_steps"], run["max_grad_norm"], between_records
    )
    truth = rdp_of_trajectory(relative, run["noise_multiplier"], run["sample_rate"])
    assert np.all(rdp_of(lay_out(log, between_records)) >= truth * (1 - 1e-9))


def test_code_of_a_moving_clipping_norm_by_hand():
    log = NormLog.from_arrays(
        [[0.30, 1.0, 1.7]],
        [0],
        rounding=0.1,
        total_steps=3,
        noise_multiplier=1.0,
        sample_rate=0.1,
        max_grad_norm=np.array([1.0, 2.0, 0.5]),
    )
    steps = lay_out(log, "last")
    met = [dict(zip(steps.laws.shift[row > 0], row[row > 0], strict=True)) for row in by_law(steps)]
    assert met[0] == {0.30000000000000004: 1, 0.15000000000000002: 1, 0.6000000000000001: 1}
    assert met[1] == {1.0: 2, 0.5: 1}  # at max_grad_norm but not clipped: half of the doubled one
    assert met[2] == {1.0: 3}  # clipped, so that its true norm is unknown: counts as 1


@settings(max_examples=12, deadline=None)
@given(data=st.data(), between_records=st.sampled_from(ACCOUNT_WORDS["between_records"]))
def test_norms_without_rounding_are_slightly_above_the_step_by_step_sum(data, between_records):
    norms, recorded, run = draw_run(data, varying_norm=True)
    log = NormLog.from_arrays(norms, recorded, rounding=0, **run)
    relative = oracles.governing_norms(
        norms, recorded, run["total_steps"], run["max_grad_norm"], between_records
    )
    truth = rdp_of_trajectory(relative, run["noise_multiplier"], run["sample_rate"])
    ours = rdp_of(lay_out(log, between_records))
    assert np.all(ours >= truth * (1 - 1e-9))
    assert np.all(ours[:, ORDERS <= 3] <= truth[:, ORDERS <= 3] * (1 + 5e-3))


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    between_records=st.sampled_from(ACCOUNT_WORDS["between_records"]),
    varying_norm=st.booleans(),
)
def test_snapped_laws_enclose_the_exact_ones(data, between_records, varying_norm):
    norms, recorded, run = draw_run(data, varying_norm=varying_norm)
    log = NormLog.from_arrays(norms, recorded, rounding=0.05, **run)
    exact = rdp_of(lay_out(log, between_records))
    up, down = (
        rdp_of(lay_out(log, between_records, many=True, down=down)) for down in (False, True)
    )
    assert np.all((down <= exact * (1 + 1e-12)) & (exact <= up * (1 + 1e-12)))
    low = ORDERS <= 3
    assert np.all(up[:, low] <= exact[:, low] * (1 + 1e-2))
    assert np.all(exact[:, low] <= down[:, low] * (1 + 1e-2))


@pytest.mark.parametrize("rounding", [0.0, 0.05])
@pytest.mark.parametrize("n_rates", [3, 60])
def test_laws_snapped_up_and_down_enclose_the_run(rounding, n_rates):
    rng = np.random.default_rng(0)
    norms, recorded = rng.exponential(0.4, (10, 6)), np.arange(10) * 12
    norms = np.ceil(norms * 20) / 20 if rounding else norms
    rate, noise = np.resize(rng.uniform(0.01, 0.02, n_rates), 120), rng.uniform(0.9, 1.1, 120)
    run = {"total_steps": 120, "noise_multiplier": noise, "max_grad_norm": 1.0, "sample_rate": rate}
    log = NormLog.from_arrays(norms, recorded, rounding=rounding, **run)
    up, down = (rdp_of(lay_out(log, "last", down=down)) for down in (False, True))
    relative = oracles.governing_norms(norms, recorded, 120, 1.0, "last")
    truth = rdp_of_trajectory(relative, noise, rate)
    assert np.all((down <= truth * (1 + 1e-9)) & (truth <= up * (1 + 1e-9)))
    low = ORDERS <= 3
    assert np.all(up[:, low] <= down[:, low] * (1 + 1.2e-2))


@pytest.mark.parametrize(
    ("varying", "rounding", "excess"),
    [
        pytest.param("noise_multiplier", 0.0, 2e-3, marks=pytest.mark.slow),
        ("noise_multiplier", 0.01, 2e-3),
        # As many norms as rates: both are snapped more coarsely.
        pytest.param("sample_rate", 0.0, 1.5e-2, marks=pytest.mark.slow),
        ("sample_rate", 0.01, 2e-3),
        pytest.param("max_grad_norm", 0.0, 2e-3, marks=pytest.mark.slow),
        ("max_grad_norm", 0.01, 2e-3),
    ],
)
def test_snapping_raises_epsilon_by_little(varying, rounding, excess):
    rng = np.random.default_rng(0)
    norms, recorded = rng.exponential(0.4, (30, 4)) * rng.uniform(0.1, 2, 4), np.arange(30) * 50
    norms = np.ceil(norms * 100) / 100 if rounding and varying != "max_grad_norm" else norms
    run = {"noise_multiplier": 0.9, "max_grad_norm": 1.0, "sample_rate": 0.015}
    spread = np.geomspace(0.7, 1.4, 1500)
    run[varying] = spread * run[varying]
    log = NormLog.from_arrays(norms, recorded, rounding=rounding, total_steps=1500, **run)
    columns = {name: np.broadcast_to(value, 1500) for name, value in run.items()}
    clip = columns["max_grad_norm"]
    if rounding:  # of each record, to fractions of its own max_grad_norm
        norms = np.ceil(norms / clip[recorded, None] * 100 - 1e-9) / 100 * clip[recorded, None]
        norms[norms > clip[recorded, None]] = 9.0
    relative = oracles.governing_norms(norms, recorded, 1500, clip, "last")
    orders = np.unique(np.r_[np.linspace(1.5, 20, 20), np.geomspace(20, 300, 10)])
    shifts = relative / columns["noise_multiplier"][:, None]
    rates = np.broadcast_to(columns["sample_rate"][:, None], shifts.shape)
    each = renyi_divergences(shifts.ravel(), rates.ravel(), orders)
    truth = each.reshape(1500, 4, len(orders)).sum(axis=0)
    steps = Steps.of(log, "last")
    ours = steps.counts(whole(log)) @ steps.laws.per_count(orders).T
    assert np.all(ours >= truth * (1 - 1e-9))
    exact, found = (
        (rdp + epsilon_offsets(orders, 1e-5, "canonne2020")).min(axis=1) for rdp in (truth, ours)
    )
    assert np.all(found <= exact * (1 + excess))


@pytest.mark.parametrize(
    ("varying", "rounding", "excess"),
    [
        ("noise_multiplier", 0.0, 5e-3),
        ("noise_multiplier", 0.05, 3e-3),
        ("sample_rate", 0.05, 5e-3),
        ("sample_rate", 0.0, 1.5e-2),  # as many norms as rates
        ("both", 0.05, 6e-3),
        ("both", 0.0, 1.5e-2),
    ],
)
def test_hundreds_of_distinct_settings(varying, rounding, excess):
    rng = np.random.default_rng(0)
    noise = rng.uniform(0.8, 1.6, 300) if varying != "sample_rate" else np.full(300, 1.1)
    rate = rng.uniform(0.01, 0.02, 300) if varying != "noise_multiplier" else np.full(300, 0.015)
    norms, recorded = rng.exponential(0.4, (10, 6)), np.arange(10) * 30
    norms = np.ceil(norms * 20) / 20 if rounding else norms
    run = {"total_steps": 300, "noise_multiplier": noise, "max_grad_norm": 1.0, "sample_rate": rate}
    log = NormLog.from_arrays(norms, recorded, rounding=rounding, **run)
    truth = rdp_of_trajectory(
        oracles.governing_norms(norms, recorded, 300, 1.0, "closest"), noise, rate
    )
    ours = rdp_of(lay_out(log, "closest", many=True))
    assert np.all(ours >= truth * (1 - 1e-9))
    assert np.all(ours[:, ORDERS <= 3] <= truth[:, ORDERS <= 3] * (1 + excess))


@pytest.mark.parametrize("rounding", [0.0, 0.1])
def test_always_clipped(rounding):
    log = NormLog.from_arrays(
        [[2.0, 0.95, 0.99, 1.0], [2.0, 2.0, 1.2, 1.0]],
        [0, 3],
        rounding=rounding,
        total_steps=6,
        noise_multiplier=1.0,
        sample_rate=0.1,
        max_grad_norm=np.array([1.0, 1.0, 1.0, 1.0, 1.5, 1.0]),
    )
    norms = Steps.of(log, "last").norms
    expected = [True, False, False, False] if rounding == 0 else [True, True, True, False]
    assert norms.always_clipped(whole(log)).tolist() == expected


@pytest.mark.parametrize("between_records", ACCOUNT_WORDS["between_records"])
def test_ten_thousand_levels_under_one_setting(between_records):
    rng = np.random.default_rng(0)
    norms, recorded = (
        np.ceil(rng.exponential(0.4, (6, 5)) * 8192) / 8192,
        np.array([2, 3, 9, 15, 16, 30]),
    )
    run = {
        "total_steps": 40,
        "noise_multiplier": np.full(40, 1.1),
        "max_grad_norm": 1.0,
        "sample_rate": np.full(40, 0.05),
    }
    log = NormLog.from_arrays(norms, recorded, rounding=1 / 8192, **run)
    steps = lay_out(log, between_records)
    assert steps.exact
    assert steps.laws.n_cells > steps_module.MOST_DENSE
    relative = oracles.governing_norms(norms, recorded, 40, np.ones(40), between_records)
    expected = rdp_of_trajectory(relative, run["noise_multiplier"], run["sample_rate"])
    ours = rdp_of(steps)  # of so many kinds, on chords
    assert np.all((expected * (1 - 1e-12) <= ours) & (ours <= expected * (1 + 1e-4)))
    each = renyi_divergences(steps.laws.shift, steps.laws.rate, ORDERS)
    np.testing.assert_allclose(by_law(steps) @ each, expected, rtol=1e-12)


def test_every_step_recorded_under_its_own_noise():
    rng = np.random.default_rng(0)
    norms, noise = np.ceil(rng.exponential(0.4, (150, 5)) * 20) / 20, np.linspace(0.9, 1.3, 150)
    run = {
        "total_steps": 150,
        "noise_multiplier": noise,
        "max_grad_norm": 1.0,
        "sample_rate": np.full(150, 0.05),
    }
    log = NormLog.from_arrays(norms, np.arange(150), rounding=0.05, **run)
    steps = lay_out(log, "last", many=True)
    truth = rdp_of_trajectory(np.minimum(norms, 1.0), noise, run["sample_rate"])
    ours = rdp_of(steps)
    assert np.all(ours >= truth * (1 - 1e-9))
    assert np.all(ours[:, ORDERS <= 3] <= truth[:, ORDERS <= 3] * (1 + 3e-3))


def test_nothing_recorded_counts_every_step_at_the_clipping_norm():
    log = NormLog.from_arrays(
        np.zeros((0, 3)),
        [],
        total_steps=7,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
    )
    steps = lay_out(log, "last")
    found = by_law(steps)
    met = found.any(axis=0)
    assert found[:, met].tolist() == [[7.0]] * 3
    assert steps.laws.shift[met].tolist() == [1.0]
    unrounded = NormLog.from_arrays(
        np.zeros((0, 3)),
        [],
        total_steps=7,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        rounding=0,
    )
    np.testing.assert_allclose(
        rdp_of(lay_out(unrounded, "last")),
        7 * renyi_divergences(np.ones(3), np.full(3, 0.1), ORDERS),
        rtol=1e-9,
    )


def test_divergences_of_very_many_kinds_are_never_below_the_curve():
    rng = np.random.default_rng(0)
    for kinds, excess in (
        (StepKinds(rng.uniform(0.5, 1.3, 3000), np.full(3000, 0.01)), 1e-4),
        (StepKinds(np.full(3000, 1.1), rng.uniform(0.01, 0.02, 3000)), 2e-4),
    ):
        exact = np.hstack(
            [
                StepKinds(kinds.shift[part], kinds.rate[part]).divergences(ORDERS)
                for part in np.split(np.arange(3000), 3)
            ]
        )
        ours = kinds.divergences(ORDERS)
        assert np.all(ours >= exact * (1 - 1e-12))
        assert np.all(ours[ORDERS <= 3] <= exact[ORDERS <= 3] * (1 + excess))


@pytest.mark.parametrize("varying", [(True, False), (False, True), (True, True)])
def test_very_many_settings_of_one_clipped_example(varying):
    rng = np.random.default_rng(0)
    n, (noise, rates) = 20_000, varying
    kinds = StepKinds(
        1 / rng.uniform(0.8, 1.6, n) if noise else np.full(n, 0.9),
        rng.uniform(0.01, 0.02, n) if rates else np.full(n, 0.01),
    )
    steps = rng.integers(1, 4, n).astype(float)
    orders = np.array([1.5, 2, 3])
    exact = kinds.divergences(orders) @ steps
    for down in (False, True):
        found, count = condensed(kinds, steps, down=down)
        assert len(found) < n
        assert count.sum() == steps.sum()
        ours = found.divergences(orders) @ count
        ratio = exact / ours if down else ours / exact
        assert np.all((ratio >= 1 - 1e-4) & (ratio <= 1 + (2e-2 if all(varying) else 1e-3)))


def test_lower_ends_are_of_steps_that_are_snapped_down(monkeypatch):
    run = {"total_steps": 300, "sample_rate": 0.02}
    norms = np.array([[0.33, 0.71, 0.9]])
    truth = [  # each norm as a level of its own
        NormLog.from_arrays([[1.0]], [0], noise_multiplier=1 / norm, max_grad_norm=1.0, **run)
        for norm in norms[0]
    ]
    log = NormLog.from_arrays(
        norms, [0], rounding=0, noise_multiplier=1.0, max_grad_norm=1.0, **run
    )
    figures = {"delta": 1e-5, "accountant": "pld", "brackets": True}
    exact = [account(each, **figures).epsilon_upper[0] for each in truth]
    monkeypatch.setattr(steps_module, "_NORMS_APART", 0.3)
    table = account(log, **figures)
    for i in range(3):
        assert table.epsilon_lower[i] <= exact[i] <= table.epsilon_upper[i]
        assert 0.5 * exact[i] < table.epsilon_lower[i] < 0.999 * exact[i]
