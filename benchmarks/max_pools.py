"""How far norms of float32 lie from those of float64 where a network has max pools, and where it has average pools.

python benchmarks/max_pools.py [--data-dir DIR] [--parameters FILE] [--examples N]

Where two values of a max pool are nearly equal, the last digit chooses which one the gradient passes through, so that few
norms differ by far more than rounding errors. `indpriv check` calls so few and so small differences a matter of precision:
at most one norm in 1,000, at most 1 % of max_grad_norm, and 1e-6 of it on average over all that are compared. Seeds and
the clipping norm are those of this file; FILE is a safetensors file of audits' tanh_cnn, as a run of audits/cifar10_public.toml
leaves it, and without it parameters are random.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from audits.training.datasets import load_dataset
from audits.training.models import load_pretrained, tanh_cnn
from indpriv.errors import InputError

CLIP = 15.0  # of audits/cifar10.toml
BATCH = 250


def norms(model: nn.Module, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,) L2 norms of the gradient of each example's loss, in one precision."""
    model = model.to(dtype)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        output = functional_call(model, values, (one[None],))
        return nn.functional.cross_entropy(output, target[None])

    gradients = vmap(grad(loss), (None, 0, 0))
    parts = zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    return torch.cat(
        [
            sum(
                each.double().flatten(1).square().sum(1)
                for each in gradients(parameters, some.to(dtype), theirs).values()
            ).sqrt()
            for some, theirs in parts
        ]
    )


def main() -> None:
    """Print both networks' differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir")
    parser.add_argument("--parameters", type=Path)
    parser.add_argument("--examples", type=int, default=50_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        split = load_dataset("cifar10", options.data_dir).train
    except InputError as error:
        print(error)
        return
    inputs, targets = (
        torch.as_tensor(each[: options.examples]) for each in (split.inputs, split.targets)
    )
    torch.manual_seed(0)
    model = tanh_cnn((3, 32, 32), 10)
    if options.parameters:
        load_pretrained(model, options.parameters)
    for kind in ("max", "average"):
        if kind == "average":
            for place, layer in model.named_children():
                if isinstance(layer, nn.MaxPool2d):
                    setattr(model, place, nn.AvgPool2d(layer.kernel_size, layer.stride))
        single, double = (
            norms(model, inputs, targets, dtype) for dtype in (torch.float32, torch.float64)
        )
        off = (single - double).abs() / CLIP
        print(
            f"{kind} pools: {len(off):,} norms, median {double.median():.3g}; float32 is off by up to {off.max():.2g} of C = "
            f"{CLIP:g}; by more than 0.0001 C {int((off > 1e-4).sum())}, larger by so much "
            f"{int(((single - double) > 1e-4 * CLIP).sum())}"
        )


if __name__ == "__main__":
    main()
