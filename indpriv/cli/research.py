"""Commands for research: attack, leak, compose and advise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indpriv._checks import check_choice, check_positive_int
from indpriv._facts import refused
from indpriv._files import write_atomically
from indpriv._formatting import Console, escape
from indpriv._plain import to_json
from indpriv.accountant import Tuning
from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.analysis.attacks.effects import membership_effects
from indpriv.analysis.attacks.rates import achieved
from indpriv.analysis.reconstruction import reconstructions_of
from indpriv.analysis.summary import SENSITIVE
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import CONFIDENCE, is_signals, open_signals
from indpriv.attacks import ATTACKS
from indpriv.audit import attacks as of_runs
from indpriv.audit import read_audit
from indpriv.audit.accounts import advise_on_run, compose_runs, write_composition
from indpriv.cli import common
from indpriv.cli.commands import errors
from indpriv.errors import InputError
from indpriv.norm_log.run_files import LEAKAGE
from indpriv.report import report
from indpriv.report.figures import picture_pairs
from indpriv.report.page import print_page, write_page

if TYPE_CHECKING:
    from indpriv.leakage import Observation
    from indpriv.leakage.leak import ObservationAt
    from indpriv.recording import AuditSpec

    SubjectOf = Callable[[Path, Observation, bool], tuple[AuditSpec, ObservationAt]]

ADVICE = "advice"  # of the files
_MODELS = 16  # references that are trained unless it is said
_OF_ATTACK = {  # what is attacked -> its settings
    "a file of scores": {"delta", "fair_coins", "adversary", "seed"},
    "a study": {"epsilon", "unit_rule", "--attack"},
    "a run": {"--signals", "--attack", "--references", "baseline", "--models", "workers", "delta"},
}


def attack(
    path: Path | None,
    attacks: list[str],
    signals: Path | None,
    references: str | None,
    models: int | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Attack a run, or every model of a study with the others as references; or measure scores."""
    options: dict[str, Any] = {"--attack": attacks or None, "--signals": signals}
    options |= {"--references": references, "--models": models}
    given = {*settings, *(name for name, value in options.items() if value is not None)}
    study = path is not None and is_signals(path)
    kind = "a study" if study else "a file of scores" if path and path.is_file() else "a run"
    if wrong := sorted(given - _OF_ATTACK[kind]):
        raise InputError(f"{wrong[0]} is not for {kind}, which {path} is; leave it out")
    if path is not None and study:
        show_study(path, attacks, as_json, **settings)
    elif path is not None and path.is_file():
        _measure(path, as_json, **settings)
    else:
        run_dir = common.checked_run(path, "attack")
        guarantee = of_runs.guarantee_of_run(run_dir, settings.pop("delta", None))
        _train_references(run_dir, references, models, attacks, signals, **settings)
        known = of_runs.known_of_run(run_dir, signals)
        results = of_runs.results_of_run(known, attacks, guarantee)
        shown = ("rates", "attacks", "fitted", "attack_seed", "unchecked", "attribute_attacks")
        content = {key: getattr(results, key) for key in shown}
        content |= {} if attacks else of_runs.model_itself(known, run_dir, guarantee[1])
        values: dict[str, Any] = {"lacking": (), "last_iterate": None, "accounted": guarantee[0]}
        values |= {"m": report.attack_values(results), **content}
        common.show_result(as_json, to_json(content), report.print_sensitive, "attacks", **values)


def _train_references(
    run_dir: Path,
    references: str | None,
    models: int | None,
    attacks: Sequence[str],
    output: Path | None,
    workers: int | None = None,
    baseline: str | None = None,
) -> None:
    if references is None and (models is not None or workers is not None) and baseline is None:
        name = "--models" if models is not None else "--set workers"
        raise InputError(f"{name} is for --references FILE.py:fit, which trains; pass both")
    if references is baseline is None:
        return
    models = _MODELS if models is None else models
    for name in attacks:
        least = ATTACKS[check_choice("attack", name, ATTACKS)].references
        if least > models:
            raise refused("refusal.signals", "few_models", attack=name, least=least, n=models)
    from indpriv.recording.references import references_for_run

    with common.progress_bar() as progress:
        more: dict[str, Any] = {"progress": progress, "workers": 1 if workers is None else workers}
        more["tell"] = lambda text: errors().print(escape(text))
        for private, fit in ((True, references), (False, baseline)):
            if fit is not None:
                place = output if private else None
                references_for_run(run_dir, fit, models, baseline=not private, output=place, **more)


def _measure(
    path: Path,
    as_json: bool,
    *,
    delta: float = 1e-5,
    fair_coins: bool = False,
    adversary: str | None = None,
    seed: int = 0,
) -> None:
    found = AttackScores.from_file(path)
    fair_coins, adversary = fair_coins or found.fair_coins, adversary or found.adversary
    found = replace(found, fair_coins=fair_coins, adversary=adversary)
    if "identified" in found.details:
        _show_reconstruction([found], as_json)
        return
    measures = measure_attack(found, delta=delta, seed=seed)
    common.show_result(as_json, report.attack_document(measures), report.print_attack, measures)


def show_study(
    folder: Path,
    attacks: Sequence[str],
    as_json: bool,
    *,
    epsilon: Path | None = None,
    unit_rule: str = "mean",
) -> None:
    """Attack each model of a study, and print what came out.

    epsilon: audit directory of a run trained like the study.
    """
    found = open_signals(folder)
    rates = of_runs.attack_study(found, attacks, unit_rule=unit_rule)
    effects = None
    if epsilon is not None:
        table, examples = read_audit(epsilon)
        effects = membership_effects(found[CONFIDENCE], table, examples=examples)
    content = {"rates": to_json(rates), "effects": to_json(effects)}
    common.show_result(as_json, content, report.print_sensitive, "study", rows=achieved(rates))
    if effects is not None and not as_json:
        print_page("effects", Console(), found=effects)


def _show_reconstruction(scores: Sequence[AttackScores], as_json: bool) -> None:
    values = {"reconstruction": reconstructions_of(scores)}
    content = {"sensitive": SENSITIVE, **to_json(values)}
    common.show_result(as_json, content, report.print_sensitive, "reconstructions", **values)


def leak(
    folder: Path,
    see: str,
    attacks: list[str],
    before_noise: bool,
    spec: str | None,
    settings: dict[str, Any],
    as_json: bool,
    subject: SubjectOf | None = None,
) -> None:
    """Reconstruct training examples from gradients, beside the most that any attack can reach.

    subject: what rebuilds a run that needs no spec.
    """
    from indpriv.leakage import INVERSIONS, Observation
    from indpriv.leakage.inversion import OF
    from indpriv.leakage.leak import LAST, leak_run, write_scores

    name, pictures = settings.pop("name", None), settings.pop("pictures", 0)
    of_run = settings.keys() & {"examples", "knows_labels", "step_of"}
    more: dict[str, Any] = {key: settings.pop(key) for key in of_run}
    training = {
        key: settings.pop(key, None) for key in ("max_grad_norm", "noise_multiplier", "clipping")
    }
    at, forgets = settings.pop("at", f"0,{LAST}"), settings.pop("forgets_clipping", False)
    more["at"] = tuple(int(part) if part.isdigit() else part for part in at.split(","))
    attacks = attacks or ["informed"]
    inversions = {one: INVERSIONS[check_choice("attack", one, INVERSIONS)]() for one in attacks}
    if forgets and "lbfgs" in inversions:
        inversions["lbfgs"] = INVERSIONS["lbfgs"](**{"knows_clipping": False})
    seen = Observation(check_choice("see", see, OF), **settings)
    _check_leak(folder, attacks, name, pictures)
    if spec is not None:
        rebuilt = _with_spec(spec, seen, before_noise, **training)
    elif said := [key for key, value in training.items() if value is not None]:
        raise InputError(f"--set {said[0]}: the run has its own; leave it out, or pass --spec")
    elif subject is None:
        command = common.typed("leak", folder, "python -m audits")
        raise refused("refusal.commands", "no_spec", typed=command)
    else:
        rebuilt = subject(folder, seen, before_noise)
    names, found = {attack: name or f"{see}-{attack}" for attack in attacks}, []
    for stem in names.values():
        if (path := folder / LEAKAGE / f"{stem}.parquet").exists():
            raise InputError(f"{path} exists; choose another name with --set name=NAME")
    with common.progress_bar() as progress:
        more |= {"progress": progress, "pictures": pictures}
        for attack, stem in names.items():
            model_and_data, observation_at = rebuilt
            scores, pairs = leak_run(
                model_and_data, folder, observation_at, inversions[attack], **more
            )
            write_scores(scores, folder / LEAKAGE, stem)
            if pictures:
                drawn = picture_pairs(pairs.numpy())
                write_atomically(folder / LEAKAGE / f"{stem}.png", drawn)
            found.append(scores)
    _show_reconstruction(found, as_json)


def _with_spec(
    spec: str,
    seen: Observation,
    before_noise: bool,
    max_grad_norm: float | None,
    noise_multiplier: float | None,
    clipping: str | None,
) -> tuple[AuditSpec, ObservationAt]:
    """What rebuilds model and data, and what is read before each step."""
    from indpriv.leakage.leak import observation
    from indpriv.recording.checkpoints.replay import load_spec

    law = (max_grad_norm, noise_multiplier or 0.0, clipping or "flat")
    protected = observation(seen, before_noise, *law)
    if not before_noise and not protected.noise_multiplier:
        raise refused("refusal.commands", "no_noise")
    return load_spec(spec), lambda _: protected


def _check_leak(folder: Path, attacks: Sequence[str], name: str | None, pictures: int) -> None:
    from indpriv.release.ledger import SHAREABLE  # its package imports OpenDP

    if SHAREABLE in folder.resolve().parts:
        said = {"folder": folder, "shareable": SHAREABLE, "leakage": LEAKAGE}
        raise refused("refusal.commands", "shareable", **said)
    if name is not None and (len(attacks) > 1 or Path(name).name != name):
        raise InputError(f"--set name={name} is the name of one file of one attack")
    check_positive_int("--set pictures", pictures, minimum=0, maximum=12)


def compose(
    runs: list[Path], by: str, output_dir: Path | None, settings: dict[str, Any], as_json: bool
) -> None:
    """Account for several runs on the same people together, and for the price of tuning."""
    if len(runs) < 2:
        raise InputError("indpriv compose needs two runs or more; for one, type: indpriv audit RUN")
    mean, shape = settings.pop("tuning_mean", None), settings.pop("tuning_shape", 1.0)
    if mean is None and shape != 1:
        raise refused("refusal.commands", "tuning", shape=shape)
    tuning = None if mean is None else Tuning(mean, shape)
    for run in runs:
        common.checked_run(run, "compose")
    if output_dir is not None:
        common.check_folder("--output-dir", output_dir)
    with common.progress_bar() as progress:
        found = compose_runs(runs, by=by, tuning=tuning, progress=progress, **settings)
    if output_dir is not None:
        write_composition(found, output_dir)
    common.show_result(as_json, found.to_json(), report.print_sensitive, "composition", found=found)


def advise(
    run_dir: Path,
    target: float,
    by: list[str],
    output_dir: Path | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Say how much noise or which clipping norm would bring each group to a target epsilon."""
    run_dir = common.checked_run(run_dir, "advise")
    folder = output_dir or run_dir / ADVICE
    common.check_folder("--output-dir", folder)
    with common.progress_bar() as progress:
        found = advise_on_run(run_dir, target=target, by=by, progress=progress, **settings)
    page = report.advice_page(found)
    write_page(page, folder, ADVICE, found.to_json())
    common.show_result(as_json, found.to_json(), report.print_whole, page)
    if not as_json:
        common.say(f"\n{folder / f'{ADVICE}.html'}")
