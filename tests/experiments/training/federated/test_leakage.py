"""What is read at a client of a federated run, by scheme and type; and attacks on such runs."""

import numpy as np
import pandas as pd
import pytest

from audits.training.config import AuditConfig, FederatedConfig
from audits.training.datasets.base import Dataset, Split
from audits.training.federated.train import train_federated
from audits.training.leakage import at_a_client, observations
from indpriv import InputError
from indpriv.leakage import Observation

FEDERATED = {"rounds": 1, "client_rate": 0.5, "clients": 18, "local_learning_rate": 0.3}
READ = [  # protect, noise_at, what is read: clipping norm and standard deviation of the noise
    ("nobody", None, "row", None, 0.0),
    ("nobody", None, "update", None, 0.0),
    ("client", "server", "row", None, 0.0),
    ("client", "server", "batch", None, 0.0),
    ("client", "server", "update", None, 0.0),
    ("client", "clients", "batch", None, 0.0),
    ("client", "clients", "update", 0.5, 2.0 * 0.5),
    ("client", "clients_shared", "update", 0.5, 2.0 * 0.5 / 3),
    ("row", "batch", "row", 0.5, 0.0),
    ("row", "batch", "batch", 0.5, 2.0 * 0.5),
    ("row", "row", "row", 0.5, 2.0 * 0.5),
    ("row", "row", "batch", 0.5, 2.0 * 0.5 * 3**0.5),
]


def plan(see, **changes):
    size = 1 if see == "row" else 3
    return Observation(see, size, **changes)


@pytest.mark.parametrize(("protect", "place", "see", "clip", "std"), READ)
def test_what_is_read_by_scheme(protect, place, see, clip, std):
    federated = FederatedConfig(protect=protect, noise_at=place, **FEDERATED)
    law = (0.5, 2.0, "flat")
    seen = at_a_client(plan(see, share=0.7), False, federated, 9, law)
    assert (seen.of, seen.max_grad_norm, seen.share) == (see, clip, 0.7)
    assert seen.noise_std == pytest.approx(std)
    assert seen.learning_rate == 0.3
    quiet = at_a_client(plan(see), True, federated, 9, law)
    assert (quiet.max_grad_norm, quiet.noise_std) == (clip, 0.0)


def test_updates_of_protected_rows_are_refused():
    federated = FederatedConfig(protect="row", **FEDERATED)
    with pytest.raises(InputError, match='use see = "batch"'):
        at_a_client(plan("update"), False, federated, 9, (0.5, 2.0, "flat"))


@pytest.mark.parametrize(("protect", "leaks"), [("client", True), ("row", False)])
def test_a_federated_run_is_attacked(protect, leaks, tmp_path):
    """Rows of Fed-SDP leak from a batch; Fed-CDP's noise leaves next to chance."""
    tables = {
        "name": "toy",
        "data": {"dataset": "digits"},
        "model": {"architecture": "mlp", "hidden": [4]},
        "training": {"max_grad_norm": 0.1, "noise_multiplier": 30.0, "delta": 1e-4},
        "federated": {**FEDERATED, "protect": protect},
        "recording": {"every": 1, "rounding": 0},
        "checkpoints": {"every": 1},
        "leakage": {
            "see": "batch",
            "batch_size": 3,
            "attacks": ["informed"],
            "examples": 60,
            "at": [0],
            "share": 0.5,
        },
    }
    run_dir = tmp_path / "r"
    targets = np.arange(90) % 3
    rows = np.random.default_rng(0).normal(size=(90, 6)) + targets[:, None]
    split = Split(rows.astype(np.float32), targets.astype(np.int64))
    data = Dataset("toy", split, split, tuple("abc"), "none", "made here")
    train_federated(AuditConfig.from_dict(tables), run_dir, dataset=data, seed=0)
    scores = pd.read_parquet(run_dir / "leakage" / "batch-informed.parquet")
    found = float(scores["identified"][scores["member"]].mean())
    assert (found > 0.8) if leaks else (found < 0.4)
    seen = observations(run_dir, plan("batch"), False)(0)
    assert (seen.noise_multiplier, seen.max_grad_norm) == ((0.0, None) if leaks else (30.0, 0.1))
