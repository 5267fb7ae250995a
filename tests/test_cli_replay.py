"""`indpriv audit` on checkpoints and `indpriv show`, as a person uses them: messages, exit codes, files."""

import json
import re
import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch

import plain_opacus
from indpriv.cli import run
from runs import blobs, mlp

SPEC = """
import sys
sys.path.insert(0, {tests!r})
from indpriv.recording import AuditSpec
from runs import PER_EXAMPLE, blobs, mlp
spec = AuditSpec(model=mlp, dataset=blobs(), loss_fn=PER_EXAMPLE, test_set=blobs())
"""
TOLD = ("--set", "max_grad_norm=1.0", "--set", "sampler=poisson", "--delta", "1e-5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    (folder / "my_spec.py").write_text(SPEC.format(tests=str(Path(__file__).parent)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain_opacus.train(mlp(), blobs(), folder / "saved", epochs=4, batch_size=12, save_every=10)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def indpriv(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments, code=0):
        assert run([*map(str, arguments)]) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured

    return call


def test_from_checkpoints_to_a_report_and_a_comparison(folder, indpriv):
    words = ("audit", "saved", "--spec", "my_spec.py:spec", "--output-dir", "audit", "--verbose")
    shown = indpriv(*words, *TOLD)
    screen = " ".join(shown.out.split())
    for words in (
        "ESTIMATE",
        "saved checkpoints, not recorded",
        "Sensitivity records 2 instead of 4",
        "declared",
        "report.html",
    ):
        assert words in screen
    assert "the last checkpoint, step_40.pt, is correct on" in shown.err
    frame = pd.read_parquet(folder / "audit" / "epsilon.parquet")
    assert list(frame.columns[:4]) == ["example_id", "epsilon", "epsilon_lower", "epsilon_upper"]
    assert (folder / "audit" / "epsilon.parquet").stat().st_mode & 0o777 == 0o600
    assert (folder / "audit" / "replay").stat().st_mode & 0o777 == 0o700
    again = indpriv(
        "audit",
        "audit/replay",
        "--output-dir",
        "again",
        "--set",
        "between_records=closest",
        "--json",
    )
    assert json.loads(again.out)["run"]["n_records"] == 4
    table = " ".join(indpriv("show", "audit", "again").out.split())
    for words in (
        "SENSITIVE",
        "delta 1e-5",
        "estimate",
        "by label",
        "Spearman",
        "not a differential-privacy guarantee",
    ):
        assert words in table
    document = json.loads(indpriv("show", "audit", "again", "--by", "label", "--json").out)
    assert document["comparisons"][0]["overall"]["n"] == 120
    assert document["audits"][0]["claim"] == "estimate"


def test_what_is_missing_is_asked_for_at_once(indpriv):
    error = indpriv(
        "audit", "saved", "--spec", "my_spec.py:spec", "--output-dir", "new", code=2
    ).err
    assert "--set max_grad_norm=1.0 --delta 1e-5 --set sampler=poisson" in error
    assert error.lstrip().startswith("error:")
    assert not Path("new/replay").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "saved"], ["saved cannot be used yet:", "Pass --spec train.py:spec", "not known: max_grad_norm, delta, sampler", "--delta 1e-5"]),
        (["audit", "saved", *TOLD], ["model and data are not known. Pass --spec train.py:spec"]),
        (["audit", "saved", "--spec", "nowhere.py:spec", "--set", "sampler=poisson"], ["nowhere.py does not exist", "not known: max_grad_norm, delta."]),
        (["audit", "empty"], ["holds no journal.jsonl", "--spec train.py:spec"]),
        (["audit", "empty", "--spec", "my_spec.py:spec"], ["empty contains no checkpoints", "step_10.pt"]),
        (["audit", "nowhere", "--spec", "my_spec.py:spec"], ["nowhere is not a directory"]),
        (["audit", "saved", "--spec", "nowhere.py:spec"], ["nowhere.py does not exist"]),
        (["audit", "empty", "--set", "step_of=a.pt=0"], ["--set step_of: only for a folder of checkpoints"]),
        (["audit", "saved", "--spec", "my_spec.py:spec", *TOLD, "--set", "step_of=step_{n}.pt=n/2"], ["--set step_of='step_{n}.pt=n/2' cannot be followed ('n/2' is not a number of updates)"]),
        (["audit", "saved", "--spec", "my_spec.py:spec", *TOLD, "--set", "step_of=step_10.pt=20"], ["but the Opacus accountant inside counted 10 steps"]),
        (["audit", "empty", "--set", "steps=40"], ["--set steps: only for a folder of checkpoints with --spec"]),
        (["audit", "saved", "--spec", "my_spec.py:spec", *TOLD, "--set", "device=foo"], ["device foo cannot be used"]),
        (["audit", "saved", "--spec", "my_spec.py:spec", *TOLD, "--set", "batch_size=x"], ["batch_size=x", "auto"]),
        (["audit", "saved", "--spec", "my_spec.py:spec", *TOLD, "--set", "noise_multiplier=2"], ["values of noise_multiplier contradict each other"]),
        (["show", "empty", "saved"], ["holds no audit.json"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_code_2(indpriv, arguments, words):
    error = indpriv(
        *arguments, *(["--output-dir", "bad"] if arguments[0] == "audit" else []), code=2
    ).err
    for word in words:
        assert word in error


@pytest.fixture(scope="module")
def by_epoch(folder):
    """The checkpoints of the run by the names that many scripts give them, parameters alone."""
    (folder / "by_epoch").mkdir()
    for epoch in range(5):
        content = torch.load(folder / "saved" / f"step_{10 * epoch}.pt", weights_only=True)
        torch.save(content["module_state_dict"], folder / "by_epoch" / f"model_{epoch}.pt")
    return "by_epoch"


OF_40 = (*TOLD, "--set", "noise_multiplier=1", "--set", "sample_rate=0.1", "--set", "steps=40")


def test_everything_that_is_missing_is_asked_for_in_one_message(by_epoch, indpriv):
    """Parameters alone, in files whose names tell no step: the second try works."""
    command = ("audit", by_epoch, "--spec", "my_spec.py:spec", "--output-dir", "asked")
    error = indpriv(*command, code=2).err
    asked = re.findall(r"--(?:set [a-z_]+=|delta )[^\s;]+", error)
    words = [word for one in asked for word in one.rstrip(".").split()]
    assert {one.split()[1].partition("=")[0] for one in asked} == {
        *("step_of", "noise_multiplier", "max_grad_norm", "sample_rate", "steps", "sampler"),
        "1e-5",
    }
    words = [re.sub("^steps=.*", "steps=80", word) for word in words]  # as 0,20,...,80 tells
    indpriv(*command, *words)
    assert Path("asked/report.html").is_file()


def test_a_try_that_failed_is_not_in_the_way_of_the_next(by_epoch, indpriv):
    command = ("audit", by_epoch, "--spec", "my_spec.py:spec", *OF_40)
    for steps in ("0,10", "model_{n}.pt=10*n"):
        indpriv(*command, "--set", f"step_of={steps}", code=2)
        assert not Path(by_epoch, "audit").exists()
    indpriv(*command, "--set", "step_of=0,10,...,40")
    assert Path(by_epoch, "audit/report.html").is_file()


def test_a_replay_alone_is_a_run_that_is_audited(folder, indpriv):
    command = ("replay", "saved", "--spec", "my_spec.py:spec", "--output-dir", "replayed")
    shown = indpriv(*command, *TOLD).out
    assert shown == "replayed: a run directory; type: indpriv audit replayed\n"
    indpriv("audit", "replayed", "--output-dir", "of_replay")
    assert "pass one of" not in indpriv("replay", "replayed", *command[2:], code=2).err


def test_names_that_do_not_tell_the_step(by_epoch, indpriv):
    command = ("audit", by_epoch, "--spec", "my_spec.py:spec", "--output-dir", "named", *OF_40)
    error = indpriv(*command, code=2).err
    assert "'model_0.pt', 'model_1.pt', 'model_2.pt', 'model_3.pt', 'model_4.pt'" in error
    assert "--set step_of=0,20,...,80" in error
    assert not Path("named/replay").exists()
    indpriv(*command, "--set", "step_of=0,10,...,40")
    indpriv("audit", "saved", "--spec", "my_spec.py:spec", "--output-dir", "as_saved", *TOLD)
    named, saved = (pd.read_parquet(f"{name}/epsilon.parquet") for name in ("named", "as_saved"))
    assert named["epsilon"].equals(saved["epsilon"])


def test_a_list_of_steps_in_several_options(by_epoch, indpriv):
    told = (
        "step_of=model_0.pt=0,model_1.pt=10,model_3.pt=30",
        "step_of=model_2.pt=20,model_4.pt=40",
    )
    command = ("audit", by_epoch, "--spec", "my_spec.py:spec", "--output-dir", "listed", *OF_40)
    shown = indpriv(*command, "--set", told[0], "--set", told[1], "--json").out
    assert json.loads(shown)["run"]["n_records"] == 4


def test_a_malicious_file_among_the_checkpoints(folder, indpriv, tmp_path):
    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "made",)

    (tmp_path / "saved").mkdir()
    for path in (folder / "saved").iterdir():
        (tmp_path / "saved" / path.name).write_bytes(path.read_bytes())
    torch.save({"model": Touch()}, tmp_path / "saved" / "step_25.pt")
    error = indpriv(
        "audit",
        tmp_path / "saved",
        "--spec",
        "my_spec.py:spec",
        "--output-dir",
        "bad",
        *TOLD,
        code=2,
    ).err
    assert "step_25.pt cannot be read safely" in error
    assert not (tmp_path / "made").exists()
