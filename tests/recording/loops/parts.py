"""Small models and data sets that several loops use. `F1` networks take (batch, 6)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from recording.loops.harness import blobs, mlp, normal

PICTURE = (3, 8, 8)


def pictures(n: int = 200) -> TensorDataset:
    return blobs(n, *PICTURE)


def cnn(
    norm: Callable[[], nn.Module] = lambda: nn.GroupNorm(4, 8), dropout: float = 0.0
) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        norm(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(32, 2),
    )


def mlp_of(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def with_dropout(p: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 2))


class Items(Dataset[Any]):
    """A data set of a function of the position."""

    def __init__(self, item: Callable[[int], Any], n: int = 400) -> None:
        self.item, self.n = item, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


class Several(TensorDataset):
    """Reads all rows of a batch at once; `change` is told their inputs."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(*blobs().tensors)
        self.change = change

    def __getitems__(self, ids: list[int]) -> list[Any]:
        x, y = (t[ids] for t in self.tensors)
        return list(zip(self.change(x), y, strict=True))


def vector(i: int, size: int = 6) -> torch.Tensor:
    return normal(size, seed=i)


class Texts(Dataset[Any]):
    """Texts of 2 to 11 words (1 to 19) with a class; `to` pads them to that length with 0."""

    def __init__(self, n: int = 200, to: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, 12, (n,), generator=generator).tolist()
        self.x = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
        self.y = torch.tensor([int(x[0]) % 2 for x in self.x])
        self.to = to

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i]
        return (F.pad(x, (0, self.to - len(x))) if self.to else x), self.y[i]


def padded(rows: list[Any]) -> Any:
    """Texts padded to the longest of the batch; labels."""
    texts = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    return texts, torch.stack([y for _, y in rows])


def masked_mean(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mean of h (batch, length, width) over words that are no padding."""
    mask = (x != 0).unsqueeze(-1).to(h.dtype)
    return (h * mask).sum(1) / mask.sum(1).clamp(min=1)


class Bag(nn.Module):
    """Mean of embedded words; `pool` is told (h, x)."""

    def __init__(
        self, pool: Callable[..., torch.Tensor] = masked_mean, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed, self.drop, self.out = nn.Embedding(20, 8), nn.Dropout(dropout), nn.Linear(8, 2)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.pool(self.drop(self.embed(x)), x))


class Attention(nn.Module):
    """One attention layer over embedded words; `attend(h, mask)` with mask (batch, length) of padding."""

    def __init__(self, attention: nn.Module | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(20, 16), nn.Linear(16, 48)
        self.drop, self.out, self.attention = nn.Dropout(dropout), nn.Linear(16, 2), attention
        if attention is not None:
            del self.qkv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, padding = self.embed(x), x == 0
        if self.attention is not None:
            a = self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0]
        else:
            q, k, v = (
                t.view(*t.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(h).chunk(3, dim=-1)
            )
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None, None, :])
            a = a.transpose(1, 2).flatten(2)
        return self.out(masked_mean(self.drop(h + a), x))


class LM(nn.Module):
    """Logits (batch, length, 20) from the mean of the words so far."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 20, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(self.embed(x)))
        return self.out(h.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1))


def _next_words(i: int) -> Any:
    generator = torch.Generator().manual_seed(i)
    x = torch.randint(1, 20, (9,), generator=generator)
    y = x[1:].clone()
    y[int(torch.randint(3, 8, (1,), generator=generator)) :] = -100
    return x[:-1], y


def language(n: int = 200) -> Items:
    """Words (8,) and the next ones, of which 3 to 7 count."""
    return Items(_next_words, n)


def token_losses(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each text."""
    losses = F.cross_entropy(outputs.transpose(1, 2), y, reduction="none", ignore_index=-100)
    return losses.sum(1) / (y != -100).sum(1).clamp(min=1)


class Hidden(nn.Module):
    """A perceptron whose hidden values (batch, 8) pass through `between` (a function of h, x)."""

    def __init__(self, between: Callable[..., torch.Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 2)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.drop(torch.tanh(self.a(x))), x))


class Kept(nn.Module):
    """A perceptron with a buffer `kept` (2, 6); `use(self, x, outputs)` returns the outputs."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.body, self.use, self.calls = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), use, 0
        self.head, self.memory = nn.Linear(8, 2), []  # type: ignore[var-annotated]
        self.register_buffer("kept", torch.zeros(2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.use(self, x, self.head(self.body(x)))


class LowRank(nn.Module):
    """A frozen layer and a trained one of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 2).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.drop(x)))


def trainable(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


class Views(nn.Module):
    """A model of several views (batch, views, ...) of each example."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def view_losses(out, y):
    """The mean over the views of each example."""
    every = y.repeat_interleave(out.shape[1])
    return F.cross_entropy(out.flatten(0, 1), every, reduction="none").view(len(y), -1).mean(1)


def train_on_views(s, average):
    """With augmentation multiplicity 3; average(p, views): what the loop makes of p.grad_sample."""
    views = 3
    x = normal(400, views, 6)
    s.make(TensorDataset(x, (x[..., 0].mean(1) > 0).long()), Views(mlp()))
    with s.recorded(view_losses, views=views):
        for x, y in s.batches():
            s.optimizer.zero_grad()
            s.backward(s.model(x), y, view_losses)
            for p in s.optimizer.params:
                p.grad_sample = average(p, views)
            s.optimizer.step()


class Conditioned(nn.Module):
    """Takes a condition (batch, 6), or none."""

    def __init__(self):
        super().__init__()
        self.of_inputs, self.of_conditions = nn.Linear(6, 8), nn.Linear(6, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x, condition=None):
        condition = torch.zeros_like(x) if condition is None else condition
        return self.out(torch.tanh(self.of_inputs(x) + self.of_conditions(condition)))


def called(s, outputs_of, **options):
    """`outputs_of(model, x, condition, step, labels)` calls the model, whose norms are taken once."""
    x, y = blobs().tensors
    s.make(TensorDataset(x, normal(400, 6, seed=8), y), Conditioned(), **options)
    with s.recorded(unpack=lambda batch: (tuple(batch[:2]), batch[2]), every="once"):
        for x, condition, y in s.batches():
            s.step(None, y, outputs=outputs_of(s.model, x, condition, s.steps, y))


def under_autocast(s, data=None, model=None, **options):
    """Forward passes in bfloat16, losses in float32."""
    s.make(data, model, **options)
    with s.recorded(autocast=True):
        for x, y in s.batches():
            s.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = s.model(x)
            s.backward(outputs.float(), y)
            s.optimizer.step()


def train_ahead(s):
    """Another thread loads batches."""
    waiting = queue.Queue(2)

    def load():
        for batch in s.batches(3):
            waiting.put(batch)
        waiting.put(None)

    with s.recorded():
        thread = threading.Thread(target=load)
        thread.start()
        while (batch := waiting.get()) is not None:
            s.step(*batch)
        thread.join()
