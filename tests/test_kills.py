"""Kills at random moments: what was acknowledged is there, and nothing half-written reads as whole."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from indpriv import NormLog
from indpriv._files import read_json, read_parquet
from indpriv.audit import audit, read_summary
from indpriv.errors import InputError
from indpriv.recording import StepOptions, replay
from indpriv.release import Request, release
from killed import RESUMED_AT, SPEC, STEPS, TOLD
from runs import make_run, record

KILLS, INTERRUPTS = 60, 20
GONE_ON = 5  # every fifth is gone on with

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc"),
]


def left_by(kind, folder, times):
    """(the one that was left alone, each that was killed) as (folder, lines that it was told)."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(tests / "killed.py"),
        kind,
        str(folder),
        str(times),
    ]
    subprocess.run(command, check=True, timeout=1800, env=os.environ | {"PYTHONPATH": path})
    found = [(at, lines(at / "told")) for at in sorted(folder.iterdir()) if at.name != "base"]
    assert len(found) == times + 1
    (whole,) = (one for one in found if one[0].name == "whole")
    killed = [one for one in found if one is not whole]
    assert read_json(whole[0] / "end")["status"] == 0, (whole[0] / "said").read_text()
    return whole, killed


def lines(path):
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def reads_as_whole(run_dir):
    """Whether a log opens, and without the caveat that it was not closed; all of it is read."""
    try:
        log = NormLog.open(run_dir)
    except InputError:
        return None, False
    assert len(log.read()) == log.n_records
    return log, not any("not closed" in caveat for caveat in log.caveats)


@pytest.mark.parametrize("kind", ["record", "resume"])
def test_a_recorder_that_is_killed_keeps_what_it_acknowledged(kind, tmp_path):
    (whole, told), killed = left_by(kind, tmp_path, KILLS)
    assert told[-1] == "closed"
    assert reads_as_whole(whole / "run")[1]
    assert any(0 < len(told) < STEPS for _, told in killed)
    for number, (folder, told) in enumerate(killed):
        run_dir, begun = folder / "run", RESUMED_AT * (kind == "resume")
        kept = max([begun, *(int(line) for line in told if line != "closed")])
        log, closed = reads_as_whole(run_dir)
        assert closed or "closed" not in told
        if kept:
            assert kept <= log.total_steps <= STEPS
        if closed:
            assert log.total_steps == STEPS
        if kept and number % GONE_ON == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                options = {"every": 2, "batch_norms": True, "resume_at": log.total_steps}
                gone_on = record(make_run(), run_dir, 1, **options)
            assert gone_on.total_steps == log.total_steps + 10
            assert reads_as_whole(run_dir)[1]


def test_an_audit_that_is_killed_reads_as_none_or_as_whole(tmp_path):
    (whole, _), killed = left_by("audit", tmp_path, KILLS)
    expected = read_parquet(whole / "audit" / "epsilon.parquet")["epsilon"]
    for number, (folder, told) in enumerate(killed):
        output = folder / "audit"
        there = (output / "audit.json").is_file()
        assert there or not told
        if not there:
            with pytest.raises(InputError):
                read_summary(output)
            if number % GONE_ON:
                continue
            audit(folder / "run", output, delta=1e-5)
        assert read_summary(output)["name"] == read_summary(whole / "audit")["name"]
        assert np.array_equal(read_parquet(output / "epsilon.parquet")["epsilon"], expected)


def test_a_release_that_is_killed_is_paid_once_and_the_ledger_goes_on(tmp_path):
    _, killed = left_by("release", tmp_path, KILLS)
    assert any(0 < len(told) < 9 for _, told in killed)
    for folder, told in killed:
        directory, page = folder / "audit", folder / "audit" / "shareable" / "release.json"
        spent = read_json(page)["spent"]["releases"] if page.is_file() else 0
        assert len(told) <= spent + 1
        answers = dict(map(json.loads, told))
        assert spent <= 9
        for quantile, value in answers.items():
            again = release(directory, Request((quantile,), epsilon=0.1))
            assert not again.fresh
            assert again.content["quantiles"] == {f"{quantile:g}": value}
        following = release(directory, Request((0.95,), epsilon=0.1)).content["spent"]
        assert (
            len(told) + 1 <= following["releases"] <= len(told) + 2
        )  # one may have been paid unseen


def test_a_replay_that_is_killed_goes_on(tmp_path):
    (whole, _), killed = left_by("replay", tmp_path, KILLS)
    expected = NormLog.open(whole / "replay").read()
    for number, (folder, told) in enumerate(killed):
        log, closed = reads_as_whole(folder / "replay")
        assert closed or not told
        if log is not None:
            assert np.array_equal(log.read(), expected[: log.n_records])
        if closed:
            assert log.n_records == len(expected)
        if number % GONE_ON == 0:
            replay(folder / "saved", SPEC, folder / "replay", options=StepOptions(**TOLD))
            assert np.array_equal(NormLog.open(folder / "replay").read(), expected)


@pytest.mark.parametrize("kind", ["train", "audit", "replay"])
def test_ctrl_c_leaves_no_child(kind, tmp_path):
    _, killed = left_by(f"ctrl-c {kind}", tmp_path, INTERRUPTS)
    codes = []
    for folder, _ in killed:
        said = (folder / "said").read_text(encoding="utf-8")
        if (folder / "end").is_file():
            end = read_json(folder / "end")
            assert end["left"] == [], said
            codes.append(os.waitstatus_to_exitcode(end["status"]))
        assert not list(folder.rglob("*.tmp"))
    assert set(codes) <= {0, 130}
    assert 130 in codes
