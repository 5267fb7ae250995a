"""An ordinary training script: torch and Opacus only, no indpriv. Tests audit the checkpoints it leaves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, Dataset


def train(
    model: nn.Module,
    train_set: Dataset[Any],
    folder: Path,
    *,
    epochs: int,
    batch_size: int,
    save_every: int,
    mode: str = "hooks",
    noise_multiplier: float = 1.0,
    max_grad_norm: float = 1.0,
    learning_rate: float = 0.5,
    momentum: float = 0.0,
    gamma: float | None = None,
    save: Callable[[PrivacyEngine, nn.Module, Any, Path, int], None] | None = None,
    watch: Callable[[Any, Any, Any], Any] = lambda *_: nullcontext(),
    precision: torch.dtype | None = None,
) -> PrivacyEngine:
    """Train with DP-SGD and save the model before the first step, every so many steps and at the end.

    Args:
        model: plain; likewise train_set.
        train_set: map-style.
        folder: of the checkpoints.
        epochs, batch_size, save_every, mode, noise_multiplier, max_grad_norm, learning_rate, momentum: of the run.
        gamma: factor of noise_multiplier after each epoch; None keeps it.
        save: how to save; default PrivacyEngine.save_checkpoint.
        watch: called as watch(model, optimizer, loader): a context in which to train.
        precision: of the forward pass under autocast; None for none.
    """
    save = save or save_opacus
    folder.mkdir(parents=True, exist_ok=True)
    criterion: Any = nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine(accountant="rdp")
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum),
            data_loader=DataLoader(train_set, batch_size=batch_size),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            grad_sample_mode=mode,
            **({"criterion": criterion} if mode == "ghost" else {}),
        )
    if mode == "ghost":
        private, optimizer, criterion, loader = made
    else:
        private, optimizer, loader = made
    step = 0
    save(engine, private, optimizer, folder, step)
    with watch(private, optimizer, loader):
        for _ in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", precision, enabled=precision is not None):
                    outputs = private(inputs)
                criterion(outputs, targets).backward()
                optimizer.step()
                step += 1
                if step % save_every == 0:
                    save(engine, private, optimizer, folder, step)
            if gamma is not None:
                optimizer.noise_multiplier *= gamma
    if step % save_every:
        save(engine, private, optimizer, folder, step)
    return engine


def save_opacus(
    engine: PrivacyEngine, model: nn.Module, optimizer: Any, folder: Path, step: int
) -> None:
    """As Opacus's tutorials do."""
    engine.save_checkpoint(path=folder / f"step_{step}.pt", module=model, optimizer=optimizer)


def save_plain(_: PrivacyEngine, model: nn.Module, __: Any, folder: Path, step: int) -> None:
    """The parameters alone, with Opacus's prefix before their names."""
    torch.save(model.state_dict(), folder / f"step_{step}.pt")


def save_lightning(
    _: PrivacyEngine, model: nn.Module, optimizer: Any, folder: Path, step: int
) -> None:
    """What Lightning's ModelCheckpoint writes of a module that holds the network as `self.net`."""
    content = {
        "epoch": step // 10,
        "global_step": step,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {
            name.replace("_module.", "net."): tensor for name, tensor in model.state_dict().items()
        },
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_progress": {"total": {"ready": 1, "completed": 0}},
            }
        },
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {
                "best_model_score": torch.tensor(0.5),
                "dirpath": "x",
            }
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.5},
    }
    torch.save(content, folder / f"epoch={step // 10}-step={step}.ckpt")


def save_hugging_face(_: PrivacyEngine, model: nn.Module, __: Any, folder: Path, step: int) -> None:
    """What the Trainer of transformers writes: a folder with safetensors, its own record, and pickles beside them."""
    import json

    from safetensors.torch import save_file

    place = folder / f"checkpoint-{step}"
    place.mkdir()
    state = {
        name.removeprefix("_module."): tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(state, place / "model.safetensors", metadata={"format": "pt"})
    (place / "trainer_state.json").write_text(
        json.dumps({"epoch": 1.0, "global_step": step, "log_history": []})
    )
    (place / "training_args.bin").write_bytes(b"a pickle of classes, which is never opened")
    (place / "rng_state.pth").write_bytes(b"likewise")
