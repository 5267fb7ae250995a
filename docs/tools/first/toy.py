# What the pages take from a script as in the README: data, loss, model and loop.
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import indpriv
from indpriv.recording import Recorder

inputs = torch.randn(1000, 20)
train_set = TensorDataset(inputs, (inputs[:, 0] > 0).long())
loss_fn = nn.CrossEntropyLoss(reduction="none")


def made(max_grad_norm=1.0):
    module = nn.Linear(20, 2)
    return PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        data_loader=DataLoader(train_set, batch_size=100),
        noise_multiplier=1.0,
        max_grad_norm=max_grad_norm,
    )


def train(epochs):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).mean().backward()
            optimizer.step()


model, optimizer, loader = made()
