"""Known participation, compared with slow reference implementations and with accounts that know nothing of it."""

from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

import oracles
from indpriv import InputError, NormLog, account, membership_risk
from indpriv.accountant import Method, compose
from indpriv.norm_log.records import BatchNorms

DELTA = 1e-5


def drawn(rng, n, total_steps, rate):
    """(steps, positions, norms) of a random run; every example takes part or not by chance."""
    steps, positions = np.nonzero(rng.random((total_steps, n)) < rate)
    return steps, positions, np.exp(rng.normal(-0.7, 1.0, len(steps)))


def log_of(entries, n, total_steps, **changes):
    arguments = {
        "noise_multiplier": 1.3,
        "max_grad_norm": 1.0,
        "sample_rate": 0.3,
        "sampler": "shuffled",
        "batch_norms": entries,
        **changes,
    }
    return NormLog.from_arrays(np.zeros((0, n)), [], total_steps=total_steps, **arguments)


def mu_of(entries, owner, who, noise, clip, *, opposite=0.0, rounding=0.01):
    """mu of one unit, one step at a time; rounding as a log with this rounding stores norms."""
    squared = 0.0
    for step in range(len(noise)):
        mine = [
            norm
            for at, position, norm in zip(*entries, strict=True)
            if at == step and owner[position] == who
        ]
        relative = [min(norm / clip[step], 1.0) for norm in mine]
        if rounding:
            relative = [min(np.ceil(s / rounding - 1e-12) * rounding, 1.0) for s in relative]
        squared += (sum(s + opposite for s in relative) / noise[step]) ** 2
    return np.sqrt(squared)


@st.composite
def runs(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    total_steps, n = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    entries = drawn(rng, n, total_steps, draw(st.sampled_from([0.2, 0.7, 1.0])))
    noise = rng.choice([0.3, 1.0, 4.0, 50.0], total_steps if draw(st.booleans()) else 1)
    clip = rng.choice([0.5, 1.0], total_steps if draw(st.booleans()) else 1)
    settings = {
        "noise_multiplier": np.broadcast_to(noise, total_steps),
        "max_grad_norm": np.broadcast_to(clip, total_steps),
        "rounding": draw(st.sampled_from([0.0, 0.01])),
    }
    return entries, n, total_steps, settings


RELATIONS = st.sampled_from(["zero_out", "replace_one"])


@given(runs(), RELATIONS)
@settings(max_examples=15)
def test_equals_the_sum_over_steps_of_each_example(run, relation):
    check_sums(run, relation)


@pytest.mark.slow
@given(runs(), RELATIONS)
@settings(max_examples=250)
def test_equals_the_sum_over_steps_of_each_example_in_many_runs(run, relation):
    check_sums(run, relation)


def check_sums(run, relation):
    entries, n, total_steps, changes = run
    log = log_of(entries, n, total_steps, **changes)
    table = account(log, delta=DELTA, participation="known", neighbouring=relation)
    opposite = float(relation == "replace_one")
    noise, clip = changes["noise_multiplier"], changes["max_grad_norm"]
    options = {"opposite": opposite, "rounding": changes["rounding"]}
    mu = [mu_of(entries, range(n), who, noise, clip, **options) for who in range(n)]
    truth = np.array([oracles.gaussian_epsilon(value, DELTA) for value in mu])
    np.testing.assert_allclose(table.epsilon, truth, rtol=1e-7, atol=1e-9)
    assert np.all(table.epsilon >= truth * (1 - 1e-11) - 1e-12)
    always = (entries[0], entries[1], np.full(len(entries[0]), 9.0))
    worst = max(mu_of(always, range(n), who, noise, clip, **options) for who in range(n))
    worst = oracles.gaussian_epsilon(worst, DELTA)
    assert table.worst_case_epsilon == pytest.approx(worst, rel=1e-7, abs=1e-9)
    assert table.worst_case_epsilon >= worst * (1 - 1e-11) - 1e-12
    assert np.all(table.epsilon <= table.worst_case_epsilon)
    assert table.claim == "exact"
    assert (table.account.neighbouring, table.account.participation) == (relation, "known")
    assert table.details["participations"].tolist() == np.bincount(entries[1], minlength=n).tolist()


def test_equals_the_tight_account_of_a_log_without_sampling_and_with_zeros_where_absent():
    rng = np.random.default_rng(3)
    steps, positions, norms = entries = drawn(rng, 6, 9, 0.5)
    full = np.zeros((9, 6))
    full[steps, positions] = norms
    log = log_of(entries, 6, 9)
    everywhere = NormLog.from_arrays(
        full, range(9), total_steps=9, noise_multiplier=1.3, max_grad_norm=1.0, sample_rate=1.0
    )
    known = account(log, delta=DELTA, participation="known")
    tight = account(everywhere, delta=DELTA, accountant="pld")
    np.testing.assert_allclose(known.epsilon, tight.epsilon, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_equals_the_gaussian_composition_of_dp_accounting():
    log = log_of(None, 4, 60, noise_multiplier=[2.0, 5.0, 3.0] * 20, most_participations=60)
    theirs = PLDAccountant()
    for sigma in (2.0, 5.0, 3.0):
        theirs.compose(dp_accounting.GaussianDpEvent(sigma), 20)
    epsilon = account(log, delta=DELTA, participation="known").worst_case_epsilon
    assert epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-4)


def test_twenty_shuffled_epochs():
    log = log_of(None, 3, 400, noise_multiplier=3.0, most_participations=20)
    table = account(log, delta=DELTA, participation="known")
    assert table.worst_case_epsilon == pytest.approx(6.99923, abs=1e-5)
    assert table.epsilon.tolist() == [table.worst_case_epsilon] * 3
    assert table.claim_reason.startswith("No norms of batches were recorded")


def test_steps_without_batch_norms_count_all_examples_at_max_grad_norm():
    steps, positions = np.repeat(np.arange(4), 2), np.tile([0, 1], 4)
    log = log_of((steps, positions, np.full(8, 0.5)), 2, 4, noise_multiplier=1.0)
    whole = account(log, delta=DELTA, participation="known")
    entries = log.batch_norms.read(0, log.n_examples)
    known = BatchNorms(np.arange(1, 4), [entries.select(entries.step > 0).block])
    part = account(replace(log, batch_norms=known), delta=DELTA, participation="known")
    assert part.epsilon[0] == pytest.approx(oracles.gaussian_epsilon(np.sqrt(1.75), DELTA))
    assert part.worst_case_epsilon == pytest.approx(whole.worst_case_epsilon)
    assert "3 of 4 batches" in part.claim_reason
    counted = replace(log, batch_norms=known, most_participations=3)
    limited = account(counted, delta=DELTA, participation="known")
    assert limited.worst_case_epsilon == pytest.approx(oracles.gaussian_epsilon(np.sqrt(3), DELTA))
    # Counts below what batch norms show are wrong, and never make an epsilon smaller.
    contradicted = account(
        replace(counted, most_participations=1), delta=DELTA, participation="known"
    )
    assert contradicted.worst_case_epsilon == pytest.approx(limited.worst_case_epsilon)


OWNERS = st.lists(st.integers(0, 2), min_size=5, max_size=5)


@given(runs(), OWNERS)
@settings(max_examples=15)
def test_rows_of_a_unit_add_up_within_a_step(run, owners):
    check_units(run, owners)


@pytest.mark.slow
@given(runs(), OWNERS)
@settings(max_examples=250)
def test_rows_of_a_unit_add_up_within_a_step_in_many_runs(run, owners):
    check_units(run, owners)


def check_units(run, owners):
    entries, n, total_steps, changes = run
    owner = owners[:n]
    log = log_of(entries, n, total_steps, unit="user", unit_ids=owner, **changes)
    table = account(log, delta=DELTA, participation="known")
    noise, clip = changes["noise_multiplier"], changes["max_grad_norm"]
    for who, epsilon in zip(table.example_ids.tolist(), table.epsilon, strict=True):
        mu = mu_of(entries, owner, who, noise, clip, rounding=changes["rounding"])
        truth = oracles.gaussian_epsilon(mu, DELTA)
        assert epsilon == pytest.approx(truth, rel=1e-7, abs=1e-9)
    assert table.account.rows_per_unit == max(owner.count(who) for who in owner)


def test_an_example_that_is_drawn_twice_for_a_step_counts_twice():
    log = log_of((np.zeros(1, int), np.zeros(1, int), np.full(1, 0.5)), 1, 2, noise_multiplier=1.0)
    entry = log.batch_norms.read(0, log.n_examples)
    twice = BatchNorms(np.arange(2), [entry.select(np.array([0, 0])).block])
    log = replace(log, batch_norms=twice, sampler="with_replacement")
    table = account(log, delta=DELTA, participation="known")
    assert table.epsilon[0] == pytest.approx(oracles.gaussian_epsilon(1.0, DELTA))
    assert table.worst_case_epsilon == pytest.approx(oracles.gaussian_epsilon(2.0, DELTA))
    counts = replace(log, batch_norms=None, most_participations=2)
    assert account(counts, delta=DELTA, participation="known").worst_case_epsilon == (
        pytest.approx(table.worst_case_epsilon)
    )
    with pytest.raises(InputError, match="most_participations"):
        account(replace(log, batch_norms=None), delta=DELTA, participation="known")


def test_the_replacement_may_point_the_other_way():
    entries = (np.arange(3), np.zeros(3, int), np.full(3, 0.25))
    log = log_of(entries, 1, 3, noise_multiplier=2.0)
    table = account(log, delta=DELTA, participation="known", neighbouring="replace_one")
    mu = np.sqrt(3) / 2
    assert table.epsilon[0] == pytest.approx(oracles.gaussian_epsilon(1.25 * mu, DELTA))
    assert table.worst_case_epsilon == pytest.approx(oracles.gaussian_epsilon(2 * mu, DELTA))
    assert "replace one example, participation known" in table.account.describe()


@pytest.mark.parametrize(
    ("sampler", "claim"), [("poisson", "exact"), ("fixed_size", "exact"), ("other", "estimate")]
)
def test_the_claim_holds_for_every_sampler_that_looks_at_no_data(sampler, claim):
    entries = (np.arange(2), np.zeros(2, int), np.full(2, 0.25))
    table = account(log_of(entries, 1, 2, sampler=sampler), delta=DELTA, participation="known")
    assert (table.claim, table.account.sampler) == (claim, sampler)
    assert "took part the most" in table.account.why_at_worst_case


@pytest.mark.parametrize(
    "changes",
    [
        {"rounding_mode": "nearest"},
        {"caveats": ["the clock was wrong"]},
    ],
)
def test_doubts_make_an_estimate(changes):
    entries = (np.arange(2), np.zeros(2, int), np.full(2, 0.25))
    assert account(log_of(entries, 1, 2, **changes), delta=DELTA, participation="known").claim == (
        "estimate"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"participation": "guessed"}, "participation"),
        ({"neighbouring": "swap"}, "neighbouring"),
        ({"participation": "known", "neighbouring": "add_remove"}, 'pass neighbouring="zero_out"'),
        ({"participation": "known", "preset": "yu2023"}, "leave out"),
    ],
)
def test_relations_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Method(delta=DELTA, **arguments)


@pytest.mark.parametrize("sampler", ["weighted", ""])
def test_unknown_samplers_are_refused(sampler):
    with pytest.raises(InputError, match="sampler"):
        log_of(None, 2, 2, sampler=sampler)


def test_risk_is_that_of_gaussian_mechanisms():
    rng = np.random.default_rng(8)
    log = log_of(drawn(rng, 5, 12, 0.4), 5, 12)
    table = account(log, delta=DELTA, participation="known")
    epsilon = table.epsilon[1]
    risk = membership_risk(
        log, delta=DELTA, participation="known", false_positive_rate=0.01, epsilon=epsilon
    )
    mu = table.details["mu"]
    np.testing.assert_allclose(risk.individual.mu, mu, rtol=1e-12)
    np.testing.assert_allclose(risk.individual.advantage, 2 * ndtr(mu / 2) - 1, rtol=1e-10)
    power = risk.individual.true_positive_rate[:, 0]
    np.testing.assert_allclose(ndtri(power) - ndtri(0.01), mu, rtol=1e-8)
    assert risk.individual.delta[1, 0] == pytest.approx(DELTA, rel=1e-8)
    assert (risk.individual.mu <= risk.worst_case.mu).all()
    assert risk.account == table.account
    assert (risk.claim, len(risk)) == (table.claim, 5)


def test_risk_of_units_counts_all_their_rows():
    entries = np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([0.5, 0.25, 1.0])
    log = log_of(entries, 3, 2, unit="user", unit_ids=["a", "a", "b"], rounding=0)
    risk = membership_risk(log, delta=DELTA, participation="known")
    assert risk.example_ids.tolist() == ["a", "b"]
    np.testing.assert_allclose(risk.individual.mu, np.array([0.75, 1.0]) / 1.3, rtol=1e-12)


def test_lower_ends_are_what_norms_show():
    entries = np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([0.5, 0.5, 1.0])
    norms = log_of(entries, 3, 2, unit="user", unit_ids=["a", "a", "b"], rounding=0)
    counts = log_of(None, 3, 2, most_participations=1)
    for log, least in ((norms, [0.0, 1.0 / 1.3]), (counts, [0.0] * 3)):  # rows of a may cancel
        table = account(log, delta=DELTA, participation="known")
        truth = [oracles.gaussian_epsilon(mu, DELTA) if mu else 0.0 for mu in least]
        np.testing.assert_allclose(table.epsilon_lower, truth, rtol=1e-7)
        assert (table.epsilon > 0).all()


def test_a_delta_that_is_too_small_for_a_float_is_not_zero():
    entries = (np.zeros(2, int), np.array([0, 1]), np.array([0.0, 2.0]))
    log = log_of(entries, 3, 1, noise_multiplier=50.0)
    risk = membership_risk(log, delta=DELTA, participation="known", epsilon=[1.0, 800.0])
    assert np.all(risk.individual.delta[[0, 2]] == 0)
    assert np.all(risk.individual.delta[1] > 0)
    assert np.all(risk.worst_case.delta > 0)


def test_who_took_part_is_known_by_default_where_secrecy_proves_nothing_and_the_log_says_it():
    rng = np.random.default_rng(0)
    entries = drawn(rng, 5, 8, 0.5)
    accounts = (account, membership_risk, lambda log, **how: compose([log, log], **how))
    for changes, usual in (
        ({}, "known"),
        ({"sampler": "sequential"}, "known"),
        ({"sampler": "other"}, "known"),
        ({"sampler": "poisson"}, "secret"),
    ):
        log = log_of(entries, 5, 8, **changes)
        norms = np.full((1, 5), 0.5)
        log = replace(
            log,
            records=NormLog.from_arrays(
                norms, [0], total_steps=8, noise_multiplier=1.3, max_grad_norm=1.0, sample_rate=0.3
            ).records,
            recorded_steps=np.array([0]),
        )
        for each in accounts:
            by_default, named = (
                each(log, delta=DELTA, **how).account for how in ({}, {"participation": usual})
            )
            assert by_default == named, (changes, each)
            assert by_default.participation == usual
    fixed, replaced = log_of(entries, 5, 8, sampler="fixed_size"), {"neighbouring": "replace_one"}
    assert account(fixed, delta=DELTA).account.participation == "known"
    proven = account(fixed, delta=DELTA, **replaced)  # sampling amplifies
    assert (proven.account.participation, proven.claim) == ("secret", "exact")
    assert account(replace(fixed, **replaced), delta=DELTA).account.participation == "secret"
    for wrong in ("", "knwon"):
        with pytest.raises(InputError, match="participation"):
            account(fixed, delta=DELTA, participation=wrong)
    with pytest.raises(InputError, match='or for an estimate participation="secret"'):
        account(fixed, delta=DELTA, neighbouring="add_remove")
    shuffled = NormLog.from_arrays(
        norms,
        [0],
        total_steps=8,
        noise_multiplier=1.3,
        max_grad_norm=1.0,
        sample_rate=0.3,
        sampler="shuffled",
    )
    assert account(shuffled, delta=DELTA).claim == "estimate"  # nobody logged who took part
    mixed = [log_of(entries, 5, 8), replace(log, neighbouring="zero_out")]
    assert compose(mixed, delta=DELTA).account.participation == "known in some runs"


def test_the_frame_says_that_an_example_is_replaced_and_not_absent():
    log = log_of((np.arange(2), np.zeros(2, int), np.full(2, 0.25)), 1, 2)
    log = replace(log, neighbouring="replace_one")
    frame = membership_risk(log, delta=DELTA, participation="known").to_frame()
    assert frame.attrs["null_hypothesis"] == "replaced"
    with pytest.raises(InputError, match='pass participation="known"'):
        membership_risk(log, delta=DELTA, participation="secret")
