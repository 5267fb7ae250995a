"""Broken loops: settings that follow the training data."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from opacus.schedulers import LambdaNoise
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as rates
from torch.utils.data import default_collate

from indpriv.recording import QuantileClipping
from recording.loops.harness import blobs, broken, ce, mlp
from recording.loops.parts import Items, with_dropout

ALL = "hooks ghost functorch ew"


def before_each_step(s, change, **options):
    """`change(s, x, y, loss)` comes between backward and step."""
    s.train(between=lambda s, x, y: change(s, x, y, s.loss_of(x, y)), **options)


def odd(loss):
    """A setting that rarely moves would not move in each run; this one does, in half of the steps."""
    return int(1000 * loss) % 2


def group(s):
    return s.optimizer.param_groups[0]


@broken("settings", "hooks ghost functorch ew", expect="unsupported")
def noise_by_the_loss(s):
    def change(s, x, y, loss):
        s.optimizer.noise_multiplier = 1 + loss

    before_each_step(s, change, epochs=1)


@broken("settings contribution", "hooks functorch", expect="unsupported")
def clipping_norm_by_the_median_of_the_batch(s):
    def change(s, x, y, loss):
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in s.optimizer.params])
        s.optimizer.max_grad_norm = float(norms.norm(dim=0).median())

    before_each_step(s, change, epochs=1)


@broken("settings contribution", "hooks ghost", expect="unsupported")
def clipping_norm_changed_between_backward_and_step(s):
    def change(s, x, y):
        s.optimizer.max_grad_norm = 0.5 if s.steps % 2 else 1.0

    s.train(between=change)


@broken("settings contribution", "ghost", expect="unsupported")
def clipping_norm_of_the_model_alone(s):
    """Ghost mode clips at the model's norm and adds noise for the optimizer's."""
    s.make()
    s.model.max_grad_norm = 5.0
    s.go()


@broken("settings noise", "hooks ghost functorch ew", expect="unsupported")
def divided_by_the_number_drawn(s):
    s.train(between=lambda s, x, y: setattr(s.optimizer, "expected_batch_size", len(x)))


@broken("settings", ALL, expect="unsupported")
def rate_by_the_loss(s):
    before_each_step(s, lambda s, x, y, loss: group(s).update(lr=0.3 * loss))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def rate_by_the_rounded_loss(s):
    before_each_step(s, lambda s, x, y, loss: group(s).update(lr=0.1 if odd(loss) else 0.05))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def rate_in_the_last_digit(s):
    before_each_step(s, lambda s, x, y, loss: group(s).update(lr=0.1 + 1e-9 * float(y.sum())))


@broken("settings", "hooks ghost", expect="unsupported")
def momentum_by_the_loss(s):
    before_each_step(
        s,
        lambda s, x, y, loss: group(s).update(momentum=min(0.9, loss)),
        opt=lambda p: torch.optim.SGD(p, 0.1, momentum=0.5),
    )


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def weight_decay_by_the_loss(s):
    before_each_step(s, lambda s, x, y, loss: group(s).update(weight_decay=0.01 * loss))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def betas_by_the_loss(s):
    before_each_step(
        s,
        lambda s, x, y, loss: group(s).update(betas=(0.9, 0.99 if odd(loss) else 0.9)),
        opt=lambda p: torch.optim.Adam(p, 1e-2),
    )


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def rate_of_one_group_by_the_loss(s):
    def groups(parameters):
        a, b, c, d = parameters
        return torch.optim.SGD([{"params": [a, b]}, {"params": [c, d]}], lr=0.1)

    def change(s, x, y, loss):
        s.optimizer.param_groups[1]["lr"] = 0.1 * loss

    before_each_step(s, change, opt=groups)


@broken("settings", "ghost", expect="unsupported")
def parameter_moved_to_another_group_by_the_loss(s):
    def groups(parameters):
        *most, last = parameters
        return torch.optim.SGD([{"params": most, "lr": 0.1}, {"params": [last], "lr": 0.0}])

    def change(s, x, y):
        mine, other = s.inner.param_groups[:: 1 if odd(s.loss_of(*s.data.tensors)) else -1]
        if len(mine["params"]) > 1:
            other["params"].append(mine["params"].pop())

    s.train(opt=groups, after=change)


@broken("settings", "hooks ghost", expect="unsupported")
def rate_by_the_loss_in_a_scheduler_of_torch(s):
    s.make()
    factor = [1.0]
    law = rates.LambdaLR(s.optimizer, lambda step: factor[0])
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y)
            factor[0] = s.loss_of(x, y)
            law.step()


@broken("settings", "hooks ghost", expect="unsupported")
def rate_by_the_training_loss_on_a_plateau(s):
    s.make()
    law = rates.ReduceLROnPlateau(s.optimizer, patience=0)
    s.go(after=lambda s, x, y: law.step(s.loss_of(x, y)))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def scheduler_stepped_where_the_loss_rose(s):
    s.make()
    law = rates.ExponentialLR(s.optimizer, 0.9)
    last = 9.0
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y)
            loss = s.loss_of(x, y)
            if loss > last:
                law.step()
            last = loss


@broken("settings batch", "hooks ghost", expect="unsupported", rare=True)
def sampling_rate_by_the_loss(s):
    def change(s, x, y):
        s.loader.batch_sampler.sample_rate = 1 / 13 if odd(s.loss_of(x, y)) else 1 / 20

    s.train(after=change)


@broken("settings", "hooks ghost", expect="unsupported")
def public_settings_that_do_not_hold(s):
    def change(s, x, y, loss):
        group(s)["lr"] = 0.3 * loss

    before_each_step(s, change, recorder={"public_settings": lambda step: {"lr": 0.1}})


@broken("settings", "hooks ghost", expect="unsupported")
def rates_that_the_loop_appends_to_a_list(s):
    rates = [1.0, 1.0]
    s.make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(s.inner, lambda epoch: rates[epoch])
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y)
            rates.append(s.loss_of(x, y))
            scheduler.step()


@broken("settings", "hooks ghost", expect="unsupported")
def public_settings_that_read_the_last_rate(s):
    def change(s, x, y, loss):
        group(s)["lr"] = 0.3 * loss

    before_each_step(s, change, recorder={"public_settings": lambda step: {"lr": group(s)["lr"]}})


@broken("settings contribution", "hooks functorch", expect="unsupported", rare=True)
def dropout_by_the_loss(s):
    def change(s, x, y):
        s.model._module[2].p = min(0.9, s.loss_of(x, y) / 2)

    s.train(model=with_dropout(), after=change)


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def rate_by_the_norm_of_the_plain_gradient(s):
    def change(s, x, y, loss):
        total = sum(float(g.square().sum()) for g in s.gradients(x, y))
        group(s)["lr"] = 0.1 / (1 + total**0.5)

    before_each_step(s, change)


@broken("settings", "hooks functorch", expect="unsupported", rare=True)
def clipping_per_layer_by_the_data(s):
    def change(s, x, y):
        s.optimizer.max_grad_norms = [
            float(p.grad_sample.flatten(1).norm(dim=1).median()) for p in s.optimizer.params
        ]

    s.train(between=change, clip=[0.3, 0.1, 0.5, 0.2], clipping="per_layer")


def stepped_by_the_loss(s, scheduler_of, *, after, once_small):
    """A scheduler steps once the loss was small after so many steps, or until then."""
    s.make()
    scheduler, small = scheduler_of(s.inner), False
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y)
            small |= s.steps > after and s.loss_of(x, y) < 0.68
            if small == once_small:
                scheduler.step()


@broken("settings", "hooks ghost", expect="unsupported")
def scheduler_that_begins_once_the_loss_is_small(s):
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    stepped_by_the_loss(s, lambda inner: cosine(inner, 26), after=2, once_small=True)


@broken("settings", "hooks ghost", expect="unsupported")
def scheduler_that_stops_once_the_loss_is_small(s):
    exponential = torch.optim.lr_scheduler.ExponentialLR
    stepped_by_the_loss(s, lambda inner: exponential(inner, 0.97), after=9, once_small=False)


@broken("settings", "hooks", expect="unsupported", rare=True)
def milestones_added_by_the_loss(s):
    s.make()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(s.inner, [1], 0.9)
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y)
            if s.loss_of(x, y) < 0.68:
                scheduler.milestones[scheduler.last_epoch + 1] = 1
            scheduler.step()


def calibrated(s, change, **options):
    """Settings are chosen by what the first batch says, before the first step."""
    s.train(between=lambda s, x, y: s.steps or change(s, x, y), **options)


@broken("settings", "hooks functorch", expect="unsupported")
def clipping_norm_calibrated_on_the_first_batch(s):
    def median(s, x, y):
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in s.optimizer.params])
        s.optimizer.max_grad_norm = float(norms.norm(dim=0).median())

    calibrated(s, median)


@broken("settings", "hooks ghost", expect="unsupported")
def rate_calibrated_on_the_first_batch(s):
    calibrated(s, lambda s, x, y: group(s).update(lr=0.1 * s.loss_of(x, y)))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def noise_calibrated_on_the_first_batch(s):
    calibrated(s, lambda s, x, y: setattr(s.optimizer, "noise_multiplier", 1 + s.loss_of(x, y)))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def divisor_calibrated_on_the_first_batch(s):
    calibrated(s, lambda s, x, y: setattr(s.optimizer, "expected_batch_size", 99 + len(x)))


def by_a_quantile(s, change):
    s.make()
    s.optimizer = QuantileClipping.of(s.optimizer, quantile=0.5, count_noise=5.0)
    s.go(before=lambda *_: change(s.optimizer, s.loss_of(*s.data.tensors)))


@broken("settings", "hooks", expect="unsupported")
def quantile_by_the_loss(s):
    by_a_quantile(s, lambda rule, loss: setattr(rule, "quantile", 0.4 + loss / 5))


@broken("settings", "hooks", expect="unsupported")
def clipping_norm_by_the_loss_beside_a_rule(s):
    by_a_quantile(s, lambda rule, loss: setattr(rule, "max_grad_norm", 0.5 + loss))


@broken("settings", "hooks", expect="unsupported")
def clipping_norm_of_the_first_batch_beside_a_rule(s):
    def begin(rule, loss):
        if not s.steps:
            rule.max_grad_norm = 0.5 + loss

    by_a_quantile(s, begin)


@broken("settings noise", "hooks", expect="unsupported", rare=True)
def noise_of_the_count_by_the_loss(s):
    by_a_quantile(s, lambda rule, loss: setattr(rule, "count_noise", 2 + loss))


def resumed_after(s, change, loss=ce, **options):
    s.make(**options)
    s.resumed(lambda: change(s.loss_of(*s.data.tensors)), loss=loss)


@broken("settings", "hooks ghost", expect="unsupported")
def rate_by_the_loss_when_resumed(s):
    resumed_after(s, lambda loss: s.optimizer.param_groups[0].update(lr=0.1 * loss))


@broken("settings", "hooks", expect="unsupported", rare=True)
def noise_by_the_loss_when_resumed(s):
    resumed_after(s, lambda loss: setattr(s.optimizer, "noise_multiplier", 1 + loss))


@broken("settings", "hooks", expect="unsupported", rare=True)
def dropout_by_the_loss_when_resumed(s):
    def change(loss):
        s.model._module[2].p = loss / 2

    resumed_after(s, change, model=with_dropout(0.1))


@broken("contribution", "hooks ghost functorch", expect="unsupported")
def loss_weighted_by_the_loss_when_resumed(s):
    weight = [1.0]
    resumed_after(s, weight.append, lambda out, y: weight[-1] * ce(out, y))


@broken("contribution", "hooks ghost", expect="unsupported", rare=True)
def smoothing_by_the_loss_when_resumed(s):
    by = [0.0]

    def loss(out, y):
        return F.cross_entropy(out, y, reduction="none", label_smoothing=by[-1])

    resumed_after(s, lambda found: by.append(min(0.5, found / 4)), loss)


@broken("contribution", "hooks ghost functorch", expect="unsupported")
def temperature_by_the_loss_when_resumed(s):
    class Divided(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.by = with_dropout(), 1.0

        def forward(self, x):
            return self.body(x) / self.by

    resumed_after(s, lambda loss: setattr(s.model._module, "by", 1 + loss), model=Divided())


@broken("contribution", "hooks functorch", expect="unsupported", rare=True)
def first_layer_frozen_by_the_loss_when_resumed(s):
    resumed_after(s, lambda loss: s.model._module[0].requires_grad_(loss > 9))


@broken("settings", "hooks ghost", expect="unsupported")
def optimizer_by_the_loss_when_resumed(s):
    def change(loss):
        kind = torch.optim.Adam if loss < 9 else torch.optim.SGD
        s.optimizer.original_optimizer = kind(s.model.parameters(), 0.1)

    resumed_after(s, change)


@broken("contribution settings", "hooks ghost", expect="unsupported")
def dropout_switched_off_where_the_loss_is_small(s):
    def switch(s, x, y):
        s.model._module[2].train(s.steps < 3 or s.loss_of(x, y) > 0.8)

    s.train(model=with_dropout(0.5), epochs=5, before=switch)


@broken("batch", "hooks ghost", expect="unsupported")
def seed_of_dropout_by_the_labels(s):
    def seed(s, x, y):
        torch.manual_seed(10**12 + int(y.sum()))

    s.train(model=with_dropout(0.5), before=seed)


@broken("settings noise", "hooks ghost functorch", expect="unsupported")
def divided_by_the_number_of_labels_in_a_tensor(s):
    s.train(between=lambda s, x, y: setattr(s.optimizer, "expected_batch_size", (y >= 0).sum()))


@broken("settings noise", "hooks ghost", expect="unsupported", rare=True)
def divided_by_the_number_drawn_in_a_type_of_numpy(s):
    s.train(between=lambda s, x, y: setattr(s.optimizer, "expected_batch_size", np.int64(len(y))))


def beside(s, law_of, move):
    """A scheduler steps as it should, and the loop moves something by the loss."""
    s.make(opt=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    law = law_of(s.inner)

    def after(s, x, y):
        move(s, law, s.loss_of(x, y))
        law.step()

    s.go(after=after)


def one_cycle(inner):
    return rates.OneCycleLR(inner, 0.2, total_steps=30, cycle_momentum=False)


@broken("settings", "hooks ghost", expect="unsupported")
def cycle_scaled_by_the_loss(s):
    held = [1.0]

    def law_of(inner):
        scaled = {"scale_fn": lambda k: held[0], "scale_mode": "iterations"}
        return rates.CyclicLR(inner, 0.05, 0.2, step_size_up=4, cycle_momentum=False, **scaled)

    beside(s, law_of, lambda s, law, loss: held.__setitem__(0, loss))


@broken("settings", "hooks ghost", expect="unsupported")
def momentum_by_the_loss_beside_one_cycle(s):
    beside(s, one_cycle, lambda s, law, loss: group(s).update(momentum=min(0.9, loss)))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def largest_rate_of_one_cycle_by_the_loss(s):
    beside(s, one_cycle, lambda s, law, loss: group(s).update(max_lr=0.2 * loss))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def function_of_a_scheduler_replaced_by_the_loss(s):
    def replace(s, law, loss):
        if s.steps == 9:
            law.lr_lambdas = [lambda k: 0.97**k * loss]

    beside(s, lambda inner: rates.LambdaLR(inner, lambda k: 0.97**k), replace)


@broken("settings", "hooks", expect="unsupported", rare=True)
def factor_of_a_multiplicative_scheduler_by_the_loss(s):
    held = [1.0]
    law_of = lambda inner: rates.MultiplicativeLR(inner, lambda k: held[0])  # noqa: E731
    beside(s, law_of, lambda s, law, loss: held.__setitem__(0, 0.9 + 0.1 * loss))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def sign_of_the_step_by_the_loss(s):
    before_each_step(s, lambda s, x, y, loss: group(s).update(maximize=not odd(loss)))


def collate_replaced(s, collate, **options):
    """From the second epoch on; items of the data set are random."""
    inputs, labels = blobs().tensors
    s.make(Items(lambda i: (inputs[i] + 0.1 * torch.randn(6), labels[i])), **options)
    s.go(epoch=lambda s, epoch: epoch and setattr(s.loader, "collate_fn", collate))


@broken("settings contribution batch", "hooks ghost", expect="unsupported")
def collate_function_replaced_by_one_that_mixes(s):
    def mixed(rows):
        x, y = default_collate(rows)
        return 0.6 * x + 0.4 * x[torch.randperm(len(x))], y

    collate_replaced(s, mixed)


@broken("settings contribution batch", "hooks functorch", expect="unsupported", rare=True)
def collate_function_replaced_by_one_that_centres(s):
    def centred(rows):
        x, y = default_collate(rows)
        return x - x.mean(0), y

    collate_replaced(s, centred, clip=0.02)


@broken("settings", "hooks ghost", expect="unsupported")
def rate_halved_by_the_loss_beside_a_scheduler(s):
    """Schedulers of torch go on from whatever the rate is."""

    def halve(s, law, loss):
        if odd(loss):
            group(s)["lr"] /= 2

    beside(s, lambda inner: rates.ExponentialLR(inner, 0.97), halve)


def last_put_back(s, *factors):
    """The rate is what it was before the last of these schedulers stepped, where the loss says."""
    s.make()
    *laws, last = [rates.ExponentialLR(s.inner, factor) for factor in factors]

    def after(s, x, y):
        for law in laws:
            law.step()
        held = group(s)["lr"]
        last.step()
        if odd(s.loss_of(x, y)):
            group(s)["lr"] = held

    s.go(after=after)


@broken("settings", "hooks ghost", expect="unsupported")
def rate_put_back_by_the_loss_where_a_scheduler_moved_it(s):
    last_put_back(s, 0.9)


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def second_of_two_schedulers_put_back_by_the_loss(s):
    last_put_back(s, 0.99, 0.8)


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def warm_restart_where_the_loss_says(s):
    s.make()
    law = rates.CosineAnnealingWarmRestarts(s.inner, 10)

    def after(s, x, y):
        if odd(s.loss_of(x, y)):
            law.T_cur = -1
        law.step()

    s.go(after=after)


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def second_scheduler_stepped_by_the_loss_beside_one(s):
    s.make()
    law, other = rates.CosineAnnealingLR(s.inner, 30), rates.ExponentialLR(s.inner, 0.8)

    def after(s, x, y):
        if odd(s.loss_of(x, y)):
            other.step()
        law.step()

    s.go(after=after)


@broken("settings", "hooks ghost", expect="unsupported")
def momentum_by_the_loss_beside_a_cycle_of_momentum(s):
    s.make(opt=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    law = rates.OneCycleLR(s.inner, 0.2, total_steps=30)

    def after(s, x, y):
        law.step()
        group(s)["momentum"] = min(0.9, s.loss_of(x, y))

    s.go(after=after)


def moved_once(s, made, at=10, **options):
    """A function of a scheduler gives 1 until the loop has it give the loss."""
    s.make(**options)
    held = [1.0]
    law = made(s, lambda k: held[0])

    def after(s, x, y):
        if s.steps == at:
            held[0] = s.loss_of(*s.data.tensors)
        law.step()

    s.go(after=after, epochs=2 + at // 13, every="once")


@broken("settings", "hooks ghost", expect="unsupported")
def rate_moved_once_by_the_loss_in_a_function(s):
    moved_once(s, lambda s, function: rates.LambdaLR(s.inner, function))


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def noise_moved_once_by_the_loss_in_a_function(s):
    moved_once(s, lambda s, function: LambdaNoise(s.optimizer, noise_lambda=function))


@broken("settings", "hooks", expect="unsupported", rare=True)
def rate_moved_by_the_loss_where_functions_were_asked_ahead_again(s):
    moved_once(s, lambda s, function: rates.LambdaLR(s.inner, function), 512, noise=4.0)


@broken("settings", "hooks functorch", expect="unsupported", rare=True)
def chained_schedulers_stepped_where_the_loss_rose(s):
    s.make()
    law, last = rates.ChainedScheduler([rates.ExponentialLR(s.inner, 0.9)], s.inner), [9.0]

    def after(s, x, y):
        last.append(s.loss_of(x, y))
        if last[-1] > last[-2]:
            law.step()

    s.go(after=after)


@broken("settings", "hooks ghost", expect="unsupported", rare=True)
def factor_of_a_scheduler_by_the_loss_when_resumed(s):
    s.make()
    laws = [rates.ExponentialLR(s.inner, 0.99)]
    saved = None
    for _ in range(2):
        with s.recorded(resume_at=saved) as recorder:
            for x, y in s.batches(1):
                s.step(x, y)
                laws[-1].step()
            saved = recorder.state_dict()
        laws = [rates.ExponentialLR(s.inner, 1 - 0.1 * s.loss_of(*s.data.tensors))]


@broken("settings", "hooks functorch", expect="unsupported")
def clipping_norm_shared_among_layers_by_the_data(s):
    """All together stay what they were."""

    def share(s, x, y):
        if s.steps:
            each = [p.grad_sample.flatten(1).norm(dim=1).mean() for p in s.optimizer.params]
            lengths = torch.stack(each)
            s.optimizer.max_grad_norms = (lengths / lengths.norm()).tolist()

    s.train(between=share, clip=[0.5] * 4, clipping="per_layer", recorder={"every": "once"})


@dataclass(slots=True)
class Heat:
    heat: float = 1.0

    def now(self):
        return self.heat


class Heated(nn.Module):
    """Divides outputs by what an object says, which is no module, and has no __dict__."""

    def __init__(self, own, ask):
        super().__init__()
        self.net, self.own, self.ask = mlp(), own, ask

    def forward(self, x):
        return self.net(x) / self.ask(self.own)


def heated(s, own, ask, of):
    s.make(model=Heated(own, ask))
    heat = of(s.model._module.own)

    def after(s, x, y):
        heat.heat = 0.5 + s.loss_of(*s.data.tensors)

    s.go(after=after, every="once")


@broken("contribution", "hooks ghost", expect="unsupported")
def temperature_in_slots_moved_by_the_loss(s):
    heated(s, Heat(), lambda own: own.heat, lambda own: own)


@broken("contribution", "hooks ghost", expect="unsupported", rare=True)
def temperature_behind_a_method_moved_by_the_loss(s):
    heated(s, Heat().now, lambda own: own(), lambda own: own.__self__)


@broken("contribution", "hooks ghost", expect="unsupported", rare=True)
def temperature_in_a_partial_function_moved_by_the_loss(s):
    heated(s, partial(Heat.now, Heat()), lambda own: own(), lambda own: own.args[0])
