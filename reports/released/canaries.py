"""Canaries in runs of the tasks: crafted or not, for the final model, and gradients, for every update."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from audits.intervals import student_interval
from audits.training.datasets import Dataset
from audits.training.models import first_parameters
from audits.training.shadows import trainer_of
from indpriv._files import read_json, write_json
from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.analysis.attacks.rates import rates_on_updates
from indpriv.attack_scores import AttackScores
from indpriv.norm_log.run_files import CANARIES, GRADIENT_CANARIES
from indpriv.recording import GradientCanaries, InsertedCanaries, Recorder, crafted_canaries
from reports.attacks.training import BASELINE, DP, SEED, Task
from reports.shared.rates import RATES
from reports.shared.recorded import worst_case_of

COUNT, RUNS = 300, {"adult": 2, "mnist": 4}  # of items; gradients in one run, as many of them fit
GRADIENTS = 1000
WRONG, CRAFTED, UPDATES = "mislabelled", "crafted", "updates"
TITLES = {
    WRONG: "loss of mislabelled canaries",
    CRAFTED: "loss of crafted canaries",
    UPDATES: "likelihood ratio of gradient canaries",
}
BOUNDS = {
    "epsilon": "steinke2023",
    "epsilon_fdp": "mahloujifar2024",
    "epsilon_gaussian": "gaussian_ranks",
}
LOSS, MEAN = nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss()


def figures(task: Task, folder: Path) -> dict[str, Any]:
    """What canaries of each kind show, with DP and without; what is in the folder is not done again."""
    data = task.dataset()
    items = of_kinds(task, data, folder)
    found: dict[str, Any] = {"count": COUNT, "runs": RUNS[task.name], "gradients": GRADIENTS}
    for kind in (DP, BASELINE):
        found[kind] = {}
        for name in TITLES if kind == DP else (WRONG, CRAFTED):
            each = []
            for row in range(1 if name == UPDATES else RUNS[task.name]):
                path = folder / f"{task.name}-{kind}-{name}-{row}"
                if not path.with_suffix(".json").is_file():
                    shutil.rmtree(path, ignore_errors=True)  # an interrupted run
                    canaries = items.get(name)
                    measured = (
                        private(task, data, canaries, path)
                        if kind == DP
                        else without_dp(task, data, canaries)
                    )
                    write_json(path.with_suffix(".json"), measured)
                    print(path.name, flush=True)  # noqa: T201
                each.append(read_json(path.with_suffix(".json")))
            found[kind][name] = {"title": TITLES[name], **together(each)}
    return found


def start(task: Task, data: Dataset) -> nn.Module:
    """The model that every run here starts from, and canaries are crafted for."""
    return first_parameters(task.config.model, data.input_shape, data.n_classes, SEED)


def tensors(part: Any, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inputs and classes of some examples."""
    return torch.from_numpy(part.inputs[rows]), torch.from_numpy(part.targets[rows])


def of_kinds(task: Task, data: Dataset, folder: Path) -> dict[str, TensorDataset]:
    """Test examples with wrong labels, and random inputs with these labels, crafted at the start."""
    rng = np.random.default_rng([SEED, 45])
    inputs, targets = tensors(data.test, rng.permutation(len(data.test))[:COUNT])
    shifts = torch.from_numpy(rng.integers(1, data.n_classes, COUNT))
    wrong = TensorDataset(inputs, (targets + shifts) % data.n_classes)
    path = folder / f"{task.name}-crafted.npy"
    if not path.is_file():
        low, high = inputs.amin(0), inputs.amax(0)
        noise = low + torch.from_numpy(rng.random(inputs.shape, np.float32)) * (high - low)
        made = crafted_canaries(start(task, data), noise, wrong.tensors[1], LOSS)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, made.tensors[0].numpy())
    return {WRONG: wrong, CRAFTED: TensorDataset(torch.from_numpy(np.load(path)), wrong.tensors[1])}


def trained(task: Task, model: nn.Module, dataset: Any) -> nn.Module:
    """A model trained without DP, with the settings of the task's baseline."""
    training = task.config.training
    rate = training.non_private_learning_rate or training.learning_rate
    loader = DataLoader(dataset, batch_size=training.batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=training.momentum)
    steps(model, optimizer, loader, training.epochs)
    return model.eval()


def steps(
    model: nn.Module, optimizer: Any, loader: Any, epochs: int, mean_loss: Any = MEAN
) -> None:
    """Steps of SGD, as a user writes them."""
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            mean_loss(model(inputs), targets).backward()
            optimizer.step()


def without_dp(task: Task, data: Dataset, items: TensorDataset) -> dict[str, Any]:
    """One model without DP that fair coins gave some of the items."""
    canaries = InsertedCanaries(
        TensorDataset(*tensors(data.train, np.arange(len(data.train)))), items
    )
    model = trained(task, start(task, data), canaries.train_set)
    with torch.no_grad():
        losses = LOSS(model(items.tensors[0]).double(), items.tensors[1]).numpy()
    return of_scores(
        AttackScores(-losses, canaries.member, "", fair_coins=True), task.config.training.delta
    )


def private(task: Task, data: Dataset, items: TensorDataset | None, folder: Path) -> dict[str, Any]:
    """One run with DP, with canaries that are items, or gradients if there are none."""
    training = task.config.training
    sigma = float(trainer_of(task.config, data, without_dp=False).settings["noise_multiplier"])
    dataset: Any = TensorDataset(*tensors(data.train, np.arange(len(data.train))))
    attack: Any = GradientCanaries(GRADIENTS) if items is None else InsertedCanaries(dataset, items)
    dataset = dataset if items is None else attack.train_set
    batch = {"batch_size": training.batch_size}
    model = start(task, data)
    model, optimizer, mean_loss, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=training.learning_rate, momentum=training.momentum
        ),
        data_loader=DataLoader(dataset, **batch) if items is None else attack.loader(**batch),
        noise_multiplier=sigma,
        max_grad_norm=training.max_grad_norm,
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode="ghost",
    )
    recorder = Recorder(
        folder, dataset=dataset, loss_fn=LOSS, every="once", attack=attack, start="random",
        run_info={"delta": training.delta},
    )  # fmt: skip
    with recorder.attach(model, optimizer, loader):
        steps(model, optimizer, loader, training.epochs, mean_loss)
    scores = AttackScores.from_file(folder / (GRADIENT_CANARIES if items is None else CANARIES))
    return {**worst_case_of(folder), **of_scores(scores, training.delta)}


def of_scores(scores: AttackScores, delta: float) -> dict[str, Any]:
    """Rates and lower bounds of one run."""
    found = rates_on_updates(scores).set_index("rate")
    ends = found[["low", "high"]].dropna().to_dict("index")
    bounds = measure_attack(scores, delta=delta).bounds
    return {
        "rates": found["value"].to_dict(),
        "ends": ends,
        "bounds": {name: bounds[key].epsilon for name, key in BOUNDS.items()},
    }


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over runs with Student's intervals, of one run with its own; means of its bounds."""
    found: dict[str, Any] = {"tpr_at_fpr": {}, "tpr_at_fpr_intervals": {}}
    for rate, values in rows_of(runs):
        ends = student_interval(values, 0.0, 1.0)
        key = rate if rate == "auc" else f"tpr_{rate}"
        span = runs[0].get("ends", {}).get(key) if ends is None else vars(ends)
        if rate == "auc":
            found |= {"auc": float(values.mean()), "auc_interval": span}
        else:
            found["tpr_at_fpr"][rate] = float(values.mean())
            found["tpr_at_fpr_intervals"][rate] = span
    found["bounds"] = pd.DataFrame([one["bounds"] for one in runs]).mean().to_dict()
    return found | {
        key: runs[0][key] for key in ("epsilon", "meaning", "ceiling") if key in runs[0]
    }


def rows_of(runs: list[dict[str, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    """The AUC and the true-positive rates of each run."""
    for name, key in (("auc", "auc"), *((rate, f"tpr_{rate}") for rate in RATES)):
        yield name, np.array([one["rates"][key] for one in runs])
