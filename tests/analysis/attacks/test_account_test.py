"""The test of an account by the attacker that it assumes: it holds, and it has power."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from indpriv import InputError, NormLog
from indpriv.accountant.risk import predicted_evidence
from indpriv.analysis.attacks.canaries import simulated_evidence
from indpriv.analysis.attacks.evidence import agree, identities, separation_of, too_few_runs
from indpriv.attack_scores import log_likelihood_ratio
from indpriv.norm_log.fields import StepSettings

SIGMA, RATE, STEPS = 1.0, 0.1, 60


def study(rng, *, runs=40, targets=250, shared=0.3, account=lambda norms: norms, rate=RATE):
    """Runs whose norms follow their own noise, and what an account says of the norms it sees.

    shared: how much of the noise of a run is common to its targets.
    """
    parts = []
    for run in range(runs):
        member = rng.random(targets) < 0.5
        total, norms, rows = np.zeros(targets), rng.integers(10, 101, targets) / 100, []
        for _ in range(STEPS):
            noise = np.sqrt(shared) * rng.normal() + np.sqrt(1 - shared) * rng.normal(size=targets)
            seen = noise + member * (rng.random(targets) < RATE) * norms / SIGMA
            total += log_likelihood_ratio(
                seen, relative_norm=norms, noise_multiplier=SIGMA, sample_rate=RATE
            )
            rows.append(norms)
            norms = np.clip(np.round(norms * np.exp(-0.1 * seen), 2), 0.02, 1.0)
        log = NormLog.from_arrays(
            account(np.array(rows)), np.arange(STEPS), total_steps=STEPS, noise_multiplier=SIGMA,
            max_grad_norm=1.0, sample_rate=rate, rounding=0,
        )  # fmt: skip
        parts.append(predicted_evidence(log).assign(evidence=total, member=member, run=run))
    return pd.concat(parts, ignore_index=True)


def test_identities_hold_though_norms_follow_the_noise():
    found = identities(study(np.random.default_rng(0)))
    assert len(found) == 9
    for one in found:
        assert abs(one.z) < 3.5, one


def forgets_one_record_in_ten(norms):
    """Steps 0, 10, 20, ... count as if the example had not been there."""
    return np.where(np.arange(len(norms))[:, None] % 10 == 0, 0.0, norms)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("account", "rate"),
    [
        (forgets_one_record_in_ten, RATE),
        (lambda norms: norms / 2, RATE),
        (lambda norms: norms, RATE / 2),
    ],
)
def test_a_wrong_account_fails(account, rate):
    """Sizes are chosen such that the smallest fault, a tenth forgotten, is five errors off."""
    rng = np.random.default_rng(1)
    found = identities(study(rng, runs=60, targets=1500, shared=0.0, account=account, rate=rate))
    assert max(abs(one.z) for one in found) > 5
    assert found[-1].mean > found[-1].expected  # it claims less than the attacker achieves


@pytest.mark.slow
def test_errors_are_those_of_runs():
    """With half of the noise shared, z of examples would spread several times as much."""
    rng = np.random.default_rng(2)
    z = np.array(
        [
            [one.z for one in identities(study(rng, runs=8, targets=40, shared=0.5))]
            for _ in range(30)
        ]
    )
    spread = z[:, [0, 1, -1]].std(axis=0)
    assert (spread > 0.7).all()
    assert (spread < 1.5).all()


def test_the_separation_is_the_squared_mu_of_a_gaussian_mechanism():
    rng = np.random.default_rng(3)
    settings = StepSettings.from_values(1, 2.0, 1.0, 1.0)
    member = np.repeat([True, False], 40_000)
    scores = simulated_evidence(settings, 1.0, member, rng)
    log = NormLog.from_arrays(
        np.ones((1, 80_000)), [0], total_steps=1, noise_multiplier=2.0, max_grad_norm=1.0,
        sample_rate=1.0, rounding=0,
    )  # fmt: skip
    run = np.tile([0, 1], 40_000)
    found = separation_of(predicted_evidence(log).assign(evidence=scores, member=member, run=run))
    assert found.expected == pytest.approx(0.25)
    assert found.mean**0.5 == pytest.approx(0.5, abs=0.02)
    # The ratio of a Gaussian mechanism is Gaussian.
    assert stats.kstest(scores[member], stats.norm(0.125, 0.5).cdf).pvalue > 1e-3
    assert stats.kstest(scores[~member], stats.norm(-0.125, 0.5).cdf).pvalue > 1e-3


def test_refusals():
    evidence = study(np.random.default_rng(4), runs=2, targets=20)
    with pytest.raises(InputError, match="of one run"):
        identities(evidence[evidence["run"] == 0])
    with pytest.raises(InputError, match="no members, or no others"):
        identities(evidence[evidence["member"]])


def test_a_side_of_one_run_and_evidence_without_spread_are_defined():
    names = ["with_example", "without_example", "separation", 2.0]
    predicted = pd.DataFrame(np.zeros((8, 4)), columns=names)
    run, member = np.repeat([0, 1], 4), np.arange(8) % 2 == 0
    for side in (member & (run == 0), member | (run == 0)):
        with pytest.raises(InputError, match="of one run"):
            identities(predicted.assign(evidence=np.arange(8.0), member=side, run=run))
    found = identities(predicted.assign(evidence=0.0, member=member, run=run))  # nobody took part
    assert [one.z for one in found] == [0.0] * len(found)
    assert agree(found)
    off = identities(predicted.assign(evidence=1.0, member=member, run=run))
    assert not agree(off)


def test_few_runs_are_said_to_decide_nothing_and_how_many_would():
    found = identities(study(np.random.default_rng(4), runs=2, targets=40))
    runs, needed, enough = too_few_runs(found)
    assert (runs, enough) == (2, 12)
    assert stats.t.sf(needed, 1) == pytest.approx(1e-3 / 9 / 2, rel=1e-6)
    huge = [replace(one, mean=one.expected + 20 * one.standard_error) for one in found]
    assert agree(huge)
    assert too_few_runs(identities(study(np.random.default_rng(4), runs=12, targets=40))) is None
    assert too_few_runs(()) is None


def test_an_identity_beyond_all_floats_contradicts_the_account():
    evidence = study(np.random.default_rng(4), runs=12, targets=40)
    first = evidence.index[evidence["member"]][0]
    evidence.loc[first, "evidence"] = -800.0  # of probability exp(-800), if it holds
    found = identities(evidence)
    assert [one.z for one in found if one.name == "with: exp(-L)"] == [np.inf]
    assert not agree(found)
