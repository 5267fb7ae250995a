"""Several runs on the same people: their steps count as those of one long run."""

from dataclasses import replace

import numpy as np
import pytest

import oracles
from indpriv import InputError, NormLog, account
from indpriv.accountant import Tuning, compose

DELTA = 1e-5


def log_of(norms, *, steps=None, noise=1.2, rate=0.05, **further):
    """A log with a record at every second step."""
    norms = np.atleast_2d(norms)
    recorded = 2 * np.arange(len(norms))
    return NormLog.from_arrays(
        norms,
        recorded,
        total_steps=steps or 2 * len(norms),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=rate,
        **further,
    )


def joined(first, second, norms):
    """The one run that two runs of single settings amount to."""
    settings = {
        name: np.concatenate([getattr(log.settings, name) for log in (first, second)])
        for name in ("noise_multiplier", "max_grad_norm", "sample_rate")
    }
    steps = np.concatenate([first.recorded_steps, first.total_steps + second.recorded_steps])
    further = {"unit": first.unit, "unit_ids": first.unit_ids}
    total = first.total_steps + second.total_steps
    return NormLog.from_arrays(norms, steps, total_steps=total, **settings, **further)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("n_runs", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_two_runs_equal_one_of_all_steps(accountant, n_runs):
    rng = np.random.default_rng(n_runs)
    for _ in range(n_runs):
        norms = [rng.lognormal(-1, 1, (int(rng.integers(1, 4)), 5)) for _ in range(2)]
        first, second = (
            log_of(
                part,
                steps=int(rng.choice([0, 400])),
                noise=rng.choice([0.3, 50.0, rng.uniform(0.5, 5.0)], p=[0.1, 0.1, 0.8]),
                rate=rng.choice([1.0, rng.uniform(0.01, 1.0)]),
            )
            for part in norms
        )
        together = compose([first, second], delta=DELTA, accountant=accountant)
        one_run = joined(first, second, np.concatenate(norms))
        whole = account(one_run, delta=DELTA, accountant=accountant)
        precision = {"rel": 1e-4 if accountant == "pld" else 1e-9, "abs": 1e-12}
        assert together.epsilon == pytest.approx(whole.epsilon, **precision)
        assert np.all(together.epsilon >= whole.epsilon_lower * (1 - 1e-9))
        assert np.all(together.epsilon_lower <= whole.epsilon * (1 + 1e-9))
        worst = whole.worst_case_epsilon
        assert together.worst_case_epsilon == pytest.approx(worst, rel=1e-6)
        assert together.account.total_steps == whole.account.total_steps
        assert together.claim == whole.claim


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_who_was_in_one_run_only_keeps_the_account_of_that_run(accountant):
    norms = np.random.default_rng(0).lognormal(-1, 1, (4, 12))
    log = log_of(norms)
    first, second = log.take(np.arange(8)[::-1]), log.take(np.arange(4, 12))
    together = compose([first, second], delta=DELTA, accountant=accountant)
    alone = account(log, delta=DELTA, accountant=accountant)
    own = dict(zip(alone.example_ids.tolist(), alone.epsilon, strict=True))
    worst, tolerance = together.details["unit_worst_case"], {"rdp": 1e-12, "pld": 1e-4}[accountant]
    for number, example in enumerate(together.example_ids.tolist()):
        if together.details["n_runs"][number] == 1:
            assert together.epsilon[number] == pytest.approx(own[example], rel=tolerance)
            assert worst[number] == pytest.approx(alone.worst_case_epsilon)
        else:
            assert own[example] < together.epsilon[number] < 2 * own[example]
            assert worst[number] == together.worst_case_epsilon
    assert np.bincount(together.details["n_runs"]).tolist() == [0, 8, 4]
    assert set(together.example_ids.tolist()) == set(range(12))


def test_units_with_several_rows_equal_one_run_of_all_steps():
    rng = np.random.default_rng(1)
    units = rng.integers(0, 25, 40)
    norms = rng.lognormal(-1, 1, (3, 40))
    log = log_of(norms, unit="user", unit_ids=units)
    together = compose([log, log], delta=DELTA, by="unit_id")
    whole = account(joined(log, log, np.concatenate([norms, norms])), delta=DELTA)
    assert np.array_equal(together.example_ids, whole.example_ids)
    assert together.epsilon == pytest.approx(whole.epsilon, rel=1e-4)
    assert together.details["unit_worst_case"] == pytest.approx(
        whole.details["unit_worst_case"], rel=1e-4
    )
    assert together.account.id_column == "unit_id"


def test_owners_of_different_numbers_of_rows_are_found_in_both_runs():
    first = log_of(np.full((2, 3), 0.5), unit="user", unit_ids=["a", "a", "b"])
    second = log_of(np.full((2, 2), 0.5), unit="user", unit_ids=["c", "a"])
    together = compose([first, second], delta=DELTA, by="unit_id")
    assert together.example_ids.tolist() == ["a", "b", "c"]
    assert together.details["n_runs"].tolist() == [2, 1, 1]
    epsilon = dict(zip("abc", together.epsilon, strict=True))
    alone = account(second, delta=DELTA)
    assert epsilon["c"] == pytest.approx(alone.epsilon[0], rel=1e-4)
    assert epsilon["a"] > epsilon["b"]
    assert together.account.rows_per_unit == 2


def test_blocks_and_threads_change_nothing(monkeypatch):
    norms = np.random.default_rng(2).lognormal(-1, 1, (4, 50))
    first, second = log_of(norms), log_of(norms).take(np.arange(7, 43)[::-1])
    whole = compose([first, second], delta=DELTA, workers=1)
    monkeypatch.setattr("indpriv.accountant.runs.block_size", lambda _: 3)
    seen = []
    parts = compose(
        [first, second], delta=DELTA, workers=2, progress=lambda *done: seen.append(done)
    )
    assert np.array_equal(parts.epsilon, whole.epsilon)
    assert seen[-1] == (50, 50)


def test_the_claim_is_the_weakest():
    exact = NormLog.from_arrays(
        [[0.5]] * 2, [0, 1], total_steps=2, noise_multiplier=1, max_grad_norm=1, sample_rate=0.1
    )
    assert compose([exact, exact], delta=DELTA).claim == "exact"
    found = compose([exact, log_of([[0.5]] * 2)], delta=DELTA)
    assert found.claim == "estimate"
    assert found.claim_reason.startswith("Run 2: Only 2 of 4 steps")


def test_runs_that_do_not_match_are_refused():
    log = log_of(np.full((1, 3), 0.5))
    people = log_of(np.full((1, 3), 0.5), unit="user", unit_ids=[1, 1, 2])
    texts = replace(log, example_ids=np.array(["1", "2", "3"]))
    for runs, by, reason in (
        ([log], "example_id", "two or more"),
        (log, "example_id", "two or more"),
        (["runs/a", "runs/b"], "example_id", "log='runs/a' is not a NormLog"),
        ([log, people], "example_id", "differ in unit: 'example', 'user'"),
        ([people, people], "example_id", "several rows"),
        ([log, log], "unit_id", "run 1 has no unit ids"),
        ([log, texts], "example_id", "numbers in some runs and texts in others"),
        ([log, log], "name", "by='name'"),
        ([people, people], "unit_id", 'pass accountant="rdp"'),
        ([replace(log, neighbouring="replace_one")] * 2, "example_id", 'of neighbouring="replace'),
        ([log, replace(log, neighbouring="zero_out")], "example_id", "differ in neighbouring"),
        ([log, replace(people, sampler="by_client")], "unit_id", "differ in unit"),
        ([replace(people, sampler="by_client")] * 2, "unit_id", "share one coin"),
    ):
        with pytest.raises(InputError, match=reason):
            compose(runs, delta=DELTA, by=by, accountant="pld")


def shuffled(contributions, *, noise=1.2, **further):
    """A log of batches; a contribution of 0 says that an example was not in a batch."""
    steps, positions = np.nonzero(contributions)
    entries = (steps, positions, contributions[steps, positions])
    return NormLog.from_arrays(
        np.zeros((0, contributions.shape[1])),
        [],
        total_steps=len(contributions),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=0.5,
        sampler="shuffled",
        batch_norms=entries,
        **further,
    )


def present_at_random(rng, n_steps=6, n=5):
    return np.where(rng.random((n_steps, n)) < 0.5, rng.uniform(0.1, 1.5, (n_steps, n)), 0.0)


def test_runs_with_known_participation_are_one_gaussian_mechanism():
    rng = np.random.default_rng(4)
    first, second = present_at_random(rng), present_at_random(rng)
    first[:, 0] = 0.0
    logs = shuffled(first), shuffled(second, noise=0.7).take(np.arange(4))
    found = compose(logs, delta=DELTA, participation="known")
    rounded = [np.minimum(np.ceil(part * 100 - 1e-9) / 100, 1) for part in (first, second)]
    squares = [np.square(rounded[0] / 1.2).sum(0), np.square(rounded[1] / 0.7).sum(0)]
    squares[1][4] = 0.0
    truth = [oracles.gaussian_epsilon(np.sqrt(own), DELTA) for own in squares[0] + squares[1]]
    np.testing.assert_allclose(found.epsilon, truth, rtol=1e-7)
    assert np.all(found.epsilon >= np.array(truth) * (1 - 1e-11))
    most = [(part > 0).sum(0).max() for part in (first, second[:, :4])]
    worst = np.sqrt(most[0] / 1.2**2 + most[1] / 0.7**2)
    assert found.worst_case_epsilon == pytest.approx(oracles.gaussian_epsilon(worst, DELTA))
    assert (found.claim, found.account.neighbouring) == ("exact", "zero_out")
    assert found.account.describe().endswith("participation known, exact Gaussian accountant")
    replaced, removed = (
        compose([logs[0]] * 2, delta=DELTA, participation="known", neighbouring=relation)
        for relation in ("replace_one", "zero_out")
    )
    assert np.all(replaced.epsilon[1:] > removed.epsilon[1:])
    assert replaced.epsilon[0] == 0.0  # it was in no batch


def test_rows_of_one_user_are_not_told_apart_where_who_took_part_is_known():
    """The account would be of "one user", and bound one row: 13 where the truth was 58."""
    log = shuffled(np.ones((3, 4)), unit="user", unit_ids=["a", "a", "a", "b"])
    with pytest.raises(InputError, match="several rows of one user"):
        compose([log, log], delta=DELTA, participation="known")


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("n_runs", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_a_shuffled_run_beside_a_poisson_run_is_one_whose_participation_is_known(
    accountant, n_runs
):
    rng = np.random.default_rng(5)
    for _ in range(n_runs):
        noise, other = (
            float(rng.choice([0.3, 50.0, rng.uniform(0.5, 5.0)], p=[0.1, 0.1, 0.8]))
            for _ in range(2)
        )
        poisson = log_of(
            rng.lognormal(-1, 1, (2, 5)),
            steps=int(rng.choice([0, 60])),
            noise=noise,
            rate=float(rng.choice([1.0, rng.uniform(0.01, 1.0)])),
        )
        assert_known_beside(
            poisson, present_at_random(rng, int(rng.integers(1, 5))), other, accountant
        )


def assert_known_beside(poisson, contributions, noise, accountant):
    contributions[0, :2], contributions[:, 3] = 1.0, 0.0
    known, total_steps = shuffled(contributions, noise=noise), len(contributions)
    # The same as a run in which everyone is in every batch, and adds nothing where absent.
    absent = NormLog.from_arrays(
        contributions,
        np.arange(total_steps),
        total_steps=total_steps,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=1.0,
    )
    norms = poisson.levels.norms(poisson.read(), 1.0)
    whole = account(
        joined(poisson, absent, np.concatenate([norms, contributions])),
        delta=DELTA,
        accountant=accountant,
    )
    found = compose(
        [poisson, known], delta=DELTA, accountant=accountant, participation=("secret", "known")
    )
    precision = {"rtol": 2e-4 if accountant == "pld" else 1e-6, "atol": 1e-9}
    np.testing.assert_allclose(found.epsilon, whole.epsilon, **precision)
    least = whole.epsilon_lower if accountant == "pld" else whole.epsilon
    assert np.all(found.epsilon >= least * (1 - 1e-9) - 1e-9)
    assert found.account.sampling == "Poisson sampling, participation known in some runs"
    assert found.account.neighbouring == "zero_out"
    if total_steps > 1:  # two runs with known participation are one Gaussian law, like one run
        parts = [shuffled(contributions[rows], noise=noise) for rows in (slice(1), slice(1, None))]
        three = compose(
            [parts[0], poisson, parts[1]],
            delta=DELTA,
            accountant=accountant,
            participation=("known", "secret", "known"),
        )
        np.testing.assert_allclose(three.epsilon, found.epsilon, rtol=1e-6, atol=1e-9)
        assert np.all(three.epsilon >= least * (1 - 1e-9) - 1e-9)
    everywhere = whole.worst_case_epsilon  # of everyone in every batch
    assert found.epsilon.max() <= found.worst_case_epsilon <= everywhere * (1 + 1e-6) + 1e-9


def test_people_of_several_rows_in_a_poisson_and_a_shuffled_run():
    rng = np.random.default_rng(6)
    owners = {"unit": "user", "unit_ids": ["a", "b", "a", "c", "a"]}
    poisson = log_of(rng.lognormal(-1, 1, (2, 5)), **owners)
    known = shuffled(present_at_random(rng), **owners)
    together = compose(
        [poisson, known.take([1, 3])], delta=DELTA, by="unit_id", participation=("secret", "known")
    )
    alone = account(poisson, delta=DELTA)
    assert together.example_ids.tolist() == ["a", "b", "c"]
    assert together.epsilon[0] == pytest.approx(alone.epsilon[0], rel=1e-4)
    own = account(known.take([1, 3]), delta=DELTA, participation="known").epsilon
    assert np.all(together.epsilon[1:] > np.maximum(alone.epsilon[1:], own))
    assert np.all(together.epsilon[1:] < alone.epsilon[1:] + own + 1)
    both = compose([known] * 2, delta=DELTA, by="unit_id", participation="known")
    squared = 2 * np.square(account(known, delta=DELTA, participation="known").details["mu"])
    truth = [oracles.gaussian_epsilon(np.sqrt(value), DELTA) for value in squared]
    np.testing.assert_allclose(both.epsilon, truth, rtol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participation": ("known",)}, "1 participations for 2 runs"),
        ({"participation": "known", "neighbouring": "add_remove"}, "who is in the data"),
        (
            {"participation": ("known", "secret"), "neighbouring": "replace_one"},
            'pass participation="known"',
        ),
    ],
)
def test_relations_that_do_not_fit_are_refused(options, message):
    log = shuffled(np.ones((2, 3)))
    with pytest.raises(InputError, match=message):
        compose([log, log], delta=DELTA, **options)


def test_the_worst_case_of_the_best_run_lies_between_one_run_and_many():
    log = log_of(np.full((3, 5), 0.5), steps=100)
    alone = account(log, delta=DELTA).worst_case_epsilon
    together = compose([log] * 4, delta=DELTA)
    best = compose([log] * 4, delta=DELTA, tuning=Tuning(mean=4))
    assert alone < best.worst_case_epsilon
    assert (best.epsilon <= best.worst_case_epsilon).all()
    assert best.epsilon == pytest.approx(np.minimum(together.epsilon, best.worst_case_epsilon))
    cheaper = log_of(np.full((3, 5), 0.5), steps=50)
    mixed = compose([cheaper, log], delta=DELTA, tuning=Tuning(mean=4))
    assert mixed.worst_case_epsilon == best.worst_case_epsilon  # the costliest run decides


def test_the_best_of_runs_of_people_costs_more_than_of_rows():
    rows = log_of(np.full((3, 4), 0.5), steps=20)
    people = replace(rows, unit="user", unit_ids=np.array([0, 0, 1, 1]))
    of_people = compose([people] * 2, delta=DELTA, by="unit_id", tuning=Tuning(mean=2))
    of_rows = compose([rows] * 2, delta=DELTA, tuning=Tuning(mean=2))
    assert of_people.worst_case_epsilon > of_rows.worst_case_epsilon
