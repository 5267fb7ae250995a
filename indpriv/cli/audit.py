"""The command audit: account, analyse and attack a run, recorded or replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from indpriv._files import read_json
from indpriv._journal import NAME as JOURNAL
from indpriv.audit import audit as audit_run
from indpriv.cli.options import By, Json, check_device, check_folder, progress_bar
from indpriv.errors import InputError
from indpriv.report.renderers.terminal import print_audit

REPLAY = "For a folder of checkpoints"  # heading in --help


def audit(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Run directory that a Recorder wrote, or a folder of checkpoints."
        ),
    ],
    output_dir: Annotated[
        Path | None, typer.Option(help="Audit directory to write.", show_default="RUN/audit")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the guarantee.", show_default="the run's own")
    ] = None,
    accountant: Annotated[str, typer.Option(help="rdp or pld.")] = "rdp",
    conversion: Annotated[
        str, typer.Option(help="From RDP to epsilon and delta: canonne2020 or mironov2017.")
    ] = "canonne2020",
    between_records: Annotated[
        str, typer.Option(help="Norms assumed between records: last, closest or worst-case.")
    ] = "last",
    preset: Annotated[
        str | None,
        typer.Option(help="yu2023: account as the paper did (needs a log rounded to nearest)."),
    ] = None,
    by: By = None,
    unit_column: Annotated[
        str | None,
        typer.Option(
            help="Metadata column that says whose row each is: epsilon of people, not of rows."
        ),
    ] = None,
    unreadable: Annotated[
        str, typer.Option(help="Damaged or missing records: refuse, or count them at worst-case.")
    ] = "refuse",
    seed: Annotated[int, typer.Option(help="Of the attack's random choices; not of training.")] = 0,
    show_examples: Annotated[
        bool,
        typer.Option(
            "--show-examples",
            help="Put pictures of the most and least protected images in the report.",
        ),
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="INDPRIV_DATA", help="For --show-examples: folder of the run's data set."
        ),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            help="For checkpoints: the AuditSpec, package.module:spec or path/to/file.py:spec."
        ),
    ] = None,
    noise_multiplier: Annotated[
        str | None,
        typer.Option(
            help="Of the run; 1.1,0.9@500 is 1.1, from step 500 on 0.9.", rich_help_panel=REPLAY
        ),
    ] = None,
    max_grad_norm: Annotated[
        str | None, typer.Option(help="Likewise.", rich_help_panel=REPLAY)
    ] = None,
    sample_rate: Annotated[
        str | None, typer.Option(help="Likewise; the Poisson rate.", rich_help_panel=REPLAY)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Of the whole run.", rich_help_panel=REPLAY)
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="poisson, shuffled or other.", rich_help_panel=REPLAY)
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where to take norms, e.g. cuda.", rich_help_panel=REPLAY)
    ] = "cpu",
    batch_size: Annotated[
        str, typer.Option(help="Of the norm pass, or auto.", rich_help_panel=REPLAY)
    ] = "auto",
    processes: Annotated[
        int, typer.Option(help="Checkpoints to work on at a time.", rich_help_panel=REPLAY)
    ] = 1,
    as_json: Json = False,
) -> None:
    """Account, analyse and attack a run, recorded or replayed; write epsilon.parquet, audit.json, audit.md and report.html.

    Example: indpriv audit runs/adult --output-dir reports/adult --by race --by sex

    A run that was never recorded is replayed from its checkpoints: indpriv audit checkpoints --spec train.py:spec
    --max-grad-norm 1.0 --sampler poisson --delta 1e-5. An interrupted replay continues at the next checkpoint.
    """
    output_dir = output_dir or path / "audit"
    settings: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": max_grad_norm,
        "sample_rate": sample_rate,
        "steps": steps,
        "sampler": sampler,
    }
    if show_examples and spec is not None:
        raise InputError(
            "--show-examples is for runs of `indpriv train`, whose data set is known; leave it out with --spec"
        )
    if spec is not None:
        settings["delta"] = delta
        path = _replay(
            path,
            spec,
            output_dir,
            settings,
            device=device,
            batch_size=batch_size,
            processes=processes,
        )
    elif given := [
        f"--{name.replace('_', '-')}" for name, value in settings.items() if value is not None
    ]:
        raise InputError(
            f"{', '.join(given)}: only for a folder of checkpoints, and those need --spec"
        )
    audit_into(
        path,
        output_dir,
        quiet=as_json,
        delta=delta,
        accountant=accountant,
        conversion=conversion,
        between_records=between_records.replace("-", "_"),
        preset=preset,
        by=by or [],
        unit_column=unit_column,
        unreadable=unreadable.replace("-", "_"),
        seed=seed,
        images=_images(path, data_dir) if show_examples else None,
    )


def audit_into(path: Path, output_dir: Path, *, quiet: bool, **options: Any) -> None:
    """Audit a run directory and show the first screen; JSON alone where quiet."""
    check_folder("--output-dir", output_dir)
    with progress_bar() as progress:
        summary = audit_run(path, output_dir, progress=progress, **options)
    if quiet:
        typer.echo(json.dumps(summary.to_json(), indent=2, allow_nan=False))
        return
    console = Console()
    print_audit(summary, console)
    console.print(
        f"\n[bold]{escape(str(output_dir / 'report.html'))}[/]", soft_wrap=True, highlight=False
    )


def _images(run_dir: Path, data_dir: Path | None) -> NDArray[np.float32]:
    """Training inputs of a reference run, from the data set that its run.json names, and only where they are the same."""
    from indpriv.training.datasets import load_dataset

    content = read_json(run_dir / "run.json") if (run_dir / "run.json").is_file() else {}
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict) or not isinstance(data.get("dataset"), str):
        raise InputError(
            f"--show-examples: {run_dir / 'run.json'} names no data set (data.dataset), and a run holds no examples of its own; "
            "leave it out, and look examples up by the ids in the report"
        )
    dataset = load_dataset(data["dataset"], data_dir)
    if dataset.fingerprint() != data.get("fingerprint"):
        raise InputError(
            f"--show-examples: {data['dataset']} as loaded is not what the run was trained on (another fingerprint: canaries, a "
            "subset, or another version), so that ids would name other examples; leave it out"
        )
    return dataset.train.inputs


def _replay(
    path: Path,
    spec: str,
    output_dir: Path,
    settings: dict[str, Any],
    *,
    device: str,
    batch_size: str,
    processes: int,
) -> Path:
    """Replay the checkpoints in a folder into OUTPUT_DIR/replay, a run directory, and return that."""
    from indpriv.recording import StepOptions, replay

    if (path / JOURNAL).is_file():
        raise InputError(
            f"{path} is a recorded run: audit it without --spec, or pass its checkpoints"
        )
    check_folder("--output-dir", output_dir)
    check_device(device)
    output_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    told = Console(stderr=True, highlight=False, soft_wrap=True)
    with progress_bar() as progress:
        replay(
            path,
            spec,
            output_dir / "replay",
            options=StepOptions(**settings),
            device=device,
            batch_size=int(batch_size) if batch_size.isdecimal() else batch_size,
            processes=processes,
            progress=progress,
            tell=lambda text: told.print(escape(text)),
        )
    return output_dir / "replay"
