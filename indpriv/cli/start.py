"""Commands to begin with: demo, audit, import, and replay, which audit does on checkpoints."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from indpriv._checks import check_positive_int
from indpriv._facts import refused, text
from indpriv._files import SUFFIXES, writer_of
from indpriv._folders import make_folder
from indpriv._formatting import escape
from indpriv._storage import location
from indpriv.analysis.summary import Audit
from indpriv.audit import audit as audit_run
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import default_output, in_progress
from indpriv.cli import common
from indpriv.cli.commands import errors, keys_of
from indpriv.errors import InputError, check_installed
from indpriv.norm_log.convert import convert
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import holds_log, read_run_json
from indpriv.report.report import print_audit

if TYPE_CHECKING:
    from numpy.typing import NDArray


def demo(output_dir: Path, seed: int | None, as_json: bool) -> None:
    """Train on UCI Adult with DP-SGD, recording every step, and audit the run."""
    check_installed("Demo runs", "opacus", "torch", "opacus")
    from indpriv.demo.train import RUN_INFO, train

    common.check_folder("--output-dir", output_dir)
    if seed is not None:
        check_positive_int("seed", seed, minimum=0)
    run_dir = make_folder(output_dir) / "run"
    if run_dir.exists():
        if read_run_json(run_dir).get("made_by") != RUN_INFO["made_by"]:
            raise refused("refusal.commands", "no_demo", run_dir=run_dir)
        shutil.rmtree(run_dir)
    with common.progress_bar() as progress:
        train(run_dir, seed=seed, progress=progress)
        summary = audit_run(run_dir, output_dir, progress=progress)
    _show_audit(summary, output_dir, as_json)


def audit(
    path: Path | None,
    output_dir: Path | None,
    spec: str | None,
    since: Path | None,
    settings: dict[str, Any],
    verbose: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Account, analyse and attack a run; options: as `indpriv.audit.audit` has them."""
    of_replay = {key: settings.pop(key) for key in keys_of("replay") if key in settings}
    if spec is None:
        if path is not None and _holds_checkpoints(path):  # one message with all that is missing
            _replayed(path, None, path, of_replay | {"delta": options["delta"]})
        if of_replay:
            names = ", ".join(of_replay)
            raise InputError(f"--set {names}: only for a folder of checkpoints with --spec")
        path = common.checked_run(path, "audit")
        if (writer := writer_of(path)) is not None:
            said = text("sentence.warnings", "writing", writer=writer, path=escape(str(path)))
            errors().print(f"[yellow]warning:[/] {said}")
    elif path is None:
        raise InputError(f"pass the folder of checkpoints: indpriv audit FOLDER --spec {spec}")
    output_dir, said = (location(output_dir), "") if output_dir else default_output(path)
    if said:
        errors().print(escape(said))
    common.check_folder("--output-dir", output_dir)
    if spec is not None:
        of_replay["delta"] = options["delta"]
        with in_progress(output_dir):  # a try that fails leaves no folder that the next one refuses
            path = _replayed(path, spec, output_dir / "replay", of_replay)
    images = settings.pop("show_examples", None)
    earlier = None if since is None else Audit.from_json(read_summary(since))
    with common.progress_bar() as progress:
        summary = audit_run(
            path,
            output_dir,
            images=None if images is None else _images(images),
            since=earlier,
            progress=progress,
            **options,
            **settings,
        )
    _show_audit(summary, output_dir, as_json, verbose, earlier)


def replay(
    checkpoints: Path, spec: str, output_dir: Path, delta: float | None, settings: dict[str, Any]
) -> None:
    """Compute the norms of checkpoints and write a run directory; audit does this by itself."""
    _replayed(checkpoints, spec, output_dir, settings | {"delta": delta})
    common.say(f"{output_dir}: a run directory; type: indpriv audit {output_dir}")


def _holds_checkpoints(folder: Path) -> bool:
    if not folder.is_dir() or holds_log(folder):
        return False
    if find_spec("torch") is None:  # names tell; what reads them says what to install
        named = (*folder.glob("*"), *folder.glob("*/model.safetensors"))
        return any(path.suffix in SUFFIXES for path in named)
    from indpriv.recording.checkpoints.safe_files import is_checkpoint

    return any(map(is_checkpoint, folder.iterdir()))


def _replayed(checkpoints: Path, spec: str | None, run_dir: Path, settings: dict[str, Any]) -> Path:
    """The run directory that the norms of checkpoints were written to."""
    from indpriv.recording import StepOptions
    from indpriv.recording import replay as replay_checkpoints

    if holds_log(checkpoints):
        raise refused("refusal.commands", "recorded", checkpoints=checkpoints)
    device, batch_size = settings.pop("device", "cpu"), settings.pop("batch_size", "auto")
    common.check_device(device)
    with common.progress_bar() as progress:
        replay_checkpoints(
            checkpoints,
            spec,
            run_dir,
            options=StepOptions(**settings),
            device=device,
            batch_size=batch_size,
            progress=progress,
            tell=lambda text: errors().print(escape(text)),
        )
    return run_dir


def import_norms(
    norms: Path, run_json: Path, output_dir: Path, rounding: float, as_json: bool
) -> None:
    """Check gradient norms of another trainer (JAX, TF, ...), and write a run directory of them."""
    with common.progress_bar() as progress:
        convert(norms, run_json, output_dir, rounding=rounding, progress=progress)
    log = NormLog.open(output_dir)
    if as_json:
        facts = {"run_dir": str(output_dir), "examples": log.n_examples, "records": log.n_records}
        common.print_json({**facts, "steps": log.total_steps})
        return
    of = f"{log.n_records} records of {log.n_examples} examples, {log.total_steps} steps"
    common.say(f"{output_dir}: {of}")


def _show_audit(
    summary: Audit,
    output_dir: Path,
    as_json: bool,
    verbose: bool = False,
    since: Audit | None = None,
) -> None:
    page = str(output_dir / "report.html")
    shown: dict[str, Any] = {"report": page, "verbose": verbose, "since": since}
    common.show_result(as_json, summary.to_json(), print_audit, summary, **shown)
    if verbose and not as_json:
        common.say(f"\n{page}")


def _images(path: Path) -> NDArray[np.float32]:
    try:
        images: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, TypeError):
        images = np.empty(0, object)
    if not isinstance(images, np.ndarray) or images.dtype.kind not in "biuf":
        raise refused("refusal.commands", "pictures", path=path)
    return images
