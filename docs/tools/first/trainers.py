import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from indpriv.recording import Recorder, private_generator

inputs = torch.randn(500, 20)
train_set = TensorDataset(inputs, (inputs[:, 0] > 0).long())


def make(name, generator=None):
    model = nn.Linear(20, 2)
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(train_set, batch_size=50, generator=generator),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=generator,
    )
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    return model, optimizer, loader, Recorder(name, dataset=train_set, loss_fn=loss_fn, every=1)


model, optimizer, loader, recorder = make("runs/hf")
