"""AuditConfig: what an audit trains and records, read from a TOML file. Not sensitive.

A configuration holds public choices only; data, run directory and seed are arguments of `train`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from audits.training.config.errors import explain
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
from audits.training.config.values import KNOWN_KEYS_ONLY, Name
from audits.training.datasets import DATASETS
from indpriv._checks import check_choice
from indpriv._reading import named
from indpriv.errors import InputError


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class AuditConfig:
    """One audit, as its TOML file describes it. `to_dict` returns the same tables.

    >>> config = AuditConfig.from_dict({
    ...     "name": "small", "data": {"dataset": "digits"}, "model": {"architecture": "mlp"},
    ...     "training": {"epochs": 1, "batch_size": 128, "learning_rate": 0.5, "max_grad_norm": 1.0,
    ...                  "delta": 1e-5, "target_epsilon": 3.0},
    ...     "recording": {"every": 1}, "checkpoints": {"every": "epoch"}})
    >>> config.training.momentum, config.audit.groups
    (0.0, ('label',))
    """

    name: Name
    data: DataConfig
    model: ModelConfig
    training: TrainingConfig
    recording: RecordingConfig
    checkpoints: CheckpointConfig
    audit: GroupConfig = Field(default_factory=GroupConfig)
    attacks: AttackConfig = Field(default_factory=AttackConfig)
    leakage: LeakagePlan = Field(default_factory=LeakagePlan)
    federated: FederatedConfig | None = None

    def __post_init__(self) -> None:
        self._check_scheme()
        if self.data.unit_column is not None and self.training.target_epsilon is not None:
            raise InputError(
                "[training] target_epsilon is of one row, and [data] unit_column makes units of "
                "several; give noise_multiplier"
            )
        if self.data.unit_column is not None and self.training.max_grad_norm == "median":
            raise InputError(
                '[training] max_grad_norm = "median" is of rows, and [data] unit_column makes '
                "units of several, each of which would move several norms; give a number"
            )
        attacked = self.attacks.gradient_canaries or self.attacks.white_box
        settings = self.training
        if attacked and (settings.clipping, settings.noise_scale) != ("flat", "max_grad_norm"):
            raise InputError(
                "[attacks] gradient_canaries and white_box need flat clipping; leave out "
                f'[training] clipping = "{settings.clipping}" and noise_scale'
            )
        tables = DATASETS[self.data.dataset].attributes
        for name in self.attacks.attributes:
            check_choice("[attacks] attributes", name, tables)
        known = ("label", *DATASETS[self.data.dataset].metadata_columns)
        for group in self.audit.groups:
            if group not in known:
                raise InputError(
                    f"[audit] groups has {group!r}; the data set {self.data.dataset} has "
                    f"{', '.join(map(repr, known))}"
                )

    def _check_scheme(self) -> None:
        """Raise InputError for what does not go with [federated]."""
        if self.federated is None:
            self.leakage.check_central()
            return
        if self.training.max_grad_norm == "median":
            raise InputError(
                '[training] max_grad_norm = "median" does not go with [federated]: no one has the '
                "norms of all rows; give a number"
            )
        for name, value in self.to_dict()["training"].items():
            if name not in _FEDERATED_SETTINGS and value != _DEFAULTS.get(name):
                raise InputError(f"[training] {name} does not go with [federated]; leave it out")
        if self.training.clipping not in ("flat", "per_layer"):
            raise InputError(
                f'[training] clipping = "{self.training.clipping}" does not go with [federated]'
            )
        if self.recording != RecordingConfig(every=1, rounding=self.recording.rounding):
            raise InputError(
                "[recording] of a federated run is every = 1, with rounding at most: the norms of "
                "all who take part are recorded"
            )
        if self.data != DataConfig(self.data.dataset) or self.attacks != AttackConfig():
            raise InputError(
                "[attacks] and keys of [data] other than dataset do not go with [federated]"
            )

    def check_central(self, command: str) -> None:
        """Raise InputError for a federated audit, which a command does not know."""
        if self.federated is not None:
            raise InputError(
                f"{self.name} is a federated run, which {command} does not know; use python -m "
                "audits train and indpriv audit"
            )

    @classmethod
    def from_toml(cls, path: str | Path) -> AuditConfig:
        """Read an audit file.

        Raises:
            InputError: no such file, broken TOML, or a key that is unknown, missing, or of a wrong
                type or range; the message names file, table, key, value and what is accepted.
        """
        path = Path(path)
        if not path.exists():
            raise InputError(f"{path} does not exist; pass an audit file such as audits/adult.toml")
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read as TOML: {error}") from error
        with named(path):
            return cls.from_dict(tables)

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> AuditConfig:
        """Make a configuration from the tables of a TOML file; InputError as in `from_toml`."""
        _check_not_lacking(tables)
        try:
            return _ADAPTER.validate_python(dict(tables))
        except ValidationError as error:
            raise InputError(explain(error, cls.json_schema())) from error

    def to_dict(self) -> dict[str, Any]:
        """The tables of an equivalent TOML file, with defaults filled in."""
        tables: dict[str, Any] = _ADAPTER.dump_python(self, mode="json", exclude_none=True)
        return tables

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of an audit file."""
        return _ADAPTER.json_schema()


def _check_not_lacking(tables: Mapping[str, Any]) -> None:
    """Raise InputError if [training] lacks what only federated runs do not need."""
    training = tables.get("training")
    if "federated" in tables or not isinstance(training, Mapping) or set(training) - set(_DEFAULTS):
        return
    required = ("batch_size", "learning_rate", "max_grad_norm", "delta")
    if missing := [name for name in required if name not in training]:
        raise InputError(f"[training] lacks {', '.join(missing)}")


_ADAPTER = TypeAdapter(AuditConfig)
_DEFAULTS = {
    name: key.get("default")
    for name, key in TypeAdapter(TrainingConfig).json_schema()["properties"].items()
}
_FEDERATED_SETTINGS = {"max_grad_norm", "delta", "noise_multiplier", "noise_std", "clipping"}
