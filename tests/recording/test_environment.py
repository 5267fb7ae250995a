import re
import shutil
import socket
import subprocess

import pytest
import torch

from indpriv._files import read_json
from indpriv.recording import Recorder, environment
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
    assert content["code_commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert str(repository) not in text
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)


@needs_git
def test_uncommitted_changes_are_reported(repository):
    (repository / "data.csv").write_text("new, and no code that git follows\n")
    clean = environment.environment_of(torch.device("cpu"))["code_commit"]
    (repository / "train.py").write_text("print(1)\n")
    assert (
        environment.environment_of(torch.device("cpu"))["code_commit"]
        == f"{clean}, with uncommitted changes"
    )


@needs_git
def test_a_commit_passed_by_the_user_is_kept(repository):
    _, content = recorded(repository, run_info={"code_commit": "v1.2"})
    assert content["code_commit"] == "v1.2"


def test_no_commit_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "code_commit" not in environment.environment_of(torch.device("cpu"))
    monkeypatch.setenv("PATH", "")  # no git at all
    assert "code_commit" not in environment.environment_of(torch.device("cpu"))


def test_a_processor_without_a_name_has_a_kind(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "absent")
    assert environment.environment_of(torch.device("cpu"))["machine"]["processor"]
    (tmp_path / "info").write_text("processor\t: 0\nmodel name\t: A Chip 3000\n")
    monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "info")
    assert environment.environment_of(torch.device("cpu"))["machine"]["processor"] == "A Chip 3000"
