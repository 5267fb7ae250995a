"""Against stand-ins that call the hooks in the trainers' own order; test_installed.py takes the packages themselves."""

import json
import sys
import types

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from indpriv import InputError, NormLog
from indpriv.integrations.callbacks import hugging_face_callback, lightning_callback
from indpriv.norm_log.evidence import lines_of, unverified
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder, private_generator
from runs import PER_EXAMPLE, blobs, make_run


def stand_in(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": "1e-5"}, "delta='1e-5' is not in"),
        ({"delta": 0}, "delta=0 is not in"),
        ({"also": ["epsilon_meen"]}, "also='epsilon_meen' is not a statistic"),
        ({"also": "epsilon_meen"}, "also='epsilon_meen' is not a statistic"),
        ({"tracker": object()}, "object has neither log"),
    ],
)
def test_what_cannot_be_reported_is_refused_before_training(
    recorder, monkeypatch, options, message
):
    stand_in(monkeypatch, "transformers", TrainerCallback=type("TrainerCallback", (), {}))
    with pytest.raises(InputError, match=message):
        hugging_face_callback(recorder, **{"delta": 1e-5, **options})


def test_hugging_face(run, recorder, monkeypatch, tmp_path, capsys):
    stand_in(monkeypatch, "transformers", TrainerCallback=type("TrainerCallback", (), {}))
    sent = []
    tracker = types.SimpleNamespace(log=sent.append)
    callback = hugging_face_callback(recorder, delta=1e-5, tracker=tracker)
    args = types.SimpleNamespace(output_dir=str(tmp_path))
    state, control = types.SimpleNamespace(global_step=0, is_world_process_zero=True), object()
    with recorder.attach(run.model, run.optimizer, run.loader):  # around trainer.train()
        for batch in run.loader:
            run.step(*batch)
            state.global_step += 1
            if (
                state.global_step % 4 == 0
            ):  # as Trainer._maybe_log_save_evaluate: on_log, then on_save
                callback.on_log(args, state, control, model=run.model, logs={"loss": 0.5})
                (tmp_path / f"checkpoint-{state.global_step}").mkdir()
                callback.on_save(args, state, control, model=run.model)
    assert [metrics["indpriv/steps"] for metrics in sent] == [4, 8]
    assert "individual epsilon" in capsys.readouterr().err
    saved = json.loads((tmp_path / "checkpoint-8" / "indpriv.json").read_text())
    assert saved["step"] == 8
    resumed = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, resume_at=saved)
    with resumed.attach(run.model, run.optimizer, run.loader):
        run.train(1)
    assert NormLog.open(tmp_path / "run").total_steps == 18


def test_lightning(run, recorder, monkeypatch, tmp_path, capsys):
    stand_in(monkeypatch, "lightning")
    stand_in(monkeypatch, "lightning.pytorch", Callback=type("Callback", (), {}))
    sent = []
    logger = types.SimpleNamespace(log_metrics=lambda metrics, step: sent.append((metrics, step)))
    trainer = types.SimpleNamespace(loggers=[logger], is_global_zero=True, global_step=0)
    callback = lightning_callback(recorder, delta=1e-5, also=("epsilon_p95",), show=False)
    checkpoint = {"state_dict": {}}
    with recorder.attach(run.model, run.optimizer, run.loader):  # around trainer.fit(...)
        for _ in range(2):
            run.train(1)
            trainer.global_step += 10
            callback.on_train_epoch_end(trainer, run.model)
            callback.on_save_checkpoint(trainer, run.model, checkpoint)
    assert [step for _, step in sent] == [10, 20]
    assert "indpriv/epsilon_p95" in sent[1][0]
    assert checkpoint["indpriv"]["step"] == 20
    assert capsys.readouterr().err == ""


def test_a_line_is_printed_once_for_several_loggers(run, recorder, monkeypatch, capsys):
    stand_in(monkeypatch, "lightning")
    stand_in(monkeypatch, "lightning.pytorch", Callback=type("Callback", (), {}))
    loggers = [types.SimpleNamespace(log_metrics=lambda metrics, step: None) for _ in range(2)]
    trainer = types.SimpleNamespace(loggers=loggers, is_global_zero=True, global_step=10)
    callback = lightning_callback(recorder, delta=1e-5)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(1)
        callback.on_train_epoch_end(trainer, run.model)
    assert capsys.readouterr().err.count("individual epsilon so far") == 1


OPERATING_SYSTEM = "its state is from the operating system"


def source_of_the_noise(run_dir):
    """The word of the line, what is known, and the lines that a recorder can verify and did not."""
    lines = lines_of(verify(open_run(run_dir)), {})
    [source] = (line for line in lines if line.key == "source")
    return source.status, source.detail, [line.key for line in unverified(lines)]


def train_as_hugging_face(monkeypatch, tmp_path, run, seeds, **options):
    """Train under a callback; the Trainer's constructor seeds torch before or in the block, or both."""
    stand_in(monkeypatch, "transformers", TrainerCallback=type("TrainerCallback", (), {}))
    recorder = Recorder(
        tmp_path / "seeded", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1, **options
    )
    if "before" in seeds:
        torch.manual_seed(42)
    callback = hugging_face_callback(recorder, delta=1e-5, show=False)
    with recorder.attach(run.model, run.optimizer, run.loader):
        if "inside" in seeds:
            torch.manual_seed(42)
        callback.on_train_begin(None, None, None)
        run.train(1)
    return source_of_the_noise(tmp_path / "seeded")


@pytest.mark.parametrize("seeds", ["before", "inside", "before and inside"])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_trainer_that_seeds_torch_does_not_seed_the_noise(monkeypatch, tmp_path, seeds, mode):
    """strict: nothing may be said at attach either."""
    run = make_run(mode=mode)
    found = train_as_hugging_face(monkeypatch, tmp_path, run, seeds, strict=True)
    assert found == ("on trust", OPERATING_SYSTEM, [])


def test_two_processes_with_a_trainers_seed_end_with_other_weights(monkeypatch, tmp_path):
    ends = []
    for name in ("one", "other"):
        run = make_run()  # the same start each time
        train_as_hugging_face(monkeypatch, tmp_path / name, run, "before and inside")
        ends.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert (ends[0] - ends[1]).abs().max() > 0.1


def test_only_the_generator_that_is_missing_is_made(monkeypatch, tmp_path):
    given = private_generator()
    run = make_run(noise_generator=given)
    found = train_as_hugging_face(monkeypatch, tmp_path, run, "before")
    assert run.optimizer.generator is given
    assert found == ("on trust", OPERATING_SYSTEM, [])


@pytest.mark.filterwarnings("ignore:seeds")
@pytest.mark.parametrize("which", ["noise", "batches"])
def test_a_generator_with_a_seed_of_the_users_choice_stays_and_refutes(
    monkeypatch, tmp_path, which
):
    chosen = torch.Generator().manual_seed(7)
    data = blobs()
    run = (
        make_run(data, noise_generator=chosen)
        if which == "noise"
        else make_run(data, data_loader=DataLoader(data, batch_size=12, generator=chosen))
    )
    word, _, missing = train_as_hugging_face(monkeypatch, tmp_path, run, "before")
    owner = run.optimizer if which == "noise" else run.loader.batch_sampler
    assert owner.generator is chosen
    assert (word, missing) == ("refuted", [])


def test_batches_of_a_fixed_size_are_drawn_privately_too(monkeypatch, tmp_path):
    data = blobs()
    sampler = RandomSampler(data, replacement=True, num_samples=12)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 12, drop_last=True))
    run = make_run(data, data_loader=loader, poisson_sampling=False)
    word, detail, _ = train_as_hugging_face(monkeypatch, tmp_path, run, "before")
    assert (word, detail) == ("on trust", OPERATING_SYSTEM)


def test_a_seeded_run_keeps_its_seed(monkeypatch, tmp_path):
    run = make_run()
    train_as_hugging_face(monkeypatch, tmp_path, run, "before", seeded=True)
    assert run.optimizer.generator is None
    assert run.loader.batch_sampler.generator is None


def test_lightning_that_seeds_torch_does_not_seed_the_noise(monkeypatch, tmp_path):
    stand_in(monkeypatch, "lightning")
    stand_in(monkeypatch, "lightning.pytorch", Callback=type("Callback", (), {}))
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, strict=True)
    torch.manual_seed(1)  # seed_everything(1)
    callback = lightning_callback(recorder, delta=1e-5)
    with recorder.attach(run.model, run.optimizer, run.loader):
        callback.on_train_start(None, None)
        run.train(1)
    assert source_of_the_noise(tmp_path / "run") == ("on trust", OPERATING_SYSTEM, [])


def test_without_the_packages_their_own_import_error_shows(recorder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match="transformers"):
        hugging_face_callback(recorder, delta=1e-5)
    with pytest.raises(ImportError, match="lightning"):
        lightning_callback(recorder, delta=1e-5)
