"""`python -m audits subsets` and `deletion`: advice from new runs on parts of the data."""

import json

import numpy as np
import pytest

from audits.__main__ import app
from audits.training.datasets import load_dataset
from indpriv import NormLog, account
from indpriv.cli import run as run_command


@pytest.fixture
def experiment(capsys):
    def call(*arguments, code=0):
        found = run_command([*map(str, arguments)], app, "python -m audits")
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return call


AUDIT = """
name = "small"
[data]
dataset = "breast_cancer"
[model]
architecture = "mlp"
hidden = [4]
[training]
epochs = 4
batch_size = 64
learning_rate = 0.5
max_grad_norm = 1.0
target_epsilon = 6.0
delta = 1e-4
non_private_baseline = true
[recording]
every = 1
[checkpoints]
every = "epoch"
"""


@pytest.fixture
def audit_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(AUDIT)
    return path


@pytest.mark.slow
def test_advice_on_records_from_runs_on_subsets(audit_file, experiment, tmp_path):
    folder = tmp_path / "out"
    options = ("subsets", audit_file, "--target", 5, "--subsets", "1,0.5", "--output-dir", folder)
    found = json.loads(experiment(*options, "--jobs", 1, "--json").out)
    noise = set()
    for share, seed in ((0.5, 0), (0.5, 1), (1, 0), (1, 1)):
        log = NormLog.open(folder / "runs" / f"share={share}_seed={seed}")
        assert log.n_examples == np.ceil(456 * share)
        noise |= set(log.settings.noise_multiplier.tolist())
        table = account(log, delta=1e-4)
        quantile = np.quantile(table.epsilon, 0.95, method="inverted_cdf")
        reading = {"share": share, "seed": seed, "n_all": log.n_examples, "n": log.n_examples}
        reading |= {"quantile": quantile, "at_worst_case": quantile >= table.worst_case_epsilon}
        assert reading in found["groups"][0]["records"]["readings"]
    assert len(noise) == 1  # that of the whole data, though the audit names a target
    assert {one["by"] for one in found["groups"]} == {None, "label"}
    assert -1 < found["groups"][0]["records"]["exponent"] < 0
    kept = folder / "runs" / "share=1_seed=0" / "run.json"
    before = kept.read_bytes()
    text = " ".join(
        experiment(*options, "--seeds", 2).out.split()
    )  # what is done is not made again
    assert kept.read_bytes() == before
    assert "that new records are like those there are" in text
    assert "More records" in (folder / "advice.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--subsets", "0,1"), "0 is not in (0, 1]"),
        (("--subsets", "0.5,2"), "2 is not in (0, 1]"),
        (("--subsets", "half,1"), "--subsets half,1: pass shares"),
        (("--subsets", "0.5,0.5,1"), "a share twice"),
        (("--subsets", "1"), "and a smaller share"),
        (("--subsets", "0.25,0.5"), "needs 1, the whole data"),
        (("--subsets", "0.5,1", "--seeds", 1), "are 2 runs, too few"),
        (("--subsets", "0.1,0.5,1"), "batch_size=64 is larger"),
        (("--by", "race"), "there is no column 'race'"),
        (("--by", "loss:bins=3"), "differ from run to run"),
    ],
)
def test_subsets_that_say_nothing(audit_file, experiment, tmp_path, options, message):
    folder = tmp_path / "out"
    printed = experiment(
        "subsets", audit_file, "--target", 1, *options, "--output-dir", folder, code=2
    )
    assert message in " ".join(printed.err.split())
    assert not folder.exists()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("target_epsilon = 6.0", "noise_multiplier = 1.0\nfilter_epsilon = 2.0", "filter_epsilon"),
        ('dataset = "breast_cancer"', 'dataset = "breast_cancer"\nshare = 0.5', "share already"),
        (
            "max_grad_norm = 1.0",
            'max_grad_norm = "median"\nmedian_epsilon = 0.1',
            "a clipping norm of its own",
        ),
    ],
)
def test_audits_that_advice_knows_nothing_of(audit_file, experiment, before, after, message):
    audit_file.write_text(AUDIT.replace(before, after))
    assert message in experiment("subsets", audit_file, "--target", 1, code=2).err


@pytest.mark.slow
def test_whose_epsilon_rises_without_some_records(audit_file, experiment, tmp_path):
    folder, ids = tmp_path / "out", tmp_path / "ids.txt"
    data = load_dataset("breast_cancer").train
    ids.write_text("0\n1\n2\n")
    benign = np.flatnonzero(data.targets == 1)
    options = ("deletion", audit_file, "--without-ids", ids, "--seeds", 1, "--output-dir", folder)
    found = json.loads(experiment(*options, "--jobs", 1, "--json").out)
    assert found["n_deleted"] == 3
    whole = folder / "runs" / "share=1_seed=0"
    (part,) = (folder / "runs").glob("without-*_seed=0")
    logs = [NormLog.open(run) for run in (whole, part)]
    assert [log.n_examples for log in logs] == [456, 453]
    noise = [log.settings.noise_multiplier[0] for log in logs]
    assert noise[0] == noise[1]
    old, new = (account(log, delta=1e-4).epsilon for log in logs)
    stay = np.arange(3, 456)
    everyone = found["groups"][0]
    assert everyone["mean_with"] == pytest.approx(old[stay].mean())
    assert everyone["mean_without"] == pytest.approx(new.mean())
    assert everyone["share_rises"] == pytest.approx((new > 1.1 * old[stay]).mean())
    named = next(one for one in found["groups"] if one["name"] == "benign")
    kept = np.isin(stay, benign)
    assert named["mean_without"] == pytest.approx(new[kept].mean())
    text = " ".join(experiment(*options).out.split())
    assert "pass --seeds 2" in text
    assert "sampling rate is higher" in text
    for suffix in ("html", "md"):
        assert "SENSITIVE" in (folder / f"deletion.{suffix}").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "pass the records to delete"),
        (("--without", "label=benign", "--quantile", 1), "quantile=1.0 is not in (0, 1)"),
        (("--without", "label=purple"), "no training row of breast_cancer has that value"),
        (("--without", "eyes=blue"), "eyes"),
        (("--without", "label"), "without"),
        (("--without", "label=benign", "--without", "label=malignant"), "leaves no training row"),
        (("--without-ids", "nowhere.txt"), "--without-ids nowhere.txt"),
    ],
)
def test_deletions_that_say_nothing(audit_file, experiment, tmp_path, options, message):
    folder = tmp_path / "out"
    printed = experiment("deletion", audit_file, *options, "--output-dir", folder, code=2)
    assert message in " ".join(printed.err.split())
    assert not folder.exists()


@pytest.mark.parametrize(("text", "reason"), [("1\nann\n", "'ann'"), ("\n", "is empty")])
def test_ids_that_are_no_numbers(audit_file, experiment, tmp_path, text, reason):
    (tmp_path / "ids.txt").write_text(text)
    printed = experiment("deletion", audit_file, "--without-ids", tmp_path / "ids.txt", code=2)
    message = " ".join(printed.err.split())
    assert reason in message
    assert "the id of one example on each line" in message
