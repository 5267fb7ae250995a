"""Commands that train: demo and train."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from indpriv._folders import make_folder
from indpriv.cli.audit import show_audit
from indpriv.cli.options import (
    Json,
    Seed,
    check_folder,
    progress_bar,
)
from indpriv.errors import InputError

if TYPE_CHECKING:
    pass

DEMO = "adult.toml"


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
    from indpriv.audit import audit as audit_run

    check_folder("--output-dir", output_dir)
    run_dir = make_folder(output_dir) / "run"
    if run_dir.exists():
        _remove_old_demo(run_dir)
    with progress_bar() as progress:
        summary = audit_run(run_dir, output_dir, progress=progress)
    show_audit(summary, output_dir, as_json=as_json)


def _remove_old_demo(run_dir: Path) -> None:
    """Remove the run of an earlier demo; refuse to remove anything else."""
    from indpriv._files import read_json
    from indpriv.norm_log.run_files import RUN_JSON

    record = run_dir / RUN_JSON
    if not (record.is_file() and read_json(record).get("name") == Path(DEMO).stem):
        raise InputError(
            f"{run_dir} is not the run of an earlier demo; choose another --output-dir"
        )
    shutil.rmtree(run_dir)
