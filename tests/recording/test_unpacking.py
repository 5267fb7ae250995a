"""Batches of every shape: taken as they are, with unpack=, or refused with the line to write."""

import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from indpriv import ExampleTable, InputError, NormLog
from indpriv.recording import Recorder
from indpriv.recording.training_data import Examples
from runs import PER_EXAMPLE, blobs, make_run, mlp

INPUTS, TARGETS = blobs().tensors
EACH = nn.BCEWithLogitsLoss(reduction="none")


class Items(Dataset):
    """Whatever a function of the position gives."""

    def __init__(self, item):
        self.item = item

    def __len__(self):
        return len(TARGETS)

    def __getitem__(self, position):
        return self.item(position)


class Two(nn.Module):
    """Takes two arguments, by name or place, and a number that is no tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, user, item, scale=1.0):
        return self.head(torch.tanh(self.first(user) + scale * self.second(item)))


@dataclass
class Pair:
    inputs: torch.Tensor
    targets: torch.Tensor


def collate_pairs(rows):
    return Pair(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]))


def collate_objects(rows):
    return SimpleNamespace(**vars(collate_pairs(rows)))


def collate_arrays(rows):
    return tuple(np.stack([row[k].numpy() for row in rows]) for k in (0, 1))


THREE = TensorDataset(INPUTS, INPUTS.flip(1), TARGETS)
NESTED = Items(lambda i: ((INPUTS[i], INPUTS[i].flip(0)), TARGETS[i]))
NAMED = Items(lambda i: {"user": INPUTS[i], "item": INPUTS[i].flip(0), "label": TARGETS[i]})
# Model, data set, collate function, unpack.
WAYS = {
    "two arguments": (Two, THREE, None, lambda b: ((b[0], b[1]), b[2])),
    "a third that is no tensor": (Two, THREE, None, lambda b: ((b[0], b[1], 0.5), b[2])),
    "nested": (Two, NESTED, None, lambda b: (tuple(b[0]), b[1])),
    "by keyword": (Two, NAMED, None, lambda b: ({"item": b["item"], "user": b["user"]}, b["label"])),
    "an index": (mlp, TensorDataset(INPUTS, TARGETS, torch.arange(120)), None, lambda b: b[:2]),
    "one key": (mlp, NAMED, None, lambda b: (b["user"], b["label"])),
    "a dataclass": (mlp, blobs(), collate_pairs, lambda b: (b.inputs, b.targets)),
    "an object": (mlp, blobs(), collate_objects, lambda b: (b.inputs, b.targets)),
    "arrays": (mlp, blobs(), collate_arrays, lambda b: tuple(map(torch.as_tensor, b))),
    "half precision": (mlp, TensorDataset(INPUTS.half(), TARGETS), None, lambda b: (b[0].float(), b[1])),
}  # fmt: skip


def call(model, arguments):
    if isinstance(arguments, dict):
        return model(**arguments)
    return model(*arguments) if isinstance(arguments, tuple) else model(arguments)


def row(value, i):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x[i : i + 1], value)


def norms_by_hand(model, arguments, targets):
    norms = []
    for i in range(len(targets)):
        loss = PER_EXAMPLE(call(model, row(arguments, i)), row(targets, i)).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(sum(float(g.double().square().sum()) for g in gradients) ** 0.5)
    return np.array(norms)


@pytest.mark.parametrize(
    ("way", "mode"),
    [*((way, "hooks") for way in WAYS), ("nested", "ghost"), ("nested", "functorch")],
)
def test_a_way_for_batches_of_every_shape(way, mode, tmp_path):
    """Recorded norms are those of the same examples, taken apart by hand."""
    build, dataset, collate, unpack = WAYS[way]
    torch.manual_seed(0)
    model = build()
    loader = DataLoader(dataset, batch_size=12, collate_fn=collate)
    whole = (collate or default_collate)([dataset[i] for i in range(120)])
    expected = norms_by_hand(model, *unpack(whole))
    run = make_run(dataset, model, mode=mode, data_loader=loader)
    recorder = Recorder(
        tmp_path / "run",
        dataset=dataset,
        loss_fn=PER_EXAMPLE,
        unpack=unpack,
        every=1,
        rounding=0,
        test_set=dataset,
    )
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch in run.loader:
            arguments, labels = unpack(batch)
            run.optimizer.zero_grad()
            run.criterion(call(run.model, arguments), labels).backward()
            run.optimizer.step()
    log = NormLog.open(tmp_path / "run")
    np.testing.assert_allclose(log.read()[0], expected, rtol=1e-4)
    table = ExampleTable.from_parquet(tmp_path / "run/examples.parquet")
    assert table.train["label"].tolist() == table.test["label"].tolist() == TARGETS.tolist()


def attach(tmp_path, dataset, model=mlp, loss_fn=PER_EXAMPLE, unpack=None, collate=None, **made):
    """The message with which attaching is refused; "" if it is not."""
    loader = DataLoader(dataset, batch_size=12, collate_fn=collate)
    run = make_run(dataset, model(), data_loader=loader, **made)
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=loss_fn, unpack=unpack)
    try:
        with recorder.attach(run.model, run.optimizer, run.loader):
            pass
    except InputError as error:
        assert not (tmp_path / "run").exists()
        return str(error)
    return ""


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens)).transpose(1, 2)


class Squeezes(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).squeeze()


TEXTS = torch.randint(0, 3, (120, 5), generator=torch.Generator().manual_seed(0))
COLUMN, FLOATS = TARGETS.float()[:, None], TensorDataset(INPUTS, TARGETS.float())
MSE = nn.MSELoss(reduction="none")
# Each with the words that the message must have.
REFUSED = {
    "two arguments": ({"dataset": THREE, "model": Two}, "unpack=lambda batch: ((batch[0], batch[1]), batch[2])"),
    "inputs alone": ({"dataset": TensorDataset(INPUTS)}, "unpack=lambda batch: (batch[0], batch[0])"),
    "a tensor alone": ({"dataset": Items(lambda i: INPUTS[i])}, "unpack=lambda batch: (batch, batch)"),
    "a dataclass": ({"dataset": blobs(), "collate": collate_pairs}, "(batch.inputs, batch.targets)"),
    "nested": ({"dataset": NESTED, "model": Two}, "it takes (user, item, scale); say how: unpack=lambda batch: (tuple(batch[0]), batch[1])"),
    "other keys": ({"dataset": NAMED}, '(batch["user"], batch["label"])'),
    "one key too many": ({"dataset": NAMED, "model": Two}, '({"user": batch["user"], "item": batch["item"]}, batch["label"])'),
    "a dict of arguments": ({"dataset": Items(lambda i: ({"user": INPUTS[i], "item": INPUTS[i]}, TARGETS[i])), "model": Two}, "(dict(batch[0]), batch[1])"),
    "another type": ({"dataset": TensorDataset(INPUTS.double(), TARGETS)}, "batch[0].to(torch.float32)"),
    "texts": ({"dataset": Items(lambda i: (INPUTS[i], "a"))}, "leave texts and other objects out"),
    "nothing": ({"dataset": Items(lambda i: (INPUTS[i], None))}, "no batch can be made"),
    "arrays": ({"dataset": blobs(), "collate": collate_arrays}, "torch.as_tensor"),
    "other lengths": ({"dataset": blobs(), "unpack": lambda b: (b[0], b[1].sum())}, "must be the examples"),
    "no pair": ({"dataset": blobs(), "unpack": lambda b: b[0]}, "unpack returned float32 (120, 6)"),
    "no targets": ({"dataset": blobs(), "unpack": lambda b: (b[0], None)}, "contains no tensor"),
    "unpack fails": ({"dataset": blobs(), "unpack": lambda b: b[7]}, "unpack failed on (float32 (120, 6), int64 (120,)): IndexError"),
    "no function": ({"dataset": blobs(), "unpack": "x"}, "unpack failed on"),
    "batch_first=False": ({"dataset": blobs(), "batch_first": False}, "make_private(batch_first=False)"),
    "BCE of a column": ({"dataset": FLOATS, "model": partial(nn.Linear, 6, 1), "loss_fn": EACH}, "outputs.squeeze(1)"),
    "BCE of columns": ({"dataset": TensorDataset(INPUTS, COLUMN), "model": partial(nn.Linear, 6, 1), "loss_fn": EACH}, "losses.flatten(1).mean(1)"),
    "MSE of a column": ({"dataset": FLOATS, "model": partial(nn.Linear, 6, 1), "loss_fn": MSE}, "take outputs.squeeze(1)"),
    "a bare squeeze": ({"dataset": FLOATS, "model": partial(Squeezes, 6, 1), "loss_fn": EACH}, "batches of any size"),
    "losses of positions": ({"dataset": TensorDataset(TEXTS, TEXTS), "model": Tokens}, "losses.flatten(1).mean(1)"),
    "a loss that fails": ({"dataset": blobs(), "loss_fn": lambda o, t: 1 / 0}, "ZeroDivisionError"),
    "no tensor of losses": ({"dataset": blobs(), "loss_fn": lambda o, t: [1.0]}, "one loss per example"),
    "one number": ({"dataset": blobs(), "loss_fn": nn.CrossEntropyLoss()}, "one loss per example"),
    "a loss that takes no dict": ({"dataset": Items(lambda i: {"user": INPUTS[i], "item": INPUTS[i]}), "model": Two}, "take e.g. targets['labels']"),
    "detached": ({"dataset": blobs(), "loss_fn": lambda o, t: PER_EXAMPLE(o, t).detach()}, "leave out detach()"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_message_with_what_to_write(case, tmp_path):
    arguments, words = REFUSED[case]
    assert words in attach(tmp_path, **arguments)


@pytest.mark.parametrize("case", list(REFUSED)[:9])
def test_what_the_message_says_to_write_works(case, tmp_path):
    arguments, _ = REFUSED[case]
    said = re.search(r"unpack=(lambda batch: .*?)(, or \(|$)", attach(tmp_path, **arguments))[1]
    alone = "alone" in case  # an autoencoder's loss then
    model = partial(nn.Linear, 6, 6) if alone else arguments.get("model", mlp)
    loss_fn = (lambda o, t: (o - t).square().mean(1)) if alone else PER_EXAMPLE
    given = {**arguments, "model": model, "loss_fn": loss_fn, "unpack": eval(said)}
    assert attach(tmp_path, **given) == ""


def test_a_data_set_whose_items_fail_is_one_message():
    """A replay has no loop of the user's that would fail first."""
    examples = Examples(Items(lambda i: {}[i]), None, torch.device("cpu"))
    with pytest.raises(InputError, match=r"items: KeyError\(0\); correct the data set"):
        next(examples.batches(5))


def test_the_users_own_collate_function_is_used(tmp_path):
    dataset = blobs()
    examples = Examples(dataset, default_collate, torch.device("cpu"))
    assert examples.dataset is dataset
    assert examples.collate is default_collate

    def scaled(rows):
        inputs, targets = default_collate(rows)
        return 2 * inputs, targets

    own = Examples(dataset, scaled, torch.device("cpu"))
    assert own.collate is scaled
    torch.testing.assert_close(next(own.batches(5))[0], 2 * INPUTS[:5])
