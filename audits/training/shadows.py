"""Reference models of an audit: the same training on random subsets of the data. Sensitive.

Each model is trained with the noise, the sampling rate and the number of steps of the audit, on its
own coins, and is gone once its signals are written: it is trained on the data, and the guarantee of
the audited run does not cover it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from audits.training.baseline import fit_without_dp
from audits.training.checkpoints import list_checkpoints, load_checkpoint
from audits.training.config import AuditConfig
from audits.training.datasets import Dataset, Split, load_dataset
from audits.training.datasets.rows import chosen_rows
from audits.training.models import first_parameters
from audits.training.private_setting import make_private, quiet_opacus
from audits.training.randomness import Randomness
from audits.training.robustness import robustness
from audits.training.run_record import noise_and_clipping, with_drawn_norm
from audits.training.step_plan import plan_of, steps_per_epoch, with_noise
from audits.training.steps import take_steps
from indpriv._files import first_at
from indpriv._types import FloatArray, IntArray, StageProgress
from indpriv.attack_signals import CHECKPOINTS, CONFIDENCE, LABELS, AttackSignals
from indpriv.attacks.train_references import Pool, pool_of_run, study_pool, train_references
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES, EXAMPLES_NON_DP, RUN_JSON, read_run_json

_BATCH = 4096


def train_shadows(
    config: AuditConfig,
    output: str | Path,
    n_models: int,
    *,
    targets: int | None = None,
    for_run: str | Path | None = None,
    without_dp: bool = False,
    labels: bool = False,
    checkpoints: bool = False,
    seed: int | None = None,
    workers: int = 1,
    progress: StageProgress | None = None,
    device: str = "cpu",
    data_dir: str | Path | None = None,
    dataset: Dataset | None = None,
) -> AttackSignals:
    """Train reference models of an audit; keep and return their signals called "confidence".

    A study (default) gives random training examples coins, and always trains on the others. For a
    run, training and test examples are drawn alike; the run's own signals come first.

    Args:
        config: the audit.
        output: a new folder, or that of an interrupted call, which goes on.
        n_models: number of reference models in all.
        targets: of a study: number of training examples with coins, at most half; default half.
        for_run: a finished run of this audit.
        without_dp: train without clipping and noise, as the non-private baseline.
        labels: also take the share of right labels under perturbations.
        checkpoints: also take the mean confidence over the audit's checkpoints.
        seed: as in `train`, also of coins.
        workers: number of processes.
        progress: called as progress(stage, done, total) after each model.
        device: as in `train`.
        data_dir: as in `train`.
        dataset: as in `train`.

    Raises:
        InputError: an audit or a run that references cannot be trained for, or a folder of others.
    """
    dataset = chosen_rows(dataset or load_dataset(config.data.dataset, data_dir), config.data)
    options = {"without_dp": without_dp, "labels": labels, "checkpoints": checkpoints}
    trainer = _trainer(config, dataset, for_run, device, options)
    trainer, pool = _with_pool(trainer, targets, seed, Path(output), for_run)
    return train_references(
        trainer.fit,
        n_models,
        signal_fn=trainer.signals,
        pool=pool,
        output=output,
        settings={**trainer.settings, **options},
        seed=seed,
        workers=workers,
        progress=progress,
    )


def trainer_of(config: AuditConfig, dataset: Dataset, *, without_dp: bool) -> _Trainer:
    """What trains an audit's models on parts of a data set, and takes confidences and labels."""
    options = {"without_dp": without_dp, "labels": True, "checkpoints": False}
    return _trainer(config, dataset, None, "cpu", options)


def _trainer(
    config: AuditConfig,
    dataset: Dataset,
    for_run: str | Path | None,
    device: str,
    options: Mapping[str, bool],
) -> _Trainer:
    n_train = len(dataset.train)
    training = with_drawn_norm(config.training, for_run)
    config = replace(config, training=with_noise(training, n_train))
    return _Trainer(config, dataset, _settings(config, n_train, for_run), device, **options)


def _settings(config: AuditConfig, n_train: int, for_run: str | Path | None) -> dict[str, Any]:
    """What the references share with the audited run: noise and steps an epoch."""
    if config.data.label_epsilon is not None:
        raise InputError(
            "the audit has label_epsilon, and each run draws its labels anew: reference models "
            "would be trained on others; leave it out"
        )
    for name in ("individual_clipping", "filter_epsilon"):
        if getattr(config.training, name):
            raise InputError(
                f"the audit trains with {name}, which depends on what its own run recorded; "
                "reference models cannot be trained like it"
            )
    training, planned = config.training, plan_of(config.training, n_train)
    found: dict[str, Any] = {
        **noise_and_clipping(planned, training),
        "steps_per_epoch": steps_per_epoch(training, n_train),
        "planned_steps": len(planned),
    }
    if for_run is None:
        return found
    path, record = Path(for_run) / RUN_JSON, read_run_json(Path(for_run))
    for name, wanted in found.items():
        value = first_at(record, ("training", name), ("config", "training", name))
        if value is None or not _same(value, wanted):
            raise InputError(
                f"{path}: {name} is {value}, and this audit file gives {wanted}; pass the "
                "audit file of the run"
            )
    if record.get("status") != "finished":
        raise InputError(f"{path}: the run is not finished; references would be trained for longer")
    return found


def _same(value: Any, other: float | list[float]) -> bool:
    """Whether numbers, or lists of one for each step, are equal up to rounding."""
    return np.shape(value) == np.shape(other) and np.allclose(value, other, rtol=1e-9, atol=0)


def _with_pool(
    trainer: _Trainer,
    targets: int | None,
    seed: int | None,
    output: Path,
    for_run: str | Path | None,
) -> tuple[_Trainer, Pool]:
    """Whose memberships are drawn, of a study or for a run, and all examples as training set."""
    config, dataset = trainer.config, trainer.dataset
    if for_run is not None:
        if targets is not None:
            raise InputError("--targets is for a study; every example of a run is a target")
        pool, joined = _pool_of_run(Path(for_run), config, dataset, trainer.without_dp)
        trainer = replace(trainer, dataset=joined)
        return trainer, _from_checkpoints(trainer, Path(for_run), pool)
    column = config.data.unit_column
    pool = study_pool(
        len(dataset.train),
        targets,
        unit_ids=None if column is None else dataset.train.units(column).to_numpy(),
        fingerprint=dataset.fingerprint(),
        seed=seed,
        output=output,
    )
    return trainer, pool


def _pool_of_run(
    run_dir: Path, config: AuditConfig, dataset: Dataset, without_dp: bool
) -> tuple[Pool, Dataset]:
    """Training and test examples of a run as one pool, and as one training set."""
    fingerprint = dataset.fingerprint()
    found = first_at(read_run_json(run_dir), ("data", "fingerprint"))
    if found != fingerprint:
        raise InputError(
            f"{run_dir} was trained on other data than {dataset.name} as loaded (another "
            "fingerprint: canaries, a subset or another version); references need the same data"
        )
    if config.data.unit_column is not None:
        raise InputError(
            "the audit has unit_column: test examples are no whole units, so that references for "
            "a run cannot be trained; train a study, without --for-run"
        )
    train, test = dataset.train, dataset.test
    joined = Split(
        np.concatenate([train.inputs, test.inputs]), np.concatenate([train.targets, test.targets])
    )
    table = ExampleTable.from_parquet(run_dir / (EXAMPLES_NON_DP if without_dp else EXAMPLES))
    if table.n_train != len(train) or len(table.rows("test")) != len(test):
        raise InputError(f"{run_dir} has losses of other examples than {dataset.name} as loaded")
    pool = pool_of_run(table, fingerprint)
    return pool, replace(dataset, train=joined)


def _from_checkpoints(trainer: _Trainer, run_dir: Path, pool: Pool) -> Pool:
    """The pool with signals of the run's checkpoints, where there are any, not its losses."""
    paths = [] if trainer.without_dp else list_checkpoints(run_dir)
    if paths and pool.audited is not None:
        states = [load_checkpoint(path).model_state_dict for path in paths[1:]]
        signals = trainer.signals(_Fitted(tuple(states)), np.arange(pool.n_examples))
        return replace(pool, audited=(signals, pool.audited[1]))
    if trainer.labels or trainer.checkpoints:
        raise InputError(
            f"{run_dir} holds no checkpoints of this model, which --labels and --checkpoints need"
        )
    return pool


@dataclass(frozen=True)
class _Fitted:
    """Parameters of a model at its checkpoints after the first step; the last are final."""

    states: tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True)
class _Trainer:
    """Trains an audit's model on some examples, and takes its signals."""

    config: AuditConfig
    dataset: Dataset
    settings: Mapping[str, Any]
    device: str
    without_dp: bool
    labels: bool
    checkpoints: bool

    def fit(self, positions: IntArray, seed: int) -> _Fitted:
        """A model trained on these examples, with the settings of the audit."""
        inside = np.zeros(len(self.dataset.train), dtype=bool)
        inside[positions] = True
        subset = replace(self.dataset, train=self.dataset.train.take(inside))
        batch_size = _batch_size(len(positions), self.settings["steps_per_epoch"])
        training = replace(self.config.training, batch_size=batch_size)
        config = replace(self.config, training=training)
        states: list[Mapping[str, Tensor]] = []

        def keep(module: nn.Module, step: int, steps_per_epoch: int) -> None:
            every = self.config.checkpoints.every
            gap = steps_per_epoch if isinstance(every, str) else every
            last = step == self.settings["planned_steps"]
            if last or (self.checkpoints and step % gap == 0):
                states.append({k: v.detach().clone() for k, v in module.state_dict().items()})

        if self.without_dp:
            fit_without_dp(config, subset, seed=seed, device=self.device, after_step=keep)
        else:
            _fit_privately(config, subset, seed, self.device, keep)
        return _Fitted(tuple(states))

    def signals(self, fitted: _Fitted, positions: IntArray) -> dict[str, FloatArray]:
        """The signals of a model on these examples, (n,) each."""
        data, modules = self.dataset.train, self._modules(fitted)
        inputs = torch.from_numpy(data.inputs[positions])
        targets = torch.from_numpy(data.targets[positions])
        total = np.zeros(len(positions))
        for module in modules:
            last = _confidence(module, inputs, targets, self.device)
            total += last
        found = {CONFIDENCE: last}
        if self.checkpoints:
            found[CHECKPOINTS] = total / len(fitted.states)
        if self.labels:
            found[LABELS] = robustness(
                lambda copies: _logits(module, copies, self.device).argmax(1), inputs, targets
            )
        return found

    def _modules(self, fitted: _Fitted) -> Iterator[nn.Module]:
        """The model at its checkpoints, or at the end only."""
        module = first_parameters(
            self.config.model, self.dataset.input_shape, self.dataset.n_classes, 0
        ).to(self.device)
        for state in fitted.states if self.checkpoints else fitted.states[-1:]:
            module.load_state_dict(state)
            yield module.eval()


def _fit_privately(
    config: AuditConfig,
    dataset: Dataset,
    seed: int,
    device: str,
    keep: Callable[[nn.Module, int, int], None],
) -> None:
    with quiet_opacus(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "delta=")  # of a smaller data set; it claims nothing
        private = make_private(config, dataset, Randomness.from_seed(seed), device)
        take_steps(
            private,
            config.training,
            lambda step: keep(private.module, step, len(private.loader)),
            lambda: False,
            device,
        )


def _batch_size(n: int, steps_per_epoch: int) -> int:
    """The batch size at which an epoch over n examples has this number of steps."""
    size = math.ceil(n / steps_per_epoch)
    if math.ceil(n / size) != steps_per_epoch:
        raise InputError(
            f"no batch size gives {n} examples {steps_per_epoch} steps an epoch; audits of so few "
            "examples need larger batches"
        )
    return size


@torch.no_grad()
def _logits(module: nn.Module, inputs: Tensor, device: str) -> Tensor:
    parts = [module(part.to(device)).double().cpu() for part in inputs.split(_BATCH)]
    return torch.cat(parts)


def _confidence(module: nn.Module, inputs: Tensor, targets: Tensor, device: str) -> FloatArray:
    """log(p / (1 - p)) of the true class, from logits: it does not saturate where p rounds to 1."""
    logits = _logits(module, inputs, device)
    own = logits.gather(1, targets[:, None])
    others = logits.scatter(1, targets[:, None], -torch.inf)
    found: FloatArray = (own[:, 0] - others.logsumexp(1)).numpy()
    return found
