"""Commands that train: demo and train."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from indpriv._folders import make_folder
from indpriv._shown import Console, escape
from indpriv._storage import location
from indpriv.cli.audit import show_audit
from indpriv.cli.first_contact import checked_audit_file, shipped_audits
from indpriv.cli.options import (
    AuditFile,
    BucketIsPrivate,
    DataDir,
    Device,
    Json,
    Seed,
    check_device,
    check_folder,
    print_json,
    progress_bar,
)
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.accountant import PrivacyFilter
    from indpriv.training.config import AuditConfig
    from indpriv.training.dp_sgd import TrainedRun

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
    _train(shipped_audits() / DEMO, run_dir, seed, quiet=as_json)
    with progress_bar() as progress:
        summary = audit_run(run_dir, output_dir, progress=progress)
    show_audit(summary, output_dir, as_json=as_json)


def train(
    audit_file: AuditFile = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="New directory of the run; with --resume, its own.", show_default="runs/NAME"
        ),
    ] = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    canaries: Annotated[
        int,
        typer.Option(
            help="Number of mislabelled examples to audit the run by; a fair coin decides for each "
            "whether it is trained on."
        ),
    ] = 0,
    non_private_baseline: Annotated[
        bool,
        typer.Option(
            "--non-private-baseline",
            "--non-dp-twin",
            help="Also train the same model without DP, to compare attacks.",
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in --run-dir, which was stopped, after its last checkpoint.",
        ),
    ] = False,
    sign_with: Annotated[
        Path | None,
        typer.Option(
            help="OpenSSH private key (ed25519) of whoever trains: it signs the log, see indpriv "
            "verify --signed-by."
        ),
    ] = None,
    bucket_is_private: BucketIsPrivate = False,
    as_json: Json = False,
) -> None:
    """Train an audit's model with DP-SGD, record the run and save its checkpoints.

    Example: indpriv train audits/digits.toml --run-dir runs/digits
    """
    from indpriv._files import read_json
    from indpriv.norm_log.run_files import RUN_JSON

    run = _train(
        checked_audit_file(audit_file, "train"),
        run_dir,
        seed,
        quiet=as_json,
        data_dir=data_dir,
        device=device,
        canaries=canaries,
        baseline=non_private_baseline,
        resume=resume,
        sign_with=sign_with,
        bucket_is_private=bucket_is_private,
    )
    if as_json:
        print_json(read_json(run.run_dir / RUN_JSON))


def _train(
    audit_file: Path,
    run_dir: Path | None,
    seed: int | None,
    *,
    quiet: bool,
    data_dir: Path | None = None,
    device: str = "cpu",
    canaries: int = 0,
    baseline: bool = False,
    resume: bool = False,
    sign_with: Path | None = None,
    bucket_is_private: bool = False,
) -> TrainedRun:
    from indpriv.training.canaries import train_with_canaries
    from indpriv.training.config import AuditConfig
    from indpriv.training.dp_sgd import train as train_run
    from indpriv.training.federated.train import train_federated

    config = AuditConfig.from_toml(audit_file)
    if baseline:
        config = replace(config, training=replace(config.training, non_private_baseline=True))
    run_dir = location(run_dir or Path("runs") / config.name)
    check_folder("--run-dir", run_dir, or_address=True)
    check_device(device)
    train_on: Callable[..., TrainedRun]
    if config.federated is not None:
        if canaries:
            config.check_central("--canaries")
        train_on = partial(train_federated, resume=resume)
    elif canaries:
        if resume:
            raise InputError(
                "a run with --canaries cannot be resumed: which of them are trained on is not kept"
            )
        train_on = partial(train_with_canaries, n_canaries=canaries)
    else:
        train_on = partial(train_run, privacy_filter=filter_for(config), resume=resume)
    with progress_bar() as progress:
        try:
            run = train_on(
                config,
                run_dir,
                seed=seed,
                progress=progress,
                device=device,
                data_dir=data_dir,
                sign_with=sign_with,
                bucket_is_private=bucket_is_private,
            )
        except KeyboardInterrupt as stopped:
            errors = Console(stderr=True, highlight=False, soft_wrap=True)
            errors.print(escape(str(stopped) or "interrupted"))
            raise
    if not quiet:
        Console(highlight=False, soft_wrap=True).print(escape(_sentence(run, config, seed)))
    return run


def _sentence(run: TrainedRun, config: AuditConfig, seed: int | None) -> str:
    """What `train` prints at the end."""
    from indpriv._files import read_json
    from indpriv._formatting import format_delta, format_epsilon
    from indpriv.norm_log.run_files import RUN_JSON

    record = read_json(run.run_dir / RUN_JSON)
    settings, has_units = config.training, config.data.unit_column is not None
    claim = "guarantee: worst-case epsilon"
    if settings.noise_scale == "largest_norm":
        claim = (
            "no guarantee (the noise depends on the data); had it been fixed beforehand, its "
            "worst-case epsilon would be"
        )
    elif seed is not None:
        claim = (
            "no guarantee (seeded, reproducible: no privacy); unseeded, its worst-case epsilon "
            "would be"
        )
    left = _left_over(run.run_dir) if config.federated is not None else ""
    if config.federated is not None and config.federated.protect == "nobody":
        return (
            f"{run.run_dir}: {run.steps} rounds, test accuracy {run.test_accuracy:.4f}; no privacy"
            f"{left}"
        )
    row = "row" if has_units else "example"
    relation = "" if run.account else _relation(record, run.steps)
    meaning = f"{relation} one {row}, Poisson sampling, Opacus's RDP accountant"
    if settings.median_epsilon is not None:
        meaning += f", including epsilon {format_epsilon(settings.median_epsilon)} for a private "
        meaning += "clipping norm"
    text = (
        f"{run.run_dir}: {run.steps} {'rounds' if run.account else 'steps'}, test accuracy "
        f"{run.test_accuracy:.4f}; {claim} {format_epsilon(run.worst_case_epsilon)} at delta "
        f"{format_delta(settings.delta)} ({run.account or meaning})"
    )
    if has_units:
        text += "; the guarantee for a person with several rows is weaker: see indpriv audit"
    if settings.filter_epsilon is not None:
        text += f"; the privacy filter caps it at {format_epsilon(settings.filter_epsilon)}"
    return text + _lost(record) + left


def _relation(record: Mapping[str, Any], steps: int) -> str:
    """What epsilon allows to differ: zero-out where updates tell the number of examples."""
    from indpriv.analysis.divisor import divisor_of
    from indpriv.epsilon_table import relation_words

    divisor = divisor_of(record["data"]["n_train"], steps, record.get("recorder", {}))
    return relation_words("zero_out" if divisor is not None and divisor.tells_n else "add_remove")


def _lost(record: Mapping[str, Any]) -> str:
    """How many steps of crashes a worst case includes."""
    steps = record["guarantee"].get("lost_steps", 0)
    return f"; it includes {steps:,} steps that crashes may have lost" if steps else ""


def _left_over(run_dir: Path) -> str:
    """How many rows the clients of a federated run did not get."""
    from indpriv._files import read_json
    from indpriv.norm_log.run_files import RUN_JSON

    rows = read_json(run_dir / RUN_JSON)["training"]["rows_left_over"]
    return f"; {rows:,} rows could not be dealt evenly and were not trained on" if rows else ""


def filter_for(config: AuditConfig) -> Callable[[float, float], PrivacyFilter] | None:
    """Function from noise multiplier and sampling rate to the audit's privacy filter, if any."""
    from indpriv.accountant import PrivacyFilter

    of_steps = config.training.with_clipping_norm(1.0)  # the filter does not depend on the norm
    epsilon, delta = of_steps.filter_epsilon, of_steps.delta
    if epsilon is None:
        return None
    return lambda noise_multiplier, sample_rate: PrivacyFilter.for_epsilon(
        epsilon, delta=delta, noise_multiplier=noise_multiplier, sample_rate=sample_rate
    )


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
