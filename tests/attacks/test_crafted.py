"""Canaries that are crafted for the final model: stronger than others, and bounds that hold."""

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import TensorDataset

from indpriv import AttackScores, InputError
from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.audit import audit
from indpriv.norm_log.run_files import CANARIES
from indpriv.recording import InsertedCanaries, Recorder, crafted_canaries

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Opacus's
COUNT = 120
LOSS = nn.CrossEntropyLoss(reduction="none")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))


def examples(n, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 20, generator=generator)
    noise = torch.randn(n, generator=generator)
    return inputs, (inputs[:, 0] + inputs[:, 1] + 0.3 * noise > 0).long()


def mislabelled():
    inputs, targets = examples(COUNT, 3)
    return inputs, 1 - targets


@pytest.fixture(scope="module")
def crafted():
    """For a model that was trained on public examples."""
    return crafted_canaries(trained(examples(400, 4)), *mislabelled(), LOSS)


def trained(data, steps=300):
    model, (inputs, targets) = build(), data
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        LOSS(model(inputs), targets).mean().backward()
        optimizer.step()
    return model


def directions(model, inputs, targets):
    def loss(parameters, x, y):
        return nn.functional.cross_entropy(
            torch.func.functional_call(model, parameters, (x[None],)), y[None]
        )

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
        {name: p.detach() for name, p in model.named_parameters()}, inputs, targets
    )
    flat = torch.cat([g.flatten(1) for g in found.values()], 1)
    norms = flat.norm(dim=1)
    unit = flat / norms[:, None]
    return norms, (unit @ unit.T - torch.eye(len(unit))).square().mean().sqrt()


def losses(model, canaries):
    with torch.no_grad():
        return LOSS(model(canaries[0]), canaries[1]).double().numpy()


def test_gradients_point_apart_and_are_clipped(crafted):
    model = trained(examples(400, 4))
    before, after = directions(model, *mislabelled()), directions(model, *crafted.tensors)
    assert after[1] < 0.5 * before[1]  # root mean square cosine
    assert (after[0] > 1).float().mean() > 0.9  # longer than max_grad_norm
    start = mislabelled()[0]
    slack = 1e-5
    assert (crafted.tensors[0] >= start.amin(0) - slack).all()
    assert (crafted.tensors[0] <= start.amax(0) + slack).all()
    assert torch.equal(crafted.tensors[1], mislabelled()[1])


def test_the_final_model_tells_more_of_them_than_of_mislabelled_examples(crafted):
    """Without DP, on the same coins."""
    data, aucs = examples(400, 1), []
    coins = np.random.default_rng(0).random((4, COUNT)) < 0.5
    for canaries in (mislabelled(), crafted.tensors):
        found = []
        for member in coins:
            inside = torch.as_tensor(member)
            joined = [torch.cat([a, b[inside]]) for a, b in zip(data, canaries, strict=True)]
            scores = AttackScores(-losses(trained(joined, 60), canaries), member, "")
            found.append(measure_attack(scores).overall["auc"])
        aucs.append(np.mean(found))
    assert aucs[1] > aucs[0] + 0.05
    assert aucs[1] > 0.9


def test_a_model_that_was_not_trained_on_them_tells_nothing(crafted):
    """Null calibration: bounds of 300 draws of coins are above 0 at most at their level."""
    scores = -losses(trained(examples(400, 1)), crafted.tensors)
    rng, above = np.random.default_rng(1), dict.fromkeys(("steinke2023", "mahloujifar2024"), 0)
    for _ in range(300):
        each = AttackScores(scores, rng.random(COUNT) < 0.5, "", fair_coins=True)
        found = measure_attack(each).bounds
        for name in above:
            above[name] += found[name].epsilon > 0
    assert max(above.values()) <= 30  # 15 expected at most; 4 standard deviations above


def test_with_dp_they_stay_below_the_ceiling(crafted, tmp_path):
    canaries = InsertedCanaries(TensorDataset(*examples(400, 1)), crafted, seed=0)
    model = build()
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=canaries.loader(batch_size=52),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    recorder = Recorder(
        tmp_path / "run", dataset=canaries.train_set, loss_fn=loss_fn, every=10, attack=canaries
    )
    with recorder.attach(model, optimizer, loader):
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).mean().backward()
                optimizer.step()
    measured = measure_attack(AttackScores.from_file(tmp_path / "run" / CANARIES)).bounds
    found = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5)
    for name in ("steinke2023", "mahloujifar2024", "gaussian_ranks"):
        assert measured[name].epsilon < found.guarantee.worst_case_epsilon


def test_what_cannot_be_crafted(monkeypatch):
    inputs, targets = mislabelled()
    with pytest.raises(InputError, match=r"inputs of torch.int64 .* cannot be crafted"):
        crafted_canaries(build(), inputs.long(), targets, LOSS)
    with pytest.raises(InputError, match="at most 2"):
        crafted_canaries(build(), inputs[:0], targets[:0], LOSS)
    for more in ({"steps": 0}, {"max_grad_norm": 0.0}):
        with pytest.raises(InputError, match=next(iter(more))):
            crafted_canaries(build(), inputs, targets, LOSS, **more)
    with pytest.raises(InputError, match="120 inputs have 7 targets"):
        crafted_canaries(build(), inputs, targets[:7], LOSS)
    monkeypatch.setattr("indpriv.recording.references._KEPT", 1000)
    with pytest.raises(InputError, match=r"88,560 values"):
        crafted_canaries(build(), inputs, targets, LOSS)


@pytest.mark.parametrize("what", ["one", "alike", "nan", "steps"])
def test_inputs_that_do_not_move_are_no_canaries(what):
    """Rounding has no slope, and a single input has no range; NaN would reach the model."""
    inputs, targets = mislabelled()
    inputs = {"one": inputs[:1], "alike": inputs * 0, "nan": inputs / 0 * 0}.get(what, inputs)
    model = build()
    if what == "steps":
        model = nn.Sequential(Rounded(), model)
    with pytest.raises(InputError, match=f"crafting left all {len(inputs)} inputs"):
        crafted_canaries(model, inputs, targets[: len(inputs)], LOSS, steps=2)


class Rounded(nn.Module):
    def forward(self, x):
        return x.round()


def test_inputs_of_a_graph_are_crafted():
    inputs, targets = mislabelled()
    made = crafted_canaries(build(), inputs.clone().requires_grad_(), targets, LOSS, steps=2)
    assert not made.tensors[0].requires_grad
    assert torch.equal(
        made.tensors[0], crafted_canaries(build(), inputs, targets, LOSS, steps=2).tensors[0]
    )
