"""What taking norms costs: ratios to a plain forward and backward pass of the same batch, measured in the same run.

python benchmarks/recording.py [--one-core]

A norm pass divides the batch as it finds best, and so may every backend here; the plain pass is timed whole, as in training,
and once more in our own pieces. Free records are timed as part of Opacus training steps.
"""

import argparse
import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from indpriv.recording import Recorder, session
from indpriv.recording.norms import NormPass
from indpriv.recording_policy import RecordingPolicy
from indpriv.training.config import ModelConfig
from indpriv.training.models import build_model

BACKENDS = ("layerwise", "ghost", "hooks", "functorch")
ROUNDS = 7
FREE_CASE, FREE_STEPS, FREE_ROUNDS = "two-layer CNN, 28x28", 16, 3
CHECKED = 16  # examples of each model that are held against float64
LOSS = nn.CrossEntropyLoss(reduction="none")


class Transformer(nn.Module):
    """One small pre-norm block over token embeddings."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(1000, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of (batch, positions) tokens."""
        hidden = self.embedding(tokens)
        size, positions, width = hidden.shape
        mixed = self.mix(self.norms[0](hidden)).view(size, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*mixed).transpose(1, 2).reshape(size, positions, width)
        hidden = hidden + self.out(attended)
        hidden = hidden + self.down(torch.relu(self.up(self.norms[1](hidden))))
        return self.head(hidden.mean(1))


CASES = {
    "two-layer CNN, 28x28": (
        lambda: build_model(ModelConfig(architecture="tanh_cnn"), (1, 28, 28), 10),
        torch.randn(256, 1, 28, 28),
    ),
    "ResNet-20-GN, 32x32": (
        lambda: build_model(ModelConfig(architecture="resnet20_gn"), (3, 32, 32), 10),
        torch.randn(128, 3, 32, 32),
    ),
    "small transformer, 32 tokens": (Transformer, torch.randint(0, 1000, (256, 32))),
}


def float64_norms(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """One example at a time by autograd in float64."""
    model = copy.deepcopy(model).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    norms = []
    for i in range(len(inputs)):
        loss = LOSS(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(sum(g.square().sum() for g in gradients).sqrt())
    return torch.stack(norms)


def in_pieces(model: nn.Module, inputs: Tensor, targets: Tensor, size: int) -> None:
    """A plain forward and backward pass, `size` examples at once."""
    model.zero_grad()
    for some, labels in zip(inputs.split(size), targets.split(size), strict=True):
        (LOSS(model(some), labels).sum() / len(targets)).backward()


def compare(name: str, device: torch.device, clock: Callable[[], float]) -> None:
    """Print the ratio of each backend, rounds interleaved so that a slow spell of the machine meets them all."""
    build, inputs = CASES[name]
    model, inputs = build().to(device), inputs.to(device)
    targets = torch.randint(0, 10, (len(inputs),), device=device)
    passes = {backend: NormPass(model, LOSS, inputs, targets, backend=backend) for backend in BACKENDS}
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: in_pieces(model, inputs, targets, len(inputs)),
        "plain in layerwise's pieces": lambda: in_pieces(model, inputs, targets, passes["layerwise"].batch_size),
    }
    runs |= {backend: partial(norm_pass, inputs, targets) for backend, norm_pass in passes.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(ROUNDS + 1):
        for kind, run in runs.items():
            start = clock()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[kind].append(clock() - start)
    best = {kind: min(values[1:]) for kind, values in seconds.items()}
    print(f"{name}, batch {len(inputs)}: plain {best['plain'] * 1e3:.0f} ms = 1.00")
    print("  " + ", ".join(f"{kind} {best[kind] / best['plain']:.2f}" for kind in runs if kind != "plain"))
    exact = float64_norms(model, inputs[:CHECKED], targets[:CHECKED])
    for backend, norm_pass in passes.items():
        relative = norm_pass(inputs, targets)[0][:CHECKED].double() / exact - 1
        bare = (relative + 1) / (1 + norm_pass.slack) - 1
        print(
            f"  {backend}, {norm_pass.batch_size} at once: off float64 by at most {bare.abs().max():.1e} before its slack of "
            f"{norm_pass.slack:.1e}, by {relative.min():+.1e} at the least after it"
        )


def opacus_run(name: str, mode: str, folder: str, free_records: bool | None, clock: Callable[[], float]) -> float:
    """Seconds of some Opacus steps, recorded with or without free records (None: not recorded at all).

    What is recorded is written once among them: oftener than in a real run.
    """
    build, example = CASES[name]
    inputs = example.repeat(4, *(1,) * (example.ndim - 1))
    dataset = TensorDataset(inputs, torch.randint(0, 10, (len(inputs),)))
    model, criterion = build(), nn.CrossEntropyLoss()
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(dataset, batch_size=len(example)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    model, optimizer, *rest, loader = made
    criterion = rest[0] if rest else criterion
    policy = RecordingPolicy(every=10**9, free_records=bool(free_records))
    recorder = Recorder(folder, dataset=dataset, loss_fn=LOSS, policy=policy)
    attached = nullcontext() if free_records is None else recorder.attach(model, optimizer, loader)
    with attached:
        start = clock()
        for _ in range(FREE_STEPS // len(loader)):
            for batch, labels in loader:
                optimizer.zero_grad()
                criterion(model(batch), labels).backward()
                optimizer.step()
        return clock() - start


def free_records_cost(name: str, mode: str, clock: Callable[[], float]) -> None:
    """Print what free records add to Opacus's steps, the writing of their file included."""
    session.FLUSH_STEPS = FREE_STEPS
    seconds: dict[bool | None, list[float]] = {None: [], False: [], True: []}
    for _ in range(FREE_ROUNDS):
        for kind, values in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                values.append(opacus_run(name, mode, f"{folder}/run", kind, clock))
    best = {kind: min(values) for kind, values in seconds.items()}
    print(
        f"{name}, {mode}: free records add {(best[True] - best[False]) / best[None]:+.1%} to {FREE_STEPS} Opacus steps of "
        f"{best[None] / FREE_STEPS * 1e3:.0f} ms, the rest of recording between full passes "
        f"{(best[False] - best[None]) / best[None]:+.1%}"
    )


def main() -> None:
    """Compare on every device there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--one-core", action="store_true", help="one thread's own time, which other programs disturb less"
    )
    one_core = parser.parse_args().one_core
    if one_core:
        torch.set_num_threads(1)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() and not one_core else ["cpu"]
    for device in devices:
        where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
        print(f"{where}, load {os.getloadavg()[0]:.1f} at the start")
        for case in CASES:
            compare(case, torch.device(device), time.process_time if one_core else time.perf_counter)
    for mode in ("hooks", "ghost"):
        free_records_cost(FREE_CASE, mode, time.process_time if one_core else time.perf_counter)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
