"""What is said about an architecture without torch is what torch builds."""

from collections import Counter

import pytest

from audits.training.architectures import layer_counts
from audits.training.config import ModelConfig
from audits.training.models import build_model

MODELS = [
    ModelConfig("mlp"),
    ModelConfig("mlp", hidden=(8, 4), activation="relu"),
    ModelConfig("tanh_cnn"),
    ModelConfig("resnet20_gn"),
    ModelConfig("resnet20_gn", affine=False),
    ModelConfig("wrn16_4"),
    ModelConfig("wrn16_4", weight_standardisation=True),
]


@pytest.mark.parametrize("config", MODELS, ids=str)
def test_layers_are_counted_as_they_are_built(config):
    model = build_model(config, (3, 32, 32), 10)
    leaves = (module for module in model.modules() if not list(module.children()))
    assert layer_counts(config) == Counter(type(module).__name__ for module in leaves)
