"""What a model and imputation say about attributes of its examples. Sensitive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from audits.training.datasets.base import Dataset, OneHot, Split
from indpriv._files import write_private_parquet
from indpriv._types import BoolArray, FloatArray, IntArray
from indpriv.attacks.attributes import LOGS, AttributeKnowledge
from indpriv.errors import InputError

_BATCH = 4096
_LEAST = 40  # test examples: half of them fit imputation
_RIDGE = 1e-3  # of the mean loss of imputation
_ITERATIONS = 100
_SEED = 0  # of the half of the test examples that imputation is fitted on


def attribute_knowledge(
    module: nn.Module, dataset: Dataset, names: Sequence[str], device: str = "cpu"
) -> tuple[AttributeKnowledge, ...]:
    """What an attacker knows of attributes of the training examples and of half the test examples.

    Imputation is a multinomial logistic regression on the other columns, fitted on the other half
    of the test examples: it has seen neither members nor the non-members they are compared with.

    Args:
        module: the attacked model.
        dataset: what it was trained on; its `attributes` say where the columns are.
        names: attributes.
        device: device of the model.

    Raises:
        InputError: an attribute that the data does not have, fewer than 40 test examples, or an
            example that has none of an attribute's values.
    """
    if len(dataset.test) < _LEAST:
        raise InputError(
            f"attributes need {_LEAST} test examples, since imputation takes half of them; there "
            f"are {len(dataset.test)}"
        )
    order = np.random.default_rng(_SEED).permutation(len(dataset.test))
    fitting = np.zeros(len(dataset.test), dtype=bool)
    fitting[order[: len(order) // 2]] = True
    module.eval()
    return tuple(_knowledge(module, dataset, fitting, name, device) for name in names)


def _knowledge(
    module: nn.Module, dataset: Dataset, fitting: BoolArray, name: str, device: str
) -> AttributeKnowledge:
    if name not in dataset.attributes:
        raise InputError(
            f"{dataset.name} has no attribute {name!r}; it has "
            f"{', '.join(dataset.attributes) or 'none'}"
        )
    where = dataset.attributes[name]
    fit, others = dataset.test.take(fitting), dataset.test.take(~fitting)
    attacked = Split(
        np.concatenate([dataset.train.inputs, others.inputs]),
        np.concatenate([dataset.train.targets, others.targets]),
    )
    member = np.arange(len(attacked)) < len(dataset.train)
    values = _values(fit, where, name)
    logs = [
        _impute(_features(fit, where, label), values, _features(attacked, where, label), where)
        for label in (0, dataset.n_classes)
    ]
    return AttributeKnowledge(
        name=name,
        values=where.values,
        truth=_values(attacked, where, name),
        member=member,
        example_ids=np.concatenate([np.arange(len(dataset.train)), np.flatnonzero(~fitting)]),
        likelihood=_likelihood(module, attacked, where, device),
        prior=logs[0],
        imputed=logs[1],
    )


def _values(split: Split, where: OneHot, name: str) -> IntArray:
    """(n,) number of each example's value."""
    block = split.inputs[:, where.columns]
    if not (block.sum(axis=1) == 1).all() or not np.isin(block, (0, 1)).all():
        raise InputError(f"{name} is not one-hot: its columns must be 0 but for one 1")
    return block.argmax(axis=1)


def _features(split: Split, where: OneHot, n_classes: int) -> Tensor:
    """The other columns, and indicators of the label if there are classes."""
    rest = np.delete(split.inputs, np.r_[where.columns], axis=1)
    label = np.eye(n_classes, dtype=np.float32)[split.targets] if n_classes else rest[:, :0]
    return torch.from_numpy(np.concatenate([rest, label], axis=1))


def _impute(features: Tensor, values: IntArray, new: Tensor, where: OneHot) -> FloatArray:
    """(n_new, k) log-probabilities by a logistic regression on the features."""
    truth, k = torch.from_numpy(values), len(where.values)
    weights = torch.zeros(k, features.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        fit = F.cross_entropy(F.linear(features, weights[:, :-1], weights[:, -1]), truth)
        total = fit + _RIDGE * weights[:, :-1].square().sum() / 2
        total.backward()
        return total

    optimizer.step(loss)
    with torch.no_grad():
        logits = F.linear(new, weights[:, :-1], weights[:, -1]).double()
        found: FloatArray = logits.log_softmax(1).numpy()
    return found


@torch.no_grad()
def _likelihood(module: nn.Module, split: Split, where: OneHot, device: str) -> FloatArray:
    """(n, k) log-probability of the label with each value of the attribute."""
    found = np.empty((len(split), len(where.values)))
    for start in range(0, len(split), _BATCH):
        part = slice(start, start + _BATCH)
        inputs = torch.from_numpy(split.inputs[part]).clone()
        labels = torch.from_numpy(split.targets[part])[:, None]
        for value in range(len(where.values)):
            inputs[:, where.columns] = 0
            inputs[:, where.first + value] = 1
            logs = module(inputs.to(device)).double().log_softmax(1).cpu()
            found[part, value] = logs.gather(1, labels)[:, 0].numpy()
    return found


def write_knowledge(known: Sequence[AttributeKnowledge], path: Path) -> None:
    """Write a table with one row for each attribute, example and value (0600)."""
    parts = []
    for one in known:
        n, k = one.likelihood.shape
        parts.append(
            pd.DataFrame(
                {
                    "attribute": one.name,
                    "member": np.repeat(one.member, k),
                    "example_id": np.repeat(one.example_ids, k),
                    "value": np.tile(np.array(one.values, dtype=object), n),
                    "true": (one.truth[:, None] == np.arange(k)).ravel(),
                    **{name: getattr(one, name).ravel() for name in LOGS},
                }
            )
        )
    write_private_parquet(pd.concat(parts, ignore_index=True), path)
