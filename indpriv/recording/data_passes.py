"""Passes over a whole data set in its own order: gradient norms, final losses. Sensitive."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.data_loader import CollateFnWithEmpty
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from indpriv._arrays import FloatArray, IntArray
from indpriv.errors import InputError
from indpriv.norm_log.validation import check_norms
from indpriv.recording.checkpoints.weights import fingerprint_of
from indpriv.recording.norms.batches import map_tensors, same_values, tensors_of, unpacked
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.opacus.ranks import Ranks, check_together
from indpriv.recording.opacus.whole_model import WholeModel
from indpriv.recording.random_states import kept_random_state

_FEW = 32  # examples that are read twice
CollateFn = Callable[[list[Any]], Any]
Unpack = Callable[[Any], Any]  # a batch of the loader -> (arguments of the model, targets)


class Examples:
    """A map-style data set, read in order, and the user's own collate function, or None."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: CollateFn | None,
        device: torch.device,
        unpack: Unpack | None = None,
    ) -> None:
        self.dataset = dataset
        # Opacus wraps the user's collate function to make empty batches; a pass has none.
        if isinstance(collate_fn, CollateFnWithEmpty):
            collate_fn = collate_fn.wrapped_collator_fn
        self.collate_fn = None if collate_fn is default_collate else collate_fn
        self._device, self._unpack = device, unpack

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(
        self, batch_size: int, positions: IntArray | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of all examples or some positions, in order, on the device."""
        batches: Iterable[Any]
        if isinstance(self.dataset, TensorDataset) and self.collate_fn is None:
            index = slice(None) if positions is None else torch.as_tensor(positions)
            parts = (tensor[index].split(batch_size) for tensor in self.dataset.tensors)
            # Clones, one batch after the other: a forward pass may write into its inputs.
            batches = ([part.clone() for part in batch] for batch in zip(*parts, strict=True))
        else:
            whole = self.dataset
            dataset = whole if positions is None else Subset(whole, positions.tolist())
            batches = DataLoader(dataset, batch_size=batch_size, collate_fn=self.collate_fn)
        try:
            for batch in batches:
                yield self.on_device(self.unpacked(batch))
        except TypeError as error:
            message = f"no batch can be made of the data set's items, see collate_fn: {error}"
            raise InputError(message) from error

    @cached_property
    def random_targets(self) -> bool:
        """Whether a few targets are others when they are read again, as a collate function may."""
        if isinstance(self.dataset, TensorDataset) and self.collate_fn is None:
            return False
        few = np.arange(min(len(self), _FEW))
        with kept_random_state():
            (_, first), (_, again) = (next(self.batches(_FEW, few)) for _ in range(2))
        pairs = zip(tensors_of(first), tensors_of(again), strict=True)
        return not all(same_values(*pair) for pair in pairs)

    def on_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """The same on the model's device."""
        inputs, targets = map_tensors(batch, lambda tensor: tensor.to(self._device))
        return inputs, targets

    def unpacked(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) of a batch of the loader, where it is; InputError if they are none."""
        return unpacked(batch, self._unpack)


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
) -> Measured:
    """Gradient norms of all examples or those at some positions.

    Raises:
        InputError: a NaN norm (the message names example ids), or a data set whose length changed.
    """
    start = time.perf_counter()
    taken = _taken(norm_pass, examples, positions)
    _check_taken(taken[0], ids if positions is None else ids[positions])
    return Measured(*taken, time.perf_counter() - start)


@dataclass(frozen=True)
class SharedPass:
    """Passes over the training set: each rank of a run takes a part, and all get the whole."""

    ranks: Ranks
    whole: WholeModel
    norm_pass: NormPass
    examples: Examples
    ids: NDArray[np.generic]

    def norms(self, moment: str, positions: IntArray | None = None) -> Measured:
        """Like `norms_of`; the fingerprint depends on the number of ranks.

        Raises:
            EvidenceError: a rank is gone, is at another place, or has other parameters.
        """
        start = time.perf_counter()
        self.whole.gather()
        if self.ranks.size == 1:
            return norms_of(self.norm_pass, self.examples, self.ids, positions)
        module = self.whole.module
        wanted = np.arange(len(self.ids)) if positions is None else positions
        taken = _taken(self.norm_pass, self.examples, self.ranks.part(wanted))
        weights = fingerprint_of(
            {**dict(module.named_parameters()), **dict(module.named_buffers())}
        )
        parts = self.ranks.gather(moment, (weights, *taken))
        check_together(moment, [{"the model's parameters": part[0]} for part in parts], [])
        norms = np.concatenate([part[1] for part in parts])
        _check_taken(norms, self.ids[wanted])
        targets = hashlib.sha256("".join(part[2] for part in parts).encode()).hexdigest()
        return Measured(norms, targets, time.perf_counter() - start)


def _taken(
    norm_pass: NormPass, examples: Examples, positions: IntArray | None
) -> tuple[FloatArray, str]:
    norms: list[FloatArray] = []
    targets_hash = hashlib.sha256()
    with kept_random_state():
        for inputs, targets in examples.batches(norm_pass.batch_size, positions):
            batch, _ = norm_pass(inputs, targets)
            norms.append(batch.detach().cpu().numpy().astype(np.float64))
            for leaf in [] if examples.random_targets else tensors_of(targets):
                targets_hash.update(leaf.detach().cpu().contiguous().numpy().tobytes())
    return np.concatenate(norms) if norms else np.zeros(0), targets_hash.hexdigest()


def _check_taken(norms: FloatArray, ids: NDArray[np.generic]) -> None:
    if len(norms) != len(ids):
        raise InputError(
            f"the data set has {len(norms)} examples now and had {len(ids)} at the start; it may "
            "not grow or shrink during a run"
        )
    check_norms(norms, ids)
