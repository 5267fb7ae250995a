"""Per-example gradient norms layer by layer, without weight gradients. Sensitive.

One backward pass gives the inputs and output gradients of each layer, from which its rule computes
its squared norm exactly (`layer_rules`). Layers without a rule, with all modules inside them, are
differentiated example by example with torch.func. The gradients of a parameter that is used several
times are added up before they are squared; uses of a Linear are positions of one use.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from indpriv.recording.norms.batches import Batch, map_tensors
from indpriv.recording.norms.layer_rules import (
    CONVOLUTIONS,
    GROUP_NORMS,
    gradient_of,
    group_norm,
    group_norm_fits,
    has_rule,
    rule_of,
    sum_squares,
)
from indpriv.recording.norms.shadow_model import (
    HALF,
    ModelInTraining,
    autocast_now,
    to_channels_last,
)

# These work on the last dimensions, whatever comes before.
_ANY_LEADING = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
_SHARED_ELEMENTS = 2**24  # of gradients held at once for a parameter that is used several times
_LINEAR = threading.RLock()  # held while the global `linear` is another function

Key = tuple[int, int]
"""A parameter, or a block of its rows: identity of the parameter, and start of the block."""


class LayerwiseNorms:
    """Gradient norms of batches, on a shadow model of its own.

    Its parameters do not require gradients: the backward pass starts at the first layer that has
    trainable ones.
    """

    def __init__(self, model: ModelInTraining, *, channels_last: bool = False) -> None:
        """Attach to a shadow model; channels_last is the order of images and kernels in memory."""
        self._model, self._shadow, self._channels_last = model, model.shadow(), channels_last
        self._trained = [id(p) for p in self._shadow.parameters() if p.requires_grad]
        trained = set(self._trained)
        layers = [Layer(each, trained) for each in _topmost(self._shadow, trained)]
        self._shadow.requires_grad_(False)
        for layer in layers:
            if isinstance(layer.module, nn.MultiheadAttention):
                _replace_forward(layer, self._attention)
            elif layer.has_rule and isinstance(layer.module, GROUP_NORMS):
                _replace_forward(layer, self._group_norm)
            else:
                hook = partial(self._after_forward, layer)
                layer.module.register_forward_hook(hook, with_kwargs=True)
        self._uses = Uses()
        self._squares: dict[int, Tensor] | None = None  # of each parameter, in a backward pass
        self._size = 0
        self._recomputing = False

    def update(self) -> None:
        """Take the model's current parameters."""
        self._model.update(self._shadow, channels_last=self._channels_last)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch; under autocast, the forward pass alone runs so."""
        if self._channels_last:
            batch = Batch(map_tensors(batch.inputs, to_channels_last), batch.targets)
        self._uses = Uses()
        self._squares, self._size, self._recomputing = None, len(batch), False
        with torch.enable_grad():
            losses = self._model.losses(self._shadow, batch)
            self._squares = {}
            with torch.autocast(losses.device.type, enabled=False):
                if self._uses.count:
                    losses.sum().backward()
                for use in self._uses.of_linear():
                    self._add_squares(*use)
                for key, gradients in self._uses.gradients.items():
                    self._add(_squares_of_sum(gradients, self._size), key)
        total = torch.zeros(self._size, dtype=torch.float64, device=losses.device)
        limits = dict(zip(self._trained, self._model.limits, strict=False))
        for parameter, squares in self._squares.items():
            total += squares.clamp(max=limits.get(parameter, math.inf) ** 2)
        self._uses = Uses()
        return total.sqrt(), losses.detach()

    def _add(self, squares: Tensor, key: Key) -> None:
        """Add squared norms of the parameter of this key; without limits, of others with it."""
        if self._squares is None:
            raise RuntimeError("a backward pass ran before the forward pass was complete")
        self._squares[key[0]] = squares + self._squares.get(key[0], 0.0)

    def _together(self, keys: Mapping[str, Key]) -> list[list[str]]:
        """The parameters of a layer whose squared norms may be computed as one sum."""
        return [[name] for name in keys] if self._model.limits else [list(keys)]

    def _add_squares(
        self, module: nn.Module, keys: Mapping[str, Key], inputs: Tensor, gradient: Tensor
    ) -> None:
        for names in self._together(keys):
            squares = rule_of(module, inputs, gradient)
            self._add(squares(module, frozenset(names), inputs, gradient), keys[names[0]])

    def _after_forward(
        self,
        layer: Layer,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if self._recomputing:
            return output
        if not isinstance(output, Tensor) or not args or not isinstance(args[0], Tensor):
            raise NotImplementedError(f"{type(module).__name__} does not map a tensor to a tensor")
        if layer.looks_up_for_all(args[0], self._size):  # each example gets a copy of its own
            args = (args[0].expand(self._size, *args[0].shape[-1:]), *args[1:])
            output = output.expand(self._size, *output.shape[-2:]).contiguous()
        inputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in args)

        def by_rule(gradient: Tensor) -> None:
            first = layer.batch_dimension(inputs[0], gradient, self._size)
            sides = inputs[0].transpose(0, first), gradient.transpose(0, first)
            self._add_use(layer.formula, layer.keys, *sides)

        if layer.has_rule:
            return self._on_gradient(layer.keys, args, output, by_rule)
        precision = autocast_now(output.device.type)

        def by_torch_func(gradient: Tensor) -> None:
            layer.check_batch(self._size, inputs[0], gradient)
            if not self._uses.is_one(layer.keys):
                raise NotImplementedError(
                    f"{type(module).__name__} shares a parameter or is used several times"
                )
            self._recomputing = True
            with precision():
                for names in self._together(layer.keys):
                    squares = _by_torch_func(module, names, inputs, kwargs, gradient)
                    self._add(squares, layer.keys[names[0]])
            self._recomputing = False

        return self._on_gradient(layer.keys, args, output, by_torch_func)

    def _on_gradient(
        self,
        keys: Mapping[str, Key],
        args: tuple[Any, ...],
        output: Tensor,
        add: Callable[[Tensor], None],
    ) -> Tensor:
        """Call `add` with the gradient of a layer's output in the backward pass."""
        self._uses.count.update(keys.values())
        if not output.requires_grad:  # the first layer with trainable parameters starts the graph
            output = _Start.apply(output.detach(), torch.zeros((), requires_grad=True))
        versions = [(value, value._version) for value in args if isinstance(value, Tensor)]

        def after_backward(gradient: Tensor) -> None:
            if any(value._version != version for value, version in versions):
                raise RuntimeError(
                    "the input of a layer was changed in place after its forward pass"
                )
            add(gradient)

        output.register_hook(after_backward)
        return output

    def _add_use(
        self, module: nn.Module, keys: Mapping[str, Key], inputs: Tensor, gradient: Tensor
    ) -> None:
        """Add squared norms of a layer whose first dimension is the batch."""
        inputs, gradient = _widened(module, inputs, gradient)
        add = self._add_squares if self._uses.is_one(keys) else self._uses.keep
        add(module, keys, inputs, gradient)

    def _group_norm(
        self, layer: Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Take per-example gradients from PyTorch's own backward pass if it can provide them."""
        if len(args) != 1 or not group_norm_fits(layer.module, args[0]):
            return self._after_forward(layer, layer.module, args, kwargs, forward(*args, **kwargs))

        def add(weights: Tensor, biases: Tensor) -> None:
            layer.check_batch(self._size, weights)
            for name, key in layer.keys.items():
                gradients = weights if name == "weight" else biases
                if self._uses.count[key] > 1:
                    self._uses.gradients[key].append(gradients.__getitem__)
                else:
                    self._add(sum_squares(gradients), key)

        self._uses.count.update(layer.keys.values())
        return group_norm(layer.module, args[0], add)

    def _attention(
        self, layer: Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """nn.MultiheadAttention uses its parameters in calls of `linear`."""
        if self._recomputing:
            return forward(*args, **kwargs)
        if layer.module.bias_k is not None:
            raise NotImplementedError(
                "MultiheadAttention with add_bias_kv has parameters outside its projections"
            )
        with _observed_projections(partial(self._projected, layer)):
            return forward(*args, **kwargs)

    def _projected(
        self, layer: Layer, output: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """One projection; its first dimensions are positions, then the batch, or both folded."""
        blocks = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        found = {name: layer.key_of_block(block) for name, block in blocks.items()}
        keys = {name: key for name, key in found.items() if key is not None}
        if not keys:
            return output
        shape = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        taken = inputs.detach()

        def add(gradient: Tensor) -> None:
            sides = (
                side.reshape(-1, self._size, side.shape[-1]).transpose(0, 1)
                for side in (taken, gradient)
            )
            self._add_use(shape, keys, *sides)

        return self._on_gradient(keys, (inputs,), output, add)


class Layer:
    """A module whose trainable parameters, with those of all modules inside, belong together.

    Attributes:
        module: the module.
        formula: the layer whose rule holds for it: the module, or a Linear of the same shape.
        has_rule: whether `layer_rules` has one.
        keys: its trainable parameters by name.
    """

    def __init__(self, module: nn.Module, trainable: set[int]) -> None:
        self.module, self.formula = module, _linear(module)
        self.has_rule = has_rule(self.formula)
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
    well would have two orders, which the check by autograd would find.
    """
    weight: Any = getattr(module, "weight", None)
    if type(module) is RNNLinear:
        return nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    if f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D":
        return nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    return module


def _topmost(module: nn.Module, trainable: set[int]) -> dict[nn.Module, None]:
    """The topmost modules with trainable parameters of their own, in order."""
    # An attention itself uses the parameters of the modules inside it.
    recurse = isinstance(module, nn.MultiheadAttention)
    # An RNN of Opacus lists those of its cells as its own.
    own = [] if isinstance(module, DPRNNBase) else module.parameters(recurse=recurse)
    if any(id(p) in trainable for p in own):
        return {module: None}
    return {each: None for child in module.children() for each in _topmost(child, trainable)}


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
        self._linear: defaultdict[tuple[tuple[str, Key], ...], list[Any]] = defaultdict(list)

    def is_one(self, keys: Mapping[str, Key]) -> bool:
        """Whether each of these parameters is used once."""
        return all(self.count[key] == 1 for key in keys.values())

    def keep(
        self, module: nn.Module, keys: Mapping[str, Key], inputs: Tensor, gradient: Tensor
    ) -> None:
        """Keep one of several uses; the batch comes first in both tensors."""
        if type(module) is nn.Linear:
            self._linear[tuple(keys.items())].append((module, inputs, gradient))
        else:
            self._keep_gradients(keys, module, inputs, gradient)

    def of_linear(self) -> Iterator[tuple[nn.Module, Mapping[str, Key], Tensor, Tensor]]:
        """Linear layers with all uses of their parameters, as positions of one use.

        What other layers use as well goes to `gradients`.
        """
        for items, uses in self._linear.items():
            keys = dict(items)
            if all(self.count[key] == len(uses) for key in keys.values()):
                modules, *sides = zip(*uses, strict=True)
                inputs, gradients = (
                    torch.cat([each.reshape(len(each), -1, each.shape[-1]) for each in side], 1)
                    for side in sides
                )
                yield modules[0], keys, inputs, gradients
            else:
                for use in uses:
                    self._keep_gradients(keys, *use)

    def _keep_gradients(
        self, keys: Mapping[str, Key], module: nn.Module, inputs: Tensor, gradient: Tensor
    ) -> None:
        def of_some(name: str, part: slice) -> Tensor:
            return gradient_of(module, name, inputs[part], gradient[part])

        for name, key in keys.items():
            self.gradients[key].append(partial(of_some, name))


def _squares_of_sum(gradients: list[Callable[[slice], Tensor]], size: int) -> Tensor:
    """(size,) squared norms of the sum of a parameter's gradients, computed in parts."""
    step = max(1, _SHARED_ELEMENTS // gradients[0](slice(0, 1)).numel())
    parts = [slice(start, start + step) for start in range(0, size, step)]
    sums = (sum(gradient(part) for gradient in gradients) for part in parts)
    return torch.cat([sum_squares(torch.as_tensor(each)) for each in sums])


def _widened(module: nn.Module, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one precision of at least 32 bits, after rounding as training does."""
    if gradient.dtype in HALF:
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            inputs = inputs.to(gradient.dtype)  # as autocast does
        gradient = gradient.float()
    if inputs.dtype in HALF or (inputs.is_floating_point() and inputs.dtype != gradient.dtype):
        inputs = inputs.to(gradient.dtype)
    return inputs, gradient


def _replace_forward(layer: Layer, forward: Callable[..., Any]) -> None:
    layer.module.__dict__["forward"] = partial(forward, layer, layer.module.forward)


class _Start(torch.autograd.Function):
    """Make an output require gradients in its own memory, but not as a leaf.

    The next layer may then work on it in place.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, _: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def _observed_projections(on_projection: Callable[..., Tensor]) -> Iterator[None]:
    """Pass the output and the arguments of every `linear` in this thread through a function.

    nn.MultiheadAttention calls the global `linear`, which hooks do not see. PyTorch's fast path,
    which computes a whole attention in one call, is off meanwhile.
    """
    with _LINEAR:
        linear, fast = nn.functional.linear, torch.backends.mha.get_fastpath_enabled()
        mine = threading.get_ident()

        def observed(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            output = linear(input, weight, bias)
            is_mine = threading.get_ident() == mine
            return on_projection(output, input, weight, bias) if is_mine else output

        nn.functional.linear = observed
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            nn.functional.linear = linear
            torch.backends.mha.set_fastpath_enabled(fast)


def _by_torch_func(
    module: nn.Module,
    names: list[str],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradient: Tensor,
) -> Tensor:
    """(batch,) squared norms of any other layer, recomputed one example at a time under vmap."""
    if any(isinstance(value, Tensor) for value in kwargs.values()) or not all(
        isinstance(x, Tensor) for x in inputs
    ):
        raise NotImplementedError(f"{type(module).__name__} takes more than tensors of the batch")
    fixed: dict[str, Tensor] = dict(module.named_parameters())
    trained = {name: fixed.pop(name) for name in names}
    fixed |= dict(module.named_buffers())

    def gradients_of(example: tuple[Tensor, ...], output_gradient: Tensor) -> Any:
        def forward(values: dict[str, Tensor]) -> Tensor:
            batch = tuple(value.unsqueeze(0) for value in example)
            output: Tensor = functional_call(module, (values, fixed), batch, kwargs)
            return output

        return vjp(forward, trained)[1](output_gradient.unsqueeze(0))[0]

    with torch.enable_grad():
        per_example = vmap(gradients_of)(inputs, gradient)
    squares = torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
    for values in per_example.values():
        squares += sum_squares(values.float() if values.dtype in HALF else values)
    return squares
