"""The layers of a model whose gradients are computed together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from indpriv.recording.norms.layer_squares import is_known

# These work on the last dimensions, whatever comes before.
_ANY_LEADING = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)

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
        known: whether `layer_squares` knows it.
        keys: its trainable parameters by name.
    """

    def __init__(self, module: nn.Module, trainable: set[int]) -> None:
        self.module, self.known = module, is_known(module)
        self._trained = [p for p in module.parameters() if id(p) in trainable]
        self.keys = {
            name: (id(p), 0) for name, p in module.named_parameters() if id(p) in trainable
        }
        self._batch_dimensions = {0, 1} if isinstance(module, _ANY_LEADING) else {0}
        self._shared_rows = False
        self._features = {nn.Linear: 1, nn.Embedding: 0}.get(type(module), self._trained[0].ndim)

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


def _topmost(
    module: nn.Module, trainable: set[int], seen: set[int] | None = None
) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    # An attention itself uses the parameters of the modules inside it.
    recurse = isinstance(module, nn.MultiheadAttention)
    if any(id(p) in trainable for p in module.parameters(recurse=recurse)):
        yield module
        return
    for child in module.children():
        yield from _topmost(child, trainable, seen)
