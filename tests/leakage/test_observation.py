"""What is read: the same as a plain loop of autograd, clipping and SGD gives."""

import math

import pytest
import torch
from torch import nn

from indpriv.errors import InputError
from indpriv.leakage import Observation
from indpriv.leakage.inversion import Reader
from leakage_scenes import LOSS, digits, mlp
from reports.shared.pictures import network as cpl_network


def gradients(model, inputs, targets):
    """Of each example, by plain autograd: one list of tensors each."""
    found = []
    for row, target in zip(inputs, targets, strict=True):
        model.zero_grad()
        LOSS(model(row[None]), target[None]).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def flat(parts):
    return torch.cat([part.flatten() for part in parts])


def clipped(part, most):
    return part * min(1.0, most / float(part.norm()))


@pytest.mark.parametrize("clipping", ["flat", "per_layer", None])
@pytest.mark.parametrize("model", [mlp(), cpl_network(8)], ids=["mlp", "cnn"])
def test_a_batch_adds_up_clipped_gradients(clipping, model):
    inputs, targets = digits(3)
    parts = gradients(model, inputs, targets)
    most = 0.5 * float(flat(parts[0]).norm())
    expected = 0
    for own in parts:
        if clipping == "per_layer":
            own = [clipped(part, most / math.sqrt(len(own))) for part in own]
        expected = expected + (clipped(flat(own), most) if clipping == "flat" else flat(own))
    if clipping is None:
        seen = Observation("batch", batch_size=3)
    else:
        seen = Observation("batch", batch_size=3, max_grad_norm=most, clipping=clipping)
    found = Reader(model, LOSS, seen).read(inputs, targets)
    torch.testing.assert_close(found.detach(), expected)


def test_an_update_is_what_sgd_moves():
    inputs, targets = digits(3)
    model, trained = mlp(), mlp()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.3)
    for _ in range(4):
        optimizer.zero_grad()
        LOSS(trained(inputs), targets).mean().backward()
        optimizer.step()
    pairs = zip(model.parameters(), trained.parameters(), strict=True)
    expected = flat([(a - b).detach() for a, b in pairs])
    seen = Observation("update", batch_size=3, local_steps=4, learning_rate=0.3)
    found = Reader(model, LOSS, seen).read(inputs, targets, differentiable=True)
    torch.testing.assert_close(found.detach(), expected)
    half = float(expected.norm()) / 2
    seen = Observation("update", batch_size=3, local_steps=4, learning_rate=0.3, max_grad_norm=half)
    found = Reader(model, LOSS, seen).read(inputs, targets)
    torch.testing.assert_close(found.detach(), expected / 2)


def test_noise_on_every_row_adds_up():
    once = Observation("batch", batch_size=4, max_grad_norm=0.5, noise_multiplier=3.0)
    rows = Observation(
        "batch", batch_size=4, max_grad_norm=0.5, noise_multiplier=3.0, noise_at="row"
    )
    assert (once.noise_std, rows.noise_std) == (1.5, 3.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": "picture"}, "of='picture'"),
        ({"batch_size": 2}, "reads one example"),
        ({"of": "batch", "local_steps": 2}, "local_steps belongs"),
        ({"of": "update", "noise_at": "row"}, "gets noise once"),
        ({"noise_multiplier": 1.0}, "relative to max_grad_norm"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"max_grad_norm": 1.0, "noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"share": 0.0}, "share=0.0"),
        ({"of": "update", "learning_rate": 0.0}, "learning_rate=0.0"),
        ({"clipping": "quantile"}, "clipping='quantile'"),
    ],
)
def test_observations_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Observation(**options)


@pytest.mark.parametrize(
    ("layer", "message"), [(nn.BatchNorm1d(64), "GroupNorm"), (nn.Dropout(0.5), "without dropout")]
)
def test_models_whose_gradients_are_not_of_one_example_are_refused(layer, message):
    with pytest.raises(InputError, match=message):
        Reader(nn.Sequential(nn.Flatten(), layer, nn.Linear(64, 10)), LOSS, Observation())


def test_what_has_no_noise_says_so():
    assert Observation(max_grad_norm=1.0).text.endswith("clipped at 1, without noise")
    assert "without" not in Observation(max_grad_norm=1.0, noise_multiplier=2.0).text


def test_dropout_is_no_obstacle_in_evaluation():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).eval()
    Reader(model, LOSS, Observation())
