"""Several runs on the same people: their steps count as those of one long run."""

from dataclasses import replace

import numpy as np
import pytest

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
    worst, tolerance = together.details["unit_worst_case"], together.account.tolerance or 1e-12
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
    monkeypatch.setattr("indpriv.accountant.composition.runs.block_size", lambda _: 3)
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
        ([log, people], "example_id", "differ in unit: 'example', 'user'"),
        ([people, people], "example_id", "several rows"),
        ([log, log], "unit_id", "run 1 has no unit ids"),
        ([log, texts], "example_id", "numbers in some runs and texts in others"),
        ([log, log], "name", "by='name'"),
        ([people, people], "unit_id", 'pass accountant="rdp"'),
        ([replace(log, neighbouring="zero_out")] * 2, "example_id", "under add_remove only"),
    ):
        with pytest.raises(InputError, match=reason):
            compose(runs, delta=DELTA, by=by, accountant="pld")


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
