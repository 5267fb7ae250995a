import pytest
import torch
from opacus.validators import ModuleValidator
from torch import nn

from indpriv.errors import InputError
from indpriv.recording import per_example_gradient_norms
from indpriv.training.config import ModelConfig
from indpriv.training.models import build_model, count_parameters, describe_model, first_parameters

CASES = [
    (ModelConfig("mlp"), (107,), 2, 107 * 64 + 64 + 64 * 2 + 2),
    (
        ModelConfig("mlp", hidden=(8, 4), activation="relu"),
        (1, 8, 8),
        10,
        64 * 8 + 8 + 8 * 4 + 4 + 4 * 10 + 10,
    ),
    (
        ModelConfig("tanh_cnn"),
        (1, 28, 28),
        10,
        26010,
    ),  # the figure of Papernot et al.'s MNIST model
    (ModelConfig("tanh_cnn"), (3, 32, 32), 10, 37274),
    (
        ModelConfig("tanh_cnn"),
        (1, 16, 16),
        3,
        (64 + 1) * 16 + (16 * 16 + 1) * 32 + (32 + 1) * 32 + (32 + 1) * 3,
    ),
    # He et al. 2016: 0.27 million; their BatchNorm has two parameters a channel, as GroupNorm has.
    (ModelConfig("resnet20_gn"), (3, 32, 32), 10, 269722),
    # Zagoruyko and Komodakis 2016: 2.7 million, with BatchNorm.
    (ModelConfig("wrn16_4"), (3, 32, 32), 10, 2748890),
]


@pytest.mark.parametrize(("config", "shape", "n_classes", "parameters"), CASES)
def test_models_take_batches_of_any_size_and_fit_opacus(config, shape, n_classes, parameters):
    model = build_model(config, shape, n_classes)
    for batch in (3, 1, 0):  # a Poisson batch may be empty
        assert model(torch.randn(batch, *shape)).shape == (batch, n_classes)
    assert count_parameters(model) == parameters
    assert ModuleValidator.validate(model, strict=False) == []
    assert len(describe_model(model).splitlines()) == sum(
        1 for m in model.modules() if not list(m.children())
    )


@pytest.mark.parametrize(("config", "shape", "n_classes", "parameters"), CASES)
def test_no_layer_mixes_examples(config, shape, n_classes, parameters):
    model = build_model(config, shape, n_classes)
    inputs = torch.randn(4, *shape)
    alone = torch.cat([model(inputs[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(model(inputs), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["resnet20_gn", "wrn16_4"])
def test_every_parameter_of_a_resnet_has_a_gradient(architecture):
    model = build_model(ModelConfig(architecture), (3, 32, 32), 10)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_norms_of_the_wide_resnet_are_those_of_one_example_at_a_time():
    torch.manual_seed(0)
    model = build_model(ModelConfig("wrn16_4"), (3, 8, 8), 10)
    images, targets = torch.randn(2, 3, 8, 8), torch.tensor([3, 7])
    norms = per_example_gradient_norms(
        model, nn.CrossEntropyLoss(reduction="none"), images, targets
    )
    for i in range(2):
        loss = nn.functional.cross_entropy(model(images[i : i + 1]), targets[i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        alone = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
        assert norms[i] == pytest.approx(
            alone, rel=5e-3
        )  # the norms have slack for 2.7 million parameters


@pytest.mark.parametrize(
    ("architecture", "shape", "says"),
    [
        ("tanh_cnn", (1, 8, 8), "at least 16 x 16"),
        ("tanh_cnn", (107,), "takes images"),
        ("resnet20_gn", (5,), "takes images"),
        ("wrn16_4", (5,), "takes images"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(architecture, shape, says):
    with pytest.raises(InputError, match=says):
        build_model(ModelConfig(architecture), shape, 10)


def test_first_parameters_follow_their_seed_and_leave_the_global_state_alone():
    before = torch.random.get_rng_state()
    one, same, other = (
        first_parameters(ModelConfig("mlp"), (5,), 2, seed)[1].weight for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())
