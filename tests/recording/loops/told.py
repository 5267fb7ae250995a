"""Loops that are sound, and that nobody can see to be so: they must be "declared", never "supported"."""

import copy
import math

import numpy as np
import torch
from opacus.layers import DPMultiheadAttention
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as rates
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset, default_collate

from recording.loops.harness import blobs, ce, mlp, normal, private_generator, told
from recording.loops.parts import (
    Attention,
    Bag,
    Hidden,
    Items,
    LowRank,
    Texts,
    train_ahead,
    trainable,
    with_dropout,
)
from recording.loops.sound_models import of_type


def by_hand(law):
    """A loop that sets the settings of the next step by a law that nobody was told."""
    return lambda s, x, y: [group.update(law(s.steps)) for group in s.optimizer.param_groups]


@told("settings", "hooks ghost")
def weight_decay_written_after_the_last_step(s):
    def write(s):
        s.inner.param_groups[0]["weight_decay"] = s.loss_of(*s.data.tensors)

    s.train(end=write)


@told("settings", "hooks ghost functorch ew")
def rate_by_hand(s):
    s.train(after=by_hand(lambda k: {"lr": 0.1 / (1 + k)}))


@told("settings", "hooks ghost", rare=True)
def rate_by_hand_once_an_epoch(s):
    s.train(after=by_hand(lambda k: {"lr": 0.1 * 0.5 ** (k // 13)}))


@told("settings", "hooks ghost", rare=True)
def cosine_by_hand(s):
    s.train(after=by_hand(lambda k: {"lr": 0.05 * (1 + math.cos(math.pi * (k % 10) / 10))}))


@told("settings", "hooks ghost", rare=True)
def weight_decay_by_hand(s):
    s.train(after=by_hand(lambda k: {"weight_decay": 1e-3 * k}))


@told("settings", "hooks functorch", rare=True)
def momentum_by_hand(s):
    s.train(
        opt=lambda p: torch.optim.SGD(p, 0.1, momentum=0.5),
        after=by_hand(lambda k: {"momentum": 0.5 + 0.01 * k}),
    )


@told("settings", "hooks ghost")
def rate_by_the_validation_loss(s):
    s.make()
    law = rates.ReduceLROnPlateau(s.optimizer, patience=0)
    s.go(after=lambda s, x, y: law.step(s.loss_of(normal(50, 6, seed=9), torch.arange(50) % 2)))


@told("settings", "hooks")
def noise_by_hand(s):
    def more(s, x, y):
        s.optimizer.noise_multiplier = 1 + 0.1 * (s.steps // 9)

    s.train(after=more)


@told("start contribution batch", "hooks functorch", expect="unsupported")
def normalised_in_the_loop(s):
    s.train(inputs=lambda x: (x - 0.1) / 2)


@told("start contribution batch", "hooks functorch", expect="unsupported", rare=True)
def noise_on_inputs_in_the_loop(s):
    s.train(inputs=lambda x: x + 0.1 * torch.randn_like(x))


@told("start contribution batch", "hooks functorch", expect="unsupported")
def labels_flipped_in_the_loop(s):
    s.make().go(rows=lambda x, y: (x, torch.where(torch.rand(len(y)) < 0.1, 1 - y, y)))


@told("start contribution batch", "hooks functorch", expect="unsupported")
def several_copies_averaged_before_clipping(s):
    def average(s, x, y):
        for p in s.model.parameters():
            p.grad_sample = p.grad_sample.view(2, -1, *p.shape).mean(0)

    def twice(x, y):
        return torch.cat([x, x + 0.01 * torch.randn_like(x)]), torch.cat([y, y])

    s.train(rows=twice, between=average)


@told("contribution", "hooks functorch")
def two_dropout_forwards_for_one_loss(s):
    s.make(model=with_dropout())
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            a, b = s.model(x), s.model(x)
            far = F.kl_div(a.log_softmax(1), b.softmax(1), reduction="none").sum(1)
            (ce(a, y) + ce(b, y) + far).mean().backward()
            s.optimizer.step()


@told("update", "hooks ghost")
def moving_average_written_at_the_end(s):
    s.make()
    both = [(p.detach().clone(), p.data) for p in s.model.parameters()]
    s.go(
        after=lambda *_: [mean.lerp_(p, 0.1) for mean, p in both],
        end=lambda *_: [p.copy_(mean) for mean, p in both],
    )


@told("update", "hooks ghost", rare=True)
def earlier_weights_loaded_again(s):
    kept = {}

    def keep(s, epoch):
        kept.update(copy.deepcopy(s.model.state_dict()))

    s.train(epoch=keep, end=lambda s: s.model.load_state_dict(kept))


@told("update", "hooks ghost functorch", expect="unsupported")
def weights_clamped_by_a_public_rule(s):
    def clamp(s, x, y):
        with torch.no_grad():
            for p in s.model.parameters():
                p.clamp_(-0.1, 0.1)  # so tight that it moves some weight

    s.train(after=clamp)


@told("update", "hooks ghost", rare=True)
def weights_rounded_at_the_end(s):
    def rounded(s):
        for p in s.model.parameters():
            p.data.copy_((p.data * 128).round() / 128)

    s.train(end=rounded)


@told("update", "hooks ghost", expect="unsupported", rare=True)
def weights_pruned_by_their_size(s):
    def prune(s, x, y):
        if s.steps == 13:
            p = s.model._module[0].weight
            p.data.mul_(p.abs() > p.abs().median())

    s.train(after=prune)


@told("update", "hooks functorch", rare=True)
def weights_limited_in_the_forward(s):
    class Limited(nn.Linear):
        def forward(self, x):
            self.weight.data.renorm_(2, 0, 0.5)
            return super().forward(x)

    s.train(model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Limited(8, 2)))


@told("update noise contribution", "hooks", expect="refused", rare=True)
def two_private_optimizers(s):
    s.make(opt=lambda p: torch.optim.SGD(list(p)[:2], lr=0.1), clip=0.7)
    head = torch.optim.Adam(s.model._module[2].parameters(), 0.01)
    other = DPOptimizer(
        head,
        noise_multiplier=1.0,
        max_grad_norm=0.7,
        expected_batch_size=s.optimizer.expected_batch_size,
        generator=private_generator(),
    )
    s.go(before=lambda *_: other.zero_grad(), after=lambda *_: other.step())


@told("batch settings", "hooks", expect="unsupported", rare=True)
def sampling_rate_raised_by_a_law(s):
    def more(s, epoch):
        s.loader.batch_sampler.sample_rate = 0.04 * (epoch + 1)
        s.optimizer.expected_batch_size = 16 * (epoch + 1)

    s.train(epoch=more)


@told("update", "hooks ghost", rare=True)
def adapter_merged_at_the_end(s):
    def merge(s):
        net = s.model._module
        with torch.no_grad():
            net.base.weight += net.up.weight @ net.down.weight
            net.up.weight.zero_()

    s.train(model=LowRank(), opt=trainable, end=merge)


@told("contribution", "hooks functorch")
def two_views_through_one_model(s):
    """Siamese: several forward passes of one model for one loss."""

    x, y = blobs().tensors

    def loss(out, y):
        return (out[:, 0] - out[:, 1]).square().sum(1) + ce(out[:, 0], y)

    s.make(TensorDataset(torch.stack([x, x + 0.1], 1), y))
    with s.recorded(loss):
        for v, y in s.batches():
            outputs = torch.stack([s.model(v[:, 0]), s.model(v[:, 1])], 1)
            s.step(None, y, loss, outputs=outputs)


@told("batch", "hooks ghost", expect="unsupported", rare=True)
def every_fifth_batch_only_looked_at(s):
    batches = enumerate(s.make().batches())
    s.go(batches=lambda: (batch for k, batch in batches if k % 5 < 4))


@told("contribution", "hooks ew", expect="unsupported")
def padding_index_where_opacus_trains_it(s):
    bag = Bag(lambda h, x: h.mean(1))
    bag.embed = nn.Embedding(20, 8, padding_idx=0)
    s.train(Texts(to=11), bag)


@told("contribution", "hooks ghost functorch", expect="refused")
def checkpoints_that_opacus_cannot_follow(s):
    class Checkpointed(Hidden):
        def forward(self, x):
            return self.b(checkpoint(lambda x: torch.tanh(self.a(x)), x, use_reentrant=False))

    s.train(model=Checkpointed(None))


@told("contribution", "hooks ghost", expect="refused", rare=True)
def pictures_with_channels_last_in_memory(s):
    class Permuted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

        def forward(self, x):
            return self.out(self.conv(x.permute(0, 3, 1, 2)).relu().mean((2, 3)))

    s.train(blobs(200, 8, 8, 3), Permuted())


class Lookahead(torch.optim.SGD):
    """Every fifth step goes half-way from the weights of five steps ago."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            state.setdefault("slow", p.detach().clone())
            if state["count"] % 5 == 0:
                state["slow"] += 0.5 * (p.detach() - state["slow"])
                p.data.copy_(state["slow"])


@told("update", "hooks ghost", expect="unsupported")
def optimizer_around_another(s):
    s.train(opt=lambda p: Lookahead(p, 0.1))


@told("contribution", "ghost", expect="unsupported", rare=True)
def clip_grad_norm_of_the_clipped_sum(s):
    s.train(between=lambda s, x, y: nn.utils.clip_grad_norm_(s.model.parameters(), 0.1))


@told("contribution", "hooks functorch", expect="refused")
def attention_of_opacus_at_one_length(s):
    """Its positions would be right; with texts of several lengths they would not, so it is refused."""
    s.train(Texts(to=11), Attention(DPMultiheadAttention(16, 2, batch_first=True)))


@told("noise", "hooks ghost")
def bfloat16_model(s):
    """Of noise in bfloat16 on a sum of 0, 29 % are values that it never gives on one of a half."""
    s.train(*of_type(torch.bfloat16))


@told("contribution", "hooks ghost", expect="refused")
def step_counter_outside_the_model(s):
    """Passes of the Recorder would move it."""
    passes = []

    def slower(h, x):
        passes.append(len(x))
        return h / (1 + 0.1 * len(passes))

    s.train(model=Hidden(slower))


@told("batch", "hooks ghost", expect="unsupported")
def loss_on_the_attached_loader_with_gradients_on(s):
    """Had the first batch been bad, the loop could have trained on the next pass instead."""
    s.make()
    with s.recorded():
        for _ in range(2):
            for x, y in s.loader:
                s.step(x, y)
            s.model.eval()
            for x, _ in s.loader:
                with torch.no_grad():
                    s.model(x)
            s.model.train()


@told("batch", "hooks", expect="unsupported", rare=True)
def iterator_with_workers_made_before_attaching(s):
    """Nobody knows the rows that workers had loaded ahead."""
    s.make(workers=1)
    batches = iter(s.loader)
    with s.recorded():
        for x, y in batches:
            s.step(x, y)


@told("contribution", "hooks functorch", rare=True)
def random_numbers_that_depend_on_the_row(s):
    s.train(model=Hidden(lambda h, x: h + 0.1 * torch.poisson(x.abs()).sum(1, keepdim=True)))


@told("contribution", "hooks ghost functorch", rare=True)
def slopes_drawn_for_negative_numbers_alone(s):
    s.train(model=nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 2)))


@told("contribution", "hooks ghost", rare=True)
def collate_function_that_draws_from_its_own_generator(s):
    own = np.random.default_rng()

    def collate(rows):
        x, y = default_collate(rows)
        return x + own.normal(size=x.shape).astype("f4"), y

    s.train(collate=collate)


@told("contribution", "hooks functorch ghost", expect="refused")
def a_forward_that_holds_the_model_itself(s):
    """As TRL's: copies of such a model run the model in training."""
    model = mlp()
    plain = model.forward
    model.forward = lambda x: plain(x)
    s.train(model=model)


@told("batch", "hooks ghost")
def seed_by_the_number_of_the_step(s):
    s.train(model=with_dropout(), before=lambda *_: torch.manual_seed(10**12 + s.steps))


@told("batch", "hooks ghost")
def loaded_ahead_from_the_generator_of_torch(s):
    """Comparisons put that generator back, from which the other thread draws batches meanwhile."""
    torch.seed()
    s.make(private=False)
    train_ahead(s)


@told("contribution", "hooks functorch", rare=True)
def weight_of_a_penalty_annealed_by_the_step(s):
    beta = [0.0]
    s.train(
        loss=lambda out, y: ce(out, y) + beta[0] * out.square().sum(1),
        after=lambda s, x, y: beta.__setitem__(0, s.steps / 1000),
        recorder={"every": "once"},
    )


@told("update", "hooks functorch", rare=True)
def teacher_in_the_model_that_follows_its_weights(s):
    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.teacher = mlp(), mlp().requires_grad_(False)

        def forward(self, x):
            return torch.stack([self.net(x), self.teacher(x)], 1)

    def loss(out, y):
        return ce(out[:, 0], y) + (out[:, 0] - out[:, 1]).square().sum(1)

    def follow(s, x, y):
        net, teacher = s.model._module.net, s.model._module.teacher
        for mine, theirs in zip(teacher.parameters(), net.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)

    s.train(model=Taught(), loss=loss, after=follow, opt=trainable, recorder={"every": "once"})


@told("update", "hooks ghost", rare=True)
def momentum_forgotten_each_epoch(s):
    own = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)  # noqa: E731
    s.train(opt=own, epoch=lambda s, epoch: s.inner.state.clear())


@told("update", "hooks ghost")
def momentum_forgotten_when_resumed(s):
    s.make(opt=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    s.resumed(lambda: s.inner.state.clear())


@told("contribution", "hooks ghost", rare=True)
def loss_changed_by_plan_when_resumed(s):
    weight = [1.0]
    s.make()
    s.resumed(lambda: weight.append(0.5), loss=lambda out, y: weight[-1] * ce(out, y))


@told("batch", "hooks ghost", rare=True)
def augmentation_stronger_by_the_epoch(s):
    (x, y), strength = blobs().tensors, [0.1]
    data = Items(lambda i: (x[i] + strength[0] * torch.randn(6), y[i]))
    s.train(data, epoch=lambda s, epoch: strength.__setitem__(0, 0.1 + 0.1 * epoch))


@told("noise", "hooks ghost", expect="unsupported", rare=True)
def public_gradient_added_after_the_noise(s):
    """The Recorder cannot know that it is public."""
    s.make()

    def add(*_):
        public = s.gradients(normal(50, 6, seed=4), torch.arange(50) % 2)
        for p, g in zip(s.optimizer.params, public, strict=True):
            p.grad += 0.1 * g

    s.inner.register_step_pre_hook(add)
    s.go()


@told("batch", "hooks ghost", expect="refused", rare=True)
def rows_left_out_by_the_collate_function(s):
    """As corrupt files are: an example without a gradient is harmless, but cannot be told from others."""
    s.train(collate=lambda rows: default_collate([row for row in rows if row[0][0] < 2]))


@told("settings", "hooks ghost")
def learning_rates_taken_from_an_iterator(s):
    """The Recorder must not ask for one: training would miss it, and end before its time."""
    rates = iter([0.9**k for k in range(60)])
    s.make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(s.inner, lambda _: next(rates))
    s.go(after=lambda s, x, y: scheduler.step())
    assert 0 < s.inner.param_groups[0]["lr"] == 0.1 * 0.9**s.steps


@told("batch", "hooks ghost", rare=True)
def half_precision_from_the_second_epoch_on(s):
    s.make()
    with s.recorded(autocast=True, every="once"):
        for x, y in s.batches():
            with torch.autocast("cpu", torch.bfloat16, enabled=s.steps > 12):
                outputs = s.model(x)
            s.step(None, y, outputs=outputs.float())


@told("settings", "hooks ghost", rare=True)
def rate_set_once_in_the_block(s):
    s.train(before=lambda s, x, y: s.steps or s.optimizer.param_groups[0].update(lr=0.05))
