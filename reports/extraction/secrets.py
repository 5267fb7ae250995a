"""Runs of character models on a text with secrets."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from audits.exposure.findings import measure_exposure
from audits.exposure.measured import exposure_of_run
from audits.exposure.training import SecretsConfig, train_with_secrets
from indpriv._plain import to_json
from indpriv.norm_log.run_files import SECRETS

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


def measured(folder: Path) -> list[dict[str, Any]]:
    """Exposures in all runs, by number of rows."""
    found = []
    for config in SETTINGS:
        exposures, table = exposure_of_run(folder_of(folder, config), delta=config.delta)
        settings = {"model": config.model, "target_epsilon": config.target_epsilon}
        found.append({**settings, **to_json(measure_exposure(exposures, table))})
    return found
