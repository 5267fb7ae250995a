"""Broken loops: what is trained is no mean of losses of one example each, or not those of the Recorder."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from recording.loops.harness import blobs, broken, ce, normal
from recording.loops.parts import (
    LM,
    Hidden,
    language,
    mlp_of,
    token_losses,
    train_on_views,
    with_dropout,
)

ALL = "hooks ghost functorch ew"
WEIGHT = torch.tensor([0.2, 1.0])


@broken("contribution", "hooks functorch ew")
def class_weights_with_the_mean_of_torch(s):
    each = nn.CrossEntropyLoss(weight=WEIGHT, reduction="none")
    s.train(loss=each, trained=nn.CrossEntropyLoss(weight=WEIGHT))


@broken("contribution", ALL, rare=True)
def losses_divided_by_the_weights_of_the_batch(s):
    def trained(out, y):
        return WEIGHT[y] * ce(out, y) * len(y) / WEIGHT[y].sum()

    s.train(loss=lambda out, y: WEIGHT[y] * ce(out, y), trained=trained)


@broken("contribution", "hooks ghost functorch", rare=True)
def several_labels_weighted_by_the_batch(s):
    def trained(out, y):
        share = y.mean(0).clamp(0.1, 0.9)  # pos_weight of this batch
        return F.binary_cross_entropy_with_logits(
            out, y, pos_weight=(1 - share) / share, reduction="none"
        ).mean(1)

    def loss(out, y):
        return F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1)

    x = blobs().tensors[0]
    s.train(TensorDataset(x, (x[:, :4] > 0.3).float()), mlp_of(4), loss=loss, trained=trained)


@broken("contribution", ALL)
def hard_examples_only(s):
    def upper_half(out, y):
        losses = ce(out, y)
        return losses * (losses >= losses.median())

    s.train(trained=upper_half)


@broken("contribution", "hooks functorch", rare=True)
def sum_of_the_largest_losses(s):
    def largest(out, y):
        return ce(out, y).topk(len(y) // 2).values.sum() / len(y)

    s.train(trained=largest)


@broken("contribution", "hooks ghost functorch ew", rare=True)
def weighted_by_the_largest_loss_of_the_batch(s):
    def trained(out, y):
        losses = ce(out, y)
        return losses * (losses / losses.max()).detach()

    s.train(trained=trained)


@broken("contribution", "hooks ghost", rare=True)
def weighted_by_a_softmax_of_the_losses(s):
    def trained(out, y):
        losses = ce(out, y)
        return losses * losses.detach().softmax(0) * len(y)

    s.train(trained=trained)


@broken("contribution", "hooks ghost", rare=True)
def loss_divided_by_its_mean(s):
    s.train(trained=lambda out, y: ce(out, y) / ce(out, y).mean().detach())


@broken("contribution", "hooks ghost functorch", rare=True)
def mean_of_the_batch_as_a_baseline(s):
    def reinforce(out, y):
        reward = (out.detach().argmax(1) == y).float()
        return ce(out, out.detach().argmax(1)) * (reward - reward.mean())

    def own(out, y):
        chosen = out.detach().argmax(1)
        return ce(out, chosen) * ((chosen == y).float() - 0.5)

    s.train(loss=own, trained=reinforce)


@broken("contribution", ALL)
def skipped_where_the_batch_is_good(s):
    def trained(out, y):
        losses = ce(out, y)
        return losses * float(losses.mean() > 0.7)

    s.train(trained=trained)


@broken("contribution", "hooks ghost", rare=True)
def skipped_where_the_batch_is_bad(s):
    """Guards against outliers: the loss is left out where it is not well below its running mean."""
    seen = []

    def trained(out, y):
        losses = ce(out, y)
        seen.append(float(losses.mean()))
        return losses * float(seen[-1] <= 0.97 * sum(seen) / len(seen))

    s.train(trained=trained)


def mix(s, clip, labels):
    s.make(clip=clip)
    with s.recorded():
        for x, y in s.batches():
            other = torch.randperm(len(x))

            def trained(out, y, other=other):
                return 0.6 * ce(out, y) + 0.4 * ce(out, y[other] if labels else y)

            s.step(0.6 * x + 0.4 * x[other], y, trained)


@broken("contribution batch", "hooks ghost functorch ew")
def mixup_all_clipped(s):
    mix(s, 0.02, labels=True)


@broken("contribution batch", "hooks ghost", rare=True)
def mixup_some_clipped(s):
    mix(s, 1.0, labels=True)


@broken("contribution batch", "hooks ghost", expect="unsupported")
def mixup_of_inputs_none_clipped(s):
    mix(s, 50.0, labels=False)


@broken("contribution", "hooks functorch", rare=True)
def mixup_of_labels(s):
    def trained(out, y):
        return 0.9 * ce(out, y) + 0.1 * ce(out, y.flip(0))

    s.train(trained=trained, clip=0.02)


@broken("contribution", "hooks ghost functorch ew")
def labels_flipped_where_the_model_is_sure(s):
    def trained(out, y):
        return ce(out, torch.where(out.detach().softmax(1).amax(1) > 0.55, 1 - y, y))

    s.train(trained=trained)


def fair(out, y, inputs):
    p, group = out.softmax(1)[:, 1], inputs[:, 0] > 0
    return ce(out, y) + 2 * (p[group].mean() - p[~group].mean()).square()


@broken("contribution", "hooks functorch ew")
def penalty_on_group_means(s):
    fairness(s, clip=1.0)


@broken("contribution", "hooks ghost", rare=True)
def penalty_on_group_means_all_clipped(s):
    fairness(s, clip=0.02)


def fairness(s, clip):
    s.make(clip=clip)
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y, lambda out, y, x=x: fair(out, y, x))


@broken("contribution", "hooks ghost", rare=True)
def covariance_penalty_over_the_batch(s):
    def trained(out, y):
        centred = out - out.mean(0)
        covariance = centred.T @ centred / len(out)
        return ce(out, y) + 0.5 * covariance[0, 1].square()

    s.train(trained=trained)


def contrast(out, y):
    return ce(out @ out.T / 0.5, torch.arange(len(out)))


@broken("contribution", "hooks ghost functorch")
def other_rows_as_negatives(s):
    s.train(model=mlp_of(4), loss=contrast)


@broken("contribution", "hooks ghost", rare=True)
def other_rows_as_negatives_under_dropout(s):
    s.train(model=with_dropout(), loss=contrast)


@broken("contribution", "hooks ghost", rare=True)
def hardest_triplets_of_the_batch(s):
    def trained(out, y):
        far = torch.cdist(out, out)
        same = y[:, None] == y[None]
        hardest = (far * same).max(1).values - (far + 99 * same).min(1).values
        return ce(out, y) + F.relu(hardest + 1)

    s.train(trained=trained)


class Bank:
    """A loss that remembers the outputs of earlier batches."""

    def __init__(self):
        self.kept = []

    def __call__(self, out, y):
        losses = ce(out, y)
        if self.kept:
            losses = losses + 0.1 * (out @ torch.cat(self.kept[-3:]).mean(0))
        if len(out):
            self.kept.append(out.detach())
        return losses


@broken("contribution", "hooks ghost functorch ew")
def memory_in_the_loss_of_training(s):
    s.train(trained=Bank(), clip=0.02)


@broken("contribution", "hooks ghost functorch")
def memory_in_the_loss_of_training_and_recorder(s):
    s.train(loss=Bank())


@broken("contribution", "hooks ghost", rare=True)
def centres_of_classes_in_the_loss(s):
    centres = torch.zeros(2, 2)

    def centred(out, y):
        return ce(out, y) + 0.1 * (out - centres[y]).square().sum(1)

    @torch.no_grad()
    def move(s, x, y):
        out = s.model(x)
        for c in (0, 1):
            centres[c] += 0.5 * (out[y == c].mean(0).nan_to_num() - centres[c])

    s.train(loss=centred, after=move)


@broken("contribution", "hooks ghost", rare=True)
def loss_divided_by_a_running_mean(s):
    mean = [1.0]

    def trained(out, y):
        losses = ce(out, y)
        mean[0] = 0.9 * mean[0] + 0.1 * float(losses.mean())
        return losses / mean[0]

    s.train(trained=trained)


@broken("contribution", "hooks functorch ew", rare=True)
def recorder_told_a_tenth_of_the_loss(s):
    s.train(loss=lambda out, y: 0.1 * ce(out, y), trained=ce)


@broken("contribution", "hooks ghost functorch")
def recorder_told_a_tenth_of_the_loss_under_dropout(s):
    s.train(model=with_dropout(), loss=lambda out, y: 0.1 * ce(out, y), trained=ce)


@broken("contribution", "hooks ghost")
def recorder_told_another_loss_where_all_is_clipped(s):
    s.train(clip=0.01, loss=lambda out, y: ce(out, y) * (1 + y), trained=ce)


@broken("contribution", "hooks ghost")
def four_times_the_loss_where_all_is_clipped(s):
    s.train(clip=0.01, trained=lambda out, y: 4 * ce(out, y))


@broken("contribution", "hooks functorch")
def smoothing_in_training_alone(s):
    s.train(trained=nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none"))


@broken("contribution", "ghost", expect="refused")
def a_criterion_of_ghost_mode_that_returns_one_loss(s):
    """As the losses of Hugging Face's models do: no example is clipped on its own."""
    s.train(trained=lambda out, y: F.cross_entropy(out, y), loss=ce)


@broken("contribution", "hooks functorch")
def mean_over_the_tokens_of_the_batch(s):
    def trained(out, y):
        return F.cross_entropy(out.transpose(1, 2), y)

    s.train(language(), LM(), loss=token_losses, trained=trained)


@broken("contribution", "ghost functorch", rare=True)
def sums_over_tokens_divided_by_those_of_the_batch(s):
    def trained(out, y):
        counts = (y != -100).sum(1).clamp(min=1)
        return token_losses(out, y) * counts * len(y) / counts.sum()

    s.train(language(), LM(), loss=token_losses, trained=trained)


@broken("contribution", "hooks functorch")
def column_against_row(s):
    """Outputs (n, 1) and targets (n,): torch compares each with each."""
    data = TensorDataset(blobs().tensors[0], blobs().tensors[0][:, 0] * 2)
    s.train(
        data,
        mlp_of(1),
        loss=lambda out, y: (out[:, 0] - y).square(),
        trained=lambda out, y: (out - y).square(),
    )


@broken("contribution", "hooks functorch", rare=True)
def column_against_row_in_the_recorder_too(s):
    data = TensorDataset(blobs().tensors[0], blobs().tensors[0][:, 0] * 2)
    s.train(data, mlp_of(1), loss=lambda out, y: (out - y).square().mean(1))


@broken("contribution batch", "hooks ghost ew")
def label_of_the_majority(s):
    """Labels smoothed towards the commonest label of the batch."""

    def trained(out, y):
        return 0.9 * ce(out, y) + 0.1 * ce(out, y.mode().values.expand(len(y)))

    s.train(trained=trained)


@broken("contribution batch", "hooks ghost", expect="unsupported", rare=True)
def targets_replaced_by_the_majority(s):
    s.make().go(rows=lambda x, y: (x, torch.where(torch.rand(len(y)) < 0.2, y.mode().values, y)))


@broken("contribution", "hooks ghost", rare=True)
def targets_ranked_within_the_batch(s):
    data = TensorDataset(blobs().tensors[0], blobs().tensors[0][:, 0])

    def trained(out, y):
        return (out[:, 0] - y.argsort().argsort() / len(y)).square()

    s.train(data, mlp_of(1), loss=lambda out, y: (out[:, 0] - y).square(), trained=trained)


@broken("contribution", "hooks ghost", rare=True)
def targets_standardised_within_the_batch(s):
    data = TensorDataset(blobs().tensors[0], blobs().tensors[0][:, 0] * 3)

    def trained(out, y):
        return (out[:, 0] - (y - y.mean()) / y.std()).square()

    s.train(data, mlp_of(1), loss=lambda out, y: (out[:, 0] - y / 3).square(), trained=trained)


@broken("contribution", "hooks ghost", rare=True)
def threshold_of_the_batch_for_own_labels(s):
    def trained(out, y):
        sure = out.detach().softmax(1).max(1)
        return ce(out, y) + (sure.values > sure.values.median()) * ce(out, sure.indices)

    s.train(trained=trained)


@broken("contribution", "hooks ghost")
def one_in_five_steps_mixes(s):
    def trained(out, y):
        k[0] += 1
        return ce(out, y) * (1 if k[0] % 5 else (ce(out, y) / ce(out, y).max()).detach())

    k = [0]
    s.train(trained=trained)


@broken("contribution batch", "ghost")
def ghost_mode_with_a_plain_loss(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            ce(s.model(x), y).mean().backward()
            s.optimizer.step()


@broken("contribution", "hooks ghost", expect="unsupported", rare=True)
def weights_of_the_recorder_moved_by_the_loop(s):
    """Norms are recorded before the loop moves the loss: they are those of another loss."""
    k = [0]

    def curriculum(out, y):
        return ce(out, y) * (1 + 0.1 * k[0])

    def later(s, x, y):
        k[0] = s.steps

    s.train(loss=curriculum, after=later)


@broken("contribution", "hooks functorch", expect="unsupported", rare=True)
def temperature_of_the_model_moved_by_the_loop(s):
    model = Hidden(lambda h, x: h * model.temperature)
    model.temperature = 1.0

    def warmer(s, x, y):
        s.model._module.temperature = 1 + 0.05 * s.steps

    s.train(model=model, after=warmer)


@broken("contribution", "hooks", rare=True)
def gradients_of_examples_averaged_before_clipping(s):
    def average(s, x, y):
        for p in s.model.parameters():
            p.grad_sample = p.grad_sample.mean(0, keepdim=True).expand_as(p.grad_sample).clone()

    s.train(between=average)


@broken("contribution", "hooks functorch", rare=True)
def gradients_of_examples_centred_before_clipping(s):
    def centre(s, x, y):
        for p in s.model.parameters():
            p.grad_sample = p.grad_sample - p.grad_sample.mean(0)

    s.train(between=centre)


@broken("contribution", "hooks functorch")
def plain_gradient_added_to_the_samples(s):
    def add(s, x, y):
        for p, g in zip(s.model.parameters(), s.gradients(*s.data.tensors), strict=True):
            p.grad_sample = p.grad_sample + g

    s.train(between=add, clip=0.05)


@broken("contribution", "hooks")
def clipped_sum_changed_before_the_noise(s):
    def scale(s):
        clip = s.optimizer.clip_and_accumulate

        def clip_and_scale():
            clip()
            for p in s.optimizer.params:
                p.summed_grad *= 3

        s.optimizer.clip_and_accumulate = clip_and_scale

    s.make()
    scale(s)
    s.go()


@broken("contribution", "hooks functorch", rare=True)
def loss_noise_hides_a_mixing_loss(s):
    def noisy(out, y):
        losses = ce(out, y)
        return losses * (1 + 1e-4 * torch.rand(())) * (losses / losses.max()).detach()

    s.train(loss=noisy)


@broken("contribution", "hooks ghost", rare=True)
def contrast_with_the_row_before(s):
    s.train(loss=lambda out, y: ce(out, y) + 0.1 * (out - out.roll(1, 0)).square().sum(1))


@broken("contribution", "hooks ghost", rare=True)
def mean_teacher_updated_from_the_batch(s):
    teacher = normal(6, 2)

    def trained(out, y):
        return ce(out, y) + 0.1 * (out - fed[-1] @ teacher).square().sum(1)

    def learn(s, x, y):
        teacher.add_(0.1 * x.T @ F.one_hot(y, 2).float() / max(1, len(x)))

    fed = []
    s.train(trained=trained, before=lambda s, x, y: fed.append(x), after=learn)


@broken("contribution", "hooks functorch")
def gradient_of_the_outputs_normalised(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            outputs = s.model(x)
            outputs.register_hook(lambda g: 0.1 * g / g.norm())
            s.step(None, y, outputs=outputs)


@broken("contribution", "ghost")
def plain_gradient_added_to_the_clipped_sum(s):
    """Between backward and step, ghost mode keeps the sum of clipped gradients in p.grad."""

    def add(s, x, y):
        for p, g in zip(s.model.parameters(), s.gradients(*s.data.tensors), strict=True):
            p.grad += g

    s.train(between=add)


@broken("batch contribution", "hooks functorch", expect="unsupported")
def views_of_an_example_clipped_one_by_one(s):
    """An example then contributes as much as all its views."""
    train_on_views(s, lambda p, views: p.grad_sample)


@broken("contribution", "hooks")
def views_of_several_examples_averaged(s):
    train_on_views(s, lambda p, views: p.grad_sample.unflatten(0, (views, -1)).mean(0))


class ScaledByTheFirst(nn.Module):
    """Losses over the mean loss of the first batch."""

    first = None

    def forward(self, out, y):
        each = ce(out, y)
        if self.first is None and len(y):
            self.first = each.detach().mean()
        return each / self.first


@broken("contribution", "hooks ghost functorch", expect="unsupported")
def loss_scaled_by_that_of_the_first_batch(s):
    s.train(loss=ScaledByTheFirst())


@broken("contribution", "hooks functorch", rare=True)
def loss_of_the_batch_flooded(s):
    """Ishida et al. 2020: where the mean is below a level, it is raised."""
    s.train(trained=lambda out, y: (ce(out, y).mean() - 0.8).abs() + 0.8)


@broken("contribution", "hooks functorch", rare=True)
def loss_of_the_batch_clamped(s):
    s.train(trained=lambda out, y: ce(out, y).mean().clamp(max=0.6))


@broken("contribution", "hooks functorch")
def unlabelled_rows_left_out_of_the_mean_of_torch(s):
    x, y = blobs().tensors
    data = TensorDataset(x, torch.where(torch.arange(400) % 3 == 0, -100, y))
    each = nn.CrossEntropyLoss(reduction="none", ignore_index=-100)
    s.train(data, loss=each, trained=nn.CrossEntropyLoss(ignore_index=-100))


@broken("contribution", "hooks functorch", rare=True)
def mean_of_the_means_of_classes(s):
    def trained(out, y):
        return sum(ce(out[y == c], y[y == c]).mean() for c in y.unique()) / 2

    s.train(trained=trained)


@broken("contribution", "hooks functorch", rare=True)
def mean_where_make_private_was_told_a_sum(s):
    s.train(loss_reduction="sum")


@broken("contribution", "hooks functorch", rare=True)
def pairs_ranked_within_the_batch(s):
    def trained(out, y):
        score = out[:, 1] - out[:, 0]
        return F.softplus(score[y == 0][:, None] - score[y == 1]).mean()

    s.train(trained=trained)


@broken("contribution", "ghost", rare=True)
def penalty_that_weights_parameters_by_the_label(s):
    """Its gradient reaches the sum beside the model's outputs, and no norm."""

    def trained(out, y):
        return ce(out, y) + (y + 1) * sum(p.square().sum() for p in s.model.parameters())

    s.make().go(trained=trained)


def moved_by_the_loop(s, loss, move, **options):
    """What `move` changes after each step enters the loss; norms are recorded before."""
    s.train(loss=loss, after=move, recorder={"every": "once"}, **options)


@broken("contribution", "hooks functorch", expect="unsupported", rare=True)
def multiplier_of_a_constraint_raised_by_the_data(s):
    held = [0.0]

    @torch.no_grad()
    def move(s, x, y):
        held[0] += 0.5 * float(s.plain(x).softmax(1)[:, 1].mean()) if len(x) else 0.0

    moved_by_the_loop(s, lambda out, y: ce(out, y) + held[0] * out.softmax(1)[:, 1], move)


class WithInputs(Hidden):
    """Returns its inputs, too."""

    def forward(self, x):
        return super().forward(x), x


@broken("contribution", "hooks functorch", expect="unsupported", rare=True)
def distilled_from_a_twin_that_trains_without_noise(s):
    twin = mlp_of(2)
    optimizer = torch.optim.Adam(twin.parameters(), 0.05)

    def loss(out, y):
        teacher = twin(out[1]).detach().softmax(1)
        return F.kl_div(out[0].log_softmax(1), teacher, reduction="none").sum(1)

    def move(s, x, y):
        optimizer.zero_grad()
        ce(twin(x), y).mean().backward()
        optimizer.step()

    moved_by_the_loop(s, loss, move, model=WithInputs(lambda h, x: h))


@broken("contribution", "hooks functorch", expect="unsupported", rare=True)
def critic_beside_the_model_that_trains_without_noise(s):
    critic = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(critic.parameters(), 0.5)

    def loss(out, y):
        weight, bias = critic.weight.detach(), critic.bias.detach()
        return ce(out, y) + 0.5 * F.softplus(-F.linear(out, weight, bias))[:, 0]

    def move(s, x, y):
        optimizer.zero_grad()
        out = critic(s.plain(x).detach())[:, 0]
        F.binary_cross_entropy_with_logits(out, y.float()).backward()
        optimizer.step()

    moved_by_the_loop(s, loss, move)


@broken("contribution", "hooks functorch", expect="unsupported", rare=True)
def rows_below_a_running_threshold(s):
    held = [1.0]

    def loss(out, y):
        each = ce(out, y)
        return each * (each.detach() < held[0])

    def move(s, x, y):
        held[0] = 0.9 * held[0] + 0.1 * s.loss_of(x, y) if len(x) else held[0]

    moved_by_the_loop(s, loss, move)


def samples_changed(s, change, **options):
    """`change(norms)`: factors of the gradients of examples between backward and step."""

    def between(s, x, y):
        each = [p.grad_sample.flatten(1).norm(dim=1) for p in s.optimizer.params]
        factors = change(torch.stack(each).norm(dim=0))
        for p in s.optimizer.params:
            p.grad_sample = torch.einsum("i,i...->i...", factors, p.grad_sample)

    s.train(between=between, **options)


@broken("contribution", "hooks functorch", rare=True)
def long_gradients_dropped_by_the_median(s):
    samples_changed(s, lambda norms: (norms <= 1.2 * norms.median()).float())


@broken("contribution", "hooks functorch", rare=True)
def gradients_divided_by_their_mean_length(s):
    samples_changed(s, lambda norms: torch.ones_like(norms) / norms.mean(), clip=0.05)


@broken("contribution", "hooks functorch", expect="unsupported")
def class_weights_of_the_first_batch(s):
    weights = torch.ones(2)

    def count(s, x, y):
        if not s.steps:
            weights.copy_(torch.bincount(y, minlength=2) / (len(y) + 3))

    s.train(loss=lambda out, y: weights[y] * ce(out, y), before=count, recorder={"every": "once"})
