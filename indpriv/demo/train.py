"""A small network on UCI Adult, trained with Opacus and recorded. Its run is sensitive.

The first tutorial shows this code (docs/tutorials/first_audit.md), and `indpriv demo` runs it.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from indpriv import ExampleTable
from indpriv.demo.adult import AGE_BANDS, CLASS_NAMES, KNOWN, encode, read_frame
from indpriv.recording import Recorder, private_generator

SETTINGS = {"noise_multiplier": 1.4, "max_grad_norm": 1.0}  # epsilon 3 in 20 epochs
RUN_INFO = {**KNOWN["run_info"], "training": SETTINGS, "class_names": CLASS_NAMES}
loss_fn = nn.CrossEntropyLoss(reduction="none")  # one loss per example
People = tuple[TensorDataset, pd.DataFrame]


def people(split: str) -> People:
    """Inputs and labels of the people in "train" or "test", and the groups that they belong to."""
    frame = read_frame()
    rows = frame[frame["split"] == split].reset_index(drop=True)
    labels = torch.tensor((rows["income"] == CLASS_NAMES[1]).to_numpy(np.int64))
    bands = pd.cut(rows["age"], [*AGE_BANDS, np.inf], right=False, labels=[*AGE_BANDS.values()])
    groups = rows[["race", "sex"]].assign(age_band=bands.astype(str))
    return TensorDataset(torch.from_numpy(encode(rows)), labels), groups


def network() -> nn.Module:
    """From 107 numbers about a person to two classes."""
    return nn.Sequential(nn.Linear(107, 64), nn.Tanh(), nn.Linear(64, 2))


def train(
    run_dir: str | Path,
    *,
    epochs: int = 20,
    seed: int | None = None,
    progress: Callable[[str, int, int], object] = print,
) -> None:
    """Train with DP-SGD and record every step. With a seed, anyone can repeat it: no privacy."""
    noise, batches = private_generator(), private_generator()  # nobody can guess their states
    if seed is not None:
        first, *seeds = np.random.SeedSequence(seed).generate_state(3, np.uint64).tolist()
        torch.manual_seed(first)
        noise, batches = (torch.Generator().manual_seed(number) for number in seeds)
    parts = {split: people(split) for split in ("train", "test")}
    without_dp = trained_without_dp(parts, epochs)

    (train_set, groups), (test_set, test_groups) = parts.values()
    module = network()
    model, optimizer, criterion, loader = PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(train_set, batch_size=958, generator=batches),
        noise_generator=noise,
        grad_sample_mode="ghost",  # the fastest for a network like this
        **SETTINGS,
    )
    recorder = Recorder(
        run_dir,
        dataset=train_set,
        loss_fn=loss_fn,
        every=1,  # norms before every step: the account is exact
        test_set=test_set,  # for attacks and accuracy
        metadata=groups,
        test_metadata=test_groups,
        start="random",
        seeded=seed is not None,
        run_info=RUN_INFO,
    )
    with recorder.attach(model, optimizer, loader):
        for epoch in range(epochs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                criterion(model(inputs), labels).backward()
                optimizer.step()
            progress("training", epoch + 1, epochs)
        torch.save(module.state_dict(), Path(run_dir) / "model.pt")
        without_dp.to_parquet(Path(run_dir) / "examples-non-dp.parquet")


def trained_without_dp(parts: dict[str, People], epochs: int) -> ExampleTable:
    """Losses of the same network without clipping and noise, to compare attacks with."""
    model, (train_set, _) = network(), parts["train"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(train_set)).split(958):
            inputs, labels = train_set[batch]
            optimizer.zero_grad()
            loss_fn(model(inputs), labels).mean().backward()
            optimizer.step()
    rows = []
    for split, (data, groups) in parts.items():
        inputs, labels = data.tensors
        outputs = model(inputs).detach().double()
        found = groups.assign(split=split, example_id=groups.index, unit_id=groups.index)
        found["label"], found["loss"] = labels.numpy(), loss_fn(outputs, labels).numpy()
        rows.append(found.assign(correct=(outputs.argmax(1) == labels).numpy()))
    return ExampleTable(pd.concat(rows, ignore_index=True))
