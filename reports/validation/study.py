"""Many short Opacus runs, each attacked by whoever sees every update and knows the rest.

Targets are in a run or out of it by a fair coin; all other training examples are in every run. Runs
alternate between Opacus's hooks and ghost clipping. What is kept of a run is one file of arrays.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

from audits.training.datasets import load_dataset
from audits.training.models import mlp
from audits.training.tensors import BatchedTensorDataset, whole_batch
from indpriv import NormLog, account
from indpriv.analysis.attacks.canaries import simulated_evidence
from indpriv.audit.attacks import white_box_of_run
from indpriv.norm_log.run_files import HOLDOUT
from indpriv.recording import Recorder, WhiteBox

EPOCHS, STEPS_PER_EPOCH = 6, 20
CLIP, MOMENTUM = 1.0, 0.9
DELTA = 1e-5


@dataclass(frozen=True)
class Study:
    """What the runs of a study train.

    Attributes:
        name: of its folder.
        title: of its data, for the page.
        dataset: of `audits.training.datasets`.
        examples: number of random training examples in use; None for all.
        targets: number of them that a fair coin puts into a run.
        hidden: units of the hidden layer.
        noise: noise multiplier.
        learning_rate: of SGD with momentum 0.9.
        accountant: of the epsilons by which the page sorts examples into bins.
        runs: number of attacked runs.
    """

    name: str
    title: str
    dataset: str
    examples: int | None
    targets: int
    hidden: int
    noise: float
    learning_rate: float
    accountant: str
    runs: int


DIGITS = Study("digits", "scikit-learn's digits", "digits", None, 700, 32, 0.8, 0.5, "pld", 48)
ADULT = Study("adult", "8,000 rows of Adult", "adult", 8000, 4000, 64, 1.2, 0.3, "rdp", 32)
MNIST = Study("mnist", "4,000 pictures of MNIST", "mnist", 4000, 2000, 64, 0.8, 0.3, "pld", 24)
STUDIES = (DIGITS, ADULT, MNIST)


@dataclass(frozen=True)
class StudyData:
    """Training examples as tensors, and the positions of the targets."""

    inputs: torch.Tensor
    labels: torch.Tensor
    targets: np.ndarray

    @classmethod
    def load(cls, study: Study) -> StudyData:
        """Examples and targets, which are the same in every run."""
        train = load_dataset(study.dataset).train
        order = np.random.default_rng(18).permutation(len(train.targets))
        kept = np.sort(order[: study.examples])
        return cls(
            torch.from_numpy(train.inputs[kept]),
            torch.from_numpy(train.targets[kept]),
            np.searchsorted(kept, np.sort(order[: study.targets])),
        )

    def subset(self, positions: np.ndarray) -> BatchedTensorDataset:
        """Some examples."""
        index = torch.from_numpy(positions)
        return BatchedTensorDataset(self.inputs[index], self.labels[index])


def train(
    study: Study,
    data: StudyData,
    run_dir: Path,
    inside: np.ndarray,
    outside: np.ndarray,
    *,
    mode: str,
    attack: Any,
) -> None:
    """One recorded Opacus run on the examples inside; those outside are its test set."""
    train_set = data.subset(inside)
    model = mlp(data.inputs[0].numel(), (study.hidden,), int(data.labels.max()) + 1, "tanh")
    optimizer = torch.optim.SGD(model.parameters(), lr=study.learning_rate, momentum=MOMENTUM)
    criterion: Any = nn.CrossEntropyLoss()
    size = -(-len(inside) // STEPS_PER_EPOCH)
    loader = DataLoader(train_set, batch_size=size, collate_fn=whole_batch)
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=study.noise,
        max_grad_norm=CLIP,
        grad_sample_mode=mode,
        **({"criterion": criterion} if mode == "ghost" else {}),
    )
    if mode == "ghost":
        private, optimizer, criterion, loader = made
    else:
        private, optimizer, loader = made
    recorder = Recorder(
        run_dir,
        dataset=train_set,
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        every=1,
        rounding=0,
        example_ids=inside,
        test_set=data.subset(outside) if len(outside) else None,
        record_holdout=len(outside) > 0,
        seeded=True,
        attack=attack,
    )
    with recorder.attach(private, optimizer, loader):
        for _ in range(EPOCHS):
            for inputs, labels in loader:
                optimizer.zero_grad()
                criterion(private(inputs), labels).backward()
                optimizer.step()


def epsilons(study: Study, data: StudyData, folder: Path) -> np.ndarray:
    """(n,) epsilon of every training example in one more run that has them all."""
    path = folder / "epsilon.npy"
    if not path.is_file():
        torch.manual_seed(10**6)
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_dir, everyone = Path(scratch) / "run", np.arange(len(data.labels))
            train(study, data, run_dir, everyone, everyone[:0], mode="hooks", attack=None)
            table = account(NormLog.open(run_dir), delta=DELTA, accountant=study.accountant)
        np.save(path, np.append(table.epsilon, table.worst_case_epsilon))
    return np.load(path)


def attacked_run(study: Study, data: StudyData, number: int) -> dict[str, np.ndarray]:
    """Evidence on every training example of one run, its prediction, and a simulation of it."""
    rng = np.random.default_rng([18, number])
    torch.manual_seed(number)
    outside = data.targets[rng.random(study.targets) < 0.5]
    inside = np.setdiff1d(np.arange(len(data.labels)), outside)
    mode = ("hooks", "ghost")[number % 2]
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_dir = Path(scratch) / "run"
        train(study, data, run_dir, inside, outside, mode=mode, attack=WhiteBox(len(data.labels)))
        scores, predicted = white_box_of_run(run_dir)
        logs = [NormLog.open(run_dir), NormLog.open(run_dir / HOLDOUT)]
        norms = np.hstack([np.minimum(log.read(), CLIP) / CLIP for log in logs])
        simulated = simulated_evidence(logs[0].settings, norms, scores.member, rng)
    return {
        "example": np.concatenate([inside, outside]),
        "member": scores.member,
        "evidence": scores.scores,
        "with_example": predicted["with_example"],
        "without_example": predicted["without_example"],
        "orders": np.array(predicted.columns[3:], np.float64),
        "renyi": predicted.to_numpy().T[3:],
        "simulated": simulated,
    }


def take_runs(study: Study, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Take the runs that the folder does not hold yet."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    data = StudyData.load(study)
    epsilons(study, data, folder)
    for number in range(study.runs):
        path = folder / f"run-{number:03}.npz"
        if not path.is_file():
            partial = path.with_suffix(".tmp.npz")
            np.savez(partial, **attacked_run(study, data, number))
            partial.rename(path)
        progress(number + 1, study.runs)
