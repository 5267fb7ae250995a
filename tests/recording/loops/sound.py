"""Sound loops: how batches come and what happens between steps."""

import copy
import io
import random
from collections import namedtuple
from contextlib import suppress
from itertools import islice
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, random_split

from recording.loops.harness import blobs, ce, mlp, normal, sound
from recording.loops.parts import (
    Items,
    Several,
    cnn,
    pictures,
    train_ahead,
    train_on_views,
    vector,
    with_dropout,
)

ALL = "hooks ghost functorch ew"


@sound(ALL)
def plain(s):
    s.train()


@sound("hooks ghost")
def the_readme_script_without_a_seed(s):
    torch.seed()
    s.train(private=False)


@sound("hooks ghost")
def seeds_for_initialisation_only(s):
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    s.train(model=with_dropout())


@sound("hooks ghost functorch", rare=True)
def seed_set_again_each_epoch_with_private_noise(s):
    s.train(model=with_dropout(), epoch=lambda s, epoch: torch.manual_seed(0))


@sound(ALL)
def micro_batches(s):
    s.train(model=with_dropout(), micro=13)


@sound("hooks ghost functorch", rare=True)
def micro_batches_of_one(s):
    s.train(blobs(396), micro=1, batch=8, epochs=1, recorder={"every": "once"})


@sound("hooks ghost functorch")
def empty_batches(s):
    s.train(blobs(102), batch=4, epochs=4, recorder={"every": "once"})


@sound("hooks ghost functorch")
def micro_batches_some_empty(s):
    s.train(blobs(102), batch=4, micro=3, epochs=4, recorder={"every": "once"})


@sound("hooks ghost", rare=True)
def all_epochs_loaded_first(s):
    s.make().go(batches=lambda: list(s.batches()))


@sound("hooks functorch")
def one_batch_ahead(s):
    s.make()
    with s.recorded():
        batches = s.batches()
        ahead = next(batches)
        for following in batches:
            s.step(*ahead)
            ahead = following
        s.step(*ahead)


@sound("hooks ew")
def whole_epoch_loaded_first(s):
    s.make().go(batches=lambda: (batch for _ in range(2) for batch in list(s.loader)))


@sound("hooks ghost")
def two_workers(s):
    s.train(workers=2, epochs=1)


PICTURES = pictures().tensors[0]


def flipped(i):
    x, y = PICTURES[i], i % 2
    return (x.flip(-1) if torch.rand(()) < 0.5 else x) + 0.01 * torch.randn_like(x), y


@sound(ALL)
def augmentation_in_the_data_set(s):
    s.train(Items(flipped, 200), cnn())


@sound("hooks ghost", rare=True)
def augmentation_in_two_workers(s):
    s.train(Items(flipped, 200), cnn(), workers=2, micro=17, epochs=1)


@sound("hooks functorch")
def crops_drawn_by_numpy(s):
    def crop(i):
        k = np.random.randint(4)
        return vector(i, 9)[k : k + 6], i % 2

    s.train(Items(crop))


@sound("hooks ghost")
def subset(s):
    s.train(Subset(blobs(500), list(range(50, 450))))


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, labels=None):
        return {"logits": self.body(x)}


@sound("hooks functorch")
def dicts_by_keyword(s):
    def loss(outputs, batch):
        return ce(outputs["logits"], batch["labels"])

    s.make(Items(lambda i: {"x": vector(i), "labels": int(vector(i).sum() > 0)}), ByName())
    with s.recorded(loss):
        for batch in s.batches():
            s.step(None, batch, loss, outputs=s.model(**batch))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, u, v):
        return self.head(torch.tanh(self.a(u)) * self.b(v))


PAIRS = TensorDataset(normal(400, 6), normal(400, 6, seed=2), torch.arange(400) % 2)


@sound("hooks functorch")
def two_inputs_by_unpack(s):
    s.make(PAIRS, TwoInputs())
    with s.recorded(unpack=lambda batch: ((batch[0], batch[1]), batch[2])):
        for u, v, y in s.batches():
            s.step(None, y, outputs=s.model(u, v))


@sound("hooks ghost", rare=True)
def batches_with_an_index_by_unpack(s):
    s.make(TensorDataset(*blobs().tensors, torch.arange(400)))
    without = ((x, y) for x, y, _ in s.batches())
    s.go(batches=lambda: without, unpack=lambda batch: ((batch[0],), batch[1]))


@sound("hooks functorch", rare=True)
def inputs_by_keyword_by_unpack(s):
    s.make(PAIRS, TwoInputs())
    with s.recorded(unpack=lambda batch: ({"v": batch[1], "u": batch[0]}, batch[2])):
        for u, v, y in s.batches():
            s.step(None, y, outputs=s.model(u, v))


@sound("hooks ghost")
def autoencoder_without_targets_by_unpack(s):
    def loss(outputs, x):
        return (outputs - x).square().mean(1)

    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))
    s.make(TensorDataset(normal(400, 6)), model)
    twice = ((x, x) for (x,) in s.batches())
    s.go(loss, batches=lambda: twice, unpack=lambda batch: ((batch[0],), batch[0]))


Example = namedtuple("Example", "x y")


@sound("hooks ew", rare=True)
def named_tuples_by_unpack(s):
    s.make(collate=lambda rows: Example(*default_collate(rows)))
    s.go(unpack=lambda batch: ((batch.x,), batch.y))


@sound("hooks ghost functorch")
def normalised_by_unpack(s):
    s.make().go(
        rows=lambda x, y: ((x - 0.1) / 2, y),
        unpack=lambda batch: (((batch[0] - 0.1) / 2,), batch[1]),
    )


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x.float() / 255)


@sound(ALL)
def bytes_normalised_in_the_model(s):
    x = (normal(400, 6) * 40 + 128).clamp(0, 255).byte()
    s.train(TensorDataset(x, (x[:, 0] > 128).long()), Pixels())


@sound("hooks ghost")
def batches_moved_to_a_device_and_type(s):
    data = TensorDataset(blobs().tensors[0].double(), blobs().tensors[1])
    s.make(data).go(
        rows=lambda x, y: (x.to("cpu", non_blocking=True).float(), y.to("cpu")),
        unpack=lambda batch: ((batch[0].float(),), batch[1]),
    )


@sound("hooks ghost functorch", rare=True)
def clones_of_what_was_loaded(s):
    s.train(inputs=lambda x: x.clone().contiguous())


def evaluated(s, x, y):
    s.model.eval()
    with torch.no_grad():
        s.model(normal(50, 6, seed=9))
    s.model.train()


@sound("hooks ghost functorch")
def evaluation_after_each_step(s):
    s.train(model=with_dropout(), after=evaluated)


@sound("hooks ghost", rare=True)
def evaluation_on_the_training_set(s):
    def accuracy(s, x, y):
        if s.steps % 13 == 0:
            s.model.eval()
            with torch.no_grad():
                (s.model(s.data.tensors[0]).argmax(1) == s.data.tensors[1]).float().mean()
            s.model.train()

    s.train(model=with_dropout(), after=accuracy)


def evaluated_on_the_loader(s, at_most=None):
    """A pass over the attached loader that begins with gradients off: no draw of it is trained on."""
    s.model.eval()
    with torch.no_grad():
        for k, (x, y) in enumerate(s.loader):
            ce(s.model(x), y).mean().item()
            if k == at_most:
                break
    s.model.train()


@sound("hooks ghost functorch")
def loss_on_the_attached_loader_at_an_epochs_end(s):
    def evaluate(s, epoch):
        return epoch and evaluated_on_the_loader(s)

    s.train(model=with_dropout(), epoch=evaluate, end=evaluated_on_the_loader)


@sound("hooks ghost", rare=True)
def loss_on_the_attached_loader_before_training(s):
    s.train(epoch=lambda s, epoch: epoch or evaluated_on_the_loader(s))


@sound("hooks functorch", rare=True)
def loss_on_the_attached_loader_in_two_workers(s):
    s.train(workers=2, epoch=lambda s, epoch: epoch and evaluated_on_the_loader(s, at_most=4))


@sound("hooks ghost")
def some_of_the_attached_loader_in_the_middle_of_an_epoch(s):
    s.train(after=lambda s, x, y: s.steps % 5 or evaluated_on_the_loader(s, at_most=2), micro=13)


def endless(s, batches):
    for _ in range(20):
        try:
            yield next(batches)
        except StopIteration:
            batches = iter(s.loader)
            yield next(batches)


@sound("hooks ghost")
def iterator_made_before_attaching(s):
    s.make()
    batches = iter(s.loader)
    s.go(batches=lambda: endless(s, batches))


@sound("hooks functorch", rare=True)
def iterator_made_and_read_before_attaching(s):
    s.make()
    batches = iter(s.loader)
    assert len(next(batches)) == 2
    s.go(batches=lambda: endless(s, batches))


@sound("hooks functorch")
def passes_left_at_the_fifth_batch(s):
    s.make()
    with s.recorded():
        for _ in range(6):
            for k, (x, y) in enumerate(s.loader):
                if k == 5 or s.steps == 27:
                    break
                s.step(x, y)


@sound("hooks functorch")
def steps_counted_in_all_epochs(s):
    s.make()
    with s.recorded():
        for _ in range(9):
            for x, y in s.loader:
                if s.steps == 20:
                    break
                s.step(x, y)


@sound("hooks functorch")
def short_passes_resumed_in_the_middle_of_one(s):
    s.make()
    saved, k = None, 0
    for last in 13, 28, 30:
        with s.recorded(resume_at=saved) as recorder:
            while s.steps < last:
                for x, y in s.loader:
                    if k == 5 or s.steps == last:
                        break
                    s.step(x, y)
                    k += 1
                k = k % 5
            saved = recorder.state_dict()


@sound("hooks functorch")
def sessions_of_four_steps(s):
    s.make()
    saved = None
    for _ in range(6):
        with s.recorded(resume_at=saved) as recorder:
            for k, (x, y) in enumerate(s.loader):
                if k == 4:
                    break
                s.step(x, y)
            saved = recorder.state_dict()


@sound("hooks functorch")
def sessions_interrupted_three_times(s):
    s.make()
    for last in 4, 9, 20:
        resumed = {"resume_at": s.steps} if s.steps else {}
        with suppress(KeyboardInterrupt), s.recorded(every="once", **resumed):
            for x, y in s.batches(2):
                if s.steps == last:
                    raise KeyboardInterrupt
                s.step(x, y)
    with s.recorded(every="once", resume_at=s.steps):
        for x, y in s.loader:
            s.step(x, y)


@sound("hooks functorch")
def logging_forward_in_training_mode(s):
    def log(s, x, y):
        with torch.no_grad():
            ce(s.model(x), y).mean().item()

    s.train(model=with_dropout(), after=log)


@sound("hooks", rare=True)
def saliency_between_steps(s):
    def saliency(s, x, y):
        s.model.disable_hooks()
        z = normal(4, 6).requires_grad_()
        torch.autograd.grad(s.model(z).sum(), z)
        s.model.enable_hooks()

    s.train(after=saliency)


@sound("hooks ghost")
def resumed_from_a_checkpoint(s):
    resumed(s, with_dropout, torch.optim.Adam)


@sound("hooks")
def resumed_with_a_state_that_is_loaded_in_another_type(s):
    """NAdam has a float32 number for each parameter, which load_state_dict makes a float64."""
    x, y = blobs().tensors
    resumed(s, lambda: mlp().double(), torch.optim.NAdam, TensorDataset(x.double(), y))


@sound("hooks")
def resumed_with_buffers_of_all_kinds(s):
    """Infinite, complex, empty, half and not defined; one is of a view."""
    waves = normal(3, 4).to(torch.complex64)
    values = torch.tensor([torch.nan, torch.inf, -torch.inf])
    kinds = values, values[:2], values[1:], waves, waves.T, waves[:0], waves.real.bfloat16()

    def model():
        made = mlp()
        for number, value in enumerate((*kinds, torch.tensor(3), torch.tensor([True, False]))):
            made.register_buffer(f"kind{number}", value.clone())
        made.frozen = nn.Parameter(values[:1].clone(), requires_grad=False)
        return made

    resumed(s, model, torch.optim.Adagrad)


def resumed(s, model, opt, data=None):
    saved = {}
    for resume in (False, True):
        s.make(data, model=model(), opt=lambda p: opt(p, 1e-2))
        if resume:
            s.model.load_state_dict(saved["model"])
            s.optimizer.load_state_dict(saved["optimizer"])
        with s.recorded(**({"resume_at": saved["log"]} if resume else {})) as recorder:
            for x, y in s.batches(1):
                s.step(x, y)
            saved = {
                "model": copy.deepcopy(s.model.state_dict()),
                "optimizer": copy.deepcopy(s.optimizer.state_dict()),
                "log": recorder.state_dict(),
            }


@sound("hooks ghost functorch")
def resumed_with_dropout_and_augmentation(s):
    x, y = blobs().tensors
    data = Items(lambda i: (x[i] + 0.1 * torch.randn(6), y[i]))
    resumed(s, with_dropout, torch.optim.Adam, data)


def with_its_own(generator, change):
    x, y = blobs().tensors
    data = Items(lambda i: (change(data.own, x[i], i), y[i]))
    data.own = generator
    return data


def shifted(own, x, i):
    return x + 0.1 * own.normal(size=6).astype("f4")


@sound(ALL)
def data_set_that_draws_from_its_own_generator(s):
    s.train(with_its_own(np.random.default_rng(), shifted))


_GLOBAL, _MODULE = np.random.default_rng(), ModuleType("outer")
_MODULE.inner = ModuleType("inner")
_MODULE.inner.generator = _GLOBAL


class Lazy:
    @property
    def __dict__(self):
        raise RuntimeError("outside of its context")


def of_reach(generator):
    """The data set's generator in a global, in a closure, or deep inside behind many items."""

    class Jitter:
        __slots__ = ("lazy", "parts")

        def __init__(self):
            self.lazy, self.parts = Lazy(), [random.SystemRandom(), generator]

        def __call__(self, x):
            return shifted(self.parts[1], x, 0)

    class ByProperty(Dataset):
        own = property(lambda self: _GLOBAL)

        def __len__(self):
            return 400

        def __getitem__(self, i):
            return shifted(self.own, x[i], i), i % 2

    x, many = blobs().tensors[0], [[k] for k in range(9000)]
    deep = Items(lambda i: (deep.steps[0].transforms[0](x[i]), i % 2))
    deep.items, deep.steps = many, [SimpleNamespace(transforms=[Jitter()])]
    return {
        "global": Items(lambda i: (shifted(_GLOBAL, x[i], i), i % 2)),
        "closure": Items(lambda i: (shifted(generator, x[i], i), i % 2)),
        "transform": Subset(deep, range(400)),
        "property": ByProperty(),
        "module": Items(lambda i: (shifted(_MODULE.inner.generator, x[i], i), i % 2)),
    }


for _place in ("global", "closure", "transform", "property", "module"):

    @sound("hooks ghost", name=f"data_set_that_draws_from_a_{_place}", rare=_place != "global")
    def drawn_from(s, place=_place):
        s.train(of_reach(np.random.default_rng())[place])


@sound("hooks ghost")
def data_set_that_seldom_draws_from_its_own_generator(s):
    data = with_its_own(random.Random(), lambda own, x, i: x + (own.random() < 0.02))
    s.train(Subset(data, range(400)))


@sound("hooks functorch")
def resumed_with_a_new_generator_of_the_data_set(s):
    s.make(with_its_own(np.random.RandomState(), shifted))
    s.resumed(lambda: vars(s.data).update(own=np.random.RandomState()))


@sound("hooks ghost")
def resumed_with_an_empty_cache(s):
    def cached(kept, x, i):
        if np.isnan(kept[i, 0]):
            kept[i] = x
        return kept[i].copy()

    s.make(with_its_own(np.full((400, 6), np.nan, dtype="f4"), cached))
    s.resumed(lambda: s.data.own.fill(np.nan), every="once")


@sound("hooks ghost")
def tensor_data_set_with_items_of_its_own(s):
    class Doubled(TensorDataset):
        def __getitem__(self, i):
            return 2 * self.tensors[0][i], self.tensors[1][i]

    s.train(Doubled(*blobs().tensors))


@sound("hooks ghost", rare=True)
def checkpoints_saved_each_epoch(s):
    def save(s, x, y):
        if s.steps % 13 == 0:
            torch.save(s.model.state_dict(), s.run_dir.parent / f"model_step{s.steps}.pt")

    s.train(after=save)


def moving_average(s):
    return AveragedModel(s.model._module, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@sound("hooks ghost functorch")
def moving_average_kept_apart(s):
    s.make()
    average = moving_average(s)
    s.go(after=lambda s, x, y: average.update_parameters(s.model._module))


@sound("hooks ghost")
def moving_average_swapped_in_for_evaluation(s):
    s.make()
    average = moving_average(s)
    with s.recorded():
        for x, y in s.batches():
            s.step(x, y)
            average.update_parameters(s.model._module)
            kept = [p.detach().clone() for p in s.model.parameters()]
            for p, mean in zip(s.model.parameters(), average.module.parameters(), strict=True):
                p.data.copy_(mean)
            evaluated(s, x, y)
            for p, old in zip(s.model.parameters(), kept, strict=True):
                p.data.copy_(old)


@sound("hooks ghost functorch", rare=True)
def gradients_set_to_zero_on_the_model(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            s.model.zero_grad(set_to_none=True)
            s.optimizer.zero_grad()
            s.backward(s.model(x), y)
            s.optimizer.step()
            s.model.zero_grad()


@sound("hooks functorch", rare=True)
def norm_of_the_noisy_gradient_logged(s):
    s.train(after=lambda s, x, y: [p.grad.norm().item() for p in s.model.parameters()])


@sound("hooks functorch ew", rare=True)
def clip_grad_norm_before_the_step(s):
    s.train(between=lambda s, x, y: nn.utils.clip_grad_norm_(s.model.parameters(), 1.0))


@sound("hooks ghost")
def model_not_wrapped(s):
    net = mlp()
    s.make(model=net, wrap_model=False)
    s.model = net
    s.go()


@sound("hooks ghost")
def hooks_attached_in_place_of_the_model(s):
    net = mlp()
    s.make(model=net, wrap_model=False)
    with s.recorded():
        s.model = net
        for x, y in s.batches():
            s.step(x, y)


@sound("ghost")
def module_inside_the_wrapper_attached(s):
    s.make()
    wrapper, s.model = s.model, s.model._module
    with s.recorded():
        s.model = wrapper
        for x, y in s.batches():
            s.step(x, y)


@sound("hooks ghost functorch", rare=True)
def random_numbers_drawn_by_the_loop(s):
    s.train(model=with_dropout(), after=lambda s, x, y: torch.randn(s.steps % 5))


@sound("hooks ghost", rare=True)
def steps_stopped_in_the_middle_of_an_epoch(s):
    s.make()
    with s.recorded():
        for k, (x, y) in enumerate(s.batches()):
            if k == 20:
                break
            s.step(x, y)


@sound("hooks functorch", rare=True)
def closure_of_the_step(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():

            def closure(x=x, y=y):
                s.optimizer.zero_grad()
                loss = ce(s.model(x), y).mean()
                loss.backward()
                return loss

            s.optimizer.step(closure)


@sound("hooks functorch", rare=True)
def micro_batches_by_hand(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            parts = list(zip(x.split(12), y.split(12), strict=True))
            for k, part in enumerate(parts):
                s.optimizer.signal_skip_step(do_skip=k < len(parts) - 1)
                s.step(*part)


@sound("hooks ghost functorch")
def normalised_by_the_collate_function(s):
    def collate(rows):
        x, y = default_collate(rows)
        return (x - 0.1) / 2, y

    s.train(collate=collate)


@sound("hooks ghost functorch")
def copies_and_files_of_the_whole_model_between_steps(s):
    kept = []

    def keep(s, x, y):
        kept.append(copy.deepcopy(s.model._module))
        with torch.no_grad():
            kept[-1](x)
        if s.mode == "hooks":
            torch.save(kept[-1], io.BytesIO())

    s.train(after=keep)


@sound("hooks ghost")
def batch_turned_at_times_by_the_collate_function(s):
    def collate(rows):
        x, y = default_collate(rows)
        return (-x if torch.rand(1) < 0.3 else x), y

    s.train(collate=collate)


@sound("hooks ghost", rare=True)
def data_set_that_reads_several_rows_at_once(s):
    s.train(Several(lambda x: x), clip=0.01)


@sound("hooks functorch")
def augmentation_of_several_rows_at_once(s):
    def flipped(x):
        return torch.where(torch.rand(len(x), 1) < 0.1, -x, x)

    s.train(Several(flipped))


class Cached(Dataset):
    """Items that are made when they are first read, and kept in an array; positions in lists."""

    def __init__(self):
        self.made, self.known = np.zeros((400, 6), np.float32), np.zeros(400, bool)
        self.names, self.order = [f"row {i}" for i in range(400)], list(range(400))

    def __len__(self):
        return 400

    def __getitem__(self, i):
        if not self.known[i]:
            self.made[i], self.known[i] = blobs().tensors[0][self.order[i]], True
        return torch.as_tensor(self.made[i]), int(self.made[i, :3].sum() > 0)


@sound("hooks ghost")
def items_kept_in_an_array_when_they_are_first_read(s):
    s.train(Cached())


@sound("hooks", rare=True)
def items_of_a_subset_kept_in_an_array(s):
    s.train(Subset(Cached(), range(380)))


@sound("hooks functorch")
def views_of_an_example_averaged_before_clipping(s):
    train_on_views(s, lambda p, views: p.grad_sample.unflatten(0, (-1, views)).mean(1))


@sound("hooks ghost")
def loaded_ahead_by_a_thread(s):
    s.make()
    train_ahead(s)


@sound("hooks ghost")
def augmentation_of_few_rows(s):
    x, y = blobs().tensors

    def item(i):
        return x[i] + 0.1 * torch.randn(6) * (torch.rand(()) < 0.05), y[i]

    s.train(Items(item), epochs=3)


@sound("hooks", rare=True)
def an_iterator_for_each_step(s):
    s.make()
    with s.recorded():
        for _ in range(20):
            s.step(*next(iter(s.loader)))


def _noisy(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda x: x + 0.1 * torch.randn(x.shape, generator=generator)


@sound("hooks")
def rows_in_lists_that_a_closure_augments(s):
    x, y = blobs().tensors
    rows, augmented = x.repeat(1, 10).tolist(), _noisy(3)
    s.train(Items(lambda i: (augmented(torch.tensor(rows[i][:6])), y[i])))


@sound("hooks")
def items_that_sixty_closures_augment(s):
    x, y = blobs().tensors
    augmented = {k: _noisy(k) for k in range(60)}
    s.train(Items(lambda i: (augmented[i % 60](x[i]), y[i])))


@sound("hooks ghost", rare=True)
def wrapper_around_the_loader(s):
    """As bars of progress and prefetchers are."""

    class Wrapper:
        def __init__(self, loader):
            self.loader = loader

        def __iter__(self):
            for x, y in self.loader:
                yield x.to("cpu", non_blocking=True), y.to("cpu")

    loader = Wrapper(s.make().loader)
    s.go(batches=lambda: (batch for _ in range(2) for batch in loader))


@sound("hooks functorch", rare=True)
def norms_of_single_gradients_logged(s):
    def log(s, x, y):
        return [p.grad_sample.flatten(1).norm(dim=1).mean() for p in s.optimizer.params]

    s.train(between=log)


@sound("hooks ghost functorch", rare=True)
def detection_of_anomalies_and_a_profiler(s):
    with torch.autograd.set_detect_anomaly(True), torch.profiler.profile():
        s.train(epochs=1)


@sound("hooks ghost")
def hooks_that_log_activations_and_gradients(s):
    log = []
    s.make()
    first, _, last = s.model._module
    first.register_forward_hook(lambda module, inputs, out: log.append(out.detach().mean()))
    last.register_full_backward_hook(lambda module, inputs, out: log.append(out[0].norm()))
    s.go()


@sound("hooks ghost", rare=True)
def gradients_of_outputs_logged(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            outputs = s.model(x)
            outputs.retain_grad()
            s.step(None, y, outputs=outputs)
            assert outputs.grad.shape == outputs.shape


@sound("hooks ghost")
def random_state_put_back_after_an_evaluation(s):
    def evaluate(s, *_):
        state = torch.get_rng_state()
        with torch.no_grad():
            s.model(torch.randn(9, 6))
        torch.set_rng_state(state)

    s.train(model=with_dropout(), after=evaluate)


@sound(ALL)
def gradients_cleared_after_the_step(s):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            s.backward(s.model(x), y)
            s.optimizer.step()
            s.optimizer.zero_grad(set_to_none=False)


@sound("hooks ghost functorch", rare=True)
def stopped_at_a_number_of_steps(s):
    s.make().go(batches=lambda: islice(s.batches(9), 40))


@sound("hooks ghost")
def step_after_the_next_batch_is_loaded(s):
    s.make()
    with s.recorded():
        for number, (x, y) in enumerate(s.batches()):
            if number:
                s.optimizer.step()
            s.optimizer.zero_grad()
            s.backward(s.model(x), y)
        s.optimizer.step()


@sound("hooks ghost", rare=True)
def step_hook_of_the_loop_around_that_of_opacus(s):
    own, steps = s.make().optimizer.step_hook, []
    s.optimizer.attach_step_hook(lambda optimizer: own(optimizer) or steps.append(1))
    s.go()


@sound("hooks ghost", rare=True)
def best_weights_on_other_rows_kept_apart(s):
    rows, kept = (normal(30, 6, seed=8), torch.arange(30) % 2), {}

    def keep(s, x, y):
        kept[s.loss_of(*rows)] = copy.deepcopy(s.model.state_dict())

    s.train(after=keep)


@sound("hooks ghost functorch", rare=True)
def names_of_rows_in_the_batch(s):
    x, y = blobs().tensors
    s.make(Items(lambda i: {"x": x[i], "y": y[i], "name": f"row {i}"}))
    with s.recorded(unpack=lambda batch: ((batch["x"],), batch["y"])):
        for batch in s.batches():
            s.step(batch["x"], batch["y"])


@sound("hooks ghost functorch", rare=True)
def split_at_random_with_a_seed(s):
    generator = torch.Generator().manual_seed(42)
    s.train(random_split(blobs(500), [400, 100], generator)[0])


@sound("hooks ghost", rare=True)
def state_of_the_optimizer_saved_and_loaded_at_once(s):
    def load(s, epoch):
        s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict()))

    s.train(opt=lambda p: torch.optim.Adam(p, 1e-2), epoch=load)


@sound("hooks", rare=True)
def evaluated_by_a_copy(s):
    def evaluate(s, epoch):
        with torch.inference_mode():
            copy.deepcopy(s.model._module).eval()(s.data.tensors[0])

    s.train(epoch=evaluate)


class Lightning(nn.Module):
    """A module with its own step of training."""

    def __init__(self):
        super().__init__()
        self.net, self.losses = mlp(), []

    def forward(self, x):
        return self.net(x)

    def training_step(self, x, y):
        loss = ce(self(x), y).mean()
        self.losses.append(loss.item())
        return loss


@sound("hooks functorch")
def training_step_of_the_module(s):
    s.make(model=Lightning())
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            s.model._module.training_step(x, y).backward()
            s.optimizer.step()
