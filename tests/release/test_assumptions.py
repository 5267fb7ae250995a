"""One person more or less changes one record: what every release rests on, held against the accountants."""

import numpy as np
import pytest

import indpriv
from indpriv.release.sources import to_cells


@pytest.mark.parametrize(("accountant", "wobble"), [("rdp", 1e-14), ("pld", 1e-9)])
def test_given_the_norms_nobody_elses_epsilon_depends_on_who_else_is_there(accountant, wobble):
    rng = np.random.default_rng(0)
    norms = rng.gamma(2.0, 0.3, 60) * np.exp(rng.normal(0, 0.2, (20, 60)))
    log = indpriv.NormLog.from_arrays(
        norms,
        np.arange(20),
        total_steps=20,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.2,
    )
    whole = indpriv.account(log, delta=1e-5, accountant=accountant)
    for gone in (
        [int(np.argmax(whole.epsilon))],
        [int(np.argmin(whole.epsilon))],
        list(range(1, 60, 2)),
    ):
        rest = np.delete(np.arange(60), gone)
        rows = log.take(rest)
        without = indpriv.account(rows, delta=1e-5, accountant=accountant)
        assert np.abs(without.epsilon - whole.epsilon[rest]).max() <= wobble
        worst = whole.worst_case_epsilon
        assert (to_cells(without.epsilon, worst) == to_cells(whole.epsilon[rest], worst)).all()


@pytest.mark.parametrize("rounding", [0, 0.01])
def test_nor_do_those_of_people_depend_on_how_many_rows_others_have(rounding):
    rng = np.random.default_rng(0)
    unit = np.repeat(np.arange(22), np.append(rng.integers(1, 6, 20), [70, 9]))
    norms = rng.gamma(2.0, 0.3, len(unit)) * np.exp(rng.normal(0, 0.2, (5, len(unit))))
    run = {
        "total_steps": 5,
        "noise_multiplier": 2.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.1,
        "rounding": rounding,
    }
    log = indpriv.NormLog.from_arrays(norms, np.arange(5), unit="user", unit_ids=unit, **run)
    whole = indpriv.account(log, delta=1e-5)
    for gone in ([20], [21], [20, 21]):
        without = indpriv.account(log.take(np.flatnonzero(~np.isin(unit, gone))), delta=1e-5)
        rest = ~np.isin(whole.example_ids, gone)
        assert np.abs(without.epsilon - whole.epsilon[rest]).max() <= 1e-14
    assert (
        without.worst_case_epsilon < whole.worst_case_epsilon
    )  # why the most rows of one person must be public


def test_all_epsilons_of_truncated_batches_depend_on_the_number_of_examples():
    """Why neither they nor statements are released where a person may be added."""
    norms = np.random.default_rng(0).gamma(2.0, 0.3, (4, 60))
    run = {"total_steps": 4, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.2}
    run |= {"sampler": "truncated_poisson", "max_batch_size": 14}
    logs = [indpriv.NormLog.from_arrays(norms[:, :n], np.arange(4), **run) for n in (60, 59)]
    whole, without = (indpriv.account(log, delta=1e-5).epsilon for log in logs)
    assert (without < whole[:-1] * (1 - 1e-4)).all()
