"""Command lines of before: each answers, in one line, with what is typed now."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from command_lines import run
from indpriv import cli
from indpriv.cli import app
from indpriv.cli.commands import keys_of

LINES = tomllib.loads(Path(cli.__file__).with_name("moved.toml").read_text(encoding="utf-8"))[
    "line"
]
PROGRAM = typer.main.get_command(app)


def command_of(words):
    found = PROGRAM
    for word in words:
        found = found.commands[word]
    return found


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("groups reports/adult --by race", "show reports/adult --by race"),
        ("groups a --within label --min-size=3", "show a --set within=label --set min_size=3"),
        ("compare a b --at-epsilon 2 --json", "show a b --set at_epsilon=2 --json"),
        ("verify run --signed-by anna.pub", "check run --signed-by anna.pub"),
        ("lint run --delta 1e-5 --strict", "check run --set delta=1e-5 --set strict=yes"),
        ("validate a b", "check a b"),
        ("convert n.npz --run r.json --output-dir o", "import n.npz --run r.json --output-dir o"),
        ("release a --mean --epsilon 1", "publish quantiles a --mean --epsilon 1"),
        ("release r --norms --epsilon 1", "publish quantiles r --of norms --epsilon 1"),
        ("release a --method descent --delta 1e-6 --epsilon 1", "publish quantiles a --set method=descent --set delta=1e-6 --epsilon 1"),
        ("statement create a --example 3", "publish statement a --example 3"),
        ("model-card a", "publish card a"),
        ("pdf 'my audit'", "publish pdf 'my audit'"),
        ("audit r --accountant pld --by sex", "audit r --set accountant=pld --by sex"),
        ("audit r --seed 3 --unreadable=worst-case", "audit r --set seed=3 --set unreadable=worst-case"),
        ("audit r --bucket-is-private --json", "audit r --set bucket_is_private=yes --json"),
        ("audit c --spec t.py:s --steps 9 --noise-multiplier 1.1,0.9@500", "audit c --spec t.py:s --set steps=9 --set noise_multiplier=1.1,0.9@500"),
        ('audit c --spec t.py:s --step-of "m_{e}.pt=20*e"', "audit c --spec t.py:s --set 'step_of=m_{e}.pt=20*e'"),
        ("audit c --spec t.py:s --challenge r --challenges 3", "check --checkpoints c --spec t.py:s r --set challenges=3"),
        ("audit --spec t.py:s c --challenge=r", "check --spec t.py:s --checkpoints c r"),
        ("audit r --accountant", "audit r --set accountant=VALUE"),
        ("gate a --max-worst-case-epsilon 8 --min-coverage 1.0 --exact", "gate a --max worst_case_epsilon=8 --min coverage=1.0 --require exact"),
        ("gate a --verified --unit user --run r", "gate a --require verified --require unit=user --run r"),
        ("attack --scores s.csv --fair-coins --delta 1e-5", "attack s.csv --set fair_coins=yes --set delta=1e-5"),
        ("attack run r --attack rmia --signals s", "attack r --attack rmia --signals s"),
        ("attack run s --epsilon a --unit-rule max", "attack s --set epsilon=a --set unit_rule=max"),
        ("leak c --spec t.py:s --max-grad-norm 1 --pictures 3", "leak c --spec t.py:s --set max_grad_norm=1 --set pictures=3"),
        ("compose a b --accountant pld --same-run --tuning-mean 3", "compose a b --set accountant=pld --set same_run=yes --set tuning_mean=3"),
        ("advise r --target 1 --quantile 0.5", "advise r --target 1 --set quantile=0.5"),
    ],
)  # fmt: skip
def test_a_line_of_before_is_answered_with_that_of_now(before, now, capsys):
    assert run(shlex.split(before)) == 2
    shown = capsys.readouterr().err
    assert shown == f"error: this command line has changed, type: indpriv {now}\n"


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['old']} {line.get('when', '')}")
def test_what_is_to_be_typed_exists_and_what_was_typed_does_not(line):
    if line["old"] != line["new"] and not {"when", "argument"} & line.keys():
        with pytest.raises((KeyError, AttributeError)):
            command_of(line["old"].split())
    if line.get("experiment"):
        return
    known = {name for one in command_of(line["new"].split()).params for name in one.opts}
    assert not known & line.get("options", {}).keys()
    for new in [*line.get("options", {}).values(), line.get("first", "")]:
        for option, value in re.findall(r"(--\S+) (\S+)", new):
            assert option in known
            of = {"--max": "largest", "--min": "smallest", "--require": "require"}
            if option in {**of, "--set": ""}:
                key = value.partition("=")[0]
                assert key in keys_of(line["new"], of.get(option, "settings"))


@pytest.mark.parametrize("words", [["attack", "run"], ["audit", "convert"], ["gate", "pdf"]])
def test_names_of_folders_are_no_commands(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    assert "has changed" not in capsys.readouterr().err
