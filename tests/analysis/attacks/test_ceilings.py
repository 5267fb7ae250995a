"""Limits of attacks: those of the guarantee, whatever participation it assumes."""

import numpy as np
import pytest

from indpriv import NormLog, account, membership_risk
from indpriv.analysis.attacks.ceilings import ceilings_of


@pytest.mark.parametrize("participation", ["secret", "known"])
def test_limits_of_the_worst_case_are_those_of_its_risk(participation):
    steps, positions = np.divmod(np.arange(24), 4)
    log = NormLog.from_arrays(
        np.full((1, 4), 0.5),
        [0],
        total_steps=6,
        noise_multiplier=1.5,
        max_grad_norm=1.0,
        sample_rate=1.0,
        batch_norms=(steps, positions, np.full(len(steps), 0.5)),
    )
    table = account(log, delta=1e-5, participation=participation)
    risk = membership_risk(
        log, delta=1e-5, false_positive_rate=0.01, participation=participation
    ).worst_case
    limits = ceilings_of(log, table)
    assert limits is not None
    assert limits.worst_case["0.01"] == pytest.approx(risk.true_positive_rate[0, 0], rel=1e-6)
    assert limits.advantage == pytest.approx(risk.advantage[0], rel=1e-6)
