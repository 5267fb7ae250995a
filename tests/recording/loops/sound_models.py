"""Sound loops: models, precision and outputs."""

from dataclasses import dataclass

import numpy as np
import torch
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from recording.loops.harness import blobs, ce, mlp, normal, private_generator, sound
from recording.loops.parts import (
    LM,
    Attention,
    Bag,
    Hidden,
    Items,
    LowRank,
    Texts,
    called,
    cnn,
    language,
    masked_mean,
    padded,
    pictures,
    token_losses,
    trainable,
    under_autocast,
    with_dropout,
)

ALL = "hooks ghost functorch ew"


@sound(ALL)
def dropout(s):
    s.train(model=with_dropout())


@sound(ALL)
def convolution_group_norm_dropout(s):
    s.train(pictures(), cnn(dropout=0.2))


class Rounded(nn.Module):
    """Turns gradients, not values, as where rounding, which varies with n, opens or closes ReLUs."""

    def __init__(self, longer=0.0, most=1.0):
        super().__init__()
        self.by = 0.01 * (torch.ones(8, 8).triu(1) - torch.ones(8, 8).tril(-1))
        self.by += longer * torch.eye(8)
        self.most = most

    def forward(self, h):
        is_open = 2e-7 < len(h) * torch.finfo(h.dtype).eps < self.most
        turned = h @ torch.matrix_exp(is_open * self.by).to(h)
        return turned + (h - turned).detach()


@sound("hooks ghost")
def relus_near_their_kinks(s):
    s.train(model=nn.Sequential(nn.Linear(6, 8), Rounded(), nn.Linear(8, 2)))


@sound("hooks ghost functorch", rare=True)
def relus_that_change_norms_of_the_few_rows_that_are_checked_first(s):
    s.train(model=nn.Sequential(nn.Linear(6, 8), Rounded(-0.05, 1.5e-6), nn.Linear(8, 2)))


@sound("hooks ghost functorch", rare=True)
def instance_norm(s):
    s.train(pictures(), cnn(lambda: nn.InstanceNorm2d(8, affine=True)))


@sound("hooks ghost functorch ew", rare=True)
def layer_norm(s):
    s.train(model=nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)))


@sound("hooks ghost", rare=True)
def batch_norm_frozen_in_evaluation_mode(s):
    norm = nn.BatchNorm2d(8).eval().requires_grad_(False)
    norm.train = lambda mode=True: norm
    s.train(pictures(), cnn(lambda: norm), opt=trainable)


class LastWord(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(20, 8), layer, nn.Linear(8, 2)

    def forward(self, x):
        h = self.layer(self.embed(x))[0]
        return self.out(h[torch.arange(len(x)), (x != 0).sum(1).clamp(min=1) - 1])


@sound("hooks")
def recurrent_over_padded_texts(s):
    s.train(Texts(), LastWord(DPLSTM(8, 8, batch_first=True)), collate=padded, epochs=1)


@sound("hooks", rare=True)
def gated_recurrent_with_dropout(s):
    model = LastWord(nn.Sequential(DPGRU(8, 8, batch_first=True)))
    s.train(Texts(to=11), model, epochs=1)


@sound("hooks ghost functorch")
def masked_mean_of_lengths(s):
    s.train(Texts(), Bag(), collate=padded)


@sound("hooks functorch")
def own_attention_with_a_mask(s):
    s.train(Texts(), Attention(), collate=padded)


@sound("hooks functorch", rare=True)
def attention_of_opacus_with_one_head(s):
    s.train(Texts(), Attention(DPMultiheadAttention(16, 1, batch_first=True)), collate=padded)


@sound("hooks ghost functorch", rare=True)
def unmasked_mean_at_one_length(s):
    s.train(Texts(to=11), Bag(lambda h, x: h.mean(1)))


@sound("hooks functorch")
def language_model_with_tied_weights(s):
    s.train(language(), LM(tied=True), loss=token_losses)


@sound("hooks ghost functorch", rare=True)
def language_model(s):
    s.train(language(), LM(), loss=token_losses)


@sound("hooks ghost functorch", rare=True)
def learned_positions(s):
    class Positions(Bag):
        def __init__(self):
            super().__init__()
            self.position = nn.Embedding(11, 8)

        def forward(self, x):
            places = torch.arange(x.shape[1]).repeat(len(x), 1)
            h = self.embed(x) + self.position(places)
            return self.out(masked_mean(self.drop(h), x))

    s.train(Texts(), Positions(), collate=padded)


def autocast(s, around_loss):
    s.make(pictures(), cnn(dropout=0.2))
    with s.recorded(autocast=True):
        for x, y in s.batches():
            s.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = s.model(x)
                if around_loss:
                    loss = s.criterion(outputs, y) if s.criterion else ce(outputs, y).mean()
            if around_loss:
                loss.backward()
            else:
                s.backward(outputs.float(), y)
            s.optimizer.step()


@sound("hooks ghost functorch")
def autocast_of_forward_and_loss(s):
    autocast(s, around_loss=True)


@sound("hooks functorch")
def autocast_of_the_forward_alone(s):
    autocast(s, around_loss=False)


@sound("hooks ghost functorch")
def padded_texts_under_autocast(s):
    under_autocast(s, Texts(), Bag(), collate=padded)


@sound("hooks ghost functorch")
def sure_predictions_under_autocast(s):
    """Of losses near 0, arithmetic in bfloat16 leaves no digit."""
    x, y = blobs().tensors
    x[:, 0] += 4.0 * y - 2
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(300):
        optimizer.zero_grad()
        ce(model(x), y).mean().backward()
        optimizer.step()
    under_autocast(s, TensorDataset(x, y), model)


def of_type(kind):
    x, y = blobs().tensors
    return TensorDataset(x.to(kind), y), mlp().to(kind)


@sound(ALL)
def float64_model(s):
    s.train(*of_type(torch.float64))


@sound("hooks ghost functorch")
def reentrant_checkpoints(s):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
            self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))

        def forward(self, x):
            return self.b(checkpoint(self.middle, torch.tanh(self.a(x)), use_reentrant=True))

    s.train(model=Checkpointed())


@dataclass
class Outputs:
    logits: torch.Tensor
    aux: torch.Tensor


class Auxiliary(nn.Module):
    def __init__(self, pack):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 1)
        self.pack = pack

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.pack(self.b(h), self.c(h), h)


def auxiliary_loss(logits, aux, y):
    return ce(logits, y) + 0.1 * (aux[:, 0] - y.float()).square()


@sound("hooks ghost functorch")
def outputs_in_a_dict(s):
    model = Auxiliary(lambda o, a, h: {"logits": o, "aux": a, "hidden": h.detach(), "kind": "x"})
    s.train(model=model, loss=lambda out, y: auxiliary_loss(out["logits"], out["aux"], y))


@sound("hooks ghost")
def outputs_in_a_tuple_with_hidden_values(s):
    model = Auxiliary(lambda o, a, h: (o, [a, h]))
    s.train(model=model, loss=lambda out, y: auxiliary_loss(out[0], out[1][0], y))


@sound("hooks functorch", rare=True)
def outputs_in_a_dataclass(s):
    model = Auxiliary(lambda o, a, h: Outputs(o, a))
    s.train(model=model, loss=lambda out, y: auxiliary_loss(out.logits, out.aux, y))


@sound("hooks ghost", rare=True)
def penalty_on_hidden_values(s):
    model = Auxiliary(lambda o, a, h: (o, torch.cat([a, h], 1)))
    s.train(model=model, loss=lambda out, y: ce(out[0], y) + 0.1 * out[1].square().mean(1))


@sound("hooks ghost functorch")
def frozen_first_layer(s):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    s.train(model=model, opt=trainable)


@sound("hooks functorch", rare=True)
def frozen_layer_in_the_optimizer(s):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    s.train(model=model, opt=lambda p: torch.optim.AdamW(p, 0.01))


@sound("hooks functorch", rare=True)
def frozen_body_in_evaluation_mode(s):
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5)).requires_grad_(False)
    s.make(model=nn.Sequential(body, nn.Linear(8, 2)), opt=trainable)
    s.model.train()
    s.model._module[0].eval()
    s.go()


@sound("hooks ghost functorch")
def low_rank_adapter_by_hand(s):
    s.train(model=LowRank(), opt=trainable)


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(), mlp().requires_grad_(False)

    def forward(self, x):
        return self.student(x), self.teacher(x).detach()


@sound("hooks ghost functorch")
def distillation_from_a_public_teacher(s):
    def loss(out, y):
        student, teacher = out[0].log_softmax(1), out[1].softmax(1)
        return ce(out[0], y) + F.kl_div(student, teacher, reduction="none").sum(1)

    s.train(model=Distilled(), loss=loss, opt=trainable)


def coins(*shape):
    return (torch.rand(*shape) > 0.3).float()


@sound("hooks ghost functorch")
def stochastic_depth(s):
    s.train(model=Hidden(lambda h, x: h * coins(len(x), 1)))


@sound("hooks ghost", rare=True)
def stochastic_depth_of_the_whole_batch(s):
    s.train(model=Hidden(lambda h, x: h * coins(1)))


@sound("hooks ghost functorch", rare=True)
def noise_on_hidden_values(s):
    s.train(model=Hidden(lambda h, x: h + 0.1 * torch.randn_like(h)))


@sound("hooks ghost functorch")
def noise_on_inputs_from_a_generator_of_its_own(s):
    generator = torch.Generator().manual_seed(3)
    s.train(model=Hidden(lambda h, x: h + 0.1 * torch.randn(h.shape, generator=generator)))


class Noisy(nn.Module):
    def __init__(self, generator, noise):
        super().__init__()
        self.body, self.generator, self.noise = mlp(), generator, noise

    def forward(self, x):
        return self.body(x + 0.1 * self.noise(self.generator, x.shape)) if self.training else x


@sound("hooks ghost functorch", rare=True)
def generator_in_an_attribute(s):
    s.train(model=Noisy(private_generator(), lambda g, shape: torch.randn(shape, generator=g)))


@sound("hooks ghost functorch", rare=True)
def generator_of_numpy_in_an_attribute(s):
    def noise(generator, shape):
        return torch.as_tensor(generator.standard_normal(tuple(shape)), dtype=torch.float32)

    s.train(model=Noisy(np.random.default_rng(3), noise))


class Counting(nn.Module):
    """Its outputs shrink with the number of passes."""

    def __init__(self, count):
        super().__init__()
        self.body = mlp()
        if isinstance(count, int):
            self.count = count
        else:
            self.register_buffer("count", count)

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.count += 1
        return self.body(x) / (1 + 0.1 * self.count)


@sound("hooks ghost functorch")
def step_counter_in_a_buffer(s):
    s.train(model=Counting(torch.zeros((), dtype=torch.long)))


@sound("hooks ghost functorch", rare=True)
def step_counter_in_an_attribute(s):
    s.train(model=Counting(0))


@sound("hooks ghost functorch", rare=True)
def gate_by_the_row_itself(s):
    s.train(model=Hidden(lambda h, x: h * (x[:, :1] > 0)))


class Experts(nn.Module):
    """Each token (batch, tokens, 6) goes to the expert of its largest gate."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(6, 3), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(3))

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 3) * gates
        h = sum(chosen[..., k, None] * expert(x) for k, expert in enumerate(self.experts))
        return self.out(torch.tanh(h)).mean(1)


@sound("hooks ghost functorch")
def experts_chosen_by_each_token(s):
    s.train(blobs(400, 4, 6), Experts())


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, z):
        return self.body(torch.view_as_real(torch.fft.fft(z)).flatten(1))


@sound("hooks ghost functorch")
def complex_inputs(s):
    x, y = blobs().tensors
    s.train(TensorDataset(torch.complex(x, x.flip(1)), y), Spectrum())


@sound("hooks ghost functorch", rare=True)
def fake_quantisation_with_a_fixed_scale(s):
    s.train(model=Hidden(lambda h, x: h + ((h * 7).round() / 7 - h).detach()))


@sound("hooks ghost functorch ew")
def public_tables_in_buffer_attribute_and_closure(s):
    directions, waves = normal(16, 6, seed=9), normal(50, 8, seed=10)
    model = Hidden(lambda h, x: h + 0.1 * waves[(x[:, 0].abs() * 10).long().clamp(max=49)])
    model.a = nn.Sequential(nn.Linear(6, 8))
    model.register_buffer("directions", directions)
    model.more = normal(8, seed=11)
    plain = model.between
    model.between = lambda h, x: plain(h, x) + (x @ directions[:8].T).sin() + normal(8, seed=11)
    s.train(model=model)


@sound("hooks ghost functorch")
def number_that_stays_as_an_argument(s):
    class Scaled(Hidden):
        def forward(self, x, scale=1.0, flags=()):
            return super().forward(x) * scale

    s.make(model=Scaled(lambda h, x: h))
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y, outputs=s.model(x, scale=1.0, flags=("a", 3)))


class OwnScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, h):
        return h * self.factor


@sound("hooks functorch", rare=True)
def layer_of_the_users_own(s):
    s.train(model=nn.Sequential(nn.Linear(6, 8), OwnScale(), nn.Tanh(), nn.Linear(8, 2)))


@sound("functorch", rare=True)
def weight_norm(s):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    s.train(model=nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 2)))


@sound("hooks ghost functorch", rare=True)
def softmax_over_classes_and_top_k_of_a_row(s):
    s.train(model=Hidden(lambda h, x: h * (h >= h.topk(4, dim=1).values[:, -1:])))


@sound("hooks functorch", rare=True)
def input_written_in_place_by_a_copy(s):
    s.train(model=Hidden(lambda h, x: h.clone().mul_(2).add_(normal(8))))


@sound("ghost functorch")
def padding_index_of_an_embedding(s):
    bag = Bag(lambda h, x: h.mean(1))
    bag.embed = nn.Embedding(20, 8, padding_idx=0)
    s.train(Texts(to=11), bag)


@sound("hooks ghost functorch")
def features_kept_with_their_graph(s):
    def kept(h, x):
        model.features = [h, {"rows": h * 2}]
        return h

    model = Hidden(kept)
    s.train(model=model)


@sound("hooks ghost functorch")
def numbers_for_the_log_in_attributes(s):
    def note(s, x, y):
        s.model._module.last_loss = s.loss_of(x, y)
        s.model._module.history = [*getattr(s.model._module, "history", []), x.mean(0)]

    s.train(model=Hidden(lambda h, x: h, dropout=0.1), after=note)


@sound("hooks ghost")
def draws_of_many_laws(s):
    def noisy(h, x):
        gumbel = nn.functional.gumbel_softmax(h, tau=1.0)
        return h * gumbel + torch.empty_like(h).exponential_().detach() * 0.1

    s.train(model=Hidden(noisy))


@sound("hooks functorch")
def outputs_in_a_dict_of_its_own_class(s):
    class Outputs(dict):
        pass

    model = Auxiliary(lambda o, a, h: Outputs(logits=o, aux=a))
    s.train(model=model, loss=lambda out, y: auxiliary_loss(out["logits"], out["aux"], y))


@sound("hooks ghost functorch")
def frozen_table_with_as_many_rows_as_examples(s):
    class RandomFeatures(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(400, 6), requires_grad=False)
            self.out = nn.Linear(400, 2)

        def forward(self, x):
            return self.out(torch.tanh(x @ self.table.T))

    s.train(model=RandomFeatures(), opt=trainable)


@sound("hooks ghost")
def sparse_graph_in_a_buffer(s):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
            self.register_buffer("graph", torch.eye(6).roll(1, 0).to_sparse())

        def forward(self, x):
            return self.net(torch.sparse.mm(self.graph, x.t()).t())

    s.train(model=Graph())


class Variational(nn.Module):
    """An autoencoder that draws its hidden values."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return {"x": self.decode(drawn), "mean": mean, "log_var": log_var}


def elbo(out, x):
    mean, log_var = out["mean"], out["log_var"]
    prior = 0.5 * (mean.square() + log_var.exp() - log_var - 1).sum(1)
    return (out["x"] - x).square().sum(1) + prior


@sound("hooks ghost functorch ew")
def variational_autoencoder(s):
    x = normal(400, 6)
    s.train(TensorDataset(x, x.clone()), Variational(), loss=elbo)


@sound("hooks ghost", rare=True)
def saved_activations_elsewhere(s):
    with torch.autograd.graph.save_on_cpu():
        s.train()


@sound("hooks ghost")
def names_of_arguments_in_any_order(s):
    def outputs_of(model, x, condition, step, y):
        named = {"x": x, "condition": condition}
        return model(**dict(sorted(named.items(), reverse=bool(step % 2))))

    called(s, outputs_of)


@sound("hooks ghost", rare=True)
def condition_always_given_by_its_name(s):
    called(s, lambda model, x, condition, *_: model(x, condition=condition))


class Masked(LM):
    def forward(self, input_ids, attention_mask, labels=None):
        return super().forward(input_ids * attention_mask)


@sound("hooks functorch")
def labels_that_are_the_inputs_beside_a_mask(s):
    """Which argument is which tensor of the batch is known by and by: many are equal."""
    words = torch.randint(1, 20, (200, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(200, 7, dtype=torch.long)
    mask[::5, 3:] = 0
    named = lambda i: {"input_ids": words[i], "attention_mask": mask[i], "labels": words[i]}  # noqa: E731

    def loss(out, batch):
        return token_losses(out, torch.where(batch["attention_mask"] > 0, batch["labels"], -100))

    s.make(Items(named, 200), Masked())
    with s.recorded(loss):
        for batch in s.batches():
            outputs = s.model(batch["input_ids"], attention_mask=batch["attention_mask"])
            s.step(None, batch, loss, outputs=outputs)
