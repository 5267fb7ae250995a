"""Which rows each client holds."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audits.training.config import FederatedConfig
from audits.training.datasets.base import Split
from audits.training.federated.partition import partitioned
from indpriv import InputError

BASE = {"rounds": 1, "protect": "client", "client_rate": 0.5, "local_learning_rate": 0.1}


def split(n, n_classes=3, seed=0):
    targets = np.random.default_rng(seed).integers(0, n_classes, n)
    return Split(np.zeros((n, 2), np.float32), targets.astype(np.int64))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 200),
    clients=st.integers(1, 40),
    kind=st.sampled_from(["equal", "shards"]),
    seed=st.integers(0, 2**31),
)
def test_each_client_gets_as_many_rows_and_no_row_two_clients(n, clients, kind, seed):
    pieces = 2 if kind == "shards" else 1
    config = FederatedConfig(**BASE, clients=clients, partition=kind)
    train, rng = split(n, seed=seed), np.random.default_rng(seed)
    if n < clients * pieces:
        with pytest.raises(InputError, match="leave clients without any"):
            partitioned(train, config, rng)
        return
    names, rows = partitioned(train, config, rng)
    assert names.tolist() == list(range(clients))
    assert {len(held) for held in rows} == {n // (clients * pieces) * pieces}
    every = np.concatenate(rows)
    assert len(np.unique(every)) == len(every)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_hold_few_labels(shards):
    config = FederatedConfig(**BASE, clients=20, partition="shards", shards=shards)
    train = split(2000, 20)
    _, rows = partitioned(train, config, np.random.default_rng(0))
    labels = [len(set(train.targets[held].tolist())) for held in rows]
    assert sum(labels) <= shards * 20 + 19  # a shard at each of the borders has two labels
    assert len({tuple(np.unique(train.targets[held])) for held in rows}) > 5  # dealt at random


def test_a_column_names_the_clients():
    owners = ["b", "a", "b", "c", "a", "b"]
    train = Split(
        np.zeros((6, 1), np.float32), np.zeros(6, np.int64), pd.DataFrame({"site": owners})
    )
    config = FederatedConfig(**BASE, partition="site")
    names, rows = partitioned(train, config, np.random.default_rng(0))
    assert names.tolist() == ["a", "b", "c"]
    assert [held.tolist() for held in rows] == [[1, 4], [0, 2, 5], [3]]
    with pytest.raises(InputError, match="no metadata column 'ward'"):
        partitioned(train, FederatedConfig(**BASE, partition="ward"), np.random.default_rng(0))


def test_no_row_is_used_twice_in_a_round():
    config = FederatedConfig(**BASE, clients=10, local_steps=3, local_batch_size=4)
    with pytest.raises(InputError, match="need 12, and a client has only 10"):
        partitioned(split(100), config, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": "site", "clients": 4}, "leave out clients"),
        ({"clients": None}, "needs clients"),
        ({"sampler": "fixed_size", "client_rate": 0.25}, "whole number of clients"),
        ({"protect": "row", "noise_at": "server"}, "choose among batch, row"),
        ({"protect": "client", "noise_at": "row"}, "choose among server"),
        ({"protect": "nobody", "noise_at": "server"}, "leave it out"),
        ({"share": 0.5}, "before the noise"),
    ],
)
def test_what_does_not_go_together(changes, message):
    with pytest.raises(ValueError, match=message):  # an audit file makes an InputError of it
        FederatedConfig(**{**BASE, "clients": 10, **changes})
