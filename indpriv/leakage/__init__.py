"""Reconstruction of examples from gradients that someone reads. Sensitive. Imports torch.

>>> import torch
>>> from torch import nn
>>> from indpriv.leakage import FirstLayer, Observation, leak
>>> _ = torch.manual_seed(0)
>>> model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
>>> found = leak(model, nn.CrossEntropyLoss(reduction="none"), torch.rand(4, 5),
...              torch.tensor([0, 1, 2, 0]), Observation(max_grad_norm=1.0), FirstLayer())
>>> found.details["identified"][found.member].mean()
np.float64(1.0)
"""

# ruff: noqa: E402  what is missing is told before the first import that needs it
from indpriv.errors import check_installed

check_installed("Reconstructions from gradients", "opacus", "torch", "opacus", "safetensors")

from indpriv.leakage.inversion import INVERSIONS, LBFGS, Adam, FirstLayer, Informed, Observation
from indpriv.leakage.leak import leak

__all__ = ["INVERSIONS", "LBFGS", "Adam", "FirstLayer", "Informed", "Observation", "leak"]
