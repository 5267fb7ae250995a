"""No publishing command takes a run whose noise protects nobody."""

import warnings

import pytest

from audits.training.largest_norm import LargestNormNoise
from indpriv._files import read_json
from indpriv.cli import run
from indpriv.cli.commands import publish_app
from indpriv.norm_log.evidence import LARGEST_NORM
from indpriv.recording import Recorder
from tests.release.conftest import epsilons, write_small_audit
from tests.runs import PER_EXAMPLE, make_run

COMMANDS = {
    "quantiles": ("publish", "quantiles", "audit", "--mean", "--epsilon", "1"),
    "quantiles of norms": (
        "publish",
        "quantiles",
        "run",
        "--of",
        "norms",
        "--quantiles",
        "0.5",
        "--epsilon",
        "1",
    ),
    "statement": ("publish", "statement", "audit", "--all"),
    "card": ("publish", "card", "audit"),
    "gate": ("gate", "audit", "--max", "delta=1"),
}


@pytest.fixture(scope="module")
def void(tmp_path_factory):
    """One step with noise of the largest norm, and an audit of such a run."""
    folder = tmp_path_factory.mktemp("void")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make_run()
        made.optimizer = LargestNormNoise.of(made.optimizer)
        recorder = Recorder(folder / "run", dataset=made.dataset, loss_fn=PER_EXAMPLE, every=1)
        with recorder.attach(made.model, made.optimizer, made.loader):
            made.step(*next(iter(made.loader)))
    header = {"no_privacy": LARGEST_NORM}
    write_small_audit(folder / "audit", epsilons(400), recorder=header)
    return folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_publishing_command_refuses_noise_of_the_largest_norm(command, void, monkeypatch, capsys):
    monkeypatch.chdir(void)
    assert read_json(void / "audit" / "audit.json")["guarantee"]["status"] == "void"
    assert run([*command]) != 0
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "void" in shown or "no privacy" in shown
    assert not list(void.glob("*/shareable/*"))


def test_every_publishing_command_is_tested():
    """All of publish, but for the PDF of the sensitive report."""
    found = {command.name for command in publish_app.registered_commands}
    assert found == {name for name in COMMANDS if " " not in name} - {"gate"} | {"pdf"}
