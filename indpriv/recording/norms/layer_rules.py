"""The rule of a layer: squared norms of its per-example gradients. Sensitive.

A layer with input a and output gradient g at T positions has the per-example gradient
Σ_t g_t a_tᵀ. There are two exact ways to its squared norm (Goodfellow 2015; Li et al. 2022,
"ghost norms"); the one with fewer multiplications is taken:

    direct   ‖Σ_t g_t a_tᵀ‖²               T · d_in · d_out
    ghost    Σ_{t,u} (a_tᵀa_u)(g_tᵀg_u)    T² · (d_in + d_out)

In a convolution, a_t is the patch under the kernel at position t.

Squares are summed in float32 over at most 1,024 terms and in float64 beyond. Inputs and gradients
have the batch first and are float32 or float64: callers widen half precision. Names of parameters
are weight and bias; squared norms are (batch,) float64.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CHUNK = 1024
_FASTER = 1.2  # products of positions, than a convolution with examples for groups
_SHORT_PATCH = 64  # entries: up to here, patches are copied faster than examples are grouped
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
GROUP_NORMS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_WITH_RULE = {nn.Linear, nn.Embedding, *_NORMS, *CONVOLUTIONS, *GROUP_NORMS}
Squares = Callable[[Any, frozenset[str], Tensor, Tensor], Tensor]
"""(layer, names of its trainable parameters, inputs, gradient) -> squared norms of all together."""


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
    if positions * (d_in + d_out) < _FASTER * d_in * d_out:
        return _conv_ghost
    # GPUs multiply matrices of patches faster than they convolve with many groups.
    return _conv_patches if d_in <= _SHORT_PATCH or gradient.is_cuda else _direct


def _positions(values: Tensor) -> Tensor:
    """(batch, positions, features) of a layer that works on the last dimension."""
    return values.reshape(len(values), -1, values.shape[-1])


def _ghost(names: frozenset[str], inputs: Tensor, gradients: Tensor) -> Tensor:
    """Squares of weight and bias together, from (batch, positions, d) inputs and gradients.

    The input of a bias is 1 at every position. Where positions cancel, rounding of the products
    could make a sum too small: the largest possible error is added.
    """
    of_inputs, of_gradients = (torch.bmm(x, x.transpose(1, 2)) for x in (inputs, gradients))
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


def _normalised(layer: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Weight gradients Σ g·x̂ of a normalisation layer, (batch, *weight)."""
    if isinstance(layer, _NORMS):
        if isinstance(layer, nn.LayerNorm):
            unit = F.layer_norm(inputs, layer.normalized_shape, None, None, layer.eps)
        else:
            unit = F.rms_norm(inputs, list(layer.normalized_shape), None, layer.eps)
        return _bias_gradient(layer, unit.mul_(gradient))
    # Σ g·x̂ = rstd · Σ g·(x − mean): centred first, so that no digits cancel at a large mean.
    size, channels = inputs.shape[:2]
    groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else channels
    sides = tuple(range(2, inputs.ndim))
    count = inputs[0].numel() // groups

    def of_group(sums: Tensor) -> Tensor:
        means = sums.view(size, groups, -1).sum(2, keepdim=True) / count
        return means.expand(size, groups, channels // groups).reshape(size, channels)

    if not sides:
        inputs, gradient, sides = inputs.unsqueeze(2), gradient.unsqueeze(2), (2,)
    centred = inputs - of_group(inputs.sum(sides)).view(size, channels, *[1] * len(sides))
    variance = of_group(torch.linalg.vector_norm(centred, dim=sides).square())
    return centred.mul_(gradient).sum(sides) * (variance + layer.eps).rsqrt()


def _bias_gradient(layer: Any, gradient: Tensor) -> Tensor:
    """(batch, *bias): the gradient summed over positions."""
    if isinstance(layer, _NORMS):
        return gradient.reshape(len(gradient), -1, *layer.normalized_shape).sum(1)
    if isinstance(layer, nn.Linear):
        return _positions(gradient).sum(1)
    # Channels come second in all other layers.
    return gradient.sum(tuple(range(2, gradient.ndim))) if gradient.ndim > 2 else gradient
