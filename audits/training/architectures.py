"""What is known about an architecture before it is built. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from audits.training.config import ModelConfig

DEFAULT_HIDDEN = (64,)
DEFAULT_ACTIVATION = "tanh"
_ACTIVATION_CLASSES = {"tanh": "Tanh", "relu": "ReLU"}
_LAYERS: Mapping[str, Mapping[str, int]] = {
    "tanh_cnn": {"Conv2d": 2, "Tanh": 3, "MaxPool2d": 2, "Flatten": 1, "Linear": 2},
    "resnet20_gn": {"Conv2d": 19, "GroupNorm": 19, "Linear": 1},
    "wrn16_4": {"Conv2d": 16, "GroupNorm": 13, "Linear": 1, "Identity": 3},
    # Linear: the adapters' two in each of two blocks, and the head.
    "gpt2_lora": {
        "Conv1D": 8,
        "Dropout": 7,
        "Embedding": 2,
        "GELUTanh": 2,
        "Identity": 2,
        "LayerNorm": 5,
        "Linear": 5,
        "ModuleDict": 2,
        "ParameterDict": 4,
    },
}


def layer_counts(config: ModelConfig) -> dict[str, int]:
    """Number of layers of an audit's model, by the name of their class."""
    if config.architecture != "mlp":
        counts = dict(_LAYERS[config.architecture])
        if config.weight_standardisation:
            counts["StandardisedConv2d"] = counts.pop("Conv2d")
        return counts
    hidden = len(config.hidden or DEFAULT_HIDDEN)
    activation = _ACTIVATION_CLASSES[config.activation or DEFAULT_ACTIVATION]
    return {"Flatten": 1, "Linear": hidden + 1, activation: hidden}
