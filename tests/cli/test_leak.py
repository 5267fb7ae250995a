"""`indpriv leak`, and what other commands make of its scores."""

import base64
import json
import tomllib

import numpy as np
import pytest
import torch

from audits.training.checkpoints import save_checkpoint
from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.models import build_model
from command_lines import run
from indpriv import AttackScores
from indpriv._files import read_json, write_json
from indpriv.audit import read_summary
from indpriv.norm_log.run_files import JOURNAL, RUN_JSON
from reconstructions import scores

AUDIT = """
name = "small"
[data]
dataset = "digits"
[model]
architecture = "mlp"
hidden = [16]
[training]
epochs = 1
batch_size = 512
learning_rate = 0.5
max_grad_norm = 1.0
noise_multiplier = 2.0
delta = 1e-5
[recording]
every = 1
[checkpoints]
every = "epoch"
[leakage]
attacks = ["informed"]
examples = 12
"""
SPEC = """
import numpy as np, torch
from torch import nn
from torch.utils.data import TensorDataset
from indpriv.recording import AuditSpec
inputs = torch.rand(20, 6, generator=torch.Generator().manual_seed(0))
spec = AuditSpec(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)),
    dataset=TensorDataset(inputs, (inputs[:, 0] > 0.5).long()),
    loss_fn=nn.CrossEntropyLoss(reduction="none"),
    example_ids=np.arange(100, 120),
)
"""


def in_one_line(capsys, stream="out"):
    return " ".join(getattr(capsys.readouterr(), stream).split())


def test_scores_of_reconstructions_are_compared_with_their_ceiling(tmp_path, capsys):
    path = tmp_path / "row.parquet"
    scores(np.arange(200) < 60, 1.0).to_parquet(path)
    assert run(["attack", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["reconstruction"]
    assert (found["identified"], found["above_ceiling"]) == (0.3, True)
    assert run(["attack", str(path)]) == 0
    assert "there was less noise" in in_one_line(capsys)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """What `indpriv leak` reads of a run of `python -m audits train`, without training."""
    folder = tmp_path_factory.mktemp("run")
    config = AuditConfig.from_dict(tomllib.loads(AUDIT))
    dataset = load_dataset("digits")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(config.model, dataset.input_shape, dataset.n_classes)
    for step in (0, 3):
        save_checkpoint(folder, model, step, [(2.0, 1 / 3, step)] if step else [])
    settings = {"max_grad_norm": 1.0, "noise_multiplier": [2.0, 2.0, 4.0], "clipping": "flat"}
    data = {"fingerprint": dataset.fingerprint()}
    record = {"config": config.to_dict(), "data": data, "training": settings}
    write_json(folder / RUN_JSON, record)
    (folder / JOURNAL).write_text("", encoding="utf-8")
    return folder


def test_noise_is_that_of_the_step(small_run, capsys):
    arguments = [
        "audits",
        "leak",
        str(small_run),
        "--set",
        "examples=12",
        "--set",
        "name=steps",
        "--json",
    ]
    assert run(arguments) == 0
    found = AttackScores.from_file(small_run / "leakage" / "steps.parquet")
    most = {step: found.details["mu"][found.details["step"] == step].max() for step in (0, 3)}
    assert most == pytest.approx({0: 1 / 2, 3: 1 / 4})  # max_grad_norm over the noise


@pytest.mark.slow
def test_an_audit_file_attacks_gradients_after_training(tmp_path, capsys):
    (tmp_path / "small.toml").write_text(AUDIT, encoding="utf-8")
    run_dir = tmp_path / "run"
    assert run(["audits", "train", str(tmp_path / "small.toml"), "--run-dir", str(run_dir)]) == 0
    path = run_dir / "leakage" / "row-informed.parquet"
    assert path.stat().st_mode & 0o777 == 0o600
    found = AttackScores.from_file(path)
    assert set(found.details["step"]) == {0, 3}  # the first model and the last
    assert found.member.sum() == 24
    assert found.details["mu"].max() <= 0.5 + 1e-6  # max_grad_norm over the noise of the run
    assert found.details["chance"] == pytest.approx(1 / 12)
    capsys.readouterr()
    output = tmp_path / "audit"
    assert run(["audit", str(run_dir), "--output-dir", str(output), "--verbose"]) == 0
    assert "Reconstruction" in capsys.readouterr().out
    every = read_summary(output)["reconstruction"]
    assert [(one["step"], one["n_examples"]) for one in every] == [(0, 12), (3, 12)]
    assert all(one["bins"] for one in every)
    assert b"data:image/png" not in (output / "report.html").read_bytes()

    asked = ["--attack", "first-layer", "--before-noise", "--set", "examples=6", "--set", "at=last"]
    assert (
        run(["audits", "leak", str(run_dir), *asked, "--set", "name=shown", "--set", "pictures=3"])
        == 0
    )
    assert run(["audits", "images", str(run_dir), str(tmp_path / "images.npy")]) == 0
    shown = ["--set", f"show_examples={tmp_path / 'images.npy'}"]
    assert run(["audit", str(run_dir), "--output-dir", str(output), *shown]) == 0
    drawn = base64.b64encode((run_dir / "leakage" / "shown.png").read_bytes())
    assert b"data:image/png;base64," + drawn in (output / "report.html").read_bytes()


def test_a_run_is_attacked(small_run, capsys):
    arguments = ["audits", "leak", str(small_run), "--attack", "first-layer", "--before-noise"]
    arguments += [
        "--set",
        "examples=6",
        "--set",
        "at=last",
        "--set",
        "name=row",
        "--set",
        "pictures=3",
        "--json",
    ]
    assert run(arguments) == 0
    (found,) = json.loads(capsys.readouterr().out)["reconstruction"]
    assert (found["identified"], found["step"], found["n_examples"]) == (1, 3, 6)
    for name in ("row.parquet", "row.png"):
        assert (small_run / "leakage" / name).stat().st_mode & 0o777 == 0o600
    assert run(arguments) == 2
    assert "choose another name" in in_one_line(capsys, "err")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "at=2"], "choose among 0, 3"),
        (["--see", "row", "--set", "batch_size=3"], "reads one example"),
        (["--see", "update"], "before_noise = true"),
        (["--see", "picture"], "see='picture'"),
        (["--attack", "guess"], "'informed', 'first-layer', 'lbfgs', 'adam'"),
        (["--set", "examples=1"], "examples=1"),
        (["--set", "pictures=13"], "at most 12"),
        (["--set", "name=a", "--attack", "informed", "--attack", "adam"], "one file of one attack"),
        (["--set", "name=a/b"], "one file of one attack"),
        (["--set", "noise_multiplier=2"], "the run has its own"),
    ],
)
def test_refusals(small_run, options, message, capsys):
    assert run(["audits", "leak", str(small_run), *options]) == 2
    assert message in in_one_line(capsys, "err")


def test_checkpoints_with_a_spec(tmp_path, capsys):
    (tmp_path / "train.py").write_text(SPEC, encoding="utf-8")
    models = tmp_path / "models"
    models.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    torch.save({"step": 5, "model": model.state_dict()}, models / "step_5.pt")
    arguments = ["leak", str(models), "--spec", f"{tmp_path / 'train.py'}:spec", "--set", "at=5"]
    assert run(arguments) == 2
    assert "no noise was given" in in_one_line(capsys, "err")
    arguments += ["--set", "max_grad_norm=0.1", "--set", "noise_multiplier=0.001", "--json"]
    assert run([*arguments, "--attack", "informed", "--attack", "first-layer"]) == 0
    informed, first = json.loads(capsys.readouterr().out)["reconstruction"]
    assert (informed["identified"], informed["n_examples"]) == (1, 20)
    assert first["error"] < 0.01
    found = AttackScores.from_file(models / "leakage" / "row-informed.parquet")
    assert sorted(found.example_ids[found.member]) == list(range(100, 120))
    shared = tmp_path / "shareable"
    models.rename(shared)
    assert run(["leak", str(shared), *arguments[2:]]) == 2
    assert "holds what was reconstructed" in in_one_line(capsys, "err")


def test_checkpoints_whose_steps_the_user_says(tmp_path, capsys):
    (tmp_path / "train.py").write_text(SPEC)
    (tmp_path / "models").mkdir()
    for epoch in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        torch.save(model.state_dict(), tmp_path / "models" / f"model_{epoch}.pt")
    command = ["leak", str(tmp_path / "models"), "--spec", f"{tmp_path / 'train.py'}:spec"]
    command += [
        "--before-noise",
        "--set",
        "max_grad_norm=1",
        "--set",
        "examples=4",
        "--set",
        "at=20",
    ]
    assert run(command) == 2
    assert "--set step_of=0,20 or, by name," in in_one_line(capsys, "err")
    assert run([*command, "--set", "step_of=0,20"]) == 0
    found = AttackScores.from_file(tmp_path / "models" / "leakage" / "row-informed.parquet")
    assert set(found.details["step"]) == {20.0}


def test_only_runs_of_train_are_rebuilt_without_a_spec(tmp_path, capsys):
    (tmp_path / "journal.jsonl").write_text("", encoding="utf-8")
    for program in ([], ["audits"]):
        assert run([*program, "leak", str(tmp_path)]) == 2
        assert "--spec" in in_one_line(capsys, "err")


def test_other_data_are_no_data_of_the_run(small_run, tmp_path, capsys):
    record = read_json(small_run / RUN_JSON)
    write_json(tmp_path / RUN_JSON, {**record, "data": {"fingerprint": "another"}})
    (tmp_path / JOURNAL).write_text("", encoding="utf-8")
    assert run(["audits", "leak", str(tmp_path)]) == 2
    assert "trained on other data" in in_one_line(capsys, "err")


@pytest.mark.parametrize("clipping", ["quantile", "individual"])
def test_clipping_that_depends_on_data_is_not_imitated(small_run, tmp_path, capsys, clipping):
    record = read_json(small_run / RUN_JSON)
    settings = {**record["training"], "clipping": clipping}
    write_json(tmp_path / RUN_JSON, {**record, "training": settings})
    (tmp_path / JOURNAL).write_text("", encoding="utf-8")
    assert run(["audits", "leak", str(tmp_path)]) == 2
    assert f"({clipping})" in in_one_line(capsys, "err")


def test_noise_of_the_largest_norm_is_not_imitated(small_run, tmp_path, capsys):
    record = read_json(small_run / RUN_JSON)
    record["config"]["training"] |= {"noise_scale": "largest_norm", "allow_no_privacy": True}
    write_json(tmp_path / RUN_JSON, record)
    (tmp_path / JOURNAL).write_text("", encoding="utf-8")
    assert run(["audits", "leak", str(tmp_path)]) == 2
    assert "scales its noise by what it sees" in in_one_line(capsys, "err")


def test_nothing_is_released_beside_reconstructions(tmp_path, capsys):
    (tmp_path / "shareable" / "leakage").mkdir(parents=True)
    assert run(["publish", "quantiles", str(tmp_path), "--quantiles", "0.5", "--epsilon", "1"]) == 2
    assert "take it out" in in_one_line(capsys, "err")
