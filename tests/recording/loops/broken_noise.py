"""Broken loops: the noise is missing, too little, not independent, or anyone can draw it again."""

import secrets
import time
from unittest.mock import patch

import torch
from opacus.optimizers.optimizer import DPOptimizer, _generate_noise

from recording.loops.harness import broken, private_generator
from recording.loops.parts import with_dropout

SUMMED = "hooks ghost functorch"  # modes in which p.summed_grad is the sum before the noise


def replaced(s, name, function):
    """A method of the optimizer replaced by `function(optimizer, its own method)`."""
    own = getattr(s.optimizer, name)
    setattr(s.optimizer, name, lambda *args: function(s.optimizer, own, *args))


def trained_with(s, name, function, **options):
    s.make(**options)
    replaced(s, name, function)
    s.go()


def add_noise_of(draw):
    """add_noise with noise `draw(p, normal numbers)` made of the right one."""

    def add(optimizer, own):
        deviation = optimizer.noise_multiplier * optimizer.max_grad_norm
        for p in optimizer.params:
            right = deviation * torch.randn(p.shape, generator=optimizer.generator)
            p.grad = (p.summed_grad + draw(p, right)).view_as(p)
            p.summed_grad._processed = True

    return add


@broken("noise", SUMMED)
def no_noise_in_add_noise(s):
    trained_with(s, "add_noise", add_noise_of(lambda p, right: 0.0))


@broken("noise", SUMMED)
def noise_taken_out_when_scaled(s):
    def scale(optimizer, own):
        for p in optimizer.params:
            p.grad = p.summed_grad.clone()
        own()

    trained_with(s, "scale_grad", scale)


@broken("noise", SUMMED, rare=True)
def noise_taken_out_by_a_step_hook(s):
    def without(optimizer, *_):
        for p in s.optimizer.params:
            p.grad = p.summed_grad.view_as(p) / s.optimizer.expected_batch_size

    s.make()
    s.inner.register_step_pre_hook(without)
    s.go()


@broken("noise", SUMMED, rare=True)
def half_of_the_noise(s):
    trained_with(s, "add_noise", add_noise_of(lambda p, right: right / 2))


@broken("noise", SUMMED, expect="unsupported", rare=True)
def nine_tenths_of_the_noise(s):
    trained_with(s, "add_noise", add_noise_of(lambda p, right: 0.9 * right))


@broken("noise", SUMMED)
def noise_on_weights_only(s):
    trained_with(s, "add_noise", add_noise_of(lambda p, right: right if p.ndim > 1 else 0.0))


@broken("noise", SUMMED, expect="unsupported", rare=True)
def one_number_of_noise_for_each_tensor(s):
    trained_with(s, "add_noise", add_noise_of(lambda p, right: right.flatten()[0].expand(p.shape)))


@broken("noise", SUMMED, expect="unsupported")
def uniform_noise_of_the_same_variance(s):
    def uniform(p, right):
        return 3**0.5 * (2 * torch.special.ndtr(right) - 1)

    trained_with(s, "add_noise", add_noise_of(uniform))


@broken("noise", SUMMED)
def antithetic_noise(s):
    kept = {}

    def draw(p, right):
        return -kept.pop(id(p)) if id(p) in kept else kept.setdefault(id(p), right)

    trained_with(s, "add_noise", add_noise_of(draw))


@broken("noise source", SUMMED, rare=True)
def noise_used_again_in_the_next_step(s):
    kept = {}

    def draw(p, right):
        last, kept[id(p)] = kept.get(id(p)), right
        return right if last is None else (last + right) / 2**0.5

    trained_with(s, "add_noise", add_noise_of(draw))


@broken("noise source", "hooks ghost", rare=True)
def generator_set_back_each_step(s):
    s.make()
    state = s.optimizer.generator.get_state()
    s.go(between=lambda s, x, y: s.optimizer.generator.set_state(state))


@broken("source noise", SUMMED)
def seed_set_inside_a_fork(s):
    k = [0]

    def seeded(optimizer, own):
        k[0] += 1
        with torch.random.fork_rng():
            torch.manual_seed(k[0])
            own()

    torch.seed()
    trained_with(s, "add_noise", seeded, private=False)


@broken("source noise", SUMMED, expect="unsupported", rare=True)
def seeded_generator_inside_add_noise(s):
    generator = torch.Generator()
    k = [0]

    def draw(p, right):
        k[0] += 1
        return torch.randn(p.shape, generator=generator.manual_seed(k[0]))

    trained_with(s, "add_noise", add_noise_of(draw))


class Quiet(DPOptimizer):
    def add_noise(self):
        for p in self.params:
            p.grad = p.summed_grad.view_as(p)


@broken("noise", "hooks functorch", expect="refused")
def optimizer_of_a_subclass_without_noise(s):
    s.make()
    s.optimizer.__class__ = Quiet
    s.go()


def trained_with_noise_of(s, function):
    """Opacus's own function that draws noise replaced, in the modes that look it up there."""
    s.make()
    with patch("opacus.optimizers.optimizer._generate_noise", function):
        s.go()


@broken("noise", "hooks functorch", rare=True)
def noise_drawn_by_a_replaced_function(s):
    def tiny(std, reference, **options):
        return _generate_noise(std / 100, reference, **options)

    trained_with_noise_of(s, tiny)


@broken("noise", "hooks functorch", expect="unsupported")
def half_of_the_noise_is_minus_the_other_half(s):
    """It takes a hundred steps until statistics show it; the function is not Opacus's own."""

    def drawn(std, reference, **options):
        noise = _generate_noise(std, reference, **options).flatten()
        half = len(noise) // 2
        noise[half : 2 * half] = -noise[:half]
        return noise.view_as(reference)

    trained_with_noise_of(s, drawn)


@broken("noise", "hooks functorch ew", rare=True)
def noise_of_two_steps_that_comes_again(s):
    used = {}

    def again(std, reference, **options):
        mine = used.setdefault(reference.shape, [])
        fresh = _generate_noise(std, reference, **options)
        mine.append(mine[-2] if len(mine) > 3 else fresh)
        return mine[-1]

    trained_with_noise_of(s, again)


@broken("noise", "hooks functorch ew", rare=True)
def noise_of_seven_steps_that_comes_again_with_other_signs(s):
    used = {}

    def again(std, reference, **options):
        mine = used.setdefault(reference.shape, [])
        fresh = _generate_noise(std, reference, **options)
        mine.append(fresh if len(mine) < 7 else mine[-7] * (1, -1, -1)[len(mine) // 7 - 1])
        return mine[-1]

    trained_with_noise_of(s, again)


@broken("noise", "hooks functorch ew", expect="unsupported", rare=True)
def noise_of_one_row_for_all(s):
    def broad(std, reference, **options):
        noise = _generate_noise(std, reference, **options)
        return noise[:1].expand(reference.shape) if noise.ndim > 1 else noise

    trained_with_noise_of(s, broad)


@broken("source", "hooks ghost functorch ew")
def seed_of_the_script(s):
    torch.manual_seed(0)
    s.train(private=False)


@broken("source", "hooks ghost ew", rare=True)
def seed_42_behind_the_optimizer(s):
    s.make(private=False)
    torch.manual_seed(42)
    s.go()


@broken("source", "hooks ghost")
def seed_set_in_each_step(s):
    s.train(private=False, before=lambda s, x, y: torch.manual_seed(s.steps))


def seeded_each_epoch(s, seed):
    torch.seed()
    s.train(private=False, epoch=lambda s, epoch: torch.manual_seed(seed(epoch)))


@broken("source", "hooks ghost", rare=True)
def seed_set_once_an_epoch(s):
    seeded_each_epoch(s, lambda epoch: 1000 + epoch)


@broken("source", "hooks ghost", rare=True)
def seed_of_the_clock_while_training(s):
    seeded_each_epoch(s, lambda epoch: time.time_ns() + epoch)


@broken("source", "hooks")
def seed_of_the_clock_for_a_private_generator(s):
    s.train(before=lambda s, x, y: s.optimizer.generator.manual_seed(time.time_ns()))


@broken("noise", "hooks ghost ew", expect="unsupported")
def noise_drawn_until_it_points_along_the_gradient(s):
    def burn(s, x, y):
        gradients, generator = s.gradients(x, y), s.optimizer.generator
        for _ in range(20):
            coming = torch.Generator()
            coming.set_state(generator.get_state())
            noise = [torch.randn(g.shape, generator=coming) for g in gradients]
            if sum(float((g * n).sum()) for g, n in zip(gradients, noise, strict=True)) > 0:
                return
            torch.randn(7, generator=generator)

    s.train(between=burn)


@broken("source", "hooks functorch", rare=True)
def seed_set_and_undone_around_each_step(s):
    torch.seed()
    s.make(private=False)
    with s.recorded():
        for k, (x, y) in enumerate(s.batches()):
            state = torch.get_rng_state()
            torch.manual_seed(k)
            s.step(x, y)
            torch.set_rng_state(state)


@broken("source", "hooks ghost functorch ew")
def generator_with_the_seed_of_torch(s):
    s.make(noise_generator=torch.Generator()).go()


@broken("source", "hooks ghost ew", rare=True)
def generator_with_a_short_seed(s):
    s.train(noise_generator=torch.Generator().manual_seed(1234))


@broken("source", "hooks ghost", expect="unsupported", rare=True)
def generator_set_to_a_known_state(s):
    generator = private_generator()
    generator.set_state(torch.Generator().manual_seed(7).get_state())
    s.train(noise_generator=generator)


@broken("source batch", "hooks ghost")
def batches_from_a_seed_and_private_noise(s):
    s.make(private=False, noise_generator=private_generator())
    s.loader.batch_sampler.generator = torch.Generator().manual_seed(0)
    s.go()


@broken("source", "hooks ghost", rare=True)
def seeded_under_dropout(s):
    torch.manual_seed(0)
    s.train(model=with_dropout(), private=False)


@broken("noise", "hooks ghost", expect="refused")
def noise_multiplier_zero_in_one_step(s):
    s.make()
    with s.recorded():
        for k, (x, y) in enumerate(s.batches()):
            s.optimizer.noise_multiplier = float(k != 7)
            s.step(x, y)
            s.optimizer.noise_multiplier = 1.0


def plain_gradient_added(s):
    for p, g in zip(s.optimizer.params, s.gradients(*s.data.tensors), strict=True):
        p.grad += g


@broken("noise update", SUMMED)
def plain_gradient_added_by_a_step_hook(s):
    s.make()
    s.inner.register_step_pre_hook(lambda *_: plain_gradient_added(s))
    s.go()


@broken("noise update", SUMMED, rare=True)
def plain_gradient_added_by_a_hook_put_on_while_training(s):
    s.make()
    with s.recorded():
        s.inner.register_step_pre_hook(lambda *_: plain_gradient_added(s))
        for x, y in s.batches():
            s.step(x, y)


def changed_between_noise_and_update(s, change):
    s.make()
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            s.backward(s.model(x), y)
            if s.optimizer.pre_step():
                change(s, y)
                s.inner.step()


@broken("noise update", SUMMED)
def plain_gradient_added_between_noise_and_update(s):
    changed_between_noise_and_update(s, lambda s, y: plain_gradient_added(s))


@broken("noise update", SUMMED, rare=True)
def little_plain_gradient_added_between_noise_and_update(s):
    def add(s, y):
        s.optimizer.params[0].grad[0, 0] += 0.01 * float(y.float().mean())

    changed_between_noise_and_update(s, add)


@broken("source noise", "hooks ghost", expect="unsupported")
def generators_changed_until_the_noise_suits(s):
    def change(s, x, y):
        for _ in range(8):
            coming = torch.Generator()
            coming.set_state(s.optimizer.generator.get_state())
            noise = torch.randn(8, 6, generator=coming)
            if float((noise * s.gradients(x, y)[0]).sum()) < 0:
                break
            s.optimizer.generator = private_generator()

    s.train(before=change)


@broken("source noise", "hooks functorch", expect="unsupported", rare=True)
def a_generator_with_a_large_seed_for_each_step(s):
    def change(s, x, y):
        s.optimizer.generator = torch.Generator().manual_seed(2**40 + s.steps)

    s.train(before=change)


@broken("source", "hooks", expect="unsupported", rare=True)
def batches_of_a_generator_that_nobody_seeded(s):
    """torch.Generator() begins with the same seed in each process."""
    s.make()
    s.loader.batch_sampler.generator = torch.Generator()
    s.go()


@broken("noise source", "hooks ghost", expect="unsupported", rare=True)
def state_of_the_generator_of_noise_kept_for_each_epoch(s):
    kept = []

    def epoch(s, number):
        kept.append(s.optimizer.generator.get_state())
        s.optimizer.generator.set_state(kept[0])

    s.train(epoch=epoch)


@broken("noise", "hooks ghost", expect="refused", rare=True)
def step_taken_twice(s):
    s.make().go(after=lambda s, x, y: s.optimizer.step())


@broken("noise", "hooks ghost", expect="unsupported")
def one_secret_seed_for_noise_and_batches(s):
    """Both are of the same numbers: noise is small where the row of its number was drawn."""
    seed = secrets.randbits(63)
    s.make(private=False, noise_generator=torch.Generator().manual_seed(seed))
    s.loader.batch_sampler.generator = torch.Generator().manual_seed(seed)
    s.go()


@broken("noise", "hooks ghost", expect="unsupported")
def generator_of_noise_with_the_seed_of_the_script(s):
    """The first weights are of the numbers that its noise is of."""
    torch.seed()
    seed = torch.initial_seed()
    s.train(private=False, noise_generator=torch.Generator().manual_seed(seed))


@broken("noise", "hooks ghost", expect="unsupported", rare=True)
def batches_drawn_by_a_copy_of_the_generator_of_noise(s):
    s.make()
    s.loader.batch_sampler.generator.set_state(s.optimizer.generator.get_state())
    s.go()


@broken("noise", "hooks ghost", expect="unsupported")
def each_step_in_a_fork_of_the_generators(s):
    """The next batch is drawn by the numbers of the noise before, and so is some of its noise."""
    torch.seed()
    s.make(private=False)
    with s.recorded():
        for x, y in s.batches():
            with torch.random.fork_rng():
                s.step(x, y)


@broken("noise", "hooks ghost", expect="unsupported", rare=True)
def each_update_in_a_fork_of_the_generators(s):
    torch.seed()
    s.make(model=with_dropout(), private=False)
    with s.recorded():
        for x, y in s.batches():
            s.optimizer.zero_grad()
            s.backward(s.model(x), y)
            with torch.random.fork_rng():
                s.optimizer.step()
