"""Which rows each client holds. Sensitive, as the labels that it may depend on."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audits.training.config import FederatedConfig
from audits.training.datasets.base import Split
from indpriv._types import IntArray
from indpriv.errors import InputError

CLIENT = "client"  # the metadata column that names the client of each row
ORIGINAL = "original"  # that of the row which each row is a copy of


def partitioned(
    train: Split, settings: FederatedConfig, rng: np.random.Generator
) -> tuple[NDArray[np.generic], list[IntArray]]:
    """Names of the clients (n_clients,), and the rows of each.

    Raises:
        InputError: no such column, more clients (or shards of all clients) than rows, or a client
            with fewer rows than its local steps need.
    """
    names: NDArray[np.generic]
    if settings.clients is None:
        names, owner = np.unique(train.units(settings.partition), return_inverse=True)
        rows = [np.flatnonzero(owner == number) for number in range(len(names))]
    else:
        names = np.arange(settings.clients)
        pieces = settings.shards if settings.partition == "shards" else 1
        rows = _dealt(train, settings.clients, pieces, rng, by_label=settings.partition == "shards")
    settings.planned(len(names))
    least = min(map(len, rows))
    needed = settings.local_steps * (settings.local_batch_size or least)
    if needed > least:
        raise InputError(
            f"[federated] {settings.local_steps} local steps of "
            f"{settings.local_batch_size or 'all'} rows need {needed}, and a client has only "
            f"{least}: no row may be used twice in a round"
        )
    return names, rows


def copied(train: Split, copies: int) -> Split:
    """Every row so many times, with a metadata column of originals; itself without copies."""
    if copies == 1:
        return train
    number = np.tile(np.arange(len(train)), copies)
    metadata = pd.DataFrame(index=number) if train.metadata is None else train.metadata.loc[number]
    metadata = metadata.reset_index(drop=True).assign(**{ORIGINAL: number})
    return Split(train.inputs[number], train.targets[number], metadata)


def _dealt(
    train: Split, n_clients: int, pieces: int, rng: np.random.Generator, *, by_label: bool
) -> list[IntArray]:
    """Rows of each client: so many random pieces of equal length, cut from the order of rows."""
    size = len(train) // (n_clients * pieces)
    if not size:
        raise InputError(
            f"[federated] clients = {n_clients} with {pieces} pieces each: the {len(train)} rows "
            "leave clients without any"
        )
    order = rng.permutation(len(train))
    if by_label:
        order = order[np.argsort(train.targets[order], kind="stable")]
    cut = order[: size * n_clients * pieces].reshape(n_clients * pieces, size)
    dealt = rng.permutation(len(cut)).reshape(n_clients, pieces)
    return [np.sort(cut[numbers].reshape(-1)) for numbers in dealt]
