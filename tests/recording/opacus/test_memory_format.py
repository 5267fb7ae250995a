import copy

import pytest
import torch
from opacus.grad_sample.utils import wrap_model
from torch import nn
from torch.utils.data import TensorDataset

from indpriv import InputError
from indpriv.recording import Recorder
from runs import PER_EXAMPLE, make_run

LAST = torch.channels_last


class Permuted(nn.Module):
    """Takes images as (batch, height, width, channels), as many files hold them."""

    def forward(self, images):
        return images.permute(0, 3, 1, 2)


def network(*first):
    torch.manual_seed(2**40 + 0)
    return nn.Sequential(
        *first, nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    )


def images(n=40):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(
        0, 4, (n,), generator=generator
    )


def trained(tmp_path, model, inputs, targets, mode, order=lambda batch: batch):
    run = make_run(TensorDataset(inputs, targets), model, mode=mode, max_grad_norm=50.0)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch, labels in run.loader:
            run.step(order(batch), labels)
    return run


def opacus_norms(model, inputs, targets, mode):
    """Per-example gradient norms as Opacus takes them itself."""
    options = {"max_grad_norm": 1.0} if mode == "ghost" else {}
    wrapped = wrap_model(
        copy.deepcopy(model), grad_sample_mode=mode, loss_reduction="sum", **options
    )
    PER_EXAMPLE(wrapped(inputs), targets).sum().backward()
    if mode == "ghost":
        return wrapped.get_norm_sample().detach()
    return torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in wrapped.parameters()]).norm(
        dim=0
    )


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_opacus_takes_other_gradients_with_channels_last(mode):
    """The reason for refusing it: once Opacus is right, this fails and the refusal may go."""
    model, (inputs, targets) = network(), images(6)
    right = opacus_norms(model, inputs, targets, "functorch")
    torch.testing.assert_close(opacus_norms(model, inputs, targets, mode), right)
    wrong = opacus_norms(model, inputs.contiguous(memory_format=LAST), targets, mode)
    assert ((wrong - right).abs() / right).max() > 0.02


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ew"])
def test_weights_with_channels_last_are_refused_before_training(mode, tmp_path):
    with pytest.raises(
        InputError,
        match=r"'0' has its weights in channels-last memory format.*contiguous_format",
    ):
        trained(tmp_path, network().to(memory_format=LAST), *images(), mode)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ew"])
def test_images_with_channels_last_are_refused_in_the_first_forward_pass(mode, tmp_path):
    model, (inputs, targets) = network(), images()
    start = copy.deepcopy(model.state_dict())
    with pytest.raises(
        InputError, match=r"'0' got images that are not stored row by row.*grad_sample_mode"
    ):
        trained(
            tmp_path,
            model,
            inputs,
            targets,
            mode,
            lambda batch: batch.contiguous(memory_format=LAST),
        )
    torch.testing.assert_close(dict(model.state_dict()), dict(start))


def test_images_that_the_model_itself_permutes_are_refused(tmp_path):
    inputs, targets = images()
    """On some examples already, before any training."""
    with pytest.raises(InputError, match=r"gives Conv2d '\d' images that are not stored row"):
        trained(
            tmp_path, network(Permuted()), inputs.permute(0, 2, 3, 1).contiguous(), targets, "hooks"
        )


def test_a_window_of_wider_images_is_refused(tmp_path):
    """Opacus takes the width of the window for the distance of its rows."""
    wide = torch.randn(40, 3, 8, 11)
    with pytest.raises(InputError, match="row by row"):
        trained(
            tmp_path, network(), *images(), "hooks", lambda batch: wide[: len(batch), :, :, 1:9]
        )


@pytest.mark.parametrize(
    "order", [lambda batch: batch, lambda batch: batch.contiguous(memory_format=LAST)]
)
def test_functorch_may_have_channels_last(order, tmp_path):
    trained(tmp_path, network().to(memory_format=LAST), *images(), "functorch", order)


def test_images_row_by_row_are_taken_and_hooks_come_off(tmp_path):
    """Some channels left out, or one pixel high: the rows still lie as Opacus takes them."""
    model, (inputs, targets) = network(), images()
    many = torch.randn(40, 6, 8, 8)
    run = trained(tmp_path, model, inputs, targets, "hooks", lambda batch: many[: len(batch), ::2])
    run.step(inputs.contiguous(memory_format=LAST), targets)  # no longer ours to refuse
    flat = nn.Sequential(nn.Conv2d(3, 4, (1, 3)), nn.Flatten(), nn.Linear(24, 4))
    trained(tmp_path / "flat", flat, inputs[:, :, :1], targets, "hooks")


def test_frozen_convolutions_may_have_channels_last(tmp_path):
    model = network().to(memory_format=LAST)
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    trained(tmp_path, model, *images(), "hooks")
