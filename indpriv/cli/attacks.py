"""Commands of attacks: attack runs or measures one, validate compares them with accounts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from indpriv._shown import Console
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import Json, print_json
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
Attacks = Annotated[
    list[str] | None,
    typer.Option(
        "--attack",
        help="Name of an attack, e.g. rmia. Can be given several times.",
        show_default="all whose needs are met",
    ),
]
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
    from indpriv.report.screens import attack_document, print_attack

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
    from indpriv.report.screens import print_reconstruction, reconstruction_document

    if as_json:
        print_json(reconstruction_document(found))
    else:
        print_reconstruction(found, Console())


@attack_app.command("run")
def attack_run(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|SIGNALS",
            help="A finished run directory, or signals of the models of a study.",
        ),
    ],
    attacks: Attacks = None,
    signals: Annotated[
        Path | None,
        typer.Option(help="Signals of reference models of a run.", show_default="attacked without"),
    ] = None,
    epsilon: Epsilon = None,
    unit_rule: UnitRule = "mean",
    as_json: Json = False,
) -> None:
    """Attack a run, or every model of a study with the others as references.

    Example: indpriv attack run runs/adult --attack rmia --signals shadows/adult
    """
    from indpriv.attacks.train_references import is_signals

    if is_signals(target):
        if signals is not None:
            raise InputError(f"{target} holds signals itself; leave out --signals {signals}")
        show_study(target, attacks or (), epsilon, unit_rule, as_json)
        return
    if epsilon is not None or unit_rule != "mean":
        raise InputError("--epsilon and --unit-rule are for a study; leave them out")
    _attack_run(checked_run(target, "attack run"), signals, attacks or (), as_json)


def _attack_run(run_dir: Path, signals: Path | None, attacks: Sequence[str], as_json: bool) -> None:
    from indpriv._plain import to_json
    from indpriv.audit import attributes_of_run, results_of_run
    from indpriv.report.screens import print_results

    results = results_of_run(run_dir, signals, attacks)
    attributes = attributes_of_run(run_dir) if not attacks or "attributes" in attacks else ()
    if as_json:
        shown = ("rates", "attacks", "attack_seed", "unchecked")
        content = {key: getattr(results, key) for key in shown} | {"attribute_attacks": attributes}
        print_json(to_json(content))
    else:
        print_results(results, attributes, Console())


def show_study(
    folder: Path, attacks: Sequence[str], epsilon: Path | None, unit_rule: str, as_json: bool
) -> None:
    """Attack each model of a study, and print what came out."""
    from indpriv._plain import to_json
    from indpriv.analysis.attacks.effects import membership_effects
    from indpriv.attacks.train_references import CONFIDENCE, open_signals
    from indpriv.audit import attack_study, read_audit
    from indpriv.report.screens import print_effects, print_rates

    found = open_signals(folder)
    rates = attack_study(found, attacks, unit_rule=unit_rule)
    table = None if epsilon is None else read_audit(epsilon)[0]
    effects = None if table is None else membership_effects(found[CONFIDENCE], table)
    if as_json:
        print_json({"rates": to_json(rates), "effects": to_json(effects)})
        return
    print_rates(rates, Console())
    if effects is not None:
        print_effects(effects, Console())


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
    from indpriv.report.screens import print_validation, validation_document

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
