"""leak: reconstruct training examples from gradients that someone reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from indpriv.cli.attacks import show_reconstruction
from indpriv.cli.first_contact import typed
from indpriv.cli.options import Json, StepOf, progress_bar
from indpriv.errors import InputError

if TYPE_CHECKING:
    import torch

    from indpriv.leakage.plan import LeakagePlan, ObservationAt
    from indpriv.recording import AuditSpec

    SubjectOf = Callable[[Path, LeakagePlan], tuple[AuditSpec, ObservationAt]]

_MOST_PICTURES = 12


Folder = Annotated[
    Path,
    typer.Argument(metavar="CHECKPOINTS", help="Folder of checkpoints, e.g. of a run directory."),
]
See = Annotated[
    str, typer.Option(help="What is read: the gradient of a row, of a batch, or an update.")
]
Attacks = Annotated[
    list[str] | None,
    typer.Option(
        "--attack",
        help="informed, first-layer, lbfgs or adam. Can be given several times.",
        show_default="informed",
    ),
]
Examples = Annotated[int, typer.Option(help="Number of training examples, drawn at random.")]
At = Annotated[str, typer.Option(help="Numbers of updates of the checkpoints, or last.")]
BeforeNoise = Annotated[
    bool, typer.Option("--before-noise/--after-noise", help="Read gradients without noise.")
]
BatchSize = Annotated[int, typer.Option(help="Examples in a batch or an update.")]
LocalSteps = Annotated[int, typer.Option(help="Steps of SGD in an update.")]
LearningRate = Annotated[float, typer.Option(help="Learning rate of the local SGD steps.")]
Share = Annotated[float, typer.Option(help="Share of coordinates that is sent, the largest first.")]
KnowsLabels = Annotated[bool, typer.Option("--knows-labels", help="The attacker knows the labels.")]
ForgetsClipping = Annotated[
    bool,
    typer.Option("--forgets-clipping", help="lbfgs compares unclipped gradients, as published."),
]
Spec = Annotated[
    str | None, typer.Option(help="AuditSpec of the checkpoints: path/to/file.py:spec.")
]
MaxGradNorm = Annotated[float | None, typer.Option(help="With --spec.")]
NoiseMultiplier = Annotated[float, typer.Option(help="With --spec.")]
Clipping = Annotated[str, typer.Option(help="With --spec: flat or per_layer.")]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the file, of one attack.", show_default="SEE-ATTACK"),
]
Pictures = Annotated[
    int, typer.Option(help="Also save this number of pictures and reconstructions, up to 12.")
]


def leak(
    folder: Folder,
    see: See = "row",
    attacks: Attacks = None,
    examples: Examples = 100,
    at: At = "0,last",
    before_noise: BeforeNoise = False,
    batch_size: BatchSize = 1,
    local_steps: LocalSteps = 1,
    learning_rate: LearningRate = 0.1,
    share: Share = 1.0,
    knows_labels: KnowsLabels = False,
    forgets_clipping: ForgetsClipping = False,
    spec: Spec = None,
    max_grad_norm: MaxGradNorm = None,
    noise_multiplier: NoiseMultiplier = 0.0,
    clipping: Clipping = "flat",
    step_of: StepOf = None,
    name: Name = None,
    pictures: Pictures = 0,
    as_json: Json = False,
) -> None:
    """Reconstruct training examples from gradients, beside the most that any attack can reach.

    Example: indpriv leak checkpoints --spec train.py:spec --before-noise

    It writes CHECKPOINTS/leakage/SEE-ATTACK.parquet, which indpriv audit shows. Keep it secret.
    """
    leak_as_told(None, **locals())


def leak_as_told(subject: SubjectOf | None, **told: Any) -> None:
    """`leak` with its options; subject: what rebuilds a run that needs no --spec."""
    folder, spec, name, pictures = (told[key] for key in ("folder", "spec", "name", "pictures"))
    attacks = tuple(told["attacks"] or ("informed",))
    read = ("see", "examples", "before_noise", "batch_size", "local_steps", "learning_rate")
    plan = _plan(
        attacks=attacks,
        at=_moments(told["at"]),
        knows_clipping=not told["forgets_clipping"],
        **{key: told[key] for key in (*read, "share", "knows_labels")},
    )
    _check(folder, attacks, name, pictures)
    settings = told["max_grad_norm"], told["noise_multiplier"], told["clipping"]
    if spec is not None:
        of_run = _with_spec(spec, plan, settings)
    elif settings != (None, 0.0, "flat"):
        raise InputError(
            "--max-grad-norm, --noise-multiplier and --clipping are those of the run; leave them "
            "out, or pass --spec"
        )
    elif subject is None:
        raise InputError(
            "indpriv leak needs --spec FILE:spec, an AuditSpec that rebuilds model and data (as "
            "for indpriv audit CHECKPOINTS); for a run of the reference experiments, in a clone "
            f"of indpriv, type: {typed('leak', folder, 'python -m audits')}"
        )
    else:
        of_run = subject(folder, plan)
    _leak_all(folder, of_run, plan, name, pictures, told["step_of"] or (), as_json=told["as_json"])


def _leak_all(
    folder: Path,
    subject: tuple[AuditSpec, ObservationAt],
    plan: LeakagePlan,
    name: str | None,
    pictures: int,
    step_of: Sequence[str],
    *,
    as_json: bool,
) -> None:
    from indpriv.analysis.reconstruction import reconstructions_of
    from indpriv.leakage.plan import leak_run, write_scores
    from indpriv.norm_log.run_files import LEAKAGE

    (spec, observation_at), found = subject, []
    names = {attack: name or f"{plan.see}-{attack}" for attack in plan.attacks}
    for stem in names.values():
        if (path := folder / LEAKAGE / f"{stem}.parquet").exists():
            raise InputError(f"{path} exists; choose another name with --name")
    with progress_bar() as progress:
        more: dict[str, Any] = {"progress": progress, "pictures": pictures, "step_of": step_of}
        for attack, stem in names.items():
            leaked = leak_run(spec, folder, observation_at, plan, attack, **more)
            write_scores(leaked, folder / LEAKAGE, stem)
            if pictures:
                _draw(leaked.pairs, folder / LEAKAGE / f"{stem}.png")
            found.append(leaked.scores)
    show_reconstruction(reconstructions_of(found), as_json)


def _with_spec(
    spec: str, plan: LeakagePlan, settings: tuple[float | None, float, str]
) -> tuple[AuditSpec, ObservationAt]:
    """What rebuilds model and data, and what is read before each step."""
    from indpriv.leakage.plan import observation
    from indpriv.recording.checkpoints.audit_spec import load_spec

    seen = observation(plan, *settings)
    if not plan.before_noise and not seen.noise_multiplier:
        raise InputError(
            "what is read has no noise, so that after the noise is the same as before it; pass "
            "--before-noise, or --noise-multiplier and --max-grad-norm"
        )
    return load_spec(spec), lambda _: seen


def _plan(**options: Any) -> LeakagePlan:
    from pydantic import TypeAdapter, ValidationError

    from indpriv.leakage.plan import LeakagePlan

    try:
        return TypeAdapter(LeakagePlan).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        reason = str(first["msg"]).removeprefix("Value error, ")
        if first["loc"]:
            reason = f"--{str(first['loc'][0]).replace('_', '-')} {first['input']}: {reason}"
        raise InputError(reason) from error


def _moments(text: str) -> tuple[int | str, ...]:
    return tuple(int(part) if part.isdigit() else part for part in text.split(","))


def _check(folder: Path, attacks: tuple[str, ...], name: str | None, pictures: int) -> None:
    from indpriv.norm_log.run_files import LEAKAGE
    from indpriv.release.ledger import SHAREABLE

    if SHAREABLE in folder.resolve().parts:
        raise InputError(
            f"{folder} is in a folder {SHAREABLE}, and {LEAKAGE} holds what was reconstructed of "
            "people; attack the run where it is"
        )
    if name is not None and (len(attacks) > 1 or Path(name).name != name):
        raise InputError(f"--name {name} is the name of one file of one attack")
    if not 0 <= pictures <= _MOST_PICTURES:
        raise InputError(f"--pictures {pictures} must be at most {_MOST_PICTURES}")


def _draw(pairs: torch.Tensor, path: Path) -> None:
    from indpriv._files import write_atomically
    from indpriv.report.pictures import picture_pairs

    write_atomically(path, picture_pairs(pairs.numpy()))
