"""`python -m audits sweep`: one audit file under several settings and seeds."""

import json
import os
import shutil
import signal
import tomllib

import numpy as np
import pytest

from audits.__main__ import app
from audits.sweep.command import sweep as sweep_command
from audits.training.config import AuditConfig
from audits.training.dp_sgd import train
from indpriv._files import read_json
from indpriv.audit import read_audit
from indpriv.cli import run
from indpriv.errors import InputError
from indpriv.norm_log.run_files import RUN_JSON

AUDIT = """
name = "small"
[data]
dataset = "digits"
[model]
architecture = "mlp"
hidden = [8]
[training]
epochs = 2
batch_size = 512
learning_rate = 0.5
max_grad_norm = 1.0
noise_multiplier = 2.0
delta = 1e-5
[recording]
every = 2
[checkpoints]
every = 1
"""
OVER = ("--over", "max_grad_norm=0.5,8.0")


@pytest.fixture
def audit_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(AUDIT)
    return path


def sweep(audit_file, *options):
    folder = audit_file.parent / "sweep"
    return run(["sweep", str(audit_file), "--output-dir", str(folder), *options], app), folder


@pytest.mark.slow
def test_a_sweep_compares_settings_and_goes_on_where_it_stopped(audit_file, capsys):
    options = (*OVER, "--seeds", "2", "--json")
    code, folder = sweep(audit_file, *options, "--jobs", "2")
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert [setting["values"] for setting in found["settings"]] == [
        {"max_grad_norm": 0.5},
        {"max_grad_norm": 8.0},
    ]
    for setting in found["settings"]:
        (value,) = setting["values"].values()
        audits = [folder / "audits" / f"max_grad_norm={value}_seed={seed}" for seed in (0, 1)]
        smallest = [read_audit(audit)[0].epsilon.min() for audit in audits]
        figure = setting["figures"]["smallest_epsilon"]
        assert figure["mean"] == pytest.approx(np.mean(smallest))
        low, high = figure["interval"]["low"], figure["interval"]["high"]
        assert low <= min(smallest) <= max(smallest) <= high
    low, high = (setting["figures"]["median_epsilon"]["mean"] for setting in found["settings"])
    assert high < low  # fewer are clipped
    for suffix, mark in (("html", "<svg"), ("md", "| max_grad_norm = 0.5 |")):
        text = (folder / f"sweep.{suffix}").read_text()
        assert mark in text
        assert "tuning_mean=" in text
    assert (folder / "sweep.json").stat().st_mode & 0o777 == 0o600

    shutil.rmtree(folder / "audits" / "max_grad_norm=0.5_seed=1")
    shutil.rmtree(folder / "runs" / "max_grad_norm=8.0_seed=0")
    (folder / "runs" / "max_grad_norm=8.0_seed=0.part").mkdir()  # of a run that was stopped
    name = "max_grad_norm=8.0_seed=1"  # of another, which goes on after its second step
    shutil.rmtree(folder / "runs" / name)
    tables = tomllib.loads(AUDIT)
    tables["training"]["max_grad_norm"] = 8.0

    def stop(stage, done, total):
        if done == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="after 2 of"):
        train(
            AuditConfig.from_dict(tables),
            folder / "runs" / f"{name}.part",
            seed=1,
            progress=stop,
        )
    kept = folder / "runs" / "max_grad_norm=0.5_seed=1" / RUN_JSON
    before = kept.read_bytes()
    assert sweep(audit_file, *options, "--jobs", "1")[0] == 0
    assert json.loads(capsys.readouterr().out) == found  # of processes and of one
    assert kept.read_bytes() == before
    assert read_json(kept)["seeded"]

    audit_file.write_text(AUDIT.replace("learning_rate = 0.5", "learning_rate = 0.25"))
    assert sweep(audit_file, *options)[0] == 2
    assert "another version of the audit file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ([], "needs --over"),
        (["max_grad_norm"], "pass KEY=VALUE"),
        (["max_grad_norm=1.0", "max_grad_norm=2.0"], "given twice"),
        (["max_grad_norm=1.0,1.0"], "the same value twice"),
        (["max_grad_norm+learning_rate=1.0:0.1", "learning_rate=2.0"], "given twice"),
        (["max_grad_norm+learning_rate=1.0:0.1,2.0"], "2.0 is not 2 values"),
        (["max_grad_norm+=1.0"], "pass KEY=VALUE"),
        (["max_grad_nrom=1.0"], "max_grad_nrom"),
        (["max_grad_norm=-1.0"], "max_grad_norm"),
        (["nothing.at_all=1"], "nothing"),
        (["name.at_all=1"], "name is no table"),
        (["schedule=linear"], "linear"),
    ],
)
def test_what_cannot_be_swept(audit_file, over, message):
    folder = audit_file.parent / "sweep"
    with pytest.raises(InputError, match=message):
        sweep_command(audit_file, over, output_dir=folder)
    assert not folder.exists()
