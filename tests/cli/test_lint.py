"""indpriv check of settings: audit files before training, runs, exit codes, JSON and bad input."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from command_lines import run
from indpriv._facts import templates

AUDITS = sorted((Path(__file__).parents[2] / "audits").glob("*.toml"))
SHARED = Path(__file__).parents[3] / "shared" / "data"
TOML = """
name = "small"
[data]
dataset = "digits"
[model]
architecture = "mlp"
[training]
epochs = 20
batch_size = 300
learning_rate = 0.1
max_grad_norm = 1.0
noise_multiplier = 2.0
delta = 1e-5
[recording]
every = 1
[checkpoints]
every = "epoch"
"""


@pytest.fixture
def lint(capsys, tmp_path, monkeypatch):
    """indpriv check --set only=settings in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INDPRIV_DATA", raising=False)

    def call(*arguments, code=0):
        words = [str(each) for each in arguments]
        of_a_file = any(word.endswith(".toml") for word in words)
        command = ["audits", "lint"] if of_a_file else ["check", "--set", "only=settings"]
        assert run([*command, *words]) == code
        return capsys.readouterr()

    return call


@pytest.fixture
def audit_file(tmp_path):
    def write(*changes):
        text = TOML
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "small.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def a_run(lint, tmp_path, capsys):
    """A converted run of 1,500 examples, none of whose gradients is clipped."""
    np.savez("norms.npz", norms=np.full((2, 1500), 0.5), recorded_steps=[0, 5])
    steps = {"steps": 9, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5}
    kinds = {"sampler": "poisson", "unit": "example", "neighbouring": "add_remove"}
    Path("run.json").write_text(json.dumps(steps | kinds), encoding="utf-8")
    assert run(["import", "norms.npz", "--run", "run.json", "--output-dir", "runs/one"]) == 0
    capsys.readouterr()
    return tmp_path / "runs" / "one"


def statuses(found):
    return {each["key"]: each["status"] for each in found["findings"]}


def of_run(printed):
    """What check says of the settings of the only run."""
    [found] = json.loads(printed.out)["parts"]
    return found


FEDERATED = [path for path in AUDITS if "[federated]" in path.read_text("utf-8")]


@pytest.mark.parametrize("path", FEDERATED, ids=lambda path: path.stem)
def test_federated_audits_are_refused(lint, path):
    assert f"{path.stem} is a federated run" in lint(path, code=2).err


@pytest.mark.parametrize("path", sorted({*AUDITS} - {*FEDERATED}), ids=lambda path: path.stem)
def test_every_audit_file_is_judged_without_its_data(lint, path):
    found = json.loads(lint(path, "--json").out)
    assert set(statuses(found)) == set(templates("rule"))
    assert found["failed"]["error"] == 0


def test_a_run_without_privacy_has_no_epsilon(lint, audit_file):
    """Its noise depends on the batch: an epsilon of the declared multiplier would be too small."""
    keys = 'noise_multiplier = 2.0\nnoise_scale = "largest_norm"\nallow_no_privacy = true'
    found = json.loads(lint(audit_file(("noise_multiplier = 2.0", keys)), "--json").out)
    assert statuses(found)["epsilon"] == "not checked"
    assert statuses(json.loads(lint(audit_file(), "--json").out))["epsilon"] == "passed"


def test_a_screen_shows_figures_source_and_advice(lint, audit_file):
    path = audit_file(("[model]", '[model]\nactivation = "relu"'))
    shown = " ".join(lint(path).out.split())
    rule = templates("rule")["activations"]
    for text in ("note activations", rule.title, rule.about, rule.source, rule.advice):
        assert text in shown
    assert "1 layer of unbounded activations and 0 layers that normalise" in shown
    assert "0 errors, 0 warnings, 1 note." in shown
    assert "Not checked" in shown
    assert "- clipping: Some gradients are clipped" in shown


@pytest.mark.parametrize(
    ("changes", "options", "code"),
    [
        ([], [], 0),
        ([], ["--strict"], 0),
        ([("= 2.0", "= 0.5")], [], 0),  # an epsilon above 10
        ([("= 2.0", "= 0.5")], ["--strict"], 1),
        ([("1e-5", "1e-3")], [], 1),
        ([("1e-5", "1e-3")], ["--json"], 1),
        ([("= 300", "= 2000")], [], 0),  # all examples in each batch
    ],
)
def test_the_exit_code_follows_the_severity(lint, audit_file, changes, options, code):
    lint(audit_file(*changes), *options, code=code)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("epochs", "epoch")], ["[training] has the key 'epoch'", "did you mean 'epochs'"]),
        ([("delta = 1e-5", "")], ["[training] lacks delta"]),
        ([("= 300", '= "many"')], ["batch_size"]),
        ([("[model]", "[model")], ["cannot be read as TOML"]),
        ([('"digits"', '"digit"')], ["digit"]),
    ],
)
def test_an_audit_file_with_errors_is_refused(lint, audit_file, changes, words):
    message = lint(audit_file(*changes), code=2).err
    assert message.startswith("error:")
    for word in ["small.toml", *words]:
        assert word in message


def test_other_paths_are_refused(lint, a_run):
    message = lint(code=2).err
    assert "check needs a run directory" in message
    assert "nowhere does not exist" in lint("nowhere", code=2).err
    assert "none.toml does not exist" in lint("none.toml", code=2).err
    assert f"indpriv check {a_run}" in lint(a_run / "ids.parquet", code=2).err
    assert "indpriv check runs/one" in lint("runs", code=2).err


def test_delta_is_checked(lint, a_run):
    assert "delta" in lint(a_run, "--set", "delta=2", code=2).err


def test_a_run_is_judged_by_what_it_recorded(lint, a_run):
    found = statuses(of_run(lint(a_run, "--json")))
    assert found["clipping"] == "failed"
    assert found["delta"] == found["learning_rate"] == found["batch_norm"] == "not checked"
    found = statuses(of_run(lint(a_run, "--set", "delta=1e-5", "--json")))
    assert (found["delta"], found["epsilon"]) == ("passed", "failed")
    lint(a_run, "--set", "delta=1e-3", code=1)


@pytest.mark.parametrize(
    ("key", "value", "rule"), [("sampler", "shuffled", "sampler"), ("seeded", True, "seeds")]
)
def test_a_run_of_other_batches_or_of_a_seed_fails_by_its_settings(lint, a_run, key, value, rule):
    """A shuffled run is accounted, with participation known: its lines of evidence refute nothing."""
    said = json.loads(Path("run.json").read_text(encoding="utf-8")) | {key: value}
    Path("run.json").write_text(json.dumps(said), encoding="utf-8")
    assert run(["import", "norms.npz", "--run", "run.json", "--output-dir", "runs/other"]) == 0
    lint(a_run)
    shown = lint("runs/other", "--set", "delta=1e-5", code=1).out
    assert f"! error {rule}" in shown
    if rule == "sampler":
        assert "The worst-case epsilon of one row is" not in shown  # of Poisson batches


def test_damaged_records_are_left_out_and_a_run_without_steps_is_refused(lint, a_run):
    first, second = sorted((a_run / "records").iterdir())
    first.unlink()
    assert "< 1 %" not in lint(a_run).out
    second.unlink()
    found = of_run(lint(a_run, "--json"))
    assert statuses(found)["clipping"] == "not checked"
    journal = a_run / "journal.jsonl"
    journal.write_text(journal.read_text().splitlines(keepends=True)[0])
    assert "proves no step" in lint(a_run, code=2).err


@pytest.mark.skipif(not (SHARED / "lfw").is_dir(), reason="needs the real data")
def test_a_cap_of_rows_is_counted_in_the_data(lint):
    (lfw,) = [path for path in AUDITS if path.stem == "lfw"]
    assert "1/n is 0.000133" in lint(lfw, "--data-dir", SHARED).out
    assert "This rule needs delta" in lint(lfw).out


def check(capsys, *words):
    """Exit code and JSON of a check."""
    code = run(["check", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_check_fails_if_a_part_does_and_is_open_if_one_is(a_run, capsys):
    code, found = check(capsys, a_run)
    assert (code, found["failed"], found["left_open"]) == (3, False, True)  # nobody watched it
    log, settings = found["parts"]
    assert log["evidence"].startswith("0 of 5 lines verified")
    assert (log["failed"], log["left_open"]) == (False, True)
    assert (settings["failed"], settings["left_open"]) == (False, False)
    assert check(capsys, a_run, "--set", "delta=1e-3")[0] == 1  # a rule is broken
    assert check(capsys, a_run, "--set", "only=settings,delta=1e-5")[0] == 0
    assert check(capsys, a_run, "--set", "only=settings,delta=1e-5,strict")[0] == 1
    next((a_run / "records").iterdir()).unlink()
    assert check(capsys, a_run)[0] == 1


def test_several_runs_are_checked_and_one_fault_is_enough(a_run, capsys):
    other = shutil.copytree(a_run, a_run.with_name("two"))
    assert [
        part["run"] for part in check(capsys, a_run, other, "--set", "only=log")[1]["parts"]
    ] == [
        str(a_run),
        str(other),
    ]
    next((other / "records").iterdir()).unlink()
    code, found = check(capsys, a_run, other, "--set", "only=log")
    assert (code, [part["failed"] for part in found["parts"]]) == (1, [False, True])


def test_settings_that_cannot_be_compared_leave_a_check_open(a_run, capsys):
    journal = a_run / "journal.jsonl"
    journal.write_text(journal.read_text().splitlines(keepends=True)[0])
    code, found = check(capsys, a_run)
    assert code in (1, 3)
    assert "proves no step" in found["parts"][1]["reason"]
    assert found["parts"][1]["left_open"]


def test_runs_without_attacks_on_themselves_are_no_test_of_an_account(a_run, capsys):
    assert run(["check", str(a_run), "--set", "only=attacks"]) == 2
    assert "record a run with attack=WhiteBox()" in " ".join(capsys.readouterr().err.split())
