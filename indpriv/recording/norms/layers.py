"""The layers of a model whose gradients are computed together, and what a batch uses of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from torch import Tensor, nn

from indpriv.recording.norms.layer_squares import gradient_of, is_known, sum_squares

# These work on the last dimensions, whatever comes before.
_ANY_LEADING = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)

_Use = tuple[nn.Module, Tensor, Tensor]  # a layer, its inputs and the gradient of its output
_SHARED_ELEMENTS = 2**24  # of gradients held at once for a parameter that is used several times

Key = tuple[int, int]
"""A parameter, or a block of its rows: identity of the parameter, and start of the block."""


def layers_of(model: nn.Module) -> list[Layer]:
    """The topmost modules with trainable parameters of their own."""
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    return [Layer(module, trainable) for module in _topmost(model, trainable)]


class Layer:
    """A module whose trainable parameters, with those of all modules inside, belong together.

    Attributes:
        module: the module.
        formula: the layer whose formulas hold for it: the module, or a Linear of the same shape.
        known: whether `layer_squares` knows that.
        keys: its trainable parameters by name.
    """

    def __init__(self, module: nn.Module, trainable: set[int]) -> None:
        self.module, self.formula = module, _linear(module)
        self.known = is_known(self.formula)
        self._trained = [p for p in module.parameters() if id(p) in trainable]
        self.keys = {
            name: (id(p), 0) for name, p in module.named_parameters() if id(p) in trainable
        }
        self._batch_dimensions = {0, 1} if isinstance(self.formula, _ANY_LEADING) else {0}
        self._shared_rows = False
        features = {nn.Linear: 1, nn.Embedding: 0}
        self._features = features.get(type(self.formula), self._trained[0].ndim)

    def check_batch(self, size: int, *values: Tensor) -> None:
        """Raise RuntimeError unless the first dimension of all values is the batch."""
        if any(value.shape[0] != size for value in values):
            raise self._no_batch()

    def _no_batch(self) -> RuntimeError:
        return RuntimeError(
            f"the first dimension of {type(self.module).__name__}'s input is not the batch"
        )

    def batch_dimension(self, inputs: Tensor, gradient: Tensor, size: int) -> int:
        """The dimension whose length was the batch size in all calls so far."""
        possible = {
            d
            for d in self._batch_dimensions
            if (d == 0 or d < inputs.ndim - self._features)
            and inputs.shape[d] == size
            and gradient.shape[d] == size
        }
        if not possible:
            raise self._no_batch()
        self._batch_dimensions = possible
        return min(possible)

    def looks_up_for_all(self, inputs: Tensor, size: int) -> bool:
        """Whether an Embedding looks up the same rows for all examples: positions (1, length).

        Once found, this holds for all calls, also where the length happens to be the batch size.
        """
        if type(self.module) is not nn.Embedding or inputs.ndim > 2:
            return False
        one_row = inputs.ndim == 1 or (inputs.shape[0] == 1 and size > 1)
        if one_row and size not in inputs.shape:
            self._shared_rows, self._batch_dimensions = True, {0}
        return one_row and self._shared_rows

    def key_of_block(self, block: Tensor) -> Key | None:
        """The trainable parameter that a block of rows belongs to, or None if it is frozen."""
        for p in self._trained:
            start = block.data_ptr() - p.data_ptr()
            if 0 <= start < p.numel() * p.element_size():
                return id(p), start
        return None


def _linear(module: nn.Module) -> nn.Module:
    """A Linear for a layer that is one by another name; else the module.

    GPT-2's Conv1D has its weight transposed: norms are the same. A weight that a Linear used as
    well would have two orders, which the check of every backend by autograd would find.
    """
    weight: Any = getattr(module, "weight", None)
    if type(module) is RNNLinear:
        return nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    if f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D":
        return nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    return module


def _topmost(
    module: nn.Module, trainable: set[int], seen: set[int] | None = None
) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    # An attention itself uses the parameters of the modules inside it.
    recurse = isinstance(module, nn.MultiheadAttention)
    own = [] if isinstance(module, DPRNNBase) else module.parameters(recurse=recurse)
    if any(id(p) in trainable for p in own):  # an RNN of Opacus lists those of its cells as its own
        yield module
        return
    for child in module.children():
        yield from _topmost(child, trainable, seen)


class Uses:
    """How often a batch uses each parameter; those used several times, until all uses are known.

    Attributes:
        count: number of uses in the forward pass.
        gradients: of parameters used several times: what gives the gradients of some examples in
            one use.
    """

    def __init__(self) -> None:
        self.count: Counter[Key] = Counter()
        self.gradients: defaultdict[Key, list[Callable[[slice], Tensor]]] = defaultdict(list)
        self._linear: defaultdict[tuple[tuple[str, Key], ...], list[_Use]] = defaultdict(list)

    def clear(self) -> None:
        """Begin another batch."""
        self.count.clear()
        self.gradients.clear()
        self._linear.clear()

    def is_one(self, keys: Mapping[str, Key]) -> bool:
        """Whether each of these parameters is used once."""
        return all(self.count[key] == 1 for key in keys.values())

    def keep(
        self, module: nn.Module, keys: Mapping[str, Key], inputs: Tensor, gradient: Tensor
    ) -> None:
        """Keep one of several uses; the batch comes first in both tensors."""
        use = module, inputs, gradient
        if type(module) is nn.Linear:
            self._linear[tuple(keys.items())].append(use)
        else:
            self._keep_gradients(use, keys)

    def of_linear(self) -> Iterator[tuple[nn.Module, dict[str, Key], Tensor, Tensor]]:
        """Linear layers with all uses of their parameters, as positions of one use.

        What other layers use as well goes to `gradients`.
        """
        for items, uses in self._linear.items():
            keys = dict(items)
            if all(self.count[key] == len(uses) for key in keys.values()):
                yield uses[0][0], keys, _all_positions(uses, 1), _all_positions(uses, 2)
            else:
                for use in uses:
                    self._keep_gradients(use, keys)

    def _keep_gradients(self, use: _Use, keys: Mapping[str, Key]) -> None:
        for name, key in keys.items():
            self.gradients[key].append(partial(_gradient_of_some, name, use))


def _all_positions(uses: Sequence[_Use], side: Literal[1, 2]) -> Tensor:
    """(batch, positions of all uses, features) of the inputs or of the gradients."""
    values = [use[side] for use in uses]
    return torch.cat([each.reshape(len(each), -1, each.shape[-1]) for each in values], 1)


def _gradient_of_some(name: str, use: _Use, part: slice) -> Tensor:
    module, inputs, gradient = use
    return gradient_of(module, name, inputs[part], gradient[part])


def squares_of_sum(gradients: list[Callable[[slice], Tensor]], size: int) -> Tensor:
    """(size,) squared norms of the sum of a parameter's gradients, computed in parts."""
    one = gradients[0](slice(0, 1)).numel()
    step = max(1, _SHARED_ELEMENTS // one)
    parts = [slice(start, start + step) for start in range(0, size, step)]
    return torch.cat(
        [
            sum_squares(sum(gradient(part) for gradient in gradients[1:]) + gradients[0](part))
            for part in parts
        ]
    )
