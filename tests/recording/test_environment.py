import os
import re
import shutil
import socket
import subprocess

import pytest
import torch

from indpriv._files import read_json
from indpriv.recording import Recorder, process
from runs import PER_EXAMPLE, make_run

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print()\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-m", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(folder, **options):
    run = make_run()
    recorder = Recorder(folder / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, **options)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(1)
    return (folder / "run/run.json").read_text(), read_json(folder / "run/run.json")


@needs_git
def test_run_json_holds_machine_and_commit_and_no_name(repository):
    text, content = recorded(repository)
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert content["machine"]["device"] == "cpu"
    assert content["machine"]["processor"]
    head = git(repository, "rev-parse", "HEAD").strip()
    assert content["code_commit"] == f"{head}, perhaps with uncommitted changes"
    assert str(repository) not in text
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)


@needs_git
@pytest.mark.parametrize("kept", ["loose", "packed", "detached", "worktree", "below"])
def test_the_commit_is_read_without_git(repository, kept, monkeypatch):
    head = git(repository, "rev-parse", "HEAD").strip()
    if kept == "packed":
        git(repository, "pack-refs", "--all")
    if kept == "detached":
        git(repository, "checkout", "--detach")
    folder = repository / "there"
    if kept == "worktree":
        git(repository, "worktree", "add", "-b", "other/branch", str(folder))
    if kept == "below":
        folder.mkdir()
    monkeypatch.chdir(folder if folder.exists() else repository)
    monkeypatch.setenv("PATH", "")  # no git at all
    assert process.environment_of(torch.device("cpu"))["code_commit"].startswith(f"{head}, ")


@pytest.mark.parametrize(
    "head",
    ["ref: refs/heads/../../../secret", "ref: refs/heads/loop", "ref: refs/\0", "no commit", "",
     "ref: /etc/passwd", "ref: refs/heads/pipe"],
)  # fmt: skip
def test_a_planted_repository_tells_nothing(tmp_path, monkeypatch, head):
    (tmp_path / "secret").write_text("a password")
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/HEAD").write_text(head)
    (tmp_path / ".git/refs/heads/loop").write_text("ref: refs/heads/loop")
    os.mkfifo(tmp_path / ".git/refs/heads/pipe")
    monkeypatch.chdir(tmp_path)
    assert "code_commit" not in process.environment_of(torch.device("cpu"))


@needs_git
def test_a_commit_passed_by_the_user_is_kept(repository):
    _, content = recorded(repository, run_info={"code_commit": "v1.2"})
    assert content["code_commit"] == "v1.2"


def test_no_commit_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "code_commit" not in process.environment_of(torch.device("cpu"))


def test_a_processor_without_a_name_has_a_kind(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_CPUINFO", tmp_path / "absent")
    assert process.environment_of(torch.device("cpu"))["machine"]["processor"]
    (tmp_path / "info").write_text("processor\t: 0\nmodel name\t: A Chip 3000\n")
    monkeypatch.setattr(process, "_CPUINFO", tmp_path / "info")
    assert process.environment_of(torch.device("cpu"))["machine"]["processor"] == "A Chip 3000"
