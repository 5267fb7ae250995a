"""How far estimates of epsilon lie from exact ones: full passes, batch norms and both, against norms at every step.

python benchmarks/fidelity.py [adult] [digits] [mnist] [--data-dir DIR] [--seeds N] [--second-half]

Each run has the settings of its audit file and is recorded before every step, with batch norms besides; the records of
sparser policies are then picked from that log, so that all rows describe the same run. MNIST is its first 10,000 images
for 4 epochs at the sample rate of its audit, clipped at 0.1 and with the noise of epsilon 3. Errors are estimate minus
exact epsilon, in per cent of the median exact epsilon; "under" is the share of examples whose epsilon is too small by more
than 1 % of itself. Rows of `closest` with batch norms are compared with their target: bias below 1 % either way, and the
mean absolute error below what is printed. The last lines tell which policies reached theirs in every run.

--second-half accounts the second half of each run as a run of its own instead: norms then start where training has
brought them, as where a model is fine-tuned. Its median epsilon is small, so that errors in per cent of it are large; no
targets are held there.
"""

import argparse
import dataclasses
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from audits.training.config import AuditConfig
from audits.training.datasets import DATA_DIR_VARIABLE, load_dataset
from audits.training.datasets.base import Dataset, Split
from audits.training.dp_sgd import train
from indpriv import NormLog, account
from indpriv.analysis.fidelity import compare_with_exact
from indpriv.norm_log.fields import DEFAULT_POLICY, RecordingPolicy, StepSettings
from indpriv.norm_log.records import BatchNorms

AUDITS = Path(__file__).parents[1] / "audits"
# Targets of bias and of mean absolute error, in per cent of the median.
LARGEST_BIAS, FEW_PASSES, ONE_PASS = 1.0, 3.0, 6.0
MNIST_IMAGES = 10_000
MNIST = {
    "epochs": 4,
    "batch_size": 170,  # a sample rate of 1 / 59, that of all images in batches of 1,024
    "learning_rate": 1.0,
    "max_grad_norm": 0.1,
    "target_epsilon": 3.0,
}


def prepare(name: str, data_dir: str | None) -> tuple[AuditConfig, Dataset]:
    """An audit recorded before every step with batch norms, and its data."""
    tables = AuditConfig.from_toml(AUDITS / f"{name}.toml").to_dict()
    dataset = load_dataset(name, data_dir)
    for key in [key for key in tables["training"] if key.startswith("non_private_")]:
        del tables["training"][key]
    if name == "mnist":
        tables["training"] |= MNIST
        train_set = dataset.train
        few = Split(
            train_set.inputs[:MNIST_IMAGES], train_set.targets[:MNIST_IMAGES], train_set.metadata
        )
        dataset = dataclasses.replace(dataset, train=few)
    tables["recording"] = {"every": 1, "rounding": 0.01, "batch_norms": True}
    tables["checkpoints"] = {"every": "epoch"}
    return AuditConfig.from_dict(tables), dataset


def policies_of(epoch: int) -> tuple[tuple[str, RecordingPolicy, float | None], ...]:
    """Name, policy and target (if any) of the mean absolute error, for this number of steps per epoch."""
    return (
        ("one pass, before step 0", RecordingPolicy("once"), ONE_PASS),
        ("one pass, before step 4", RecordingPolicy("once", first=4), ONE_PASS),
        ("pass / 2 epochs", RecordingPolicy(2 * epoch), FEW_PASSES),
        ("pass / 2 epochs, from step 4 on", RecordingPolicy(2 * epoch, first=4), FEW_PASSES),
        ("gaps 4, 8, 16, ..., at most 2 epochs", RecordingPolicy(4, 2.0, 2 * epoch), FEW_PASSES),
        ("gaps 4, 6, 9, ..., at most 2 epochs", RecordingPolicy(4, 1.5, 2 * epoch), FEW_PASSES),
        ("gaps 4, 6, 9, ... (1.5 x)", RecordingPolicy(4, 1.5), FEW_PASSES),
        ("gaps 4, 8, 16, ... (2 x)", RecordingPolicy(4, 2.0), FEW_PASSES),
        ("pass / epoch", RecordingPolicy(epoch), None),
        ("default: gaps 4, 8, ..., an epoch", DEFAULT_POLICY.in_steps(epoch), FEW_PASSES),
    )


def second_half(log: NormLog) -> NormLog:
    """The second half of a log of every step, as a log of its own."""
    start, settings = log.total_steps // 2, log.settings
    columns = {
        field.name: getattr(settings, field.name)[start:] for field in dataclasses.fields(settings)
    }
    steps = np.arange(log.total_steps - start)
    half = replace(
        log,
        settings=StepSettings(**columns),
        recorded_steps=steps,
        records=log.records[start:],
        batch_norms=None,
    )
    if log.batch_norms is None:
        return half
    entries = log.batch_norms.read(0, log.n_examples)
    entries = entries.select(entries.step >= start)
    return replace(
        half,
        batch_norms=BatchNorms(
            steps, [replace(entries, step=entries.step - np.int32(start)).block]
        ),
    )


def measure(name: str, log: NormLog, delta: float, *, hold: bool = True) -> dict[str, bool]:
    """Print one line for each source of norms; which policies reached their targets, if they are held to them."""
    epoch = round(1 / log.settings.sample_rate[0])
    exact = account(log, delta=delta)
    median = float(np.median(exact.epsilon))
    print(
        f"{name}: {log.n_examples:,} examples, {log.total_steps} steps of {epoch} an epoch; exact epsilon at "
        f"delta={delta:g}: median {median:.3f}, worst case {exact.worst_case_epsilon:.3f} (add/remove, example, Poisson)"
    )
    print(
        f"  {'full passes':42s} {'free':4s} {'rule':8s} r       bias %  mean abs %  p95 %  largest %  under  target"
    )
    reached = {}
    for passes, policy, target in policies_of(epoch):
        steps = np.flatnonzero([policy.due(step) for step in range(log.total_steps)])
        thinned = log.only(steps)  # the log has every step
        for rule in ("last", "closest"):
            for free in (False, True):
                found = compare_with_exact(
                    account(
                        thinned if free else replace(thinned, batch_norms=None),
                        delta=delta,
                        between_records=rule,
                    ),
                    exact,
                    source="norms at every step",
                    every=max(1, round(log.total_steps / len(steps))),
                    epochs=log.total_steps / len(steps) / epoch,
                )
                shares = (
                    found.signed_bias,
                    found.mean_absolute,
                    found.p95_absolute,
                    found.largest_absolute,
                )
                bias, mean, high, largest = (100 * value / median for value in shares)
                r = "-     " if found.pearson is None else f"{found.pearson:.4f}"
                held = ""
                if hold and target and free and rule == "closest":
                    missed = misses(bias, mean, target)
                    held = f"< {LARGEST_BIAS:g}, < {target:g}: " + (
                        "missed: " + ", ".join(missed) if missed else "ok"
                    )
                    reached[passes] = not missed
                print(
                    f"  {f'{len(steps):3d}: {passes}':42s} {'yes' if free else '':4s} {rule:8s} {r}  {bias:+6.2f}  {mean:10.2f}  "
                    f"{high:5.1f}  {largest:9.1f}  {found.share_under_1_percent:5.1%}  {held}",
                    flush=True,
                )
    return reached


def misses(bias: float, mean: float, target: float) -> list[str]:
    """Which targets a row misses."""
    return [
        f"{name} {value:.2f} >= {limit:g}"
        for name, value, limit in (("|bias|", abs(bias), LARGEST_BIAS), ("mean abs", mean, target))
        if value >= limit
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=["adult", "digits", "mnist"], default=[])
    parser.add_argument("--data-dir", default=os.environ.get(DATA_DIR_VARIABLE))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--second-half", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    verdicts: dict[str, list[bool]] = {}
    for name in arguments.names or ["digits", "adult", "mnist"]:
        config, dataset = prepare(name, arguments.data_dir)
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                train(config, Path(folder) / "run", seed=seed, dataset=dataset)
                log = NormLog.open(Path(folder) / "run")
                half = arguments.second_half
                label = f"{name}, seed {seed}" + (", second half" if half else "")
                log = second_half(log) if half else log
                for policy, met in measure(
                    label, log, config.training.delta, hold=not half
                ).items():
                    verdicts.setdefault(policy, []).append(met)
    for policy, all_met in verdicts.items():
        print(
            f"{policy}, with batch norms and closest: targets reached in {sum(all_met)} of {len(all_met)} runs"
        )
