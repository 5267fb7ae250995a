"""Lines of evidence: every one has a word, and "supported" is earned by checks that passed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv._facts import FAILED, NOT_CHECKED, PASSED
from indpriv.analysis.guarantee import Guarantee, guarantee_of
from indpriv.errors import InputError
from indpriv.norm_log.evidence import (
    CHECKS,
    COMPARISONS,
    LINES,
    evidence,
    is_earned,
    lines_of,
    session_checks,
    unverified,
)
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.round_recorder import RoundRecorder
from synthetic import epsilon_table, session_counts, small_run, sound_checks, write_run

WORDS = ("verified", "declared", "on trust", "refuted")
STATUSES = (PASSED, FAILED, NOT_CHECKED)
NEEDED = sorted({key for line in LINES.values() for key in line.needs})
WITH_LINE = sorted(key for key, each in CHECKS.items() if each.line)


def status_of(checks, recorder=None, **account):
    return guarantee_of(epsilon_table(np.ones(99), **account), checks, recorder or {}).status


def test_lines_and_checks_name_each_other():
    assert {each.line for each in CHECKS.values()} - {""} <= set(LINES)
    assert set(COMPARISONS) <= set(WITH_LINE)
    for line in LINES.values():
        for key in line.needs:  # what verifies a line is never optional, and stands in it
            assert CHECKS[key].line == line.key
            assert not CHECKS[key].optional
    seen = [line.key for line in LINES.values() if line.needs]
    assert seen == ["batch", "contribution", "noise", "update", "settings"]
    assert list(LINES)[: len(seen)] == seen
    assert all(line.advice for line in LINES.values() if line.needs)


drawn = st.dictionaries(st.sampled_from(sorted(CHECKS)), st.lists(st.sampled_from(STATUSES)))


@given(drawn, st.sampled_from([{}, {"start": "random"}, {"seeded": True}, {"replayed": True}]))
def test_supported_means_that_every_needed_check_passed_and_none_failed(statuses, recorder):
    checks = [
        CHECKS[key].fact(status, "as found")
        for key, several in statuses.items()
        for status in several
    ]
    lines = lines_of(checks, recorder)
    assert [line.key for line in lines] == list(LINES)
    assert all(line.status in WORDS and line.detail for line in lines)
    found = {key: set(several) for key, several in statuses.items()}
    for line in lines:
        mine = [each for key, each in CHECKS.items() if each.line == line.key]
        needs = LINES[line.key].needs
        if line.status == "verified":
            assert needs
            assert all(found.get(key) == {PASSED} for key in needs)
            assert all(NOT_CHECKED not in found.get(one.key, ()) or one.optional for one in mine)
        if any(FAILED in found.get(one.key, ()) for one in mine):
            assert line.status == "refuted"
        assert bool(line.advice) == (line.status == "declared" and bool(needs))
    status = status_of(checks, recorder)
    if status == "supported":
        assert is_earned(lines)
        assert not unverified(lines)
        assert not recorder.get("seeded")
        assert not recorder.get("replayed")
        assert not any(check.status == FAILED for check in checks if check.bears_on == "worst_case")


@given(st.dictionaries(st.sampled_from(WITH_LINE), st.sampled_from(STATUSES)))
def test_of_a_sound_run_any_change_that_matters_loses_supported(changes):
    checks = sound_checks(**changes)
    matters = {
        key
        for key, status in changes.items()
        if status == FAILED
        or (
            status == NOT_CHECKED
            and not CHECKS[key].optional
            and CHECKS[key].line not in ("source", "start")
        )
    }
    assert (status_of(checks) == "supported") == (not matters - {"seeds"})


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("missing", [False, True])
def test_a_needed_check_that_was_not_made_loses_supported(key, missing):
    assert status_of(sound_checks()) == "supported"
    checks = [
        check for check in sound_checks(**{key: NOT_CHECKED}) if not missing or check.key != key
    ]
    assert status_of(checks) == "declared"
    one = guarantee_of(epsilon_table(np.ones(99)), checks, {})
    title = LINES[CHECKS[key].line].title.lower()
    assert len(one.reasons) == 1
    assert one.reasons[0].startswith(f"not verified: {title} (")
    assert "; to verify it, " in one.reasons[0]
    assert f"4 of 5 lines verified; {title} declared" in one.evidence


def test_a_guessable_source_is_never_supported():
    seeds = CHECKS["seeds"]
    assert status_of([*sound_checks(), seeds.fact(NOT_CHECKED, "32 bits")]) == "supported"
    assert status_of([*sound_checks(), seeds.fact(FAILED, "a chosen seed")]) == "unproven"
    assert status_of(sound_checks(), {"seeded": True}) == "void"
    words = {line.key: line.status for line in lines_of(sound_checks(), {"seeded": True})}
    assert words["source"] == "refuted"
    assert not is_earned(lines_of(sound_checks(), {"seeded": True}))
    loud = lines_of(sound_checks(), {"no_privacy": "the largest norm"})
    assert {line.key: line.status for line in loud}["noise"] == "refuted"


def test_whatever_chose_the_batches_is_not_verified_where_nobody_knows_it():
    known = {"participation": "known", "neighbouring": "zero_out"}
    assert status_of(sound_checks(), sampler="shuffled", **known) == "supported"
    table = epsilon_table(np.ones(99), sampler="other", **known)
    found = guarantee_of(table, sound_checks(), {})
    assert found.status == "declared"
    assert {line.key: line.status for line in found.lines}["batch"] == "declared"
    assert "looks at no data" in found.reasons[0]


@pytest.mark.parametrize(
    ("changes", "recorder", "close", "status"),
    [
        ({}, {}, True, "supported"),
        ({"compared": None}, {}, True, "declared"),  # from before training was compared
        ({}, {}, False, "unproven"),
        ({"guessable_seed": True}, {}, True, "unproven"),
        ({"seeded": True}, {"seeded": True}, True, "void"),
        ({"noise": None}, {}, True, "declared"),
    ],
)
def test_the_lines_of_a_log(tmp_path, changes, recorder, close, status):
    log, examples = small_run(n=60, steps=4)
    run = write_run(
        tmp_path / "run", log, examples, close=close, recorder=recorder, changes=changes
    )
    opened = open_run(run)
    checks, noted = verify(opened), {**recorder, **opened.header["run"]}
    lines = lines_of(checks, noted)
    assert {line.status for line in lines} <= set(WORDS)
    assert len(lines) == len(LINES)
    assert status_of(checks, noted) == status
    assert is_earned(lines) == (status == "supported")


def test_one_session_that_was_not_compared_leaves_the_run_declared(tmp_path):
    log, examples = small_run(n=60, steps=4)
    run = write_run(tmp_path / "run", log, examples)
    state = read_state(run)
    state.sessions.append(session_counts(4, 60, 0.1, from_step=4, compared=None))
    checks = session_checks(state)
    assert not is_earned(lines_of(checks, {}))
    assert status_of(checks) == "declared"


def test_nothing_is_supported_without_its_lines():
    declared = Guarantee(1.0, 1e-5, 0.1, "declared", "", (), None, (), "")
    with pytest.raises(InputError, match="not every line of evidence is verified"):
        replace(declared, status="supported")


def test_the_sentence_holds_nothing_of_the_data():
    lines = lines_of([CHECKS["seeds"].fact(NOT_CHECKED, "12345 people")], {})
    assert "12345" not in evidence(lines)
    assert evidence(lines).startswith(
        "0 of 5 lines verified; batch declared; contribution declared"
    )


def test_what_was_not_compared_is_listed_once():
    for line in lines_of([CHECKS["seeds"].fact(NOT_CHECKED, "")], {})[:5]:
        assert line.detail.startswith("not compared: ")
        assert line.detail.count("not compared") == 1


STORED = sorted(path for path in (Path(__file__).parents[1] / "baseline" / "runs").iterdir())


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_no_stored_run_from_before_is_verified(path):
    """Watched, resumed, damaged, replayed and converted ones."""
    opened = open_run(path)
    noted = opened.header["run"]
    lines = lines_of(verify(opened), noted)
    assert [line.key for line in lines] == list(LINES)
    assert {line.status for line in lines} <= {"declared", "on trust", "refuted"}
    assert status_of(verify(opened), noted) != "supported"


def test_rounds_of_another_trainer_are_declared(tmp_path):
    with RoundRecorder(tmp_path / "run", ["a", "b", "c"], sampler="poisson") as recorder:
        for _ in range(3):
            recorder.round(
                ["a", "b"], [0.4, 0.6], noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5
            )
    opened = open_run(tmp_path / "run")
    noted = opened.header["run"]
    assert status_of(verify(opened), noted) == "declared"
    assert evidence(lines_of(verify(opened), noted)).startswith("0 of 5 lines verified")
