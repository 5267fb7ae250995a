"""`indpriv publish quantiles` and `indpriv publish statement`, run within the test's process."""

import json

import pytest

from indpriv.cli import run
from runs import make_run, record


@pytest.fixture
def call(capsys):
    def run_command(*arguments, code=0):
        assert run([*map(str, arguments)]) == code
        captured = capsys.readouterr()
        return captured.out, " ".join(captured.err.split())

    return run_command


def test_release_prints_figures_errors_costs_and_assumptions(audit_dir, call):
    command = (
        "publish",
        "quantiles",
        audit_dir,
        "--quantiles",
        "0.1,0.5",
        "--mean",
        "--epsilon",
        "0.5",
        "--budget",
        "1",
    )
    screen = " ".join(call(*command)[0].split())
    for words in (
        "for others", "quantile 0.5", "mean", "people", "Expected error", "Spent", "of a budget of epsilon 1.00", "Assumed",
        "Theorem 3.2", "5,000 equally spaced values", "drawn now and paid for",
    ):  # fmt: skip
        assert words in screen, words
    assert "stored answer, shown at no further cost" in call(*command)[0]
    content = json.loads(call(*command, "--json")[0])
    assert content["spent"]["releases"] == 1


def test_release_by_group(audit_dir, call):
    groups = ("--by", "sex", "--group", "Male", "--group", "Female")
    screen, _ = call(
        "publish", "quantiles", audit_dir, "--quantiles", "0.5", "--epsilon", "1", *groups
    )
    assert "Male" in screen
    assert "±" in screen


def test_bad_input_ends_in_one_message(audit_dir, call):
    for arguments, words in (
        ((audit_dir, "--epsilon", "1", "--quantiles", ""), "nothing to release"),
        ((audit_dir, "--epsilon", "1", "--quantiles", "a"), "--quantiles 'a'"),
        ((audit_dir, "--epsilon", "1", "--mean", "--by", "sex"), "The list must be public"),
        (
            (audit_dir, "--epsilon", "1", "--mean", "--by", "height", "--group", "tall"),
            "no column 'height'",
        ),
        ((audit_dir / "no", "--epsilon", "1", "--mean"), "make an audit first"),
        ((audit_dir, "--epsilon", "1", "--of", "norms"), "--of norms needs a run directory"),
    ):
        _, error = call("publish", "quantiles", *arguments, code=2)
        assert words in error
        assert "Traceback" not in error
    assert not (audit_dir / "shareable").exists()


@pytest.mark.parametrize("audited", [True, False])
def test_budget_is_never_spent_on_norms_where_epsilons_were_meant(call, tmp_path, audited):
    record(make_run(), tmp_path / "run", every=1)
    if audited:
        call("audit", tmp_path / "run", "--delta", "1e-5")
    _, error = call(
        "publish", "quantiles", tmp_path / "run", "--quantiles", "0.5", "--epsilon", "1", code=2
    )
    assert f"indpriv publish quantiles {tmp_path / 'run' / 'audit'} ..." in error
    assert (f"indpriv audit {tmp_path / 'run'}" in error) is not audited
    assert not list(tmp_path.rglob("shareable"))
    command = (
        "publish",
        "quantiles",
        tmp_path / "run",
        "--of",
        "norms",
        "--quantiles",
        "0.5",
        "--epsilon",
        "1",
    )
    call(*command)
    assert (tmp_path / "run" / "shareable" / "release.json").is_file()


def test_statement(audit_dir, call):
    text, _ = call("publish", "statement", audit_dir, "--example", "5")
    assert "CONFIDENTIAL: for the owner of example 5" in text
    assert "400 statements" in call("publish", "statement", audit_dir, "--all")[0]
    assert json.loads(call("publish", "statement", audit_dir, "--unit", "5", "--json")[0])
    assert "pass one of" in call("publish", "statement", audit_dir, code=2)[1]


@pytest.mark.parametrize("command", [("publish", "quantiles"), ("publish", "statement")])
def test_help_has_an_example(call, command):
    assert f"Example: indpriv {' '.join(command)}" in " ".join(call(*command, "--help")[0].split())
