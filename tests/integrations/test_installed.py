"""The callbacks and trackers in the packages themselves, where they are installed: pip install 'indpriv[integrations]'."""

import json

import pytest
import torch
from torch import nn

from indpriv import NormLog
from indpriv.integrations.callbacks import (
    STATE,
    hugging_face_callback,
    lightning_callback,
    metrics_of,
    send,
)
from indpriv.norm_log.evidence import lines_of, unverified
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify

# These packages warn of one another.
pytestmark = pytest.mark.filterwarnings("ignore")
ASK = "pip install 'indpriv[integrations]' to test against it"


def check_log(run_dir, steps):
    log = NormLog.open(run_dir)
    assert log.total_steps == steps
    assert log.caveats == ()
    checks = verify(open_run(run_dir))
    assert [check.title for check in checks if check.status == "failed"] == []
    lines = {line.key: line for line in lines_of(checks, {})}
    assert unverified(lines.values()) == []  # so the guarantee is supported
    assert lines["source"].detail == "its state is from the operating system"


def test_the_trainer_of_hugging_face(run, recorder, tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason=ASK)
    pytest.importorskip("accelerate", reason=ASK)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return run.loader

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return nn.functional.cross_entropy(model(inputs[0]), inputs[1])

    class Tracker:
        def log(self, metrics):
            sent.append(metrics)

    sent = []
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        num_train_epochs=2,
        logging_steps=4,
        save_steps=8,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    with recorder.attach(run.model, run.optimizer, run.loader):
        trainer = Trainer(
            run.model,
            arguments,
            train_dataset=run.dataset,
            optimizers=(run.optimizer, None),
            callbacks=[hugging_face_callback(recorder, delta=1e-5, tracker=Tracker())],
        )
        trainer.train()
    check_log(tmp_path / "run", 20)
    assert [metrics["indpriv/steps"] for metrics in sent][:5] == [4, 8, 12, 16, 20]
    assert sent[0]["indpriv/worst_case_epsilon"] < sent[4]["indpriv/worst_case_epsilon"]
    assert "individual epsilon" in capsys.readouterr().err
    saved = json.loads((tmp_path / "out" / "checkpoint-16" / STATE).read_text())
    assert saved["step"] == 16


def test_the_trainer_of_lightning(run, recorder, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason=ASK)
    lightning.seed_everything(1)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = run.model

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return run.optimizer

    logger = lightning.loggers.CSVLogger(tmp_path / "csv")
    with recorder.attach(run.model, run.optimizer, run.loader):
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=logger,
            callbacks=[lightning_callback(recorder, delta=1e-5, show=False)],
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), run.loader)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    check_log(tmp_path / "run", 20)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["indpriv"]["step"] == 20
    logged = (tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "indpriv/worst_case_epsilon" in logged


def test_a_summary_writer_of_tensorboard(run, recorder, tmp_path):
    pytest.importorskip("tensorboard", reason=ASK)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with (
        recorder.attach(run.model, run.optimizer, run.loader),
        SummaryWriter(tmp_path / "events") as writer,
    ):
        run.train(1)
        send(writer, metrics_of(recorder, delta=1e-5), 10)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        f"indpriv/{name}"
        for name in ("worst_case_epsilon", "coverage", "steps", "norm_pass_seconds")
    }
    assert [(event.step, event.value) for event in events.Scalars("indpriv/steps")] == [(10, 10.0)]
