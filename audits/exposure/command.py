"""`python -m audits exposure`: does a character model memorise secrets?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from audits.options import Json, Seed
from indpriv.cli.common import check_device, check_folder, print_json, progress_bar

RunDir = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="New directory to train in, or a run that had secrets before."
    ),
]
Repeats = Annotated[
    list[int] | None,
    typer.Option(
        help="Number of rows with a secret. Can be given several times.",
        show_default="1, 4 and 16",
    ),
]


def exposure(
    run_dir: RunDir,
    model: Annotated[str, typer.Option(help="lstm or transformer.")] = "lstm",
    target_epsilon: Annotated[
        float, typer.Option(help="Worst-case epsilon of one row; the noise is chosen for it.")
    ] = 3.0,
    without_dp: Annotated[
        bool, typer.Option("--without-dp", help="Train without clipping and noise.")
    ] = False,
    repeats: Repeats = None,
    secrets: Annotated[int, typer.Option(help="Number of secrets for each number of rows.")] = 8,
    epochs: Annotated[int, typer.Option(help="Passes over the data, in expectation.")] = 20,
    text_rows: Annotated[int, typer.Option(help="Rows of the text around the secrets.")] = 1500,
    delta: Annotated[float, typer.Option(help="Delta of every epsilon.")] = 1e-5,
    seed: Seed = None,
    device: Annotated[str, typer.Option(help="Device to train on, e.g. cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Train a character model on a text with random secrets, and rank each among its candidates.

    Example: python -m audits exposure runs/secrets --model lstm --target-epsilon 3

    The exposure of secrets stands beside the epsilon of their owners; exit code 1 if it exceeds
    what the worst case allows. A run that had secrets before is measured again, not trained.
    """
    from audits.exposure.findings import measure_exposure
    from audits.exposure.measured import exposure_document, exposure_of_run, print_exposure
    from indpriv.norm_log.run_files import SECRETS

    check_folder("RUN", run_dir)
    if not (run_dir / SECRETS).is_file():
        from audits.exposure.training import SecretsConfig, train_with_secrets

        check_device(device)
        config = SecretsConfig(
            model=model,
            text_rows=text_rows,
            secrets=secrets,
            repeats=tuple(repeats or SecretsConfig.repeats),
            target_epsilon=None if without_dp else target_epsilon,
            epochs=epochs,
            delta=delta,
        )
        with progress_bar() as progress:
            train_with_secrets(config, run_dir, seed=seed, progress=progress, device=device)
    found = measure_exposure(*exposure_of_run(run_dir, delta=delta))
    if as_json:
        print_json(exposure_document(found))
    else:
        print_exposure(found, Console())
    if found.findings:
        raise typer.Exit(1)
