"""Clipping per layer: what the log holds, against gradients of one example at a time."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import indpriv
from indpriv._files import read_json
from indpriv.errors import InputError
from indpriv.norm_log.run_files import RUN_JSON
from indpriv.recording import NormPass, Recorder

LIMITS = (0.3, 0.02, 0.1, 0.05, 0.4, 0.07, 0.1, 0.2)
LOSS = nn.CrossEntropyLoss(reduction="none")


class Small(nn.Module):
    """A convolution, a normalisation and a linear layer, perhaps used twice."""

    def __init__(self, tied=True):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.mix = nn.Linear(4, 4)
        self.last = self.mix if tied else nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.conv(x))).mean((2, 3))
        return self.last(torch.tanh(self.mix(hidden)))


def data(n=40):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 1, 6, 6, generator=generator)
    return TensorDataset(inputs, torch.arange(n) % 4)


def contributions(module, dataset, limits=LIMITS):
    """(n,) by autograd: each parameter's gradient of each example, clipped and put together."""
    found = []
    for inputs, target in dataset:
        loss = LOSS(module(inputs[None]), target[None]).sum()
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        clipped = [
            g * min(1.0, c / float(g.norm())) for g, c in zip(gradients, limits, strict=False)
        ]
        found.append(float(torch.cat([g.ravel().double() for g in clipped]).norm()))
    return np.array(found)


def private(module, dataset, limits=LIMITS):
    return PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=list(limits)[: len(list(module.parameters()))],
        clipping="per_layer",
    )


def module(tied=True):
    torch.manual_seed(2**40 + 3)
    return Small(tied)


@pytest.mark.parametrize("backend", ["layerwise", "functorch"])
def test_norms_of_what_clipping_leaves(backend):
    dataset, model = data(12), module(tied=backend == "layerwise")
    with NormPass(model, LOSS, *dataset.tensors, backend=backend) as norm_pass:
        whole = norm_pass(*dataset.tensors)[0].numpy()
        norm_pass.clip_each(LIMITS)
        norms = norm_pass(*dataset.tensors)[0].numpy()
    np.testing.assert_allclose(norms, contributions(model, dataset), rtol=1e-4)
    np.testing.assert_allclose(whole, contributions(model, dataset, (math.inf,) * 8), rtol=1e-4)
    assert (norms < 0.99 * whole).all()


def test_the_log_holds_contributions_in_every_step(tmp_path):
    """In full records, and in those of batches as training clipped them."""
    dataset, model, plain = data(), module(tied=False), module(tied=False)
    wrapped, optimizer, loader = private(model, dataset)
    options = {"every": 1, "rounding": 0, "batch_norms": True}
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=LOSS, **options)
    expected = []
    with recorder.attach(wrapped, optimizer, loader):
        for inputs, targets in loader:
            plain.load_state_dict(model.state_dict())
            expected.append(contributions(plain, dataset))
            optimizer.zero_grad()
            LOSS(wrapped(inputs), targets).mean().backward()
            optimizer.step()
    log = indpriv.NormLog.open(tmp_path / "run")
    recorded = log.read()
    np.testing.assert_allclose(recorded, expected, rtol=1e-4)
    assert (recorded <= math.hypot(*LIMITS) * (1 + 1e-5)).all()
    np.testing.assert_allclose(log.settings.max_grad_norm, math.hypot(*LIMITS), rtol=1e-6)
    assert read_json(tmp_path / "run" / RUN_JSON)["recorder"]["clipping"] == "per_layer"
    table = indpriv.account(log, delta=1e-5)
    assert table.claim == "exact"
    assert (table.epsilon < table.worst_case_epsilon).all()
    known = indpriv.account(log, delta=1e-5, participation="known")
    assert known.claim == "exact"


@pytest.mark.parametrize("limits", [LIMITS, (1e-4,) * 8], ids=["some clipped", "all clipped"])
def test_an_example_moves_the_sum_by_its_contribution(limits):
    """Where each of M parameters is clipped at C, that is up to sqrt(M) C and not C."""
    dataset, model = data(6), module(tied=False)
    expected = contributions(model, dataset, limits)
    wrapped, optimizer, _ = private(model, dataset, limits)
    sums = [0.0]
    for count in range(1, len(dataset) + 1):
        inputs, targets = (rows[:count] for rows in dataset.tensors)
        optimizer.zero_grad()
        LOSS(wrapped(inputs), targets).mean().backward()
        optimizer.clip_and_accumulate()
        sums.append(torch.cat([p.summed_grad.ravel().double() for p in optimizer.params]))
    moved = [float((after - before).norm()) for before, after in pairwise(sums)]
    np.testing.assert_allclose(moved, expected, rtol=1e-3)
    whole = math.hypot(*limits)
    assert max(moved) <= whole * (1 + 1e-5)
    if limits is not LIMITS:
        np.testing.assert_allclose(moved, math.sqrt(8) * 1e-4, rtol=0.01)


@pytest.mark.parametrize(
    ("moved", "message"),
    [
        (("max_grad_norm",), "is not the Euclidean norm"),
        (("max_grad_norms",), "is not the Euclidean norm"),
        (("max_grad_norm", "max_grad_norms"), "moved after the norms of this step"),
    ],
)
def test_norms_that_move_are_refused(moved, message, tmp_path):
    """As Opacus's schedulers move them, the noise falls and clipping stays; or after a record."""
    dataset = data()
    wrapped, optimizer, loader = private(module(), dataset)
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=LOSS, every=1)
    with (
        pytest.raises(InputError, match=message),
        recorder.attach(wrapped, optimizer, loader),
    ):
        inputs, targets = next(iter(loader))
        if "max_grad_norm" in moved:
            optimizer.max_grad_norm *= 0.5
        if "max_grad_norms" in moved:
            optimizer.max_grad_norms = [0.5 * limit for limit in optimizer.max_grad_norms]
        LOSS(wrapped(inputs), targets).mean().backward()
        optimizer.step()
