"""What an audit file says: one frozen dataclass for each table."""

from audits.training.config.audit_file import AuditConfig
from audits.training.config.federated_section import FederatedConfig
from audits.training.config.sections import (
    AttackConfig,
    CheckpointConfig,
    DataConfig,
    GroupConfig,
    LeakagePlan,
    ModelConfig,
    RecordingConfig,
)
from audits.training.config.training_section import TrainingConfig

__all__ = [
    "AttackConfig",
    "AuditConfig",
    "CheckpointConfig",
    "DataConfig",
    "FederatedConfig",
    "GroupConfig",
    "LeakagePlan",
    "ModelConfig",
    "RecordingConfig",
    "TrainingConfig",
]
