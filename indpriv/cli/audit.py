"""The command audit: account, analyse and attack a run, recorded or replayed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from indpriv._storage import location
from indpriv.cli.first_contact import checked_run
from indpriv.cli.images import training_images
from indpriv.cli.options import (
    REPLAY,
    BaselineSignals,
    BucketIsPrivate,
    By,
    DataDir,
    Engine,
    Json,
    Signals,
    StepOf,
    check_device,
    check_folder,
    print_json,
    progress_bar,
)
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.analysis.summary import AuditSummary

Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="Run directory of a Recorder, or a folder of checkpoints with --spec."
    ),
]
OutputDir = Annotated[
    Path | None, typer.Option(help="Audit directory to write.", show_default="RUN/audit")
]
Delta = Annotated[
    float | None, typer.Option(help="Delta of the guarantee.", show_default="the run's own")
]
Accountant = Annotated[
    str, typer.Option(help="Accountant: rdp, or pld, which is tighter and takes longer.")
]
Conversion = Annotated[
    str, typer.Option(help="How RDP becomes epsilon and delta: canonne2020 or mironov2017.")
]
BetweenRecords = Annotated[
    str, typer.Option(help="Norms assumed between records: last, closest or worst-case.")
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        help="Relative width that brackets by pld may have.",
        show_default="the audit file's, else 1e-4",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="yu2023: account as in that paper (needs a log with norms rounded to nearest)."
    ),
]
Participation = Annotated[
    str | None,
    typer.Option(
        help="Whether an attacker knows who took part in which step: secret, which needs Poisson "
        "sampling, or known, which needs none.",
        show_default="secret with Poisson sampling, else known",
    ),
]
Neighbouring = Annotated[
    str | None,
    typer.Option(
        help="Neighbouring relation: add-remove, zero-out or replace-one.",
        show_default="the run's; zero-out for add-remove if participation is known, or if updates "
        "tell the number of examples",
    ),
]
UnitColumn = Annotated[
    str | None,
    typer.Option(
        help="Metadata column that names the person behind each row. Epsilons are then of people."
    ),
]
Unreadable = Annotated[
    str,
    typer.Option(
        help="What to do if records are damaged or missing: refuse the run, or assume the clipping "
        "norm in their place (worst-case)."
    ),
]
AttackSeed = Annotated[
    int, typer.Option(help="Seed of the attack's random choices. It has no effect on training.")
]
ShowExamples = Annotated[
    bool,
    typer.Option(
        "--show-examples", help="Show the most and the least protected images in the report."
    ),
]
Spec = Annotated[
    str | None,
    typer.Option(
        help="AuditSpec that rebuilds model and data: package.module:spec or path/to/file.py:spec.",
        rich_help_panel=REPLAY,
    ),
]
NoiseMultiplier = Annotated[
    str | None,
    typer.Option(
        help="Noise multiplier used in training; 1.1,0.9@500 means 1.1, then 0.9 from step 500 on.",
        rich_help_panel=REPLAY,
    ),
]
MaxGradNorm = Annotated[
    str | None,
    typer.Option(
        help="Clipping norm used in training; a list such as 1.0,0.5@500 if it changed.",
        rich_help_panel=REPLAY,
    ),
]
SampleRate = Annotated[
    str | None,
    typer.Option(
        help="Poisson sampling rate used in training; a list such as 0.01,0.02@500 if it changed.",
        rich_help_panel=REPLAY,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(help="Number of optimizer steps of the whole run.", rich_help_panel=REPLAY),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        help="How training drew its batches: poisson, shuffled or other.", rich_help_panel=REPLAY
    ),
]
Device = Annotated[
    str,
    typer.Option(help="Device to compute gradient norms on, e.g. cuda.", rich_help_panel=REPLAY),
]
BatchSize = Annotated[
    str,
    typer.Option(
        help="Number of examples whose norms are computed at once, or auto.", rich_help_panel=REPLAY
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        help="Number of processes, each working on one checkpoint at a time.",
        rich_help_panel=REPLAY,
    ),
]


def audit(
    path: Run = None,
    output_dir: OutputDir = None,
    delta: Delta = None,
    accountant: Accountant = "rdp",
    conversion: Conversion = "canonne2020",
    between_records: BetweenRecords = "last",
    tolerance: Tolerance = None,
    preset: Preset = None,
    participation: Participation = None,
    neighbouring: Neighbouring = None,
    engine: Engine = "local",
    bucket_is_private: BucketIsPrivate = False,
    by: By = None,
    unit_column: UnitColumn = None,
    unreadable: Unreadable = "refuse",
    signals: Signals = None,
    baseline_signals: BaselineSignals = None,
    seed: AttackSeed = 0,
    show_examples: ShowExamples = False,
    data_dir: DataDir = None,
    spec: Spec = None,
    noise_multiplier: NoiseMultiplier = None,
    max_grad_norm: MaxGradNorm = None,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    sampler: Sampler = None,
    step_of: StepOf = None,
    device: Device = "cpu",
    batch_size: BatchSize = "auto",
    processes: Processes = 1,
    as_json: Json = False,
) -> None:
    """Account, analyse and attack a run; write epsilon.parquet, audit.json, audit.md, report.html.

    Example: indpriv audit runs/adult --output-dir reports/adult --by race --by sex

    Checkpoints of a run that was never recorded are replayed: see --spec, and the options below it.
    """
    from indpriv.audit import audit as audit_run

    settings = {
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": max_grad_norm,
        "sample_rate": sample_rate,
        "steps": steps,
        "delta": delta,
        "sampler": sampler,
        "step_of": step_of or (),
    }
    path, output_dir = _checked_folders(path, output_dir, spec, settings, show_examples)
    if spec is not None:
        path = _replay(path, spec, output_dir, settings, device, batch_size, processes)
    more: dict[str, Any] = {"unit_column": unit_column, "bucket_is_private": bucket_is_private}
    words = accountant, conversion, between_records, preset, participation, neighbouring, engine
    with progress_bar() as progress:
        summary = audit_run(
            path,
            output_dir,
            **_options(delta, tolerance, *words, unreadable),
            **more,
            by=by or [],
            seed=seed,
            signals=signals,
            baseline_signals=baseline_signals,
            images=training_images(path, data_dir) if show_examples else None,
            progress=progress,
        )
    show_audit(summary, output_dir, as_json=as_json)


def _options(*given: str | float | None) -> dict[str, Any]:
    """Options by name, and words as the interface in Python spells them."""
    names = (
        "delta tolerance accountant conversion between_records preset participation neighbouring "
        "engine unreadable"
    )
    spelled = [one.replace("-", "_") if isinstance(one, str) else one for one in given]
    return dict(zip(names.split(), spelled, strict=True))


def show_audit(summary: AuditSummary, output_dir: Path, *, as_json: bool) -> None:
    """Print the first screen of an audit, or its JSON alone."""
    from indpriv.report.renderers.terminal import print_audit

    if as_json:
        print_json(summary.to_json())
        return
    console = Console()
    print_audit(summary, console)
    console.print(
        f"\n[bold]{escape(str(output_dir / 'report.html'))}[/]", soft_wrap=True, highlight=False
    )


def _say_if_still_written(run_dir: Path) -> None:
    from indpriv._files import writer_of

    writer = writer_of(run_dir)
    if writer is not None:
        text = (
            f"[yellow]warning:[/] process {writer} is still writing {escape(str(run_dir))}: this "
            "audit covers the steps so far; when training has ended, type the same command again"
        )
        Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def _checked_folders(
    path: Path | None,
    output_dir: Path | None,
    spec: str | None,
    settings: dict[str, Any],
    show_examples: bool,
) -> tuple[Path, Path]:
    """The folder to audit and the one to write, or InputError."""
    path = _recorded(path, settings) if spec is None else _checkpoints(path, spec, show_examples)
    output_dir = path / "audit" if output_dir is None else location(output_dir)
    check_folder("--output-dir", output_dir, or_address=True)
    return path, output_dir


def _recorded(path: Path | None, settings: dict[str, Any]) -> Path:
    """The recorded run to audit, which has its own settings; --delta is always allowed."""
    options = [name for name in settings if name != "delta" and settings[name] not in (None, ())]
    if options:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise InputError(f"{given}: only for a folder of checkpoints, which also needs --spec")
    run_dir = checked_run(path, "audit")
    _say_if_still_written(run_dir)
    return run_dir


def _checkpoints(path: Path | None, spec: str, show_examples: bool) -> Path:
    """The folder of checkpoints to replay."""
    if show_examples:
        raise InputError("--show-examples needs a run of `indpriv train`; leave it out with --spec")
    if path is None:
        raise InputError(f"pass the folder of checkpoints: indpriv audit FOLDER --spec {spec}")
    return path


def _replay(
    checkpoints: Path,
    spec: str,
    output_dir: Path,
    settings: dict[str, Any],
    device: str,
    batch_size: str,
    processes: int,
) -> Path:
    """Replay checkpoints into OUTPUT_DIR/replay, a run directory, and return its path."""
    from indpriv.norm_log.run_files import holds_log
    from indpriv.recording import StepOptions, replay

    if holds_log(checkpoints):
        raise InputError(
            f"{checkpoints} is a recorded run: audit it without --spec, or pass its checkpoints"
        )
    check_device(device)
    output_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with progress_bar() as progress:
        replay(
            checkpoints,
            spec,
            output_dir / "replay",
            options=StepOptions(**settings),
            device=device,
            batch_size=int(batch_size) if batch_size.isdecimal() else batch_size,
            processes=processes,
            progress=progress,
            tell=lambda text: errors.print(escape(text)),
        )
    return output_dir / "replay"
