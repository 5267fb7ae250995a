"""The command audit: account, analyse and attack a run, recorded or replayed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from indpriv._folders import make_folder, named_by_person
from indpriv._shown import Console, escape
from indpriv._storage import is_remote, location
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import (
    BaselineSignals,
    BucketIsPrivate,
    By,
    Engine,
    Json,
    Run,
    Signals,
    StepOf,
    check_device,
    check_folder,
    of_replay,
    print_json,
    progress_bar,
)
from indpriv.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from indpriv.analysis.summary import Audit

OutputDir = Annotated[
    Path | None,
    typer.Option(
        help="Audit directory to write.", show_default="RUN/audit; NAME-audit for others' runs"
    ),
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
        help="Relative width that brackets by pld aim at; wider ones are counted.",
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
    Path | None,
    typer.Option(
        metavar="IMAGES.npy",
        help="Training images (n, channels, height, width), by example id: the report shows the "
        "most and the least protected.",
    ),
]
Spec = Annotated[
    str | None,
    of_replay(
        "AuditSpec that rebuilds model and data: package.module:spec or path/to/file.py:spec."
    ),
]
NoiseMultiplier = Annotated[
    str | None,
    of_replay(
        "Noise multiplier used in training; 1.1,0.9@500 means 1.1, then 0.9 from step 500 on."
    ),
]
MaxGradNorm = Annotated[
    str | None,
    of_replay("Clipping norm used in training; a list such as 1.0,0.5@500 if it changed."),
]
SampleRate = Annotated[
    str | None,
    of_replay(
        "Poisson sampling rate used in training; a list such as 0.01,0.02@500 if it changed."
    ),
]
Steps = Annotated[int | None, of_replay("Number of optimizer steps of the whole run.")]
Sampler = Annotated[
    str | None, of_replay("How training drew its batches: poisson, shuffled or other.")
]
Device = Annotated[str, of_replay("Device to compute gradient norms on, e.g. cuda.")]
BatchSize = Annotated[
    str, of_replay("Number of examples whose norms are computed at once, or auto.")
]
Challenge = Annotated[
    Path | None,
    of_replay(
        "RUN: instead of an audit, compare the norms in its log with those of checkpoints and data "
        "at random steps. Exit code 1 if they differ, 3 if that cannot be told."
    ),
]
Challenges = Annotated[int, of_replay("Number of steps to challenge.")]
Processes = Annotated[
    int, of_replay("Number of processes, each working on one checkpoint at a time.")
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
    show_examples: ShowExamples = None,
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
    challenge: Challenge = None,
    challenges: Challenges = 10,
    as_json: Json = False,
) -> None:
    """Account, analyse and attack a run; write epsilon.parquet, audit.json, audit.md, report.html.

    Example: indpriv audit runs/adult --output-dir reports/adult --by race --by sex

    Checkpoints of a run that was never recorded are replayed: see --spec, and the options below it.
    """
    from indpriv.audit import audit as audit_run

    if challenge is not None:
        _challenge(path, spec, challenge, challenges, as_json, step_of=step_of or (), device=device)
        return
    settings = _told(noise_multiplier, max_grad_norm, sample_rate, steps, delta, sampler, step_of)
    path, output_dir = _checked_folders(path, output_dir, spec, settings)
    if spec is not None:
        path = _replay(path, spec, output_dir, settings, device, batch_size, processes)
    more: dict[str, Any] = {"signals": signals, "baseline_signals": baseline_signals, "seed": seed}
    words = accountant, conversion, between_records, preset, participation, neighbouring, engine
    with progress_bar() as progress:
        summary = audit_run(
            path,
            output_dir,
            **_options(delta, tolerance, *words, unreadable),
            **more,
            unit_column=unit_column,
            bucket_is_private=bucket_is_private,
            by=by or [],
            images=None if show_examples is None else _images(show_examples),
            progress=progress,
        )
    show_audit(summary, output_dir, as_json=as_json)


def _images(path: Path) -> NDArray[np.float32]:
    import numpy as np

    try:
        images: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, TypeError):
        images = np.empty(0, object)
    if not isinstance(images, np.ndarray) or images.dtype.kind not in "biuf":
        raise InputError(
            f"--show-examples {path} is no .npy file of real numbers; write it with "
            "numpy.save(path, images), of shape (examples, channels, height, width)"
        )
    return images


def _told(*given: Any) -> dict[str, Any]:
    """Settings of an unrecorded run as given on the command line: the arguments of StepOptions."""
    names = "noise_multiplier max_grad_norm sample_rate steps delta sampler step_of"
    return dict(zip(names.split(), given, strict=True))


def _options(*given: str | float | None) -> dict[str, Any]:
    """Options by name, and words as the interface in Python spells them."""
    names = (
        "delta tolerance accountant conversion between_records preset participation neighbouring "
        "engine unreadable"
    )
    spelled = [one.replace("-", "_") if isinstance(one, str) else one for one in given]
    return dict(zip(names.split(), spelled, strict=True))


def show_audit(summary: Audit, output_dir: Path, *, as_json: bool) -> None:
    """Print the first screen of an audit, or its JSON alone."""
    from indpriv.report.report import print_audit

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
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"[yellow]warning:[/] process {writer} is still writing {escape(str(run_dir))}: this "
            "audit covers the steps so far; when training has ended, type the same command again"
        )


def _checked_folders(
    path: Path | None,
    output_dir: Path | None,
    spec: str | None,
    settings: dict[str, Any],
) -> tuple[Path, Path]:
    """The folder to audit and the one to write, or InputError."""
    given = [name for name in settings if name != "delta" and settings[name] not in (None, [])]
    if spec is None and given:  # a recorded run has its own settings
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{names}: only for a folder of checkpoints, which also needs --spec")
    if spec is None:
        path = checked_run(path, "audit")
        _say_if_still_written(path)
    elif path is None:
        raise InputError(f"pass the folder of checkpoints: indpriv audit FOLDER --spec {spec}")
    output_dir = _default_output(path) if output_dir is None else location(output_dir)
    check_folder("--output-dir", output_dir, or_address=True)
    return path, output_dir


def _default_output(path: Path) -> Path:
    """RUN/audit; in the working folder, if that or RUN is somebody else's or cannot be written."""
    from indpriv._files import first_at
    from indpriv.audit.audit_directory import SUMMARY, made_here, read_summary
    from indpriv.norm_log.journal_state import read_state

    inside, outside = path / "audit", Path(f"{path.resolve().name}-audit")
    if is_remote(path) or not path.exists():
        return inside
    named_by_person(path)
    is_own = not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid()
    is_own &= not inside.exists() or made_here(inside)
    if is_own and os.access(inside if inside.is_dir() else path, os.W_OK):
        return inside
    audited, found = ("run", "recorder", "log_sha256"), ""
    if outside.is_symlink() or (outside.exists() and not made_here(outside)):
        found = "is a link, or is not known to be an audit of yours"
    elif (outside / SUMMARY).is_file() and (
        first_at(read_summary(outside), audited) != read_state(path).fingerprint
    ):
        found = "holds the audit of another run"
    if found:
        raise InputError(
            f"{outside}, where the audit of {path} would be written, {found}; name a directory "
            "with --output-dir"
        )
    text = (
        f"{path} or its audit is another user's, came from elsewhere, had its modes changed "
        f"(chmod -R), or cannot be written: the audit is written to {outside}. If {path} is yours, "
        f"--output-dir {inside} writes there"
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(text))
    return outside


def _challenge(
    path: Path | None, spec: str | None, run_dir: Path, n: int, as_json: bool, **options: Any
) -> None:
    """Challenge a run's log with checkpoints."""
    from indpriv._plain import to_json
    from indpriv.norm_log.evidence import FAILED, NOT_CHECKED
    from indpriv.recording.checkpoints.challenge import challenge

    if path is None or spec is None:
        raise InputError("--challenge RUN also needs CHECKPOINTS and --spec")
    check_device(options["device"])
    how = "audit CHECKPOINTS --spec SPEC --challenge"
    with progress_bar() as progress:
        checks = challenge(path, spec, checked_run(run_dir, how), n, **options, tell=progress)
    if as_json:
        print_json(to_json(checks))
    else:
        for check in checks:
            Console().print(
                escape(f"{check.title}: {check.status}; {check.detail}"), soft_wrap=True
            )
    if any(check.status == FAILED for check in checks):
        raise typer.Exit(1)
    if checks[1].status == NOT_CHECKED:  # of norms
        raise typer.Exit(3)


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
    make_folder(output_dir)
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
