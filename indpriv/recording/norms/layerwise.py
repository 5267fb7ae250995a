"""Per-example gradient norms layer by layer, without weight gradients. Sensitive.

One backward pass gives the inputs and output gradients of each layer, from which its rule computes
its squared norm exactly. Layers without a rule, with all modules inside them, are differentiated
example by example with torch.func. The gradients of a parameter that is used several times are
added up before they are squared; uses of a Linear are positions of one use.

A layer with input a and output gradient g at T positions has the per-example gradient
Σ_t g_t a_tᵀ. There are two exact ways to its squared norm (Goodfellow 2015; Li et al. 2022,
"ghost norms"); the one with fewer multiplications is taken:

    direct   ‖Σ_t g_t a_tᵀ‖²               T · d_in · d_out
    ghost    Σ_{t,u} (a_tᵀa_u)(g_tᵀg_u)    T² · (d_in + d_out)

In a convolution, a_t is the patch under the kernel at position t, and a_tᵀa_u is a sum of
products of pairs of pixels, one for each place in the kernel. Where that is less work, the products
of all pixels are computed once and added up.

Squares are summed in float32 over at most 1,024 terms and in float64 beyond. Inputs and gradients
have the batch first and are float32 or float64: callers widen half precision. Names of parameters
are weight and bias; squared norms are (batch,) float64.
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
from torch.nn import functional as F

from indpriv.recording.norms import shadow_model
from indpriv.recording.norms.batches import HALF, Batch, map_tensors

_CHUNK = 1024
_ADDED = 16  # multiplications take as long as adding two numbers in memory
_SHORT_PATCH = 64  # entries: up to here, patches are copied faster than examples are grouped
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
GROUP_NORMS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_WITH_RULE = {nn.Linear, nn.Embedding, *_NORMS, *CONVOLUTIONS, *GROUP_NORMS}
Squares = Callable[[Any, frozenset[str], Tensor, Tensor], Tensor]
"""(layer, names of its trainable parameters, inputs, gradient) -> squared norms of all together."""
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
        with torch.enable_grad(), shadow_model.without_checkpoints():
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
            self._add(rule_of(*given)(*given), keys[names[0]])

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
            # Not as a leaf: the next layer may work on it in place.
            output = output.detach() + torch.zeros((), requires_grad=True)
        versions = [(value, value._version) for value in args if isinstance(value, Tensor)]
        precision = shadow_model.autocast_now(output.device.type)

        def after_backward(gradient: Tensor) -> None:
            if any(value._version != version for value, version in versions):
                raise RuntimeError("a layer's input was changed in place after its forward pass")
            if layer.has_rule:
                self._by_rule(layer, inputs[0], gradient)
                return
            layer.expect(all(len(value) == self._size for value in (inputs[0], gradient)))
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
            return gradient_of(module, name, inputs[part], gradient[part])

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
        self.has_rule = has_rule(self.formula)
        trained = {name: p for name, p in module.named_parameters() if id(p) in trainable}
        self.keys = {name: id(p) for name, p in trained.items()}
        self._batch_dimensions = {0, 1} if isinstance(self.formula, _ANY_LEADING) else {0}
        features = {nn.Linear: 1, nn.Embedding: 0}
        self._features = features.get(type(self.formula), next(iter(trained.values())).ndim)

    def expect(self, is_batch: bool) -> None:
        """Raise RuntimeError unless the first dimension is the batch."""
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
        self.expect(bool(possible))
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
    if gradient.dtype in HALF:
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            inputs = inputs.to(gradient.dtype)  # as autocast does
        gradient = gradient.float()
    if inputs.dtype in HALF or (inputs.is_floating_point() and inputs.dtype != gradient.dtype):
        inputs = inputs.to(gradient.dtype)
    return inputs, gradient


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
        squares += sum_squares(values.float() if values.dtype in HALF else values)
    return squares


# --- the rule of a layer: squared norms of its per-example gradients


def has_rule(layer: nn.Module) -> bool:
    """Whether a layer has a rule here. A subclass has none: it may differ."""
    return type(layer) in _WITH_RULE and not getattr(layer, "track_running_stats", False)


def sum_squares(values: Tensor) -> Tensor:
    """(batch,) float64 sums of squares: float32 within a chunk of 1,024, float64 between chunks."""
    flat = values.reshape(len(values), -1)
    whole = flat.shape[1] - flat.shape[1] % _CHUNK
    rest: Tensor = torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square()
    if not whole:
        return rest
    chunks = torch.linalg.vector_norm(flat[:, :whole].reshape(len(flat), -1, _CHUNK), dim=2)
    return chunks.double().square().sum(1) + rest


def gradient_of(layer: nn.Module, name: str, inputs: Tensor, gradient: Tensor) -> Tensor:
    """(batch, *shape of the parameter): the per-example gradients of weight or bias themselves."""
    if name == "bias":
        return _bias_gradient(layer, gradient)
    if isinstance(layer, nn.Linear):
        return torch.bmm(_positions(gradient).transpose(1, 2), _positions(inputs))
    if isinstance(layer, nn.Embedding):
        size, rows = len(inputs), layer.num_embeddings
        table = gradient.new_zeros(size * rows, layer.embedding_dim)
        gradients = _without_padding(layer, inputs, gradient).flatten(0, 1)
        return table.index_add_(0, _table_rows(layer, inputs), gradients).view(size, rows, -1)
    if isinstance(layer, CONVOLUTIONS):
        return _conv_gradient(layer, inputs, gradient)
    return _normalised(layer, inputs, gradient)


def rule_of(layer: Any, names: frozenset[str], inputs: Tensor, gradient: Tensor) -> Squares:
    """The way with the fewest multiplications at these shapes; a bias alone has `_direct`."""
    if isinstance(layer, nn.Embedding):
        return _embedding
    if "weight" not in names or not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
        return _direct
    d_in, d_out = layer.weight[0].numel(), layer.weight.shape[0]
    if isinstance(layer, nn.Linear):
        positions = gradient[0].numel() // d_out
        if positions == 1:
            return _linear_single
        return _linear_ghost if positions * (d_in + d_out) < d_in * d_out else _direct
    positions, d_out = gradient[0, 0].numel(), d_out // layer.groups
    pairs, of_pixels = positions**2 * d_in, _work_on_pixels(layer, inputs, positions)
    if min(pairs, of_pixels) + positions**2 * d_out < positions * d_in * d_out:
        return _conv_pixels if of_pixels < pairs else _conv_ghost
    # GPUs multiply matrices of patches faster than they convolve with many groups.
    return _conv_patches if d_in <= _SHORT_PATCH or gradient.is_cuda else _direct


def _positions(values: Tensor) -> Tensor:
    """(batch, positions, features) of a layer that works on the last dimension."""
    return values.reshape(len(values), -1, values.shape[-1])


def _ghost(names: frozenset[str], inputs: Tensor, gradients: Tensor) -> Tensor:
    """Squares of weight and bias together, from (batch, positions, d) inputs and gradients."""
    of_inputs, of_gradients = (torch.bmm(x, x.transpose(1, 2)) for x in (inputs, gradients))
    return _of_pairs(names, of_inputs, of_gradients)


def _of_pairs(names: frozenset[str], of_inputs: Tensor, of_gradients: Tensor) -> Tensor:
    """(batch,) sums of the products of two tables of inner products, (batch, positions, positions).

    The input of a bias is 1 at every position. Where positions cancel, rounding of the products
    could make a sum too small: the largest possible error is added.
    """
    products = (of_inputs + 1.0 if "bias" in names else of_inputs) * of_gradients
    total = products.sum(2).double().sum(1)
    rounding = 4 * torch.finfo(products.dtype).eps * products.abs_().sum(2).double().sum(1)
    return total.clamp(min=0.0) + rounding


def _linear_ghost(_: nn.Linear, names: frozenset[str], inputs: Tensor, gradient: Tensor) -> Tensor:
    return _ghost(names, _positions(inputs), _positions(gradient))


def _linear_single(_: nn.Linear, names: frozenset[str], inputs: Tensor, gradient: Tensor) -> Tensor:
    """One position: ‖g aᵀ‖² = ‖g‖² ‖a‖²."""
    return (sum_squares(inputs) + ("bias" in names)) * sum_squares(gradient)


def _direct(layer: Any, names: frozenset[str], inputs: Tensor, gradient: Tensor) -> Tensor:
    total = torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
    for name in names:
        total += sum_squares(gradient_of(layer, name, inputs, gradient))
    return total


def _without_padding(layer: nn.Embedding, tokens: Tensor, gradient: Tensor) -> Tensor:
    gradients = gradient.reshape(len(tokens), -1, layer.embedding_dim)
    if layer.padding_idx is None:
        return gradients
    return gradients * (tokens.reshape(len(tokens), -1) != layer.padding_idx).unsqueeze(2)


def _table_rows(layer: nn.Embedding, tokens: Tensor) -> Tensor:
    """Row of each token in one long table that has all rows of the layer for each example."""
    examples = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    return (tokens.reshape(len(tokens), -1) + layer.num_embeddings * examples).reshape(-1)


def _embedding(layer: nn.Embedding, _: frozenset[str], tokens: Tensor, gradient: Tensor) -> Tensor:
    """Σ over rows of ‖sum of the gradients of the positions that have this row's token‖²."""
    size = len(tokens)
    gradients = _without_padding(layer, tokens, gradient)
    unique, inverse = _table_rows(layer, tokens).unique(return_inverse=True)
    sums = gradients.new_zeros(len(unique), gradients.shape[2]).index_add_(
        0, inverse, gradients.flatten(0, 1)
    )
    squares = torch.zeros(size, dtype=torch.float64, device=tokens.device)
    return squares.index_add_(0, unique // layer.num_embeddings, sum_squares(sums))


def _padded(layer: Any, inputs: Tensor) -> tuple[Tensor, Any]:
    """Inputs padded as the layer does, unless with plain zeros, and the zeros left to add."""
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
        return padded, (0,) * len(layer.kernel_size)
    return inputs, layer.padding


def _conv_gradient(layer: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Per-example weight gradients, as those of one convolution whose groups are the examples."""
    inputs, padding = _padded(layer, inputs)
    size = len(inputs)
    weight = layer.weight.new_empty(1, dtype=inputs.dtype).expand(
        size * layer.out_channels, *layer.weight.shape[1:]
    )
    _, weights, _ = torch.ops.aten.convolution_backward(
        gradient.reshape(1, -1, *gradient.shape[2:]),
        inputs.reshape(1, -1, *inputs.shape[2:]),
        weight,
        None,
        layer.stride,
        padding,
        layer.dilation,
        False,
        [0] * len(layer.kernel_size),
        size * layer.groups,
        [False, True, False],
    )
    return weights.reshape(size, *layer.weight.shape)


def _patches(layer: Any, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Patches under the kernel, and gradients, both (batch · groups, positions, d).

    The entries of a patch are in the order of the inputs in memory, not in that of the weight, so
    only norms may be computed from them.
    """
    inputs, padding = _padded(layer, inputs)
    if any(padding):
        inputs = F.pad(inputs, [side for one in reversed(padding) for side in (one, one)])
    size, channels, groups = len(inputs), inputs.shape[1] // layer.groups, layer.groups
    batch, channel, *sides = inputs.stride()
    starts = [side * step for side, step in zip(sides, layer.stride, strict=True)]
    taps = [side * step for side, step in zip(sides, layer.dilation, strict=True)]
    outputs, kernel = gradient.shape[2:], layer.kernel_size
    if channel == 1 and channels > 1:  # channels last: a patch is runs of channels
        shape = (size, groups, *outputs, *kernel, channels)
        windows = inputs.as_strided(shape, (batch, channel * channels, *starts, *taps, channel))
        patches = windows.reshape(size * groups, math.prod(outputs), -1)
    else:
        shape = (size, groups, channels, *kernel, *outputs)
        windows = inputs.as_strided(shape, (batch, channel * channels, channel, *taps, *starts))
        patches = windows.reshape(size * groups, -1, math.prod(outputs)).transpose(1, 2)
    return patches, gradient.flatten(2).unflatten(1, (groups, -1)).flatten(0, 1).transpose(1, 2)


def _conv_patches(layer: Any, names: frozenset[str], inputs: Tensor, gradient: Tensor) -> Tensor:
    patches, gradients = _patches(layer, inputs, gradient)
    weights = torch.bmm(gradients.transpose(1, 2), patches).reshape(len(inputs), -1)
    return sum_squares(weights) + _direct(layer, names - {"weight"}, inputs, gradient)


def _conv_ghost(layer: Any, names: frozenset[str], inputs: Tensor, gradient: Tensor) -> Tensor:
    patches, gradients = _patches(layer, inputs, gradient)
    return _ghost(names, patches, gradients).reshape(len(inputs), -1).sum(1)


def _work_on_pixels(layer: Any, inputs: Tensor, positions: int) -> int:
    """Cost, in multiplications, of all products of pixels and of their sums along each side."""
    pixels = inputs[0, 0].numel()
    sums = pixels * positions * sum(layer.kernel_size)
    return pixels**2 * (inputs.shape[1] // layer.groups) + _ADDED * sums


def _conv_pixels(layer: Any, names: frozenset[str], inputs: Tensor, gradient: Tensor) -> Tensor:
    inputs, padding = _padded(layer, inputs)
    size, groups, sides = len(inputs), layer.groups, inputs.shape[2:]
    pixels, gradients = (
        side.reshape(size * groups, -1, side[0, 0].numel()) for side in (inputs, gradient)
    )
    pairs = torch.bmm(pixels.transpose(1, 2), pixels).view(-1, *sides, *sides)
    for side, outputs in enumerate(gradient.shape[2:]):
        places = range(layer.kernel_size[side])
        taps = [place * layer.dilation[side] - padding[side] for place in places]
        first, second = 1 + side, 1 + len(sides) + side
        pairs = _along_a_side(pairs, first, second, taps, layer.stride[side], outputs)
    of_gradients = torch.bmm(gradients.transpose(1, 2), gradients)
    squares = _of_pairs(names, pairs.reshape_as(of_gradients), of_gradients)
    return squares.reshape(size, -1).sum(1)


def _along_a_side(
    pairs: Tensor, one: int, other: int, taps: list[int], stride: int, outputs: int
) -> Tensor:
    """Σ over taps of pairs[stride · p + tap, stride · q + tap] for outputs p, q; 0 outside."""
    shape, length = list(pairs.shape), pairs.shape[one]
    shape[one] = shape[other] = outputs
    sums = pairs.new_zeros(shape)
    to, of = (each.movedim((one, other), (0, 1)) for each in (sums, pairs))
    for tap in taps:
        first = max(0, -(tap // stride))  # the first output whose pixel is inside the image
        count = min(outputs, (length - 1 - tap) // stride + 1) - first
        if count > 0:
            taken = slice(stride * first + tap, stride * (first + count - 1) + tap + 1, stride)
            met = slice(first, first + count)
            to[met, met] += of[taken, taken]
    return sums


def _normalised(layer: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Weight gradients Σ g·x̂ of a normalisation layer, (batch, *weight)."""
    if isinstance(layer, nn.LayerNorm):
        unit = F.layer_norm(inputs, layer.normalized_shape, None, None, layer.eps)
    elif isinstance(layer, nn.RMSNorm):
        unit = F.rms_norm(inputs, list(layer.normalized_shape), None, layer.eps)
    else:
        groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else inputs.shape[1]
        unit = F.group_norm(inputs, groups, None, None, layer.eps)
    return _bias_gradient(layer, unit.mul_(gradient))


def _bias_gradient(layer: Any, gradient: Tensor) -> Tensor:
    """(batch, *bias): the gradient summed over positions."""
    if isinstance(layer, _NORMS):
        return gradient.reshape(len(gradient), -1, *layer.normalized_shape).sum(1)
    if isinstance(layer, nn.Linear):
        return _positions(gradient).sum(1)
    # Channels come second in all other layers.
    return gradient.sum(tuple(range(2, gradient.ndim))) if gradient.ndim > 2 else gradient
