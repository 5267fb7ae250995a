"""`leak` at checkpoints of a run: what is read of its gradients, and by which attacks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.utils.data import default_collate

from indpriv._facts import refused
from indpriv._folders import make_folder
from indpriv._reading import YesNo
from indpriv._types import StageProgress, silent
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.leakage.inversion import INVERSIONS, LBFGS, Observation
from indpriv.leakage.leak import leak
from indpriv.recording import AuditSpec
from indpriv.recording.checkpoints.safe_files import load_into
from indpriv.recording.checkpoints.saved_models import SavedModel, StepOf, discover

LAST = "last"
ObservationAt = Callable[[int], Observation]  # number of updates before -> what is read

_Count = Annotated[int, Field(strict=True, ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LeakagePlan:
    """Examples to reconstruct from gradients; [leakage] of an audit file.

    Attributes:
        see: what is read, as `Observation` has it with batch_size, local_steps, learning_rate and
            share. DP-SGD neither clips nor noises an update; a federated run protects it as
            [federated] says, and its learning rate is the local one.
        attacks: of `indpriv.leakage.INVERSIONS`.
        examples: number of training examples, drawn at random before anything is looked at, in
            whole batches; they are also the candidates.
        at: numbers of updates of the checkpoints that are attacked; or "last".
        before_noise: what is read has no noise yet.
        knows_labels: the attacker knows the labels; in batches of up to 8 it does anyway.
        knows_clipping: "lbfgs" clips the gradient of its guess; false is the attack of the papers.
    """

    see: Literal["row", "batch", "update"] = "row"
    attacks: tuple[Literal["informed", "first-layer", "lbfgs", "adam"], ...] = ()
    examples: Annotated[int, Field(strict=True, ge=2)] = 100
    at: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0)] | Literal["last"], ...], Field(min_length=1)
    ] = (0, "last")
    before_noise: YesNo = False
    batch_size: _Count = 1
    local_steps: _Count = 1
    learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 0.1
    share: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    knows_labels: YesNo = False
    knows_clipping: YesNo = True

    def __post_init__(self) -> None:
        if self.see == "row" and self.batch_size != 1:
            raise InputError('see = "row" reads one example; leave out batch_size, or see a batch')

    def check_central(self) -> None:
        """Raise InputError for noise on an update of a run that is not federated."""
        if self.see == "update" and not self.before_noise:
            raise refused("refusal.leakage", "update")


def observation(
    plan: LeakagePlan, max_grad_norm: float | None, noise: float, clipping: str = "flat"
) -> Observation:
    """What a plan reads where gradients are clipped at max_grad_norm, with this noise multiplier.

    Local updates are neither clipped nor noised by DP-SGD.
    """
    plan.check_central()
    seen = Observation(plan.see, plan.batch_size, share=plan.share)
    if plan.see == "update":
        return replace(seen, local_steps=plan.local_steps, learning_rate=plan.learning_rate)
    noise = 0.0 if plan.before_noise else noise
    return replace(seen, max_grad_norm=max_grad_norm, clipping=clipping, noise_multiplier=noise)


def leak_run(
    spec: AuditSpec,
    folder: Path,
    observation_at: ObservationAt,
    plan: LeakagePlan,
    attack: str,
    seed: int | None = None,
    progress: StageProgress = silent,
    *,
    pictures: int = 0,
    step_of: StepOf = (),
) -> tuple[AttackScores, Tensor]:
    """Reconstruct random training examples at checkpoints of a run, by one attack of a plan.

    The result is scores with the column `step` in `details`, and (pictures, 2, ...) examples and
    their reconstructions at the first checkpoint. spec rebuilds model, data and loss; step_of is as
    of `StepOptions`. InputError without a checkpoint at a moment, for inputs of several tensors, or
    as `leak`.
    """
    knows = {} if plan.knows_clipping or attack != LBFGS.name else {"knows_clipping": False}
    moments = _moments(folder, spec, step_of, plan.at)
    size = observation_at(moments[0].step).batch_size
    n = min(plan.examples, spec.n_examples) // size * size
    chosen = np.random.default_rng(seed).permutation(spec.n_examples)[:n]
    inputs, targets = _stacked(spec, chosen)
    found: list[AttackScores] = []
    kept: list[Tensor] = []

    def watch(place: int, picture: Tensor) -> None:
        if len(kept) < pictures:
            kept.append(torch.stack([inputs[place], picture]))

    def report(done: int, total: int) -> None:
        progress(f"reconstructing ({attack})", len(found) * total + done, len(moments) * total)

    for moment in moments:
        model = spec.model()
        load_into(model, moment.path, spec.load)
        scores = leak(
            model,
            spec.loss_fn,
            *(inputs, targets, observation_at(moment.step), INVERSIONS[attack](**knows)),
            example_ids=spec.ids[chosen],
            knows_labels=plan.knows_labels or None,
            seed=seed,
            watch=watch,
            progress=report,
        )
        step = np.full(len(scores.scores), float(moment.step))
        found.append(replace(scores, details={**scores.details, "step": step}))
    return _joined(found), torch.stack(kept) if kept else inputs[:0].unsqueeze(1)


def write_scores(scores: AttackScores, folder: Path, name: str) -> None:
    """Write FOLDER/NAME.parquet, for its owner only (0600)."""
    make_folder(folder.parent, folder.name)
    scores.to_parquet(folder / f"{name}.parquet")


def _moments(
    folder: Path, spec: AuditSpec, step_of: StepOf, at: Sequence[int | str]
) -> list[SavedModel]:
    found = discover(folder, spec.load, step_of)
    found.check(folder)
    by_step = {model.step: model for model in found.models}
    wanted = dict.fromkeys(max(by_step) if moment == LAST else moment for moment in at)
    for step in wanted:
        if step not in by_step:
            known = ", ".join(map(str, sorted(by_step)[:8]))
            raise InputError(
                f"there is no checkpoint at step {step} in {folder}; choose among {known}"
                + " ..." * (len(by_step) > 8)
            )
    return [by_step[int(step)] for step in wanted]


def _stacked(spec: AuditSpec, chosen: Any) -> tuple[Tensor, Tensor]:
    rows = [spec.dataset[int(i)] for i in chosen]
    inputs, targets = (spec.collate_fn or default_collate)(rows) if rows else (None, None)
    if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
        raise refused("refusal.leakage", "inputs", kind=type(inputs).__name__)
    return inputs, targets


def _joined(found: Sequence[AttackScores]) -> AttackScores:
    """Scores at several moments as one; noise and clipping may have moved between them."""
    names = found[0].details
    return replace(
        found[0],
        scores=np.concatenate([one.scores for one in found]),
        member=np.concatenate([one.member for one in found]),
        example_ids=np.concatenate([np.asarray(one.example_ids) for one in found]),
        details={name: np.concatenate([one.details[name] for one in found]) for name in names},
    )
