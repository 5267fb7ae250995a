"""Commands that train: demo and train. Torch is imported only when one runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from indpriv._files import read_json
from indpriv._formatting import format_delta, format_epsilon
from indpriv.accountant import PrivacyFilter
from indpriv.cli.audit import audit_into
from indpriv.cli.options import Json, Seed, check_device, check_folder, progress_bar
from indpriv.errors import InputError

DEMO = "adult.toml"


def demo(
    output_dir: Annotated[Path, typer.Option(help="Where the run and its audit go.")] = Path(
        "reports/adult-demo"
    ),
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Train on UCI Adult with DP-SGD, recording every step, and audit the run.

    Example: indpriv demo --output-dir reports/adult-demo
    """
    check_folder("--output-dir", output_dir)
    output_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    run_dir = output_dir / "run"
    if run_dir.exists():
        _clear_old_demo(run_dir)
    _train(_demo_audit_file(), run_dir, seed, data_dir=None, device="cpu", quiet=as_json)
    audit_into(run_dir, output_dir, quiet=as_json)


def train(
    audit_file: Annotated[
        Path, typer.Argument(metavar="AUDIT.toml", help="One audit, e.g. audits/adult.toml.")
    ],
    run_dir: Annotated[
        Path | None, typer.Option(help="New directory of the run.", show_default="runs/NAME")
    ] = None,
    seed: Seed = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="INDPRIV_DATA", help="Folder of data sets that do not ship with the package."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train, e.g. cpu or cuda.")] = "cpu",
    canaries: Annotated[
        int,
        typer.Option(
            help="Mislabelled training examples that fair coins include, to audit the run by; 0 is none."
        ),
    ] = 0,
    non_dp_twin: Annotated[
        bool,
        typer.Option(
            "--non-dp-twin", help="Also train the same model without DP, to compare attacks with."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train an audit's model with DP-SGD, record it and save its checkpoints.

    Example: indpriv train audits/digits.toml --run-dir runs/digits
    """
    facts = _train(
        audit_file,
        run_dir,
        seed,
        data_dir=data_dir,
        device=device,
        quiet=as_json,
        canaries=canaries,
        non_dp_twin=non_dp_twin,
    )
    if as_json:
        typer.echo(json.dumps(facts, indent=2))


def _train(
    audit_file: Path,
    run_dir: Path | None,
    seed: int | None,
    *,
    data_dir: Path | None,
    device: str,
    quiet: bool,
    canaries: int = 0,
    non_dp_twin: bool = False,
) -> dict[str, Any]:
    from indpriv.training.canaries import train_with_canaries
    from indpriv.training.config import AuditConfig
    from indpriv.training.dp_sgd import train as train_run

    config = AuditConfig.from_toml(audit_file)
    if non_dp_twin:
        config = replace(config, training=replace(config.training, non_dp_twin=True))
    run_dir = run_dir or Path("runs") / config.name
    check_folder("--run-dir", run_dir)
    check_device(device)
    with progress_bar() as progress:
        options: dict[str, Any] = {
            "seed": seed,
            "progress": progress,
            "device": device,
            "data_dir": data_dir,
        }
        if config.training.filter_epsilon is not None and not canaries:
            options["privacy_filter"] = partial(
                _filter_of, config.training.filter_epsilon, config.training.delta
            )
        try:
            if canaries:
                run = train_with_canaries(config, run_dir, canaries, **options)
            else:
                run = train_run(config, run_dir, **options)
        except KeyboardInterrupt as stopped:
            Console(stderr=True, highlight=False, soft_wrap=True).print(
                escape(str(stopped) or "interrupted")
            )
            raise
    if not quiet:
        claim = (
            "guarantee: worst-case epsilon"
            if seed is None
            else "no guarantee (seeded, reproducible: no privacy); unseeded its worst-case epsilon would be"
        )
        Console(highlight=False, soft_wrap=True).print(
            f"{escape(str(run.run_dir))}: {run.steps} steps, test accuracy {run.test_accuracy:.4f}; {claim} "
            f"{format_epsilon(run.worst_case_epsilon)} at delta {format_delta(config.training.delta)} "
            f"(add/remove one {'example' if config.data.unit_column is None else 'row'}, Poisson sampling, Opacus's RDP accountant)"
            + (
                ""
                if config.data.unit_column is None
                else "; whoever has several rows is promised less: see indpriv audit"
            )
            + (
                ""
                if config.training.filter_epsilon is None
                else f"; the privacy filter caps it at {format_epsilon(config.training.filter_epsilon)}"
            )
        )
    return dict(read_json(run.run_dir / "run.json"))


def _filter_of(
    epsilon: float, delta: float, noise_multiplier: float, sample_rate: float
) -> PrivacyFilter:
    return PrivacyFilter.for_epsilon(
        epsilon, delta=delta, noise_multiplier=noise_multiplier, sample_rate=sample_rate
    )


def _demo_audit_file() -> Path:
    """audits/adult.toml: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).parents[1]
    return next(
        path
        for path in (package.parent / "audits" / DEMO, package / "audits" / DEMO)
        if path.is_file()
    )


def _clear_old_demo(run_dir: Path) -> None:
    """Remove the run of an earlier demo; refuse to remove anything else."""
    record = run_dir / "run.json"
    if not (record.is_file() and read_json(record).get("name") == Path(DEMO).stem):
        raise InputError(
            f"{run_dir} is not the run of an earlier demo; choose another --output-dir"
        )
    shutil.rmtree(run_dir)
