import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from indpriv.recording import (
    GradientCanaries,
    InsertedCanaries,
    MislabelledCanaries,
    Recorder,
    WhiteBox,
    crafted_canaries,
)

inputs = torch.randn(1200, 20)
labels = (inputs[:, 0] > 0).long()
train_set = TensorDataset(inputs[:1000], labels[:1000])
test_set = TensorDataset(inputs[1000:], labels[1000:])
loss_fn = nn.CrossEntropyLoss(reduction="none")
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))


def train(run_dir, train_set, attack, loader=None):
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=loader or DataLoader(train_set, batch_size=100),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    recorder = Recorder(
        run_dir,
        dataset=train_set,
        test_set=test_set,
        loss_fn=loss_fn,
        every=1,
        attack=attack,
        record_holdout=True,  # WhiteBox attacks test examples too, and needs their norms
    )
    with recorder.attach(model, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).mean().backward()
            optimizer.step()
