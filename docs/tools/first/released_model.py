import torch
from torch import nn
from torch.utils.data import TensorDataset

from indpriv.recording import AuditSpec

inputs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
sets = [TensorDataset(part, (part[:, 0] > 0).long()) for part in inputs.split(150)]
trained, loss_fn = nn.Linear(4, 2), nn.CrossEntropyLoss(reduction="none")
spec = AuditSpec(model=lambda: nn.Linear(4, 2), dataset=sets[0], test_set=sets[1], loss_fn=loss_fn)
