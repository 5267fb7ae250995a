import pytest
import torch
from opacus.validators import ModuleValidator
from safetensors.torch import save_file
from torch import nn

from audits.training.config import ModelConfig
from audits.training.models import (
    StandardisedConv2d,
    build_model,
    count_parameters,
    describe_model,
    first_parameters,
)
from indpriv.errors import InputError
from indpriv.recording import per_example_gradient_norms

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
    # Without 2 x (16 + 6 x 16 + 6 x 32 + 6 x 64) scales and shifts.
    (ModelConfig("resnet20_gn", affine=False), (3, 32, 32), 10, 269722 - 1376),
    # Zagoruyko and Komodakis 2016: 2.7 million, with BatchNorm.
    (ModelConfig("wrn16_4"), (3, 32, 32), 10, 2748890),
    (ModelConfig("wrn16_4", weight_standardisation=True), (3, 8, 8), 10, 2748890),
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


@pytest.mark.parametrize("standardised", [False, True])
def test_norms_of_the_wide_resnet_are_those_of_one_example_at_a_time(standardised):
    torch.manual_seed(0)
    config = ModelConfig("wrn16_4", weight_standardisation=standardised)
    model = build_model(config, (3, 8, 8), 10)
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


def test_standardised_convolutions_do_not_see_scale_and_shift_of_their_weights():
    layer = StandardisedConv2d(3, 4, 3, padding=1, bias=False)
    images = torch.randn(2, 3, 5, 5)
    before = layer(images)
    with torch.no_grad():
        layer.weight.mul_(7.0).add_(0.3)
    torch.testing.assert_close(layer(images), before, rtol=1e-3, atol=1e-3)
    kernels = layer.weight.flatten(1)
    expected = (kernels - kernels.mean(1, keepdim=True)) / kernels.std(1, False, keepdim=True)
    plain = nn.functional.conv2d(images, expected.view_as(layer.weight), padding=1)
    torch.testing.assert_close(layer(images), plain, rtol=1e-3, atol=1e-3)


@pytest.fixture
def saved(tmp_path):
    """A file of the parameters of a small network for three classes."""

    def save(hidden=(8,), n_classes=3, name="weights.safetensors"):
        model = build_model(ModelConfig("mlp", hidden=hidden), (5,), n_classes)
        save_file(model.state_dict(), tmp_path / name)
        return model, ModelConfig("mlp", hidden=(8,), pretrained=str(tmp_path / name))

    return save


def test_pretrained_parameters_are_those_of_the_file_whatever_the_seed(saved):
    source, config = saved()
    for seed in (1, 2):
        made = first_parameters(config, (5,), 3, seed).state_dict()
        assert all(torch.equal(made[name], value) for name, value in source.state_dict().items())


def test_a_last_layer_for_other_classes_starts_at_random(saved):
    source, config = saved(n_classes=10)
    made = first_parameters(config, (5,), 3, 1)
    fresh = first_parameters(ModelConfig("mlp", hidden=(8,)), (5,), 3, 1)
    assert torch.equal(made[1].weight, source[1].weight)
    assert not torch.equal(made[1].weight, fresh[1].weight)
    assert torch.equal(made[3].weight, fresh[3].weight)
    assert torch.equal(made[3].bias, fresh[3].bias)


def test_pretrained_parameters_of_another_model_are_refused(saved, tmp_path):
    _, config = saved(hidden=(9,))
    with pytest.raises(InputError, match=r"1.bias has shape \(9,\), not \(8,\)"):
        first_parameters(config, (5,), 3, 0)
    _, config = saved(hidden=(8, 8))
    with pytest.raises(InputError, match=r"only one of them has 5\.bias, 5\.weight"):
        first_parameters(config, (5,), 3, 0)
    missing = ModelConfig("mlp", pretrained=str(tmp_path / "none.safetensors"))
    with pytest.raises(InputError, match="does not exist"):
        first_parameters(missing, (5,), 3, 0)
