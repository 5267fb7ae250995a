"""Reconstruction from gradients of reference runs, as [leakage] of an audit file says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

from audits.training.config import AuditConfig, FederatedConfig
from audits.training.datasets import Dataset, load_dataset
from audits.training.models import LOSSES, build_model
from audits.training.tensors import tensor_set
from indpriv._types import StageProgress, silent
from indpriv.errors import InputError
from indpriv.leakage import INVERSIONS, Observation
from indpriv.leakage.leak import ObservationAt, leak_run, observation, write_scores
from indpriv.norm_log.run_files import LEAKAGE, read_run_json
from indpriv.recording import AuditSpec


def leak_after_training(
    config: AuditConfig,
    run_dir: Path,
    dataset: Dataset,
    seed: int | None,
    progress: StageProgress = silent,
) -> None:
    """Write RUN/leakage/SEE-ATTACK.parquet for each attack of an audit file."""
    if not config.leakage.attacks:
        return
    plan = config.leakage
    observation_at = observations(run_dir, plan.seen, plan.before_noise)
    more: dict[str, Any] = {"examples": plan.examples, "at": plan.at, "seed": seed}
    more |= {"knows_labels": plan.knows_labels, "progress": progress}
    for name in plan.attacks:
        forgets = name == "lbfgs" and not plan.knows_clipping
        attack = INVERSIONS[name](**({"knows_clipping": False} if forgets else {}))
        scores, _ = leak_run(spec_of(config, dataset), run_dir, observation_at, attack, **more)
        write_scores(scores, run_dir / LEAKAGE, f"{plan.see}-{name}")


def read_run(run_dir: Path, data_dir: Path | None) -> AuditSpec:
    """What rebuilds the model and the data of a run of `python -m audits train`.

    Raises:
        InputError: another kind of run, or other data than the run was trained on.
    """
    record = _record(run_dir)
    config = AuditConfig.from_dict(record["config"])
    dataset = load_dataset(config.data.dataset, data_dir)
    if dataset.fingerprint() != record["data"]["fingerprint"]:
        raise InputError(
            f"{run_dir} was trained on other data than {config.data.dataset} as loaded (canaries, "
            "a subset or another version); pass --spec, which says what it was"
        )
    return spec_of(config, dataset)


def spec_of(config: AuditConfig, dataset: Dataset) -> AuditSpec:
    """What rebuilds the model and the data of an audit."""
    return AuditSpec(
        model=lambda: build_model(config.model, dataset.input_shape, dataset.n_classes),
        dataset=TensorDataset(*tensor_set(dataset.train).tensors),
        loss_fn=LOSSES[config.training.loss](reduction="none"),
    )


def observations(run_dir: Path, seen: Observation, before_noise: bool) -> ObservationAt:
    """What is read of a run of `train` before each step, with its clipping and noise.

    seen: the same without them.

    Raises:
        InputError: another kind of run, or a kind of clipping that an observation does not have.
    """
    record = _record(run_dir)
    settings, planned = record["training"], record["config"]["training"]
    federated = AuditConfig.from_dict(record["config"]).federated
    if settings["clipping"] not in ("flat", "per_layer") or "largest" in planned.get(
        "noise_scale", ""
    ):
        raise InputError(
            f"{run_dir} clips or scales its noise by what it sees ({settings['clipping']}), which "
            'an observation does not imitate; use a run with clipping = "flat" or "per_layer"'
        )

    def at(step: int) -> Observation:
        clip, noise = (_at(settings[name], step) for name in ("max_grad_norm", "noise_multiplier"))
        if federated is None:
            return observation(seen, before_noise, clip, noise, settings["clipping"])
        came, law = federated.planned(settings["clients"]), (clip, noise, settings["clipping"])
        return at_a_client(seen, before_noise, federated, came, law)

    return at


def at_a_client(
    seen: Observation,
    before_noise: bool,
    federated: FederatedConfig,
    planned: float,
    law: tuple[float, float, str],
) -> Observation:
    """What is read at one client of a federated run; noise of the server comes later.

    Args:
        seen: what is read, without protection. A batch or update is of rows drawn from all clients.
        before_noise: what is read has no noise yet.
        federated: who is protected where.
        planned: number of clients of a round.
        law: max_grad_norm, noise multiplier and clipping of the round.

    Raises:
        InputError: an update of a run that protects rows inside its local steps.
    """
    (clip, noise, clipping), place = law, federated.noise_place
    if federated.protect == "row" and seen.of == "update":
        raise InputError(
            'rows are clipped and get noise in each local step; use see = "batch", which is the '
            "update of one local step"
        )
    if seen.of == "update":
        shares = {"clients": 1.0, "clients_shared": 1 / math.sqrt(planned)}
        noise, protected = noise * shares.get(place, 0.0), place in shares
    else:  # noise once a batch comes after the gradient of a row
        protected = federated.protect == "row"
        noise *= place == "row" or seen.of == "batch"
    return replace(
        seen,
        max_grad_norm=clip if protected else None,
        clipping=clipping if protected else "flat",
        noise_multiplier=noise if protected and not before_noise else 0.0,
        noise_at="row" if place == "row" else "batch",
        learning_rate=federated.local_learning_rate,
    )


def _at(values: float | list[float], step: int) -> float:
    """A setting of the step that comes after `step` updates, or of the last one."""
    return values[min(step, len(values) - 1)] if isinstance(values, list) else values


def _record(run_dir: Path) -> dict[str, Any]:
    content = dict(read_run_json(run_dir))
    if not {"config", "training", "data"} <= content.keys():
        raise InputError(
            f"{run_dir} is no run of python -m audits train, so that nothing rebuilds its "
            "model; pass its checkpoints with --spec FILE:spec"
        )
    return content
