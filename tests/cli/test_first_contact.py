"""Where a command did not get what it needs, its message says what to type next, and that works."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from command_lines import run
from indpriv._files import JournalWriter, writer_of

STEPS = {"steps": 9, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5}
EXAMPLE = Path(__file__).parents[2] / "audits/digits.toml"
KINDS = {"sampler": "poisson", "unit": "example", "neighbouring": "add_remove"}


@pytest.fixture
def indpriv(tmp_path, monkeypatch, capsys):
    """The command line in an empty folder, as its standard output and error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, code=0):
        assert run([*map(str, arguments)]) == code
        return capsys.readouterr()

    return call


@pytest.fixture
def a_run(indpriv):
    """runs/one, a run of 1,500 examples whose run.json names no delta."""
    np.savez("norms.npz", norms=np.full((2, 1500), 0.5), recorded_steps=[0, 5])
    Path("run.json").write_text(json.dumps(STEPS | KINDS), encoding="utf-8")
    indpriv("import", "norms.npz", "--run", "run.json", "--output-dir", "runs/one")
    return Path("runs/one")


def typed(message, command):
    """The arguments of each `indpriv COMMAND ...` that a message says to type."""
    found = re.findall(rf"(?:indpriv|audits) ({command} [^\s;,]+(?: --delta \S+)?)", message)
    return [shlex.split(words) for words in found]


def test_without_a_run_the_runs_here_are_listed(indpriv, a_run):
    shutil.copytree(a_run, "reports/demo/run")
    shutil.copytree(a_run, a_run / "holdout")  # test examples are no run of their own
    Path("reports/demo/ledger").mkdir()
    shutil.copy(a_run / "journal.jsonl", "reports/demo/ledger")  # what publish paid for is none
    for arguments in (["audit"], ["audit", "nowhere"], ["audit", "."], ["audit", "runs"]):
        message = indpriv(*arguments, code=2).err
        assert message.startswith("error:")
        choices = [words[1] for words in typed(message.split("type one of")[1], "audit")]
        below = "runs" if arguments[-1] == "runs" else "."
        assert choices == [
            str(path) for path in (a_run, Path("reports/demo/run")) if path.is_relative_to(below)
        ]
    indpriv("audit", *choices, "--delta", "1e-5")
    for words in typed(indpriv("check", code=2).err.split("type one of")[1], "check"):
        indpriv(
            *words, "--set", "only=log", code=3
        )  # nothing is failed, and no recorder saw the training


@pytest.mark.parametrize("arguments", [["audit"], ["check"], ["audit", "nowhere"]])
def test_where_there_is_no_run_it_says_how_to_record_one(indpriv, arguments):
    message = indpriv(*arguments, code=2).err
    for words in ("no run was found here", "indpriv demo", "Recorder"):
        assert words in message


def test_a_run_without_delta(indpriv, a_run):
    message = indpriv("audit", a_run, code=2).err
    assert "delta is not given" in message
    assert "n = 1,500" in message
    [words] = typed(message, "audit")
    assert 0 < float(words[-1]) < 1 / 1500
    assert "You may promise" in indpriv(*words).out


def test_a_run_that_is_still_written(indpriv, a_run):
    assert writer_of(a_run) is None
    quiet = indpriv("audit", a_run, "--delta", "1e-5").err
    assert "still writing" not in quiet
    writer = JournalWriter(a_run)
    try:
        found = indpriv("audit", a_run, "--delta", "1e-5")
    finally:
        writer.close()
    assert f"process {os.getpid()} is still writing {a_run}" in found.err
    assert "type the same command again" in found.err
    assert "You may promise" in found.out
    assert writer_of(a_run) is None


def test_an_audit_directory_instead_of_a_run(indpriv, a_run):
    indpriv("audit", a_run, "--delta", "1e-5")
    message = indpriv("audit", a_run / "audit", code=2).err
    assert typed(message, "audit")[-1] == ["audit", str(a_run)]
    shutil.move(a_run / "audit", "runs/report")
    for path in ("runs/report", "runs/report/report.html"):
        message = indpriv("audit", path, code=2).err
        assert f"open {Path('runs/report/report.html')}" in message
        assert typed(message, "show") == [["show", "runs/report"]]
        assert typed(message, "audit")[-1] == ["audit", str(a_run)]


def test_a_run_instead_of_an_audit_directory(indpriv, a_run):
    message = indpriv("gate", a_run, "--max", "delta=1e-5", code=2).err
    [words] = typed(message, "audit")
    indpriv(*words, "--delta", "1e-5")
    message = indpriv("gate", a_run, "--max", "delta=1e-5", code=2).err
    assert f"its audit is in {a_run / 'audit'}" in message
    indpriv("gate", a_run / "audit", "--max", "delta=1e-5")
    assert "nowhere does not exist" in indpriv("gate", "nowhere", "--max", "delta=1", code=2).err


@pytest.mark.parametrize("taken", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_archive_of_a_run(indpriv, a_run, taken):
    shutil.make_archive("one", "zip", a_run)
    if taken:
        Path("one").mkdir()
    message = indpriv("audit", "one.zip", code=2).err
    unpack = shlex.split(re.search(r"python (-m zipfile [^,]+),", message)[1])
    subprocess.run([sys.executable, *unpack], check=True, timeout=60)
    [words] = typed(message, "audit")
    assert words[1] == ("one-unpacked" if taken else "one")
    assert "You may promise" in indpriv(*words, "--delta", "1e-5").out


def test_a_file_instead_of_a_run(indpriv, a_run):
    assert typed(indpriv("audit", a_run / "run.json", code=2).err, "audit") == [
        ["audit", str(a_run)]
    ]
    Path("my.toml").write_text('name = "my"\n', encoding="utf-8")
    message = indpriv("audit", "my.toml", code=2).err
    assert typed(message, "train") == [["train", "my.toml"]]
    assert typed(message, "audit") == [["audit", str(Path("runs/my"))]]
    Path("saved").mkdir()
    with zipfile.ZipFile("saved/step_10.pt", "w"):
        pass
    for path in ("saved", "saved/step_10.pt"):
        message = indpriv("audit", path, code=2).err
        assert "--spec train.py:spec" in message
    assert "pass the folder of checkpoints" in indpriv("audit", "--spec", "a.py:b", code=2).err


def test_train_without_a_file_lists_those_there_are(indpriv):
    message = indpriv("audits", "train", code=2).err
    shipped = [words[1] for words in typed(message.split("type one of")[1], "train")]
    assert "digits.toml" in message
    assert message.endswith("utkface_gender_individual.toml\n")  # not cut
    assert all(Path(path).is_file() for path in shipped)
    for folder, name in (("audits", "mine.toml"), ("other", "theirs.toml")):
        Path(folder).mkdir()
        (Path(folder) / name).write_text("", encoding="utf-8")
    for arguments, reason, expected in (
        ([], "needs an audit file", "audits/mine.toml"),
        (["nowhere.toml"], "nowhere.toml does not exist", "audits/mine.toml"),
        (["other"], "other is a directory", "other/theirs.toml"),
    ):
        message = indpriv("audits", "train", *arguments, code=2).err
        assert reason in message
        choices = message.split("type one of")[1]
        assert typed(choices, "train") == [["train", str(Path(expected))]]


def test_attacks_and_references_need_a_run_or_an_audit_file(indpriv):
    for arguments, reason in (
        (["audits", "shadow", "nowhere.toml"], "nowhere.toml does not exist"),
        (["audits", "attack", "nowhere.toml"], "nowhere.toml does not exist"),
        (["attack", "nowhere"], "nowhere does not exist"),
    ):
        assert reason in indpriv(*arguments, code=2).err
    Path("run").mkdir()
    message = indpriv("audits", "shadow", "run", code=2).err
    assert "run is a directory, and python -m audits shadow needs an audit file" in message
    assert "python -m audits shadow " in message.split("type one of")[1]


def test_a_mistyped_command_and_none_at_all(indpriv):
    assert "Did you mean 'audit'" in indpriv("audt", code=2).err
    alone = indpriv(code=2)
    assert "Start with: indpriv demo" in alone.out + alone.err


def test_python_m_indpriv():
    command = [sys.executable, "-m", "indpriv", "audit", "--help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "Usage: indpriv audit" in shown.stdout


@pytest.mark.parametrize(
    ("shell", "words"),
    [("bash", "complete "), ("zsh", "#compdef indpriv"), ("fish", "complete --command indpriv")],
)
def test_completion(shell, words, indpriv, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert words in indpriv("--show-completion", shell).out
    monkeypatch.setenv("_INDPRIV_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "indpriv au")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COMP_WORDS", "indpriv au")
    monkeypatch.setenv("COMP_CWORD", "1")
    offered = indpriv().out
    assert "audit" in offered
    assert "check" not in offered


def test_a_run_of_experiments_is_named_for_their_commands(indpriv, a_run):
    for command in ("images", "leak"):
        message = indpriv("audits", command, "runs", code=2).err
        assert f"\n  python -m audits {command} {a_run}" in message
    message = indpriv("audits", "attack", EXAMPLE, code=2).err
    assert typed(message, "shadow") == [["shadow", str(EXAMPLE)]]


def test_experiments_list_the_audit_files_to_choose_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["sweep", "--over", "epochs=1,2"], ["subsets", "--target", "1"]):
        assert run(["audits", *words]) == 2
        printed = capsys.readouterr().err
        assert f"python -m audits {words[0]} needs an audit file; type one of" in printed
        assert re.search(rf"\n  python -m audits {words[0]} \S*adult.toml\n", printed)
