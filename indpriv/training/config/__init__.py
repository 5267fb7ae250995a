"""What an audit file says: one frozen dataclass for each table. Nothing here imports torch."""

from indpriv.training.config.audit_file import AuditConfig
from indpriv.training.config.federated_section import FederatedConfig
from indpriv.training.config.sections import (
    AttackConfig,
    CheckpointConfig,
    DataConfig,
    GroupConfig,
    LeakageConfig,
    ModelConfig,
    RecordingConfig,
)
from indpriv.training.config.training_section import TrainingConfig

__all__ = [
    "AttackConfig",
    "AuditConfig",
    "CheckpointConfig",
    "DataConfig",
    "FederatedConfig",
    "GroupConfig",
    "LeakageConfig",
    "ModelConfig",
    "RecordingConfig",
    "TrainingConfig",
]
