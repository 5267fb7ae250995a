import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synthetic
from indpriv import EvidenceError
from indpriv.analysis.guarantee import guarantee_of
from indpriv.norm_log.evidence import FALSE_ALARM, session_checks
from indpriv.norm_log.journal_state import LogState


def checks_of(session, n_examples):
    """The checks of a closed log with one session."""
    header = {"n_examples": n_examples, "individually_clipped": False, "privacy_filter": {}}
    state = LogState(Path("run"), {**header, "run": {}}, sessions=[session], closed=True)
    return session_checks(state)


def participation(counts, rates):
    """The check of how often each example was drawn, for counts (n,) in steps at some rates."""
    n, steps, rates = len(counts), len(rates), np.asarray(rates)
    found = synthetic.session_counts(
        steps,
        n,
        float(rates.mean()),
        participations=int(counts.sum()),
        participations_min=int(counts.min()),
        participations_max=int(counts.max()),
        participations_variance=float((rates * (1 - rates)).sum()),
        participations_spread=float(np.square(counts - rates.sum()).sum()),
    )
    checks = checks_of(found, n)
    return next(check for check in checks if check.title == "participation of each example")


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([(4, True)] * 9, "passed"),  # told
        ([(4, True), (9, True), (2, True), *[(7, False)] * 9], "passed"),  # interrupted
        ([(4, True), (9, True), (2, True), (7, True)], "not checked"),
        ([*[(4, True)] * 4, (5, False)], "not checked"),  # went on where it liked the batch
        ([(0, True)] * 4, "not checked"),
    ],
)
def test_batches_in_hand_at_the_ends_of_sessions_are_judged_together(ends, status):
    header = {"n_examples": 100, "individually_clipped": False, "privacy_filter": {}, "run": {}}
    sessions = [synthetic.session_counts(30, 100, 0.1)]
    state = LogState(Path("run"), header, sessions=sessions, closed=True, ends=ends)
    found = {c.status for c in session_checks(state) if c.key == "batch_for_every_step"}
    assert found == {"passed", status}


@pytest.mark.parametrize("rates", [[0.1] * 30, [0.02] * 200, np.linspace(0.01, 0.5, 40)])
def test_poisson_sampling_passes_and_shuffling_does_not(rates):
    rng = np.random.default_rng(0)
    coins = (rng.random((400, len(rates))) < rates).sum(axis=1)
    assert participation(coins, rates).status == "passed"
    even = np.full(400, round(sum(rates)))
    assert participation(even, rates).status == "failed"
    assert "shuffled" in participation(even, rates).detail


def test_an_example_drawn_twice_as_often_as_the_others_fails():
    counts = np.random.default_rng(0).binomial(1000, 0.1, 300)
    counts[7] = 200
    assert participation(counts, [0.1] * 1000).status == "failed"


@given(st.integers(1, 50), st.floats(0.01, 0.9), st.integers(0, 10**6))
def test_sound_runs_of_any_size_pass(steps, rate, seed):
    counts = np.random.default_rng(seed).binomial(steps, rate, 60)
    assert participation(counts, [rate] * steps).status == "passed"
    assert FALSE_ALARM <= 1e-6


def test_large_numbers_are_written_as_everywhere():
    drawn = {"participations_min": 110, "participations_max": 200}
    checks = checks_of(synthetic.session_counts(8850, 60_000, 1 / 59, **drawn), 60_000)
    assert any("8,850 steps" in check.detail for check in checks)
    for check in checks:
        assert not re.search(r"(?<![.\d])\d{4}", check.detail), check.detail


@pytest.mark.parametrize(
    ("larger", "excess", "name", "status"),
    [
        (0, 0.0, "norms in training", "passed"),
        (1, 2e-5, "norm pass, precision", "failed"),  # one run's max-pools over equal pixels
        (45, 1e-3, "norm pass, precision", "failed"),
        (46, 1e-3, "norms in training", "failed"),  # too many for chance
        (46, 1e-5, "norms in training", "failed"),
        (3, 4.7e-3, "norm pass, precision", "failed"),  # as often and as large as on CIFAR-10
        (4, 1e-2, "norm pass, precision", "failed"),
        (5, 1e-2, "norms in training", "failed"),  # too many for their size
        (20, 3e-3, "norms in training", "failed"),
        (1, 1.01e-2, "norms in training", "failed"),  # too much for rounding
        (45_698, 1e-7, "norms in training", "failed"),
        (1, 0.0, "norm pass, precision", "failed"),  # counts that no recorder writes
    ],
)
def test_a_trifle_in_few_norms_is_a_matter_of_precision_and_more_is_another_training(
    larger, excess, name, status
):
    counts = synthetic.session_counts(
        885,
        60_000,
        1 / 59,
        compared_norms=45_698,
        larger_norms=larger,
        largest_excess=excess,
    )
    checks = checks_of(counts, 60_000)
    found = [
        check for check in checks if check.title in ("norms in training", "norm pass, precision")
    ]
    assert [(check.title, check.status) for check in found] == [(name, status)]
    table = synthetic.epsilon_table(np.ones(99))
    assert (guarantee_of(table, found, {}).status == "unproven") == (
        name == "norms in training" and status == "failed"
    )


def test_few_larger_norms_do_not_hide_that_many_were_larger_and_clipped_in_both():
    compared = {"compared_norms": 45_698, "larger_norms": 4, "largest_excess": 0.009}
    for clipped, told in ((0, False), (40_000, True)):
        counts = synthetic.session_counts(
            885, 60_000, 1 / 59, larger_clipped_norms=clipped, **compared
        )
        found = {check.title: check for check in checks_of(counts, 60_000)}
        assert found["norm pass, precision"].status == "failed"
        assert ("norms in training" in found) == told
        if told:
            assert found["norms in training"].status == "not checked"
            assert "no epsilon holds" in found["norms in training"].detail


@pytest.mark.parametrize(
    "strange",
    [
        {"compared": {"found": {"loss": {"steps": -(10**6), "refuted": 0, "unknown": 0, "detail": ""}}}},
        {"clip_rounding": -1.0},
        {"misclipped_gradients": -1},
        {"participations_variance": 1e300},
        {"participations_spread": 1e300},
        {"noise": {"values": 10**6, "variance": -1e-200, "least_variance": 1.0, "least_values": 9,
                   "fourth_moment": 3.0, "previous": 0.0, "first": 0.0, "along_sum": 0.0}},
    ],
)  # fmt: skip
def test_counts_that_no_session_has_are_one_message(strange):
    with pytest.raises(EvidenceError, match=f"{next(iter(strange))}.*is not right"):
        synthetic.session_counts(30, 100, 0.1, **strange)


def test_more_participations_than_draws_can_have_do_not_fit_poisson_sampling():
    counts = synthetic.session_counts(30, 100, 0.1, expected_participations=1e6)
    found = checks_of(counts, 100)
    words = {check.key: check.status for check in found}
    assert words["batch_sizes"] == words["participation"] == "failed"
