"""Each attack finds what it should, and clipping fools only an attacker who forgets it."""

import os

import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri
from torch import nn

from audits.training.datasets import load_dataset
from indpriv.analysis.reconstruction import identification_ceiling, reconstruction_of
from indpriv.analysis.statistics import clopper_pearson
from indpriv.errors import InputError
from indpriv.leakage import INVERSIONS, LBFGS, Adam, FirstLayer, Informed, Observation, leak
from indpriv.leakage.inversion import Look
from leakage_scenes import LOSS, digits, mlp
from reports.shared.pictures import network as cpl_network


def attacked(model, n, observation, attack, others=99, **options):
    """The columns of n attacked digits, told from others."""
    inputs, targets = digits(n + others)
    candidates = (inputs[n:], targets[n:]) if others else None
    return leak(
        model, LOSS, inputs[:n], targets[:n], observation, attack,
        candidates=candidates, seed=1, **options,
    )  # fmt: skip


def columns(found):
    return {name: values[found.member] for name, values in found.details.items()}


def test_the_first_layer_gives_inputs_exactly():
    found = columns(attacked(mlp(), 50, Observation(max_grad_norm=0.1), FirstLayer()))
    assert found["error"].max() < 1e-12  # a difference of 1e-6 of the range of pixels
    assert found["identified"].all()
    assert found["label_found"].all()


def test_the_first_layer_of_a_batch_gives_examples_that_a_unit_is_active_for_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 10))
    with torch.no_grad():
        model[1].bias.sub_(0.3)  # few units are active
    found = columns(attacked(model, 20, Observation("batch", batch_size=2), FirstLayer()))
    assert (found["error"] < 1e-10).sum() >= 2
    assert found["identified"].mean() > 0.3
    assert found["chance"] == pytest.approx(0.02)


def informed_share(noise, looks):
    """Share of looks at which the informed attack names the example, and its ceiling."""
    seen = Observation(max_grad_norm=0.1, noise_multiplier=noise)
    found = attacked(mlp(), looks, seen, Informed())
    assert columns(found)["mu"] == pytest.approx(1 / noise, rel=1e-5)  # all are clipped
    return reconstruction_of(found)


def test_the_informed_attack_reaches_most_of_its_ceiling():
    found = informed_share(1.0, 80)
    assert found.ceiling == pytest.approx(ndtr(ndtri(0.01) + 1), abs=1e-5)
    assert not found.above_ceiling
    assert 0.3 * found.ceiling < found.identified


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 6.0])
def test_of_far_apart_gradients_most_of_the_ceiling_is_reached_and_no_more(noise):
    """1,000 looks at 100 candidates, whose gradients have random directions and the length 1."""
    generator = torch.Generator().manual_seed(0)
    added = torch.randn((100, 200), generator=generator, dtype=torch.float64)
    added /= added.norm(dim=1, keepdim=True)
    inputs, sent = torch.arange(100.0).unsqueeze(1), torch.ones(200, dtype=torch.bool)
    hits = 0
    for look in range(1000):
        seen = added[look % 100] + noise * torch.randn(200, generator=generator)
        found, _ = Informed().invert(
            Look(
                seen, sent, torch.zeros(1), (1, 1), 0, 99, None, generator,
                lambda place: (inputs, added),
            )
        )  # fmt: skip
        hits += int(found) == look % 100
    ceiling = identification_ceiling(np.full(100, 1 / noise), 0.01)
    assert clopper_pearson(hits, 1000).low < ceiling
    if noise <= 1:
        assert hits / 1000 > ceiling / 2


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
def test_the_informed_attack_stays_below_its_ceiling(noise):
    found = informed_share(noise, 1000)
    assert found.ceiling == pytest.approx(ndtr(ndtri(0.01) + 1 / noise), abs=1e-5)
    assert found.interval.low < found.ceiling
    if noise == 1.0:
        assert found.identified > found.ceiling / 2
        limits = clopper_pearson(round(1000 * found.identified), 1000, confidence=0.999)
        assert limits.low < best_share(mlp(), 1000) < limits.high


def best_share(model, looks, draws=100):
    """Share that the best of all attacks names: the likeliest of 100 equally likely Gaussians.

    Simulated from inner products of gradients by autograd; noise multiplier 1, all are clipped.
    """
    rows = []
    for image, label in zip(*digits(looks + 99), strict=True):
        loss = LOSS(model(image[None]), label[None])
        found = torch.autograd.grad(loss.sum(), list(model.parameters()))
        rows.append(torch.cat([part.flatten() for part in found]).double().numpy())
    unit = np.array(rows) / np.linalg.norm(rows, axis=1, keepdims=True)
    rng, hits = np.random.default_rng(0), 0
    for own in unit[:looks]:
        candidates = np.vstack([unit[looks:], own])
        inner = candidates @ candidates.T
        root = np.linalg.cholesky(inner + 1e-9 * np.eye(100))
        seen = inner[-1] + rng.standard_normal((draws, 100)) @ root.T
        hits += (seen.argmax(1) == 99).sum()
    return hits / (looks * draws)


@pytest.mark.parametrize("attack", [FirstLayer(), Informed()], ids=lambda attack: attack.name)
def test_under_much_noise_nothing_is_found_more_often_than_by_chance(attack):
    seen = Observation(max_grad_norm=0.1, noise_multiplier=1e3)
    found = attacked(mlp(), 60, seen, attack, others=0)
    assert columns(found)["identified"].mean() < 0.1
    own, other = found.scores[found.member], found.scores[~found.member]
    auc = np.mean(own[:, None] > other) + np.mean(own[:, None] == other) / 2
    assert auc == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("start", ["patterned", "uniform", "normal"])
def test_lbfgs_finds_pictures(start):
    found = columns(attacked(cpl_network(8), 2, Observation(), LBFGS(10, start)))
    assert found["error"].max() < 1e-3
    assert found["identified"].all()


def test_clipping_fools_only_an_attacker_who_forgets_it():
    seen = Observation(max_grad_norm=1.0, clipping="per_layer")
    aware = columns(attacked(cpl_network(8), 2, seen, LBFGS(8)))
    naive = columns(attacked(cpl_network(8), 2, seen, LBFGS(8, knows_clipping=False)))
    assert aware["error"].max() < 1e-3
    assert naive["error"].min() > 0.1
    assert not naive["identified"].any()


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-4, 1e-3, 1e-2])
def test_under_noise_too_an_attacker_who_clips_the_guess_comes_nearer(noise):
    seen = Observation(max_grad_norm=1.0, clipping="per_layer", noise_multiplier=noise)
    aware = columns(attacked(cpl_network(8), 4, seen, LBFGS(8)))
    naive = columns(attacked(cpl_network(8), 4, seen, LBFGS(8, knows_clipping=False)))
    assert (aware["error"] < naive["error"] / 2).all()
    assert aware["identified"].sum() >= 3
    assert not naive["identified"].any()


@pytest.mark.slow
@pytest.mark.skipif("INDPRIV_DATA" not in os.environ, reason="needs the files of the data set")
@pytest.mark.parametrize("name", ["mnist", "lfw_people"])
def test_lbfgs_finds_real_pictures_in_eight_iterations(name):
    data = load_dataset(name)
    inputs = torch.from_numpy(data.train.inputs[::300][:6] + 1) / 2
    targets = torch.from_numpy(data.train.targets[::300][:6])
    model = cpl_network(inputs.shape[-1], data.n_classes)
    found = columns(leak(model, LOSS, inputs, targets, Observation(), LBFGS(8), seed=1))
    assert (found["error"] < 1e-3).sum() >= 5
    assert found["label_found"].all()


@pytest.mark.slow
def test_lbfgs_unrolls_local_steps():
    seen = Observation("update", local_steps=2, learning_rate=0.01)
    found = columns(attacked(cpl_network(8), 2, seen, LBFGS(8)))
    assert found["error"].max() < 1e-3


def test_adam_finds_pictures():
    found = columns(attacked(cpl_network(8), 2, Observation(max_grad_norm=1.0), Adam(40)))
    assert found["error"].max() < 0.1
    assert found["identified"].all()


class Hopeless(nn.Module):
    """Has gradients that are not numbers."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, inputs):
        return self.last(inputs.flatten(1)) * float("nan")


@pytest.mark.parametrize("attack", [LBFGS(2), Adam(8), FirstLayer()], ids=lambda one: one.name)
def test_what_is_not_a_number_is_a_failure(attack):
    found = attacked(Hopeless(), 2, Observation(), attack)
    assert not columns(found)["identified"].any()
    assert not np.isnan(found.scores).any()
    assert np.isfinite(columns(found)["error"]).sum() == 0 or attack.name != "first-layer"


@pytest.mark.parametrize("attack", INVERSIONS.values(), ids=INVERSIONS)
def test_attacks_are_named(attack):
    assert INVERSIONS[attack.name] is attack
    assert attack().title


def test_the_first_layer_must_be_linear_with_a_bias():
    for model in (cpl_network(8), mlp(bias=False)):
        with pytest.raises(InputError, match="use lbfgs, adam or informed"):
            attacked(model, 2, Observation(), FirstLayer())


@pytest.mark.parametrize("options", [{"iterations": 0}, {"start": "zero"}])
def test_options_are_checked(options):
    with pytest.raises(InputError):
        LBFGS(**options)
