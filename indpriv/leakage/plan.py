"""What is read of a run's gradients and by which attacks, as one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from indpriv._folders import make_folder
from indpriv._progress import StageProgress, silent
from indpriv.errors import InputError
from indpriv.leakage.at_checkpoints import Leaked, leak_at_checkpoints
from indpriv.leakage.inversion import INVERSIONS, LBFGS
from indpriv.leakage.observation import Observation
from indpriv.recording import AuditSpec

ObservationAt = Callable[[int], Observation]  # number of updates before -> what is read

_Flag = Annotated[bool, Field(strict=True)]
_CountOrZero = Annotated[int, Field(strict=True, ge=0)]
_Count = Annotated[int, Field(strict=True, ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LeakagePlan:
    """Examples to reconstruct from gradients; [leakage] of an audit file.

    Attributes:
        see: what is read: the gradient of a "row", of a "batch", or an "update" of local steps.
        attacks: of `indpriv.leakage.INVERSIONS`.
        examples: number of training examples, drawn at random; they are also the candidates.
        at: numbers of updates of the checkpoints that are attacked; or "last".
        before_noise: what is read has no noise yet.
        batch_size: of a batch or an update.
        local_steps, learning_rate: of an update, which DP-SGD neither clips nor noises. A federated
            run protects it as [federated] says, and its learning rate is the local one.
        share: share of coordinates that is sent, the largest first.
        knows_labels: the attacker knows the labels; in batches of up to 8 it does anyway.
        knows_clipping: "lbfgs" clips the gradient of its guess; false is the attack of the papers.
    """

    see: Literal["row", "batch", "update"] = "row"
    attacks: tuple[Literal["informed", "first-layer", "lbfgs", "adam"], ...] = ()
    examples: Annotated[int, Field(strict=True, ge=2)] = 100
    at: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0)] | Literal["last"], ...], Field(min_length=1)
    ] = (0, "last")
    before_noise: _Flag = False
    batch_size: _Count = 1
    local_steps: _Count = 1
    learning_rate: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 0.1
    share: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    knows_labels: _Flag = False
    knows_clipping: _Flag = True

    def __post_init__(self) -> None:
        if self.see == "row" and self.batch_size != 1:
            raise InputError('see = "row" reads one example; leave out batch_size, or see a batch')

    def check_central(self) -> None:
        """Raise InputError for noise on an update of a run that is not federated."""
        if self.see == "update" and not self.before_noise:
            raise InputError(
                'see = "update" has no noise in DP-SGD, before or after: set before_noise = true'
            )


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
    step_of: Sequence[str] = (),
) -> Leaked:
    """One attack of a plan on the checkpoints in a folder; see `leak_at_checkpoints`."""
    knows = {} if plan.knows_clipping or attack != LBFGS.name else {"knows_clipping": False}
    return leak_at_checkpoints(
        spec,
        folder,
        observation_at,
        INVERSIONS[attack](**knows),
        at=plan.at,
        examples=plan.examples,
        knows_labels=plan.knows_labels or None,
        pictures=pictures,
        step_of=step_of,
        seed=seed,
        progress=lambda done, total: progress(f"reconstructing ({attack})", done, total),
    )


def write_scores(found: Leaked, folder: Path, name: str) -> None:
    """Write FOLDER/NAME.parquet, for its owner only (0600)."""
    make_folder(folder.parent, folder.name)
    found.scores.to_parquet(folder / f"{name}.parquet")


def observation(
    plan: LeakagePlan, max_grad_norm: float | None, noise: float, clipping: str = "flat"
) -> Observation:
    """What a plan reads where gradients are clipped at max_grad_norm, with this noise multiplier.

    Local updates are neither clipped nor noised by DP-SGD.
    """
    plan.check_central()
    if plan.see == "update":
        return Observation(
            "update",
            plan.batch_size,
            local_steps=plan.local_steps,
            learning_rate=plan.learning_rate,
            share=plan.share,
        )
    return Observation(
        plan.see,
        plan.batch_size,
        max_grad_norm,
        clipping,
        0.0 if plan.before_noise else noise,
        share=plan.share,
    )
