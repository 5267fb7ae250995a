from pathlib import Path

Path("audit_spec.py").write_text(
    """
from torch import nn

from indpriv.recording import AuditSpec
from audits.training.datasets import load_dataset
from audits.training.tensors import tensor_set, whole_batch

spec = AuditSpec(
    model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
    dataset=tensor_set(load_dataset("digits").train),
    collate_fn=whole_batch,
    loss_fn=nn.CrossEntropyLoss(reduction="none"),
)
""",
    encoding="utf-8",
)
