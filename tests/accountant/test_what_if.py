import numpy as np
import pytest

from indpriv import InputError, NormLog, account
from indpriv.accountant import Method
from indpriv.accountant.what_if import (
    GRADIENTS_FIXED,
    STOPPED_EARLY,
    account_if,
    noise_for_quantile,
    noise_for_worst_case,
)

METHOD = Method(delta=1e-5)


def make_log(norms=None, recorded_steps=None, **changes):
    rng = np.random.default_rng(0)
    norms = rng.exponential(0.4, (40, 30)) if norms is None else norms
    recorded_steps = np.arange(len(norms)) if recorded_steps is None else recorded_steps
    arguments = {
        "total_steps": 40,
        "noise_multiplier": 1.1,
        "max_grad_norm": 1.0,
        "sample_rate": 0.05,
        **changes,
    }
    return NormLog.from_arrays(norms, recorded_steps, **arguments), norms


def test_nothing_changed_is_the_account_itself():
    log, _ = make_log()
    answer = account_if(log, METHOD)
    assert np.array_equal(answer.table.epsilon, account(log, delta=1e-5).epsilon)
    assert (answer.table.claim, answer.assumptions) == ("exact", ())


def test_another_noise_multiplier_is_the_account_of_a_log_with_it_and_an_estimate():
    log, norms = make_log()
    schedule = np.linspace(1.0, 2.0, 40)
    for noise in (2.5, schedule):
        answer = account_if(log, METHOD, noise_multiplier=noise)
        other, _ = make_log(norms, noise_multiplier=noise)
        np.testing.assert_allclose(
            answer.table.epsilon, account(other, delta=1e-5).epsilon, rtol=1e-9
        )
        assert answer.table.claim == "estimate"
        assert "gradient norms are those" in answer.assumptions[0]
        assert answer.table.claim_reason.startswith("Gradient norms are those")


def test_fewer_steps_are_the_account_of_the_shorter_run():
    log, norms = make_log()
    answer = account_if(log, METHOD, total_steps=25)
    shorter, _ = make_log(norms[:25], total_steps=25)
    np.testing.assert_allclose(
        answer.table.epsilon, account(shorter, delta=1e-5).epsilon, rtol=1e-12
    )
    assert (answer.table.claim, answer.assumptions) == ("exact", (STOPPED_EARLY,))
    assert answer.table.account.total_steps == 25


def test_a_shorter_run_has_the_free_records_of_its_steps():
    rng = np.random.default_rng(1)
    steps, norms = np.repeat(np.arange(40), 2), rng.random((40, 30))
    entries = (
        steps,
        np.concatenate([rng.choice(30, 2, replace=False) for _ in range(40)]),
        rng.random(80),
    )
    log, _ = make_log(norms[::10], [0, 10, 20, 30], batch_norms=entries)
    shorter, _ = make_log(
        norms[:25:10],
        [0, 10, 20],
        total_steps=25,
        batch_norms=[part[steps < 25] for part in entries],
    )
    answer = account_if(log, METHOD, total_steps=25)
    assert np.array_equal(answer.table.epsilon, account(shorter, delta=1e-5).epsilon)


def test_fewer_records_are_the_account_of_a_thinner_log():
    log, norms = make_log()
    answer = account_if(log, Method(delta=1e-5, between_records="closest"), every=8)
    thinner, _ = make_log(norms[::8], np.arange(0, 40, 8))
    np.testing.assert_allclose(
        answer.table.epsilon,
        account(thinner, delta=1e-5, between_records="closest").epsilon,
        rtol=1e-12,
    )
    assert answer.table.claim == "estimate"
    assert (
        account_if(log, Method(delta=1e-5, between_records="worst_case"), every=8).table.claim
        == "exact"
    )


def test_thinner_records_are_not_the_levels_that_training_clipped_at():
    log, _ = make_log(recorded_steps=np.arange(40), individually_clipped=True)
    assert account_if(log, METHOD, every=2).table.claim == "estimate"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"total_steps": 41}, "beyond the 40 steps"),
        ({"total_steps": 0}, "total_steps"),
        ({"every": 3}, "needs a record at step 3"),
        ({"every": 0}, "every"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": [1.0, 2.0]}, "noise_multiplier has shape"),
    ],
)
def test_what_the_log_cannot_answer_is_refused(arguments, match):
    log, _ = make_log(np.full((10, 3), 0.4), np.arange(0, 40, 4))
    with pytest.raises(InputError, match=match):
        account_if(log, METHOD, **arguments)


@pytest.mark.parametrize("target", [0.3, 3.0, 30.0])
def test_noise_for_a_worst_case_is_just_enough(target):
    log, norms = make_log(noise_multiplier=np.linspace(1.0, 1.2, 40))
    found = noise_for_worst_case(log, target, METHOD)
    assert found.worst_case_epsilon == found.epsilon <= target
    enough, _ = make_log(norms, noise_multiplier=found.noise_multiplier)
    assert account(enough, delta=1e-5).worst_case_epsilon == pytest.approx(found.epsilon, rel=1e-9)
    less, _ = make_log(norms, noise_multiplier=found.noise_multiplier * 0.999)
    assert account(less, delta=1e-5).worst_case_epsilon > target


def test_noise_for_a_quantile_is_just_enough():
    log, norms = make_log()
    found = noise_for_quantile(log, 0.5, METHOD, quantile=0.5)
    enough, _ = make_log(norms, noise_multiplier=found.noise_multiplier)
    table = account(enough, delta=1e-5)
    assert np.mean(table.epsilon <= 0.5) >= 0.5
    assert found.worst_case_epsilon == pytest.approx(table.worst_case_epsilon, rel=1e-9)
    assert found.worst_case_epsilon > 0.5
    less, _ = make_log(norms, noise_multiplier=found.noise_multiplier * 0.999)
    assert np.quantile(account(less, delta=1e-5).epsilon, 0.5, method="higher") > 0.5
    assert found.assumptions[0] == GRADIENTS_FIXED


def test_targets_that_cannot_be_met_are_refused():
    log, _ = make_log(np.zeros((40, 3)))
    with pytest.raises(InputError, match="not reached even"):
        noise_for_quantile(log, 1.0, METHOD, quantile=0.5)
    with pytest.raises(InputError, match="needs more than"):
        noise_for_worst_case(log, 1e-9, Method(delta=1e-12))
    for target in (0.0, -1.0, np.nan, np.inf, "one", [1.0, 2.0]):
        with pytest.raises(InputError, match="target_epsilon"):
            noise_for_worst_case(log, target, METHOD)
    for quantile in (0.0, 1.1, np.nan, "half"):
        with pytest.raises(InputError, match="quantile"):
            noise_for_quantile(log, 1.0, METHOD, quantile=quantile)
