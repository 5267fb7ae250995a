"""Each loop gets the words that it has earned; harness.py says what a loop is."""

from collections import Counter
from zlib import crc32

import pytest

from indpriv import InputError
from recording.loops import (
    broken_data,
    broken_loss,
    broken_model,
    broken_noise,
    broken_settings,
    broken_update,
    sound,
    sound_losses,
    sound_models,
    sound_settings,
    told,
)
from recording.loops.harness import LINES, LOOPS, MODES, Judged, Loop, run

TOPICS = [
    *(sound, sound_losses, sound_models, sound_settings, told),
    *(broken_data, broken_loss, broken_model, broken_noise, broken_settings, broken_update),
]


def mode_of(loop: Loop) -> str:
    """The mode that CI runs a loop in: always the same, and each one over the loops."""
    return loop.modes[crc32(loop.name.encode()) % len(loop.modes)]


def is_quick(loop: Loop) -> bool:
    """Whether CI runs a loop: many of those that are not much like another."""
    part, left_out = divmod(crc32(loop.name[::-1].encode()), 5)
    return not loop.rare and part % 4 != 1 and left_out > (2 if loop.kind == "broken" else 1)


QUICK = [(loop, mode_of(loop)) for loop in LOOPS.values() if is_quick(loop)]
REST = [(loop, mode) for loop in LOOPS.values() for mode in loop.modes if (loop, mode) not in QUICK]


def name(value):
    return value.name if isinstance(value, Loop) else value


def check(loop: Loop, got: Judged | Exception) -> None:
    """Compare what is said of a run with what the loop has earned."""
    if isinstance(got, Exception):
        # Opacus's own refusals are ValueErrors; any other of them would be a fault of the loop.
        refusals = (ValueError,) if loop.expect == "refused" else (InputError,)
        if loop.kind == "sound" or loop.expect == "declared" or not isinstance(got, refusals):
            raise got
        return
    assert loop.expect != "refused", got
    if loop.kind == "sound":
        assert got.status == "supported", got
    elif loop.expect == "declared":
        assert got.status == "declared", got
    else:
        assert got.status != "supported", got
        assert got.claim != "exact", got
    assert set(got.words) >= set(LINES), got
    assert set(got.words.values()) <= {"verified", "declared", "on trust", "refuted"}, got
    if loop.kind == "sound":
        assert "refuted" not in got.words.values(), got
        assert {got.words[key] for key in LINES[:5]} == {"verified"}, got
    elif loop.expect == "declared":
        assert "refuted" not in got.words.values(), got
        assert "declared" in {got.words[key] for key in loop.lines}, got
    elif loop.expect == "refuted":
        assert got.status in ("unproven", "void"), got
        assert "refuted" in {got.words[key] for key in loop.lines}, got


def test_there_are_loops_of_all_kinds_in_all_modes():
    kinds = Counter(loop.kind for loop, _ in QUICK)
    assert kinds["sound"] >= 45
    assert kinds.total() >= 110
    assert {loop.topic for loop in LOOPS.values()} == {
        topic.__name__.rpartition(".")[2] for topic in TOPICS
    }
    for kind in ("sound", "broken"):
        assert {mode for loop, mode in QUICK if loop.kind == kind} == set(MODES)
    assert {loop.lines[0] for loop, _ in QUICK if loop.kind == "broken"} == set(LINES) - {"start"}


@pytest.mark.parametrize(("loop", "mode"), QUICK, ids=name)
def test_a_loop_gets_its_words(loop, mode, tmp_path):
    check(loop, run(loop, mode, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "mode"), REST, ids=name)
def test_a_loop_gets_its_words_in_every_mode(loop, mode, tmp_path):
    check(loop, run(loop, mode, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop", [loop for loop in LOOPS.values() if loop.kind == "sound"], ids=name
)
def test_a_sound_loop_gives_no_false_alarm_in_20_repetitions(loop, tmp_path):
    for repetition in range(20):
        mode = loop.modes[repetition % len(loop.modes)]
        check(loop, run(loop, mode, tmp_path / str(repetition)))
