"""What reconstruction from gradients costs and finds: CPU seconds an example, and successes.

    python benchmarks/leakage.py 6                                        digits, three minutes
    INDPRIV_DATA=DIR python benchmarks/leakage.py 6 mnist lfw_people      6 pictures each, 20 minutes

"Same" counts reconstructions with a mean squared error below 1e-3. 100 candidates, chance 1 %.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn

from audits.training.datasets import Dataset, load_dataset
from indpriv.analysis.reconstruction import CLOSE, reconstruction_of
from indpriv.leakage import LBFGS, Adam, FirstLayer, Informed, Observation, leak
from indpriv.leakage.inversion import Inversion
from reports.shared.pictures import network

CANDIDATES = 100
LOSS = nn.CrossEntropyLoss(reduction="none")


def examples(dataset: Dataset, n: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Random examples with values in [0, 1], and the others of the candidates."""
    chosen = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(0))
    chosen = chosen[: n + CANDIDATES - 1]
    inputs = torch.from_numpy(dataset.train.inputs[chosen.numpy()]).float()
    inputs = (inputs - inputs.min()) / (inputs.max() - inputs.min())
    targets = torch.from_numpy(dataset.train.targets[chosen.numpy()])
    return (inputs[:n], targets[:n]), (inputs[n:], targets[n:])


def mlp(data: Dataset) -> nn.Module:
    """784-64-10 for MNIST, with torch's own first parameters."""
    torch.manual_seed(0)
    first, last = nn.Linear(data.train.inputs[0].size, 64), nn.Linear(64, data.n_classes)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), last)


def show(
    name: str, model: nn.Module, data: Dataset, n: int, seen: Observation, attack: Inversion
) -> None:
    """One line of the table."""
    (inputs, targets), others = examples(data, n)
    started = time.process_time()
    scores = leak(model, LOSS, inputs, targets, seen, attack, candidates=others, seed=0)
    seconds = (time.process_time() - started) / n
    found = reconstruction_of(scores)
    same = round(found.close * n)
    error = "failed" if found.error is None else f"{found.error:.1e}"
    label = "" if found.label_found is None else f"{found.label_found:.0%}"
    protected = "" if seen.max_grad_norm is None else f"C={seen.max_grad_norm:g} {seen.clipping}"
    print(
        f"{data.name:10} {name:7} {attack.title:48} {protected:14} {seen.noise_multiplier:<7g}"
        f" {same:>4} of {n:<5} {error:>8} {found.identified:>6.1%} {found.ceiling:>6.1%} {label:>5}"
        f" {found.iterations:>5g} {seconds:>8.3f}",
        flush=True,
    )


def simple(data: Dataset, looks: int) -> None:
    """Attacks on a network whose first layer is linear, under growing noise."""
    for noise in (0.0, 0.01, 0.1):
        seen = Observation(max_grad_norm=0.1, noise_multiplier=noise)
        show("mlp", mlp(data), data, 100, seen, FirstLayer())
    for noise in (0.1, 0.3, 1.0, 2.0, 6.0):
        seen = Observation(max_grad_norm=0.1, noise_multiplier=noise)
        show("mlp", mlp(data), data, looks, seen, Informed())


def pictures(data: Dataset, n: int) -> None:
    """Matching gradients of the network of Wei et al. 2020, with and without clipping and noise."""
    model = network(data.train.inputs.shape[-1], data.n_classes)
    for attack in (LBFGS(7), LBFGS(), LBFGS(start="normal")):
        show("cpl", model, data, n, Observation(), attack)
    for noise in (0.0, 1e-4, 1e-3, 1e-2):
        seen = Observation(max_grad_norm=4.0, clipping="per_layer", noise_multiplier=noise)
        for knows in (True, False):
            show("cpl", model, data, n, seen, LBFGS(30, knows_clipping=knows))
    show("cpl", model, data, n, Observation(max_grad_norm=4.0), Adam(400))


def main() -> None:
    """Print the table."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    print(
        f"{'data':10} {'network':7} {'attack':48} {'clipping':14} {'noise':7} {'same':>13} {'error':>8}"
        f" {'named':>6} {'at most':>6} {'label':>5} {'steps':>5} {'s an ex.':>8}   (same: error < {CLOSE:g})"
    )
    for name in sys.argv[2:] or ["digits"]:
        data = load_dataset(name)
        simple(data, 1000 if name == "digits" else 300)
        pictures(data, n)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
