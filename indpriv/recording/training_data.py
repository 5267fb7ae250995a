"""What a run trains on, what is known of each example, and passes over all of them. Sensitive."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from opacus import data_loader
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from indpriv import _checks
from indpriv._facts import refused
from indpriv._types import ArrayLike, FloatArray, IntArray, NDArray
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable, check_metadata, check_storable
from indpriv.norm_log.fields import UNITS, check_ids, check_norms, check_unit_ids
from indpriv.recording import random_states
from indpriv.recording.checkpoints.safe_files import fingerprint_of
from indpriv.recording.norms import batches as of_batches
from indpriv.recording.norms.batches import LossFn, call, map_tensors, same_values, tensors_of
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.opacus.run import Ranks, WholeModel, of_opacus
from indpriv.recording.random_states import kept_random_state

_FEW = 32  # examples that are read twice
CollateFn = Callable[[list[Any]], Any]
Unpack = Callable[[Any], Any]  # a batch of the loader -> (arguments of the model, targets)


def plain_collate(collate_fn: CollateFn | None) -> CollateFn:
    """The user's own, which Opacus wraps to make empty batches; a pass has none."""
    if isinstance(collate_fn, of_opacus(data_loader, "CollateFnWithEmpty")):
        collate_fn = vars(collate_fn)["wrapped_collator_fn"]
    elif isinstance(collate_fn, partial) and collate_fn.func is vars(data_loader).get("collate"):
        collate_fn = collate_fn.keywords["collate_fn"]  # Opacus 1.5
    return collate_fn or default_collate


class Examples:
    """A map-style data set, read in order, and how a loader makes batches of its items."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: CollateFn | None,
        device: torch.device,
        unpack: Unpack | None = None,
    ) -> None:
        self.dataset, self.collate = dataset, plain_collate(collate_fn)
        self._device, self._unpack = device, unpack
        # Of its own, which items draw from.
        self.generators = random_states.noted(self, [dataset, self.collate, unpack])

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        """Those that batches are slices of; none if a batch is more than that."""
        kind = type(self.dataset)
        plain = getattr(kind, "__getitem__", None) is TensorDataset.__getitem__
        plain &= self.collate is default_collate and not hasattr(kind, "__getitems__")
        return self.dataset.tensors if plain else ()  # type: ignore[attr-defined]

    def read(self, positions: IntArray) -> Any:
        """These rows as a loader reads them: a list of items, or whatever the data set makes."""
        rows, several = positions.tolist(), getattr(self.dataset, "__getitems__", None)
        return [self.dataset[row] for row in rows] if several is None else several(rows)

    def collated(self, positions: IntArray) -> Any:
        """A batch of these rows, as a loader makes it."""
        if self._tensors:
            return [tensor[torch.as_tensor(positions)] for tensor in self._tensors]
        return self.collate(self.read(positions))

    def batches(
        self, batch_size: int, positions: IntArray | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of all examples or some positions, in order, on the device."""
        wanted = np.arange(len(self)) if positions is None else positions
        for start in range(0, len(wanted), batch_size):
            try:
                batch = self.unpacked(self.collated(wanted[start : start + batch_size]))
            except InputError:
                raise
            except of_batches.FAULTS as error:
                raise refused("refusal.arguments", "collate", error=error) from error
            yield self.on_device(batch)

    @cached_property
    def random_parts(self) -> tuple[bool, bool]:
        """Whether inputs, and targets, of a few rows are others when they are read again."""
        if self._tensors:
            return False, False
        few = np.arange(min(len(self), _FEW))
        with kept_random_state():
            twice = [map(tensors_of, next(self.batches(_FEW, few))) for _ in range(2)]
        inputs, targets = (not all(map(same_values, *each)) for each in zip(*twice, strict=True))
        return inputs, targets

    def on_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """The same on the model's device."""
        inputs, targets = map_tensors(batch, lambda tensor: tensor.to(self._device))
        return inputs, targets

    def unpacked(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) of a batch of the loader, where it is; InputError if they are none."""
        return of_batches.unpacked(batch, self._unpack)


@dataclass(frozen=True)
class Measured:
    """Norms (n,) of some examples, a fingerprint of their targets, and the pass's seconds."""

    norms: FloatArray
    targets_fingerprint: str
    seconds: float


def norms_of(
    norm_pass: NormPass,
    examples: Examples,
    ids: NDArray[np.generic],
    positions: IntArray | None = None,
    together: tuple[Ranks, WholeModel, str] | None = None,
) -> Measured:
    """Gradient norms of all examples or those at some positions; InputError if one is NaN.

    together: the ranks, the model that each of them holds, and the moment. Several ranks take a
    part each, and all get the whole; the fingerprint depends on their number.
    """
    start = time.perf_counter()
    if together is not None:
        together[1].gather()
    several = None if together is None or together[0].size == 1 else together
    wanted = np.arange(len(ids)) if positions is None else positions
    if several is not None:
        positions = np.array_split(wanted, several[0].size)[several[0].rank]
    norms, targets_hash = [np.zeros(0)], hashlib.sha256()
    with kept_random_state():
        for inputs, targets in examples.batches(norm_pass.batch_size, positions):
            norms.append(norm_pass(inputs, targets)[0].detach().cpu().numpy().astype(np.float64))
            for leaf in [] if examples.random_parts[1] else tensors_of(targets):
                targets_hash.update(leaf.detach().cpu().contiguous().numpy().tobytes())
    taken, fingerprint = np.concatenate(norms), targets_hash.hexdigest()
    if several is not None:
        ranks, whole, moment = several
        weights = dict([*whole.module.named_parameters(), *whole.module.named_buffers()])
        shared = {"the model's parameters": fingerprint_of(weights)}
        parts = ranks.gather(moment, (taken, fingerprint), shared=shared)
        taken = np.concatenate([part[0] for part in parts])
        fingerprint = hashlib.sha256("".join(part[1] for part in parts).encode()).hexdigest()
    if len(taken) != len(wanted):
        raise refused("refusal.training", "length", now=len(taken), before=len(wanted))
    check_norms(taken, ids[wanted])
    return Measured(taken, fingerprint, time.perf_counter() - start)


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
        if self.test_set is None and self.test_metadata is not None:
            raise InputError("test_metadata is given without test_set; pass both")
        if self.test_set is not None:
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

    def check_test_set(self, norm_pass: NormPass, test: Examples | None) -> None:
        """Raise InputError if the final losses of the test set, if any, could not be taken."""
        if test is None:
            return
        try:
            inputs, targets = next(test.batches(2))
        except StopIteration as error:
            raise refused("refusal.arguments", "empty_test_set") from error
        try:
            with norm_pass.evaluation() as model:
                of_batches.check_losses(self.loss_fn(call(model, inputs), targets), targets)
        except of_batches.FAULTS as error:
            raise refused("refusal.arguments", "test_set", error=error) from error

    def examples(
        self, collate_fn: CollateFn | None, device: torch.device
    ) -> tuple[Examples, Examples | None]:
        """The training examples and the test examples, if there are any, as passes read them."""
        alike = collate_fn, device, self.unpack
        test = None if self.test_set is None else Examples(self.test_set, *alike)
        return Examples(self.dataset, *alike), test

    def example_table(
        self, model: nn.Module, train: Examples, test: Examples | None
    ) -> ExampleTable:
        """The ExampleTable of a final model in eval mode; test examples are numbered from 0."""
        splits = [("train", train, self.ids, self.ids_of_units, self.metadata)]
        if test is not None:
            splits.append(("test", test, np.arange(len(test)), None, self.test_metadata))
        rows = []
        for split, examples, ids, units, metadata in splits:
            losses, labels, correct = [], [], []
            with torch.no_grad(), kept_random_state():
                for inputs, targets in examples.batches(4096):
                    outputs = call(model, inputs)
                    precise = of_batches.precise_losses(self.loss_fn, outputs, targets)
                    losses.append(precise.cpu().numpy())
                    labels.append(_labels(targets))
                    correct.append(_correct(outputs, targets))
            columns = {
                "example_id": ids,
                "unit_id": ids if units is None else units,
                "split": split,
                "label": _joined(labels, "Int64", len(ids)),
                "loss": np.concatenate(losses),
                "correct": _joined(correct, "boolean", len(ids)),
            }
            known = check_metadata(metadata, ids, split)
            rows.append(pd.concat([pd.DataFrame(columns), known], axis=1))
        frame = pd.concat(rows, ignore_index=True)
        for name in ("example_id", "unit_id"):
            if frame[name].dtype == object:  # a file cannot hold strings and numbers in one column
                frame[name] = frame[name].astype(str)
        return ExampleTable(frame)


def length(dataset: Any, name: str) -> int:
    """Length of a map-style data set; InputError if it has none, or holds columns, not items."""
    if isinstance(dataset, pd.DataFrame):
        raise refused("refusal.arguments", "frame", name=name)
    try:
        return len(dataset)
    except TypeError as error:
        kind = type(dataset).__name__
        raise refused("refusal.arguments", "no_length", name=name, kind=kind) from error


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
