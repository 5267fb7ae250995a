"""Runs of character models on a text with secrets."""

import shutil
from collections.abc import Callable
from pathlib import Path

from indpriv.norm_log.run_files import SECRETS
from indpriv.training.sequences.secrets import SecretsConfig, train_with_secrets

SETTINGS = tuple(
    SecretsConfig(model=model, text_rows=1000, epochs=15, target_epsilon=epsilon)
    for epsilon in (None, 8.0, 3.0)
    for model in ("lstm", "transformer")
)
_SEED = 1  # the page can be made again; such runs have no privacy, and need none


def folder_of(folder: Path, config: SecretsConfig) -> Path:
    """Where the run of these settings lies."""
    epsilon = "without-dp" if config.target_epsilon is None else f"epsilon-{config.target_epsilon}"
    return folder / f"{config.model}-{epsilon}"


def train_secrets(folder: Path, tell: Callable[[str], None]) -> None:
    """Train what has no finished run in the folder."""
    for config in SETTINGS:
        run_dir = folder_of(folder, config)
        if (run_dir / SECRETS).is_file():
            continue
        shutil.rmtree(run_dir, ignore_errors=True)  # an interrupted run
        tell(f"training {run_dir.name}")
        train_with_secrets(config, run_dir, seed=_SEED)
