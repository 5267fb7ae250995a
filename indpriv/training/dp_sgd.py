"""Reference DP-SGD: an ordinary Opacus run, recorded. What it writes is sensitive, except for the models' guarantee."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants import IAccountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from indpriv._files import read_json, write_json
from indpriv._progress import StageProgress, silent
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES, RUN_JSON
from indpriv.recording import Recorder
from indpriv.recording.clipping.filtered import Filter
from indpriv.training.checkpoints import save_checkpoint
from indpriv.training.config import AuditConfig, TrainingConfig
from indpriv.training.datasets import Dataset, load_dataset
from indpriv.training.interruption import stop_requests
from indpriv.training.models import first_parameters
from indpriv.training.non_dp import train_without_dp
from indpriv.training.randomness import Randomness, generator
from indpriv.training.run_record import first_record, last_record
from indpriv.training.tensors import BatchedTensorDataset, tensor_set, whole_batch

_EPSILON_TOLERANCE = (
    1e-3  # the noise is chosen so that epsilon is at most the target, and above it less this
)


@dataclass(frozen=True)
class TrainedRun:
    """A finished run.

    Attributes:
        run_dir: log, run.json, checkpoints and example tables.
        module: the final model.
        steps: updates it has had.
        worst_case_epsilon: the run's guarantee by Opacus's RDP accountant, at the configuration's delta, adding or
            removing one example, Poisson sampling. Void where the run was seeded.
        test_accuracy: share of the test examples that the final model classifies right.
    """

    run_dir: Path
    module: nn.Module
    steps: int
    worst_case_epsilon: float
    test_accuracy: float


@dataclass(frozen=True)
class _PrivateSetting:
    """What `PrivacyEngine.make_private` makes of a model, an optimizer and a loader."""

    model: nn.Module
    optimizer: Any
    criterion: Callable[..., Any]
    loader: DPDataLoader
    accountant: IAccountant
    noise_multiplier: float

    @property
    def steps_taken(self) -> int:
        """Updates so far, as the accountant counts them."""
        return sum(steps for _, _, steps in self.accountant.history)


def train(
    config: AuditConfig,
    run_dir: str | Path,
    *,
    seed: int | None = None,
    progress: StageProgress | None = None,
    device: str = "cpu",
    data_dir: str | Path | None = None,
    dataset: Dataset | None = None,
    privacy_filter: Filter | Callable[[float, float], Filter] | None = None,
) -> TrainedRun:
    """Train an audit's model with DP-SGD and record it.

    Writes RUN/run.json, the Recorder's log and examples.parquet, RUN/checkpoints/step-*.pt and, where the audit asks
    for the twin, RUN/examples-non-dp.parquet. Ctrl-C or SIGTERM stops after the step under way: log, last checkpoint
    and example table are then written as at a normal end, and KeyboardInterrupt is raised.

    Args:
        config: the audit.
        run_dir: a new directory.
        seed: makes the run repeatable and is labelled "reproducible: no privacy": who knows it can regenerate noise and
            sampling. None draws both from the operating system.
        progress: called as progress(stage, done, total) after each step.
        device: where to train, e.g. "cpu" or "cuda".
        data_dir: folder of data sets that do not ship with a package; default the environment variable INDPRIV_DATA.
        dataset: data to use instead of loading the configuration's.
        privacy_filter: an `indpriv.PrivacyFilter` that everybody's epsilon is capped by, see `Recorder`; or what makes one
            of the run's noise_multiplier and sample_rate. An audit with filter_epsilon needs one.

    Raises:
        InputError: a configuration, data set or directory that cannot be used; nothing has been trained.
        EvidenceError: the evidence would be wrong (from the Recorder).
        KeyboardInterrupt: the run was stopped; RUN is usable.
    """
    started = time.monotonic()
    run_dir, progress = Path(run_dir), progress or silent
    if config.training.filter_epsilon is not None and privacy_filter is None:
        raise InputError(
            f"the audit has filter_epsilon={config.training.filter_epsilon:g}, but no privacy_filter was passed; make one with "
            "indpriv.PrivacyFilter.for_epsilon (`indpriv train` does, but not with canaries)"
        )
    dataset = dataset or load_dataset(config.data.dataset, data_dir)
    if config.data.unit_column is not None and config.data.max_rows_per_unit is not None:
        dataset = replace(
            dataset,
            train=dataset.train.capped(config.data.unit_column, config.data.max_rows_per_unit),
        )
    randomness = Randomness.from_seed(seed)
    train_set = tensor_set(dataset.train)
    module = first_parameters(
        config.model, dataset.input_shape, dataset.n_classes, randomness.first_parameters
    )
    module.to(device)
    with quiet_opacus():
        private = _make_private(config.training, module, train_set, randomness, device)
        if callable(privacy_filter):
            privacy_filter = privacy_filter(private.noise_multiplier, private.loader.sample_rate)
        recorder = _make_recorder(
            run_dir, config, dataset, train_set, private, module, randomness, privacy_filter
        )
        total_steps = config.training.epochs * len(private.loader)
        every = (
            len(private.loader)
            if config.checkpoints.every == "epoch"
            else int(config.checkpoints.every)
        )

        def after_step(step: int) -> None:
            if step % every == 0 or step == total_steps:
                save_checkpoint(run_dir, module, step, private.accountant.history)
            progress("training", step, total_steps)

        with (
            recorder.attach(private.model, private.optimizer, private.loader),
            stop_requests() as stop_asked,
        ):
            save_checkpoint(run_dir, module, 0, private.accountant.history)
            _take_steps(private, config.training, after_step, stop_asked, device)
            stopped = private.steps_taken < total_steps
            if stopped:
                save_checkpoint(run_dir, module, private.steps_taken, private.accountant.history)
        epsilon = float(private.accountant.get_epsilon(config.training.delta))

    run = TrainedRun(
        run_dir=run_dir,
        module=module,
        steps=private.steps_taken,
        worst_case_epsilon=epsilon,
        test_accuracy=float(ExampleTable.from_parquet(run_dir / EXAMPLES).test["correct"].mean()),
    )
    record = last_record(
        status="interrupted" if stopped else "finished",
        steps=run.steps,
        worst_case_epsilon=run.worst_case_epsilon,
        delta=config.training.delta,
        seeded=randomness.seeded,
        test_accuracy=run.test_accuracy,
        wall_seconds=time.monotonic() - started,
    )
    write_json(run_dir / RUN_JSON, {**read_json(run_dir / RUN_JSON), **record})
    if stopped:
        raise KeyboardInterrupt(
            f"stopped after {run.steps} of {total_steps} steps; {run_dir} holds them, and can be verified and audited"
        )
    if config.training.non_private_baseline:
        twin = train_without_dp(config, dataset, seed=seed, progress=progress, device=device)
        twin.to_parquet(run_dir / "examples-non-dp.parquet")
    return run


def _make_recorder(
    run_dir: Path,
    config: AuditConfig,
    dataset: Dataset,
    train_set: BatchedTensorDataset,
    private: _PrivateSetting,
    module: nn.Module,
    randomness: Randomness,
    privacy_filter: Filter | None,
) -> Recorder:
    return Recorder(
        run_dir,
        dataset=train_set,
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        policy=config.recording.to_policy(),
        rounding=config.recording.rounding,
        rounding_mode=config.recording.rounding_mode,
        individual_clipping=config.training.individual_clipping,
        clip_headroom=config.training.clip_headroom,
        test_set=tensor_set(dataset.test),
        record_holdout=config.recording.record_holdout,
        metadata=dataset.train.metadata,
        unit="example" if config.data.unit_column is None else "user",
        unit_ids=None
        if config.data.unit_column is None
        else dataset.train.units(config.data.unit_column),
        test_metadata=dataset.test.metadata,
        privacy_filter=privacy_filter,
        seeded=randomness.seeded,
        run_info=first_record(
            config,
            dataset,
            module,
            seeded=randomness.seeded,
            noise_multiplier=private.noise_multiplier,
            sample_rate=private.loader.sample_rate,
            steps_per_epoch=len(private.loader),
        ),
    )


def _take_steps(
    private: _PrivateSetting,
    settings: TrainingConfig,
    after_step: Callable[[int], None],
    stop_asked: Callable[[], bool],
    device: str,
) -> None:
    """The training loop."""
    step = 0
    for _ in range(settings.epochs):
        with _physical_batches(private, settings.max_physical_batch_size) as batches:
            for inputs, targets in batches:
                private.optimizer.zero_grad()
                private.criterion(private.model(inputs.to(device)), targets.to(device)).backward()
                private.optimizer.step()
                if private.steps_taken > step:  # the last physical batch of a step
                    step = private.steps_taken
                    after_step(step)
                    if stop_asked():
                        return


@contextmanager
def _physical_batches(
    private: _PrivateSetting, max_physical_batch_size: int | None
) -> Iterator[DataLoader[Any]]:
    """The loader, with its Poisson batches split where they would not fit into memory."""
    if max_physical_batch_size is None:
        yield private.loader
        return
    with BatchMemoryManager(
        data_loader=private.loader,
        max_physical_batch_size=max_physical_batch_size,
        optimizer=private.optimizer,
    ) as batches:
        yield batches


def _make_private(
    settings: TrainingConfig,
    module: nn.Module,
    train_set: BatchedTensorDataset,
    randomness: Randomness,
    device: str,
) -> _PrivateSetting:
    if settings.delta >= 1 / len(train_set):
        warnings.warn(
            f"delta={settings.delta:g} is not below 1/n={1 / len(train_set):.2g}: such a delta allows publishing a whole "
            "example; choose it well below 1/n",
            stacklevel=3,
        )
    loader = DataLoader(
        train_set,
        batch_size=settings.batch_size,
        collate_fn=whole_batch,
        generator=generator(randomness.sampling),
    )
    # Opacus samples at 1 / len(loader); float division makes it take, for some lengths, a step fewer than that.
    steps_per_epoch = int(1 / (1 / len(loader)))
    if settings.noise_multiplier is None:
        noise_multiplier = _noise_for(settings, steps_per_epoch)
    else:
        noise_multiplier = settings.noise_multiplier
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(
            module.parameters(), lr=settings.learning_rate, momentum=settings.momentum
        ),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=settings.max_grad_norm,
        noise_generator=generator(randomness.noise, device),
        grad_sample_mode=settings.grad_sample_mode,
    )
    if settings.grad_sample_mode == "ghost":
        model, optimizer, criterion, private_loader = made
    else:
        (model, optimizer, private_loader), criterion = made, nn.CrossEntropyLoss()
    return _PrivateSetting(
        model, optimizer, criterion, private_loader, engine.accountant, noise_multiplier
    )


def _noise_for(settings: TrainingConfig, steps_per_epoch: int) -> float:
    try:
        noise_multiplier: float = get_noise_multiplier(
            target_epsilon=settings.target_epsilon,
            target_delta=settings.delta,
            sample_rate=1 / steps_per_epoch,
            steps=settings.epochs * steps_per_epoch,
            accountant="rdp",
            epsilon_tolerance=_EPSILON_TOLERANCE,
        )
    except ValueError as error:
        raise InputError(
            f"target_epsilon={settings.target_epsilon} cannot be reached at delta={settings.delta:g} with any noise; "
            "choose a larger one, or give noise_multiplier"
        ) from error
    return noise_multiplier


@contextmanager
def quiet_opacus() -> Iterator[None]:
    """Leave out what Opacus and torch warn of in every private run, and what this run says elsewhere or knows better."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")  # run.json says so
        warnings.filterwarnings(
            "ignore", "Full backward hook is firing"
        )  # inputs need no gradients
        # The best order is an end of Opacus's grid: epsilon is then larger than need be, never too small.
        warnings.filterwarnings("ignore", "Optimal order is the")
        yield
