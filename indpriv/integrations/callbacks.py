"""Callbacks of other people's trainers: they save the recorder's state with every checkpoint, and report while training.

The block of `Recorder.attach` stands around the training call, so that a run that fails is logged as far as it went:

    with recorder.attach(model, optimizer, loader):
        trainer.train()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from indpriv._files import write_json
from indpriv.integrations.metrics import Recording, metrics_of, print_epsilons, send

STATE = "indpriv.json"  # beside the files of a Hugging Face checkpoint; key "indpriv" in a Lightning one


def hugging_face_callback(
    recorder: Recording,
    *,
    delta: float,
    tracker: Any = None,
    also: tuple[str, ...] = (),
    show: bool = True,
) -> Any:
    """A `transformers.TrainerCallback`, without which the Trainer does not clear the gradients that Opacus sums.

    Let `get_train_dataloader` of the Trainer return the loader that make_private returned, and pass it
    `optimizers=(optimizer, None)`; gradient_accumulation_steps stays 1.

    Args:
        recorder: attached around trainer.train().
        delta: of every epsilon.
        tracker: gets the figures of `metrics_of` whenever the Trainer logs; see `send`.
        also: as of `metrics_of`: sensitive.
        show: print a line about individual epsilons whenever the Trainer logs.
    """
    from transformers import TrainerCallback

    class IndprivCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
        ) -> None:
            if (
                optimizer is not None
            ):  # the Trainer calls model.zero_grad(), which leaves what Opacus summed
                optimizer.zero_grad()

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _report(recorder, delta, tracker, also, show, int(state.global_step))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved = recorder.state_dict()
            if state.is_world_process_zero:
                write_json(Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE, saved)

    return IndprivCallback()


def lightning_callback(
    recorder: Recording, *, delta: float, also: tuple[str, ...] = (), show: bool = True
) -> Any:
    """A `lightning.pytorch.Callback`: after every epoch figures go to the trainer's loggers; arguments as above."""
    from lightning.pytorch import Callback

    class IndprivCallback(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            for tracker in trainer.loggers or [None]:
                _report(
                    recorder,
                    delta,
                    tracker,
                    also,
                    show and trainer.is_global_zero,
                    int(trainer.global_step),
                )

        def on_save_checkpoint(
            self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
        ) -> None:
            checkpoint["indpriv"] = recorder.state_dict()

    return IndprivCallback()


def _report(
    recorder: Recording, delta: float, tracker: Any, also: tuple[str, ...], show: bool, step: int
) -> None:
    if tracker is not None:
        send(tracker, metrics_of(recorder, delta=delta, also=also), step)
    if show:
        print_epsilons(recorder, delta=delta)
