"""The noise of real Opacus runs, sound and broken, and of simulated ones."""

import random

import numpy as np
import opacus.optimizers.optimizer as opacus_optimizer
import opacus.optimizers.optimizer_fast_gradient_clipping as ghost_optimizer
import pytest
import torch
from torch import nn

from indpriv.norm_log.evidence import noise_check
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import GradientCanaries
from indpriv.recording.opacus.gradients import NoiseWatch
from runs import make_run, record

SOUND = opacus_optimizer._generate_noise


def check_of(run_dir):
    (check,) = [check for check in verify(open_run(run_dir)) if check.key == "noise"]
    return check


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_noise_of_sound_runs_is_as_accounted(mode, tmp_path):
    record(make_run(mode=mode), tmp_path / "run", attack=GradientCanaries(20))
    assert check_of(tmp_path / "run").status == "passed"
    noise = read_state(tmp_path / "run").sessions[-1].noise
    n_parameters = 8 * 6 + 8 + 2 * 8 + 2
    assert noise.values == 20 * n_parameters
    assert noise.variance == pytest.approx(1, abs=6 * np.sqrt(2 / noise.values))


def half(std, reference, **options):
    return SOUND(0.5 * std, reference, **options)


def one_bias_without(std, reference, **options):
    return SOUND(0.0 if reference.shape == (8,) else std, reference, **options)


def seeded_every_step(std, reference, generator, **options):
    generator = torch.Generator().manual_seed(0)
    return SOUND(std, reference, generator, **options)


def along_the_gradient(std, reference, **options):
    direction = reference / max(float(reference.norm()), 1e-9)
    return SOUND(std, reference, **options) + 2 * std * direction


@pytest.mark.parametrize(
    ("fault", "mode", "found"),
    [
        (half, "hooks", "the variance of the noise is 0.2"),
        (half, "ghost", "the variance of the noise is 0.2"),
        (one_bias_without, "hooks", "one parameter has 0.0000"),
        (seeded_every_step, "hooks", "correlated with that of the previous step"),
        (along_the_gradient, "hooks", "depends on the gradients"),
    ],
)
def test_broken_noise_fails_in_one_run(fault, mode, found, tmp_path, monkeypatch):
    for module in (opacus_optimizer, ghost_optimizer):
        monkeypatch.setattr(module, "_generate_noise", fault)
    record(make_run(mode=mode, learning_rate=0.01), tmp_path / "run", epochs=4)
    check = check_of(tmp_path / "run")
    assert check.status == "failed"
    assert found in check.detail


def test_noise_that_is_used_twice_fails(tmp_path, monkeypatch):
    kept = []

    def every_other(std, reference, **options):
        kept.append(SOUND(std, reference, **options))
        n_tensors = 4
        step = (len(kept) - 1) // n_tensors
        return kept[-1] if step % 2 == 0 else kept[-1 - n_tensors]

    monkeypatch.setattr(opacus_optimizer, "_generate_noise", every_other)
    record(make_run(), tmp_path / "run")
    assert "correlated with that of the previous step" in check_of(tmp_path / "run").detail


def watched(noises, size):
    """What is counted of the noises (size,) of some steps."""
    watch = NoiseWatch([parameter := nn.Parameter(torch.zeros(size))])
    for noise in noises:
        parameter.summed_grad = torch.randn(size)
        watch.before()
        parameter.grad = parameter.summed_grad + noise
        watch.after(1.0)
    return watch.counts()


@pytest.mark.parametrize("seed", range(5))
def test_noise_that_comes_again_with_other_signs_fails(seed):
    """Half of it with the same sign: the plain sum is as long as that of independent noise."""
    rng = torch.Generator().manual_seed(seed)
    alone, *kept = torch.randn(7, 20_000, generator=rng)
    again = [one * (-1) ** number for number, one in enumerate(kept)]
    noise = watched((alone, *kept, *again), 20_000)
    assert max(abs(noise.previous), abs(noise.first), abs(noise.repeated)) < 6
    assert noise.signed > 20
    assert noise_check(noise).status == "failed"


@pytest.mark.parametrize(("copies", "steps"), [(2, 800), (8, 100), (100, 20)])
def test_noise_that_is_the_same_in_several_coordinates_fails(copies, steps):
    """The difference of two such coordinates has no noise at all; each alone has all of it.

    Signs are secret ones, so that what is found varies: with as many steps, 6 is six of its
    standard deviations below the mean or more.
    """
    rng = torch.Generator().manual_seed(0)
    size = 4000 // copies * copies  # no more than the coordinates that are compared
    noises = torch.randn(steps, size // copies, generator=rng).repeat(1, copies)
    noise = watched(noises, size)
    assert noise.signed > 6
    assert noise_check(noise).status == "failed"


def test_noise_that_cannot_be_measured_is_not_checked(tmp_path, monkeypatch):
    def in_place(optimizer):
        for p in optimizer.params:
            p.summed_grad += torch.randn_like(p.summed_grad)
            p.grad = p.summed_grad.view_as(p)

    run = make_run()
    monkeypatch.setattr(run.optimizer, "add_noise", lambda: in_place(run.optimizer))
    record(run, tmp_path / "run")
    assert check_of(tmp_path / "run").status == "not checked"


@pytest.mark.parametrize("size", [0.0, 1e-25])
def test_sums_too_short_to_have_a_direction_do_not_count(size):
    parameter = nn.Parameter(torch.zeros(50))
    watch = NoiseWatch([parameter])
    parameter.summed_grad = torch.full((50,), size)
    watch.before()
    parameter.grad = parameter.summed_grad + torch.randn(50)
    watch.after(1.0)
    assert watch.counts().along_sum == 0


def simulated(rng, steps, sizes, scale=1.0):
    """A run whose clipped sums are random."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    watch = NoiseWatch(parameters)
    for _ in range(steps):
        for p in parameters:
            p.summed_grad = torch.randn(p.shape, generator=rng)
        watch.before()
        for p in parameters:
            p.grad = p.summed_grad + scale * 1.3 * torch.randn(p.shape, generator=rng)
        watch.after(1.3)
    return watch.counts()


def test_null_runs_pass_and_two_percent_less_noise_does_not(monkeypatch):
    monkeypatch.setattr("secrets.choice", random.Random(0).choice)
    rng = torch.Generator().manual_seed(0)
    found = [simulated(rng, 25, (3, 40, 400)) for _ in range(60)]
    assert {noise_check(noise).status for noise in found} == {"passed"}
    for name in ("previous", "first", "repeated", "signed", "along_sum"):
        assert 0.7 < np.std([getattr(noise, name) for noise in found]) < 1.3, name
    z = [(noise.variance - 1) * np.sqrt(noise.values / 2) for noise in found]
    assert 0.7 < np.std(z) < 1.3
    assert noise_check(simulated(rng, 100, (3, 40_000), scale=0.98)).status == "failed"
