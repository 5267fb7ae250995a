"""leak: reconstruct training examples from gradients that someone reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from indpriv.cli.attacks import show_reconstruction
from indpriv.cli.first_contact import checked_run
from indpriv.cli.options import DataDir, Json, StepOf, progress_bar
from indpriv.errors import InputError

if TYPE_CHECKING:
    import torch

    from indpriv.recording import AuditSpec
    from indpriv.training.config import LeakageConfig
    from indpriv.training.leakage import ObservationAt

_MOST_PICTURES = 12


Folder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Run of indpriv train, or a folder of checkpoints with --spec."
    ),
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
LearningRate = Annotated[float, typer.Option(help="Of these steps.")]
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
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Reconstruct training examples from gradients, beside the most that any attack can reach.

    Example: indpriv leak runs/digits --attack informed --attack first-layer

    It writes RUN/leakage/SEE-ATTACK.parquet, which indpriv audit shows. Keep it secret.
    """
    names = tuple(attacks or ("informed",))
    plan = _plan(
        see=see,
        attacks=names,
        examples=examples,
        at=_moments(at),
        before_noise=before_noise,
        batch_size=batch_size,
        local_steps=local_steps,
        learning_rate=learning_rate,
        share=share,
        knows_labels=knows_labels,
        knows_clipping=not forgets_clipping,
    )
    _check(folder, names, name, pictures)
    settings = (max_grad_norm, noise_multiplier, clipping)
    subject = _subject(folder, spec, data_dir, plan, settings)
    _leak_all(folder, subject, plan, name, pictures, step_of or (), as_json=as_json)


def _leak_all(
    folder: Path,
    subject: tuple[AuditSpec, ObservationAt],
    plan: LeakageConfig,
    name: str | None,
    pictures: int,
    step_of: Sequence[str],
    *,
    as_json: bool,
) -> None:
    from indpriv.analysis.reconstruction import reconstructions_of
    from indpriv.norm_log.run_files import LEAKAGE
    from indpriv.training.leakage import leak_run, write_scores

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


def _subject(
    folder: Path,
    spec: str | None,
    data_dir: Path | None,
    plan: LeakageConfig,
    settings: tuple[float | None, float, str],
) -> tuple[AuditSpec, ObservationAt]:
    """What rebuilds model and data, and what is read before each step."""
    from indpriv.recording.checkpoints.audit_spec import load_spec
    from indpriv.training.leakage import observation, observations, read_run

    if spec is None:
        if settings != (None, 0.0, "flat"):
            raise InputError(
                "--max-grad-norm, --noise-multiplier and --clipping are those of the run; leave "
                "them out, or pass --spec"
            )
        run_dir = checked_run(folder, "leak")
        return read_run(run_dir, data_dir), observations(run_dir, plan)
    seen = observation(plan, *settings)
    if not plan.before_noise and not seen.noise_multiplier:
        raise InputError(
            "what is read has no noise, so that after the noise is the same as before it; pass "
            "--before-noise, or --noise-multiplier and --max-grad-norm"
        )
    return load_spec(spec), lambda _: seen


def _plan(**options: Any) -> LeakageConfig:
    from pydantic import TypeAdapter, ValidationError

    from indpriv.training.config import LeakageConfig

    try:
        return TypeAdapter(LeakageConfig).validate_python(options)
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
