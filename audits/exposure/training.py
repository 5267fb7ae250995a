"""Training a character model on a text with secrets, and ranking each secret afterwards.

After Carlini, Liu, Erlingsson, Kos and Song 2019, "The Secret Sharer: Evaluating and Testing
Unintended Memorization in Neural Networks" (arXiv:1802.08232). Sensitive, though the secrets are
made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from audits.exposure.models import MODELS
from audits.exposure.ranks import Exposures, exact_rank
from audits.exposure.text import (
    CANDIDATES,
    DIGITS,
    LENGTH,
    Secret,
    draw_secrets,
    lines_of_text,
    shifted,
)
from audits.training.config import TrainingConfig
from audits.training.datasets.topics import ALPHABET, encode
from audits.training.private_setting import made_private, quiet_opacus
from audits.training.randomness import Randomness, generator
from audits.training.steps import stop_requests, take_steps
from audits.training.tensors import BatchedTensorDataset, whole_batch
from indpriv._checks import check_choice, check_positive_int
from indpriv._storage import location_on_disk
from indpriv._types import FloatArray, StageProgress, silent
from indpriv.norm_log.run_files import SECRETS
from indpriv.recording import Recorder

_SECRETS = 1  # second word of the seed, so that secrets are independent of training


@dataclass(frozen=True)
class SecretsConfig:
    """What `train_with_secrets` trains.

    Attributes:
        model: one of `audits.exposure.models.MODELS`.
        text_rows: rows of the text.
        secrets: number of secrets for each number of rows.
        repeats: numbers of rows with a secret.
        controls: number of secrets that are inserted nowhere.
        target_epsilon: worst case of one row; None trains without DP.
        epochs, batch_size, learning_rate, max_grad_norm, delta: as in an audit's [training]; the
            optimizer is Adam.
    """

    model: str = "lstm"
    text_rows: int = 1500
    secrets: int = 8
    repeats: tuple[int, ...] = (1, 4, 16)
    controls: int = 40
    target_epsilon: float | None = 3.0
    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 0.01
    max_grad_norm: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_choice("model", self.model, MODELS)
        for name in ("text_rows", "secrets", "epochs", "batch_size"):
            check_positive_int(name, getattr(self, name))
        check_positive_int("controls", self.controls, minimum=0)
        for rows in self.repeats:
            check_positive_int("repeats", rows)

    @property
    def training(self) -> TrainingConfig:
        """The settings of DP-SGD."""
        return TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            delta=self.delta,
            target_epsilon=self.target_epsilon,
        )


class _RowLoss(nn.Module):
    """Mean cross-entropy over the characters of each row; of a batch, or of its rows."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, codes: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.transpose(1, 2), codes, reduction="none").mean(1)
        return losses.mean() if self.reduction == "mean" else losses


def train_with_secrets(
    config: SecretsConfig,
    run_dir: str | Path,
    *,
    seed: int | None = None,
    progress: StageProgress = silent,
    device: str = "cpu",
) -> Exposures:
    """Train a character model on a text with secrets, and write their exposures to RUN.

    With DP it is a recorded run whose units are the owners of secrets, and single rows of the text.

    Args:
        config: text, secrets, model and training.
        run_dir: a new directory.
        seed: of secrets and training; None draws both from the operating system.
        progress: called as progress(stage, done, total) after each step.
        device: device to train on.

    Raises:
        InputError: a directory that is in use, more rows than the text has, or an epsilon that no
            noise reaches.
    """
    rng = np.random.default_rng(None if seed is None else [seed, _SECRETS])
    rows = [n for n in (*config.repeats, 0) for _ in range(_number(config, n))]
    secrets = draw_secrets(rows, rng)
    lines, owners = _corpus(config, secrets, rng)
    codes = encode(lines, LENGTH)
    train_set = BatchedTensorDataset(torch.from_numpy(shifted(codes)), torch.from_numpy(codes))
    randomness = Randomness.from_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.first_parameters)
        module = MODELS[config.model]().to(device)
    run_dir = location_on_disk(run_dir, "a run with secrets is")
    if config.target_epsilon is None:
        run_dir.mkdir(mode=0o700, parents=True)
        _fit(config, module, train_set, randomness, progress, device)
    else:
        _fit_privately(config, module, train_set, owners, randomness, run_dir, progress, device)
    module.eval()
    ranks = [exact_rank(log_perplexities(module, secret, device), secret.pin) for secret in secrets]
    found = Exposures.from_ranks([secret.owner for secret in secrets], rows, ranks, CANDIDATES)
    found.to_parquet(run_dir / SECRETS)
    return found


def _number(config: SecretsConfig, rows: int) -> int:
    return config.secrets if rows else config.controls


def _corpus(
    config: SecretsConfig, secrets: Sequence[Secret], rng: np.random.Generator
) -> tuple[list[str], list[str]]:
    """All rows of the training data, and whose each is."""
    lines = lines_of_text(config.text_rows, rng)
    owners = [f"text {number}" for number in range(len(lines))]
    for secret in secrets:
        lines += [secret.sentence] * secret.rows
        owners += [secret.owner] * secret.rows
    return lines, owners


@torch.no_grad()
def log_perplexities(module: nn.Module, secret: Secret, device: str = "cpu") -> FloatArray:
    """(CANDIDATES,) minus log-likelihood of every pin after the prefix of a secret, in nats.

    Pins share beginnings: one pass over all pins without their last digit gives what every
    candidate needs.
    """
    beginnings = [f"{secret.prefix}{pin:0{DIGITS - 1}d}" for pin in range(CANDIDATES // 10)]
    codes = torch.from_numpy(shifted(encode(beginnings, LENGTH))).to(device)
    start, zero = len(secret.prefix), ALPHABET.index("0")
    logits = module(codes[:, : start + DIGITS])[:, start:].double()
    digits = -logits.log_softmax(2)[:, :, zero : zero + 10].cpu().numpy()
    total = digits[:, DIGITS - 1]
    pins = np.arange(CANDIDATES // 10)
    for place in range(DIGITS - 1):
        digit = pins // 10 ** (DIGITS - 2 - place) % 10
        total = total + digits[pins, place, digit][:, None]
    return np.asarray(total.ravel())


def _fit(
    config: SecretsConfig,
    module: nn.Module,
    train_set: BatchedTensorDataset,
    randomness: Randomness,
    progress: StageProgress,
    device: str,
) -> None:
    """Train without clipping and without noise."""
    loader = DataLoader(
        train_set,
        batch_size=config.batch_size,
        shuffle=True,
        collate_fn=whole_batch,
        generator=generator(randomness.shuffling),
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=config.learning_rate)
    loss_fn, step = _RowLoss(), 0
    for _ in range(config.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_fn(module(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            step += 1
            progress("training without DP", step, config.epochs * len(loader))


def _fit_privately(
    config: SecretsConfig,
    module: nn.Module,
    train_set: BatchedTensorDataset,
    owners: Sequence[str],
    randomness: Randomness,
    run_dir: Path,
    progress: StageProgress,
    device: str,
) -> None:
    """Train with DP-SGD, recorded."""
    optimizer = torch.optim.Adam(module.parameters(), lr=config.learning_rate)
    with quiet_opacus():
        private = made_private(
            module, optimizer, _RowLoss(), train_set, config.training, randomness
        )
        recorder = Recorder(
            run_dir,
            dataset=train_set,
            loss_fn=_RowLoss("none"),
            every="epoch",
            unit="user",
            unit_ids=np.array(owners),
            seeded=randomness.seeded,
            public_settings=private.public_law,
        )
        with (
            recorder.attach(private.model, private.optimizer, private.loader),
            stop_requests() as stop_asked,
        ):
            take_steps(
                private,
                config.training,
                lambda step: progress("training", step, private.total_steps),
                stop_asked,
                device,
            )
