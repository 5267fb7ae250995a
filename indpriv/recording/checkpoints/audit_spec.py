"""AuditSpec: how to rebuild the model and data of a run, so that its checkpoints can be audited."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.utils.data import Dataset

from indpriv.errors import InputError
from indpriv.recording.checkpoints.weights import LoadFn
from indpriv.recording.losses import with_targets
from indpriv.recording.norms.batches import LossFn
from indpriv.recording.training_data import TrainingData, length

_EXAMPLE = "my_package.training:spec or path/to/file.py:spec"


@dataclass(frozen=True)
class AuditSpec:
    """The model, data and loss of a run, which the user writes once, like the training code.

    Attributes:
        model: `model()` -> the module that was trained, without Opacus's wrapper, with the same
            parameters frozen and in the same mode.
        dataset: the training set: map-style, of (inputs, targets), in the order used in training,
            without random augmentation.
        loss_fn: per-example losses (batch,), see `Recorder`.
        test_set: test examples (inputs, targets); their losses are used by attacks and for the
            accuracy of groups.
        metadata: one row per training example, indexed by example id; its columns define groups.
        unit_ids: (n,) the person or client that each example belongs to.
        load: `load(state)` -> state_dict, for checkpoints of an unusual layout; state is the saved
            object.
        test_metadata: the same for the test set, indexed 0..n_test-1.
        example_ids: (n,) unique ids in the order of the dataset; default 0..n-1.
        unit: "example", "user" or "client".
        collate_fn: collate function of the data loader used in training; default torch's.

    Raises:
        InputError: a value has the wrong type, or does not fit the dataset.

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from indpriv.recording import AuditSpec
    >>> inputs = torch.arange(60.0).reshape(20, 3) / 60
    >>> train_set = TensorDataset(inputs, (inputs[:, 0] > 0.5).long())
    >>> def build_model():
    ...     return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> loss_fn = nn.CrossEntropyLoss(reduction="none")
    >>> spec = AuditSpec(model=build_model, dataset=train_set, loss_fn=loss_fn)
    >>> spec.n_examples
    20
    """

    model: Callable[[], nn.Module]
    dataset: Dataset[Any]
    loss_fn: LossFn
    test_set: Dataset[Any] | None = None
    metadata: pd.DataFrame | None = None
    unit_ids: ArrayLike | None = None
    load: LoadFn | None = None
    test_metadata: pd.DataFrame | None = None
    example_ids: ArrayLike | None = None
    unit: str = "example"
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss_fn", *(["load"] if self.load is not None else [])):
            if not callable(getattr(self, name)):
                raise InputError(
                    f"AuditSpec: {name} is a {type(getattr(self, name)).__name__}; pass a function"
                )
        if isinstance(self.model, nn.Module):
            raise InputError(
                "AuditSpec: model is a module; pass the function that builds it, "
                "e.g. lambda: MyNet(64)"
            )
        n = self.n_examples
        if self.metadata is not None and len(self.metadata) > n:
            raise InputError(
                f"AuditSpec: metadata has {len(self.metadata)} rows, the dataset {n} examples; "
                "pass both as they were in training"
            )
        if self.test_set is not None and length(self.test_set, "test_set") == 0:
            raise InputError("AuditSpec: test_set is empty; leave it out")

    @cached_property
    def data(self) -> TrainingData:
        """The data sets, and what is known of each example."""
        return TrainingData(
            self.dataset,
            with_targets(self.loss_fn),
            self.example_ids,
            self.unit,
            self.unit_ids,
            self.metadata,
            self.test_set,
            self.test_metadata,
        )

    @property
    def n_examples(self) -> int:
        """Number of training examples."""
        return len(self.ids)

    @property
    def ids(self) -> NDArray[np.generic]:
        """(n,) example ids."""
        return self.data.ids


def load_spec(reference: str) -> AuditSpec:
    """Import an AuditSpec from "package.module:spec" or "path/to/file.py:spec".

    This runs the code of the module, which is also looked for in the current directory.
    """
    place, colon, name = reference.rpartition(":")
    if not (colon and place and name):
        raise InputError(f"--spec {reference}: expected module and name, e.g. {_EXAMPLE}")
    module = _module(place, reference)
    if not hasattr(module, name):
        raise InputError(
            f"--spec {reference}: {place} has no {name!r}; define it there, "
            f"e.g. {name} = AuditSpec(...)"
        )
    spec = getattr(module, name)
    if not isinstance(spec, AuditSpec):
        raise InputError(f"--spec {reference}: {name} is a {type(spec).__name__}, not an AuditSpec")
    return spec


def _module(place: str, reference: str) -> Any:
    path, is_file = Path(place), place.endswith(".py")
    if is_file and not path.is_file():
        raise InputError(f"--spec {reference}: {place} does not exist; expected e.g. {_EXAMPLE}")
    # Import from there too, and keep doing so: building a model may import more.
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not is_file:
            return importlib.import_module(place)
        name = f"_indpriv_spec_{path.stem}"
        loader = SourceFileLoader(name, str(path.absolute()))
        found = ModuleSpec(name, loader, origin=loader.path)
        found.has_location = True  # sets __file__
        module = module_from_spec(found)
        sys.modules[name] = module  # dataclasses and pickle look up modules there
        loader.exec_module(module)
        return module
    except InputError:
        raise
    except (ImportError, SyntaxError, OSError, ValueError) as error:
        raise InputError(
            f"--spec {reference}: {place} cannot be imported: {type(error).__name__}: {error}; "
            f"expected e.g. {_EXAMPLE}"
        ) from error
