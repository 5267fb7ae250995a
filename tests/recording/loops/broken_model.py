"""Broken loops: models in which one example meets the others, or those of earlier steps."""

import argparse

import numpy as np
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from recording.loops.harness import blobs, broken, ce, mlp, normal
from recording.loops.parts import (
    LM,
    Attention,
    Bag,
    Conditioned,
    Hidden,
    Kept,
    Texts,
    called,
    cnn,
    language,
    masked_mean,
    padded,
    pictures,
    token_losses,
    under_autocast,
)


def over_the_batch(h, x):
    return F.layer_norm(h.T, (len(h),)).T if len(h) > 1 else h


MIXING = {
    "mean": lambda h, x: h - 0.5 * h.mean(0, keepdim=True),
    "layer_norm": over_the_batch,
    "attention": lambda h, x: (h @ h.T).softmax(1) @ h,
    "norm": lambda h, x: h / (h.norm(dim=0, keepdim=True) + 1e-6),
    "variance": lambda h, x: h / (h.var(0, unbiased=False, keepdim=True) + 0.1),
    "largest": lambda h, x: h - h.detach().max(0).values if len(h) else h,
    "quantile": lambda h, x: h * (h >= h.detach().quantile(0.5, dim=0)) if len(h) else h,
    "cumulative_mean": lambda h, x: h.cumsum(0) / torch.arange(1, len(h) + 1)[:, None],
    "next_row": lambda h, x: h + 0.5 * h.roll(1, 0),
    "random_partner": lambda h, x: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
    "quantised_by_the_largest": lambda h, x: (
        h + ((7 * h / h.abs().max()).round() * h.abs().max() / 7 - h).detach() if len(h) else h
    ),
    "rank": lambda h, x: h + 0.1 * (x[:, :1].argsort(0).argsort(0) / max(1, len(x))),
}
for _name, _mix in MIXING.items():
    _rare = _name not in ("mean", "attention")

    @broken("contribution", "hooks ghost functorch", name=f"batch_{_name}", rare=_rare)
    def mixed(s, mix=_mix):
        s.train(model=Hidden(mix))

    _rare = _name not in ("mean", "attention", "random_partner")

    @broken(
        "contribution", "hooks ghost functorch", name=f"batch_{_name}_under_dropout", rare=_rare
    )
    def mixed_under_dropout(s, mix=_mix):
        s.train(model=Hidden(mix, dropout=0.1))


class Neighbours(Hidden):
    """Moves each row towards the nearest other one of those that it keeps."""

    def __init__(self, rows) -> None:
        super().__init__(lambda h, x: h)
        self.rows = rows

    def forward(self, x):
        nearest = torch.cdist(x, self.rows).topk(2, largest=False).indices[:, 1]
        return super().forward(x + self.rows[nearest])


@broken("contribution", "hooks ghost functorch ew")
def neighbours_in_an_attribute(s):
    s.train(model=Neighbours(blobs().tensors[0]))


@broken("contribution", "hooks ghost functorch", rare=True)
def neighbours_in_a_frozen_parameter(s):
    rows = nn.Parameter(blobs().tensors[0][::2].clone(), requires_grad=False)
    s.train(model=Neighbours(rows))


@broken("contribution", "hooks ghost functorch")
def rows_that_the_loss_reads(s):
    rows, labels = blobs().tensors

    def smoothed(outputs, y):
        return ce(outputs, y) + 0.1 * (outputs - rows[:5, :2].mean(0)).square().sum(1)

    s.train(loss=smoothed, data=TensorDataset(rows, labels))


@broken("contribution", "hooks ghost functorch", expect="unsupported")
def a_number_of_each_example_in_a_list(s):
    means = blobs().tensors[0].mean(1).tolist()

    def shifted(h, x):
        return h + torch.tensor(means)[(x[:, 0] * 100).long() % 400, None]

    s.train(model=Hidden(shifted))


def grown(h, x):
    """Scales the batch down where one row is large, as one of 400 is."""
    return h / (x.abs().max() / 3.7).clamp(min=1) ** 4 if len(x) else h


@broken("contribution", "hooks ghost functorch ew")
def scaled_by_outliers(s):
    s.train(model=Hidden(grown))


class Scaled(Hidden):
    def __init__(self) -> None:
        super().__init__(lambda h, x: h)

    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


@broken("contribution", "hooks ghost functorch", expect="unsupported")
def number_of_the_batch_as_an_argument(s):
    s.make(model=Scaled(), clip=0.1)
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y, outputs=s.model(x, float(1 + 5 * x.mean().abs())))


def hundredth(h, x):
    return h - 0.01 * h.mean(0, keepdim=True)


@broken("contribution", "hooks ghost functorch", rare=True)
def a_hundredth_of_the_batch_mean(s):
    s.train(model=Hidden(hundredth))


@broken("contribution", "hooks ghost functorch ew")
def a_hundredth_of_the_batch_mean_under_dropout(s):
    s.train(model=Hidden(hundredth, dropout=0.1))


@broken("contribution", "hooks", participation="known")
def attention_over_the_batch_with_known_participation(s):
    s.train(
        blobs(416),
        Hidden(MIXING["attention"], dropout=0.1),
        poisson=False,
        noise=3.0,
        recorder={"every": "once", "batch_norms": True},
    )


@broken("contribution", "hooks ghost", rare=True)
def mixing_recorded_once(s):
    s.train(model=Hidden(MIXING["mean"], dropout=0.1), recorder={"every": "once"})


@broken("contribution", "hooks ghost")
def mixing_in_micro_batches(s):
    s.train(model=Hidden(MIXING["mean"], dropout=0.1), micro=13)


@broken("contribution", "hooks functorch")
def mixing_from_the_tenth_step_on(s):
    def late(net, x, outputs):
        return outputs - 0.5 * outputs.mean(0) * (net.calls > 10)

    s.train(model=Kept(late))


@broken("contribution", "hooks ghost functorch")
def little_mixing_from_the_tenth_step_on_under_autocast(s):
    """Less than half precision rounds."""

    def late(net, x, outputs):
        return outputs - 0.05 * outputs.mean(0) * (net.calls > 10)

    under_autocast(s, model=Kept(late))


@broken("contribution", "hooks ghost functorch")
def length_of_the_padding_in_a_factor_under_autocast(s):
    def pool(h, x):
        return masked_mean(h, x) * (1 - 0.005 * x.shape[1])

    under_autocast(s, Texts(), Bag(pool), collate=padded)


@broken("contribution", "hooks ghost functorch ew", rare=True)
def mixing_in_training_mode_only(s):
    class Centred(nn.Module):
        def forward(self, h):
            return h - 0.5 * h.mean(0) if self.training else h

    s.train(model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Centred(), nn.Linear(8, 2)))


@broken("contribution", "hooks ghost", rare=True)
def mixing_of_pictures(s):
    class Centred(nn.Module):
        def forward(self, h):
            return h - 0.3 * h.mean(0, keepdim=True)

    s.train(pictures(), cnn(Centred, dropout=0.1))


@broken("contribution update", "hooks")
def batch_norm_by_hand(s):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, h):
            if self.training and len(h):
                mean = h.mean((0, 2, 3))
                self.mean = 0.9 * self.mean + 0.1 * mean.detach()
                return h - mean[None, :, None, None]
            return h - self.mean[None, :, None, None]

    s.train(pictures(), cnn(Norm))


@broken("contribution update", "hooks ghost", expect="unsupported")
def running_mean_in_a_buffer(s):
    def running(net, x, outputs):
        if net.training and torch.is_grad_enabled() and len(x):
            net.kept[0] = 0.9 * net.kept[0] + 0.1 * x.detach().mean(0)
        return outputs + 0.1 * (x @ net.kept[0])[:, None]

    s.train(model=Kept(running))


@broken("update", "hooks ghost", expect="unsupported")
def buffer_written_in_the_forward_and_never_read(s):
    def keep(net, x, outputs):
        if net.training and torch.is_grad_enabled() and len(x):
            net.kept.copy_(x.detach()[:2].mean(0).expand(2, 6))
        return outputs

    s.train(model=Kept(keep))


def remember(net, x, outputs):
    if net.memory:
        outputs = outputs + 0.1 * torch.stack(net.memory[-5:]).mean(0)[:2]
    if len(x):
        net.memory.append(x.detach()[0])
    return outputs


@broken("contribution", "hooks ghost functorch", expect="refused")
def memory_in_a_list(s):
    s.train(model=Kept(remember))


@broken("contribution", "hooks ghost", expect="refused", rare=True)
def memory_in_a_list_under_dropout(s):
    model = Kept(remember)
    model.body.append(nn.Dropout(0.1))
    s.train(model=model)


@broken("contribution", "hooks ghost", expect="refused")
def memory_outside_the_model(s):
    kept = [torch.zeros(8)]

    def last(h, x):
        before = kept[-1]
        kept[:] = [*kept, h.detach().mean(0)][-1:]
        return h + 0.5 * before

    s.train(model=Hidden(last))


@broken("contribution", "hooks ghost functorch", expect="unsupported")
def generator_seeded_by_the_batch(s):
    generator = torch.Generator()

    def noise(h, x):
        generator.manual_seed(int(1000 * x.sum()) % 2**31)
        return h + 0.3 * torch.randn(h.shape, generator=generator)

    s.train(model=Hidden(noise))


@broken("contribution", "hooks functorch", rare=True)
def memory_used_after_many_steps(s):
    def late(net, x, outputs):
        if net.calls > 15:
            return remember(net, x, outputs)
        net.memory.append(x.detach()[0])
        return outputs

    s.train(model=Kept(late))


@broken("contribution", "hooks functorch", expect="refused", rare=True)
def memory_in_a_plain_attribute(s):
    def last(net, x, outputs):
        before = getattr(net, "last", torch.zeros(6))
        if len(x):
            net.last = x.detach().mean(0)
        return outputs + 0.1 * (x @ before)[:, None]

    s.train(model=Kept(last))


@broken("update", "hooks functorch", expect="unsupported")
def weights_written_in_the_forward(s):
    def prototypes(net, x, outputs):
        if net.training and torch.is_grad_enabled() and len(x):
            net.head.bias.data.add_(0.01 * x.detach().mean())
        return outputs

    s.train(model=Kept(prototypes))


@broken("update start", "hooks ghost", expect="unsupported")
def initialised_by_the_first_batch(s):
    def normalise(net, x, outputs):
        if net.calls == 1 and len(x):
            net.head.bias.data.copy_(-outputs.detach().mean(0))
        return outputs

    s.train(model=Kept(normalise))


@broken("update", "hooks", expect="refused")
def embeddings_renormed_where_they_are_read(s):
    bag = Bag()
    bag.embed = nn.Embedding(20, 8, max_norm=0.5)
    s.train(Texts(), bag, collate=padded)


@broken("contribution", "hooks ghost functorch")
def padding_in_the_mean(s):
    s.train(Texts(), Bag(lambda h, x: h.mean(1)), collate=padded)


@broken("contribution", "hooks functorch", rare=True)
def padding_in_the_mean_without_dropout(s):
    s.train(Texts(), Bag(lambda h, x: h.mean(1), dropout=0.0), collate=padded)


@broken("contribution", "hooks ghost", rare=True)
def last_position_of_the_padded_text(s):
    def last(h, x):
        return h.cumsum(1)[:, -1] / 10

    s.train(Texts(), Bag(last), collate=padded)


@broken("contribution", "hooks ghost", rare=True)
def divided_by_the_padded_length(s):
    def pool(h, x):
        return (h * (x != 0).unsqueeze(-1)).sum(1) / max(1, x.shape[1])

    s.train(Texts(), Bag(pool), collate=padded)


@broken("contribution", "hooks ghost", rare=True)
def positions_from_the_end(s):
    def pool(h, x):
        places = torch.arange(x.shape[1], 0, -1)[None, :, None]
        return (h * (x != 0).unsqueeze(-1) / places).sum(1)

    s.train(Texts(), Bag(pool), collate=padded)


@broken("contribution", "hooks functorch")
def attention_to_padding(s):
    class Unmasked(Attention):
        def forward(self, x):
            h = self.embed(x)
            q, k, v = self.qkv(h).chunk(3, dim=-1)
            return self.out(F.scaled_dot_product_attention(q, k, v).mean(1))

    s.train(Texts(), Unmasked(), collate=padded)


@broken("contribution", "hooks functorch")
def attention_of_opacus_batch_first_on_padded_texts(s):
    s.train(Texts(), Attention(DPMultiheadAttention(16, 2, batch_first=True)), collate=padded)


@broken("contribution", "hooks functorch")
def attention_over_the_wrong_dimension(s):
    """Sequence first where the batch is first: each word attends to the same word of other texts."""

    class Across(Attention):
        def forward(self, x):
            h = self.embed(x)
            a = self.attention(h, h, h, need_weights=False)[0]
            return self.out(masked_mean(self.drop(h + a), x))

    s.train(Texts(to=11), Across(DPMultiheadAttention(16, 2, batch_first=False)))


@broken("contribution", "hooks", expect="refused")
def recurrence_over_packed_texts(s):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 2)
            self.layer = DPLSTM(8, 8, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(x),
                (x != 0).sum(1).clamp(min=1),
                batch_first=True,
                enforce_sorted=False,
            )
            return self.out(self.layer(packed)[1][0][-1])

    s.train(Texts(), Packed(), collate=padded)


@broken("contribution", "hooks ghost functorch")
def outputs_scaled_by_the_batch_size(s):
    s.train(model=Hidden(lambda h, x: h * len(x) / 32))


@broken("contribution", "hooks functorch", rare=True)
def positions_indexed_by_the_batch_size(s):
    table = torch.linspace(0.5, 1.5, 100)
    s.train(model=Hidden(lambda h, x: h * table[len(x)]))


@broken("contribution", "hooks ghost functorch")
def position_in_the_batch(s):
    s.train(model=Hidden(lambda h, x: h * torch.linspace(0.5, 1.5, len(x))[:, None]))


@broken("contribution", "hooks functorch")
def experts_with_a_capacity(s):
    def capacity(h, x):
        chosen = F.one_hot(h.argmax(1), 8)
        return h * (chosen.cumsum(0) * chosen).sum(1, keepdim=True).le(4)

    s.train(model=Hidden(capacity))


@broken("contribution", "hooks functorch", rare=True)
def experts_balanced_over_the_batch(s):
    class Balanced(Hidden):
        def forward(self, x):
            h = torch.tanh(self.a(x))
            gates = h.softmax(1)
            load = (gates >= gates.max(1, keepdim=True).values).float().mean(0) * gates.mean(0)
            return self.b(h), load.sum() * 8

    def loss(out, y):
        return F.cross_entropy(out[0], y, reduction="none") + 0.1 * out[1]

    s.train(model=Balanced(None), loss=loss)


@broken("contribution", "hooks ghost", rare=True)
def codebook_updated_in_the_forward(s):
    def nearest(net, x, outputs):
        code = (x[:, None] - net.kept).square().sum(2).argmin(1)
        if net.training and torch.is_grad_enabled():
            for c in (0, 1):
                if (code == c).any():
                    net.kept[c] = 0.9 * net.kept[c] + 0.1 * x.detach()[code == c].mean(0)
        return outputs + 0.1 * net.kept[code][:, :2]

    s.train(model=Kept(nearest))


@broken("contribution", "hooks functorch", rare=True)
def channels_shared_between_examples(s):
    """Shifted to the next picture where time was meant (a wrong reshape)."""

    def shift(h, x):
        return torch.cat([h[:, :4], h[:, 4:].roll(1, 0)], 1)

    s.train(model=Hidden(shift, dropout=0.1))


@broken("contribution", "hooks functorch", rare=True)
def reshape_that_swaps_batch_and_features(s):
    s.train(model=Hidden(lambda h, x: h + 0.3 * h.T.reshape(h.shape), dropout=0.1))


def mixed_on_the_way_back(h, x):
    if h.requires_grad:
        h.register_hook(lambda g: g - g.mean(0))
    return h


@broken("contribution", "hooks ghost", rare=True)
def gradients_mixed_on_the_way_back(s):
    """Outputs are of one row each; a hook takes the batch's mean off the gradients."""
    s.train(model=Hidden(mixed_on_the_way_back))


@broken("contribution", "hooks ghost")
def gradients_mixed_on_the_way_back_under_dropout(s):
    s.train(model=Hidden(mixed_on_the_way_back, dropout=0.1))


def read_later(where):
    """Something that the loop sets by the loss of the batch, and the next forward pass reads."""

    class Read(Hidden):
        def __init__(self) -> None:
            super().__init__(lambda h, x: h * where.read(self), dropout=0.1)
            where.put(self, 1.0)

    def loop(s):
        s.train(
            model=Read(),
            after=lambda s, x, y: where.put(s.model._module, 1 + float(s.loss_of(x, y))),
        )

    return loop


class Place:
    def __init__(self, read, put) -> None:
        self.read, self.put = read, put


PLACES = {
    "private_attribute": Place(lambda m: m._factor, lambda m, v: setattr(m, "_factor", v)),
    "arguments_of_the_script": Place(
        lambda m: m.args.factor, lambda m, v: setattr(m, "args", argparse.Namespace(factor=v))
    ),
    "dictionary": Place(lambda m: m.cfg["factor"], lambda m, v: setattr(m, "cfg", {"factor": v})),
    "array": Place(
        lambda m: float(m.means[0]), lambda m, v: setattr(m, "means", np.array([v, 0.0]))
    ),
    "list_of_layers": Place(
        lambda m: m.extra[0].bias.detach()[0],
        lambda m, v: setattr(m, "extra", [filled(nn.Linear(1, 1), v)]),
    ),
}


def filled(layer, value):
    nn.init.constant_(layer.bias, value)
    return layer


for _name, _place in PLACES.items():
    broken(
        "contribution",
        "hooks ghost functorch",
        expect="unsupported",
        name=f"loss_read_from_a_{_name}",
        rare=_name not in ("private_attribute", "dictionary"),
    )(read_later(_place))


@broken("contribution", "hooks ghost", expect="unsupported")
def mean_kept_by_an_evaluation(s):
    class Centred(Hidden):
        mean = 0.0

        def forward(self, x):
            if not self.training:
                self.mean = 3 * x.mean(0)
            return super().forward(x - self.mean)

    def evaluate(s, x, y):
        s.model.eval()
        with torch.no_grad():
            s.model(s.data.tensors[0][:100])
        s.model.train()

    s.train(model=Centred(lambda h, x: h, dropout=0.1), after=evaluate)


class Counter(nn.Module):
    """Adds `count(x)` up in a buffer, which is published."""

    def __init__(self, count):
        super().__init__()
        self.net, self.count = mlp(), count
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.seen += self.count(x)
        return self.net(x)


@broken("contribution", "hooks ghost functorch")
def examples_counted_in_a_buffer(s):
    """The number of examples of each batch is a coin of everybody's."""
    s.train(model=Counter(len))


@broken("update", "hooks ghost", expect="unsupported")
def passes_over_micro_batches_counted_in_a_buffer(s):
    s.train(model=Counter(lambda x: 1), micro=8)


@broken("contribution", "hooks functorch", rare=True)
def running_mean_of_the_sizes_of_batches(s):
    class Mean(Hidden):
        size = 32.0

        def forward(self, x):
            self.size = 0.9 * self.size + 0.1 * len(x)
            return super().forward(x) * (32 / self.size) ** 0.5

    s.train(model=Mean(lambda h, x: h))


class Stateful(nn.Module):
    """Takes hidden values of the step before."""

    def __init__(self):
        super().__init__()
        self.a, self.h, self.b = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.last = None

    def forward(self, x, hidden):
        self.last = torch.tanh(self.a(x) + self.h(hidden))
        return self.b(self.last)


@broken("batch contribution", "hooks functorch", expect="unsupported", rare=True)
def hidden_state_carried_over_from_the_last_batch(s):
    x, y = blobs().tensors
    s.make(TensorDataset(x, torch.zeros(400, 8), y), Stateful())
    hidden = torch.zeros(80, 8)
    with s.recorded(unpack=lambda batch: (batch[:2], batch[2])):
        for x, _, y in s.batches():
            s.step(None, y, outputs=s.model(x, hidden[: len(x)]))
            last = s.model._module.last.detach()
            hidden[: len(last)] = last


@broken("contribution", "hooks ghost functorch", expect="refused", rare=True)
def head_that_reads_the_embedding_table(s):
    """Ghost mode's norms leave the head out, whose gradient reaches the sum."""

    class Tied(LM):
        def forward(self, x):
            return F.linear(torch.tanh(self.hidden(self.embed(x))), self.embed.weight)

    model = Tied()
    del model.out
    s.train(language(), model, loss=token_losses)


@broken("contribution", "hooks functorch", expect="unsupported", rare=True)
def rows_sorted_inside_the_model(s):
    """Layers then see the rows in different orders."""

    class Sorted(Hidden):
        def forward(self, x):
            order = x[:, 0].argsort()
            return self.b(torch.tanh(self.a(x[order]))[order.argsort()])

    s.train(model=Sorted(None))


@broken("contribution", "hooks functorch", expect="unsupported")
def temperature_calibrated_on_the_first_batch(s):
    class Heated(Hidden):
        heat = 1.0

        def forward(self, x):
            return super().forward(x) / self.heat

    def calibrate(s, x, y):
        if not s.steps:
            s.model._module.heat = 1.5 + s.loss_of(x, y)

    s.train(model=Heated(lambda h, x: h), before=calibrate, recorder={"every": "once"})


@broken("batch contribution", "hooks ghost", expect="unsupported")
def arguments_exchanged_by_the_labels(s):
    def outputs_of(model, x, condition, step, y):
        return model(x, condition) if y.sum() % 2 else model(condition, x)

    called(s, outputs_of)


@broken("batch contribution", "hooks functorch", expect="unsupported")
def condition_left_out_by_the_labels(s):
    def outputs_of(model, x, condition, step, y):
        return model(x, condition) if step < 3 or y.sum() % 2 else model(x)

    called(s, outputs_of)


class OfEntries(Conditioned):
    def forward(self, batch):
        return super().forward(batch["x"], batch.get("condition"))


@broken("batch contribution", "hooks functorch", expect="unsupported")
def entry_left_out_by_the_labels(s):
    x, y = blobs().tensors
    inputs = lambda x, c: {"x": x, "condition": c}  # noqa: E731
    s.make(TensorDataset(x, normal(400, 6, seed=8), y), OfEntries())
    with s.recorded(unpack=lambda batch: (inputs(*batch[:2]), batch[2]), every="once"):
        for x, condition, y in s.batches():
            given = inputs(x, condition) if s.steps < 3 or y.sum() % 2 else {"x": x}
            s.step(None, y, outputs=s.model(given))


@broken("batch contribution", "hooks functorch", expect="unsupported", rare=True)
def one_argument_for_another_by_the_labels(s):
    def outputs_of(model, x, condition, step, y):
        return model(x, condition) if step < 3 or y.sum() % 2 else model(x, x)

    called(s, outputs_of)


@broken("batch contribution", "hooks ghost", expect="unsupported")
def precision_by_the_labels(s):
    s.make(clip=0.3)
    with s.recorded(autocast=True, every="once"):
        for x, y in s.batches():
            half = bool(s.steps < 3 or y.sum() % 2)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                outputs = s.model(x)
            s.step(None, y, outputs=outputs.float())
