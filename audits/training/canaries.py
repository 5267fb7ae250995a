"""A run that audits itself with canaries; an independent fair coin decides to include each of them.

After Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023,
arXiv:2305.08846). The canaries are mislabelled training examples, which a model memorises if it
memorises anything. They cost some accuracy. Sampling rate, noise and number of steps follow from
all examples, so that only sums of gradients depend on the coins. Sensitive.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audits.training.baseline import example_table
from audits.training.config import AuditConfig
from audits.training.datasets import Dataset, load_dataset
from audits.training.datasets.base import Split
from audits.training.dp_sgd import TrainedRun, train
from indpriv._checks import check_positive_int
from indpriv._types import StageProgress
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.norm_log.run_files import CANARIES, seal, signing_key
from indpriv.recording.attacks import MislabelledCanaries, draw_canaries

LEAST_CANARIES = 16  # fewer prove nothing
_COINS = 1  # second word of the seed, so that coins are independent of training


def train_with_canaries(
    config: AuditConfig,
    run_dir: str | Path,
    n_canaries: int,
    *,
    seed: int | None = None,
    progress: StageProgress | None = None,
    device: str = "cpu",
    data_dir: str | Path | None = None,
    dataset: Dataset | None = None,
    sign_with: str | Path | None = None,
) -> TrainedRun:
    """Train like `train`, with canaries in the data; write their scores to RUN/canaries.parquet.

    n_canaries training examples become canaries: each gets a random wrong label, and an independent
    fair coin decides whether it is trained on. The other arguments are those of `train`; without a
    seed, canaries and coins are drawn from the operating system too.

    Raises:
        InputError: as `train`; or too few or too many canaries, one class, or a cap on rows.
    """
    dataset = dataset or load_dataset(config.data.dataset, data_dir)
    _check_canaries(n_canaries, config, dataset)
    rng = np.random.default_rng(None if seed is None else [seed, _COINS])
    positions, included, shifts = draw_canaries(
        rng, len(dataset.train), n_canaries, dataset.n_classes
    )
    targets = dataset.train.targets.copy()
    targets[positions] = (targets[positions] + shifts) % dataset.n_classes
    is_canary = np.zeros(len(targets), dtype=bool)
    is_canary[positions] = True
    kept = ~is_canary
    kept[positions] = included
    changed = _with_column(replace(dataset.train, targets=targets), is_canary)
    test = _with_column(dataset.test, np.zeros(len(dataset.test), dtype=bool))
    with_canaries = replace(dataset, train=changed.take(kept), test=test)
    run = train(
        config,
        run_dir,
        seed=seed,
        progress=progress,
        device=device,
        dataset=with_canaries,
        n_planned=len(dataset.train),
        sign_with=sign_with,
    )
    canaries = replace(with_canaries, train=changed.take(is_canary))
    losses = example_table(run.module, canaries, device, loss=config.training.loss).train["loss"]
    AttackScores(
        scores=-losses.to_numpy(np.float64),
        member=included,
        method=MislabelledCanaries.method,
        groups=np.array(dataset.class_names, dtype=object)[targets[positions]],
        fair_coins=True,
    ).to_parquet(run.run_dir / CANARIES)
    seal(run.run_dir, signing_key(sign_with))
    return run


def _check_canaries(n_canaries: int, config: AuditConfig, dataset: Dataset) -> None:
    if config.data.chooses:
        raise InputError(
            "canaries need all rows: a cap (max_rows_per_unit), share, without or without_ids "
            "could drop canaries that were included; leave [data] without them"
        )
    check_positive_int("canaries", n_canaries, minimum=LEAST_CANARIES)
    if n_canaries >= len(dataset.train):
        raise InputError(
            f"canaries={n_canaries} is not below the number of training examples, "
            f"{len(dataset.train)}; pass fewer"
        )
    if dataset.n_classes < 2:
        raise InputError(
            f"{dataset.name} has one class, so no label is wrong; canaries need two classes"
        )


def _with_column(split: Split, is_canary: NDArray[np.bool_]) -> Split:
    """The split with the metadata column "canary", so that reports can separate canaries."""
    metadata = split.metadata
    if metadata is None:
        metadata = pd.DataFrame(index=pd.RangeIndex(len(split)))
    if "canary" in metadata.columns:
        raise InputError("the data already has a column 'canary'; rename it to train with canaries")
    return replace(split, metadata=metadata.assign(canary=is_canary))
