"""reports/label_dp/README.md and label_dp.json beside it: label differential privacy on Adult and MNIST.

python -m reports.label_dp [--write-only]

The figures of a finished model are kept, so the command goes on where it was stopped. All takes
three minutes on Adult, thirteen on MNIST, on one core that is idle.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from audits.training.baseline import fit_without_dp
from audits.training.config import AuditConfig
from audits.training.datasets import Dataset, load_dataset
from audits.training.label_privacy import randomised, randomised_with_prior
from indpriv._files import read_json, write_json
from indpriv._types import FloatArray
from reports import REPORTS
from reports.label_dp.page import (
    ATTACKS,
    GUESSED,
    METHODS,
    MODELS,
    NONE,
    PASSES,
    PRIOR,
    REFERENCES,
    ROWS,
    RUNS,
    STUDIES,
    Study,
    guess,
    render,
)

HERE = Path(__file__).parent
LARGER = {"batch_size": 32}


def main() -> None:
    """Train what is missing, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m reports.label_dp", description=__doc__)
    parser.add_argument("--write-only", action="store_true", help="train nothing")
    options = parser.parse_args()
    figures = HERE / "label_dp.json"
    known = read_json(figures) if figures.is_file() else {}
    for study in () if options.write_only else STUDIES:
        _run(study, known.setdefault(study.data, {}), partial(write_json, figures, known))
    (HERE / "README.md").write_text(render(known), encoding="utf-8")


def _run(study: Study, known: dict[str, Any], keep: Callable[[], object]) -> None:
    """Train what is missing of a data set, with the seconds of one core that each model took."""
    config = AuditConfig.from_toml(REPORTS.parent / "audits" / f"{study.data}_label_dp.toml")
    data = load_dataset(study.data)
    for method in METHODS:
        for epsilon in study.epsilons if method != NONE else (0.0,):
            found = known.setdefault("accuracy", {}).setdefault(f"{method} {epsilon:g}", [])
            while len(found) < RUNS:
                begun = time.process_time()
                found.append(accuracy(config, data, method, epsilon))
                known["seconds"] = known.get("seconds", 0) + time.process_time() - begun
                keep()
    for attack, epsilon in ((a, e) for a in study.attacks for e in (0.0, *study.epsilons)):
        found = known.setdefault(attack, {})
        if f"{epsilon:g}" not in found:
            begun = time.process_time()
            found[f"{epsilon:g}"] = guessed(config, data, epsilon, attack == ATTACKS[1])
            known["seconds"] = known.get("seconds", 0) + time.process_time() - begun
            keep()


def accuracy(config: AuditConfig, data: Dataset, method: str, epsilon: float) -> float:
    """Test accuracy of one model; epsilon 0: of the labels as they are.

    With a prior, a model of one half of the rows, by randomised response, says which classes are
    likely for the other half; the last model learns from both halves.
    """
    random, labels = np.random.default_rng(), data.train.targets
    if method != NONE:
        labels = randomised(labels, data.n_classes, epsilon, random)
    if method == PRIOR:
        first = random.permutation(len(labels)) < len(labels) // 2
        half = replace(data.train, targets=labels).take(first)
        model = fit_without_dp(config, replace(data, train=half))
        prior = np.exp(log_probabilities(model, data.train.inputs[~first]))
        drawn = randomised_with_prior(data.train.targets[~first], prior, epsilon, random)
        labels = labels.copy()
        labels[~first] = drawn
    model = fit_without_dp(config, with_labels(data, labels))
    found = log_probabilities(model, data.test.inputs).argmax(axis=1)
    return float(np.mean(found == data.test.targets))


def guessed(config: AuditConfig, data: Dataset, epsilon: float, larger: bool) -> dict[str, Any]:
    """How many secret labels, which are random and fit no row, are guessed from models that fit all too well."""
    random = np.random.default_rng()
    kept = np.isin(np.arange(len(data.train)), random.permutation(len(data.train))[:ROWS])
    data = replace(data, train=data.train.take(kept))
    training = replace(config.training, non_private_epochs=PASSES)
    config = replace(config, training=training)
    if larger:
        model = replace(config.model, architecture="mlp", hidden=(512,), activation="tanh")
        config = replace(config, model=model, training=replace(training, **LARGER))
    secrets, found, without = [], [], []
    for number in range(MODELS + REFERENCES):
        labels = data.train.targets.copy()
        labels[:GUESSED] = random.integers(0, data.n_classes, GUESSED)
        secret = labels[:GUESSED].copy()
        if epsilon:
            labels = randomised(labels, data.n_classes, epsilon, random)
        learned = with_labels(data, labels)
        if number >= MODELS:  # a reference knows none of the secrets
            others = np.arange(len(labels)) >= GUESSED
            learned = replace(data, train=learned.train.take(others))
        model = fit_without_dp(config, learned)
        said = log_probabilities(model, data.train.inputs[:GUESSED])
        (found if number < MODELS else without).append(said)
        secrets.append(secret)
    guesses = guess(np.array(found), np.array(without))
    hits = [int(np.sum(g == s)) for g, s in zip(guesses, secrets[:MODELS], strict=True)]
    return {"hits": hits, "guesses": GUESSED}


def with_labels(data: Dataset, labels: FloatArray) -> Dataset:
    """The data with other labels in training."""
    return replace(data, train=replace(data.train, targets=labels))


def log_probabilities(model: torch.nn.Module, inputs: FloatArray) -> FloatArray:
    """(n, k) of each class."""
    with torch.no_grad():
        parts = torch.from_numpy(inputs).split(1000)
        return torch.cat([model(part).log_softmax(1) for part in parts]).double().numpy()


if __name__ == "__main__":
    main()
