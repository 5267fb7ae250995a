"""Commands to begin with: demo, audit, import, and replay, which audit does on checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indpriv._shown import Console, escape
from indpriv.cli.commands import command, keys_of, settings_of
from indpriv.cli.common import (
    check_device,
    check_folder,
    errors,
    print_json,
    progress_bar,
    say,
)
from indpriv.cli.first_contact import checked_run
from indpriv.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from indpriv.analysis.summary import Audit


@command("demo")
def demo(
    output_dir: Path = Path("reports/adult-demo"),
    seed: int | None = None,
    as_json: bool = False,
) -> None:
    """Train on UCI Adult with DP-SGD, recording every step, and audit the run."""
    from indpriv._checks import check_positive_int
    from indpriv._folders import make_folder
    from indpriv.audit import audit as audit_run
    from indpriv.demo.train import RUN_INFO, train
    from indpriv.norm_log.schema import read_run_json

    check_folder("--output-dir", output_dir)
    if seed is not None:
        check_positive_int("seed", seed, minimum=0)
    run_dir = make_folder(output_dir) / "run"
    if run_dir.exists():
        if read_run_json(run_dir).get("made_by") != RUN_INFO["made_by"]:
            raise InputError(
                f"{run_dir} is not the run of an earlier demo, so it is not replaced; choose "
                "another --output-dir, or remove it yourself"
            )
        shutil.rmtree(run_dir)
    with progress_bar() as progress:
        train(run_dir, seed=seed, progress=progress)
        summary = audit_run(run_dir, output_dir, progress=progress)
    _show_audit(summary, output_dir, as_json)


@command("audit")
def audit(
    path: Path | None = None,
    output_dir: Path | None = None,
    by: list[str] | None = None,
    delta: float | None = None,
    unit_column: str | None = None,
    participation: str | None = None,
    signals: Path | None = None,
    spec: str | None = None,
    since: Path | None = None,
    set_: list[str] | None = None,
    verbose: bool = False,
    as_json: bool = False,
) -> None:
    """Account, analyse and attack a run; write its tables, audit.json, audit.md and report.html."""
    from indpriv._folders import make_folder
    from indpriv._storage import location
    from indpriv.analysis.summary import Audit
    from indpriv.audit import audit as audit_run
    from indpriv.audit import read_summary

    settings = settings_of("audit", set_)
    of_replay = {key: settings.pop(key) for key in keys_of("replay") if key in settings}
    if spec is None:
        if of_replay:
            names = ", ".join(of_replay)
            raise InputError(f"--set {names}: only for a folder of checkpoints with --spec")
        path = checked_run(path, "audit")
        _say_if_still_written(path)
    elif path is None:
        raise InputError(f"pass the folder of checkpoints: indpriv audit FOLDER --spec {spec}")
    output_dir = _default_output(path) if output_dir is None else location(output_dir)
    check_folder("--output-dir", output_dir, or_address=True)
    if spec is not None:
        path = _replayed(
            path, spec, make_folder(output_dir) / "replay", of_replay | {"delta": delta}
        )
    images = settings.pop("show_examples", None)
    earlier = None if since is None else Audit.from_json(read_summary(since))
    with progress_bar() as progress:
        summary = audit_run(
            path,
            output_dir,
            by=by or [],
            delta=delta,
            unit_column=unit_column,
            participation=participation,
            signals=signals,
            images=None if images is None else _images(images),
            since=earlier,
            progress=progress,
            **settings,
        )
    _show_audit(summary, output_dir, as_json, verbose, earlier)


@command("replay")
def replay(
    checkpoints: Path,
    spec: str,
    output_dir: Path,
    delta: float | None = None,
    set_: list[str] | None = None,
) -> None:
    """Compute the norms of checkpoints and write a run directory; audit does this by itself."""
    check_folder("--output-dir", output_dir)
    _replayed(checkpoints, spec, output_dir, settings_of("replay", set_) | {"delta": delta})
    say(f"{output_dir}: a run directory; type: indpriv audit {output_dir}")


def _replayed(checkpoints: Path, spec: str, run_dir: Path, settings: dict[str, Any]) -> Path:
    """The run directory that the norms of checkpoints were written to."""
    from indpriv.norm_log.run_files import holds_log
    from indpriv.recording import StepOptions
    from indpriv.recording import replay as replay_checkpoints

    if holds_log(checkpoints):
        raise InputError(
            f"{checkpoints} is a recorded run: audit it without --spec, or pass its checkpoints"
        )
    computing = {key: settings.pop(key) for key in ("batch_size", "processes") if key in settings}
    device = settings.pop("device", "cpu")
    check_device(device)
    with progress_bar() as progress:
        replay_checkpoints(
            checkpoints,
            spec,
            run_dir,
            options=StepOptions(**settings),
            device=device,
            progress=progress,
            tell=lambda text: errors().print(escape(text)),
            **computing,
        )
    return run_dir


@command("import")
def import_norms(
    norms: Path,
    run_json: Path,
    output_dir: Path,
    rounding: float = 0.01,
    as_json: bool = False,
) -> None:
    """Check gradient norms of another trainer (JAX, TF, ...), and write a run directory of them."""
    from indpriv.norm_log.convert import convert
    from indpriv.norm_log.norm_log import NormLog

    check_folder("--output-dir", output_dir)
    with progress_bar() as progress:
        convert(norms, run_json, output_dir, rounding=rounding, progress=progress)
    log = NormLog.open(output_dir)
    if as_json:
        facts = {"run_dir": str(output_dir), "examples": log.n_examples, "records": log.n_records}
        print_json({**facts, "steps": log.total_steps})
        return
    of = f"{log.n_records} records of {log.n_examples} examples, {log.total_steps} steps"
    say(f"{output_dir}: {of}")


def _show_audit(
    summary: Audit,
    output_dir: Path,
    as_json: bool,
    verbose: bool = False,
    since: Audit | None = None,
) -> None:
    """Print the first screen of an audit, or its JSON alone."""
    from indpriv.report.report import print_audit

    if as_json:
        print_json(summary.to_json())
        return
    print_audit(summary, Console(), verbose=verbose, since=since)
    say(f"\n{output_dir / 'report.html'}")


def _images(path: Path) -> NDArray[np.float32]:
    import numpy as np

    try:
        images: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, TypeError):
        images = np.empty(0, object)
    if not isinstance(images, np.ndarray) or images.dtype.kind not in "biuf":
        raise InputError(
            f"--set show_examples={path} is no .npy file of real numbers; write it with "
            "numpy.save(path, images), of shape (examples, channels, height, width)"
        )
    return images


def _say_if_still_written(run_dir: Path) -> None:
    from indpriv._files import writer_of

    writer = writer_of(run_dir)
    if writer is not None:
        errors().print(
            f"[yellow]warning:[/] process {writer} is still writing {escape(str(run_dir))}: this "
            "audit covers the steps so far; when training has ended, type the same command again"
        )


def _default_output(path: Path) -> Path:
    """RUN/audit; in the working folder, if that or RUN is somebody else's or cannot be written."""
    from indpriv._files import first_at
    from indpriv._folders import named_by_person
    from indpriv._storage import is_remote
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
    errors().print(escape(text))
    return outside
