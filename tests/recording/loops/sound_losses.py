"""Sound loops: losses, each the mean over the batch of a function of one example."""

import torch
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from recording.loops.harness import blobs, ce, mlp, normal, sound
from recording.loops.parts import Items, mlp_of, vector

ALL = "hooks ghost functorch ew"


def targets(y):
    return TensorDataset(blobs().tensors[0], y)


@sound("hooks functorch ew", rare=True)
def the_loss_of_torch(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            F.cross_entropy(s.model(x), y).backward()
            s.optimizer.step()


@sound("ghost")
def ghost_with_the_criterion_of_torch(s):
    s.make(criterion=nn.CrossEntropyLoss())
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            s.criterion(s.model(x), y).backward()
            s.optimizer.step()


@sound("ghost")
def ghost_with_a_loss_wrapped_by_hand(s):
    s.make()
    criterion = DPLossFastGradientClipping(s.model, s.optimizer, nn.CrossEntropyLoss())
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            criterion(s.model(x), y).backward()
            s.optimizer.step()


@sound("hooks ghost functorch")
def class_weights_and_the_mean_over_the_batch(s):
    s.train(loss=nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0]), reduction="none"))


@sound("ghost", rare=True)
def class_weights_of_the_criterion_in_ghost_mode(s):
    weight = torch.tensor([0.2, 1.0])
    s.make(criterion=nn.CrossEntropyLoss(weight=weight))
    with s.recorded(nn.CrossEntropyLoss(weight=weight, reduction="none")):
        for x, y in s.batches():
            s.optimizer.zero_grad()
            s.criterion(s.model(x), y).backward()
            s.optimizer.step()


@sound(ALL)
def sum_over_the_batch(s):
    s.make(loss_reduction="sum")
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            if s.criterion:
                s.backward(s.model(x), y)
            else:
                ce(s.model(x), y).sum().backward()
            s.optimizer.step()


@sound("hooks ghost functorch")
def regression_of_one_column(s):
    s.train(
        targets(blobs().tensors[0][:, :1] * 2),
        mlp_of(1),
        loss=lambda out, y: (out - y).square().mean(1),
    )


@sound("hooks ghost", rare=True)
def robust_regression(s):
    s.train(
        targets(blobs().tensors[0][:, 0] * 2),
        mlp_of(1),
        loss=lambda out, y: F.huber_loss(out[:, 0], y, reduction="none"),
    )


@sound("hooks ghost functorch ew")
def several_labels(s):
    def loss(out, y):
        return F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1)

    s.train(targets((blobs().tensors[0][:, :4] > 0).float()), mlp_of(4), loss=loss)


@sound("hooks ghost")
def label_smoothing(s):
    s.train(loss=nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none"))


@sound("hooks ghost functorch", rare=True)
def focal_loss(s):
    def focal(out, y):
        p = out.softmax(1).gather(1, y[:, None])[:, 0]
        return -torch.tensor([0.25, 0.75])[y] * (1 - p).square() * p.clamp_min(1e-8).log()

    s.train(loss=focal)


@sound("hooks ghost")
def item_weights_from_the_data_set(s):
    def weighted(out, y):
        return ce(out, y[:, 0].long()) * y[:, 1]

    y = blobs().tensors[1].float()
    s.train(targets(torch.stack([y, normal(400).abs()], 1)), loss=weighted)


@sound("hooks functorch")
def penalty_on_the_weights(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            penalty = sum(p.square().sum() for p in s.model.parameters())
            (F.cross_entropy(s.model(x), y) + 0.01 * penalty).backward()
            s.optimizer.step()


@sound("hooks ghost")
def pixels(s):
    def item(i):
        x = vector(i, 192).view(3, 8, 8)
        return x, (x.sum(0) > 0).long()

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    s.train(Items(item, 200), model, loss=lambda out, y: ce(out, y).mean((1, 2)))


@sound("hooks ghost functorch", rare=True)
def several_heads_with_missing_labels(s):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.heads = nn.Linear(6, 8), nn.ModuleDict({k: nn.Linear(8, 2) for k in "ab"})

        def forward(self, x):
            h = torch.tanh(self.a(x))
            return {k: head(h) for k, head in self.heads.items()}

    def loss(out, y):
        each = [
            F.cross_entropy(out[k], y[:, j], reduction="none", ignore_index=-1)
            for j, k in enumerate("ab")
        ]
        return sum(each) / (y >= 0).sum(1).clamp(min=1)

    s.train(targets(torch.arange(800).view(400, 2) % 3 - 1), Heads(), loss=loss)


@sound("hooks ghost functorch", rare=True)
def triplets_of_views_of_one_item(s):
    views = TensorDataset(
        torch.stack([normal(400, 6), normal(400, 6) + 0.1, normal(400, 6, seed=2)], 1),
        torch.zeros(400),
    )

    def triplet(out, y):
        near, far = (out[:, 0] - out[:, k] for k in (1, 2))
        return F.relu(near.square().sum(1) - far.square().sum(1) + 1)

    s.train(views, mlp(), loss=triplet)


@sound("hooks functorch")
def loss_scaled_and_unscaled_in_the_samples(s):
    def unscale(s, x, y):
        for p in s.model.parameters():
            p.grad_sample /= 128

    s.train(trained=lambda out, y: 128 * ce(out, y), between=unscale)


@sound("hooks functorch", rare=True)
def outputs_divided_in_place(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            outputs = s.model(x).clone()
            outputs /= 1.0
            s.step(None, y, outputs=outputs)


@sound("hooks ghost", rare=True)
def loss_of_a_module_with_settings(s):
    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = 2.0

        def forward(self, out, y):
            return ce(out / self.temperature, y)

    s.train(loss=Temperature())


@sound("hooks ghost", rare=True)
def hinge_loss(s):
    from audits.training.models import HingeLoss

    s.train(loss=HingeLoss("none"))


@sound("hooks ghost functorch", rare=True)
def self_training_on_own_prediction(s):
    def confident(out, y):
        p = out.detach().softmax(1).max(1)
        return ce(out, y) + 0.1 * (p.values > 0.6) * ce(out, p.indices)

    s.train(loss=confident)
