"""A run that audits itself: canaries that independent fair coins put into the training data or left out. Sensitive.

After Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023, arXiv:2305.08846). The
canaries are mislabelled training examples, which a model learns by heart if it learns anything by heart. They cost some
accuracy. Batch size and number of steps follow from the number of examples that the coins leave, as in any run, whose
number is not protected either.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._checks import check_positive_int
from indpriv._progress import StageProgress
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.norm_log.run_files import CANARIES
from indpriv.training.config import AuditConfig
from indpriv.training.datasets import Dataset, load_dataset
from indpriv.training.datasets.base import Split
from indpriv.training.dp_sgd import TrainedRun, train
from indpriv.training.non_dp import example_table

LEAST_CANARIES = 16  # fewer prove nothing
METHOD = "final loss of mislabelled canaries"
_COINS = 1  # stream of random numbers, apart from those of training


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
) -> TrainedRun:
    """Train as `train` does, with canaries in the data; write how the final model does on them to RUN/canaries.parquet.

    Args:
        config: the audit.
        run_dir: a new directory.
        n_canaries: training examples that become canaries: each gets a random wrong label, and a fair coin of its own
            decides whether it is trained on.
        seed: as for `train`; None draws canaries and coins from the operating system.
        progress: called as progress(stage, done, total) after each step.
        device: where to train.
        data_dir: folder of data sets that do not ship with a package.
        dataset: data to use instead of loading the configuration's.

    Raises:
        InputError: as for `train`; or too few or too many canaries, a single class, or a cap on rows.
    """
    dataset = dataset or load_dataset(config.data.dataset, data_dir)
    if config.data.max_rows_per_unit is not None:
        raise InputError(
            "canaries go with all rows: a cap (max_rows_per_unit) would drop some that their coins include"
        )
    check_positive_int("canaries", n_canaries, minimum=LEAST_CANARIES)
    if n_canaries >= len(dataset.train):
        raise InputError(
            f"canaries={n_canaries} is not below the {len(dataset.train)} training examples; pass fewer"
        )
    if dataset.n_classes < 2:
        raise InputError(
            f"{dataset.name} has one class, so that no label is wrong; canaries need two"
        )
    rng = np.random.default_rng(None if seed is None else [seed, _COINS])
    positions = np.sort(rng.choice(len(dataset.train), n_canaries, replace=False))
    included = rng.integers(0, 2, n_canaries) == 1
    targets = dataset.train.targets.copy()
    targets[positions] = (
        targets[positions] + rng.integers(1, dataset.n_classes, n_canaries)
    ) % dataset.n_classes
    kept = np.ones(len(targets), dtype=bool)
    kept[positions] = included
    is_canary = np.zeros(len(targets), dtype=bool)
    is_canary[positions] = True
    changed = Split(dataset.train.inputs, targets, _with_column(dataset.train, is_canary))
    test = Split(
        dataset.test.inputs,
        dataset.test.targets,
        _with_column(dataset.test, np.zeros(len(dataset.test), dtype=bool)),
    )
    with_canaries = replace(dataset, train=changed.take(kept), test=test)
    run = train(config, run_dir, seed=seed, progress=progress, device=device, dataset=with_canaries)
    losses = example_table(
        run.module, replace(with_canaries, train=changed.take(is_canary)), device
    ).train
    AttackScores(
        scores=-losses["loss"].to_numpy(np.float64),
        member=included,
        method=METHOD,
        groups=np.array(dataset.class_names, dtype=object)[targets[positions]],
        fair_coins=True,
    ).to_parquet(run.run_dir / CANARIES)
    return run


def _with_column(split: Split, is_canary: NDArray[np.bool_]) -> pd.DataFrame:
    """Metadata with the column "canary", so that reports can tell canaries from people."""
    known = (
        split.metadata
        if split.metadata is not None
        else pd.DataFrame(index=pd.RangeIndex(len(split)))
    )
    if "canary" in known.columns:
        raise InputError(
            "the data has a column 'canary' of its own; rename it to train with canaries"
        )
    return known.assign(canary=is_canary)
