"""Reference models for a run of a plain script with a Recorder, trained by the script's own function."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from command_lines import run as run_command
from indpriv._files import read_json, write_json
from indpriv.attack_signals import AttackSignals, from_losses, open_signals
from indpriv.audit import audit
from indpriv.audit.attacks import results_of_run
from indpriv.errors import InputError
from indpriv.recording import AuditSpec, references_for_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Opacus's
PAGE = Path(__file__).parents[2] / "docs/how-to/own-references.md"
_TITLED = re.compile(r'^```python title="train.py"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# That of the page, with a function that needs no Opacus and is faster.
SCRIPT = _TITLED.findall(PAGE.read_text(encoding="utf-8"))[0].replace(
    "if __name__",
    """def plain(indices, seed):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = data[indices]
    loss_fn(model(x), y).mean().backward()
    optimizer.step()
    return model


if __name__""",
)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A folder with people.csv, train.py and the run that it recorded."""
    folder = tmp_path_factory.mktemp("own")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(160, 5)), columns=list("abcde"))
    frame["income"] = (frame["a"] + rng.normal(size=160) > 0).astype(int)
    frame.to_csv(folder / "people.csv", index=False)
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "train.py"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def variant(script, name, *changes):
    """A file beside train.py that differs from it; "FILE:plain"."""
    text = SCRIPT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (script / name).write_text(text)
    return f"{script / name}:plain"


@pytest.fixture(autouse=True)
def _path(script, monkeypatch):
    monkeypatch.chdir(script)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_one_command_trains_references_and_attacks_the_run(script, capsys):
    run, reference = script / "runs/own", f"{script / 'train.py'}:fit"
    command = ["attack", run, "--references", reference, "--models"]
    assert run_command([*command, 2, "--json"]) == 0
    assert '"attack": "rmia"' in capsys.readouterr().out
    first = open_signals(run / "references")["confidence"]
    assert run_command([*command, 5]) == 0  # three more
    out = capsys.readouterr().out
    assert "LiRA" in out
    assert "RMIA" in out
    signals = AttackSignals.open(run / "references")
    assert (signals.n_models, signals.n_examples, signals.audited) == (6, 160, 0)
    assert np.array_equal(signals.signal[:3], first.signal)
    assert signals.member[0].tolist() == [True] * 80 + [False] * 80
    assert 0.3 < signals.member[1:].mean() < 0.7
    kept = pd.read_parquet(run / "examples.parquet")
    assert signals.signal[0] == pytest.approx(from_losses(kept["loss"]), rel=1e-6)
    # What lies in the run directory is found by later commands, and by an audit.
    assert {"lira", "rmia"} <= set(results_of_run(run, None, (), (8.0, 1e-3)).rates["attack"])
    found = audit(run, script / "audit")
    assert {"lira", "rmia"} <= set(found.rates["attack"])
    assert read_json(run / "references/signals.json")["settings"].keys() == {"data"}


def test_a_run_without_delta_is_told_before_references_are_trained(script, tmp_path, capsys):
    run = shutil.copytree(script / "runs/own", tmp_path / "run")
    shutil.rmtree(run / "references", ignore_errors=True)
    record = read_json(run / "run.json")
    write_json(run / "run.json", {key: record[key] for key in record if key != "delta"})
    command = ["attack", run, "--references", "train.py:plain", "--models", 2]
    assert run_command(command) == 2
    assert "--set delta=0.001" in capsys.readouterr().err
    assert not (run / "references").exists()
    assert run_command([*command, "--set", "delta=1e-3"]) == 0


def test_the_signals_are_those_of_the_models(script, tmp_path):
    """Of a function and a spec of this process; models that are known give known losses."""
    data = pd.read_csv(script / "people.csv")
    inputs = torch.tensor(data.drop(columns="income").to_numpy(), dtype=torch.float32)
    every = TensorDataset(inputs, torch.tensor(data["income"].to_numpy()))
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    models, chosen = [], []

    def fit(indices, seed):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(5, 2)).train())
        chosen.append(indices)
        return models[-1]

    parts = {"dataset": Subset(every, range(80)), "test_set": Subset(every, range(80, 160))}
    spec = AuditSpec(model=lambda: nn.Sequential(nn.Linear(5, 2)), loss_fn=loss_fn, **parts)
    found = references_for_run(script / "runs/own", fit, 3, spec=spec, output=tmp_path / "s")
    for row, (model, indices) in enumerate(zip(models, chosen, strict=True), 1):
        with torch.no_grad():
            loss = loss_fn(model(inputs), every.tensors[1])
        assert found.signal[row] == pytest.approx(from_losses(loss), abs=1e-5)
        assert np.array_equal(np.flatnonzero(found.member[row]), indices)
    with pytest.raises(InputError, match="pass fit as a function with spec="):
        references_for_run(script / "runs/own", fit, 3, output=tmp_path / "s")


@pytest.mark.slow
def test_two_processes_train(script, tmp_path):
    reference = f"{script / 'train.py'}:plain"
    options = {"output": tmp_path / "s", "workers": 2}
    assert references_for_run(script / "runs/own", reference, 2, **options).n_models == 3


RESULT = "    return model\n\n\nif __name__"
RANDOM = (
    "spec = AuditSpec(",
    "class Noisy(Subset):\n    def __getitem__(self, i): x, y = super().__getitem__(i); "
    "return x + torch.rand(5), y\n    def __getitems__(self, ids): return [self[i] for i in ids]\n"
    "train_set = Noisy(data, range(n_train))\nspec = AuditSpec(",
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(RESULT, "    model[2] = nn.Linear(16, 3)\n" + RESULT)], r"whose parameter 2.weight is \(3, 16\)"),
        ([(RESULT, "    return nn.Sequential(model)\n\n\nif __name__")], "0.weight is absent"),
        ([(RESULT, "    return None\n\n\nif __name__")], "returned a NoneType; it returns the trained"),
        ([("plain(indices, seed)", "plain(indices)")], r"no function fit\(indices, seed\)"),
        ([RANDOM], "gave other rows when it was read again"),
        ([("spec = AuditSpec(", "spec = = AuditSpec(")], "cannot be imported: SyntaxError"),
        ([("Subset(data, range(n_train)), ", "Subset(data, range(79)), ")], "1 example ids of the train set"),
        ([("range(n_train, len(data))", "range(80, 150)")], "10 example ids of the test set"),
        ([("dataset=train_set, test_set=test_set", "dataset=train_set")], "80 example ids of the test set"),
        ([("Subset(data, range(n_train)), ", "Subset(data, range(79, -1, -1)), ")], "labels of the train set"),
        ([("spec = AuditSpec(", "other = AuditSpec(")], "spec is a NoneType, not an AuditSpec"),
        ([("def plain", "def plane")], "has no 'plain'; define it there"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_reference_is_one_message(script, tmp_path, request, changes, message):
    number = request.node.callspec.indices["changes"]
    reference = variant(script, f"bad{number}.py", *changes)
    with pytest.raises(InputError, match=message):
        references_for_run(script / "runs/own", reference, 1, output=tmp_path / "s")


def test_references_on_another_order_of_the_rows_are_not_continued(script, tmp_path):
    reference = variant(script, "whole.py")
    references_for_run(script / "runs/own", reference, 1, output=tmp_path / "s")
    other = variant(script, "scaled.py", ("data = Tensor", "inputs *= 2\ndata = Tensor"))
    with pytest.raises(InputError, match="another data; choose another folder"):
        references_for_run(script / "runs/own", other, 2, output=tmp_path / "s")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attack", "lira", "--models", 2], "lira needs 4 reference models, and --models is 2"),
        (["--models", 0], "n_models"),
        (["--set", "workers=0"], "workers"),
        (["--attack", "nonsense"], "nonsense"),
    ],
)
def test_options_that_do_not_fit(script, capsys, words, message):
    reference = ["--references", f"{script / 'train.py'}:plain"]
    assert run_command(["attack", script / "runs/own", *reference, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_number_of_models_needs_what_trains_them(script, capsys):
    assert run_command(["attack", script / "runs/own", "--models", 2]) == 2
    assert "--models is for --references FILE.py:fit" in capsys.readouterr().err


def test_a_reference_that_was_trained_on_everything_is_refused():
    member = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]])
    signals = AttackSignals.from_arrays(np.zeros((3, 4)), member, audited=0)
    with pytest.raises(InputError, match="reference 2 was trained on every example"):
        signals.check_references(0, 1)
