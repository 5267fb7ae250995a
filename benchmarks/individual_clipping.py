"""What individual clipping costs in test accuracy: the same seeded runs with ordinary and with individual clipping.

python benchmarks/individual_clipping.py [adult] [mnist] [--data-dir DIR] [--epochs N] [--full]

The arms of a seed draw the same batches and the same noise; only what an example is clipped at differs. Levels have to
leave room for norms that grow until the next record: the arm that the target is held against rounds them up to quarters
of max_grad_norm, and records after 1, 2, 4, ... steps up to an epoch. Another arm shows, on one seed and for comparison
only, levels of a hundredth renewed once an epoch, which leave no such room.

Adult has the demo's settings (audits/adult.toml). MNIST has those of audits/mnist.toml, but its first 10,000 images, 5
epochs and batches of 256, which is said in the output; --full takes the audit's own.
"""

import argparse
import dataclasses
import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from indpriv import NormLog
from indpriv.evidence import PASSED
from indpriv.training.config import AuditConfig, RecordingConfig
from indpriv.training.datasets import DATA_DIR_VARIABLE, load_dataset
from indpriv.training.datasets.base import Dataset, Split
from indpriv.training.dp_sgd import train
from indpriv.verify import verify

AUDITS = Path(__file__).parents[1] / "audits"
TARGET = 0.5  # points of test accuracy, over four seeds
SHORT = {"mnist": {"images": 10_000, "epochs": 5, "batch_size": 256}}


@dataclass(frozen=True)
class Arm:
    """One way to clip."""

    name: str
    individually: bool
    recording: RecordingConfig
    seeds: tuple[int, ...]


COARSE = RecordingConfig(every=1, growth=2.0, longest="epoch", rounding=0.25)
FINE = RecordingConfig(every="epoch", rounding=0.01)
ARMS = (
    Arm("ordinary", False, RecordingConfig(every=10**9), (0, 1, 2, 3)),  # one record: it changes nothing
    Arm("individual, quarters of C, gaps that double", True, COARSE, (0, 1, 2, 3)),
    Arm("individual, hundredths of C, every epoch", True, FINE, (0,)),
)


def prepare(name: str, data_dir: str | None, epochs: int | None, *, full: bool) -> tuple[AuditConfig, Dataset, str]:
    """The audit without individual clipping, its data, and how both differ from the audit file."""
    tables = AuditConfig.from_toml(AUDITS / f"{name}.toml").to_dict()
    dataset = load_dataset(name, data_dir)
    short = {} if full else SHORT.get(name, {})
    tables["training"]["non_dp_twin"] = False
    tables["training"].pop("non_dp_learning_rate", None)
    tables["training"] |= {key: value for key, value in short.items() if key != "images"}
    tables["training"]["epochs"] = epochs or tables["training"]["epochs"]
    tables["checkpoints"] = {"every": "epoch"}
    images = short.get("images", len(dataset.train))
    few = Split(dataset.train.inputs[:images], dataset.train.targets[:images], dataset.train.metadata)
    kept = dataset if images == len(dataset.train) else dataclasses.replace(dataset, train=few)
    training = tables["training"]
    told = f"{len(kept.train):,} examples, {training['epochs']} epochs, batches of {training['batch_size']}"
    return AuditConfig.from_dict(tables), kept, told


def train_arm(config: AuditConfig, dataset: Dataset, seed: int, arm: Arm) -> tuple[float, int, float]:
    """Test accuracy in per cent, the number of full passes, and the share of recorded levels below max_grad_norm."""
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, individual_clipping=arm.individually),
        recording=arm.recording,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run", seed=seed, dataset=dataset)
        clipped = [check.status for check in verify(run.run_dir) if check.name == "individual clipping"]
        if clipped != [PASSED] * arm.individually:
            raise SystemExit(f"seed {seed}: the run was not clipped as it should have been: {clipped}")
        log = NormLog.open(run.run_dir)
        return 100 * run.test_accuracy, log.n_records, float((log.read() < log.levels.top).mean())


def compare(name: str, config: AuditConfig, dataset: Dataset, told: str) -> bool:
    """Print the arms; whether the means of the first two are within the target."""
    print(f"{name}: {told}; seeds are known: reproducible, no privacy", flush=True)
    found: dict[str, list[float]] = {arm.name: [] for arm in ARMS}
    for arm in ARMS:
        for seed in arm.seeds:
            start = time.process_time()
            accuracy, records, below = train_arm(config, dataset, seed, arm)
            found[arm.name].append(accuracy)
            cost = f"{records} full passes, {time.process_time() - start:.0f} s"
            print(f"  {arm.name}, seed {seed}: {accuracy:.2f} % ({cost}, {below:.0%} of levels below C)", flush=True)
    ordinary, individual = (np.array(found[arm.name]) for arm in ARMS[:2])
    for arm, values in zip(ARMS, (ordinary, individual), strict=False):
        print(f"  {arm.name}: mean {values.mean():.3f} %, standard deviation {values.std(ddof=1):.3f}")
    differences = individual - ordinary
    good = bool(abs(differences.mean()) <= TARGET)
    print(
        f"  individual minus ordinary: {differences.mean():+.3f} points, {differences.min():+.2f} to "
        f"{differences.max():+.2f} by seed; target within {TARGET}: {'met' if good else 'MISSED'}",
        flush=True,
    )
    return good


def main() -> None:
    """Run what was asked for; exit code 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["adult", "mnist"])
    parser.add_argument("--data-dir", help=f"folder with MNIST's files; default {DATA_DIR_VARIABLE} or ../shared/data")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    beside = AUDITS.parents[1] / "shared" / "data"
    data_dir = options.data_dir or os.environ.get(DATA_DIR_VARIABLE) or (str(beside) if beside.is_dir() else None)
    results = []
    for name in options.names:
        if name == "mnist" and data_dir is None:
            print("mnist: its files are not here; pass --data-dir")
            continue
        config, dataset, told = prepare(name, data_dir, options.epochs, full=options.full)
        results.append(compare(name, config, dataset, told))
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
