import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from indpriv.recording import Recorder, private_generator

inputs = torch.randn(600, 8)
train_set = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
model = nn.Linear(8, 2)
loss_fn = nn.CrossEntropyLoss(reduction="none")
model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    data_loader=DataLoader(train_set, batch_size=50, shuffle=True, generator=private_generator()),
    noise_multiplier=3.0,
    max_grad_norm=1.0,
    noise_generator=private_generator(),
    poisson_sampling=False,
)
recorder = Recorder("runs/shuffled", dataset=train_set, loss_fn=loss_fn, every="once")
with recorder.attach(model, optimizer, loader):
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).mean().backward()
            optimizer.step()
