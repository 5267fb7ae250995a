"""What is trained: for each task an audited run, and studies with DP and without it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from audits.training.config import AuditConfig
from audits.training.datasets import Dataset, load_dataset
from audits.training.dp_sgd import train
from audits.training.shadows import train_shadows
from indpriv._files import write_json
from indpriv.audit import audit
from indpriv.audit.attacks import guarantee_of_run, known_of_run, results_of_run
from indpriv.norm_log.run_files import RUN_JSON

SEED = 18  # of all but the audited run of Adult, fixed before the first result
AUDITS = Path(__file__).resolve().parents[2] / "audits"
RUN, AUDIT, TIMING = "run", "audit", "timing.json"
REFERENCES, BASELINE_REFERENCES = "four-references", "four-references-non-dp"
DP, BASELINE = "dp", "non_dp"
PICTURES = 5000
_MNIST = {
    "name": "mnist_5000",
    "data": {"dataset": "mnist"},
    "model": {"architecture": "mlp", "hidden": [128], "activation": "relu"},
    "training": {
        "epochs": 20,
        "batch_size": 256,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "max_grad_norm": 1.0,
        "target_epsilon": 3.0,
        "delta": 1e-5,
        "grad_sample_mode": "ghost",
        "non_private_baseline": True,
    },
    "recording": {"every": 1},
    "checkpoints": {"every": "epoch"},
}


def few_pictures() -> Dataset:
    """MNIST's training pictures in part: enough that a study trains on 5,000, and 5,000 others.

    A study always trains on half of its pictures, and on each of the others by a fair coin.
    """
    mnist = load_dataset("mnist")
    order = np.random.default_rng(SEED).permutation(len(mnist.train))
    size = 4 * PICTURES // 3

    def chosen(positions: np.ndarray) -> np.ndarray:
        return np.isin(np.arange(len(order)), positions)

    return replace(
        mnist,
        train=mnist.train.take(chosen(order[:size])),
        test=mnist.train.take(chosen(order[size : size + PICTURES])),
    )


@dataclass(frozen=True)
class Task:
    """An audit, its data, and the number of models of its studies.

    Attributes:
        name: of its folder and figures.
        title: for the page.
        detail: what is trained, in sentences for the page.
        config: the audit.
        dataset: loads the data.
        models: number of models of the study with DP ("dp") and without it ("non_dp").
        audited: the audited run of another page, which has no seed; None for one of its own.
    """

    name: str
    title: str
    detail: str
    config: AuditConfig
    dataset: Callable[[], Dataset]
    models: dict[str, int]
    audited: Path | None = None

    def run(self, folder: Path) -> Path:
        """Where the audited run lies."""
        return self.audited or folder / RUN

    def train(self, folder: Path, tell: Callable[[str], None]) -> None:
        """Train what the folder does not hold yet."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = self.dataset()
        if not (folder / AUDIT).is_dir():
            run = self.run(folder)
            if not (run / RUN_JSON).is_file():
                tell(f"{self.name}: the audited run")
                partial_run = folder / "partial"
                shutil.rmtree(partial_run, ignore_errors=True)
                seed = SEED if self.audited is None else None
                train(self.config, partial_run, seed=seed, dataset=data)
                partial_run.rename(run)
            if not (folder / TIMING).is_file():
                self._time_references(folder, data, tell)
            tell(f"{self.name}: four references for its baseline")
            baseline = folder / BASELINE_REFERENCES
            self._references(folder, data, baseline, without_dp=True)
            audit(
                run,
                folder / AUDIT,
                signals=folder / REFERENCES,
                baseline_signals=baseline,
            )
        for kind in (BASELINE, DP):
            tell(f"{self.name}: {self.models[kind]} models, {kind}")
            train_shadows(
                self.config,
                folder / kind,
                self.models[kind],
                without_dp=kind == BASELINE,
                labels=True,
                checkpoints=True,
                seed=SEED,
                dataset=data,
            )

    def _time_references(self, folder: Path, data: Dataset, tell: Callable[[str], None]) -> None:
        """Four references for the run and RMIA with them, with the time that they took."""
        tell(f"{self.name}: four references for the audited run")
        shutil.rmtree(folder / REFERENCES, ignore_errors=True)
        wall, cpu = time.monotonic(), time.process_time()
        self._references(folder, data, folder / REFERENCES)
        known = known_of_run(self.run(folder), folder / REFERENCES)
        results_of_run(known, ["rmia"], guarantee_of_run(self.run(folder)))
        seconds = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
        write_json(folder / TIMING, {**seconds, "load": os.getloadavg()[0]})

    def _references(
        self, folder: Path, data: Dataset, output: Path, *, without_dp: bool = False
    ) -> None:
        train_shadows(
            self.config,
            output,
            4,
            for_run=self.run(folder),
            without_dp=without_dp,
            seed=SEED,
            dataset=data,
        )


TASKS = (
    Task(
        "adult",
        "Adult",
        "The audit is `audits/adult.toml`, and the audited run that of [its page](../adult/audit.md).",
        AuditConfig.from_toml(AUDITS / "adult.toml"),
        partial(load_dataset, "adult"),
        {DP: 32, BASELINE: 17},
        AUDITS.parent / "reports" / "runs" / "adult",
    ),
    Task(
        "mnist",
        "MNIST, 5,000 pictures",
        "The model has 128 hidden units. A study has 6,666 pictures and trains on 5,000 of them on "
        "average; the test examples of the audited run are 5,000 others, all from MNIST's training "
        "set.",
        AuditConfig.from_dict(_MNIST),
        few_pictures,
        {DP: 17, BASELINE: 64},
    ),
)
