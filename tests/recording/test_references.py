"""Reference models for a run of a plain script with a Recorder, trained by the script's own function."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from command_lines import run as run_command
from indpriv._files import read_json, write_json
from indpriv._plain import to_json
from indpriv.attack_signals import AttackSignals, from_losses, open_signals
from indpriv.attacks.released import released_of_run
from indpriv.audit import audit
from indpriv.audit.attacks import known_of_run, results_of_run
from indpriv.errors import EvidenceError, InputError
from indpriv.recording import AuditSpec, references_for_run
from indpriv.recording.references import OwnModels

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
    assert {"lira", "rmia"} <= set(
        results_of_run(known_of_run(run), (), (8.0, 1e-3)).rates["attack"]
    )
    found = audit(run, script / "audit")
    assert {"lira", "rmia"} <= set(found.rates["attack"])
    # The run kept its model, so attacks on the model itself run too, by its gradients and inputs.
    of_model = {"gradient_lira", "gradient_norm", "gradient_ratio", "input_quantile"}
    assert of_model <= set(found.rates["attack"])
    assert "heuristic of the last iterate" in out
    assert "Not run" not in out
    assert read_json(run / "references/signals.json")["settings"].keys() == {
        "training code",
        "data",
        "fit",
        "run",
        "signals",
    }


def test_what_attacks_on_the_model_itself_lack_is_said(script, tmp_path, capsys):
    run = shutil.copytree(script / "runs/own", tmp_path / "run")
    for name in ("final", "references"):
        shutil.rmtree(run / name, ignore_errors=True)
    assert run_command(["attack", run]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Not run: norm of the final gradient, likelihood ratio of final gradients" in out
    assert "keep_model=True" in out
    assert run_command(["attack", run, "--attack", "gradient_norm"]) == 2
    assert "keep_model=True" in capsys.readouterr().err
    references_for_run(run, "train.py:plain", 1)  # of a model that was not kept: losses alone
    assert open_signals(run / "references").keys() == {"confidence"}


def test_what_a_model_tells_is_kept_while_its_losses_are_those_of_the_run(script, tmp_path):
    run = shutil.copytree(script / "runs/own", tmp_path / "run")
    shutil.rmtree(run / "references", ignore_errors=True)
    references_for_run(run, "train.py:plain", 1)
    file, table = run / "final/released.npz", run / "examples.parquet"
    known = released_of_run(run)["dp"]
    assert known.norms == pytest.approx(
        np.exp(-open_signals(run / "references")["gradients"].signal[0]), rel=1e-4
    )
    assert file.stat().st_mode & 0o77 == 0
    first = file.read_bytes()
    references_for_run(run, "train.py:plain", 2)
    assert file.read_bytes() == first
    for wrong in ({"norms": known.norms[1:]}, {"products": known.products[:, 1:]}):
        replace(known, **wrong).save(run, "dp")
        with pytest.raises(EvidenceError, match=r"released.npz is damaged"):
            released_of_run(run)
    for broken in (b"", first[:1000]):
        file.write_bytes(broken)
        with pytest.raises(EvidenceError, match=r"delete .*released.npz; indpriv attack"):
            references_for_run(run, "train.py:plain", 3)  # before any training
    assert AttackSignals.open(run / "references").n_models == 3
    frame = pd.read_parquet(table)
    frame.assign(loss=frame["loss"] * 2).to_parquet(table)
    known.save(run, "dp")
    assert released_of_run(run) == {}


def test_gradients_of_references_need_no_holdout(script, tmp_path, monkeypatch):
    """With fewer than 40 test examples, LiRA on gradients is left, and what is not is said."""
    run, said = shutil.copytree(script / "runs/own", tmp_path / "run"), []
    shutil.rmtree(run / "references", ignore_errors=True)
    (run / "final/released.npz").unlink(missing_ok=True)
    monkeypatch.setattr("indpriv.recording.references.LEAST", 41)
    references_for_run(run, "train.py:plain", 4, tell=said.append)
    assert said[0].startswith("fewer attacks on the model itself: spec.test_set has 80 examples")
    assert "gradient_lira" in set(
        results_of_run(known_of_run(run), (), (8.0, 1e-3)).rates["attack"]
    )


def test_references_of_another_run_or_fit_are_refused_before_training(script, tmp_path):
    run = shutil.copytree(script / "runs/own", tmp_path / "run")
    shutil.rmtree(run / "final")
    references_for_run(run, "train.py:plain", 1, output=tmp_path / "s")
    with pytest.raises(InputError, match="trained with another fit"):
        references_for_run(run, "train.py:fit", 2, output=tmp_path / "s")
    # Functions of Python are told apart by their names.
    (plain, spec), (fit, _) = (
        OwnModels(f"train.py:{name}", None).code for name in ("plain", "fit")
    )
    assert references_for_run(run, plain, 1, spec=spec, output=tmp_path / "s").n_models == 2
    with pytest.raises(InputError, match="trained with another fit"):
        references_for_run(run, fit, 2, spec=spec, output=tmp_path / "s")
    frame = pd.read_parquet(run / "examples.parquet")
    frame.assign(loss=frame["loss"] * 2).to_parquet(run / "examples.parquet")
    with pytest.raises(InputError, match="trained with another run"):
        references_for_run(run, "train.py:plain", 2, output=tmp_path / "s")
    assert AttackSignals.open(tmp_path / "s").n_models == 2


def test_training_code_that_was_edited_does_not_go_on_with_a_series(script, tmp_path):
    run, place = script / "runs/own", tmp_path / "s"
    references_for_run(run, variant(script, "first.py"), 1, output=place)
    slower = variant(script, "second.py", ("lr=0.5", "lr=0.4"))
    with pytest.raises(InputError, match="trained with another training code; choose another"):
        references_for_run(run, slower, 2, output=place)
    remarked = variant(script, "third.py", ("    x, y =", "    # as in the paper\n    x, y ="))
    assert references_for_run(run, remarked, 2, output=place).n_models == 3


def test_the_attacked_model_is_no_reference(script, tmp_path):
    """A fit that returns the kept model is refused at the first reference."""
    whole = "    from safetensors.torch import load_file\n    model = build_model()\n"
    whole += "    model.load_state_dict(load_file('runs/own/final/parameters.safetensors'))\n"
    name = variant(script, "same.py", (RESULT, whole + RESULT))
    with pytest.raises(InputError, match="the very signals of the one before"):
        references_for_run(script / "runs/own", name, 1, output=tmp_path / "s")


def test_each_reference_by_opacus_trains_without_its_warning(script, tmp_path, recwarn):
    references_for_run(script / "runs/own", "train.py:fit", 1, output=tmp_path / "s")
    assert [one for one in recwarn if "backward hook" in str(one.message)] == []


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

    def build_model():
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))

    def fit(indices, seed):
        torch.manual_seed(seed)
        models.append(build_model().train())
        chosen.append(indices)
        return models[-1]

    plain = build_model()

    def loss_of(parameters, x, y):
        outputs = torch.func.functional_call(plain, parameters, (x[None],))
        return nn.functional.cross_entropy(outputs, y[None])

    parts = {"dataset": Subset(every, range(80)), "test_set": Subset(every, range(80, 160))}
    spec = AuditSpec(model=build_model, loss_fn=loss_fn, **parts)
    found = references_for_run(script / "runs/own", fit, 3, spec=spec, output=tmp_path / "s")
    for row, (model, indices) in enumerate(zip(models, chosen, strict=True), 1):
        with torch.no_grad():
            loss = loss_fn(model(inputs), every.tensors[1])
        assert found.signal[row] == pytest.approx(from_losses(loss), abs=1e-5)
        gradients = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(
            dict(model.named_parameters()), inputs, every.tensors[1]
        )
        norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
        signal = open_signals(tmp_path / "s")["gradients"].signal[row]
        assert signal == pytest.approx(-norms.log().detach(), abs=1e-3)
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
        ([(RESULT, "    model[1] = nn.ReLU()\n" + RESULT)], "losses on .* are not those of spec.model"),
        ([(RESULT, "    return None\n\n\nif __name__")], "returned a NoneType; it returns the trained"),
        ([("    model = build_model()\n    optimizer = torch", "    torch.manual_seed(0)\n    model = build_model()\n    optimizer = torch"), ("data[indices]", "data[:]")], "the very signals of the one before"),
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
        references_for_run(script / "runs/own", reference, 2, output=tmp_path / "s")


def test_references_on_other_inputs_are_refused(script, tmp_path):
    """By losses of the model of the run, if it was kept; else a series is not continued with them."""
    other = variant(script, "scaled.py", ("data = Tensor", "inputs *= 2\ndata = Tensor"))
    with pytest.raises(InputError, match=r"has other losses on \d+ examples of the train set"):
        references_for_run(script / "runs/own", other, 1, output=tmp_path / "s")
    run = shutil.copytree(script / "runs/own", tmp_path / "run")
    shutil.rmtree(run / "final")
    references_for_run(run, variant(script, "whole.py"), 1, output=tmp_path / "s")
    with pytest.raises(InputError, match="another data, training code; choose another folder"):
        references_for_run(run, other, 2, output=tmp_path / "s")


def test_a_baseline_and_a_study_and_who_is_vulnerable(script, tmp_path, capsys):
    run = shutil.copytree(script / "runs/own", tmp_path / "run")
    shutil.rmtree(run / "references", ignore_errors=True)
    trained = f"{script / 'train.py'}:plain"
    command = ["attack", run, "--references", trained, "--models", 9]
    assert run_command([*command, "--set", f"baseline={trained}"]) == 0
    out = capsys.readouterr().out
    for words in ("The same attacks on the model trained without DP", "How well the models fit"):
        assert words in out
    assert "was not checked" not in out  # the model was kept
    private, plain = (pd.read_parquet(run / f"examples{end}.parquet") for end in ("", "-non-dp"))
    assert private.drop(columns=["loss", "correct"]).equals(plain.drop(columns=["loss", "correct"]))
    assert not np.allclose(private["loss"], plain["loss"])
    signals = AttackSignals.open(run / "references-non-dp")
    assert (signals.n_models, signals.audited) == (10, 0)
    assert signals.signal[0] == pytest.approx(from_losses(plain["loss"]), rel=1e-6)
    assert run_command(["attack", run, "--json"]) == 0  # finds all of this again
    content = json.loads(capsys.readouterr().out)
    of_both = {(row["model"], row["attack"]) for row in content["attacks"]}
    assert {row["model"] for row in content["attacks"]} == {"dp", "non_dp"}
    of_model = {"gradient_lira", "gradient_norm", "gradient_ratio", "input_quantile"}
    assert {(model, name) for model in ("dp", "non_dp") for name in of_model} <= of_both
    accuracy = plain[plain["split"] == "test"]["correct"].mean()
    assert content["fitted"][1]["test_accuracy"] == pytest.approx(accuracy)

    found = audit(run, run / "audit")
    ranked = [(one.model, one.figure) for one in found.vulnerability]
    assert ranked == [(model, of) for model in ("dp", "non_dp") for of in ("epsilon", "loss")]
    page = (run / "audit/audit.md").read_text()
    assert "Who is vulnerable?" in page
    assert run_command(["show", run / "audit"]) == 0
    assert "Found in the top fifth" in capsys.readouterr().out
    command = ["attack", run / "references", "--set", f"epsilon={run / 'audit'}"]
    assert run_command([*command, "--json"]) == 0
    study = json.loads(capsys.readouterr().out)
    assert study["rates"][0]["n"] == study["effects"]["n_models"] == 9  # without the run
    assert study["effects"]["vulnerability"] == to_json(found.vulnerability[:2])


def test_signals_with_a_fingerprint_of_their_own_are_told_apart_but_not_refused(script, tmp_path):
    run = script / "runs/own"
    references_for_run(run, variant(script, "plainly.py"), 2, output=tmp_path / "s")
    checked = AttackSignals.open(tmp_path / "s")
    assert results_of_run(known_of_run(run, tmp_path / "s"), (), (8.0, 1e-3)).unchecked == ()
    replace(checked, fingerprint="mine").save(tmp_path / "mine")
    (said,) = known_of_run(run, tmp_path / "mine").unchecked
    assert "was not checked" in said


def test_a_baseline_is_trained_once_and_never_by_the_references_alone(script, tmp_path):
    run = shutil.copytree(script / "runs/own", tmp_path / "run")
    trained = f"{script / 'train.py'}:plain"
    references_for_run(run, trained, 1, output=tmp_path / "s")
    assert not (run / "examples-non-dp.parquet").exists()
    references_for_run(run, trained, 1, baseline=True)
    first = (run / "examples-non-dp.parquet").read_bytes()
    references_for_run(run, trained, 2, baseline=True)
    assert (run / "examples-non-dp.parquet").read_bytes() == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--baseline", "train.py:plain"], "--set baseline=train.py:plain"),
        (["--set", "baseline=train.py:plane"], "has no 'plane'; define it there"),
        (["--attack", "lira", "--models", 2], "lira needs 4 reference models, and --models is 2"),
        (["--models", 0], "n_models"),
        (["--set", "workers=0"], "workers"),
        (["--attack", "nonsense"], "nonsense"),
    ],
)
def test_options_that_do_not_fit(script, tmp_path, capsys, words, message):
    reference = ["--references", f"{script / 'train.py'}:plain", "--signals", tmp_path / "s"]
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


def test_coins_that_took_all_of_few_examples_are_no_error():
    """0.9^50 is 0.5 %: of 64 references, such a one is there in a quarter of all runs."""
    member = np.random.default_rng(0).random((9, 50)) < 0.9
    member[3], facts = True, {"audited": 0, "share": 0.9}
    AttackSignals.from_arrays(np.zeros((9, 50)), member, coins=True, **facts).check_references(0, 4)
    with pytest.raises(InputError, match="reference 3 was trained on every example"):
        AttackSignals.from_arrays(np.zeros((9, 50)), member, **facts).check_references(0, 4)
