"""AuditSpec: how to rebuild the model and data of a run, so that its checkpoints can be audited."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from torch import nn

from indpriv._facts import refused
from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import LoadFn
from indpriv.recording.losses import with_targets
from indpriv.recording.training_data import TrainingData, length

_EXAMPLE = "my_package.training:spec or path/to/file.py:spec"


@dataclass(frozen=True, kw_only=True)
class AuditSpec(TrainingData):
    """The model, data and loss of a run, which the user writes once, like the training code.

    Attributes:
        model: `model()` -> the module that was trained, without Opacus's wrapper, with the same
            parameters frozen and in the same mode.
        dataset: the training set: map-style, of (inputs, targets), in the order used in training,
            without random augmentation.
        load: `load(state)` -> state_dict, for checkpoints of an unusual layout; state is the saved
            object.
        collate_fn: collate function of the data loader used in training; default torch's.
        loss_fn, test_set, metadata, test_metadata, unit, unit_ids, example_ids, unpack: as of
            `Recorder`.

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
    load: LoadFn | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss_fn", *(["load"] if self.load is not None else [])):
            if not callable(getattr(self, name)):
                raise InputError(
                    f"AuditSpec: {name} is a {type(getattr(self, name)).__name__}; pass a function"
                )
        if isinstance(self.model, nn.Module):
            raise refused("refusal.checkpoints", "model_is_a_module")
        object.__setattr__(self, "loss_fn", with_targets(self.loss_fn))
        super().__post_init__()
        if self.test_set is not None and length(self.test_set, "test_set") == 0:
            raise InputError("AuditSpec: test_set is empty; leave it out")

    @property
    def n_examples(self) -> int:
        """Number of training examples."""
        return len(self.ids)


def load_spec(reference: str) -> AuditSpec:
    """Import an AuditSpec from "package.module:spec" or "path/to/file.py:spec".

    This runs the code of the module, which is also looked for in the current directory.
    """
    place, colon, name = reference.rpartition(":")
    path, is_file = Path(place), place.endswith(".py")
    if not (colon and place and name):
        raise InputError(f"--spec {reference}: expected module and name, e.g. {_EXAMPLE}")
    if is_file and not path.is_file():
        raise InputError(f"--spec {reference}: {place} does not exist; expected e.g. {_EXAMPLE}")
    # Import from there too, and keep doing so: building a model may import more.
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if is_file:
            found: Any = spec_from_file_location(f"_indpriv_spec_{path.stem}", path.absolute())
            module = module_from_spec(found)
            sys.modules[found.name] = module  # dataclasses and pickle look up modules there
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except InputError:
        raise
    except (ImportError, SyntaxError, OSError, ValueError) as error:
        raise InputError(
            f"--spec {reference}: {place} cannot be imported: {type(error).__name__}: {error}; "
            f"expected e.g. {_EXAMPLE}"
        ) from error
    if not hasattr(module, name):
        raise InputError(
            f"--spec {reference}: {place} has no {name!r}; define it there, "
            f"e.g. {name} = AuditSpec(...)"
        )
    spec = getattr(module, name)
    if not isinstance(spec, AuditSpec):
        raise InputError(f"--spec {reference}: {name} is a {type(spec).__name__}, not an AuditSpec")
    return spec
