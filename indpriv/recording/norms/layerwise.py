"""Per-example gradient norms layer by layer, without weight gradients. Sensitive.

One backward pass gives the inputs and output gradients of each layer, from which its rule computes
its squared norm exactly (`layer_rules`). Layers without a rule, with all modules inside them, are
differentiated example by example with torch.func. The gradients of a parameter that is used several
times are added up before they are squared; uses of a Linear are positions of one use.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from indpriv.recording.norms import layer_rules, shadow_model
from indpriv.recording.norms.batches import Batch, map_tensors
from indpriv.recording.norms.layer_rules import CONVOLUTIONS, sum_squares

# These work on the last dimensions, whatever comes before.
_ANY_LEADING = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
_SHARED_ELEMENTS = 2**24  # of gradients held at once for a parameter that is used several times
Keys = Mapping[str, int]
"""Trainable parameters of a layer: name -> identity of the parameter."""


class LayerwiseNorms:
    """Gradient norms of batches, on a shadow model of its own.

    Its parameters do not require gradients: the backward pass starts at the first layer that has
    trainable ones.
    """

    def __init__(self, model: shadow_model.ModelInTraining, *, channels_last: bool = False) -> None:
        """Attach to a shadow model; channels_last is the order of images and kernels in memory."""
        self._model, self._shadow, self._channels_last = model, model.shadow(), channels_last
        self._trained = [id(p) for p in self._shadow.parameters() if p.requires_grad]
        layers = [Layer(each, {*self._trained}) for each in _topmost(self._shadow)]
        self._shadow.requires_grad_(False)
        for layer in layers:
            hook = partial(self._after_forward, layer)
            layer.module.register_forward_hook(hook, with_kwargs=True)
        self._forget()

    def _forget(self) -> None:
        """Forget the batch: how often it used each parameter, and what is kept until that is known.

        For a parameter that is used several times: of Linear layers inputs and gradients of each
        use, of others what gives the gradients of some examples in one use.
        """
        self._uses: Counter[int] = Counter()
        self._linear: defaultdict[tuple[tuple[str, int], ...], list[Any]] = defaultdict(list)
        self._several: defaultdict[int, list[Callable[[slice], Tensor]]] = defaultdict(list)
        self._squares: dict[int, Tensor] | None = None  # of each parameter, in a backward pass
        self._size, self._recomputing = 0, False

    def update(self) -> None:
        """Take the model's current parameters."""
        self._model.update(self._shadow, channels_last=self._channels_last)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch; under autocast, the forward pass alone runs so."""
        if self._channels_last:
            batch = Batch(map_tensors(batch.inputs, shadow_model.to_channels_last), batch.targets)
        self._forget()
        self._size = len(batch)
        with torch.enable_grad():
            losses = self._model.losses(self._shadow, batch)
            self._squares = {}
            with torch.autocast(losses.device.type, enabled=False):
                if self._uses:
                    losses.sum().backward()
                self._add_several()
        total = torch.zeros(self._size, dtype=torch.float64, device=losses.device)
        limits = dict(zip(self._trained, self._model.limits, strict=False))
        for parameter, squares in self._squares.items():
            total += squares.clamp(max=limits.get(parameter, math.inf) ** 2)
        self._forget()
        return total.sqrt(), losses.detach()

    def _add(self, squares: Tensor, key: int) -> None:
        """Add squared norms of the parameter of this key; without limits, of others with it."""
        if self._squares is None:
            raise RuntimeError("a backward pass ran before the forward pass was complete")
        self._squares[key] = squares + self._squares.get(key, 0.0)

    def _together(self, keys: Keys) -> list[list[str]]:
        """The parameters of a layer whose squared norms may be computed as one sum."""
        return [[name] for name in keys] if self._model.limits else [list(keys)]

    def _add_squares(self, module: nn.Module, keys: Keys, inputs: Tensor, gradient: Tensor) -> None:
        for names in self._together(keys):
            given = module, frozenset(names), inputs, gradient
            self._add(layer_rules.rule_of(*given)(*given), keys[names[0]])

    def _once(self, keys: Keys) -> bool:
        """Whether each of these parameters is used once."""
        return all(self._uses[key] == 1 for key in keys.values())

    def _after_forward(self, layer: "Layer", _: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Have the squares of a layer added when the backward pass gives its output's gradient."""
        module = layer.module
        if self._recomputing:
            return output
        if not isinstance(output, Tensor) or not args or not isinstance(args[0], Tensor):
            raise NotImplementedError(f"{type(module).__name__} does not map a tensor to a tensor")
        inputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in args)
        self._uses.update(layer.keys.values())
        if not output.requires_grad:  # the first layer with trainable parameters starts the graph
            output = _Start.apply(output.detach(), torch.zeros((), requires_grad=True))
        versions = [(value, value._version) for value in args if isinstance(value, Tensor)]
        precision = shadow_model.autocast_now(output.device.type)

        def after_backward(gradient: Tensor) -> None:
            if any(value._version != version for value, version in versions):
                raise RuntimeError(
                    "the input of a layer was changed in place after its forward pass"
                )
            if layer.has_rule:
                self._by_rule(layer, inputs[0], gradient)
                return
            layer.check_batch(self._size, inputs[0], gradient)
            if not self._once(layer.keys):
                raise NotImplementedError(
                    f"{type(module).__name__} shares a parameter or is used several times"
                )
            self._recomputing = True
            with precision():
                for names in self._together(layer.keys):
                    squares = _by_torch_func(module, names, inputs, kwargs, gradient)
                    self._add(squares, layer.keys[names[0]])
            self._recomputing = False

        output.register_hook(after_backward)
        return output

    def _by_rule(self, layer: "Layer", inputs: Tensor, gradient: Tensor) -> None:
        """Add squared norms of a layer's only use, or keep one of several uses."""
        module, keys = layer.formula, layer.keys
        first = layer.batch_dimension(inputs, gradient, self._size)
        sides = _widened(module, inputs.transpose(0, first), gradient.transpose(0, first))
        if self._once(keys):
            self._add_squares(module, keys, *sides)
        elif type(module) is nn.Linear:
            self._linear[tuple(keys.items())].append((module, *sides))
        else:
            self._keep_gradients(keys, module, *sides)

    def _keep_gradients(
        self, keys: Keys, module: nn.Module, inputs: Tensor, gradient: Tensor
    ) -> None:
        def of_some(name: str, part: slice) -> Tensor:
            return layer_rules.gradient_of(module, name, inputs[part], gradient[part])

        for name, key in keys.items():
            self._several[key].append(partial(of_some, name))

    def _add_several(self) -> None:
        """Add squared norms of the parameters that were used several times."""
        for items, uses in self._linear.items():
            keys = dict(items)
            if all(self._uses[key] == len(uses) for key in keys.values()):
                modules, *sides = zip(*uses, strict=True)
                inputs, gradients = (
                    torch.cat([each.reshape(len(each), -1, each.shape[-1]) for each in side], 1)
                    for side in sides
                )
                self._add_squares(modules[0], keys, inputs, gradients)
            else:  # other layers use them as well
                for use in uses:
                    self._keep_gradients(keys, *use)
        for key, gradients_of in self._several.items():
            step = max(1, _SHARED_ELEMENTS // gradients_of[0](slice(0, 1)).numel())
            parts = [slice(start, start + step) for start in range(0, self._size, step)]
            sums = (sum(gradient(part) for gradient in gradients_of) for part in parts)
            self._add(torch.cat([sum_squares(torch.as_tensor(each)) for each in sums]), key)


class Layer:
    """A module whose trainable parameters, with those of all modules inside, belong together."""

    def __init__(self, module: nn.Module, trainable: set[int]) -> None:
        # The layer whose rule holds for it: the module, or a Linear of the same shape.
        self.module, self.formula = module, _linear(module)
        self.has_rule = layer_rules.has_rule(self.formula)
        trained = {name: p for name, p in module.named_parameters() if id(p) in trainable}
        self.keys = {name: id(p) for name, p in trained.items()}
        self._batch_dimensions = {0, 1} if isinstance(self.formula, _ANY_LEADING) else {0}
        features = {nn.Linear: 1, nn.Embedding: 0}
        self._features = features.get(type(self.formula), next(iter(trained.values())).ndim)

    def check_batch(self, size: int, *values: Tensor) -> None:
        """Raise RuntimeError unless the first dimension of all values is the batch."""
        self._expect(all(value.shape[0] == size for value in values))

    def _expect(self, is_batch: bool) -> None:
        if not is_batch:
            raise RuntimeError(
                f"the first dimension of {type(self.module).__name__}'s input is not the batch"
            )

    def batch_dimension(self, inputs: Tensor, gradient: Tensor, size: int) -> int:
        """The dimension whose length was the batch size in all calls so far."""
        possible = {
            d
            for d in self._batch_dimensions
            if (d == 0 or d < inputs.ndim - self._features)
            and inputs.shape[d] == size == gradient.shape[d]
        }
        self._expect(bool(possible))
        self._batch_dimensions = possible
        return min(possible)


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


def _topmost(module: nn.Module) -> dict[nn.Module, None]:
    """The topmost modules with trainable parameters of their own, in order."""
    # PyTorch's attention itself uses the parameters of the modules inside it.
    recurse = isinstance(module, nn.MultiheadAttention)
    # An RNN of Opacus lists those of its cells as its own.
    own = [] if isinstance(module, DPRNNBase) else module.parameters(recurse=recurse)
    if any(p.requires_grad for p in own):
        return {module: None}
    return {each: None for child in module.children() for each in _topmost(child)}


def _widened(module: nn.Module, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one precision of at least 32 bits, after rounding as training does."""
    if gradient.dtype in shadow_model.HALF:
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            inputs = inputs.to(gradient.dtype)  # as autocast does
        gradient = gradient.float()
    if inputs.dtype in shadow_model.HALF or (
        inputs.is_floating_point() and inputs.dtype != gradient.dtype
    ):
        inputs = inputs.to(gradient.dtype)
    return inputs, gradient


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


def _by_torch_func(
    module: nn.Module, names: list[str], inputs: Any, kwargs: Any, gradient: Tensor
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
        squares += sum_squares(values.float() if values.dtype in shadow_model.HALF else values)
    return squares
