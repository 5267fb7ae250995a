"""What is no number, or no yes or no, is one message, in whatever function it is passed."""

import re

import numpy as np
import pytest

from indpriv import AttackScores, InputError, NormLog, PrivacyFilter, account, membership_risk
from indpriv.accountant.rdp import compute_rdp
from indpriv.accountant.runs import Tuning, compose
from indpriv.audit.gate import check_limits
from indpriv.norm_log.fields import RecordingPolicy

HUGE = 10**400  # of no float
ONE_STEP = {"noise_multiplier": 1.0, "sample_rate": 0.1}


def made(**other):
    given = {"total_steps": 3, "max_grad_norm": 1.0} | ONE_STEP | other
    return NormLog.from_arrays([[0.1, 2.0]], [0], **given)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("total_steps", lambda: made(total_steps=HUGE)),
        ("noise_multiplier", lambda: made(noise_multiplier=HUGE)),
        ("sample_rate", lambda: made(sample_rate=[0.1, 0.1, -HUGE])),
        ("clipping_norm_epsilon", lambda: made(clipping_norm_epsilon=HUGE)),
        ("most_participations", lambda: made(most_participations=HUGE)),
        ("every", lambda: made().thin(HUGE)),
        ("orders", lambda: account(made(), delta=1e-5, orders=[HUGE])),
        ("workers", lambda: account(made(), delta=1e-5, workers="2")),
        ("workers", lambda: membership_risk(made(), delta=1e-5, workers=2.5)),
        ("false_positive_rate", lambda: membership_risk(made(), delta=1e-5,
                                                        false_positive_rate=HUGE)),
        ("epsilon", lambda: membership_risk(made(), delta=1e-5, epsilon=HUGE)),
        ("rdp_cap", lambda: PrivacyFilter(2.0, HUGE)),
        ("mean", lambda: Tuning(HUGE)),
        ("relative_norms", lambda: compute_rdp(**ONE_STEP, relative_norms="no", orders=2)),
        ("relative_norms", lambda: compute_rdp(**ONE_STEP, relative_norms=HUGE, orders=2)),
        ("growth", lambda: RecordingPolicy(2, growth=HUGE)),
        ("batch_norms", lambda: RecordingPolicy(2, batch_norms="no")),
        # A norm log is exact if training clipped individually, which "no" would count as
        ("individually_clipped", lambda: made(individually_clipped="no")),
        ("fair_coins", lambda: AttackScores(np.zeros(2), np.ones(2, bool), "", fair_coins="no")),
        ("log='runs/a'", lambda: compose("runs/a", delta=1e-5)),
        ("log=None", lambda: compose(None, delta=1e-5)),
        ("--max group_ratio", lambda: check_limits({"max_group_ratio": 0.5})),
    ],
)  # fmt: skip
def test_one_message_names_what_is_wrong(name, call):
    with pytest.raises(InputError, match=f"^{re.escape(name)}") as found:
        call()
    assert found.type is InputError


def test_what_they_accept_is_as_it_was():
    log = made(individually_clipped=np.True_, most_participations=np.int64(3))
    assert log.individually_clipped is True
    assert RecordingPolicy(np.int64(2), batch_norms=np.False_).batch_norms is False
    check_limits({"max_group_ratio": 1.0})
