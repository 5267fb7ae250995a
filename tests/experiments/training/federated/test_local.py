"""Clients of a round in one batch: equal to one at a time, and to plain autograd."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from audits.training.federated.local import Clipping, LocalTraining, RowProtection
from audits.training.models import mlp, tanh_cnn

SHAPES = {"mlp": (6,), "cnn": (1, 16, 16)}


def setting(kind, n=40):
    torch.manual_seed(3)
    shape = SHAPES[kind]
    module = mlp(6, (5,), 3, "tanh") if kind == "mlp" else tanh_cnn(shape, 3)
    inputs, targets = torch.randn(n, *shape), torch.arange(n) % 3
    start = parameters_to_vector(module.parameters()).detach().clone()
    return module, inputs, targets, start


def by_hand(module, inputs, targets, start, rows, rate, clip=None, sizes=None):
    """One client after the other, one row after the other."""
    updates, norms = [], []
    for client in rows:
        vector_to_parameters(start.clone(), module.parameters())
        lengths = []
        for step in client:
            total = torch.zeros_like(start)
            for row in step:
                module.zero_grad()
                nn.functional.cross_entropy(module(inputs[[row]]), targets[[row]]).backward()
                gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
                if clip is not None:
                    parts = gradient.split(sizes)
                    limit = clip / len(sizes) ** 0.5
                    lengths.append(
                        float(gradient.norm())
                        if len(sizes) == 1
                        else sum(min(float(part.norm()), limit) ** 2 for part in parts) ** 0.5
                    )
                    gradient = torch.cat([p * min(1, limit / float(p.norm())) for p in parts])
                total += gradient
            now = parameters_to_vector(module.parameters()).detach()
            vector_to_parameters(now - rate * total / len(step), module.parameters())
        updates.append(parameters_to_vector(module.parameters()).detach() - start)
        norms.append(lengths)
    vector_to_parameters(start.clone(), module.parameters())
    return torch.stack(updates), norms


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("clipping", [None, "flat", "per_layer"])
def test_clients_in_one_batch_are_those_one_at_a_time(kind, clipping):
    module, inputs, targets, start = setting(kind)
    rng = np.random.default_rng(0)
    rows = [list(rng.permutation(40)[:6].reshape(2, 3)) for _ in range(4)]
    rows += [[step[:2] for step in rows[0]]]  # a client with fewer rows
    local = LocalTraining(module, inputs, targets, 0.3)
    sizes = local.sizes if clipping == "per_layer" else (sum(local.sizes),)
    protection = None
    if clipping is not None:
        protection = RowProtection(
            Clipping(local.sizes, clipping == "per_layer"), 0.8, 0.0, False, torch.Generator()
        )
    whole, norms = local.updates(start, rows, protection)
    one, norms_of_one = local.updates(start, rows, protection, at_once=1)
    two, _ = local.updates(start, rows, protection, at_once=2)
    clip = None if clipping is None else 0.8
    expected, lengths = by_hand(module, inputs, targets, start, rows, 0.3, clip, sizes)
    for found in (whole, one, two):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)
    for step, (ours, theirs) in enumerate(zip(norms, norms_of_one, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        for client, batches in enumerate(rows):
            size = len(batches[step])
            by_row = lengths[client][step * size : (step + 1) * size]
            assert ours[client, :size].tolist() == pytest.approx(by_row, rel=1e-4)
            assert not ours[client, size:].any()


@pytest.mark.parametrize("on_each", [False, True])
def test_noise_of_rows_has_the_stated_size(on_each):
    """Once a batch, or on each of its rows, and then divided by their number."""
    module, inputs, targets, start = setting("mlp")
    local = LocalTraining(module, inputs, targets, 1.0)
    rows = [[np.arange(4)]] * 200 + [[np.arange(2)]] * 200
    quiet, noisy = (
        RowProtection(Clipping(local.sizes), 0.5, std, on_each, torch.Generator().manual_seed(1))
        for std in (0.0, 3.0)
    )
    difference = local.updates(start, rows, noisy)[0] - local.updates(start, rows, quiet)[0]
    for part, size in ((difference[:200], 4), (difference[200:], 2)):
        expected = 3.0 / size * (size**0.5 if on_each else 1.0)
        assert float(part.std()) == pytest.approx(expected, rel=0.03)
        correlation = np.corrcoef(part.numpy())[np.triu_indices(200, 1)]
        assert abs(correlation.mean()) < 0.01  # each client draws its own
