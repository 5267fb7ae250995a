"""Accuracy under a privacy filter against ordinary DP-SGD with the same guarantee for every example.

python benchmarks/privacy_filter.py [adult] [mnist] [--data-dir DIR] [--epochs N] [--full]

Ordinary DP-SGD has the noise that its worst case needs. Under a filter most examples spend less than the worst case, so
that less noise (a share of the ordinary one) may be added: whoever reaches the cap of the same epsilon is left out from
then on. Examples are clipped individually there, at quarters of max_grad_norm after 1, 2, 4, ... steps up to an epoch.
Every run is checked: its checks pass, and according to the log no example spent more than the cap. Data and epochs are those of
benchmarks/individual_clipping.py, which says how MNIST is shortened; seeds are known: reproducible, no privacy.
"""

import argparse
import dataclasses
import os
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from individual_clipping import AUDITS, prepare

import indpriv
from audits.training.config import AuditConfig, RecordingConfig
from audits.training.datasets import DATA_DIR_VARIABLE
from audits.training.datasets.base import Dataset
from audits.training.dp_sgd import train
from indpriv import NormLog, PrivacyFilter
from indpriv._files import read_json

SEEDS = (0, 1)
NOISE = (1.0, 0.85, 0.7)  # shares of the ordinary noise
ONE_RECORD = RecordingConfig(every=10**9)  # which ordinary training does not depend on
QUARTERS = RecordingConfig(every=1, growth=2.0, longest="epoch", rounding=0.25)


def ordinary(config: AuditConfig, dataset: Dataset, seed: int) -> tuple[float, float, float]:
    """Test accuracy in per cent, noise multiplier, sample rate."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            dataclasses.replace(config, recording=ONE_RECORD),
            Path(folder) / "run",
            seed=seed,
            dataset=dataset,
        )
        training = read_json(run.run_dir / "run.json")["training"]
    return 100 * run.test_accuracy, training["noise_multiplier"], training["sample_rate"]


def filtered(
    config: AuditConfig, dataset: Dataset, seed: int, policy: PrivacyFilter, noise_multiplier: float
) -> tuple[float, float, float, float]:
    """Test accuracy in per cent, the guarantee's epsilon, the worst case without a filter, the share that was left out."""
    training = dataclasses.replace(
        config.training,
        target_epsilon=None,
        noise_multiplier=noise_multiplier,
        individual_clipping=True,
        clip_headroom=0.0,
    )
    config = dataclasses.replace(config, training=training, recording=QUARTERS)
    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run", seed=seed, dataset=dataset, privacy_filter=policy)
        log = NormLog.open(run.run_dir)
        if log.filtered is None:
            raise SystemExit(f"the evidence does not hold: {log.caveats}")
        table = indpriv.account(
            log, delta=training.delta
        )  # refuses a log in which somebody spent more than the cap
        left = float((log.filtered.left_out_at < log.total_steps).mean())
    return 100 * run.test_accuracy, table.worst_case_epsilon, run.worst_case_epsilon, left


def compare(name: str, config: AuditConfig, dataset: Dataset, setting: str) -> None:
    """Print the arms."""
    target, delta = config.training.target_epsilon, config.training.delta
    if target is None:
        raise SystemExit(f"{name}: its audit has no target_epsilon")
    print(
        f"{name}: {setting}; every example at most epsilon {target:g} at delta {delta:g} (add/remove, Poisson)",
        flush=True,
    )
    plain = [ordinary(config, dataset, seed) for seed in SEEDS]
    _, noise_multiplier, sample_rate = plain[0]
    shown = ", ".join(f"{accuracy:.2f}" for accuracy, _, _ in plain)
    base = float(np.mean([accuracy for accuracy, _, _ in plain]))
    print(
        f"  ordinary, noise multiplier {noise_multiplier:.3f}: {shown} %, mean {base:.2f} %",
        flush=True,
    )
    for share in NOISE:
        noise = share * noise_multiplier
        policy = PrivacyFilter.for_epsilon(
            target, delta=delta, noise_multiplier=noise, sample_rate=sample_rate
        )
        runs = [filtered(config, dataset, seed, policy, noise) for seed in SEEDS]
        shown = ", ".join(f"{run[0]:.2f}" for run in runs)
        mean = float(np.mean([run[0] for run in runs]))
        left = ", ".join(f"{run[3]:.1%}" for run in runs)
        print(
            f"  filter at order {policy.order:.3g}, noise multiplier {noise:.3f}: {shown} %, mean {mean:.2f} % "
            f"({mean - base:+.2f}); guarantee {runs[0][1]:.3f}, without the filter {runs[0][2]:.3f}; left out {left}",
            flush=True,
        )


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["adult", "mnist"])
    parser.add_argument(
        "--data-dir",
        help=f"folder with MNIST's files; default {DATA_DIR_VARIABLE} or ../shared/data",
    )
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    beside = AUDITS.parents[1] / "shared" / "data"
    data_dir = (
        options.data_dir
        or os.environ.get(DATA_DIR_VARIABLE)
        or (str(beside) if beside.is_dir() else None)
    )
    for name in options.names:
        if name == "mnist" and data_dir is None:
            print("mnist: its files are not here; pass --data-dir")
            continue
        config, dataset, setting = prepare(name, data_dir, options.epochs, full=options.full)
        compare(name, config, dataset, setting)


if __name__ == "__main__":
    main()
