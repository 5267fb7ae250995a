"""Commands of attacks: shadow trains references, attack runs or measures one, validate compares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from indpriv._shown import Console, escape
from indpriv.cli.first_contact import checked_audit_file, checked_run
from indpriv.cli.options import (
    DataDir,
    Json,
    check_device,
    check_folder,
    print_json,
    progress_bar,
    say,
)
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.analysis.reconstruction import Reconstruction

Scores = Annotated[
    Path | None,
    typer.Option(
        help="CSV or Parquet file with the columns score (higher means member), member and, "
        "optionally, group, example_id and model."
    ),
]
Delta = Annotated[
    float, typer.Option(help="Delta of the epsilon for which a lower bound is computed.")
]
FairCoins = Annotated[
    bool,
    typer.Option("--fair-coins", help="An independent fair coin decided each membership."),
]
Adversary = Annotated[
    str | None,
    typer.Option(
        help="What the attacker saw: final_model, checkpoints, updates, full or gradients.",
        show_default="as the file says, else final_model",
    ),
]
AttackSeed = Annotated[
    int,
    typer.Option(
        help="Seed that orders ties and chooses scores to leave out. No effect on training."
    ),
]
AuditFile = Annotated[
    Path, typer.Argument(metavar="AUDIT.toml", help="Audit file, e.g. audits/adult.toml.")
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

attack_app = typer.Typer(invoke_without_command=True)


@attack_app.callback()
def attack(
    context: typer.Context,
    scores: Scores = None,
    delta: Delta = 1e-5,
    fair_coins: FairCoins = False,
    adversary: Adversary = None,
    seed: AttackSeed = 0,
    as_json: Json = False,
) -> None:
    """Measure the scores of an attack: AUC, low false-positive rates, lower bound on epsilon.

    Example: indpriv attack --scores runs/adult/canaries.parquet

    Run an attack: indpriv attack run runs/adult --attack rmia --signals shadows/adult
    """
    if context.invoked_subcommand is not None:
        return
    if scores is None:
        raise InputError("pass the scores of an attack, --scores FILE, or run one: attack run RUN")
    from dataclasses import replace

    from indpriv.analysis.attacks.rates import measure_attack
    from indpriv.analysis.reconstruction import reconstructions_of
    from indpriv.attack_scores import AttackScores
    from indpriv.report.screens.attack import attack_document, print_attack

    found = AttackScores.from_file(scores)
    found = replace(
        found,
        fair_coins=fair_coins or found.fair_coins,
        adversary=adversary or found.adversary,
    )
    if "identified" in found.details:
        show_reconstruction(reconstructions_of([found]), as_json)
        return
    measures = measure_attack(found, delta=delta, seed=seed)
    if as_json:
        print_json(attack_document(measures))
    else:
        print_attack(measures, Console())


def show_reconstruction(found: Sequence[Reconstruction], as_json: bool) -> None:
    """Print what was reconstructed."""
    from indpriv.report.screens.reconstruction import print_reconstruction, reconstruction_document

    if as_json:
        print_json(reconstruction_document(found))
    else:
        print_reconstruction(found, Console())


@attack_app.command("run")
def attack_run(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="AUDIT.toml|RUN", help="Audit file of a study, or a finished run directory."
        ),
    ],
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            help="Name of an attack, e.g. rmia. Can be given several times.",
            show_default="all whose needs are met",
        ),
    ] = None,
    signals: Annotated[
        Path | None,
        typer.Option(
            help="Signals of reference models, from indpriv shadow.",
            show_default="shadows/NAME for an audit file; a run is attacked without",
        ),
    ] = None,
    epsilon: Annotated[
        Path | None,
        typer.Option(
            metavar="AUDIT_DIR",
            help="Audit of a run of the same audit file: effects of membership by its epsilons.",
        ),
    ] = None,
    unit_rule: Annotated[
        str,
        typer.Option(help="Score of a person with several rows: mean, max or log_sum of theirs."),
    ] = "mean",
    as_json: Json = False,
) -> None:
    """Attack a run, or every model of a study with the others as references.

    Example: indpriv attack run audits/adult.toml --attack rmia --epsilon reports/adult
    """
    if target.suffix != ".toml":
        checked_run(target, "attack run")
        _attack_run(target, signals, attacks or (), as_json)
    else:
        _attack_study(target, signals, attacks or (), epsilon, unit_rule, as_json)


def _attack_run(run_dir: Path, signals: Path | None, attacks: Sequence[str], as_json: bool) -> None:
    from dataclasses import replace

    from indpriv._plain import to_json
    from indpriv.audit import attributes_of_run, results_of_run
    from indpriv.report.screens.attack_run import print_results

    results = results_of_run(run_dir, signals, attacks)
    attributes = attributes_of_run(run_dir) if not attacks or "attributes" in attacks else ()
    if as_json:
        print_json(to_json(replace(results, attributes=attributes)))
    else:
        print_results(results, attributes, Console())


def _attack_study(
    audit_file: Path,
    signals: Path | None,
    attacks: Sequence[str],
    epsilon: Path | None,
    unit_rule: str,
    as_json: bool,
) -> None:
    from indpriv._plain import to_json
    from indpriv.analysis.attacks.effects import membership_effects
    from indpriv.attacks.train_references import CONFIDENCE, open_signals
    from indpriv.audit import attack_study, read_audit
    from indpriv.report.screens.attack_run import print_effects, print_rates
    from indpriv.training.config import AuditConfig

    config = AuditConfig.from_toml(checked_audit_file(audit_file, "attack run"))
    found = open_signals(signals or Path("shadows") / config.name)
    rates = attack_study(found, attacks, unit_rule=unit_rule)
    table = None if epsilon is None else read_audit(epsilon)[0]
    effects = None if table is None else membership_effects(found[CONFIDENCE], table)
    if as_json:
        print_json({"rates": to_json(rates), "effects": to_json(effects)})
        return
    print_rates(rates, Console())
    if effects is not None:
        print_effects(effects, Console())


def shadow(
    audit_file: AuditFile,
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
    device: Annotated[str, typer.Option(help="Device to train on, e.g. cpu or cuda.")] = "cpu",
) -> None:
    """Train reference models of an audit on random subsets, and keep their signals only.

    Example: indpriv shadow audits/adult.toml --for-run runs/adult --models 4

    The same command goes on with an interrupted series. Reference models are deleted: they are
    trained on the data, and the guarantee of the audited run does not cover them.
    """
    from indpriv.training.config import AuditConfig
    from indpriv.training.shadows import train_shadows

    config = AuditConfig.from_toml(checked_audit_file(audit_file, "shadow"))
    config.check_central("indpriv shadow")
    output_dir = output_dir or Path("shadows") / (config.name + "-without-dp" * without_dp)
    check_folder("--output-dir", output_dir)
    check_device(device)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
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
            tell=lambda text: errors.print(escape(text)),
            device=device,
            data_dir=data_dir,
        )
    say(f"{output_dir}: signals of {found.n_models} models on {found.n_examples:,} examples")


def validate(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Runs recorded with attack=WhiteBox(...), two or more, or GradientCanaries(...).",
        ),
    ],
    delta: Delta = 1e-5,
    as_json: Json = False,
) -> None:
    """Compare accounts with attacks that could contradict them; exit code 1 if one does.

    Example: indpriv validate runs/mine
    """
    from indpriv.analysis.attacks.account_test import agree, identities
    from indpriv.audit.validation import canaries_of_run, evidence_of_runs
    from indpriv.norm_log.run_files import GRADIENT_CANARIES
    from indpriv.report.screens.validation import print_validation, validation_document

    with_canaries = [run for run in run_dirs if (run / GRADIENT_CANARIES).is_file()]
    others = [run for run in run_dirs if run not in with_canaries]
    found = identities(evidence_of_runs(others)) if others else ()
    canaries = {str(run): canaries_of_run(run, delta=delta) for run in with_canaries}
    if as_json:
        print_json(validation_document(found, canaries))
    else:
        print_validation(found, canaries, Console())
    if not all(of.agree for of in canaries.values()) or not agree(found):
        raise typer.Exit(1)
