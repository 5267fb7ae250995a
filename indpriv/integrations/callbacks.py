"""Callbacks for other trainers: save the recorder's state with each checkpoint, report metrics.

The training call is inside the block of `Recorder.attach`, so that the log of a run that fails
contains its steps up to the failure:

    with recorder.attach(model, optimizer, loader):
        trainer.train()
"""

from pathlib import Path
from typing import Any

from indpriv._files import write_json
from indpriv.errors import check_installed
from indpriv.integrations.metrics import metrics_of, print_epsilons, send

STATE = "indpriv.json"  # in a Hugging Face checkpoint; in a Lightning one it is the key "indpriv"


def hugging_face_callback(
    recorder: Any,
    *,
    delta: float,
    tracker: Any = None,
    also: tuple[str, ...] = (),
    show: bool = True,
) -> Any:
    """A `transformers.TrainerCallback` for a recorded run.

    It is required: the Trainer does not clear the gradients that Opacus sums, and seeds the noise
    with 42. Let its `get_train_dataloader` return the loader of make_private, pass
    `optimizers=(optimizer, None)`, and keep gradient_accumulation_steps at 1.

    Args:
        recorder: a `Recorder`, attached around trainer.train().
        delta: delta of every epsilon.
        tracker: receives the figures of `metrics_of` whenever the Trainer logs; see `send`.
        also: see `metrics_of`; sensitive.
        show: whether to print a line about individual epsilons whenever the Trainer logs.
    """
    check_installed("Callbacks for Hugging Face", "hf", "transformers")
    from transformers import TrainerCallback

    class IndprivCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            recorder.draw_privately()  # on the device to which the Trainer moved the model

        def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            # The Trainer itself calls model.zero_grad(), which does not clear what Opacus summed.
            if optimizer is not None:
                optimizer.zero_grad()

        def on_log(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            _report(recorder, delta, tracker, also, show, int(state.global_step))

        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            saved = recorder.state_dict()
            if state.is_world_process_zero:
                write_json(Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE, saved)

    recorder.draw_privately()
    return IndprivCallback()


def lightning_callback(
    recorder: Any, *, delta: float, also: tuple[str, ...] = (), show: bool = True
) -> Any:
    """A `lightning.pytorch.Callback` that sends figures to the trainer's loggers after each epoch.

    Arguments, and the generators of noise and batches, are as for `hugging_face_callback`.
    """
    check_installed("Callbacks for Lightning", "integrations", "lightning")
    from lightning.pytorch import Callback

    class IndprivCallback(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_start(self, *_: Any) -> None:
            recorder.draw_privately()

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            shown = show and trainer.is_global_zero
            for tracker in trainer.loggers or [None]:
                _report(recorder, delta, tracker, also, shown, int(trainer.global_step))

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["indpriv"] = recorder.state_dict()

    recorder.draw_privately()
    return IndprivCallback()


def _report(
    recorder: Any, delta: float, tracker: Any, also: tuple[str, ...], show: bool, step: int
) -> None:
    if tracker is not None:
        send(tracker, metrics_of(recorder, delta=delta, also=also), step)
    if show:
        print_epsilons(recorder, delta=delta)
