"""Reference DP-SGD: an ordinary Opacus run, recorded.

What it writes is sensitive, except for the models under their guarantee.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from audits.training.attributes import attribute_knowledge, write_knowledge
from audits.training.baseline import example_table, fit_without_dp
from audits.training.checkpoints import MEDIAN, TrainingState, check_new, state_to_resume
from audits.training.config import AuditConfig
from audits.training.datasets import Dataset, load_dataset
from audits.training.datasets.rows import chosen_rows
from audits.training.label_privacy import with_label_privacy
from audits.training.leakage import leak_after_training
from audits.training.models import LOSSES
from audits.training.private_setting import PrivateSetting, make_private, quiet_opacus
from audits.training.randomness import Randomness
from audits.training.run_record import (
    check_complete,
    complete_record,
    finish_record,
    first_record,
    guarantee_of,
    training_facts,
)
from audits.training.steps import RecordedSteps
from audits.training.tensors import tensor_set
from indpriv._files import write_atomically
from indpriv._folders import make_folder
from indpriv._storage import location_on_disk
from indpriv._types import StageProgress, silent
from indpriv.accountant import PrivacyFilter
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import (
    ATTRIBUTES,
    ATTRIBUTES_NON_DP,
    EXAMPLES,
    EXAMPLES_NON_DP,
    MODEL_NON_DP,
    RESUME,
    signing_key,
)
from indpriv.recording import GradientCanaries, Recorder, WhiteBox


@dataclass(frozen=True)
class TrainedRun:
    """A finished run.

    Attributes:
        run_dir: directory of the log, run.json, checkpoints and example tables.
        module: the final model.
        steps: number of updates.
        worst_case_epsilon: the run's guarantee by Opacus's RDP accountant, at the configuration's
            delta, for adding or removing one example, with Poisson sampling; a private clipping
            norm is included. Void if the run was seeded.
        test_accuracy: share of the test examples that the final model classifies correctly.
        account: of a federated run, what its worst-case epsilon means.
    """

    run_dir: Path
    module: nn.Module
    steps: int
    worst_case_epsilon: float
    test_accuracy: float
    account: str = ""


def train(
    config: AuditConfig,
    run_dir: str | Path,
    *,
    seed: int | None = None,
    progress: StageProgress | None = None,
    device: str = "cpu",
    data_dir: str | Path | None = None,
    dataset: Dataset | None = None,
    privacy_filter: PrivacyFilter | Callable[[float, float], PrivacyFilter] | None = None,
    n_planned: int | None = None,
    resume: bool = False,
    sign_with: str | Path | None = None,
) -> TrainedRun:
    """Train an audit's model with DP-SGD and record it.

    Writes RUN/run.json, the Recorder's log and examples.parquet, RUN/checkpoints/step-*.pt, their
    test accuracy and epsilon in RUN/curve.parquet and, if the audit asks for them, RUN/leakage and
    RUN/attributes.parquet; of a non-private baseline, its examples, attributes and parameters.
    Ctrl-C or SIGTERM stops training after the current step; all files are written as at the end.

    Args:
        config: the audit.
        run_dir: a new directory, or that of the run to resume.
        seed: makes the run "reproducible: no privacy": anyone who knows the seed can regenerate
            noise and sampling. None draws both from the operating system.
        progress: called as progress(stage, done, total) after each step.
        device: device to train on, e.g. "cpu" or "cuda".
        data_dir: folder of data sets that do not ship with a package; default: INDPRIV_DATA.
        dataset: data to use instead of loading the configuration's.
        privacy_filter: an `indpriv.PrivacyFilter` (see `Recorder`), or a function that makes one of
            noise_multiplier (the median) and sample_rate; an audit with filter_epsilon needs it.
        n_planned: number of examples behind sampling rate and noise; default those in the data.
        resume: go on after the last checkpoint: a seeded run to the end that it would have reached
            (on a CPU to the bit), another with new random numbers. Steps beyond it become void.
        sign_with: path of an OpenSSH private key that signs the log; see `Recorder`.

    Raises:
        InputError: a configuration, data set, directory, run or key that cannot be used.
        EvidenceError: the log would be wrong (from the Recorder).
        KeyboardInterrupt: it was stopped by Ctrl-C or SIGTERM; RUN is usable.
    """
    started, progress = time.monotonic(), progress or silent
    run_dir = location_on_disk(run_dir, "a run is")
    key = signing_key(sign_with)
    _check_filter(config, privacy_filter)
    if not resume:
        check_new(run_dir)
    dataset = chosen_rows(dataset or load_dataset(config.data.dataset, data_dir), config.data)
    randomness = Randomness.from_seed(seed)
    dataset = with_label_privacy(dataset, config, randomness)
    begun = state_to_resume(run_dir, config, dataset, seed) if resume else None
    with quiet_opacus():
        # Rounded to three digits, the norms of two passes would differ.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        private = make_private(config, dataset, randomness, device, n_planned, _drawn(begun))
        steps = RecordedSteps(run_dir, config, private, dataset.test, seed, begun)
        options = private, randomness, _filter_of(private, privacy_filter), begun, sign_with
        steps.take(_make_recorder(run_dir, config, dataset, *options), progress)
        epsilon = private.worst_case_epsilon(config.training.delta, steps.lost)
    run = TrainedRun(run_dir, private.module, private.steps_taken, epsilon, _test_accuracy(run_dir))
    _complete(run, private, steps, key, seconds=time.monotonic() - started)
    _after_training(config, run, dataset, seed, progress, device, key)
    return run


def _complete(
    run: TrainedRun, private: PrivateSetting, steps: RecordedSteps, key: Any, *, seconds: float
) -> None:
    """Write what the steps came to; KeyboardInterrupt if some are left."""
    seeded = steps.seed is not None
    guarantee = guarantee_of(private, run.worst_case_epsilon, lost=steps.lost, seeded=seeded)
    counts = run.steps, private.total_steps, seconds + steps.seconds_before
    complete_record(run.run_dir, guarantee, run.test_accuracy, *counts, key)
    check_complete(run.run_dir, run.steps, private.total_steps, "steps")


def _after_training(
    config: AuditConfig,
    run: TrainedRun,
    dataset: Dataset,
    seed: int | None,
    progress: StageProgress,
    device: str,
    key: Any,
) -> None:
    """Write what attacks of the audit need; then nothing is left to do."""
    _write_attributes(config, run.module, dataset, run.run_dir / ATTRIBUTES, device)
    leak_after_training(config, run.run_dir, dataset, seed, progress)
    if config.training.non_private_baseline:
        baseline = fit_without_dp(config, dataset, seed=seed, progress=progress, device=device)
        _write_baseline(config, baseline, dataset, run.run_dir, device)
    finish_record(run.run_dir, RESUME, key)


def _drawn(begun: TrainingState | None) -> float | None:
    """The private median that the run drew when it began, if any."""
    return None if begun is None else begun.clipping.get(MEDIAN)


def _filter_of(
    private: PrivateSetting, given: PrivacyFilter | Callable[[float, float], PrivacyFilter] | None
) -> PrivacyFilter | None:
    if not callable(given):
        return given
    noise = float(np.median(private.planned.noise_multiplier))
    return given(noise, private.loader.sample_rate)


def _write_baseline(
    config: AuditConfig, module: nn.Module, dataset: Dataset, run_dir: Path, device: str
) -> None:
    table = example_table(module, dataset, device, loss=config.training.loss)
    table.to_parquet(run_dir / EXAMPLES_NON_DP)
    make_folder(run_dir, Path(MODEL_NON_DP).parent.name)
    parameters = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    write_atomically(run_dir / MODEL_NON_DP, safetensors.torch.save(parameters))
    _write_attributes(config, module, dataset, run_dir / ATTRIBUTES_NON_DP, device)


def _write_attributes(
    config: AuditConfig, module: nn.Module, dataset: Dataset, path: Path, device: str
) -> None:
    """What the model says about the attributes that the audit names, for attacks."""
    if config.attacks.attributes:
        names = config.attacks.attributes
        write_knowledge(attribute_knowledge(module, dataset, names, device), path)


def _test_accuracy(run_dir: Path) -> float:
    """Share of the test examples that the final model classifies correctly."""
    return float(ExampleTable.from_parquet(run_dir / EXAMPLES).test["correct"].mean())


def _check_filter(config: AuditConfig, privacy_filter: object) -> None:
    if config.training.filter_epsilon is not None and privacy_filter is None:
        raise InputError(
            f"the audit has filter_epsilon={config.training.filter_epsilon:g}, but no "
            "privacy_filter was passed; make one with indpriv.PrivacyFilter.for_epsilon "
            "(`python -m audits train` does, but not with canaries)"
        )


def _make_recorder(
    run_dir: Path,
    config: AuditConfig,
    dataset: Dataset,
    private: PrivateSetting,
    randomness: Randomness,
    privacy_filter: PrivacyFilter | None,
    begun: TrainingState | None,
    sign_with: str | Path | None,
) -> Recorder:
    recording, column = config.recording, config.data.unit_column
    return Recorder(
        run_dir,
        dataset=private.train_set,
        loss_fn=LOSSES[config.training.loss](reduction="none"),
        policy=recording.to_policy(),
        rounding=recording.rounding,
        rounding_mode=recording.rounding_mode,
        individual_clipping=config.training.individual_clipping,
        clip_headroom=config.training.clip_headroom,
        clipping_norm_epsilon=private.clipping_norm_epsilon,
        test_set=tensor_set(dataset.test),
        record_holdout=recording.record_holdout or config.attacks.white_box > 0,
        metadata=dataset.train.metadata,
        unit="example" if column is None else "user",
        unit_ids=None if column is None else dataset.train.units(column),
        test_metadata=dataset.test.metadata,
        privacy_filter=privacy_filter,
        attack=_attack(config, randomness),
        seeded=randomness.seeded,
        start=_start(config.model.pretrained),
        public_settings=private.public_law,
        resume_at=None if begun is None else begun.recorder,
        sign_with=sign_with,
        run_info=first_record(
            config,
            dataset,
            private.module,
            training_facts(config, private),
            seeded=randomness.seeded,
        ),
    )


def _start(pretrained: str | None) -> str:
    return "random" if pretrained is None else f"pretrained: {Path(pretrained).name}"


def _attack(config: AuditConfig, randomness: Randomness) -> GradientCanaries | WhiteBox | None:
    """The attack that the run makes on itself; None if the audit file has none."""
    attacks = config.attacks
    if attacks.white_box:
        return WhiteBox(attacks.white_box, seed=randomness.canaries)
    if not attacks.gradient_canaries:
        return None
    return GradientCanaries(
        attacks.gradient_canaries,
        attacks.canary_lengths,
        seed=randomness.canaries,
    )
