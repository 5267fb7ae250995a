"""The command demo, which trains on the data that ship with the package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from indpriv._folders import make_folder
from indpriv.cli.audit import show_audit
from indpriv.cli.options import Json, Seed, check_folder, progress_bar
from indpriv.errors import InputError


def demo(
    output_dir: Annotated[
        Path, typer.Option(help="Directory to write the run and its audit to.")
    ] = Path("reports/adult-demo"),
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Train on UCI Adult with DP-SGD, recording every step, and audit the run.

    Example: indpriv demo --output-dir reports/adult-demo
    """
    from indpriv._checks import check_positive_int
    from indpriv.audit import audit as audit_run
    from indpriv.demo.train import train

    check_folder("--output-dir", output_dir)
    if seed is not None:
        check_positive_int("seed", seed, minimum=0)
    run_dir = make_folder(output_dir) / "run"
    if run_dir.exists():
        _remove_old_demo(run_dir)
    with progress_bar() as progress:
        train(run_dir, seed=seed, progress=progress)
        summary = audit_run(run_dir, output_dir, progress=progress)
    show_audit(summary, output_dir, as_json=as_json)


def _remove_old_demo(run_dir: Path) -> None:
    """Remove the run of an earlier demo; refuse to remove anything else."""
    from indpriv.demo.train import RUN_INFO
    from indpriv.norm_log.schema import read_run_json

    if read_run_json(run_dir).get("made_by") != RUN_INFO["made_by"]:
        raise InputError(
            f"{run_dir} is not the run of an earlier demo, so it is not replaced; choose another "
            "--output-dir, or remove it yourself"
        )
    shutil.rmtree(run_dir)
