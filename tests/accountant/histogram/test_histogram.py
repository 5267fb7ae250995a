import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indpriv.accountant.histogram import histogram as histogram_module
from indpriv.accountant.histogram.histogram import Histogram, whole_histograms

import oracles
from indpriv import NormLog
from indpriv.accountant.method import BETWEEN_RECORDS
from indpriv.accountant.rdp import renyi_divergences

ORDERS = np.array([1.5, 3.0, 8.0, 40.0])


def whole(log):
    return log.part(0, log.n_examples)


def lay_out(log, between_records, *, many=False, between_nodes="share"):
    """The histogram of a log; `many`: as if its settings were too many for nodes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr(histogram_module, "_MOST_OWN", dict.fromkeys(("share", "up", "down"), 0))
            patch.setattr(histogram_module, "_MOST_DENSE", 0)
        histogram = Histogram.of(log, between_records, between_nodes)
    assert not (many and (histogram.exact or histogram.dense))
    return histogram


def rdp_of(histogram):
    """RDP of the examples, by the counts; the other ways to the same number must agree."""
    log = histogram.norms.log
    table, counts = histogram.divergences(ORDERS), histogram.counts(whole(log))
    totals = counts.totals(table)
    examples = np.arange(log.n_examples)[::-1]
    picked = counts.totals_at(examples, table, examples % len(ORDERS))
    np.testing.assert_allclose(picked, totals[examples, examples % len(ORDERS)], rtol=1e-12)
    found = histogram.participations(whole(log))
    divergences = renyi_divergences(
        found.relative_norms / found.noise_multiplier, found.sample_rate, ORDERS
    )
    np.testing.assert_allclose(found.counts @ divergences, totals, rtol=1e-9)
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
@given(data=st.data(), between_records=st.sampled_from(BETWEEN_RECORDS))
def test_levels_under_few_settings_equal_the_step_by_step_sum(data, between_records):
    norms, recorded, run = draw_run(data, varying_norm=False)
    norms = np.ceil(norms * 32) / 32  # already on the levels: rounding changes nothing
    log = NormLog.from_arrays(norms, recorded, rounding=1 / 16, **run)
    histogram = lay_out(log, between_records)
    counts = histogram.participations(whole(log)).counts
    np.testing.assert_array_equal(counts.sum(axis=1), run["total_steps"])
    relative = oracles.governing_norms(
        norms, recorded, run["total_steps"], run["max_grad_norm"], between_records
    )
    expected = rdp_of_trajectory(relative, run["noise_multiplier"], run["sample_rate"])
    np.testing.assert_allclose(rdp_of(histogram), expected, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), between_records=st.sampled_from(BETWEEN_RECORDS))
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
    histogram_ = lay_out(log, "last").participations(whole(log))
    met = [
        dict(zip(histogram_.relative_norms[row > 0], row[row > 0], strict=True))
        for row in histogram_.counts
    ]
    assert met[0] == {0.30000000000000004: 1, 0.15000000000000002: 1, 0.6000000000000001: 1}
    assert met[1] == {1.0: 2, 0.5: 1}  # at max_grad_norm but not clipped: half of the doubled one
    assert met[2] == {1.0: 3}  # clipped, so that its true norm is unknown: counts as 1


@settings(max_examples=12, deadline=None)
@given(data=st.data(), between_records=st.sampled_from(BETWEEN_RECORDS))
def test_norms_without_rounding_are_slightly_above_the_step_by_step_sum(data, between_records):
    norms, recorded, run = draw_run(data, varying_norm=True)
    log = NormLog.from_arrays(norms, recorded, rounding=0, **run)
    relative = oracles.governing_norms(
        norms, recorded, run["total_steps"], run["max_grad_norm"], between_records
    )
    truth = rdp_of_trajectory(relative, run["noise_multiplier"], run["sample_rate"])
    ours = rdp_of(lay_out(log, between_records))
    assert np.all(ours >= truth * (1 - 1e-9))
    assert np.all(ours <= truth * (1 + 1e-2))  # at orders on a cliff
    assert np.all(ours[:, ORDERS <= 3] <= truth[:, ORDERS <= 3] * (1 + 2e-4))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), between_records=st.sampled_from(BETWEEN_RECORDS), varying_norm=st.booleans())
def test_a_lattice_encloses_the_exact_mechanisms(data, between_records, varying_norm):
    norms, recorded, run = draw_run(data, varying_norm=varying_norm)
    log = NormLog.from_arrays(norms, recorded, rounding=0.05, **run)
    exact = rdp_of(lay_out(log, between_records))
    for between_nodes, below, above in (
        ("share", 1e-9, 1e-3),
        ("up", 1e-9, 0.1),
        ("down", 0.1, 1e-9),
    ):
        histogram = lay_out(log, between_records, many=True, between_nodes=between_nodes)
        ours = rdp_of(histogram)
        assert np.all(ours >= exact * (1 - below))
        assert np.all(ours <= exact * (1 + above))
        counts = histogram.participations(whole(log)).counts
        np.testing.assert_allclose(counts.sum(axis=1), run["total_steps"], rtol=1e-12)
        if between_nodes != "share":
            np.testing.assert_array_equal(counts, np.round(counts))


@pytest.mark.parametrize("rounding", [0.0, 0.05])
@pytest.mark.parametrize("n_rates", [3, 60])
def test_whole_counts_enclose_the_run(rounding, n_rates):
    rng = np.random.default_rng(0)
    rate = np.resize(rng.uniform(0.01, 0.02, n_rates), 120)
    run = {
        "total_steps": 120,
        "noise_multiplier": rng.uniform(0.9, 1.1, 120),
        "max_grad_norm": 1.0,
        "sample_rate": rate,
    }
    log = NormLog.from_arrays(
        rng.exponential(0.4, (10, 6)), np.arange(10) * 12, rounding=rounding, **run
    )
    histogram = Histogram.of(log, "last")
    up, down = (part.participations(whole(log)) for part in whole_histograms(log, "last"))
    for part in (up, down):
        np.testing.assert_array_equal(part.counts, np.round(part.counts))
        np.testing.assert_array_equal(part.counts.sum(axis=1), 120)
    high, low = (
        part.counts
        @ renyi_divergences(
            part.relative_norms / part.noise_multiplier, part.sample_rate, ORDERS[:2]
        )
        for part in (up, down)
    )
    middle = histogram.counts(whole(log)).totals(histogram.divergences(ORDERS[:2]))
    assert np.all(low <= middle * (1 + 1e-12))
    assert np.all(middle * (1 - 1e-3) <= high)
    assert np.all(high <= low * (1.03 if n_rates == 3 else 1.15))


@pytest.mark.parametrize(
    ("varying", "rounding", "excess"),
    [
        ("noise_multiplier", 0.0, 5e-5),
        ("noise_multiplier", 0.05, 5e-5),
        ("sample_rate", 0.05, 3e-4),
        ("sample_rate", 0.0, 7e-4),
        ("both", 0.05, 5e-4),
        ("both", 0.0, 7e-4),
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
    norms = Histogram.of(log, "last").norms
    expected = [True, False, False, False] if rounding == 0 else [True, True, True, False]
    assert norms.always_clipped(whole(log)).tolist() == expected


@pytest.mark.parametrize("between_records", BETWEEN_RECORDS)
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
    histogram = lay_out(log, between_records)
    assert not histogram.dense
    relative = oracles.governing_norms(norms, recorded, 40, np.ones(40), between_records)
    expected = rdp_of_trajectory(relative, run["noise_multiplier"], run["sample_rate"])
    np.testing.assert_allclose(rdp_of(histogram), expected, rtol=1e-9)


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
    histogram = lay_out(log, "last", many=True)
    truth = rdp_of_trajectory(np.minimum(norms, 1.0), noise, run["sample_rate"])
    ours = rdp_of(histogram)
    assert np.all(ours >= truth * (1 - 1e-9))
    assert np.all(ours[:, ORDERS <= 3] <= truth[:, ORDERS <= 3] * (1 + 5e-5))


def test_nothing_recorded_counts_every_step_at_the_clipping_norm():
    log = NormLog.from_arrays(
        np.zeros((0, 3)),
        [],
        total_steps=7,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
    )
    found = lay_out(log, "last").participations(whole(log))
    met = found.counts.any(axis=0)
    assert found.counts[:, met].tolist() == [[7.0]] * 3
    assert found.relative_norms[met].tolist() == [1.0]
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
