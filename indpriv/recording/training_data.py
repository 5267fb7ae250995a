"""What a run trains on, and what is known of each example: checked once. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.utils.data import Dataset

from indpriv import _checks
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable, check_metadata, check_storable
from indpriv.norm_log.norm_log import UNITS, check_ids, check_unit_ids
from indpriv.recording.data_passes import Examples, final_rows
from indpriv.recording.norms.batches import LossFn, check_losses


@dataclass(frozen=True)
class TrainingData:
    """The training set, the test set, and what is known of their examples; see `Recorder`.

    Raises:
        InputError: an empty data set or one without a length, or ids or metadata that do not fit.
    """

    dataset: Dataset[Any]
    loss_fn: LossFn
    example_ids: ArrayLike | None = None
    unit: str = "example"
    unit_ids: ArrayLike | None = None
    metadata: pd.DataFrame | None = None
    test_set: Dataset[Any] | None = None
    test_metadata: pd.DataFrame | None = None

    def __post_init__(self) -> None:
        n = length(self.dataset, "dataset")
        check_ids(self.ids, n)
        check_unit_ids(self.unit_ids, n, _checks.check_choice("unit", self.unit, UNITS))
        check_metadata(self.metadata, self.ids, "train")
        if self.test_set is not None or self.test_metadata is not None:
            test_ids = np.arange(length(self.test_set, "test_set"))
            check_metadata(self.test_metadata, test_ids, "test")
        check_storable(self.metadata, self.test_metadata)

    @cached_property
    def ids(self) -> NDArray[np.generic]:
        """(n,) example ids."""
        given = self.example_ids
        return np.arange(length(self.dataset, "dataset")) if given is None else np.asarray(given)

    @cached_property
    def ids_of_units(self) -> NDArray[np.generic] | None:
        """(n,) the unit each row belongs to, as an array; None if no unit ids were given."""
        return None if self.unit_ids is None else np.asarray(self.unit_ids)

    @property
    def unit_numbers(self) -> NDArray[np.int64] | None:
        """(n,) number of the unit each row belongs to, from 0 on; None if each row is a unit."""
        if self.ids_of_units is None or self.unit == "example":
            return None
        return pd.factorize(self.ids_of_units)[0].astype(np.int64)

    def check_test_set(self, model: nn.Module, test: Examples) -> None:
        """Raise InputError if the final losses of the test set could not be taken."""
        try:
            inputs, targets = next(test.batches(2))
            check_losses(self.loss_fn(model(inputs), targets), targets)
        except StopIteration as error:
            raise InputError(
                "the test set is empty; pass test_set=None to record without one"
            ) from error
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"the model and loss_fn do not accept the test set: {error}"
            ) from error

    def example_table(
        self, model: nn.Module, train: Examples, test: Examples | None
    ) -> ExampleTable:
        """The ExampleTable of a final model in eval mode.

        Test examples are numbered from 0, as strings if the training ids are strings.
        """
        sets: list[tuple[str, Examples, Any, Any, pd.DataFrame | None]] = [
            ("train", train, self.ids, self.ids_of_units, self.metadata)
        ]
        if test is not None:
            sets.append(("test", test, np.arange(len(test)), None, self.test_metadata))
        rows = [
            final_rows(
                model,
                self.loss_fn,
                examples,
                split=split,
                ids=ids,
                unit_ids=unit_ids,
                metadata=metadata,
            )
            for split, examples, ids, unit_ids, metadata in sets
        ]
        frame = pd.concat(rows, ignore_index=True)
        for name in ("example_id", "unit_id"):
            if frame[name].dtype == object:  # a file cannot hold strings and numbers in one column
                frame[name] = frame[name].astype(str)
        return ExampleTable(frame)


def length(dataset: Any, name: str) -> int:
    """Length of a map-style data set; InputError if it has none."""
    try:
        return len(dataset)
    except TypeError as error:
        raise InputError(
            f"{name} is of type {type(dataset).__name__}, which has no length; pass a map-style "
            "data set, since Poisson sampling needs one"
        ) from error
