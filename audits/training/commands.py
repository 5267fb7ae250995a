"""Commands on audit files and their runs: train, shadow, attack, lint, leak, images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from audits.options import (
    PROGRAM,
    Attacks,
    AuditFile,
    DataDir,
    Device,
    Json,
    Run,
    Seed,
    Strict,
    checked_audit_file,
)
from indpriv._formatting import Console, escape
from indpriv.cli.commands import parameters_of, settings_of
from indpriv.cli.common import (
    check_device,
    check_folder,
    checked_run,
    print_json,
    progress_bar,
    say,
    typed,
)
from indpriv.errors import InputError

if TYPE_CHECKING:
    from audits.training.config import AuditConfig
    from audits.training.dp_sgd import TrainedRun
    from indpriv.accountant import PrivacyFilter
    from indpriv.analysis.lint import TrainingFacts
    from indpriv.leakage import Observation
    from indpriv.leakage.leak import ObservationAt
    from indpriv.recording import AuditSpec

Epsilon = Annotated[
    Path | None,
    typer.Option(
        metavar="AUDIT_DIR",
        help="Audit of a run trained like the study: effects of membership by its epsilons.",
    ),
]
UnitRule = Annotated[
    str,
    typer.Option(help="Score of a person with several rows: mean, max or log_sum of theirs."),
]
StudySignals = Annotated[
    Path | None,
    typer.Option("--signals", help="Signals that shadow wrote.", show_default="shadows/NAME"),
]
Models = Annotated[
    int | None,
    typer.Option(
        help="Number of reference models in all; may be raised later.",
        show_default="references in [attacks], else 4",
    ),
]
Targets = Annotated[
    int | None,
    typer.Option(
        help="Number of training examples whose membership coins decide, in a study.",
        show_default="half of them",
    ),
]
ForRun = Annotated[
    Path | None,
    typer.Option(help="Train references for the attacks on this finished run of the audit."),
]
WithoutDp = Annotated[
    bool,
    typer.Option("--without-dp", help="Train without clipping and noise: a positive control."),
]
Labels = Annotated[
    bool,
    typer.Option("--labels", help="Also take labels of perturbed copies, for label attacks."),
]
Checkpoints = Annotated[
    bool,
    typer.Option("--checkpoints", help="Also take the mean confidence over the checkpoints."),
]


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
            "check --signed-by."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train an audit's model with DP-SGD, record the run and save its checkpoints.

    Example: python -m audits train audits/digits.toml --run-dir runs/digits
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
) -> TrainedRun:
    from audits.training.canaries import train_with_canaries
    from audits.training.config import AuditConfig
    from audits.training.dp_sgd import train as train_run
    from audits.training.federated.train import train_federated

    config = AuditConfig.from_toml(audit_file)
    if baseline:
        config = replace(config, training=replace(config.training, non_private_baseline=True))
    run_dir = run_dir or Path("runs") / config.name
    check_folder("--run-dir", run_dir)
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
    from indpriv.analysis.guarantee import divisor_of
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


def shadow(
    audit_file: AuditFile = None,
    models: Models = None,
    targets: Targets = None,
    for_run: ForRun = None,
    without_dp: WithoutDp = False,
    labels: Labels = False,
    checkpoints: Checkpoints = False,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the signals.", show_default="shadows/NAME"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Make the reference models reproducible.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of processes that train at once.")] = 1,
    data_dir: DataDir = None,
    device: Device = "cpu",
) -> None:
    """Train reference models of an audit on random subsets, and keep their signals only.

    Example: python -m audits shadow audits/adult.toml --for-run runs/adult --models 4

    The same command goes on with an interrupted series. Reference models are deleted: they are
    trained on the data, and the guarantee of the audited run does not cover them.
    """
    from audits.training.config import AuditConfig
    from audits.training.shadows import train_shadows

    config = AuditConfig.from_toml(checked_audit_file(audit_file, "shadow"))
    config.check_central("shadow")
    output_dir = output_dir or Path("shadows") / (config.name + "-without-dp" * without_dp)
    check_folder("--output-dir", output_dir)
    check_device(device)
    with progress_bar() as progress:
        found = train_shadows(
            config,
            output_dir,
            models or config.attacks.references,
            targets=targets,
            for_run=for_run,
            without_dp=without_dp,
            labels=labels or config.attacks.labels,
            checkpoints=checkpoints or config.attacks.checkpoints,
            seed=seed,
            workers=workers,
            progress=progress,
            device=device,
            data_dir=data_dir,
        )
    say(f"{output_dir}: signals of {found.n_models} models on {found.n_examples:,} examples")


def attack(
    audit_file: AuditFile = None,
    attacks: Attacks = None,
    signals: StudySignals = None,
    epsilon: Epsilon = None,
    unit_rule: UnitRule = "mean",
    as_json: Json = False,
) -> None:
    """Attack every model of a study (see shadow) with the others as references.

    Example: python -m audits attack audits/adult.toml --attack rmia --epsilon reports/adult
    """
    from audits.training.config import AuditConfig
    from indpriv.cli.research import show_study

    path = checked_audit_file(audit_file, "attack")
    signals = signals or Path("shadows") / AuditConfig.from_toml(path).name
    if not signals.exists():
        line = f"{typed('shadow', path, PROGRAM)} --models 4"
        raise InputError(f"{signals} does not exist; to train its models, type: {line}")
    show_study(signals, attacks or (), as_json, epsilon=epsilon, unit_rule=unit_rule)


def lint(
    audit_file: AuditFile = None,
    data_dir: DataDir = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Compare an audit file with the literature before training, as indpriv check does a run.

    Example: python -m audits lint audits/adult.toml
    """
    from indpriv.analysis.lint import lint as rules
    from indpriv.cli.read import settings_part
    from indpriv.report.page import print_page

    path = checked_audit_file(audit_file, "lint")
    found = settings_part(path, rules(_facts_of_file(path, data_dir)), strict)
    if as_json:
        print_json(found.content)
    else:
        print_page(found.template, Console(highlight=False), **found.values)
    if found.failed:
        raise typer.Exit(1)


def leak(**options: Any) -> None:
    """Reconstruct training examples of a run of train, or of checkpoints with --spec.

    Example: python -m audits leak runs/digits --attack informed --attack first-layer

    It writes RUN/leakage/SEE-ATTACK.parquet, which indpriv audit shows. Keep it secret.
    """
    from audits.training.leakage import observations, read_run
    from indpriv.cli.research import leak as packaged_leak

    data_dir = options.pop("data_dir")

    def subject(
        folder: Path, seen: Observation, before_noise: bool
    ) -> tuple[AuditSpec, ObservationAt]:
        run_dir = checked_run(folder, "leak", PROGRAM)
        return read_run(run_dir, data_dir), observations(run_dir, seen, before_noise)

    options["settings"] = settings_of("leak", options["settings"])
    packaged_leak(**options, subject=subject)


leak.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.signature(lint, eval_str=True).parameters["data_dir"], *parameters_of("leak")]
)


def images(
    run_dir: Run = None,
    output: Annotated[Path, typer.Argument(metavar="FILE.npy", help="File to write.")] = Path(
        "images.npy"
    ),
    data_dir: DataDir = None,
) -> None:
    """Write the training images of a run of train, for indpriv audit --set show_examples=FILE.npy.

    Example: python -m audits images runs/digits digits.npy
    """
    import numpy as np

    from audits.training.datasets import load_dataset
    from indpriv._files import written_atomically
    from indpriv.norm_log.run_files import RUN_JSON, read_run_json

    run_dir = checked_run(run_dir, "images", PROGRAM)
    data = read_run_json(run_dir).get("data") or {}
    if not isinstance(data.get("dataset"), str):
        raise InputError(
            f"{run_dir / RUN_JSON} names no data set (data.dataset); write its images yourself"
        )
    dataset = load_dataset(data["dataset"], data_dir)
    if dataset.fingerprint() != data.get("fingerprint"):
        raise InputError(
            f"{run_dir} was trained on other data than {data['dataset']} as loaded (canaries, a "
            "subset or another version), so the ids would name other examples"
        )
    with written_atomically(output) as file:
        np.save(file, dataset.train.inputs)


def _facts_of_file(path: Path, data_dir: Path | None) -> TrainingFacts:
    from audits.training.architectures import layer_counts
    from audits.training.config import AuditConfig
    from audits.training.planned import facts_of_plan

    config = AuditConfig.from_toml(path)
    config.check_central("lint")
    n_examples = _n_examples(config, data_dir)
    return facts_of_plan(config.to_dict(), n_examples, layer_counts(config.model))


def _n_examples(config: AuditConfig, data_dir: Path | None) -> int | None:
    """Number of training rows, from the data if a folder is given or they ship with a package."""
    from audits.training.datasets import DATASETS, load_dataset
    from audits.training.datasets.rows import chosen_rows

    kind = DATASETS[config.data.dataset]
    if not config.data.chooses and data_dir is None:
        return kind.n_train
    if kind.from_files and data_dir is None:
        return None
    return len(chosen_rows(load_dataset(config.data.dataset, data_dir), config.data).train)
