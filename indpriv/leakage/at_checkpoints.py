"""`leak` at checkpoints of a run, on examples that are drawn before anything is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from indpriv._progress import Progress
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.leakage.inversion import Inversion
from indpriv.leakage.leak import leak
from indpriv.leakage.observation import Observation
from indpriv.recording.checkpoints.audit_spec import AuditSpec
from indpriv.recording.checkpoints.discovery import Discovery, SavedModel, discover
from indpriv.recording.checkpoints.safe_files import read_content
from indpriv.recording.checkpoints.weights import fit, load_into, state_of

LAST = "last"


@dataclass(frozen=True)
class Leaked:
    """What was reconstructed.

    Attributes:
        scores: with the column `step` in `details`.
        pairs: (k, 2, ...) examples and their reconstructions, at the first moment; as many as were
            asked for.
    """

    scores: AttackScores
    pairs: Tensor


def leak_at_checkpoints(
    spec: AuditSpec,
    folder: Path,
    observation_at: Callable[[int], Observation],
    attack: Inversion,
    *,
    at: Sequence[int | str] = (0, LAST),
    step_of: str | Sequence[str] = (),
    examples: int = 100,
    pictures: int = 0,
    knows_labels: bool | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Leaked:
    """Reconstruct random training examples at checkpoints of a run, in `folder`.

    Args:
        spec: rebuilds model, data and loss.
        folder: of checkpoints.
        observation_at: from the number of updates so far to what is read then.
        attack: one of `INVERSIONS`.
        at: numbers of updates of the checkpoints, or "last".
        step_of: rules for these numbers, as of `StepOptions`.
        examples: number of examples; whole batches.
        pictures: number of pairs to keep.
        knows_labels: as of `leak`.
        seed: makes the choice of examples reproducible too.
        progress: as of `leak`, over all moments.

    Raises:
        InputError: no checkpoint at a moment, inputs of several tensors, or as `leak`.
    """
    moments = _moments(folder, discover(folder, spec.load, step_of), at)
    size = observation_at(moments[0].step).batch_size
    n = min(examples, spec.n_examples) // size * size
    chosen = np.random.default_rng(seed).permutation(spec.n_examples)[:n]
    inputs, targets = _stacked(spec, chosen)
    found: list[AttackScores] = []
    kept: list[Tensor] = []

    def watch(place: int, picture: Tensor) -> None:
        if len(kept) < pictures:
            kept.append(torch.stack([inputs[place], picture]))

    for number, moment in enumerate(moments):
        scores = leak(
            _model_at(spec, moment.path),
            spec.loss_fn,
            *(inputs, targets, observation_at(moment.step), attack),
            example_ids=spec.ids[chosen],
            knows_labels=knows_labels,
            seed=seed,
            watch=watch,
            progress=_part(progress, number, len(moments)),
        )
        step = np.full(len(scores.scores), float(moment.step))
        found.append(replace(scores, details={**scores.details, "step": step}))
    pairs = torch.stack(kept) if kept else inputs[:0].unsqueeze(1)
    return Leaked(_joined(found), pairs)


def _model_at(spec: AuditSpec, path: Path) -> nn.Module:
    model = spec.model()
    load_into(model, fit(state_of(read_content(path), spec.load), model))
    return model


def _moments(folder: Path, found: Discovery, at: Sequence[int | str]) -> list[SavedModel]:
    if found.problems:
        raise InputError(f"{folder}: {found.problems[0]}")
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
        raise InputError(
            f"an example has inputs of type {type(inputs).__name__}; inputs and targets must each "
            "be one tensor, and the data set must have as many examples as a batch"
        )
    return inputs, targets


def _part(progress: Progress | None, number: int, parts: int) -> Progress | None:
    """Progress of one moment as progress of all."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, parts * total)


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
