"""What a run trains on, and what is known of each example: checked once. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from indpriv import _checks
from indpriv._arrays import IntArray
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable, check_metadata, check_storable
from indpriv.norm_log.validation import UNITS, check_ids, check_unit_ids
from indpriv.recording.data_passes import CollateFn, Examples, Unpack
from indpriv.recording.norms.batches import FAULTS, LossFn, call, check_losses, precise_losses
from indpriv.recording.random_states import kept_random_state


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
    unpack: Unpack | None = None

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
    def unit_numbers(self) -> IntArray | None:
        """(n,) number of the unit each row belongs to, from 0 on; None if each row is a unit."""
        if self.ids_of_units is None or self.unit == "example":
            return None
        return pd.factorize(self.ids_of_units)[0].astype(np.int64)

    def check_test_set(self, model: nn.Module, test: Examples) -> None:
        """Raise InputError if the final losses of the test set could not be taken."""
        try:
            inputs, targets = next(test.batches(2))
            check_losses(self.loss_fn(call(model, inputs), targets), targets)
        except StopIteration as error:
            raise InputError(
                "the test set is empty; pass test_set=None to record without one"
            ) from error
        except FAULTS as error:
            raise InputError(
                f"the model and loss_fn do not accept the test set: {error}"
            ) from error

    def examples(
        self, collate_fn: CollateFn | None, device: torch.device
    ) -> tuple[Examples, Examples | None]:
        """The training examples and the test examples, if there are any, as passes read them."""
        train = Examples(self.dataset, collate_fn, device, self.unpack)
        if self.test_set is None:
            return train, None
        return train, Examples(self.test_set, collate_fn, device, self.unpack)

    def example_table(
        self, model: nn.Module, train: Examples, test: Examples | None
    ) -> ExampleTable:
        """The ExampleTable of a final model in eval mode.

        Test examples are numbered from 0, as strings if the training ids are strings.
        """
        rows = [self._rows(model, train, "train", self.ids, self.ids_of_units, self.metadata)]
        if test is not None:
            numbers = np.arange(len(test))
            rows.append(self._rows(model, test, "test", numbers, None, self.test_metadata))
        frame = pd.concat(rows, ignore_index=True)
        for name in ("example_id", "unit_id"):
            if frame[name].dtype == object:  # a file cannot hold strings and numbers in one column
                frame[name] = frame[name].astype(str)
        return ExampleTable(frame)

    def _rows(
        self,
        model: nn.Module,
        examples: Examples,
        split: str,
        ids: NDArray[np.generic],
        unit_ids: NDArray[np.generic] | None,
        metadata: pd.DataFrame | None,
    ) -> pd.DataFrame:
        """Rows of one split: label, loss and correctness of each example."""
        losses, labels, correct = [], [], []
        with torch.no_grad(), kept_random_state():
            for inputs, targets in examples.batches(4096):
                outputs = call(model, inputs)
                losses.append(precise_losses(self.loss_fn, outputs, targets).cpu().numpy())
                labels.append(_labels(targets))
                correct.append(_correct(outputs, targets))
        frame = pd.DataFrame(
            {
                "example_id": ids,
                "unit_id": ids if unit_ids is None else unit_ids,
                "split": split,
                "label": _joined(labels, "Int64", len(ids)),
                "loss": np.concatenate(losses),
                "correct": _joined(correct, "boolean", len(ids)),
            }
        )
        return pd.concat([frame, check_metadata(metadata, ids, split)], axis=1)


def length(dataset: Any, name: str) -> int:
    """Length of a map-style data set; InputError if it has none."""
    try:
        return len(dataset)
    except TypeError as error:
        raise InputError(
            f"{name} is of type {type(dataset).__name__}, which has no length; pass a map-style "
            "data set, since Poisson sampling needs one"
        ) from error


def _joined(batches: list[Any], dtype: Any, n: int) -> Any:
    """One column of n values; all missing if the task has none."""
    if batches[0] is None:
        return pd.array([pd.NA] * n, dtype)
    return pd.array(np.concatenate(batches), dtype)


def _labels(targets: Any) -> Any:
    """(batch,) int64 class labels; None if the targets are none."""
    if isinstance(targets, dict):
        targets = targets.get("labels")
    if not isinstance(targets, Tensor) or targets.ndim != 1 or targets.is_complex():
        return None
    values = targets.cpu().numpy()
    if np.issubdtype(values.dtype, np.floating) and not np.isin(values, (0.0, 1.0)).all():
        return None  # binary targets are often floats; other floats are no classes
    return values.astype(np.int64)


def _correct(outputs: Any, targets: Any) -> Any:
    """(batch,) bool; None if the task has no accuracy."""
    if isinstance(targets, dict):
        outputs, targets = getattr(outputs, "logits", outputs), targets.get("labels")
    if _labels(targets) is None or not isinstance(outputs, Tensor):
        return None
    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return (outputs.argmax(1) == targets).cpu().numpy()
    if outputs.numel() == len(targets):
        return ((outputs.reshape(-1) > 0) == (targets > 0.5)).cpu().numpy()
    return None
