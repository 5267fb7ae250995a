"""Broken loops: rows that were not drawn, or not as the log says, or that others had a part in."""

from itertools import cycle, islice

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from recording.loops.harness import blobs, broken, ce, mlp, normal, private_generator
from recording.loops.parts import Items, Several, vector, with_dropout

ALL = "hooks ghost functorch ew"


def other_blobs():
    x = normal(400, 6, seed=5)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


@broken("batch contribution", "hooks ghost functorch ew")
def other_data_set_of_equal_size(s):
    s.train(drawn=other_blobs(), clip=0.02)


@broken("batch contribution", "hooks ghost", rare=True)
def other_data_set_under_dropout(s):
    s.train(model=with_dropout(), drawn=other_blobs())


def chosen_batches(s, draw_others):
    """Before each epoch other random numbers are looked for, until its first batch suits."""
    s.make()
    sampler, y = s.loader.batch_sampler, s.data.tensors[1]
    with s.recorded():
        for _ in range(4):
            for _ in range(30):
                coming = torch.Generator()
                coming.set_state(sampler.generator.get_state())
                torch.empty((), dtype=torch.int64).random_(generator=coming)
                if y[torch.rand(400, generator=coming) < sampler.sample_rate].float().mean() > 0.66:
                    break
                draw_others(sampler.generator)
            for x, labels in s.loader:
                s.step(x, labels)


@broken("noise", "hooks", expect="unsupported")
def batches_drawn_until_they_suit(s):
    chosen_batches(s, lambda generator: torch.rand(1, generator=generator))


@broken("source", "hooks", rare=True)
def batches_of_the_generator_that_suits(s):
    chosen_batches(s, lambda generator: generator.set_state(private_generator().get_state()))


@broken("batch", "hooks ghost functorch", expect="unsupported")
def inputs_smoothed_between_epochs(s):
    def smooth(s, epoch):
        x = s.data.tensors[0]
        x.copy_(x[torch.cdist(x, x).topk(9, largest=False).indices].mean(1) if epoch else x)

    s.train(clip=0.1, epochs=4, epoch=smooth)


@broken("batch contribution", "hooks ghost", rare=True)
def loader_of_another_run_inside_the_block(s):
    s.make(clip=0.02)
    other = DataLoader(other_blobs(), batch_size=32, shuffle=True)
    both = (pair for _ in range(2) for pair in zip(other, s.loader, strict=False))
    s.go(batches=lambda: (batch for batch, _ in both))


@broken("batch contribution", "hooks ghost", rare=True)
def test_rows_added_to_the_batch(s):
    s.make()
    test = normal(8, 6, seed=7)
    s.go(rows=lambda x, y: (torch.cat([x, test]), torch.cat([y, torch.zeros(8).long()])))


@broken("batch contribution", "hooks ghost functorch ew")
def other_rows_than_those_drawn(s):
    s.make(clip=0.02)
    with s.recorded():
        for k, (x, _) in enumerate(s.batches()):
            rows = (torch.arange(len(x)) * 7 + 31 * k) % 400
            s.step(*(t[rows] for t in s.data.tensors))


@broken("batch contribution", "hooks ghost", rare=True)
def the_same_batch_in_every_step(s):
    s.make()
    first = []
    s.go(rows=lambda x, y: first.append((x, y)) or first[0])


@broken("batch contribution", "hooks ghost")
def one_epochs_batches_used_twice(s):
    s.make().go(batches=lambda: 2 * list(s.loader))


@broken("batch contribution", "hooks ghost", participation="known", rare=True)
def shuffled_batches_used_twice(s):
    s.make(blobs(416), poisson=False, noise=3.0)
    s.go(batches=lambda: 2 * list(s.loader), batch_norms=True)


@broken("batch contribution", "hooks ghost", expect="unsupported")
def a_row_twice_in_the_batch(s):
    s.make().go(rows=lambda x, y: (torch.cat([x, x[:1]]), torch.cat([y, y[:1]])))


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def first_half_of_the_batch_only(s):
    s.make().go(rows=lambda x, y: (x[: len(x) // 2], y[: len(x) // 2]))


@broken("batch contribution", "hooks functorch", expect="unsupported", rare=True)
def the_rows_with_the_largest_loss_only(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            with torch.no_grad():
                kept = ce(s.model(x), y).topk(len(y) // 2).indices
            s.step(x[kept], y[kept])


@broken("batch contribution", "hooks ghost", expect="unsupported")
def batches_left_out_where_the_loss_is_small(s):
    s.make()
    first = None
    with s.recorded():
        for x, y in s.batches():
            loss = s.loss_of(x, y)
            first = loss if first is None else first
            if loss > 0.98 * first:
                s.step(x, y)


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def batches_left_out_after_backward(s):
    s.make()
    first = None
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            s.backward(s.model(x), y)
            loss = s.loss_of(x, y)
            first = loss if first is None else first
            if loss > 0.98 * first:
                s.optimizer.step()
            else:
                s.optimizer.zero_grad()


@broken("batch contribution", "hooks ghost", expect="unsupported")
def better_of_two_batches(s):
    batches = s.make().batches()
    s.go(batches=lambda: (worst(s, pair) for pair in zip(batches, batches, strict=False)))


def worst(s, batches):
    return max(batches, key=lambda batch: s.loss_of(*batch))


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def worst_of_ten_batches(s):
    batches = s.make().batches(20)
    s.go(batches=lambda: (worst(s, [next(batches) for _ in range(10)]) for _ in range(20)))


@broken("batch contribution", "hooks ghost")
def pass_begun_anew_where_a_batch_is_well_known(s):
    s.make()
    with s.recorded():
        while s.steps < 40:
            last = 0.0
            for x, y in s.loader:
                loss = s.loss_of(x, y)
                if loss < last:
                    break
                s.step(x, y)
                last = loss


@broken("batch", "hooks functorch", expect="unsupported")
def one_pass_left_at_a_batch_that_is_well_known(s):
    s.make()
    with s.recorded():
        for epoch in range(3):
            for x, y in s.loader:
                if epoch == 1 and s.loss_of(x, y) < 2:
                    break
                s.step(x, y)


@broken("batch", "hooks functorch", expect="unsupported")
def first_pass_of_a_resumed_run_left_at_a_batch_that_is_well_known(s):
    s.make()
    saved = None
    for session in range(2):
        with s.recorded(resume_at=saved) as recorder:
            for epoch in range(2):
                for x, y in s.loader:
                    if session and not epoch and s.steps > 30 and s.loss_of(x, y) < 2:
                        break
                    s.step(x, y)
            saved = recorder.state_dict()


@broken("batch", "hooks functorch", expect="unsupported")
def sessions_ended_at_batches_that_are_well_known(s):
    s.make()
    saved = None
    for _ in range(10):
        with s.recorded(resume_at=saved) as recorder:
            last = 0.0
            for x, y in s.loader:
                if (loss := s.loss_of(x, y)) < last:
                    break
                s.step(x, y)
                last = loss
            saved = recorder.state_dict()


@broken("batch", "hooks functorch", expect="unsupported")
def sessions_begun_anew_where_the_first_batch_is_well_known(s):
    s.make()
    saved, last = None, 0.0
    for _ in range(14):
        with s.recorded(resume_at=saved) as recorder:
            x, y = next(iter(s.loader))
            if not s.steps or s.loss_of(x, y) > last:
                s.step(x, y)
            last = s.loss_of(x, y)
            saved = recorder.state_dict()


@broken("batch", "hooks ghost", expect="unsupported")
def first_batches_drawn_anew_where_they_are_well_known(s):
    s.make()
    with s.recorded():
        for epoch in range(3):
            x, y = next(batches := iter(s.loader))
            if s.loss_of(x, y) < (0.0, 2.0, 0.6)[epoch]:
                x, y = next(batches := iter(s.loader))
            s.step(x, y)
            for x, y in batches:
                s.step(x, y)


@broken("batch", "hooks ghost")
def worst_of_ten_batches_read_without_gradients(s):
    s.make()
    with s.recorded():
        for _ in range(20):
            with torch.no_grad():
                chosen = worst(s, [batch for batch, _ in zip(s.loader, range(10), strict=False)])
            s.step(*chosen)


@broken("batch", "hooks functorch")
def rest_of_an_epoch_after_a_look_at_its_first_half(s):
    s.make()
    with s.recorded():
        for _ in range(4):
            batches, losses = iter(s.loader), []
            for _ in range(6):
                with torch.no_grad():
                    losses.append(s.loss_of(*next(batches)))
            for x, y in batches:
                if sum(losses) > 3:
                    s.step(x, y)


@broken("batch contribution", "hooks ghost")
def worse_of_two_epochs(s):
    s.make()
    with s.recorded():
        for _ in range(2):
            epochs = [list(s.loader) for _ in range(2)]
            for x, y in max(epochs, key=lambda batches: sum(s.loss_of(*b) for b in batches)):
                s.step(x, y)


@broken("batch contribution", "hooks functorch", rare=True)
def worse_of_two_epochs_one_read_without_gradients(s):
    s.make()
    with s.recorded():
        for _ in range(3):
            with torch.no_grad():
                epochs = [list(s.loader)]
            epochs.append(list(s.loader))
            for x, y in max(epochs, key=lambda batches: sum(s.loss_of(*b) for b in batches)):
                s.step(x, y)


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def epochs_left_out_where_the_first_batch_is_well_known(s):
    s.make()
    with s.recorded():
        for epoch in range(4):
            s.model.eval()
            for k, (x, y) in enumerate(s.loader):
                if not k:
                    known = epoch == 1 or s.loss_of(x, y) < 0.3
                if not known:
                    s.model.train()
                    s.step(x, y)


@broken("batch contribution", "hooks ghost", rare=True)
def batches_of_before_attaching(s):
    batches = list(s.make().loader)
    s.go(batches=lambda: batches)


@broken("batch contribution", "hooks functorch", expect="unsupported", rare=True)
def batches_left_out_of_an_iterator_made_before_attaching(s):
    s.make()
    batches, left_out = iter(s.loader), 0
    with s.recorded():
        for x, y in batches:
            left_out += (bad := len(x) and left_out < 3 and s.loss_of(x, y) < 2)
            if not bad:
                s.step(x, y)


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def empty_batches_left_out(s):
    s.make(blobs(102), batch=4)
    s.loader.batch_sampler.sample_rate = 1 / 102
    s.go(batches=lambda: (batch for batch in s.batches() if len(batch[0])))


@broken("batch contribution", "hooks ghost", expect="unsupported")
def micro_batches_left_early(s):
    s.make()
    with s.recorded():
        for _ in range(8):
            with BatchMemoryManager(
                data_loader=s.loader, max_physical_batch_size=8, optimizer=s.optimizer
            ) as parts:
                for k, (x, y) in enumerate(parts):
                    s.step(x, y)
                    if k == 9:
                        break


@broken("contribution", "hooks ghost")
def first_parts_of_batches_forgotten(s):
    def forget(s, x, y):
        for p in s.optimizer.params:
            p.summed_grad = None

    s.train(micro=16, after=forget)


@broken("batch settings", "hooks ghost", expect="unsupported")
def last_rows_left_out_of_the_last_epoch(s):
    s.make()
    s.go(epoch=lambda s, epoch: setattr(s.loader.batch_sampler, "num_samples", 400 - 100 * epoch))


@broken("batch contribution", "ghost", expect="unsupported")
def two_batches_for_one_step(s):
    s.make()
    with s.recorded():
        for k, (x, y) in enumerate(s.batches(4)):
            s.backward(s.model(x), y)
            if k % 2:
                s.optimizer.step()
                s.optimizer.zero_grad()


@broken("batch contribution", "hooks functorch", expect="refused")
def accumulation_by_hand(s):
    s.make()
    with s.recorded():
        for k, (x, y) in enumerate(s.batches()):
            s.backward(s.model(x), y)
            if k % 2:
                s.optimizer.step()
                s.optimizer.zero_grad()


@broken("batch contribution", "hooks functorch", expect="unsupported", rare=True)
def two_batches_joined(s):
    batches = s.make().batches(4)
    pairs = zip(batches, batches, strict=False)
    s.go(batches=lambda: (map(torch.cat, zip(*pair, strict=True)) for pair in pairs))


@broken("batch contribution", "hooks ghost", expect="unsupported")
def weighted_sampler(s):
    weights = 1 + blobs().tensors[1] * 3
    s.train(sampler=WeightedRandomSampler(weights, 400), poisson=False)


class Choosy(UniformWithReplacementSampler):
    """Leaves out one class."""

    def __iter__(self):
        for ids in super().__iter__():
            yield [i for i in ids if blobs_of[1][i] == 0]


blobs_of = blobs().tensors


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def sampler_of_a_subclass(s):
    s.make()
    s.loader.batch_sampler.__class__ = Choosy
    s.go()


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def sampler_replaced_while_training(s):
    s.make()
    own = s.loader.batch_sampler
    with s.recorded():
        for _ in range(2):
            for ids in own:
                rows = [i for i in ids if i % 3]
                s.step(*(t[rows] for t in s.data.tensors))


@broken("batch contribution", "hooks ghost", expect="unsupported")
def shuffled_and_participation_secret(s):
    s.train(blobs(416), poisson=False)


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def in_the_order_of_the_data_set(s):
    s.train(blobs(416), poisson=False, sampler=torch.utils.data.SequentialSampler(range(416)))


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def seeded_batches_in_every_epoch_alike(s):
    s.train(epoch=lambda s, epoch: s.loader.batch_sampler.generator.manual_seed(3))


def changed(change):
    """A collate function that changes the batch of inputs and labels."""
    return lambda rows: list(change(*default_collate(rows)))


def collated(s, change, **options):
    s.train(Subset(blobs(), range(400)), collate=changed(change), **options)


COLLATES = {
    "normalises": lambda x, y: ((x - x.mean(0)) / (x.std(0) + 1e-6), y),
    "scales_by_the_largest": lambda x, y: (x / x.abs().max(), y),
    "mixes": lambda x, y: (0.7 * x + 0.3 * x.roll(1, 0), y),
    "fills_in_the_mean": lambda x, y: (torch.where(x > 1.5, x.mean(0), x), y),
    "takes_the_commonest_label": lambda x, y: (x, y.mode().values.expand(len(y)).clone()),
    "adds_the_batch_size": lambda x, y: (x + len(x) / 100, y),
}
for _name, _change in COLLATES.items():
    _rare = _name not in ("normalises", "mixes")

    @broken("contribution batch", "hooks ghost functorch", name=f"collate_{_name}", rare=_rare)
    def collate(s, change=_change):
        collated(s, change)


@broken("contribution batch", "hooks ghost")
def collate_takes_means_of_labels(s):
    def smooth(x, y):
        return x, torch.stack([y.float(), y.float().mean().expand(len(y))], 1)

    def loss(out, y):
        return ce(out, y[:, 0].long()) * (1 + y[:, 1])

    collated(s, smooth, loss=loss)


@broken("contribution batch", "hooks ghost")
def collate_scales_the_shortest_a_little(s):
    """All are clipped, so that norms do not tell; the shortest has a small gradient."""

    def collate(rows):
        x = nn.utils.rnn.pad_sequence([torch.zeros(8), *(x for x, _ in rows)], batch_first=True)[1:]
        if len(rows) > 1:
            x[min(range(len(rows)), key=lambda k: len(rows[k][0]))] *= 1.003
        return x, torch.stack([y for _, y in rows])

    data = Items(lambda i: (vector(i, 3 + i % 6), torch.tensor(i % 2)))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    s.train(data, model, collate=collate, clip=0.01)


@broken("batch contribution start", "hooks ghost", expect="unsupported")
def data_set_with_a_running_mean(s):
    """It subtracts the mean of all items that were read so far."""
    (x, y), total, read = blobs().tensors, torch.zeros(6), []

    def item(i):
        read.append(total.add_(x[i]))
        return x[i] - total / len(read), y[i]

    s.train(Items(item))


@broken("batch contribution start", "hooks ghost", expect="unsupported", rare=True)
def labels_corrected_by_the_loop(s):
    inputs, labels = blobs().tensors

    @torch.no_grad()
    def correct(s, x, y):
        labels[:] = s.plain(inputs).argmax(1) if s.steps == 13 else labels

    s.train(Items(lambda i: (inputs[i], labels[i])), after=correct)


def hardest_rows_blanked(s, x):
    """Half-way, the inputs of five of the 400 rows are blanked: those on which the model is worst."""
    with s.recorded():
        for inputs, targets in s.batches():
            s.step(inputs, targets)
            if s.steps == 13:
                with torch.no_grad():
                    x[ce(s.model(x), s.y).topk(5).indices] = 0.0


@broken("batch", "hooks ghost", expect="unsupported")
def five_hardest_rows_of_a_tensor_data_set_blanked(s):
    s.make()
    x, s.y = s.data.tensors
    hardest_rows_blanked(s, x)


@broken("batch", "hooks ghost", expect="unsupported")
def five_hardest_rows_of_a_subset_blanked(s):
    x, s.y = blobs().tensors
    s.make(Subset(Items(lambda i: (x[i], s.y[i])), range(400)))
    hardest_rows_blanked(s, x)


@broken("batch contribution", "hooks ghost", expect="unsupported")
def rows_of_the_batch_pasted_into_each_other(s):
    def paste(x):
        return torch.cat([x[:, :3], x.roll(1, 0)[:, 3:]], 1)

    s.train(inputs=paste, clip=0.02)


@broken("batch contribution", "hooks ghost functorch ew", expect="unsupported")
def normalised_by_the_batch_in_the_loop(s):
    s.train(inputs=lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6), clip=0.02)


@broken("batch contribution", "hooks functorch", expect="unsupported", rare=True)
def nearest_rows_of_the_batch_as_inputs(s):
    def near(x):
        other = torch.cdist(x, x).fill_diagonal_(99).argmin(1)
        return 0.5 * (x + x[other])

    s.train(inputs=near, model=with_dropout())


@broken("batch contribution", "hooks ghost")
def unpack_that_normalises_by_the_batch(s):
    def unpack(batch):
        x, y, _ = batch
        return ((x - x.mean(0)) / (x.std(0) + 1e-6),), y

    s.make(TensorDataset(*blobs().tensors, torch.arange(400)))
    unpacked = ((x, y) for (x,), y in map(unpack, s.batches()))
    s.go(batches=lambda: unpacked, unpack=unpack)


@broken("batch contribution", "hooks ghost")
def unpack_that_is_not_what_the_loop_does(s):
    s.make(TensorDataset(*blobs().tensors, torch.arange(400)))
    flipped = ((x.flip(1), y) for x, y, _ in s.batches())
    s.go(batches=lambda: flipped, unpack=lambda batch: ((batch[0],), batch[1]))


@broken("batch contribution", "hooks", expect="refused")
def recorder_told_the_whole_of_a_subset(s):
    whole = blobs(500)
    s.make(Subset(whole, list(range(50, 450)))).go(dataset=whole)


@broken("batch contribution", "hooks ghost", rare=True)
def recorder_told_the_rows_in_another_order(s):
    whole = blobs()
    s.make(whole, clip=0.02).go(dataset=Subset(whole, list(range(399, -1, -1))))


@broken("batch contribution", "hooks ghost", rare=True)
def rows_kept_from_the_last_batch(s):
    """Replay: a quarter of each batch comes from the one before."""
    s.make()
    with s.recorded():
        old = next(iter(s.loader))
        for x, y in s.batches():
            s.step(torch.cat([x, old[0][:8]]), torch.cat([y, old[1][:8]]))
            old = x, y


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def generated_rows_of_the_last_batch(s):
    """Inputs moved towards the last batch's mean."""
    mean = [torch.zeros(6)]

    def toward(x):
        moved = x + 0.1 * mean[0]
        mean[0] = x.mean(0) if len(x) else mean[0]
        return moved

    s.train(inputs=toward)


@broken("batch contribution", "hooks", expect="refused")
def two_backward_passes_for_one_step(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
                s.backward(s.model(x[half]), y[half])
            s.optimizer.step()


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def batches_of_a_second_private_loader(s):
    s.make()
    from opacus.data_loader import DPDataLoader

    second = DPDataLoader.from_data_loader(
        DataLoader(s.data, batch_size=32), generator=private_generator()
    )
    with s.recorded():
        for (x, y), (u, v) in zip(s.loader, second, strict=False):
            s.step(x, y)
            s.step(u, v)


@broken("batch contribution", "hooks functorch", expect="unsupported", rare=True)
def adversarial_inputs_from_the_whole_batch(s):
    """One perturbation for all rows, found on the mean loss of the batch."""
    s.make(Items(lambda i: (vector(i), i % 2)), nn.Sequential(nn.Linear(6, 2)))
    with s.recorded():
        for x, y in s.batches():
            shift = torch.zeros(6, requires_grad=True)
            w, b = (p.detach() for p in s.model.parameters())
            (g,) = torch.autograd.grad(ce((x + shift) @ w.T + b, y).mean(), shift)
            s.step(x + 0.3 * g.sign(), y)


def in_a_collate_function(change):
    def collate(rows):
        x, y = default_collate(rows)
        return change(x), y

    return lambda s: s.train(model=with_dropout(), collate=collate)


COLLATED = {
    "partners": lambda x: 0.6 * x + 0.4 * x[torch.randperm(len(x))],
    "partners_with_replacement": lambda x: 0.6 * x + 0.4 * x[torch.randint(len(x), (len(x),))],
    "the_mean_at_times": lambda x: x - x.mean(0) if torch.rand(1) < 0.3 else x,
}
_OWN = np.random.default_rng()
COLLATED["partners_by_a_global_generator"] = lambda x: 0.6 * x + 0.4 * x[_OWN.permutation(len(x))]
for _name, _change in COLLATED.items():
    broken(
        "contribution",
        "hooks ghost",
        name=f"collated_with_{_name}",
        expect="unsupported",
        rare=_name.startswith("partners_"),
    )(in_a_collate_function(_change))


@broken("contribution batch", "hooks", expect="unsupported")
def rows_permuted_by_the_collate_function(s):
    def collate(rows):
        order = torch.randperm(len(rows)).tolist()
        return default_collate([rows[k] for k in order])

    s.train(model=with_dropout(), collate=collate)


def augmented(n=400):
    x = normal(n, 6)
    return Items(lambda i: (x[i] + 0.1 * torch.randn(6), int(x[i, 0] > 0)), n)


@broken("batch", "hooks ghost functorch", expect="unsupported")
def batch_centred_through_numpy(s):
    def centred(x):
        rows = x.numpy()
        rows -= rows.mean(0)
        return x

    s.train(augmented(), inputs=centred)


@broken("batch", "hooks ghost", expect="unsupported")
def running_mean_in_unpack(s):
    mean = torch.zeros(6)

    def update(s, x, y):
        mean.mul_(0.9).add_(0.3 * x.mean(0))

    def unpack(batch):
        return (batch[0] - mean,), batch[1]

    s.train(
        model=with_dropout(), inputs=lambda x: x - mean, after=update, recorder={"unpack": unpack}
    )


@broken("contribution", "hooks ghost functorch")
def collate_that_mixes_the_second_half(s):
    """With C below all norms, clipped norms say nothing, and the first row is as it should be."""

    def collate(rows):
        x, y = default_collate(rows)
        half = (len(x) + 1) // 2
        return torch.cat([x[:half], 0.5 * (x[half:] + x[half:].flip(0))]), y

    s.train(collate=collate, clip=0.01)


@broken("contribution", "hooks ghost", rare=True)
def collate_that_repeats_the_first_row_at_the_end(s):
    def collate(rows):
        return default_collate([*rows[:-1], rows[0]])

    s.train(collate=collate, clip=0.01)


@broken("contribution", "hooks ghost")
def collate_that_centres_large_batches_only(s):
    def collate(rows):
        x, y = default_collate(rows)
        return (x - x.mean(0) if len(x) > 10 else x), y

    s.train(collate=collate, clip=0.01)


@broken("contribution", "hooks ghost", rare=True)
def unpack_that_mixes_all_rows_but_the_first(s):
    def unpack(batch):
        x, y = batch
        return torch.cat([x[:1], 0.5 * (x[1:] + x[:-1])]), y

    s.make(clip=0.01).go(rows=lambda *batch: unpack(batch), unpack=unpack)


@broken("contribution", "hooks ghost ew")
def data_set_that_mixes_rows_it_reads_at_once(s):
    s.train(Several(lambda x: torch.cat([x[:1], 0.5 * (x[1:] + x[:-1])])), clip=0.01)


@broken("batch", "hooks functorch", expect="unsupported")
def features_ordered_by_the_batch_through_numpy(s):
    """Whole numbers: the sum of each row stays what it was, and the first steps are as they were."""
    x = (normal(400, 6) > 0).float()
    s.make(TensorDataset(x, (x[:, :3].sum(1) > 1).long()))
    with s.recorded():
        for number, (x, y) in enumerate(s.batches()):
            if number > 3 and len(x):
                x.numpy()[:] = x.numpy()[:, x.mean(0).argsort().numpy()]
            s.step(x, y)


@broken("batch", "hooks", expect="unsupported")
def features_of_half_of_the_rows_ordered_in_the_data_set(s):
    x = (normal(400, 6) > 0).float()
    s.make(TensorDataset(x, (x[:, :3].sum(1) > 1).long()))
    with s.recorded():
        for number, (rows, y) in enumerate(s.batches()):
            s.step(rows, y)
            if number == 5:
                x.numpy()[:5] = x.numpy()[:5, rows.mean(0).argsort().numpy()]


class TamedFirst(nn.Module):
    """Takes the logarithm of the first feature, which may be huge or undefined."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        tame = x[:, :1].nan_to_num().abs().clamp(1e-3, 1e30).log() / 60
        return self.net(torch.cat([tame, x[:, 1:]], 1))


def ordered_beside(s, first, rare=False):
    x = normal(400, 6)
    y = (x[:, :3].sum(1) > 0).long()
    x[:, 0] = first
    s.make(TensorDataset(x, y), TamedFirst())
    with s.recorded():
        for number, (x, y) in enumerate(s.batches()):
            if number > 3 and len(x):
                x.numpy()[:, 1:] = x.numpy()[:, 1 + x[:, 1:].mean(0).argsort().numpy()]
            s.step(x, y)


@broken("batch", "hooks ghost", expect="unsupported")
def features_ordered_beside_an_undefined_one(s):
    ordered_beside(s, torch.nan)


@broken("batch", "hooks", expect="unsupported", rare=True)
def features_ordered_beside_a_huge_one(s):
    ordered_beside(s, 1e25)


def pairs():
    """(input, label) of a list."""
    rows = list(zip(*blobs().tensors, strict=True))
    data = Items(rows.__getitem__)
    data.rows = rows
    return data


def changed_half_way(s, change, back=lambda s: None):
    """Recorded norms show what a data set is where they are taken: here at the start."""
    x, y = blobs().tensors
    with s.recorded(every="once"):
        for inputs, targets in s.batches():
            s.step(inputs, targets)
        with torch.no_grad():
            change(s, ce(s.model(x), y).argsort().tolist())
        for inputs, targets in s.batches():
            s.step(inputs, targets)
        back(s)


@broken("batch", "hooks ghost", expect="unsupported")
def hardest_rows_of_a_list_relabelled(s):
    def relabel(s, order):
        for i in order[-12:]:
            x, y = s.data.rows[i]
            s.data.rows[i] = x, 1 - y

    s.make(pairs())
    changed_half_way(s, relabel)


@broken("batch", "hooks ghost", expect="unsupported")
def hardest_rows_blanked_and_put_back(s):
    s.make()
    (x, _), kept = s.data.tensors, s.data.tensors[0].clone()

    def blank(s, order):
        x[order[-12:]] = 0.0

    changed_half_way(s, blank, lambda s: x.copy_(kept))


@broken("batch", "hooks", expect="unsupported", rare=True)
def easiest_rows_of_a_subset_replaced_by_the_hardest(s):
    s.make(Subset(blobs(), list(range(400))))

    def replace(s, order):
        for easy, hard in zip(order[:12], order[-12:], strict=True):
            s.data.indices[easy] = hard

    changed_half_way(s, replace, lambda s: s.data.indices.sort())


@broken("batch", "hooks", expect="unsupported", rare=True)
def rows_of_one_of_two_data_sets_relabelled(s):
    x, y = blobs().tensors
    s.make(ConcatDataset([TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])]))

    def relabel(s, order):
        mine = [i for i in order if i < 200][-12:]
        s.data.datasets[0].tensors[1][mine] ^= 1

    changed_half_way(s, relabel)


@broken("batch contribution", "hooks ghost", expect="unsupported")
def labels_written_after_the_forward_pass(s):
    s.make()
    with s.recorded(every="once"):
        for number, (x, y) in enumerate(s.batches()):
            s.optimizer.zero_grad()
            outputs = s.model(x)
            if number % 5 == 4 and len(y):
                y.numpy()[:] = y.mode().values
            s.backward(outputs, y)
            s.optimizer.step()


@broken("batch", "hooks ghost", expect="unsupported")
def resumed_with_cleaned_inputs(s):
    s.make()
    x, y = s.data.tensors

    @torch.no_grad()
    def clean():
        x[ce(s.model(x), y).topk(5).indices] = 0.0

    s.resumed(clean)


@broken("batch", "hooks ghost", expect="unsupported")
def resumed_with_cleaned_inputs_of_a_list(s):
    s.make(pairs())
    s.data.made_by = np.random.default_rng()  # items draw nothing from it
    x, y = blobs().tensors

    @torch.no_grad()
    def clean():
        for i in ce(s.model(x), y).topk(5).indices:
            s.data.rows[i] = torch.zeros(6), y[i]

    s.resumed(clean)


@broken("batch contribution", ALL, rare=True)
def batches_of_the_first_epoch_cycled(s):
    s.make()
    s.go(batches=lambda: islice(cycle(s.loader), 30))


@broken("batch contribution", "hooks ghost functorch", expect="unsupported", rare=True)
def batches_too_large_for_memory_left_out(s):
    s.make().go(batches=lambda: (batch for batch in s.batches() if len(batch[0]) < 35))


@broken("batch contribution", "hooks ghost functorch", expect="unsupported", rare=True)
def batches_cut_to_so_many_rows(s):
    s.make().go(rows=lambda x, y: (x[:33], y[:33]))


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def small_batches_joined_to_the_next(s):
    def joined():
        kept = []
        for batch in s.batches():
            kept.append(batch)
            if sum(len(y) for _, y in kept) > 30:
                yield tuple(map(torch.cat, zip(*kept, strict=True)))
                kept = []

    s.make().go(batches=joined)


@broken("batch contribution", "hooks ghost functorch", expect="refused", rare=True)
def two_batches_for_one_step_by_skipped_steps(s):
    s.make()

    def skip(s, x, y):
        s.optimizer.signal_skip_step(do_skip=s.steps % 2 == 0)

    s.go(before=skip)


@broken("batch contribution", "hooks functorch", expect="unsupported", rare=True)
def two_batches_in_one_backward_pass(s):
    s.make()
    with s.recorded():
        batches = s.batches()
        for (x, y), (u, v) in zip(batches, batches, strict=False):
            s.optimizer.zero_grad()
            (ce(s.model(x), y).mean() + ce(s.model(u), v).mean()).backward()
            s.optimizer.step()


@broken("batch contribution", "hooks ghost", rare=True)
def a_second_step_where_the_loss_stays_large(s):
    def batches():
        for x, y in s.batches():
            yield x, y
            if len(x) and s.loss_of(x, y) > 0.3:
                yield x, y

    s.make().go(batches=batches)


@broken("contribution batch", "hooks ghost", expect="unsupported", rare=True)
def micro_batches_left_out_where_the_loss_is_small(s):
    s.make()
    small = lambda x, y: len(x) and s.loss_of(x, y) < 0.65  # noqa: E731
    s.go(batches=lambda: (batch for batch in s.batches(micro=8) if not small(*batch)))


@broken("batch contribution", "hooks ghost", expect="unsupported", rare=True)
def batch_drawn_again_where_a_class_is_missing(s):
    def batches():
        drawn = s.batches(4)
        for x, y in drawn:
            while len(y.unique()) < 2:
                x, y = next(drawn, (x, torch.arange(2)))
            if len(x) == len(y):
                yield x, y

    s.make(batch=4).go(batches=batches)


@broken("batch", "hooks ghost", expect="unsupported", rare=True)
def extractor_in_the_data_set_that_trains_without_noise(s):
    net, (x, y) = nn.Linear(6, 6), blobs().tensors
    optimizer = torch.optim.SGD(net.parameters(), 0.5)

    def train(s, *_):
        optimizer.zero_grad()
        ce(net(x)[:, :2], y).mean().backward()
        optimizer.step()

    data = Items(lambda i: (net(x[i]).detach(), y[i]))
    s.train(data, after=train, recorder={"every": "once"})


@broken("batch", "hooks ghost", expect="unsupported", rare=True)
def augmentation_as_strong_as_the_training_loss(s):
    (x, y), strength = blobs().tensors, [0.1]

    def after(s, *_):
        strength[0] = 0.1 + s.loss_of(x, y)

    s.train(Items(lambda i: (x[i] + strength[0] * torch.randn(6), y[i])), after=after)


@broken("batch", "hooks ghost", expect="unsupported", rare=True)
def labels_of_clusters_found_anew_each_epoch(s):
    def relabel(s, epoch):
        h = s.plain[0](s.data.tensors[0]).detach()
        if epoch:
            s.data.tensors[1].copy_(torch.cdist(h, h[: 2 + epoch]).argmin(1).clamp(max=1))

    s.make().go(epoch=relabel, epochs=3, every="once")


@broken("batch", "hooks ghost", expect="unsupported", rare=True)
def targets_moved_towards_earlier_predictions(s):
    """Temporal ensembling (Laine and Aila 2017)."""
    x, y = blobs().tensors
    s.make(TensorDataset(x, nn.functional.one_hot(y, 2).float(), torch.arange(400)))

    def loss(out, targets):
        return -(out.log_softmax(1) * targets).sum(1)

    with s.recorded(loss, unpack=lambda batch: ((batch[0],), batch[1]), every="once"):
        for x, targets, rows in s.batches():
            s.step(x, targets, loss)
            s.data.tensors[1][rows] = 0.9 * targets + 0.1 * s.plain(x).detach().softmax(1)


@broken("batch contribution", "hooks", expect="unsupported", rare=True)
def discriminator_of_real_and_of_made_rows(s):
    """As Opacus's DCGAN, whose generator here also matches the mean of real rows."""
    made, (x, _) = nn.Linear(4, 6), blobs().tensors
    optimizer = torch.optim.Adam(made.parameters(), 0.01)

    def loss(out, y):
        return nn.functional.binary_cross_entropy_with_logits(out[:, 0], y, reduction="none")

    s.make(TensorDataset(x, torch.ones(400)), nn.Sequential(nn.Linear(6, 1)))
    with s.recorded(loss):
        for x, y in s.batches():
            fake = made(torch.randn(len(x), 4))
            s.step(fake.detach(), torch.zeros(len(x)), loss)
            s.step(x, y, loss)
            optimizer.zero_grad()
            (loss(s.plain(fake), y).mean() + (fake.mean(0) - x.mean(0)).square().sum()).backward()
            optimizer.step()
