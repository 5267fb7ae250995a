"""Per-example gradient norms layer by layer, without weight gradients. Sensitive.

One backward pass gives the inputs and output gradients of each layer, from which its squared norm
is computed exactly (`layer_squares`). Layers of other kinds, with all modules inside them, are
differentiated example by example with torch.func. The gradients of a parameter that is used several
times are added up before they are squared; uses of a Linear are positions of one use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from indpriv.recording.norms import group_norms
from indpriv.recording.norms.attention import observed_projections
from indpriv.recording.norms.batches import Batch, LossFn, call, check_losses
from indpriv.recording.norms.layer_choice import Choose
from indpriv.recording.norms.layer_squares import CONVOLUTIONS, sum_squares
from indpriv.recording.norms.layers import Key, Layer, Uses, layers_of, squares_of_sum
from indpriv.recording.norms.shadow_model import HALF, EachTensor, autocast_now


class LayerwiseNorms:
    """Gradient norms of batches on one shadow model, which no other thread may use.

    Its parameters no longer require gradients: the backward pass starts at the first layer that has
    trainable ones.
    """

    def __init__(
        self, shadow: nn.Module, loss_fn: LossFn, choose: Choose, each: EachTensor | None = None
    ) -> None:
        """Attach to a shadow model; `choose` chooses among the variants of a layer.

        each: clipping norms of tensors of parameters, as they are at a call.
        """
        self._shadow, self._loss_fn, self._choose = shadow, loss_fn, choose
        self._each = each or EachTensor()
        self._trained = [id(p) for p in shadow.parameters() if p.requires_grad]
        self._of_parameter: dict[int, Tensor] = {}  # squared norms, where each has a limit
        layers = layers_of(shadow)
        for p in shadow.parameters():
            p.requires_grad_(False)
        for layer in layers:
            if isinstance(layer.module, nn.MultiheadAttention):
                _replace_forward(layer, self._attention)
            elif layer.known and isinstance(layer.module, group_norms.LAYERS):
                _replace_forward(layer, self._group_norm)
            else:
                hook = partial(self._after_forward, layer)
                layer.module.register_forward_hook(hook, with_kwargs=True)
        self._uses = Uses()
        self._squares: Tensor | None = None
        self._size = 0
        self._recomputing = False

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch; under autocast, the forward pass alone runs so."""
        self._uses.clear()
        self._of_parameter.clear()
        self._squares, self._size, self._recomputing = None, len(batch), False
        losses = check_losses(
            self._loss_fn(call(self._shadow, batch.inputs), batch.targets), batch.targets
        )
        self._squares = torch.zeros(self._size, dtype=torch.float64, device=losses.device)
        with torch.autocast(losses.device.type, enabled=False):
            if self._uses.count:
                losses.sum().backward()
            for module, keys, inputs, gradient in self._uses.of_linear():
                self._add_squares(module, keys, inputs, gradient)
            for key, gradients in self._uses.gradients.items():
                self._add(squares_of_sum(gradients, self._size), key)
        for parameter, limit in zip(self._trained, self._each.limits, strict=False):
            if parameter in self._of_parameter:
                self._squares += self._of_parameter[parameter].clamp(max=limit**2)
        self._uses.clear()
        return self._squares.sqrt(), losses.detach()

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
        if layer.known:
            return self._on_gradient(
                layer.keys, args, output, partial(self._add_known, layer, inputs[0])
            )
        precision = autocast_now(output.device.type)

        def add(gradient: Tensor) -> None:
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

        return self._on_gradient(layer.keys, args, output, add)

    def _on_gradient(
        self,
        keys: dict[str, Key],
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

    def _together(self, keys: dict[str, Key]) -> list[list[str]]:
        """The parameters of a layer whose squared norms may be computed as one sum."""
        return [[name] for name in keys] if self._each.limits else [list(keys)]

    def _add(self, squares: Tensor, key: Key) -> None:
        """Add squared norms of the parameter of this key; without limits, of any parameters."""
        if self._squares is None:
            raise RuntimeError("a backward pass ran before the forward pass was complete")
        if self._each.limits:
            self._of_parameter[key[0]] = squares + self._of_parameter.get(key[0], 0.0)
        else:
            self._squares += squares

    def _add_known(self, layer: Layer, inputs: Tensor, gradient: Tensor) -> None:
        first = layer.batch_dimension(inputs, gradient, self._size)
        sides = inputs.transpose(0, first), gradient.transpose(0, first)
        self._add_batch_first(layer.formula, layer.keys, *sides)

    def _add_batch_first(
        self, module: nn.Module, keys: dict[str, Key], inputs: Tensor, gradient: Tensor
    ) -> None:
        """Add squared norms of a layer whose first dimension is the batch."""
        inputs, gradient = _widened(module, inputs, gradient)
        add = self._add_squares if self._uses.is_one(keys) else self._uses.keep
        add(module, keys, inputs, gradient)

    def _add_squares(self, module: nn.Module, keys: dict[str, Key], *sides: Tensor) -> None:
        for together in self._together(keys):
            names = frozenset(together)
            squares = self._choose(module, names, *sides)
            self._add(squares(module, names, *sides), keys[together[0]])

    def _group_norm(
        self, layer: Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Take per-example gradients from PyTorch's own backward pass if it can provide them."""
        if len(args) != 1 or not group_norms.fits(layer.module, args[0]):
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
        return group_norms.group_norm(layer.module, args[0], add)

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
        with observed_projections(partial(self._projected, layer)):
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
            self._add_batch_first(shape, keys, *sides)

        return self._on_gradient(keys, (inputs,), output, add)


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
    parameters = dict(module.named_parameters())
    trained = {name: parameters.pop(name) for name in names}
    fixed = {**parameters, **dict(module.named_buffers())}

    def gradients_of(example: tuple[Tensor, ...], output_gradient: Tensor) -> Any:
        def forward(values: dict[str, Tensor]) -> Tensor:
            batch = tuple(value.unsqueeze(0) for value in example)
            output: Tensor = functional_call(module, (values, fixed), batch, kwargs)
            return output

        pull = vjp(forward, trained)[1]
        return pull(output_gradient.unsqueeze(0))[0]

    with torch.enable_grad():
        per_example = vmap(gradients_of)(inputs, gradient)
    squares = torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
    for values in per_example.values():
        squares += sum_squares(values.float() if values.dtype in HALF else values)
    return squares
