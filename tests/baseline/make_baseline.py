"""Makes the stored runs and the figures expected of them: python tests/baseline/make_baseline.py

Run it in a checkout of the code whose figures are to be kept, never to silence test_baseline.py:
it replaces runs/, arrays/ and expected/ as a whole. It takes about five minutes. Every run is
seeded, but a Recorder draws a run's name and its exact examples afresh, and PyTorch's last digits
differ between processors, so that a second call gives other runs of the same kinds.

    runs/NAME/              a run directory as a Recorder, a replay or `indpriv import` left it,
                            without checkpoints
    arrays/NAME.npz         arguments of `NormLog.from_arrays`
    expected/NAME.json      one case: what to account and how, and the figures of the whole
    expected/NAME.parquet   the figures of each example, or of each unit

Runs are audited through the command line alone. A case with "looser" above 0 may give larger
epsilons later: by at most that share, and never smaller ones. Those are logs without rounding and
logs of hundreds of different settings.
"""

import hashlib
import json
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from indpriv import PrivacyFilter

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from baseline import figures  # noqa: E402
from baseline.figures import ARRAYS, DELTA, EXPECTED, RUNS, command  # noqa: E402

PER_EXAMPLE_LOSS = nn.CrossEntropyLoss(reduction="none")
LOOSER = 1e-3  # see the docstring above
PLD = {"accountant": "pld"}
CLOSEST, WORST_CASE = {"between_records": "closest"}, {"between_records": "worst_case"}
MIRONOV, YU2023 = {"conversion": "mironov2017"}, {"preset": "yu2023"}
DIGITS = """
name = "digits"
[data]
dataset = "digits"
[model]
architecture = "mlp"
hidden = [32]
activation = "tanh"
[training]
epochs = 5
batch_size = 256
learning_rate = 0.5
momentum = 0.9
max_grad_norm = 1.0
target_epsilon = 8.0
delta = 1e-5
non_private_baseline = true
[recording]
every = 2
growth = 2
longest = "epoch"
batch_norms = true
reference_examples = 60
record_holdout = true
[checkpoints]
every = "epoch"
[audit]
groups = ["label"]
"""
SPEC = """
import sys
sys.path.insert(0, {tests!r})
from baseline.make_baseline import PER_EXAMPLE_LOSS, blobs, mlp
from indpriv.recording import AuditSpec
train_set, test_set = blobs()
spec = AuditSpec(model=mlp, dataset=train_set, loss_fn=PER_EXAMPLE_LOSS, test_set=test_set)
"""


def main():
    """Replace everything that test_baseline.py reads."""
    for folder in (RUNS, ARRAYS, EXPECTED):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_runs()
        make_arrays()
    expect_runs()
    expect_arrays()
    expect_risk()
    expect_filters()


# --- runs


def blobs(n=200, features=6):
    """A training and a test set of two noisy classes; the same each time."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n + n // 2, features, generator=generator)
    noise = 0.3 * torch.randn(len(inputs), generator=generator)
    targets = (inputs[:, 0] + noise > 0).long()
    return TensorDataset(inputs[:n], targets[:n]), TensorDataset(inputs[n:], targets[n:])


def mlp(features=6, hidden=8):
    """A small network; the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def generator(purpose):
    """Coins or noise, the same each time; the seed is too long to look chosen by a person."""
    seed = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:7]) | 2**55
    return torch.Generator().manual_seed(seed)


@dataclass
class Private:
    """What Opacus makes of a model, an optimizer and a loader."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader

    @classmethod
    def of(cls, name, dataset, model, *, batch_size=20, noise_multiplier=1.0, max_grad_norm=1.0):
        """The parts of the run of that name."""
        engine = PrivacyEngine(accountant="rdp")
        loader = DataLoader(dataset, batch_size=batch_size, generator=generator(f"{name} sampling"))
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            noise_generator=generator(f"{name} noise"),
        )
        return cls(engine, model, optimizer, loader)

    def train(self, epochs, after_epoch=None):
        """Train as users do; after_epoch is called with the optimizer."""
        for _ in range(epochs):
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(inputs), targets).backward()
                self.optimizer.step()
            if after_epoch is not None:
                after_epoch(self.optimizer)


def record(name, *, data=None, model=None, epochs=2, after_epoch=None, training=None, **recorder):
    """Record a small Opacus run; training goes to `Private.of`, the rest to the Recorder."""
    from indpriv.recording import Recorder

    train_set, test_set = data or blobs()
    private = Private.of(name, train_set, model or mlp(), **(training or {}))
    if data is None:
        recorder |= {"metadata": sites(len(train_set)), "test_metadata": sites(len(test_set))}
    recorder |= {"dataset": train_set, "test_set": test_set, "loss_fn": PER_EXAMPLE_LOSS}
    recording = Recorder(RUNS / name, **recorder)
    with recording.attach(private.model, private.optimizer, private.loader):
        private.train(epochs, after_epoch)


def sites(n):
    """Metadata to group by."""
    rng = np.random.default_rng(n)
    site = rng.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2])
    return pd.DataFrame({"site": site, "age": rng.integers(17, 90, n)})


def people_of(n):
    """Whose row each is: people of one to six rows."""
    sizes = np.random.default_rng(5).integers(1, 7, n)
    return [f"person {number}" for number in np.repeat(np.arange(n), sizes)[:n]]


def falling_noise(optimizer):
    """Other noise and clipping after each epoch, as schedulers set them."""
    optimizer.noise_multiplier *= 0.9
    optimizer.max_grad_norm *= 0.95


def make_runs():
    """Train, replay or convert every run of `RUN_CASES`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "digits.toml").write_text(DIGITS)
        command(
            "audits",
            "train",
            Path(folder) / "digits.toml",
            "--run-dir",
            RUNS / "digits",
            "--seed",
            7,
        )
    make_adult()
    n, free = 200, {"every": 4, "batch_norms": True, "reference_examples": 20}
    record("every_step", every=1)
    record("once", every="once", batch_norms=True)
    record("schedules", epochs=4, after_epoch=falling_noise, **free)
    record("individual", every="epoch", individual_clipping=True, training={"max_grad_norm": 2.0})
    record("nearest", every=4, rounding_mode="nearest")
    record("unrounded", every=4, rounding=0)
    record("units", every=1, unit="user", unit_ids=people_of(n), training={"noise_multiplier": 2.0})
    cap = {"delta": DELTA, "noise_multiplier": 1.0, "sample_rate": 0.1}
    record(
        "filter",
        epochs=4,
        every="epoch",
        individual_clipping=True,
        privacy_filter=PrivacyFilter.for_epsilon(4.5, **cap),
        training={"max_grad_norm": 2.0},
    )
    cap |= {"noise_multiplier": 2.0}
    record(
        "filter_units",
        epochs=3,
        every=1,
        unit="user",
        unit_ids=people_of(n),
        privacy_filter=PrivacyFilter.for_epsilon(6.0, **cap),
        training={"noise_multiplier": 2.0},
    )
    make_damaged()
    make_replay()
    make_converted()
    for folder in RUNS.iterdir():
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def make_adult():
    """1,500 of Adult's training and 750 of its test rows, in households that are made up."""
    from audits.training.datasets import load_dataset

    adult = load_dataset("adult_households")
    n = 1500
    rows = [(adult.train, n), (adult.test, n // 2)]
    data = [TensorDataset(torch.tensor(s.inputs[:k]), torch.tensor(s.targets[:k])) for s, k in rows]
    train, test = (pd.DataFrame(split.metadata)[:k] for split, k in rows)
    record(
        "adult",
        data=data,
        model=mlp(features=107, hidden=16),
        epochs=3,
        training={"batch_size": 100},
        every=4,
        batch_norms=True,
        reference_examples=60,
        metadata=train,
        test_metadata=test,
    )


def make_damaged():
    """A run of which one record is missing."""
    record("damaged", every=1, epochs=1)
    sorted((RUNS / "damaged" / "records").glob("*.parquet"))[5].unlink()


def make_replay():
    """A run directory made of the checkpoints of a run that was never recorded."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        private = Private.of("replay", blobs()[0], mlp())
        for step in (0, 10, 20, 30):
            if step:
                private.train(1)
            private.engine.save_checkpoint(
                path=folder / f"step_{step}.pt", module=private.model, optimizer=private.optimizer
            )
        (folder / "baseline_spec.py").write_text(SPEC.format(tests=str(TESTS)))
        spec = f"{folder / 'baseline_spec.py'}:spec"
        told = ("--set", "max_grad_norm=1.0", "--set", "sampler=poisson", "--delta", DELTA)
        command("audit", folder, "--spec", spec, "--output-dir", folder / "audit", "--json", *told)
        shutil.copytree(folder / "audit" / "replay", RUNS / "replay")
    declared = json.loads((RUNS / "replay" / "run.json").read_text())
    declared |= {"name": "replay", "checkpoints": "checkpoints"}  # not the folder that is gone
    (RUNS / "replay" / "run.json").write_text(json.dumps(declared, indent=2) + "\n")


def make_converted():
    """Norms of another trainer, under hundreds of different settings."""
    rng = np.random.default_rng(11)
    steps, n = 300, 60
    settings = {
        "steps": steps,
        "noise_multiplier": np.linspace(2.0, 1.0, steps).tolist(),
        "max_grad_norm": 1.0,
        "sample_rate": 0.02,
        "sampler": "poisson",
        "unit": "example",
        "neighbouring": "add_remove",
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        np.savez(
            folder / "norms.npz",
            norms=rng.gamma(2.0, 0.3, (30, n)),
            recorded_steps=np.arange(0, steps, 10),
            participations=rng.binomial(steps, 0.02, n),
        )
        (folder / "run.json").write_text(json.dumps(settings))
        words = ("--run", folder / "run.json", "--output-dir", RUNS / "converted")
        command("import", folder / "norms.npz", *words)


# --- arrays


def make_arrays():
    """Write the arrays of every log of `ARRAY_CASES`."""
    rng = np.random.default_rng(2023)
    noises = np.repeat([2.0, 1.5, 1.2, 1.0], 50)
    norms = np.repeat([0.5, 1.0, 1.0, 2.0], 50)
    rates = np.repeat([0.02, 0.02, 0.05, 0.05], 50)
    save_arrays("few_settings", rng, noises, norms, rates)
    save_arrays("hundreds_of_noises", rng, np.geomspace(2.0, 0.8, 400), 1.0, 0.02)
    save_arrays("hundreds_of_clipping_norms", rng, 1.2, np.geomspace(2.0, 0.5, 300), 0.02)
    save_arrays("hundreds_of_rates", rng, 1.2, 1.0, np.linspace(0.01, 0.04, 300))
    ranges = ((1.0, 2.0), (0.5, 2.0), (0.005, 0.02))
    save_arrays("thousands_of_settings", rng, *(rng.uniform(*ends, 2000) for ends in ranges))
    save_arrays("unrounded", rng, 1.0, 1.0, 0.02)
    save_arrays("individual", rng, noises, 1.0, 0.02)
    save_arrays("shuffled", rng, 1.0, 1.0, 0.05)
    save_arrays("nearest", rng, 1.0, 1.0, 0.02)
    save_arrays("users", rng, 2.0, 1.0, 0.02, unit_ids=np.sort(rng.integers(0, 15, 40)))
    pairs = np.repeat(np.arange(20), 2)
    norms = np.repeat(rng.gamma(2.0, 0.3, (19, 20)), 2, axis=1)
    save_arrays("equal_rows", rng, noises + 1.0, 1.0, 0.05, unit_ids=pairs, norms=norms)
    steps, positions = np.nonzero(rng.random((200, 40)) < 0.05)
    free = {"free_steps": steps, "free_positions": positions}
    free["free_norms"] = rng.gamma(2.0, 0.3, len(steps))
    save_arrays("free", rng, noises, 1.0, 0.05, **free)


def save_arrays(name, rng, noise_multiplier, max_grad_norm, sample_rate, norms=None, **more):
    """Write arrays/NAME.npz: about 20 records of 40 examples, the first a while after the start."""
    settings = {
        "noise_multiplier": np.float64(noise_multiplier),
        "max_grad_norm": np.float64(max_grad_norm),
        "sample_rate": np.float64(sample_rate),
    }
    steps = max(200, *(np.size(values) for values in settings.values()))
    gap = steps // 20
    recorded = np.arange(gap, steps, gap)
    if norms is None:
        norms = rng.gamma(2.0, 0.3, (1, 40)) * rng.uniform(0.5, 1.5, (len(recorded), 40))
        norms[:, 0], norms[:, 1] = 0.0, 10.0  # one gives nothing, one is always clipped
    stored = {"norms": norms, "recorded_steps": recorded, "total_steps": steps}
    np.savez_compressed(ARRAYS / f"{name}.npz", **stored, **settings, **more)


# --- cases

ORDERS = [1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
# run: how to audit it, in the words of `indpriv.account` and of the command line
RUN_CASES = {
    "digits": [{}, CLOSEST, PLD],
    "adult": [
        {"by": ["race", "sex", "age_band", "label"]},
        CLOSEST,
        WORST_CASE,
        MIRONOV,
        PLD,
        {"unit_column": "synthetic_household"},
    ],
    "every_step": [{}, MIRONOV, PLD],
    "once": [{}, CLOSEST],
    "schedules": [{}, CLOSEST, PLD],
    "individual": [{}, WORST_CASE, PLD],
    "nearest": [{}, YU2023],
    "unrounded": [{}, YU2023, PLD],
    "units": [{}, MIRONOV],
    "filter": [{}, MIRONOV, PLD],
    "filter_units": [{}],
    "damaged": [{"unreadable": "worst_case"}],
    "replay": [{}, CLOSEST],
    "converted": [{}, PLD],
}
# arrays: further arguments of from_arrays, how much looser epsilons may become, and how to account
ARRAY_CASES = {
    "few_settings": (
        {},
        0.0,
        [{}, CLOSEST, WORST_CASE, MIRONOV, PLD, {**PLD, **CLOSEST}, {"thin": 20}],
    ),
    "hundreds_of_noises": ({}, LOOSER, [{}, PLD]),
    "hundreds_of_clipping_norms": ({}, LOOSER, [{}, CLOSEST, PLD]),
    "hundreds_of_rates": ({}, LOOSER, [{}, PLD]),
    "thousands_of_settings": ({}, LOOSER, [{}, MIRONOV, PLD]),
    "unrounded": ({"rounding": 0.0}, LOOSER, [{}, CLOSEST, YU2023, PLD]),
    "individual": ({"individually_clipped": True}, 0.0, [{}, PLD, {"thin": 20}]),
    "shuffled": ({"sampler": "shuffled"}, 0.0, [{}, {"orders": ORDERS}]),
    "nearest": ({"rounding_mode": "nearest"}, 0.0, [{}, YU2023]),
    "users": ({"unit": "user"}, 0.0, [{}, CLOSEST, MIRONOV]),
    "equal_rows": ({"unit": "user"}, 0.0, [{}]),
    "free": ({"rounding": 0.02}, 0.0, [{}, CLOSEST, PLD]),
}
LOOSER_RUNS = ("unrounded", "converted")
FILTERS = [
    {"epsilon": 3.0, "delta": DELTA, "noise_multiplier": 1.0, "sample_rate": 0.02},
    {"epsilon": 1.0, "delta": 1e-6, "noise_multiplier": 2.0, "sample_rate": 0.1},
    {"epsilon": 3.0, "delta": DELTA, "noise_multiplier": 1.0, "sample_rate": 0.02, "order": 8.0},
]


def expect_runs():
    """Audit every stored run; keep what audit.json, epsilon.parquet and `indpriv check` say."""
    for run, cases in RUN_CASES.items():
        for options in cases:
            looser = LOOSER if run in LOOSER_RUNS and options != YU2023 else 0.0
            with tempfile.TemporaryDirectory() as folder:
                copy = figures.private_copy(run, Path(folder))
                summary, frame = figures.audit_run(copy, options)
                content = {
                    "run": run,
                    "options": options,
                    "looser": looser,
                    "figures": figures.figures_of_audit(summary),
                    "errors": None if looser else figures.errors_of_audit(summary),
                    "statuses": figures.statuses(copy),
                }
            write_case(case_name(f"run-{run}", options), content, figures.each_example(frame))


def expect_arrays():
    """Account all stored arrays."""
    for name, (from_arrays, looser, cases) in ARRAY_CASES.items():
        for options in cases:
            case = {"arrays": name, "from_arrays": from_arrays, "options": dict(options)}
            case["looser"] = 0.0 if options == YU2023 else looser  # the preset rounds by itself
            if "thin" in options:
                case["thin"] = case["options"].pop("thin")
            table = figures.account_of(case)
            content = case | {"figures": figures.figures_of_table(table)}
            frame = figures.each_example(table.to_frame())
            write_case(case_name(f"arrays-{name}", options), content, frame)


def expect_risk():
    """Take the membership risk of a few examples of stored arrays, each of which takes a while."""
    options = {"false_positive_rate": [1e-3, 0.01], "epsilon": [0.5, 1.0]}
    case = {"arrays": "shuffled", "from_arrays": {"sampler": "shuffled"}, "take": 5}
    case |= {"options": options, "looser": 0.0}
    write_case("risk-shuffled", case, figures.risk_of(case))


def expect_filters():
    """Choose the orders and caps of some privacy filters."""
    content = [{"planned": planned, "figures": figures.filter_of(planned)} for planned in FILTERS]
    (EXPECTED / "filters.json").write_text(json.dumps(content) + "\n")


def case_name(log, options):
    """Of a case, after what makes it differ from the others of its log."""
    words = [value if isinstance(value, str) else key for key, value in options.items()]
    return "-".join([log, *words])


def write_case(name, content, frame):
    """Write a case: its JSON and, of each example, its figures."""
    (EXPECTED / f"{name}.json").write_text(json.dumps(content, allow_nan=False) + "\n")
    frame.to_parquet(EXPECTED / f"{name}.parquet", index=False, compression="zstd")


if __name__ == "__main__":
    main()
