"""Against stand-ins that call the hooks in the trainers' own order; test_installed.py takes the packages themselves."""

import json
import sys
import types

import pytest

from indpriv import NormLog
from indpriv.integrations.callbacks import hugging_face_callback, lightning_callback
from indpriv.recording import Recorder
from runs import PER_EXAMPLE


def stand_in(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


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


def test_without_the_packages_their_own_import_error_shows(recorder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match="transformers"):
        hugging_face_callback(recorder, delta=1e-5)
    with pytest.raises(ImportError, match="lightning"):
        lightning_callback(recorder, delta=1e-5)
