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
        norms, np.arange(20), total_steps=20, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.2
    )
    everybody = indpriv.account(log, delta=1e-5, accountant=accountant)
    for gone in ([int(np.argmax(everybody.epsilon))], [int(np.argmin(everybody.epsilon))], list(range(1, 60, 2))):
        rest = np.delete(np.arange(60), gone)
        without = indpriv.account(log.take(rest), delta=1e-5, accountant=accountant)
        assert np.abs(without.epsilon - everybody.epsilon[rest]).max() <= wobble
        worst = everybody.worst_case_epsilon
        assert (to_cells(without.epsilon, worst) == to_cells(everybody.epsilon[rest], worst)).all()
