"""Which rows of a data set an audit trains on: all, or some that its [data] names or draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from audits.training.datasets.base import Dataset
from indpriv._columns import to_texts
from indpriv._types import IntArray
from indpriv.errors import InputError

if TYPE_CHECKING:
    from audits.training.config import DataConfig

_MOST_NAMED = 20  # values that a message lists


def chosen_rows(dataset: Dataset, data: DataConfig) -> Dataset:
    """The data set with the training rows that [data] leaves, renumbered; its tests stay."""
    if not data.chooses:
        return dataset
    kept = np.zeros(len(dataset.train), dtype=bool)
    kept[chosen_ids(dataset, data)] = True
    return replace(dataset, train=dataset.train.take(kept))


def chosen_ids(dataset: Dataset, data: DataConfig) -> IntArray:
    """(n,) positions of those rows in the whole training set, ascending: the ids that they had.

    What is drawn does not depend on what is left out, nor the cap of a unit on either.

    Raises:
        InputError: a value or an id that the data do not have, or no row is left.
    """
    kept = ~_left_out(dataset, data)
    if data.share is not None:
        kept &= _drawn(dataset, data, data.share)
    if data.unit_column is not None and data.max_rows_per_unit is not None:
        kept &= dataset.train.within_cap(data.unit_column, data.max_rows_per_unit)
    if not kept.any():
        raise InputError(
            f"[data] leaves no training row of {dataset.name}; leave out fewer, or train on a "
            "larger share"
        )
    return np.flatnonzero(kept)


def _left_out(dataset: Dataset, data: DataConfig) -> NDArray[np.bool_]:
    """Rows that have a value, or an id, of those to leave out."""
    n = len(dataset.train)
    out = np.zeros(n, dtype=bool)
    for condition in data.without or ():
        column, _, value = condition.partition("=")
        names = _values(dataset, column)
        if not (names == value).any():
            known = sorted(set(names.tolist()))
            more = ", ..." if len(known) > _MOST_NAMED else ""
            raise InputError(
                f"without {condition!r}: no training row of {dataset.name} has that value; "
                f"{column} has {', '.join(known[:_MOST_NAMED])}{more}"
            )
        out |= names == value
    ids = list(data.without_ids or ())
    beyond = [one for one in ids if one >= n]
    if beyond:
        raise InputError(
            f"without_ids has {beyond[0]}, and the ids of {dataset.name} are 0 to {n - 1}"
        )
    out[ids] = True
    return out


def _values(dataset: Dataset, column: str) -> NDArray[np.object_]:
    """(n,) values of a column of the training rows as texts; labels by the names of classes."""
    if column == "label":
        return np.array(dataset.class_names, dtype=object)[dataset.train.targets]
    return to_texts(dataset.train.units(column))


def _drawn(dataset: Dataset, data: DataConfig, share: float) -> NDArray[np.bool_]:
    """Rows of a random share of the units; a smaller share of one seed lies in a larger one."""
    units: Sequence[int] | pd.Series = range(len(dataset.train))
    if data.unit_column is not None:
        units = dataset.train.units(data.unit_column)
    codes, distinct = pd.factorize(np.asarray(units))
    place = np.random.default_rng(data.share_seed or 0).permutation(len(distinct))
    chosen: NDArray[np.bool_] = place[codes] < np.ceil(share * len(distinct) - 1e-9)
    return chosen
