"""Broken loops: what is published is no public function of the noisy gradients.

A write by the loop looks like one by a public rule (told.py), so these are at least "unsupported".
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from recording.loops.harness import broken, ce, private_generator
from recording.loops.parts import Kept, cnn, pictures, trainable, with_dropout

ALL = "hooks ghost functorch ew"


def plain_update(s, x, y, rate=0.1):
    for p, g in zip(s.model.parameters(), s.gradients(x, y), strict=True):
        p.data -= rate * g


def plain_updates(s):
    for _ in range(20):
        plain_update(s, *s.data.tensors)


@broken("update", ALL, expect="unsupported")
def plain_updates_in_between(s):
    s.train(epoch=lambda s, epoch: epoch and plain_updates(s))


@broken("update", "hooks ghost functorch ew", expect="unsupported")
def plain_updates_after_the_last_step(s):
    s.train(end=plain_updates)


@broken("update", "hooks ghost functorch", expect="unsupported", rare=True)
def plain_updates_before_the_first_step(s):
    s.train(epoch=lambda s, epoch: epoch or plain_updates(s))


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def small_plain_update_after_each_step(s):
    s.train(after=lambda s, x, y: plain_update(s, x, y, 1e-3))


@broken("update", "hooks ghost", expect="unsupported")
def plain_optimizer_on_the_same_parameters(s):
    s.make()
    other = torch.optim.SGD(s.model.parameters(), lr=0.1)
    with s.recorded():
        for k, (x, y) in enumerate(s.batches()):
            s.step(x, y)
            if k % 5 == 4:
                for p, g in zip(s.model.parameters(), s.gradients(x, y), strict=True):
                    p.grad = g
                other.step()


@broken("update", "hooks ghost", expect="unsupported")
def optimizer_of_before_make_private_stepped(s):
    """The loop steps the optimizer that it made, not the one that make_private returned."""
    s.make()
    with s.recorded():
        for k, (x, y) in enumerate(s.batches()):
            if k < 13:
                s.step(x, y)
                continue
            s.optimizer.zero_grad()
            s.backward(s.model(x), y)
            s.inner.step()


@broken("update", "hooks functorch", expect="unsupported", rare=True)
def no_private_step_at_all(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            s.inner.zero_grad()
            ce(s.model(x), y).mean().backward()
            s.inner.step()


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@broken("update", "hooks ghost functorch ew", expect="unsupported")
def momentum_written_by_the_loop(s):
    def write(s, x, y):
        for p, g in zip(s.model.parameters(), s.gradients(x, y), strict=True):
            s.inner.state[p]["momentum_buffer"].add_(g)

    s.train(after=write, opt=momentum)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def second_moment_written_by_the_loop(s):
    """Adam scaled by the plain gradients of the batch."""

    def write(s, x, y):
        for p, g in zip(s.model.parameters(), s.gradients(x, y), strict=True):
            s.inner.state[p]["exp_avg_sq"].copy_(g.square())

    s.train(after=write, opt=adam)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def momentum_written_between_backward_and_step(s):
    def write(s, x, y):
        for p, g in zip(s.model.parameters(), s.gradients(x, y), strict=True):
            if "momentum_buffer" in s.inner.state[p]:
                s.inner.state[p]["momentum_buffer"].add_(g)

    s.train(opt=momentum, between=write)


@broken("update", "hooks ghost functorch ew", expect="unsupported")
def weights_written_between_backward_and_step(s):
    s.train(between=lambda s, x, y: plain_update(s, x, y, 1e-2))


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def weights_written_between_forward_and_backward(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            outputs = s.model(x)
            s.model._module[2].bias.data += 0.01 * y.float().mean()
            s.step(None, y, outputs=outputs)


@broken("update", "hooks ghost functorch ew", expect="unsupported")
def bias_set_by_the_labels_of_the_batch(s):
    def write(s, x, y):
        s.model._module[2].bias.data[1] = y.float().mean()

    s.train(after=write)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def bias_set_by_the_labels_after_the_last_step(s):
    def write(s):
        s.model._module[2].bias.data[1] = s.data.tensors[1].float().mean()

    s.train(end=write)


@broken("update", "hooks ghost functorch", expect="unsupported")
def prototypes_in_a_buffer(s):
    def write(s, x, y):
        for c in (0, 1):
            if (y == c).any():
                s.model._module.kept[c] = x[y == c].mean(0)

    s.train(after=write, model=Kept(lambda net, x, outputs: outputs))


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def prototypes_in_a_buffer_after_the_last_step(s):
    def write(s):
        s.model._module.kept.copy_(s.data.tensors[0][:2])

    s.train(model=Kept(lambda net, x, outputs: outputs), end=write)


@broken("update", "hooks functorch", expect="unsupported")
def statistics_of_frozen_norms_estimated_at_the_end(s):
    norm = nn.BatchNorm2d(8).eval().requires_grad_(False)
    norm.train = lambda mode=True: norm

    def estimate(s):
        norm.running_mean.copy_(s.model._module[0](s.data.tensors[0]).detach().mean((0, 2, 3)))

    s.train(pictures(), cnn(lambda: norm), opt=trainable, end=estimate)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def frozen_layer_trained_by_the_loop(s):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].requires_grad_(False)

    def write(s, x, y):
        s.model._module[0].weight.data += 0.01 * x.mean(0)

    s.train(after=write, model=model, opt=trainable)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def weights_of_a_plain_twin_loaded(s):
    s.make()
    twin = copy.deepcopy(s.plain)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with s.recorded():
        for k, (x, y) in enumerate(s.batches()):
            s.step(x, y)
            optimizer.zero_grad()
            ce(twin(x), y).mean().backward()
            optimizer.step()
            if k == 13:
                s.model._module.load_state_dict(twin.state_dict())


@broken("update", "hooks ghost", expect="unsupported")
def step_undone_where_the_loss_hardly_fell(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            before, kept = s.loss_of(x, y), copy.deepcopy(s.model.state_dict())
            s.step(x, y)
            if s.loss_of(x, y) > before - 0.02:
                s.model.load_state_dict(kept)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def best_weights_on_the_training_set_loaded_at_the_end(s):
    s.make()
    best = (1e9, None)
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y)
            loss = s.loss_of(*s.data.tensors)
            if loss < best[0] and s.steps < 20:
                best = loss, copy.deepcopy(s.model.state_dict())
        s.model.load_state_dict(best[1])


class Told(torch.optim.SGD):
    """An optimizer that adds what it was told to the gradient."""

    told = ()

    def step(self, closure=None):
        for p, g in zip(self.param_groups[0]["params"], self.told, strict=False):
            p.grad = p.grad + g
        return super().step(closure)


def tell(s, x, y):
    s.inner.told = tuple(s.gradients(x, y))


@broken("update noise", "hooks ghost", expect="unsupported")
def optimizer_that_is_told_the_plain_gradient(s):
    s.train(opt=lambda p: Told(p, 0.1), between=tell)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def step_of_a_class_of_torch_replaced(s):
    told = []

    @torch.no_grad()
    def step(inner):
        for p, plain_gradient in zip(inner.param_groups[0]["params"], told[-1], strict=True):
            p -= 0.1 * (p.grad + plain_gradient)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.optim.SGD, "step", step)
        s.train(between=lambda s, x, y: told.append(s.gradients(*s.data.tensors)))


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def step_length_by_a_line_search(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            before = [p.detach().clone() for p in s.model.parameters()]
            enough = s.loss_of(x, y) - 0.02
            s.step(x, y)
            for _ in range(3):
                if s.loss_of(x, y) > enough:
                    for p, old in zip(s.model.parameters(), before, strict=True):
                        p.data.copy_((p.data + old) / 2)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def update_on_hidden_parameters(s):
    """A pre-hook of the model, put on while training, moves weights by the inputs."""
    s.make(model=with_dropout())
    with s.recorded():

        def move(module, inputs):
            if module.training and torch.is_grad_enabled() and len(inputs[0]):
                module.bias.data += 0.001 * inputs[0].mean()

        s.model._module[3].register_forward_pre_hook(move)
        for x, y in s.batches():
            s.step(x, y)


def recorded_once(s, after, **made):
    """Recorded norms show a change of weights only where they are taken: here at the start."""
    s.train(after=after, recorder={"every": "once"}, **made)


@broken("update", "hooks ghost functorch", expect="unsupported")
def two_rows_of_weights_exchanged_by_the_labels(s):
    def exchange(s, x, y):
        if y.float().mean() > 0.5:
            weight = s.optimizer.params[-2].data
            weight[[0, 1]] = weight[[1, 0]]

    recorded_once(s, exchange)


@broken("update", "hooks", expect="unsupported")
def rows_of_a_buffer_exchanged_beside_a_mask(s):
    """An infinite number hides the others of a sum, a huge one too."""

    def exchange(s, x, y):
        if y.float().mean() > 0.5:
            table = s.model._module.table
            table[[0, 1]] = table[[1, 0]]

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    model.register_buffer("table", torch.arange(6.0).reshape(2, 3))
    recorded_once(s, exchange, model=model)


@broken("update", "hooks ghost", expect="unsupported")
def weights_negated_by_the_labels(s):
    """All signs of an even number of entries change."""

    def negate(s, x, y):
        if y.float().mean() > 0.5:
            s.optimizer.params[-2].data.neg_()

    recorded_once(s, negate)


@broken("update", "hooks ghost", expect="unsupported")
def weights_sorted_by_the_labels_at_the_end(s):
    def end(s):
        weight = s.optimizer.params[0].data
        weight[:] = weight[s.data.tensors[1][:8].argsort()]

    s.train(end=end)


@broken("update", "hooks functorch", expect="unsupported")
def means_kept_in_a_buffer_between_micro_batches(s):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model.register_buffer("means", torch.zeros(6))
    s.make(model=model)
    with s.recorded():
        for x, y in s.batches(micro=8):
            s.optimizer.zero_grad()
            s.backward(s.model(x), y)
            skip = s.optimizer._step_skip_queue
            if skip and skip[0]:  # the step is still to come
                s.model._module.means += x.mean(0)
            s.optimizer.step()


@broken("update", "hooks ghost", expect="unsupported")
def plain_updates_between_two_sessions(s):
    s.make()
    s.resumed(lambda: plain_updates(s))


@broken("update", "hooks", expect="unsupported")
def resumed_with_the_weights_of_a_later_step(s):
    """What the steps in between published is in no account."""
    s.make()
    with s.recorded() as recorder:
        for number, (x, y) in enumerate(s.batches(1)):
            s.step(x, y)
            if number == 5:
                saved = recorder.state_dict()
    s.go(resume_at=saved, epochs=1)


@broken("update", "hooks", expect="unsupported")
def momentum_written_between_two_sessions(s):
    s.make(opt=momentum)

    def write():
        for p, g in zip(s.optimizer.params, s.gradients(*s.data.tensors), strict=True):
            s.inner.state[p]["momentum_buffer"].copy_(g)

    s.resumed(write)


@broken("update", "hooks", expect="unsupported")
def sparse_buffer_ordered_by_the_labels(s):
    def order(s, x, y):
        rows = torch.eye(6)[y[:6].argsort()] if len(y) > 6 else torch.eye(6)
        s.model._module.graph = rows.to_sparse()

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model.register_buffer("graph", torch.eye(6).to_sparse())
    recorded_once(s, order, model=model)


@broken("update start", "hooks ghost", expect="refused")
def trained_before_without_noise_and_called_random(s):
    """The optimizer remembers."""
    s.make(opt=momentum)
    for _ in range(10):
        for p, g in zip(s.optimizer.params, s.gradients(*s.data.tensors), strict=True):
            p.grad = g
        s.inner.step()
    s.inner.zero_grad()
    s.go(start="random")


@broken("update", "hooks functorch", expect="unsupported", rare=True)
def ascent_along_the_plain_gradient_undone_before_the_step(s):
    """Sharpness-aware minimisation (Foret et al. 2021)."""

    def move(s, gradients, sign):
        for p, g in zip(s.optimizer.params, gradients, strict=True):
            p.data += sign * 0.05 * g / (g.norm() + 1e-9)

    s.make()
    with s.recorded(every="once"):
        for x, y in s.batches():
            gradients = s.gradients(x, y)
            move(s, gradients, 1)
            s.step(x, y, between=lambda s, *_, g=gradients: move(s, g, -1))


@broken("update", "hooks functorch", expect="unsupported", rare=True)
def optimizer_in_the_backward_pass(s):
    def move(p):
        p.data -= 0.01 * p.grad

    s.make()
    for p in s.optimizer.params:
        p.register_post_accumulate_grad_hook(move)
    s.go()


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def hook_of_all_optimizers_that_moves_weights(s):
    s.make()
    handle = register_optimizer_step_post_hook(lambda *_: plain_update(s, *s.data.tensors, 1e-2))
    try:
        s.go(every="once")
    finally:
        handle.remove()


class Projected(Told):
    """An optimizer that goes along what it was told."""

    @torch.no_grad()
    def step(self, closure=None):
        for p, g in zip(self.param_groups[0]["params"], self.told, strict=True):
            p -= 0.1 * (p.grad * g).sum() / (g.square().sum() + 1e-9) * g


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def noisy_gradient_projected_on_the_plain_one(s):
    s.train(opt=lambda p: Projected(p, 0.1), between=tell)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def adam_that_begins_with_plain_moments(s):
    s.make(opt=adam)

    def begin(s, epoch):
        for p, g in zip(s.optimizer.params, s.gradients(*s.data.tensors), strict=True):
            if not epoch:
                moments = {"exp_avg": 0.1 * g, "exp_avg_sq": 1e-3 * g.square()}
                s.inner.state[p] = {"step": torch.tensor(1.0), **moments}

    s.go(epoch=begin)


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def checkpoints_averaged_by_their_training_losses(s):
    kept = []

    def keep(s, x, y):
        kept.append((s.loss_of(*s.data.tensors), copy.deepcopy(s.model.state_dict())))

    def average(s):
        shares = torch.softmax(-10 * torch.tensor([loss for loss, _ in kept]), 0)
        states = [state for _, state in kept]
        mean = {
            name: sum(a * one[name] for a, one in zip(shares, states, strict=True))
            for name in states[0]
        }
        s.model.load_state_dict(mean)

    s.train(after=keep, end=average)


@broken("update batch", "hooks ghost", expect="unsupported", rare=True)
def second_optimizer_with_less_noise_in_the_second_epoch(s):
    s.make()
    own = {"max_grad_norm": 1.0, "expected_batch_size": s.optimizer.expected_batch_size}
    other = type(s.optimizer)(
        torch.optim.SGD(s.optimizer.params, 0.1),
        noise_multiplier=0.05,
        generator=private_generator(),
        **own,
    )
    s.go(epoch=lambda s, epoch: epoch and setattr(s, "optimizer", other))


@broken("update", "hooks ghost", expect="unsupported", rare=True)
def bias_calibrated_on_the_training_set_at_the_end(s):
    def calibrate(s):
        x, y = s.data.tensors
        share = s.plain(x).detach().softmax(1)[:, 1].mean()
        s.model._module[2].bias.data[1] += y.float().mean().logit() - share.logit()

    s.train(end=calibrate)
