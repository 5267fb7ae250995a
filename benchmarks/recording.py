"""What recording costs, as ratios to plain passes and to Opacus's training steps in the same run.

python benchmarks/recording.py [--sections norms once training comparisons]
    [--models cnn resnet transformer] [--one-core]

norms: a pass over one batch, compared with a plain forward and backward pass of it. A norm pass
divides the batch by the memory that examples take; the plain pass is timed whole, as in training.

once: per_example_gradient_norms of one batch, which is checked on each call, and
a NormPass in a loop, compared with plain passes. A few seconds.

training: what batch norms, and a full pass every epoch with batch norms, add to Opacus's training
steps.

comparisons: what comparing training with its own recomputation adds to 500 steps of 512 pictures,
beside the same recording with comparisons at the first three steps alone. Seven minutes.

About eleven minutes for everything on two idle cores. On a busy machine the ratios of several
threads are distorted: use --one-core then.
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

from audits.training.config import ModelConfig
from audits.training.models import build_model
from indpriv.norm_log.fields import RecordingPolicy
from indpriv.recording import NormPass, Recorder, per_example_gradient_norms, recorder, watch
from indpriv.recording.compared import findings

SECTIONS = ("norms", "once", "training", "comparisons")
BACKENDS = ("layerwise", "functorch")
ROUNDS = 9
TRAINED, EPOCHS, TRAINING_ROUNDS = "cnn", 4, 3
BATCHES = 4  # an epoch, of the size of the model's batch
COMPARED_STEPS, COMPARED_BATCH = 500, 512
# Targets: ratios to a plain pass, shares of Opacus's own time.
LARGEST_PASS, LARGEST_ONCE, LARGEST_BATCH_NORMS, LARGEST_EPOCH = 1.2, 5.0, 0.05, 0.6
LARGEST_EVERY, LARGEST_COMPARED = 0.03, 0.05
CHECKED = 16  # examples of each model that are compared with float64
ONCE = 512  # examples of the section once
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
        mixed = (
            self.mix(self.norms[0](hidden))
            .view(size, positions, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        attended = (
            nn.functional.scaled_dot_product_attention(*mixed)
            .transpose(1, 2)
            .reshape(size, positions, width)
        )
        hidden = hidden + self.out(attended)
        hidden = hidden + self.down(torch.relu(self.up(self.norms[1](hidden))))
        return self.head(hidden.mean(1))


CASES = {
    "cnn": (
        "two-layer CNN, 28x28",
        lambda: build_model(ModelConfig(architecture="tanh_cnn"), (1, 28, 28), 10),
        torch.randn(256, 1, 28, 28),
    ),
    "resnet": (
        "ResNet-20-GN, 32x32",
        lambda: build_model(ModelConfig(architecture="resnet20_gn"), (3, 32, 32), 10),
        torch.randn(128, 3, 32, 32),
    ),
    "transformer": ("small transformer, 32 tokens", Transformer, torch.randint(0, 1000, (256, 32))),
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


def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """A plain forward and backward pass."""
    model.zero_grad()
    LOSS(model(inputs), targets).mean().backward()


def verdict(value: float, limit: float, *, share: bool = False) -> str:
    """Whether a target is reached."""
    shown = f"{limit:.0%}" if share else f"{limit:g}"
    return f"target at most {shown}: {'ok' if value <= limit else 'MISSED'}"


def best_seconds(
    runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The best of several runs after a first one; they alternate, so a slow spell affects all."""
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(rounds + 1):
        for kind, run in runs.items():
            start = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[kind].append(clock() - start)
    return {kind: min(values[1:]) for kind, values in seconds.items()}


def compare(name: str, device: torch.device, clock: Callable[[], float]) -> None:
    """Print the ratio of each backend to a plain pass."""
    title, build, inputs = CASES[name]
    model, inputs = build().to(device), inputs.to(device)
    targets = torch.randint(0, 10, (len(inputs),), device=device)
    passes = {
        backend: NormPass(model, LOSS, inputs, targets, backend=backend) for backend in BACKENDS
    }
    runs: dict[str, Callable[[], object]] = {"plain": partial(plain, model, inputs, targets)}
    runs |= {backend: partial(norm_pass, inputs, targets) for backend, norm_pass in passes.items()}
    best = best_seconds(runs, ROUNDS, clock)
    ratios = {kind: value / best["plain"] for kind, value in best.items()}
    print(f"{title}, batch {len(inputs)}: plain {best['plain'] * 1e3:.0f} ms = 1.00")
    print("  " + ", ".join(f"{kind} {ratios[kind]:.2f}" for kind in runs if kind != "plain"))
    print(
        f"  layerwise {ratios['layerwise']:.2f}, {verdict(ratios['layerwise'], LARGEST_PASS)}",
        flush=True,
    )
    exact = float64_norms(model, inputs[:CHECKED], targets[:CHECKED])
    for backend, norm_pass in passes.items():
        relative = norm_pass(inputs, targets)[0][:CHECKED].double() / exact - 1
        bare = (relative + 1) / (1 + norm_pass.slack) - 1
        print(
            f"  {backend}, {norm_pass.batch_size} at once: differs from float64 by at most {bare.abs().max():.1e} before its slack of "
            f"{norm_pass.slack:.1e}, and by at least {relative.min():+.1e} after it"
        )


def compare_once(device: torch.device, clock: Callable[[], float]) -> None:
    """Print the ratios of one call for one batch, and of a NormPass in a loop, to a plain pass."""
    title, build, example = CASES["cnn"]
    model = build().to(device)
    inputs = torch.randn(ONCE, *example.shape[1:], device=device)
    targets = torch.randint(0, 10, (ONCE,), device=device)
    with NormPass(model, LOSS, inputs, targets) as norm_pass:
        runs: dict[str, Callable[[], object]] = {
            "plain": partial(plain, model, inputs, targets),
            "once": lambda: per_example_gradient_norms(model, LOSS, inputs, targets),
            "loop": lambda: norm_pass(inputs, targets),
        }
        best = best_seconds(runs, ROUNDS, clock)
    once, loop = best["once"] / best["plain"], best["loop"] / best["plain"]
    print(f"{title}, {ONCE} images: plain {best['plain'] * 1e3:.0f} ms = 1.00")
    print(f"  per_example_gradient_norms {once:.2f}, {verdict(once, LARGEST_ONCE)}")
    print(f"  NormPass in a loop {loop:.2f}", flush=True)


def opacus_run(
    mode: str,
    folder: str,
    policy: RecordingPolicy | None,
    clock: Callable[[], float],
    *,
    batch: int = 0,
    epochs: int = EPOCHS,
) -> float:
    """Seconds of a few epochs of Opacus's training under a recording policy (None: no Recorder).

    They include the full pass after the last epoch, but not the one before step 0. Batch norms are
    written to a file at least once, which is more often than in a real run.
    """
    _, build, example = CASES[TRAINED]
    example = example.repeat(max(batch // len(example), 1), *(1,) * (example.ndim - 1))
    inputs = example.repeat(BATCHES, *(1,) * (example.ndim - 1))
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
    attached = (
        Recorder(folder, dataset=dataset, loss_fn=LOSS, policy=policy).attach(
            model, optimizer, loader
        )
        if policy
        else nullcontext()
    )
    with attached:
        start = clock()
        for _ in range(epochs):
            for pictures, labels in loader:
                optimizer.zero_grad()
                criterion(model(pictures), labels).backward()
                optimizer.step()
        return clock() - start


def training_cost(mode: str, clock: Callable[[], float]) -> None:
    """Print what recording, with the writing of files, adds to Opacus's steps."""
    steps = EPOCHS * BATCHES
    recorder.FLUSH_STEPS = steps
    policies = {
        "none": None,
        "watched": RecordingPolicy("once"),
        "batch": RecordingPolicy("once", batch_norms=True),
        "epoch": RecordingPolicy("epoch", batch_norms=True),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in policies}
    for _ in range(TRAINING_ROUNDS):
        for kind, policy in policies.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds[kind].append(opacus_run(mode, f"{folder}/run", policy, clock))
    best = {kind: min(values) for kind, values in seconds.items()}
    batch_norms, watched, epoch = (
        (best[one] - best[other]) / best["none"]
        for one, other in (("batch", "watched"), ("watched", "none"), ("epoch", "none"))
    )
    print(
        f"{CASES[TRAINED][0]}, {mode}, {steps} Opacus steps of {best['none'] / steps * 1e3:.0f} ms"
    )
    print(f"  recording without full passes adds {watched:+.1%}")
    shown = verdict(batch_norms, LARGEST_BATCH_NORMS, share=True)
    print(f"  batch norms add {batch_norms:+.1%} to that, {shown}")
    shown = verdict(epoch, LARGEST_EPOCH, share=True)
    print(f"  full pass every epoch plus batch norms: {epoch:+.1%}, {shown}", flush=True)


def comparison_cost(mode: str, clock: Callable[[], float]) -> None:
    """Print what comparing training with its own recomputation adds, as training's own clock says.

    The same training without a Recorder, with one that compares the first three steps alone, and
    with one as it is; beside it, what the Recorder's own budget says that it spent.
    """
    epochs, budget = COMPARED_STEPS // BATCHES, (findings._ALL, findings._EVERY, findings._FREE)
    seconds, budgets = {}, list[findings.Budget]()

    class Seen(findings.Budget):
        def __init__(self, device: str) -> None:
            super().__init__(device)
            budgets.append(self)

    plain_budget, watch.Budget = watch.Budget, Seen
    try:
        for kind in ("none", "watched", "compared"):
            limits = (1e-9, 1e-9, 0.0) if kind == "watched" else budget
            findings._ALL, findings._EVERY, findings._FREE = limits
            policy = None if kind == "none" else RecordingPolicy("once")
            with tempfile.TemporaryDirectory() as folder:
                seconds[kind] = opacus_run(
                    mode, f"{folder}/run", policy, clock, batch=COMPARED_BATCH, epochs=epochs
                )
    finally:
        watch.Budget = plain_budget
        findings._ALL, findings._EVERY, findings._FREE = budget
    spent, steps = budgets[-1]._spent, epochs * BATCHES
    step = seconds["none"] / steps
    added = (seconds["compared"] - seconds["watched"]) / seconds["none"]
    every, drawn = spent["every"] / seconds["none"], spent["drawn"] / seconds["none"]
    print(
        f"{CASES[TRAINED][0]}, {mode}, {steps} Opacus steps of {COMPARED_BATCH} pictures, "
        f"{step * 1e3:.0f} ms each"
    )
    print(
        f"  recording adds {seconds['watched'] / seconds['none'] - 1:+.1%}; comparisons {added:+.1%} "
        f"to that; by their own clock {every + drawn:.1%}, "
        f"{verdict(every + drawn, LARGEST_COMPARED, share=True)}"
    )
    each = spent["drawn"] / budgets[-1]._n_drawn / step
    print(
        f"  of every step {every:.1%} at {budgets[-1]._n_every} steps, "
        f"{verdict(every, LARGEST_EVERY, share=True)}; {budgets[-1]._n_drawn} drawn steps {drawn:.1%}, "
        f"{each:.2f} of a step each",
        flush=True,
    )


def main() -> None:
    """Compare on every device there is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all"
    )
    parser.add_argument(
        "--models", nargs="+", choices=list(CASES), default=list(CASES), help="of the section norms"
    )
    parser.add_argument(
        "--one-core",
        action="store_true",
        help="one thread's own time, which other programs disturb less",
    )
    options = parser.parse_args()
    if options.one_core:
        torch.set_num_threads(1)
    clock = time.process_time if options.one_core else time.perf_counter
    devices = ["cpu", "cuda"] if torch.cuda.is_available() and not options.one_core else ["cpu"]
    for device in devices if {"norms", "once"} & set(options.sections) else []:
        where = (
            torch.cuda.get_device_name()
            if device == "cuda"
            else f"{torch.get_num_threads()} threads"
        )
        print(f"{where}, load {os.getloadavg()[0]:.1f} at the start")
        for case in options.models if "norms" in options.sections else []:
            compare(case, torch.device(device), clock)
        if "once" in options.sections:
            compare_once(torch.device(device), clock)
    for mode in ("hooks", "ghost") if "training" in options.sections else ():
        training_cost(mode, clock)
    for mode in ("hooks", "ghost") if "comparisons" in options.sections else ():
        comparison_cost(mode, clock)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
