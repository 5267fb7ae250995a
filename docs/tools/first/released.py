import torch
from torch import nn
from torch.utils.data import TensorDataset

from indpriv.recording import AuditSpec

inputs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
sets = [TensorDataset(part, (part[:, 0] > 0).long()) for part in inputs.split(150)]
build_model = lambda: nn.Linear(4, 2)
trained, loss_fn = build_model(), nn.CrossEntropyLoss(reduction="none")
spec = AuditSpec(model=build_model, dataset=sets[0], test_set=sets[1], loss_fn=loss_fn)
