"""The command line as a person uses it: a real process, its exit code, and what it prints."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_lines import run, words_of
from indpriv import NormLog, account
from processes import running, wait_for_records

ROOT = Path(__file__).parents[1]
SMALL = """
name = "small"
[data]
dataset = "digits"
[model]
architecture = "mlp"
hidden = [8]
[training]
epochs = 2
batch_size = 128
learning_rate = 0.5
max_grad_norm = 1.0
noise_multiplier = 1.0
delta = 1e-5
non_private_baseline = true
[recording]
every = 1
[checkpoints]
every = "epoch"
[audit]
groups = ["label"]
"""


@dataclass
class Result:
    stdout: str
    stderr: str


@pytest.fixture
def in_process(audited, capsys, monkeypatch):
    """Most commands run within the test's process, which spares the imports."""
    monkeypatch.chdir(audited)

    def call(*arguments, code=0):
        assert run([*map(str, arguments)]) == code
        captured = capsys.readouterr()
        return Result(captured.out, captured.err)

    return call


def indpriv(*arguments, cwd=None, code=0):
    result = subprocess.run(
        words_of(*arguments),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "empty").mkdir()
    (folder / "small.toml").write_text(SMALL)
    (folder / "trained.txt").write_text(
        indpriv("audits", "train", "small.toml", "--run-dir", "run", cwd=folder).stdout
    )
    indpriv("audit", "run", "--output-dir", "audit", cwd=folder)
    return folder


def assert_bad_input(result, *words):
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def test_norms_of_another_trainer_are_converted(in_process, tmp_path):
    np.savez(tmp_path / "norms.npz", norms=np.full((2, 4), 0.5), recorded_steps=[0, 5])
    settings = {
        "steps": 9,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.5,
        "sampler": "poisson",
    }
    (tmp_path / "run.json").write_text(
        json.dumps(settings | {"unit": "example", "neighbouring": "add_remove"})
    )
    arguments = ("import", tmp_path / "norms.npz", "--run", tmp_path / "run.json", "--output-dir")
    assert in_process(*arguments, tmp_path / "run").stdout.endswith(
        "2 records of 4 examples, 9 steps\n"
    )
    found = json.loads(in_process(*arguments, tmp_path / "again", "--json").stdout)
    assert (found["records"], found["examples"], found["steps"]) == (2, 4, 9)
    assert "already holds the log" in in_process(*arguments, tmp_path / "run", code=2).stderr
    verified = in_process(
        "check", tmp_path / "run", "--set", "only=log", code=3
    )  # nobody watched that training
    assert "Evidence: 0 of 5 lines verified; batch declared;" in verified.stdout
    screen = in_process("audit", tmp_path / "run", "--delta", "1e-5").stdout
    assert "Training was not recorded as it ran." in screen
    assert "no losses are known" in screen
    assert "let the run end" not in screen
    assert "not verified" not in screen  # the first lines say why nothing is


def test_version_and_help_have_an_example(in_process):
    assert indpriv("--version").stdout.startswith("indpriv 0.")
    for command in ("demo", "audit", "show", "attack", "check", "gate"):
        assert f"Example: indpriv {command}" in in_process(command, "--help").stdout


@pytest.mark.parametrize(
    ("command", "default"),
    [
        (("audits", "train"), "runs/NAME"),
        (("audit",), "RUN/audit; NAME-audit for others' runs"),
        (("audit",), "the run's own"),
        (("publish", "statement"), "AUDIT_DIR/statements"),
    ],
)
def test_help_tells_defaults_that_depend_on_the_rest(in_process, command, default):
    assert f"[default: ({default})]" in " ".join(
        in_process(*command, "--help").stdout.replace("│", " ").split()
    )


def test_audit_writes_what_the_architecture_names(audited):
    frame = pd.read_parquet(audited / "audit" / "epsilon.parquet")
    assert list(frame.columns[:4]) == ["example_id", "epsilon", "epsilon_lower", "epsilon_upper"]
    assert {"loss", "correct", "label"} <= set(frame.columns)
    for name in ("epsilon.parquet", "audit.json", "report.html"):
        assert (audited / "audit" / name).stat().st_mode & 0o777 == 0o600
    assert "SENSITIVE" in (audited / "audit" / "report.html").read_text(encoding="utf-8")


def test_training_states_its_guarantee_rounded_up(audited):
    exact = json.loads((audited / "audit" / "audit.json").read_text())["guarantee"][
        "worst_case_epsilon"
    ]
    text = (audited / "trained.txt").read_text()
    shown = re.search(r"guarantee: worst-case epsilon ([\d.]+) at delta 1e-5 ", text)
    assert exact <= float(shown[1]) <= exact + 0.02


def test_the_first_screen_states_claim_delta_unit_relation_and_sampler(in_process):
    words = "audit", "run", "--output-dir", "again"
    for more, told in (
        ([], ("You may promise epsilon", "one example added or removed", "promises nothing")),
        (["--verbose"], ("worst-case epsilon", "add/remove", "Poisson sampling", "not a")),
    ):
        screen = " ".join(in_process(*words, *more).stdout.split())
        for word in ("SENSITIVE", "delta 1e-5", "exact", *told):
            assert word.lower() in screen.lower(), screen
        assert screen.endswith("again/report.html" if more else "again/report.html | --verbose")


@pytest.mark.slow
def test_the_audit_of_before_is_compared_even_if_it_is_replaced(audited, in_process, tmp_path):
    shutil.copytree(audited / "audit", tmp_path / "audit", copy_function=shutil.copy)
    words = ("--output-dir", tmp_path / "audit", "--set", "accountant=pld")
    in_process("audit", "run", *words, "--since", tmp_path / "audit")
    assert "Since the audit of" in (tmp_path / "audit/audit.md").read_text(encoding="utf-8")
    refused = in_process("audit", "run", "--since", "empty", code=2)
    assert_bad_input(refused, "empty holds no audit.json")


def test_json_is_json_alone(audited, in_process):
    summary = json.loads(in_process("audit", "run", "--output-dir", "json", "--json").stdout)
    assert summary == json.loads((audited / "json" / "audit.json").read_text())
    assert isinstance(
        json.loads(in_process("show", "audit", "--by", "label", "--json").stdout), list
    )
    [found] = json.loads(in_process("check", "run", "--set", "only=log", "--json").stdout)["parts"]
    left = {(check["key"], check["status"]) for check in found["checks"]}
    assert {each for each in left if each[1] != "passed"} == {("seeds", "not checked")}
    assert found["evidence"].startswith("5 of 5 lines verified")
    lines = in_process("check", "run", "--set", "only=log").stdout.splitlines()
    assert lines[-1] == f"Evidence: {found['evidence']}"  # on one line, as scripts look for it
    assert [line["status"] for line in found["lines"][:5]] == ["verified"] * 5


def test_no_name_of_a_check_is_cut_off(audited, in_process):
    assert "…" not in in_process("check", "run").stdout


def test_groups_of_an_audit(in_process):
    assert "label" in in_process("show", "audit", "--by", "label").stdout
    few = json.loads(
        in_process("show", "audit", "--by", "label", "--set", "min_size=1000", "--json").stdout
    )
    assert {row["too_small"] for row in few[0]["rows"]} == {True}
    assert few[0]["spread"] is None


def test_nothing_but_the_label_has_no_table_within_it(in_process):
    assert_bad_input(
        in_process("show", "audit", "--set", "within=label", code=2),
        "no column to group by except the label",
    )


def test_several_audits_are_compared(audited, in_process, tmp_path):
    shutil.copytree(audited / "audit", tmp_path / "again")
    shutil.copytree(audited / "audit", tmp_path / "third")
    folders = ("audit", tmp_path / "again", tmp_path / "third")
    text = " ".join(in_process("show", *folders).stdout.split())
    assert "Stability over 3 runs The runs have the same settings" in text
    found = json.loads(in_process("show", *folders, "--json").stdout)
    assert (len(found["audits"]), len(found["comparisons"]), found["stability"]["p95_range"]) == (
        3,
        2,
        0.0,
    )
    assert_bad_input(in_process("show", "audit", "audit", code=2), "different ones here: 1")


def test_pictures_only_where_asked_for_and_only_of_the_runs_data(audited, in_process, tmp_path):
    assert "data:image/png" not in (audited / "audit" / "report.html").read_text(encoding="utf-8")
    images = tmp_path / "images.npy"
    (tmp_path / "kept").write_bytes(b"kept")
    images.symlink_to(tmp_path / "kept")  # it is replaced, and not written through
    in_process("audits", "images", "run", images)
    assert images.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kept").read_bytes() == b"kept"
    shown = ("--set", f"show_examples={images}", "--json")
    in_process("audit", "run", "--output-dir", tmp_path / "shown", *shown)
    assert (tmp_path / "shown" / "report.html").read_text(encoding="utf-8").count(
        "data:image/png"
    ) == 20
    other = shutil.copytree(audited / "run", tmp_path / "other")
    record = json.loads((other / "run.json").read_text())
    for change, words in (({"fingerprint": "0"}, "other data"), ({"dataset": None}, "no data set")):
        (other / "run.json").write_text(
            json.dumps({**record, "data": {**record["data"], **change}})
        )
        refused = in_process("audits", "images", other, tmp_path / "no.npy", code=2)
        assert_bad_input(refused, words)
    assert not (tmp_path / "no.npy").exists()


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (b"no numbers", "no .npy file"),
        (np.array([{}], dtype=object), "no .npy file"),
        (np.full((3, 1, 8, 8), "0"), "no .npy file"),
        ({"images": np.zeros((3, 1, 8, 8))}, "no .npy file"),
        (np.zeros((3, 8, 8)), "are not images"),
        (np.zeros((3, 1, 8, 8)), "is not a position in the 3 images"),
    ],
    ids=["bytes", "objects", "texts", "archive", "no channels", "too few"],
)
def test_only_images_are_shown(in_process, tmp_path, images, words):
    path = tmp_path / "images.npy"
    if isinstance(images, bytes):
        path.write_bytes(images)
    elif isinstance(images, dict):
        with path.open("wb") as file:
            np.savez(file, **images)
    else:
        np.save(path, images, allow_pickle=True)
    refused = in_process(
        "audit", "run", "--output-dir", tmp_path / "no", "--set", f"show_examples={path}", code=2
    )
    assert_bad_input(refused, words)


@pytest.mark.filterwarnings("ignore:no step at max_grad_norm fits")
@pytest.mark.filterwarnings("ignore:the privacy filter has left out everyone")
def test_a_privacy_filter_from_the_audit_file(in_process, tmp_path):
    filtered = SMALL.replace(
        "noise_multiplier = 1.0", "noise_multiplier = 0.5\nfilter_epsilon = 3.0"
    )
    (tmp_path / "filtered.toml").write_text(filtered.replace("non_private_baseline = true", ""))
    shown = in_process(
        "audits", "train", tmp_path / "filtered.toml", "--run-dir", tmp_path / "run"
    ).stdout
    assert "the privacy filter caps it at 3" in shown
    table = account(NormLog.open(tmp_path / "run"), delta=1e-5)
    assert table.worst_case_epsilon <= 3.0 + 1e-9
    assert table.account.privacy_filter
    with_canaries = (
        "audits",
        "train",
        tmp_path / "filtered.toml",
        "--run-dir",
        tmp_path / "other",
        "--canaries",
        "20",
    )
    assert_bad_input(in_process(*with_canaries, code=2), "filter_epsilon=3")


@pytest.mark.parametrize(
    ("batches", "relation", "short"),
    # Of 1,438 / 2 and 1,437 / 2 the integer parts differ
    [
        (2, "zero out the contribution of", "one example zeroed out"),
        (7, "add/remove", "one example added or removed"),
    ],
)
def test_train_names_the_relation_that_its_updates_leave(
    in_process, tmp_path, batches, relation, short
):
    size = -(-1438 // batches)
    lines = [
        f"batch_size = {size}" if line.startswith("batch_size") else line
        for line in SMALL.replace("non_private_baseline = true", "").splitlines()
    ]
    (tmp_path / "small.toml").write_text("\n".join(lines).replace("epochs = 2", "epochs = 1"))
    shown = in_process(
        "audits", "train", tmp_path / "small.toml", "--run-dir", tmp_path / "run"
    ).stdout
    assert f"({relation} one example, Poisson sampling" in shown
    audited = in_process("audit", tmp_path / "run").stdout
    assert short in " ".join(audited.split())


def test_a_non_private_baseline_on_request(in_process, tmp_path):
    (tmp_path / "plain.toml").write_text(
        SMALL.replace("non_private_baseline = true", "").replace("epochs = 2", "epochs = 1")
    )
    in_process("audits", "train", tmp_path / "plain.toml", "--run-dir", tmp_path / "without")
    in_process(
        "audits",
        "train",
        tmp_path / "plain.toml",
        "--run-dir",
        tmp_path / "with",
        "--non-private-baseline",
    )
    assert not (tmp_path / "without" / "examples-non-dp.parquet").exists()
    assert (tmp_path / "with" / "examples-non-dp.parquet").is_file()


def test_scores_from_outside(in_process, tmp_path):
    rows = [
        f"{score},{member},{group}"
        for score in range(20)
        for member in (0, 1)
        for group in ("a", "b")
    ]
    (tmp_path / "scores.csv").write_text("score,member,group\n" + "\n".join(rows))
    document = json.loads(in_process("attack", tmp_path / "scores.csv", "--json").stdout)
    rates = {(row["by"], row["part"], row["rate"]): row["value"] for row in document["rates"]}
    assert rates["", "all examples", "auc"] == 0.5
    assert document["bounds"]["steinke2023"]["epsilon"] == 0.0
    assert {part for by, part, _ in rates if by == "group"} == {"a", "b"}
    coins = in_process("attack", tmp_path / "scores.csv", "--set", "fair_coins").stdout
    assert "independent fair coins" in " ".join(coins.split())


def test_a_damaged_run_fails_verification_with_code_1(audited, in_process, tmp_path):
    shutil.copytree(audited / "run", tmp_path / "run")
    next((tmp_path / "run" / "records").glob("*5.parquet")).unlink()
    assert "is missing" in " ".join(in_process("check", tmp_path / "run", code=1).stdout.split())
    refused = in_process("audit", tmp_path / "run", "--output-dir", tmp_path / "audit", code=2)
    assert_bad_input(refused, "is missing", "--set unreadable")
    assert not (tmp_path / "audit" / "audit.json").exists()
    in_process(
        "audit",
        tmp_path / "run",
        "--output-dir",
        tmp_path / "audit",
        "--set",
        "unreadable=worst-case",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "nowhere"], ["nowhere does not exist"]),
        (["audit", "run", "--delta", "2"], ["delta=2.0 is not in (0, 1)"]),
        (["audit", "run", "--set", "accountant=magic"], ["accountant=magic", "rdp | pld"]),
        (["audit", "run", "--set", "conversion=magic"], ["conversion=magic"]),
        (["audit", "run", "--set", "between_records=magic"], ["between_records=magic"]),
        (["audit", "run", "--set", "preset=magic"], ["preset=magic", "yu2023"]),
        (["audit", "run", "--set", "preset=yu2023"], ["nearest"]),
        (["audit", "run", "--by", "shoe_size"], ["shoe_size", "label"]),
        (["show", "audit", "--by", "shoe_size"], ["shoe_size"]),
        (["show", "run"], ["holds no audit.json"]),
        (
            ["show", "audit", "--by", "label", "--set", "within=label"],
            ["groups by the label itself"],
        ),
        (["show", "audit", "--set", "within=race"], ["within=race", "label"]),
        (["attack", "nowhere.csv"], ["nowhere.csv does not exist"]),
        (["attack", "small.toml"], ["small.toml is neither .csv nor .parquet"]),
        (["check", "nowhere"], ["nowhere does not exist"]),
        (["audits", "train", "nowhere.toml"], ["nowhere.toml does not exist"]),
        (["audits", "train", "small.toml", "--run-dir", "run"], ["already holds a recorded run"]),
        (
            ["audits", "train", "small.toml", "--run-dir", "small.toml"],
            ["small.toml is a file", "directory is needed"],
        ),
        (
            ["audits", "train", "small.toml", "--run-dir", "small.toml/run"],
            ["small.toml is a file", "directory is needed"],
        ),
        (
            ["audits", "train", "small.toml", "--run-dir", "new", "--device", "foo"],
            ["device foo cannot be used"],
        ),
        (
            ["audits", "train", "small.toml", "--run-dir", "new", "--device", "meta"],
            ["device meta cannot be used"],
        ),
        (
            ["audit", "run", "--output-dir", "small.toml"],
            ["small.toml is a file", "directory is needed"],
        ),
        (["audit", "run", "--by", "label:bins=x"], ["bins='x' is not a whole number"]),
        (["check", "empty"], ["holds no journal.jsonl"]),
        (["audit", "empty"], ["holds no journal.jsonl"]),
        (["demo", "--output-dir", "."], ["run is not the run of an earlier demo"]),
    ],
)
def test_bad_input_is_one_message_and_code_2(in_process, arguments, words):
    result = in_process(*arguments, code=2)
    assert_bad_input(result, *words)
    assert result.stderr.lstrip().startswith("error:")  # an old rich ends its bar by a line


def test_a_device_that_this_pytorch_lacks(in_process, monkeypatch):
    def zeros(*_, **__):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("torch.zeros", zeros)
    result = in_process(
        "audits", "train", "small.toml", "--run-dir", "new", "--device", "cuda", code=2
    )
    assert_bad_input(result, "device cuda", "not compiled with CUDA", "pass cpu")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "audit.json lacks "),
        (
            "[]",
            "audit.json: the content=[] is not right: it should be a JSON object",
        ),
        ('{"guarantee": {"worst_case_epsilon": 1.0}}', "audit.json lacks "),
    ],
)
def test_groups_of_a_broken_audit_json(audited, in_process, tmp_path, content, message):
    shutil.copytree(audited / "audit", tmp_path / "audit")
    (tmp_path / "audit" / "audit.json").write_text(content)
    for option in ([], ["--json"]):
        result = in_process("show", tmp_path / "audit", "--by", "label", *option, code=2)
        assert_bad_input(result, message, "make it again")


def test_hyphens_and_underscores_are_one(in_process):
    screen = in_process(
        "audit", "run", "--output-dir", "hyphens", "--set", "between_records=worst-case"
    ).stdout
    assert "You may promise" in screen
    assert (
        json.loads(Path("hyphens/audit.json").read_text(encoding="utf-8"))["account"][
            "between_records"
        ]
        == "worst_case"
    )


def test_the_tight_accountant_end_to_end(audited, in_process):
    screen = " ".join(
        in_process(
            "audit", "run", "--output-dir", "pld", "--set", "accountant=pld", "--verbose"
        ).stdout.split()
    )
    assert "PLD accountant" in screen
    assert "RDP" not in screen
    frame = pd.read_parquet(audited / "pld" / "epsilon.parquet")
    assert (frame["epsilon"] <= frame["rdp_epsilon"] + 1e-12).all()
    assert (frame["epsilon_lower"] == 0).all()
    content = json.loads((audited / "pld" / "audit.json").read_text())
    assert content["account"]["accountant"] == "pld"
    assert "PLD accountant" in content["guarantee"]["statement"]
    assert "label" in in_process("show", "pld", "--by", "label").stdout


def test_unwritable_output_is_one_message(audited, in_process):
    (audited / "file").write_text("")
    assert_bad_input(in_process("audit", "run", "--output-dir", "file/audit", code=2), "file/audit")


@pytest.mark.slow
def test_a_seeded_run_is_labelled(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    trained = indpriv(
        "audits", "train", "small.toml", "--run-dir", "run", "--seed", "1", cwd=tmp_path
    )
    assert "no guarantee (seeded, reproducible: no privacy)" in " ".join(trained.stdout.split())
    assert "; guarantee:" not in trained.stdout
    screen = indpriv("audit", "run", "--output-dir", "audit", cwd=tmp_path).stdout
    assert "You may promise nothing: the noise was seeded" in " ".join(screen.split())
    screen = indpriv("audit", "run", "--output-dir", "audit", "--verbose", cwd=tmp_path).stdout
    assert "reproducible: no privacy" in " ".join(screen.split())
    assert "reproducible: no privacy" in (tmp_path / "audit" / "report.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_interrupted_training_leaves_a_usable_run_and_code_130(number, tmp_path):
    (tmp_path / "long.toml").write_text(SMALL.replace("epochs = 2", "epochs = 2000"))
    with running(
        words_of("audits", "train", "long.toml", "--run-dir", "run"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for_records(process, tmp_path / "run", 10)
        os.kill(process.pid, number)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert re.search(r"stopped after \d+ of \d+ steps; run holds them", told)
    assert not list((tmp_path / "run").rglob("*.tmp"))
    indpriv("audit", "run", "--output-dir", "audit", cwd=tmp_path)


@pytest.mark.parametrize("handler", ["SIG_IGN", "SIG_DFL"])
def test_an_ignored_sigterm_stays_ignored(handler):
    code = f"""
import signal, sys
signal.signal(signal.SIGTERM, signal.{handler})
sys.argv = ["indpriv", "--version"]
from indpriv.cli import main
try:
    main()
except SystemExit:
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.splitlines()[-1] == str(handler == "SIG_IGN")


def test_a_pipe_that_closes_early_is_no_fault_that_a_check_found():
    """The code 1 would say so in a script that stops where a part of a pipe fails."""
    read, write = os.pipe()
    os.close(read)
    command = words_of("--version")
    found = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(write)
    assert (found.returncode, found.stderr) == (141, "")
