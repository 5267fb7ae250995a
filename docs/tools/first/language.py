from types import SimpleNamespace

import numpy as np
import torch
from torch import nn


class Bigrams(nn.Module):
    """The likelihood of each byte after the one before."""

    def __init__(self):
        super().__init__()
        self.after = nn.Embedding(256, 256)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.after(input_ids))


rng = np.random.default_rng(0)
texts = [f"the code of door {k} is {rng.integers(10**6):06}" for k in range(200)]
ids, member = [list(text.encode()) for text in texts], rng.random(200) < 0.5
model = Bigrams()
