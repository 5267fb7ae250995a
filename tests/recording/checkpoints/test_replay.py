"""Replays of runs that an ordinary script trained (plain_opacus.py), held against a Recorder that watched the same run."""

import json
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, Subset, TensorDataset

import plain_opacus
from audits.training.datasets import load_dataset
from indpriv import InputError, NormLog, account
from indpriv.audit import audit
from indpriv.norm_log.evidence import lines_of
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import NormLogWriter
from indpriv.recording import AuditSpec, Recorder, StepOptions, replay
from indpriv.recording.checkpoints import replay as replaying
from indpriv.recording.checkpoints.saved_models import discover
from indpriv.recording.norms.layerwise import LayerwiseNorms
from runs import PER_EXAMPLE, blobs, mlp

TOLD = StepOptions(max_grad_norm=1.0, delta=1e-5, sampler="poisson")
ALL_TOLD = replace(TOLD, noise_multiplier=1.0, sample_rate=0.1, steps=40)
SPEC = AuditSpec(model=mlp, dataset=blobs(), loss_fn=PER_EXAMPLE, test_set=blobs())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """40 steps, a checkpoint before the first and every ten, and the log of a Recorder that watched."""
    folder = tmp_path_factory.mktemp("trained")
    recorder = Recorder(folder / "live", dataset=SPEC.dataset, loss_fn=PER_EXAMPLE, every=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain_opacus.train(
            mlp(),
            SPEC.dataset,
            folder / "checkpoints",
            epochs=4,
            batch_size=12,
            save_every=10,
            momentum=0.5,  # a state of the optimizer, which checkpoints of the model lack
            watch=recorder.attach,
        )
    return folder


@pytest.fixture
def checkpoints(trained, tmp_path):
    """A copy that a test may spoil."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for path in (trained / "checkpoints").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def assert_same(live, replayed):
    """Equal records at the same steps, and epsilons equal to the last bit."""
    assert live.recorded_steps.tolist() == replayed.recorded_steps.tolist()
    assert np.array_equal(live.read(), replayed.read())
    for name in ("noise_multiplier", "max_grad_norm", "sample_rate"):
        assert np.array_equal(getattr(live.settings, name), getattr(replayed.settings, name))
    ours, theirs = (account(log, delta=1e-5) for log in (replayed, live))
    assert np.array_equal(ours.epsilon, theirs.epsilon)
    assert ours.worst_case_epsilon == theirs.worst_case_epsilon
    assert ours.claim == "estimate"
    assert "saved checkpoints, not recorded in training" in ours.claim_reason


def tensors(split):
    return TensorDataset(torch.from_numpy(split.inputs), torch.from_numpy(split.targets))


def digits_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def adult_mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(107, 64), nn.Tanh(), nn.Linear(64, 2))


@pytest.mark.parametrize(
    ("save", "mode"),
    [
        ("opacus", "hooks"),
        pytest.param("opacus", "ghost", marks=pytest.mark.slow),
        ("plain", "ghost"),
        pytest.param("lightning", "hooks", marks=pytest.mark.slow),
        pytest.param("hugging_face", "hooks", marks=pytest.mark.slow),
    ],
)
def test_digits_in_every_layout(tmp_path, save, mode):
    images = tensors(load_dataset("digits").train)
    images = TensorDataset(images.tensors[0].reshape(-1, 1, 8, 8)[:200], images.tensors[1][:200])
    recorder = Recorder(tmp_path / "live", dataset=images, loss_fn=PER_EXAMPLE, every=5)
    plain_opacus.train(
        digits_cnn(), images, tmp_path / "saved", epochs=2, batch_size=20, save_every=5, mode=mode,
        save=getattr(plain_opacus, f"save_{save}"), watch=recorder.attach,
    )  # fmt: skip
    spec = AuditSpec(model=digits_cnn, dataset=images, loss_fn=PER_EXAMPLE)
    told = TOLD if save == "opacus" else replace(ALL_TOLD, steps=20)
    told = replace(told, step_of="0,5,...,20") if save == "plain" else told
    replay(tmp_path / "saved", spec, tmp_path / "replay", options=told)
    assert_same(NormLog.open(tmp_path / "live"), NormLog.open(tmp_path / "replay"))


def test_adult(tmp_path):
    data, n = load_dataset("adult").train, 2000
    spec = AuditSpec(
        model=adult_mlp,
        dataset=TensorDataset(*(tensor[:n] for tensor in tensors(data).tensors)),
        loss_fn=PER_EXAMPLE,
        metadata=data.metadata.iloc[:n],
    )
    recorder = Recorder(tmp_path / "live", dataset=spec.dataset, loss_fn=PER_EXAMPLE, every=6)
    plain_opacus.train(
        adult_mlp(),
        spec.dataset,
        tmp_path / "saved",
        epochs=1,
        batch_size=125,
        save_every=6,
        watch=recorder.attach,
    )
    replay(tmp_path / "saved", spec, tmp_path / "replay", options=TOLD)
    assert_same(NormLog.open(tmp_path / "live"), NormLog.open(tmp_path / "replay"))
    examples = pd.read_parquet(tmp_path / "replay" / "examples.parquet")
    assert {"race", "sex", "age_band", "loss", "correct"} <= set(examples.columns)


def save_by_epoch(_, model, __, folder, step):
    """The parameters before each epoch of 20 steps, as many scripts name them."""
    if step < 100:
        torch.save(model.state_dict(), folder / f"model_{step // 20}.pt")


@pytest.fixture(scope="module")
def by_epoch(tmp_path_factory):
    """Five epochs of 20 steps, saved as model_0.pt ... model_4.pt, and the log of a Recorder."""
    folder = tmp_path_factory.mktemp("by_epoch")
    recorder = Recorder(folder / "live", dataset=SPEC.dataset, loss_fn=PER_EXAMPLE, every=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain_opacus.train(
            mlp(), SPEC.dataset, folder / "saved", epochs=5, batch_size=6, save_every=20,
            save=save_by_epoch, watch=recorder.attach,
        )  # fmt: skip
    return folder


OF_100 = replace(TOLD, noise_multiplier=1.0, sample_rate=0.05, steps=100)


@pytest.mark.parametrize(
    "told",
    [
        "0,20,...,80",
        range(0, 100, 20),
        {f"model_{epoch}.pt": 20 * epoch for epoch in range(5)},
        "model_0.pt=0,model_1.pt=20,model_2.pt=40,model_3.pt=60,model_4.pt=80",
    ],
)
def test_epochs_whose_steps_the_user_tells(by_epoch, tmp_path, told):
    replay(by_epoch / "saved", SPEC, tmp_path / "r", options=replace(OF_100, step_of=told))
    log, live = NormLog.open(tmp_path / "r"), NormLog.open(by_epoch / "live")
    assert log.recorded_steps.tolist() == [0, 20, 40, 60, 80]
    assert_same(live, log)
    run = json.loads((tmp_path / "r" / "run.json").read_text())
    assert run["replayed"]["sources"]["steps of checkpoints"] == "--set step_of"


def test_epochs_are_never_steps(by_epoch, tmp_path):
    with pytest.raises(InputError) as error:
        replay(by_epoch / "saved", SPEC, tmp_path / "r", options=OF_100)
    text = str(error.value)
    assert "the step of 'model_0.pt', 'model_1.pt', 'model_2.pt', 'model_3.pt', 'model_4" in text
    assert "--set step_of=0,20,...,80" in text
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("inside", ["step", "global_step"])
def test_a_last_step_far_below_that_of_the_run(by_epoch, tmp_path, inside):
    """Epochs that are called steps."""
    (tmp_path / "saved").mkdir()
    for epoch in range(5):
        state = torch.load(by_epoch / "saved" / f"model_{epoch}.pt", weights_only=True)
        torch.save({inside: epoch, "model": state}, tmp_path / "saved" / f"model_{epoch}.pt")
    with pytest.raises(InputError) as error:
        replay(tmp_path / "saved", SPEC, tmp_path / "r", options=OF_100)
    text = str(error.value)
    assert "the run has 100 steps, but the last checkpoint, 'model_4.pt', is of step 4" in text
    assert "--set step_of=0,20,...,80" in text
    options = replace(OF_100, step_of="0,20,...,80")
    replay(tmp_path / "saved", SPEC, tmp_path / "r", options=options)
    assert_same(NormLog.open(by_epoch / "live"), NormLog.open(tmp_path / "r"))


def test_a_last_step_far_below_that_the_user_tells(by_epoch, tmp_path):
    told = []
    options = replace(OF_100, step_of=range(5))
    replay(by_epoch / "saved", SPEC, tmp_path / "r", options=options, tell=told.append)
    assert NormLog.open(tmp_path / "r").recorded_steps.tolist() == [0, 1, 2, 3, 4]
    assert any("the last checkpoint is of step 4 of 100" in text for text in told)


@pytest.mark.parametrize(
    ("step_of", "words"),
    [
        ("0,30,...,120", ["steps is 100 by the options, but a checkpoint has had 120", "correct --set step_of"]),
        ("-1,19,39,59,79", ["'-1' is not a number of updates"]),
        ("80,20,0,20,80", ["'model_1.pt', 'model_3.pt' are all of step 20 by --set step_of"]),
        ("model_0.pt=0", ["names only some of the checkpoints: the step of 'model_1.pt', 'model_2.pt'"]),
        ("net_0.pt=20", ["'net_0.pt' is no checkpoint", "'model_0.pt'"]),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_those_of_the_files(by_epoch, tmp_path, step_of, words):
    with pytest.raises(InputError) as error:
        replay(by_epoch / "saved", SPEC, tmp_path / "r", options=replace(OF_100, step_of=step_of))
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "r").exists()


def test_norms_in_full_precision(trained, tmp_path):
    replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD, rounding=0)
    norms = NormLog.open(tmp_path / "replay").read()
    live = NormLog.open(trained / "live")
    levels = live.levels.norms(live.read(), 1.0)
    inside = norms < 1
    assert inside.any()
    assert np.all(norms[inside] <= levels[inside] * (1 + 1e-6))
    assert np.all(norms[inside] >= levels[inside] - 0.01 - 1e-6)


def test_a_noise_schedule(tmp_path):
    recorder = Recorder(tmp_path / "live", dataset=SPEC.dataset, loss_fn=PER_EXAMPLE, every=7)
    plain_opacus.train(
        mlp(),
        SPEC.dataset,
        tmp_path / "saved",
        epochs=3,
        batch_size=12,
        save_every=7,
        gamma=0.9,
        watch=recorder.attach,
    )
    replay(tmp_path / "saved", SPEC, tmp_path / "replay", options=TOLD)
    live = NormLog.open(tmp_path / "live")
    assert len(set(live.settings.noise_multiplier)) == 3
    assert_same(live, NormLog.open(tmp_path / "replay"))


def test_training_that_went_on_after_the_last_checkpoint(checkpoints, tmp_path, trained):
    (checkpoints / "step_40.pt").unlink()
    with pytest.raises(
        InputError,
        match=r"noise_multiplier of the steps from 30 on (.|\n)*sample_rate of the steps from 30 on",
    ):
        replay(checkpoints, SPEC, tmp_path / "replay", options=replace(TOLD, steps=40))
    replay(checkpoints, SPEC, tmp_path / "replay", options=ALL_TOLD)
    log = NormLog.open(tmp_path / "replay")
    assert_same(NormLog.open(trained / "live"), log)
    assert any("step 30 of 40" in caveat for caveat in log.caveats)


def test_without_a_checkpoint_of_step_0_the_first_steps_count_at_the_clipping_norm(
    checkpoints, tmp_path, trained
):
    (checkpoints / "step_0.pt").unlink()
    told = []
    replay(checkpoints, SPEC, tmp_path / "replay", options=TOLD, tell=told.append)
    log, live = NormLog.open(tmp_path / "replay"), NormLog.open(trained / "live")
    assert log.recorded_steps.tolist() == [10, 20, 30]
    assert np.all(account(log, delta=1e-5).epsilon >= account(live, delta=1e-5).epsilon)
    assert any("steps before it count at max_grad_norm" in text for text in told)


def test_the_audit_of_a_replay_claims_what_it_may(trained, tmp_path):
    told = []
    replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD, tell=told.append)
    assert any("step_40.pt, is correct on" in text for text in told)
    summary = audit(tmp_path / "replay", tmp_path / "audit")
    assert summary.claim == "estimate"
    assert summary.guarantee.status == "declared"
    assert summary.run.test_accuracy == summary.run.train_accuracy
    statuses = {check.title: check.status for check in summary.checks}
    assert (
        statuses["sampler (declared)"]
        == statuses["training"]
        == statuses["run.json"]
        == "not checked"
    )
    assert statuses["Opacus's accountant"] == statuses["log closed"] == "passed"
    assert "no voided steps" not in statuses
    fewer = summary.sensitivity.set_index("choice").loc["records"]
    assert (fewer["here"], fewer["instead"]) == ("4", "2")
    report = (tmp_path / "audit" / "report.html").read_text()
    assert "is of the order of that shift" in report


def test_settings_that_only_options_tell_are_not_checked(checkpoints, tmp_path):
    for path in checkpoints.iterdir():
        torch.save(torch.load(path, weights_only=True)["module_state_dict"], path)
    options = replace(ALL_TOLD, step_of="0,10,...,40")
    replay(checkpoints, SPEC, tmp_path / "replay", options=options)
    summary = audit(tmp_path / "replay", tmp_path / "audit")
    assert {check.title: check.status for check in summary.checks}[
        "Opacus's accountant"
    ] == "not checked"


@pytest.mark.parametrize(("sampler", "status"), [("shuffled", "unproven"), ("other", "unproven")])
def test_another_sampler_proves_nothing(trained, tmp_path, sampler, status):
    replay(
        trained / "checkpoints", SPEC, tmp_path / "replay", options=replace(TOLD, sampler=sampler)
    )
    assert audit(tmp_path / "replay", tmp_path / "audit").guarantee.status == status


@pytest.mark.parametrize("by", ["the user", "a Recorder"])
def test_a_seeded_run_stays_void(checkpoints, tmp_path, by):
    said = {"seeded": True} if by == "the user" else {"recorder": {"seeded": True}}
    (checkpoints / "run.json").write_text(json.dumps(said))
    replay(checkpoints, SPEC, tmp_path / "replay", options=TOLD)
    assert audit(tmp_path / "replay", tmp_path / "audit").guarantee.status == "void"


def test_noise_told_too_large_is_betrayed_by_what_the_optimizer_kept(tmp_path):
    """More epsilon than told: the clipping norm, and so the noise, was a twentieth of what is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"epochs": 1, "batch_size": 12, "save_every": 5, "momentum": 0.5}
        plain_opacus.train(mlp(), SPEC.dataset, tmp_path / "saved", max_grad_norm=0.05, **settings)
    with pytest.raises(InputError, match=r"the optimizer in step_5.pt kept a gradient of .* less"):
        replay(tmp_path / "saved", SPEC, tmp_path / "new", options=TOLD)
    replay(tmp_path / "saved", SPEC, tmp_path / "new", options=replace(TOLD, max_grad_norm=0.05))


@pytest.mark.parametrize(
    ("group", "state", "square"),
    [
        ({"momentum": 0.9, "dampening": 0.5}, {"momentum_buffer": torch.full((4,), 0.5)}, 1.0),
        (
            {"betas": (0.9, 0.5)},
            {"exp_avg_sq": torch.full((4,), 3.0), "step": torch.tensor(2.0)},
            4.0,
        ),
        ({"momentum": 0.0}, {"momentum_buffer": None}, None),
        ({"momentum": 0.9, "dampening": 1}, {"momentum_buffer": torch.ones(4)}, None),
        ({"momentum": 0.95}, {"momentum_buffer": torch.full((4,), 0.05)}, None),  # Muon's mean
        ({"betas": (0.9, 1.0)}, {"exp_avg_sq": torch.ones(4), "step": 3}, None),
        ({}, {}, None),
    ],
)
def test_the_gradient_that_an_optimizer_kept(tmp_path, group, state, square):
    optimizer = {"param_groups": [{**group, "params": [0]}], "state": {0: state}}
    content = {"model": {"weight": torch.ones(2)}, "optimizer": optimizer, "step": 3}
    torch.save(content, tmp_path / "a.pt")
    [model] = discover(tmp_path).models
    assert model.gradient == (None if square is None else (square, 4))


def beside_a_log(trained, tmp_path, end=None):
    """A run directory with the log of a Recorder, cut at its end, and the checkpoints in it."""
    run = shutil.copytree(trained / "live", tmp_path / "run")
    shutil.copytree(trained / "checkpoints", run / "saved")
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (run / "journal.jsonl").write_bytes(b"".join(lines[:end]))
    return run


def words_of(path):
    run = open_run(path)
    return {line.key: line.status for line in lines_of(verify(run), run.header["run"])}


def test_a_replay_gets_no_better_word_than_the_log_beside_it(trained, tmp_path):
    run, told = beside_a_log(trained, tmp_path, end=-2), []  # a crash, so that it was not closed
    replay(run / "saved", SPEC, tmp_path / "new", options=TOLD, tell=told.append)
    assert any(
        f"a Recorder's log lies in {run}, which has the parameters of" in text for text in told
    )
    order = ["verified", "declared", "on trust", "refuted"]
    live, replayed = words_of(run), words_of(tmp_path / "new")
    assert live["update"] == "refuted"
    assert all(order.index(replayed[key]) >= order.index(live[key]) for key in live)
    assert "by the log beside the checkpoints: the log was not closed" in " ".join(
        NormLog.open(tmp_path / "new").caveats
    )


def test_a_log_tells_what_options_do_not(trained, tmp_path):
    run = beside_a_log(trained, tmp_path)
    replay(run / "saved", SPEC, tmp_path / "new", options=StepOptions(delta=1e-5))
    assert_same(NormLog.open(run), NormLog.open(tmp_path / "new"))
    assert words_of(tmp_path / "new")["update"] == "declared"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_multiplier": 2.0}, "2 by the options and 1 by the log beside the checkpoints"),
        ({"max_grad_norm": 0.5}, "0.5 by the options and 1 by the log"),
        ({"sample_rate": 0.05}, "0.05 by the options and 0.1 by the log"),
        ({"steps": 80}, "80 by the options, 40 by the log"),
        ({"sampler": "shuffled"}, "shuffled by the options, poisson by the log"),
    ],
)
def test_what_is_told_is_compared_with_the_log_beside(trained, tmp_path, options, words):
    run = beside_a_log(trained, tmp_path)
    with pytest.raises(InputError, match=words):
        replay(run / "saved", SPEC, tmp_path / "new", options=replace(TOLD, **options))


def test_people_of_the_log_beside_are_those_of_the_spec(trained, tmp_path):
    run, n = beside_a_log(trained, tmp_path), len(SPEC.dataset)
    for said in ({"example_ids": np.arange(n) + 1}, {"unit": "user", "unit_ids": np.arange(n)}):
        with pytest.raises(
            InputError, match=r"are not those of the log in .*: pass unit, unit_ids"
        ):
            replay(run / "saved", replace(SPEC, **said), tmp_path / "new", options=TOLD)


def test_checkpoints_of_another_run_than_the_log_beside(trained, tmp_path):
    run = beside_a_log(trained, tmp_path)
    changed_weights(run / "saved" / "step_20.pt", 0.1)
    with pytest.raises(InputError, match=r"has other parameters than the log in .* of step 20"):
        replay(run / "saved", SPEC, tmp_path / "new", options=TOLD)
    assert not (tmp_path / "new" / "journal.jsonl").exists()


def test_averaged_parameters_are_not_those_of_training(checkpoints, tmp_path):
    """torch's AveragedModel has the names of a wrapper, and a counter that gives it away."""
    for path in checkpoints.iterdir():
        averaged = AveragedModel(mlp())
        torch.save({"state_dict": averaged.state_dict(), "global_step": 0}, path)
    with pytest.raises(InputError, match=r"its parameters are averaged \(n_averaged"):
        replay(checkpoints, SPEC, tmp_path / "replay", options=ALL_TOLD)


def interrupted_after(n):
    def progress(_stage, done, _total):
        if done == n:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_replay_goes_on_at_the_next_checkpoint(trained, tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        replay(
            trained / "checkpoints",
            SPEC,
            tmp_path / "replay",
            options=TOLD,
            progress=interrupted_after(2),
        )
    part = NormLog.open(tmp_path / "replay")
    assert part.recorded_steps.tolist() == [0, 10]
    assert part.total_steps == 20
    assert not list((tmp_path / "replay").rglob("*.tmp"))
    taken, passes = [], replaying.norms_of
    monkeypatch.setattr(
        replaying, "norms_of", lambda *arguments: taken.append(1) or passes(*arguments)
    )
    replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD)
    assert len(taken) == 2
    assert_same(NormLog.open(trained / "live"), NormLog.open(tmp_path / "replay"))
    journal = (tmp_path / "replay" / "journal.jsonl").read_text()
    replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD)
    assert len(taken) == 2
    assert (tmp_path / "replay" / "journal.jsonl").read_text() == journal


@pytest.mark.parametrize("at", [0, 10])
def test_killed_between_a_record_and_its_steps(trained, tmp_path, monkeypatch, at):
    writer = NormLogWriter
    steps = writer.steps

    def killed(self, first, *arguments, **values):
        if first == at:
            raise KeyboardInterrupt
        steps(self, first, *arguments, **values)

    monkeypatch.setattr(writer, "steps", killed)
    with pytest.raises(KeyboardInterrupt):
        replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD)
    assert read_state(tmp_path / "replay").lines["record"][-1]["step"] == at
    monkeypatch.setattr(writer, "steps", steps)
    replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD)
    assert_same(NormLog.open(trained / "live"), NormLog.open(tmp_path / "replay"))


def test_a_run_that_has_grown_goes_on(checkpoints, tmp_path, trained):
    later = {name: (checkpoints / name).read_bytes() for name in ("step_30.pt", "step_40.pt")}
    for name in later:
        (checkpoints / name).unlink()
    replay(checkpoints, SPEC, tmp_path / "replay", options=TOLD)
    assert NormLog.open(tmp_path / "replay").total_steps == 20
    for name, content in later.items():
        (checkpoints / name).write_bytes(content)
    replay(checkpoints, SPEC, tmp_path / "replay", options=TOLD)
    assert_same(NormLog.open(trained / "live"), NormLog.open(tmp_path / "replay"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder: (folder / "step_10.pt").unlink(),
            "not as in the replay before: the steps of the checkpoints",
        ),
        (
            lambda folder: (folder / "copy.pt").write_bytes((folder / "step_10.pt").read_bytes()),
            "same model",
        ),
        (
            lambda folder: changed_weights(folder / "step_10.pt"),
            r"not as in the replay before: .*step_10\.pt\. Its log is in",
        ),
    ],
)
def test_other_checkpoints_than_before_are_refused(checkpoints, tmp_path, spoil, words):
    replay(checkpoints, SPEC, tmp_path / "replay", options=TOLD)
    spoil(checkpoints)
    if words == "same model":  # harmless
        replay(checkpoints, SPEC, tmp_path / "replay", options=TOLD)
        return
    with pytest.raises(InputError, match=words):
        replay(checkpoints, SPEC, tmp_path / "replay", options=TOLD)


def changed_weights(path, value=None):
    content = torch.load(path, weights_only=True)
    content["module_state_dict"]["_module.0.bias"][1] = 7.0 if value is None else value
    torch.save(content, path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (replace(TOLD, max_grad_norm=0.9), "not as in the replay before: max_grad_norm"),
        (replace(TOLD, sampler="other"), "not as in the replay before: sampler"),
    ],
)
def test_other_settings_than_before_are_refused(trained, tmp_path, options, words):
    replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD)
    with pytest.raises(InputError, match=words):
        replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=options)


def test_a_recorded_run_is_not_written_over(trained):
    with pytest.raises(InputError, match="there is the log of a recorded run in"):
        replay(trained / "checkpoints", SPEC, trained / "live", options=TOLD)


def test_other_data_than_before_is_refused(trained, tmp_path):
    replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD)
    short = AuditSpec(model=mlp, dataset=Subset(SPEC.dataset, range(119)), loss_fn=PER_EXAMPLE)
    with pytest.raises(InputError, match="n_examples=120, this run has 119"):
        replay(trained / "checkpoints", short, tmp_path / "replay", options=TOLD)


def test_a_model_that_diverged_on_the_way_keeps_what_was_done(checkpoints, tmp_path):
    changed_weights(checkpoints / "step_20.pt", float("nan"))
    with pytest.raises(InputError, match=r"step_20\.pt: its 0\.bias has NaN"):
        replay(checkpoints, SPEC, tmp_path / "replay", options=TOLD)
    assert NormLog.open(tmp_path / "replay").recorded_steps.tolist() == [0, 10]
    (checkpoints / "step_20.pt").unlink()
    replay(checkpoints, SPEC, tmp_path / "other", options=TOLD)
    assert NormLog.open(tmp_path / "other").recorded_steps.tolist() == [0, 10, 30]


def test_everything_that_is_wrong_is_in_one_message(checkpoints, tmp_path):
    (checkpoints / "step_10.pt").write_bytes(b"")
    torch.save({"step": 25, "model": nn.Linear(6, 2).state_dict()}, checkpoints / "other.pt")
    with pytest.raises(InputError) as error:
        replay(checkpoints, SPEC, tmp_path / "replay", options=StepOptions())
    for words in (
        "step_10.pt cannot be read safely: it is empty",
        "other.pt: its parameters are not those",
        "--set max_grad_norm",
    ):
        assert words in str(error.value)
    assert not (tmp_path / "replay").exists()


def spec_with(**changes):
    return AuditSpec(**{"model": mlp, "dataset": blobs(), "loss_fn": PER_EXAMPLE, **changes})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_with(dataset=TensorDataset(torch.ones(120, 5), torch.zeros(120).long())), "the model fails on float32 (7, 5)"),
        (spec_with(test_set=TensorDataset(torch.ones(9, 5), torch.zeros(9).long())), "do not accept the test set"),
        (spec_with(loss_fn=nn.CrossEntropyLoss()), "one loss per example"),
        (spec_with(loss_fn=lambda out, y: PER_EXAMPLE(out, y) * float("nan")), "NaN"),
        (spec_with(model=lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))), "0.weight is float32 (8, 6) in the file"),
    ],
)  # fmt: skip
def test_specs_that_do_not_belong_to_the_checkpoints(trained, tmp_path, spec, words):
    with pytest.raises(InputError) as error:
        replay(trained / "checkpoints", spec, tmp_path / "replay", options=TOLD)
    assert words in str(error.value)


def test_parameters_that_were_frozen_in_training_and_are_not_in_the_spec(trained, tmp_path):
    def half_frozen():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    with pytest.raises(
        InputError,
        match=r"trained 4 parameter tensors, the spec's model has 2 .* freeze in model\(\)",
    ):
        replay(
            trained / "checkpoints", spec_with(model=half_frozen), tmp_path / "replay", options=TOLD
        )


def test_batchnorm_is_refused_and_dropout_explained(tmp_path):
    def normed():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def dropped():
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    for name, build in (("normed", normed), ("dropped", dropped)):
        (tmp_path / name).mkdir()
        for step in (0, 20, 40):
            content = {"step": step, "model": build().state_dict()}
            torch.save(content, tmp_path / name / f"step_{step}.pt")
    with pytest.raises(InputError, match="BatchNorm"):
        replay(tmp_path / "normed", spec_with(model=normed), tmp_path / "a", options=ALL_TOLD)
    told = []
    replay(
        tmp_path / "dropped",
        spec_with(model=dropped),
        tmp_path / "b",
        options=ALL_TOLD,
        tell=told.append,
    )
    assert any("dropout" in text for text in told)
    assert "dropout" in account(NormLog.open(tmp_path / "b"), delta=1e-5).claim_reason


class Augmented(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        inputs, target = blobs()[index]
        return inputs + 0.01 * torch.randn(6), target


def test_random_augmentation_is_a_caveat(trained, tmp_path):
    told = []
    replay(
        trained / "checkpoints",
        spec_with(dataset=Augmented()),
        tmp_path / "replay",
        options=TOLD,
        tell=told.append,
    )
    assert any("augmentation" in text for text in told)
    assert any("augmentation" in caveat for caveat in NormLog.open(tmp_path / "replay").caveats)


def test_memory_that_does_not_suffice_halves_the_batches(trained, tmp_path, monkeypatch):
    """Whether the user chose a size or not: norms do not depend on it."""
    sizes, run = [], LayerwiseNorms.__call__

    def small_memory(norms, batch):
        sizes.append(len(batch))
        if len(batch) > 50:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(norms, batch)

    for name, batch_size in (("auto", "auto"), ("chosen", 64)):
        with monkeypatch.context() as patched:
            patched.setattr(LayerwiseNorms, "__call__", small_memory)
            options = {"options": TOLD, "batch_size": batch_size}
            replay(trained / "checkpoints", SPEC, tmp_path / name, **options)
        assert max(sizes) > 50
        assert max(sizes[-4:]) <= 50
        assert_same(NormLog.open(trained / "live"), NormLog.open(tmp_path / name))


def test_a_model_that_fails_at_a_checkpoint_is_named(trained, tmp_path, monkeypatch):
    def failing(*arguments):
        raise RuntimeError("no kernel image\nmore lines")

    monkeypatch.setattr(replaying, "norms_of", failing)
    with pytest.raises(
        InputError, match=r"step_0\.pt: its norms cannot be computed: no kernel image$"
    ):
        replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": "big"}, "batch_size='big'"),
    ],
)
def test_bad_arguments(trained, tmp_path, arguments, words):
    with pytest.raises(InputError, match=words):
        replay(trained / "checkpoints", SPEC, tmp_path / "replay", options=TOLD, **arguments)
