"""Scores of units beside groups of non-members."""

import numpy as np
import pytest

from indpriv import AttackScores, InputError
from indpriv.analysis.attacks.membership import UNIT_RULES, calibrated_unit_scores
from indpriv.analysis.attacks.rates import rates_of
from synthetic import parts

SIZES = np.repeat([1, 2, 7, 20], 60)
OWNERS = np.repeat(np.arange(len(SIZES)), SIZES)


def row_scores(rng, shift=0.0):
    n = len(OWNERS)
    return AttackScores(
        scores=np.concatenate([rng.normal(shift, 1, n), rng.normal(0, 1, n)]),
        member=np.arange(2 * n) < n,
        method="simulated",
    )


@pytest.mark.parametrize("rule", UNIT_RULES)
def test_ranks_are_uniform_without_a_leak_and_high_with_one(rule):
    rng = np.random.default_rng(0)
    found = calibrated_unit_scores(row_scores(rng), OWNERS, rule)
    units = found.scores[found.member]
    assert len(units) == len(SIZES)
    for size in (1, 20):  # whatever the number of rows
        assert abs(units[size == SIZES].mean() - 0.5) < 4 / np.sqrt(12 * 60)
    null = parts(rates_of(found, part=rule, tests=1))[rule]["auc"]
    assert null.joint_low < 0.5 < null.joint_high
    leak = calibrated_unit_scores(row_scores(rng, 0.8), OWNERS, rule)
    assert parts(rates_of(leak, part=rule, tests=1))[rule]["auc"].joint_low > 0.6
    many = leak.scores[leak.member][SIZES == 20]
    assert many.mean() > leak.scores[leak.member][SIZES == 1].mean()


def test_groups_hold_each_non_member_at_most_once():
    found = calibrated_unit_scores(row_scores(np.random.default_rng(1)), OWNERS)
    assert (~found.member).sum() <= len(SIZES)
    assert found.example_ids[found.member].tolist() == [str(k) for k in range(len(SIZES))]
    with pytest.raises(InputError, match="3 owners for"):
        calibrated_unit_scores(row_scores(np.random.default_rng(1)), OWNERS[:3])
