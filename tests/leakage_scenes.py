"""Small models and images for tests of leakage."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

LOSS = nn.CrossEntropyLoss(reduction="none")


def digits(n: int) -> tuple[Tensor, Tensor]:
    """Random images (n, 1, 8, 8) in [0, 1] and their labels, the same each time."""
    data = load_digits()
    chosen = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))[:n]
    images = torch.tensor(data.images[chosen.numpy()] / 16, dtype=torch.float32)
    return images.unsqueeze(1), torch.tensor(data.target)[chosen]


def mlp(*, bias: bool = True) -> nn.Module:
    """One hidden layer of 32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32, bias), nn.Tanh(), nn.Linear(32, 10, bias)
        )
