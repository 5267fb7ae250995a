"""Attacks on a released model: by its gradients, on inputs, on several signals; the last iterate."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from opacus import GradSampleModule
from scipy import integrate, special, stats
from torch import nn
from torch.utils.data import TensorDataset

from indpriv.accountant.account import account
from indpriv.accountant.laws import gaussian_epsilons
from indpriv.analysis.attacks.rates import separation
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Material, released
from indpriv.attacks.references import lira
from indpriv.attacks.released import ReleasedModel, last_iterate_epsilon, last_iterate_rate
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.norm_log import NormLog
from indpriv.recording import AuditSpec, released_model
from synthetic import rows, signals_with_effect

WHITE_BOX = ("gradient_norm", "gradient_ratio", "input_quantile")


def build():
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))


def examples(n, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 20, generator=generator)
    noise = torch.randn(n, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] + inputs[:, 1] + noise > 0).long())


SPEC = AuditSpec(
    model=build,
    dataset=examples(500, 1),
    loss_fn=nn.CrossEntropyLoss(reduction="none"),
    test_set=examples(1000, 2),
)


def trained(steps):
    torch.manual_seed(0)
    model, (inputs, targets) = build(), SPEC.dataset.tensors
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        chosen = torch.randint(0, len(inputs), (50,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def overfitted():
    return released_model(trained(2000), SPEC)


def auc(scores):
    found = separation(scores.scores[scores.member], scores.scores[~scores.member])
    return next(row for row in found if row["rate"] == "auc")["value"]


def gradients_of(model, dataset):
    found = []
    for inputs, target in zip(*dataset.tensors, strict=True):
        loss = nn.functional.cross_entropy(model(inputs[None]), target[None])
        found.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])
        )
    return torch.stack(found).double().numpy()


# --- gradients


def test_products_and_norms_are_those_of_single_gradients():
    model = trained(20)
    known = released_model(GradSampleModule(model), SPEC, gradients=30)
    each = [gradients_of(model, part) for part in (SPEC.dataset, SPEC.test_set)]
    each = np.concatenate(each)
    spanning = [*each[known.columns], each[known.holdout].mean(axis=0)]
    assert known.holdout.sum() == 500
    assert not known.holdout[:500].any()
    assert known.holdout[known.columns].all()
    assert known.norms == pytest.approx(np.linalg.norm(each, axis=1), rel=1e-4)
    assert known.products == pytest.approx(each @ np.transpose(spanning), rel=1e-3, abs=1e-5)
    assert np.array_equal(known.inputs[:500], SPEC.dataset.tensors[0].numpy())


def from_gradients(gradients, n_train, *, h=40, inputs=None, losses=None):
    """What a model tells whose gradients are these; the last half of the test examples is held out."""
    n = len(gradients)
    n_test = n - n_train
    parts = [rows("train", np.zeros(n_train, int)), rows("test", np.zeros(n_test, int))]
    frame = pd.concat(parts, ignore_index=True)
    table = ExampleTable(frame if losses is None else frame.assign(loss=losses))
    holdout = np.arange(n) >= n_train + n_test // 2
    columns = np.flatnonzero(holdout)[:h]
    spanning = np.concatenate([gradients[columns], gradients[holdout].mean(axis=0)[None]])
    norms = np.linalg.norm(gradients, axis=1)
    return ReleasedModel(table, norms, holdout, columns, gradients @ spanning.T, inputs)


def test_the_ratio_is_that_of_dense_matrices():
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(200, 15)) * np.linspace(0.1, 2, 15) + 0.3
    known = from_gradients(gradients, 90)
    mean = gradients[known.holdout].mean(axis=0)
    centred = gradients[known.columns] - mean
    fisher = centred.T @ centred / 40
    fisher += 0.01 * np.trace(fisher) / 40 * np.eye(15)
    left = gradients - mean
    solved = np.linalg.solve(fisher, left.T).T
    wanted = -(solved @ mean) - (solved * left).sum(axis=1) / (2 * 90)
    found = released.gradient_scores(known)
    assert found.scores == pytest.approx(wanted[~known.holdout], rel=1e-9)
    assert found.member.sum() == 90


def test_the_ratio_is_right_where_its_model_holds():
    """Where gradients are moved such that those of members sum up to 0, it beats the norm."""
    rng, aucs = np.random.default_rng(1), {"gradient_ratio": [], "gradient_norm": []}
    for _ in range(20):
        gradients = rng.normal(size=(2300, 60)) * np.geomspace(0.05, 2, 60)
        gradients -= gradients[:300].mean(axis=0)
        known = Material(released=from_gradients(gradients, 300, h=400))
        for name, found in aucs.items():
            found.append(auc(ATTACKS[name].scores(known)))
    assert np.mean(aucs["gradient_ratio"]) > 0.58  # 60 directions of 300 examples
    assert abs(np.mean(aucs["gradient_norm"]) - 0.5) < 0.02


def test_on_an_overfitted_model_they_find_members(overfitted):
    known = Material(losses=overfitted.examples, released=overfitted)
    found = {name: auc(ATTACKS[name].scores(known)) for name in ("loss_threshold", *WHITE_BOX)}
    assert found["loss_threshold"] > 0.62
    assert min(found[name] for name in WHITE_BOX) > 0.64
    assert found["gradient_ratio"] > found["loss_threshold"]


@pytest.mark.parametrize("name", WHITE_BOX)
def test_without_training_they_find_nothing(name, monkeypatch):
    """Null calibration: 300 draws of members like others; intervals of the AUC miss 0.5 rarely."""
    monkeypatch.setitem(released._TREES, "max_iter", 3)
    rng, missed, every = np.random.default_rng(2), 0, []
    for _ in range(300):
        inputs = rng.normal(size=(160, 3))
        losses = rng.exponential(size=160) * np.exp(inputs[:, 0])
        gradients = rng.normal(size=(160, 20)) * losses[:, None]
        known = from_gradients(gradients, 80, h=30, inputs=inputs, losses=losses)
        scores = ATTACKS[name].scores(Material(released=known))
        found = separation(scores.scores[scores.member], scores.scores[~scores.member])
        row = next(row for row in found if row["rate"] == "auc")
        missed += not row["low"] <= 0.5 <= row["high"]
        every.append(row["value"])
    assert abs(np.mean(every) - 0.5) < 4 * np.std(every) / np.sqrt(300)
    assert 2 <= missed <= 32  # of 300 at 5 %: each beyond 4 standard deviations


def test_inputs_help_where_they_tell_which_examples_are_hard():
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(4000, 3))
    member = np.arange(4000) < 1000
    losses = np.exp(2 * np.abs(inputs[:, 0]) - 0.4 * member + 0.3 * rng.normal(size=4000) - 2)
    known = from_gradients(rng.normal(size=(4000, 5)), 1000, inputs=inputs, losses=losses)
    by_inputs = auc(ATTACKS["input_quantile"].scores(Material(released=known)))
    assert auc(ATTACKS["loss_threshold"].scores(Material(losses=known.examples))) < 0.6
    assert by_inputs > 0.72


def test_what_is_missing_is_said(overfitted, monkeypatch):
    def lacking(name, known):
        return ATTACKS[name].lacks(Material(released=known))

    assert "released_model" in ATTACKS["gradient_norm"].lacks(Material())
    few = replace(overfitted, columns=overfitted.columns[:3], products=overfitted.products[:, -4:])
    assert lacking("gradient_ratio", few) == "gradients of 20 hold-out examples (there are 3)"
    assert "one tensor" in lacking("input_quantile", replace(overfitted, inputs=None))
    monkeypatch.setattr(released, "find_spec", lambda _: None)
    assert "pip install 'indpriv[attacks]'" in lacking("input_quantile", overfitted)


def _spec(**changes):
    return replace(SPEC, **changes)


@pytest.mark.parametrize(
    ("model", "spec", "match"),
    [
        (build, _spec(test_set=None), "has 0 examples"),
        (build, _spec(test_set=examples(39, 3)), "has 39 examples"),
        (partial(nn.Linear, 20, 2), SPEC, "not like spec.model"),
        (build, _spec(model=lambda: build().requires_grad_(False)), "0 trainable parameters"),
    ],
)
def test_bad_input_is_refused(model, spec, match):
    with pytest.raises(InputError, match=match):
        released_model(model(), spec)


class Branching(nn.Module):
    """A model that looks at its values, as some attention masks do; torch.func cannot follow."""

    def __init__(self):
        super().__init__()
        self.inner = build()

    def forward(self, x):
        return self.inner(x) if (x == x).all() else self.inner(-x)


def test_models_that_torch_func_does_not_follow_are_refused():
    spec = replace(SPEC, model=Branching)
    with pytest.raises(InputError, match="cannot take the gradients of this model one by one"):
        released_model(Branching(), spec)


def test_large_models_are_refused(monkeypatch):
    monkeypatch.setattr("indpriv.recording.references._KEPT", 19 * 738)
    with pytest.raises(InputError, match="738 trainable parameters"):
        released_model(build(), SPEC)


# --- several signals


def same(signals, values):
    return replace(signals, signal=np.asarray(values, np.float32))


def test_a_second_signal_helps_if_it_tells_something_new():
    one, other = (signals_with_effect(1.0, 40, 1500, seed=seed) for seed in (1, 2))
    rng = np.random.default_rng(0)
    noise = rng.normal(size=one.signal.shape)
    second = same(one, other.signal - other.member * 1.0 + one.member * 1.0)
    gains = []
    for beside in ((), (second,), (same(one, one.signal),), (same(one, noise),)):
        every = [auc(lira(one, row, beside=beside)) for row in range(10)]
        gains.append(np.mean(every))
    alone, both, twice, with_noise = gains
    assert alone == pytest.approx(special.ndtr(1 / np.sqrt(2)), abs=0.02)
    assert both == pytest.approx(special.ndtr(1.0), abs=0.02)
    assert twice == pytest.approx(alone, abs=0.005)
    assert with_noise == pytest.approx(alone, abs=0.01)


def test_correlated_signals_are_weighed_as_their_law_says():
    """Against the ratio of two normal laws with the true means and covariance."""
    rng, n, models = np.random.default_rng(5), 400, 200
    member = rng.random((models, n)) < 0.5
    covariance = np.array([[1.0, 0.6], [0.6, 1.0]])
    effect = np.array([1.0, 0.2])
    x = rng.multivariate_normal([0, 0], covariance, size=(models, n)) + member[..., None] * effect
    one, other = (AttackSignals.from_arrays(x[..., k], member, coins=True) for k in (0, 1))
    found = lira(one, 0, beside=[other])
    weights = np.linalg.solve(covariance, effect)
    assert stats.spearmanr(found.scores, x[0] @ weights).statistic > 0.99


def test_nothing_is_found_where_membership_has_no_effect():
    rng, missed = np.random.default_rng(6), 0
    for _ in range(300):
        member = rng.random((6, 120)) < 0.5
        one, other = (
            AttackSignals.from_arrays(rng.normal(size=(6, 120)), member, coins=True)
            for _ in range(2)
        )
        scores = lira(one, 0, beside=[other])
        found = separation(scores.scores[scores.member], scores.scores[~scores.member])
        row = next(row for row in found if row["rate"] == "auc")
        missed += not row["low"] <= 0.5 <= row["high"]
    assert 2 <= missed <= 32


# --- the last iterate


def settings(steps, noise, rate):
    return StepSettings.from_values(steps, noise, 1.0, rate)


def deltas(epsilon, steps, noise, rate):
    """By numerical integration of the two laws, add and remove."""
    drawn = np.arange(steps + 1)
    weights, scale = stats.binom.pmf(drawn, steps, rate), noise * np.sqrt(steps)
    x = np.linspace(-40 * scale, steps + 40 * scale, 400_001)
    inside = stats.norm.pdf(x[:, None], drawn, scale) @ weights
    outside = stats.norm.pdf(x, 0, scale)
    factor = np.exp(epsilon)
    return [
        integrate.trapezoid(np.maximum(one - factor * other, 0), x)
        for one, other in ((inside, outside), (outside, inside))
    ]


@pytest.mark.parametrize(
    ("steps", "noise", "rate"), [(1, 0.8, 0.3), (10, 1.0, 0.1), (30, 0.6, 0.5)]
)
def test_the_heuristic_is_the_epsilon_of_its_two_laws(steps, noise, rate):
    epsilon = last_iterate_epsilon(settings(steps, noise, rate), delta=1e-4)
    assert max(deltas(epsilon, steps, noise, rate)) == pytest.approx(1e-4, rel=1e-3)


def test_without_sampling_it_is_the_gaussian_mechanism():
    found = last_iterate_epsilon(settings(9, 2.0, 1.0))
    assert found == pytest.approx(gaussian_epsilons(np.array([1.5]), 1e-5)[0][0], abs=1e-6)
    assert last_iterate_rate(settings(9, 2.0, 1.0), 0.01) == pytest.approx(
        special.ndtr(1.5 + special.ndtri(0.01))
    )


def test_it_is_far_below_the_account_of_every_update():
    log = NormLog.from_arrays(
        [[1.0]], [0], total_steps=1000, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.01
    )
    accounted = account(log, delta=1e-5, accountant="pld").worst_case_epsilon
    found = last_iterate_epsilon(settings(1000, 1.0, 0.01))
    assert 0.3 * accounted < found < 0.7 * accounted


def test_it_says_that_it_bounds_nothing():
    assert "HEURISTIC, no bound" in last_iterate_epsilon.__doc__
    assert "HEURISTIC" in last_iterate_rate.__doc__


def test_settings_that_change_are_refused():
    with pytest.raises(InputError, match="steps of equal noise"):
        last_iterate_epsilon(StepSettings.from_values(2, [1.0, 2.0], 1.0, 0.1))
    with pytest.raises(InputError, match="delta"):
        last_iterate_epsilon(settings(2, 1.0, 0.1), delta=0.0)
