"""Models of the reference runs, all compatible with Opacus: no layer mixes examples."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from audits.training.architectures import DEFAULT_ACTIVATION, DEFAULT_HIDDEN
from audits.training.config import ModelConfig
from audits.training.sequences.gpt2 import Gpt2WithLora
from indpriv._checks import check_choice
from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import read_content, state_of

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
_GROUPS = 4  # groups of each GroupNorm in ResNet-20, whose narrowest layer has 16 channels
_WIDE_GROUPS = 16  # groups of each GroupNorm in WRN-16-4, as in De et al. 2022


class HingeLoss(nn.Module):
    """Multi-class hinge loss: the mean over classes of max(0, 1 + logit - logit of the label).

    Weston and Watkins 1999. It equals `torch.nn.MultiMarginLoss`, which has no second derivative
    and no batched gradients, and which attacks and federated runs would need.

    >>> import torch
    >>> HingeLoss()(torch.tensor([[3.0, 0.0], [0.5, 0.0]]), torch.tensor([0, 0]))
    tensor(0.1250)
    """

    def __init__(self, reduction: str = "mean") -> None:
        """Of a batch: "mean", "sum" or "none"."""
        super().__init__()
        self.reduction = check_choice("reduction", reduction, ("mean", "sum", "none"))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of logits (batch, n_classes) and labels (batch,)."""
        margins = F.relu(1 + outputs - outputs.gather(1, targets[:, None]))
        losses = (margins.sum(1) - 1) / outputs.shape[1]  # that of the label itself is 1
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


LOSSES = {"cross_entropy": nn.CrossEntropyLoss, "hinge": HingeLoss}


def build_model(config: ModelConfig, input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """Build an audit's model, from (batch, *input_shape) to logits (batch, n_classes).

    PyTorch's global random state gives its first parameters. Raises InputError if the architecture
    does not accept inputs of that shape.
    """
    if config.architecture == "mlp":
        return mlp(
            math.prod(input_shape),
            config.hidden or DEFAULT_HIDDEN,
            n_classes,
            config.activation or DEFAULT_ACTIVATION,
        )
    if config.architecture == "gpt2_lora":
        if len(input_shape) != 1:
            raise InputError(f"gpt2_lora takes texts (length,), not inputs of shape {input_shape}")
        return Gpt2WithLora(input_shape[0], n_classes)
    if len(input_shape) != 3:
        raise InputError(
            f"{config.architecture} takes images (channels, height, width), not inputs of shape "
            f"{input_shape}"
        )
    if config.architecture == "tanh_cnn":
        return tanh_cnn(input_shape, n_classes)
    if config.architecture == "wrn16_4":
        return WideResNet16(input_shape[0], n_classes, config.weight_standardisation is True)
    return ResNet20(input_shape[0], n_classes, config.affine is not False)


def mlp(n_inputs: int, hidden: tuple[int, ...], n_classes: int, activation: str) -> nn.Sequential:
    """Fully connected layers; inputs of any shape are flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in pairwise((n_inputs, *hidden)):
        layers += [nn.Linear(n_in, n_out), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear((n_inputs, *hidden)[-1], n_classes))


def tanh_cnn(input_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """Two convolutions and two linear layers with tanh, for images of about 28 x 28 pixels.

    The MNIST model of Papernot et al. 2020, "Tempered Sigmoid Activations for Deep Learning with
    Differential Privacy" (arXiv:2007.14191v1, table 1): bounded activations keep gradients small,
    so clipping costs less.

    Raises:
        InputError: images too small for its two strided convolutions.
    """
    channels, height, width = input_shape
    features = nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
    )
    sides = []
    for side in (height, width):
        pooled = (side + 2 * 2 - 8) // 2 + 1 - 1
        sides.append((pooled - 4) // 2 + 1 - 1)
    if min(sides) < 1:
        raise InputError(
            f"tanh_cnn needs images of at least 16 x 16, not {height} x {width}; use an mlp"
        )
    return nn.Sequential(
        *features, nn.Linear(32 * sides[0] * sides[1], 32), nn.Tanh(), nn.Linear(32, n_classes)
    )


class _Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut without parameters."""

    def __init__(self, n_in: int, n_out: int, affine: bool) -> None:
        super().__init__()
        self.stride = 1 if n_in == n_out else 2
        self.conv1 = nn.Conv2d(n_in, n_out, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(_GROUPS, n_out, affine=affine)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, n_out, affine=affine)
        self.new_channels = n_out - n_in

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = F.relu(self.norm1(self.conv1(inputs)))
        outputs = self.norm2(self.conv2(outputs))
        shortcut = inputs[:, :, :: self.stride, :: self.stride]
        return F.relu(outputs + F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels)))


class ResNet20(nn.Module):
    """ResNet-20 for 32 x 32 images, with GroupNorm instead of BatchNorm.

    He et al. 2016, sec. 4.2, shortcuts A. BatchNorm mixes the examples of a batch, so per-example
    gradients would not exist. In the code of Yu et al. 2023 it learns no scale and shift:
    affine = False.
    """

    def __init__(self, channels: int, n_classes: int, affine: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(_GROUPS, 16, affine=affine)
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        self.blocks = nn.Sequential(
            *(_Block(n_in, n_out, affine) for n_in, n_out in pairwise(widths))
        )
        self.head = nn.Linear(64, n_classes)
        _start_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, 32, 32) to logits (batch, n_classes)."""
        features = self.blocks(F.relu(self.norm(self.conv(images))))
        return self.head(features.mean(dim=(2, 3)))


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 for each output channel.

    Weight standardisation, Qiao et al. 2019 (arXiv:1903.10520v2). Opacus has no formula for its
    per-example gradients, and computes them with functorch.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to (batch, out_channels, ...)."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        return self._conv_forward(images, (self.weight - mean) / (variance + 1e-5).sqrt(), None)


class _PreActivationBlock(nn.Module):
    """Two 3 x 3 convolutions, each after its normalisation.

    The shortcut is a 1 x 1 convolution if the number of channels changes.
    """

    def __init__(self, n_in: int, n_out: int, stride: int, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_WIDE_GROUPS, n_in)
        self.conv1 = conv(n_in, n_out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_WIDE_GROUPS, n_out)
        self.conv2 = conv(n_out, n_out, 3, padding=1, bias=False)
        self.shortcut = nn.Identity() if n_in == n_out else conv(n_in, n_out, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        active = F.relu(self.norm1(inputs))
        outputs = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return outputs + (
            inputs if isinstance(self.shortcut, nn.Identity) else self.shortcut(active)
        )


class WideResNet16(nn.Module):
    """WRN-16-4 for 32 x 32 images (Zagoruyko and Komodakis 2016), with GroupNorm of 16 groups.

    The model of Yu et al. 2023 on CIFAR-10, after De et al. 2022 (arXiv:2204.13650), who
    standardise the weights of its convolutions.
    """

    def __init__(self, channels: int, n_classes: int, standardised: bool = False) -> None:
        super().__init__()
        conv = StandardisedConv2d if standardised else nn.Conv2d
        self.conv = conv(channels, 16, 3, padding=1, bias=False)
        widths, strides = (16, 64, 64, 128, 128, 256, 256), (1, 1, 2, 1, 2, 1)
        self.blocks = nn.Sequential(
            *(
                _PreActivationBlock(n_in, n_out, s, conv)
                for (n_in, n_out), s in zip(pairwise(widths), strides, strict=True)
            )
        )
        self.norm = nn.GroupNorm(_WIDE_GROUPS, widths[-1])
        self.head = nn.Linear(widths[-1], n_classes)
        _start_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, 32, 32) to logits (batch, n_classes)."""
        features = F.relu(self.norm(self.blocks(self.conv(images))))
        return self.head(features.mean(dim=(2, 3)))


def _start_convolutions(model: nn.Module) -> None:
    """Initialise convolutions before a ReLU as He et al. do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def count_parameters(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def describe_model(model: nn.Module) -> str:
    """One line for each layer, for run.json."""
    return "\n".join(
        f"{name}: {module}"
        for name, module in model.named_modules()
        if name and not list(module.children())
    )


def first_parameters(
    config: ModelConfig, input_shape: tuple[int, ...], n_classes: int, seed: int
) -> nn.Module:
    """`build_model` from the given seed, or from its pretrained parameters.

    PyTorch's global random state is restored afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build_model(config, input_shape, n_classes)
    if config.pretrained is not None:
        load_pretrained(module, Path(config.pretrained))
    return module


def load_pretrained(module: nn.Module, path: Path) -> None:
    """Start a model from the parameters in a file.

    A last layer for another number of classes keeps its random start.

    Raises:
        InputError: no such file, one that cannot be read safely, or parameters of another model.
    """
    if not path.is_file():
        raise InputError(f"pretrained = {str(path)!r} does not exist; make it, or leave it out")
    state, own = state_of(read_content(path)), module.state_dict()
    if state.keys() != own.keys():
        names = sorted(state.keys() ^ own.keys())
        raise InputError(f"{path} is of another model: only one of them has {', '.join(names[:5])}")
    last = list(own)[-1].rpartition(".")[0]
    differing = {name for name in own if state[name].shape != own[name].shape}
    if wrong := sorted(name for name in differing if name.rpartition(".")[0] != last):
        shapes = f"{tuple(state[wrong[0]].shape)}, not {tuple(own[wrong[0]].shape)}"
        raise InputError(f"{path} is of another model: {wrong[0]} has shape {shapes}")
    kept = {name: own[name] for name in own if name.rpartition(".")[0] == last and differing}
    module.load_state_dict({**state, **kept})
