"""Small character models, which Opacus can train: no layer mixes rows."""

from __future__ import annotations

import math

import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn

from audits.exposure.text import LENGTH
from audits.training.datasets.topics import ALPHABET

_WIDTH, _EMBEDDED, _HEADS = 96, 32, 4


class CharLstm(nn.Module):
    """One LSTM layer between an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET) + 1, _EMBEDDED)
        self.lstm = DPLSTM(_EMBEDDED, _WIDTH, batch_first=True)
        self.head = nn.Linear(_WIDTH, len(ALPHABET))

    def forward(self, codes: Tensor) -> Tensor:
        """Map characters (batch, length) to logits of the next ones (batch, length, alphabet)."""
        logits: Tensor = self.head(self.lstm(self.embedding(codes))[0])
        return logits


class _Block(nn.Module):
    """Causal self-attention and two linear layers, each after a LayerNorm with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        rows, length, _ = states.shape
        before = self.norm1(states)
        query, key, value = (
            layer(before).view(rows, length, _HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = query @ key.transpose(2, 3) / math.sqrt(_WIDTH // _HEADS)
        later = torch.ones(length, length, dtype=torch.bool, device=states.device).triu(1)
        mixed = weights.masked_fill(later, -torch.inf).softmax(3) @ value
        states = states + self.out(mixed.transpose(1, 2).reshape(rows, length, _WIDTH))
        return states + self.narrow(torch.relu(self.wide(self.norm2(states))))


class CharTransformer(nn.Module):
    """Two blocks of causal self-attention over embedded characters and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET) + 1, _WIDTH)
        self.position = nn.Embedding(LENGTH, _WIDTH)
        self.blocks = nn.Sequential(_Block(), _Block())
        self.head = nn.Linear(_WIDTH, len(ALPHABET))

    def forward(self, codes: Tensor) -> Tensor:
        """Map characters (batch, length) to logits of the next ones (batch, length, alphabet)."""
        places = torch.arange(codes.shape[1], device=codes.device).expand_as(codes)
        logits: Tensor = self.head(self.blocks(self.embedding(codes) + self.position(places)))
        return logits


MODELS: dict[str, type[nn.Module]] = {"lstm": CharLstm, "transformer": CharTransformer}
