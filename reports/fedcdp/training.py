"""Runs of the page: the stated setting on MNIST, and usable noise by the audits of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn.utils import parameters_to_vector

from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.federated.local import LocalTraining
from audits.training.federated.train import train_federated
from audits.training.models import first_parameters
from audits.training.randomness import Randomness
from indpriv import NormLog, account
from indpriv._files import read_json, read_parquet
from indpriv.norm_log.run_files import CURVE, RUN_JSON
from indpriv.release.mechanisms import private_median_norm
from reports.fedcdp import paper

AUDITS = Path(__file__).resolve().parents[2] / "audits"
_NETWORKS: Mapping[str, tuple[dict[str, Any], int, int]] = {  # keys of [model]; tensors; rounds
    "mlp": ({"architecture": "mlp", "hidden": [64], "activation": "relu"}, 4, 40),
    "cnn": ({"architecture": "tanh_cnn"}, 8, 100),
    "tables": ({"architecture": "mlp", "hidden": [64, 64], "activation": "relu"}, 6, 10),
}
_TABLES: Mapping[str, dict[str, Any]] = {  # Table I; of cancer each client has a copy of every row
    "adult": {"local_batch_size": 3, "partition": "equal"},
    "breast_cancer": {
        "local_batch_size": 4,
        "rounds": 3,
        "copies": 100,
        "partition": "equal",
    },
    # 300 of 14 copies of 2,267 pictures, in 20 shards of 15: of about 15 people, as stated
    "lfw_people": {"local_batch_size": 3, "rounds": 60, "copies": 14, "shards": 20},
}
SHARES = (0.05, 0.2, 0.5)  # of the clients in a round, in Table II but for the default
TENTHS = 10
SWEPT = {
    "MNIST": "cdp",
    "Adult": "adult_cdp",
    "cancer": "breast_cancer_cdp",
    "LFW": "lfw_people_cdp",
}  # runs of Tables IV and V
PRUNED = (0.1, 0.3, 0.5)  # shares of an update that are not sent
COPIES = 10
DECAY = {"law": "linear", "start": 6.0, "end": 2.0}  # of C, "in 100 rounds"
REPEATS = ("", "_2", "_3")  # runs of each side of a comparison that chance could decide
MEDIAN_EPSILON = 0.1  # of a client, for the median that clips its updates
MEDIANS = (
    "median",
    "median_rate",
)  # the second: C times the server's learning rate as in the audit
_ROWS = {"clients": 100, "partition": "shards", "local_steps": 100, "local_batch_size": 5}


@dataclass(frozen=True)
class Run:
    """One run of the page.

    Attributes:
        title: of its row.
        config: its audit.
        stated: it has the noise of the paper.
        chance: accuracy of the most frequent class of its test data, about.
    """

    title: str
    config: Callable[[], AuditConfig]
    stated: bool = False
    chance: float = 0.1


def _stated(
    protect: str,
    network: str,
    *,
    clip: float | Mapping[str, Any] = paper.CLIP,
    noise: float = paper.NOISE,
    data: str = "mnist",
    **federated: Any,
) -> AuditConfig:
    """The paper's setting, 10 of 100 clients in a round; each tensor is clipped at C."""
    model, tensors, rounds = _NETWORKS[network]
    training: dict[str, Any] = {"delta": paper.DELTA}
    training |= {"max_grad_norm": 1.0, "noise_multiplier": 1.0} | (
        {}
        if protect == "nobody"
        else {
            "max_grad_norm": _times(clip, sqrt(tensors)),
            "noise_multiplier": noise / sqrt(tensors),
            "clipping": "per_layer",
        }
    )
    return AuditConfig.from_dict(
        {
            "name": f"fedcdp_{protect}_{network}",
            "data": {"dataset": data},
            "model": model,
            "training": training,
            "federated": {
                **_ROWS,
                "rounds": rounds,
                "protect": protect,
                "sampler": "fixed_size",
                "client_rate": paper.CLIENT_RATE,
                "local_learning_rate": paper.LOCAL_RATE,
                **_TABLES.get(data, {}),
                **federated,
            },
            "recording": {"every": 1},
            "checkpoints": {"every": 1 if data == "breast_cancer" else 10},
        }
    )


def _times(clip: float | Mapping[str, Any], factor: float) -> float | dict[str, Any]:
    """A clipping norm, or the law of one, that is multiplied."""
    if isinstance(clip, Mapping):
        return {**clip, "start": clip["start"] * factor, "end": clip["end"] * factor}
    return clip * factor


def _audit(name: str) -> AuditConfig:
    return AuditConfig.from_toml(AUDITS / f"{name}.toml")


def _decayed(name: str) -> AuditConfig:
    """An audit whose clipping norm falls as that of the paper, from 1.5 times to half of the constant one."""
    config = _audit(name).to_dict()
    config["training"]["max_grad_norm"] = _times(
        DECAY, config["training"]["max_grad_norm"] / paper.CLIP
    )
    return AuditConfig.from_dict(config)


RUNS: dict[str, Run] = {
    **{
        f"{name}{suffix}": Run(
            f"MNIST, 100 clients, {title}, {words}",
            partial(_stated, protect, network),
            stated=protect != "nobody",
        )
        for suffix, network, words in (("_cnn", "cnn", "convolutions"), ("", "mlp", "hidden layer"))
        for name, protect, title in (
            ("no_dp", "nobody", "no DP"),
            ("sdp", "client", "Fed-SDP"),
            ("cdp", "row", "Fed-CDP"),
        )
    },
    "mnist_fed_client": Run("MNIST, 1,000 clients, Fed-SDP", partial(_audit, "mnist_fed_client")),
    "mnist_fed_row": Run("MNIST, 1,000 clients, Fed-CDP", partial(_audit, "mnist_fed_row")),
    "adult_fed": Run("Adult, 320 clients, Fed-SDP", partial(_audit, "adult_fed"), chance=0.76),
    "breast_cancer_fed": Run(
        "Breast cancer, 114 clients, Fed-SDP", partial(_audit, "breast_cancer_fed"), chance=0.63
    ),
    "lfw_fed": Run(
        "LFW, a client for each person, Fed-SDP", partial(_audit, "lfw_fed"), chance=0.77
    ),
}


def _by_value(run: str, data: str, title: str, network: str) -> dict[str, Run]:
    """Runs of Tables IV and V but that of the stated C and sigma."""
    at = partial(_stated, "row", network, data=data)
    return {
        **{
            f"{run}_clip_{value:g}": Run(f"{title}, C = {value:g}", partial(at, clip=value))
            for value in paper.VALUES
            if value != paper.CLIP
        },
        **{
            f"{run}_noise_{value:g}": Run(f"{title}, sigma = {value:g}", partial(at, noise=value))
            for value in paper.VALUES
            if value != paper.NOISE
        },
    }


_MLP = "MNIST, 100 clients, {}, hidden layer"
SWEEPS: dict[str, Run] = {
    **_by_value("cdp", "mnist", _MLP.format("Fed-CDP"), "mlp"),
    **{
        f"pruned_{value:g}": Run(
            _MLP.format(f"no DP, {value:.0%} pruned"),
            partial(_stated, "nobody", "mlp", share=1 - value),
        )
        for value in PRUNED
    },
    **{
        f"{name}{repeat}": Run(title, config)
        for repeat in REPEATS
        for name, title, config in (
            ("cdp", _MLP.format("Fed-CDP"), partial(_stated, "row", "mlp")),
            (
                "cdp_decay",
                _MLP.format("Fed-CDP(decay)"),
                partial(_stated, "row", "mlp", clip=DECAY),
            ),
            (
                "mnist_fed_row",
                "MNIST, 1,000 clients, Fed-CDP",
                partial(_audit, "mnist_fed_row"),
            ),
            (
                "fed_row_decay",
                "MNIST, 1,000 clients, Fed-CDP(decay)",
                partial(_decayed, "mnist_fed_row"),
            ),
        )
        if f"{name}{repeat}" not in RUNS
    },
    "cdp_decay_cnn": Run(
        "MNIST, 100 clients, Fed-CDP(decay), convolutions",
        partial(_stated, "row", "cnn", clip=DECAY),
    ),
    **{
        f"{name}_pruned_{value:g}": Run(
            _MLP.format(f"{title}, {value:.0%} pruned"),
            partial(_stated, protect, "mlp", share=1 - value, **noise),
        )
        for value in PRUNED
        for name, title, protect, noise in (
            ("sdp", "Fed-SDP", "client", {"noise_at": "clients_shared"}),
            ("cdp", "Fed-CDP", "row", {}),
        )
    },
    "cdp_copies": Run(
        f"MNIST, 1,000 clients, Fed-CDP, {COPIES} copies of each row",
        partial(_stated, "row", "mlp", clients=1000, copies=COPIES),
    ),
}


for _data in _TABLES:
    _network = "cnn" if _data == "lfw_people" else "tables"
    for _name, _run in {
        "no_dp": Run(f"{_data}, no DP", partial(_stated, "nobody", _network, data=_data)),
        "cdp": Run(f"{_data}, Fed-CDP", partial(_stated, "row", _network, data=_data)),
        **_by_value("cdp", _data, f"{_data}, Fed-CDP", _network),
    }.items():
        _repeats = REPEATS[:1] if _data == "lfw_people" else REPEATS  # minutes each
        SWEEPS |= {f"{_data}_{_name}{repeat}": _run for repeat in _repeats}
SWEEPS |= {
    f"{name}_cnn_{share:g}": Run(
        f"MNIST, 100 clients, {share:.0%} of them in a round, {title}, convolutions",
        partial(_stated, protect, "cnn", client_rate=share, **clip),
    )
    for share in SHARES
    for name, title, protect, clip in (
        ("no_dp", "no DP", "nobody", {}),
        ("sdp", "Fed-SDP", "client", {}),
        ("cdp", "Fed-CDP", "row", {}),
        ("cdp_decay", "Fed-CDP(decay)", "row", {"clip": DECAY}),
    )
}


def runs() -> dict[str, Callable[[Path], object]]:
    """How each run is made."""
    return {
        **{name: partial(_train, run) for name, run in (RUNS | SWEEPS).items()},
        **{name: partial(_train_at_median, name == MEDIANS[1]) for name in MEDIANS},
    }


def _train_at_median(rate_follows: bool, folder: Path) -> None:
    """audits/mnist_fed_client.toml at the private median of its clients' first updates as C.

    Clients are the same when the median is drawn and when the model is trained, so that a client
    spends MEDIAN_EPSILON on it; the first parameters are others.

    Args:
        rate_follows: keep C times the server's learning rate as the audit has it, and with it the
            noise in the model; otherwise the learning rate.
        folder: of the run.
    """
    tables, data, rng = (
        _audit("mnist_fed_client").to_dict(),
        load_dataset("mnist"),
        np.random.default_rng(),
    )
    training, federated = tables["training"], tables["federated"]
    clients, steps = federated.pop("clients"), federated["local_steps"]
    holder = rng.permutation(np.arange(len(data.train)) % clients)
    taken = [
        rng.permutation(np.flatnonzero(holder == one))[: steps * federated["local_batch_size"]]
        for one in range(clients)
    ]
    federated["partition"] = "holder"
    model = AuditConfig.from_dict(tables).model
    seed = Randomness.from_seed(None).first_parameters
    module = first_parameters(model, data.input_shape, data.n_classes, seed)
    inputs, targets = (torch.from_numpy(rows) for rows in (data.train.inputs, data.train.targets))
    local = LocalTraining(module, inputs, targets, federated["local_learning_rate"])
    first = parameters_to_vector(module.parameters()).detach()
    updates, _ = local.updates(first, [list(rows.reshape(steps, -1)) for rows in taken])
    median = private_median_norm(updates.norm(dim=1).numpy(), epsilon=MEDIAN_EPSILON)
    if rate_follows:
        federated["server_learning_rate"] *= training["max_grad_norm"] / median
    training["max_grad_norm"] = median
    held = replace(data.train, metadata=pd.DataFrame({"holder": holder}))
    train_federated(AuditConfig.from_dict(tables), folder, dataset=replace(data, train=held))


def _train(run: Run, folder: Path) -> None:
    train_federated(run.config(), folder)


def mean_norms(log: NormLog) -> list[float]:
    """Means of norms before flat clipping, over max_grad_norm, in each tenth of the steps."""
    if log.batch_norms is None or not log.levels.rounding:
        return []
    entries = log.batch_norms.read(0, log.n_examples)
    tenth = entries.step.astype(np.int64) * TENTHS // log.total_steps
    norms = log.levels.norms(entries.norm, 1.0)
    sums, counts = (np.bincount(tenth, each, TENTHS) for each in (norms, None))
    return [round(float(mean), 6) for mean in sums / np.maximum(counts, 1)]


def figures_of(path: Path) -> dict[str, Any]:
    """Accuracies at checkpoints, and epsilons of the units at hand and of clients."""
    record, curve = read_json(path / RUN_JSON), read_parquet(path / CURVE)
    found: dict[str, Any] = {
        "step": curve["step"].tolist(),
        "test_accuracy": curve["test_accuracy"].tolist(),
        "delta": record["training"]["delta"],
    }
    if path.name in MEDIANS:
        found["max_grad_norm"] = record["training"]["max_grad_norm"]
    if record["guarantee"]["epsilon"] is None:
        return found
    log, delta = NormLog.open(path), record["training"]["delta"]
    found["norms"] = mean_norms(log) if record["training"]["clipping"] == "flat" else []
    found["secret"] = (
        account(log, delta=delta).worst_case_epsilon if log.sampler == "poisson" else None
    )
    known = account(log, delta=delta, participation="known")
    found["known"], found["known_median"] = (
        known.worst_case_epsilon,
        float(np.median(known.epsilon)),
    )
    found["unit"] = known.account.unit
    if known.account.unit == "example":
        clients = account(replace(log, unit="client"), delta=delta, participation="known")
        found["client_known"] = clients.worst_case_epsilon
        found["client_known_median"] = float(np.median(clients.epsilon))
    return found
