"""AuditConfig: what an audit trains and records, read from a TOML file. Not sensitive.

A configuration holds public choices only; data, run directory and seed are arguments of `train`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from indpriv._checks import check_choice, check_rounding, with_current_names
from indpriv.errors import InputError
from indpriv.norm_log.recording_policy import RecordingPolicy
from indpriv.training.config_errors import explain
from indpriv.training.datasets import DATASETS

_KNOWN_KEYS_ONLY = ConfigDict(extra="forbid")

Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
PositiveShare = Annotated[float, Field(strict=True, gt=0, le=1)]
Name = Annotated[
    str,
    Field(
        strict=True,
        pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$",
        description="a name of at most 64 letters, digits, - and _",
    ),
]
Epochs = Annotated[
    str,
    Field(
        strict=True,
        pattern="^([2-9]|[1-9][0-9]{1,5}) epochs$",
        description="a number of epochs such as '2 epochs'",
    ),
]
DatasetName = Annotated[
    str,
    Field(strict=True, json_schema_extra={"enum": list(DATASETS)}),
    AfterValidator(lambda name: check_choice("dataset", name, DATASETS)),
]


@dataclass(frozen=True, config=_KNOWN_KEYS_ONLY)
class DataConfig:
    """[data]: the rows to train on, and whose they are.

    Attributes:
        dataset: one of `indpriv.training.datasets.DATASETS`.
        unit_column: metadata column that names the person behind each row; the run's unit is then
            "user". None if each row is its own unit.
        max_rows_per_unit: train on at most this number of rows of each unit, the first ones; None
            for all.
    """

    dataset: DatasetName
    unit_column: Name | None = None
    max_rows_per_unit: Count | None = None

    def __post_init__(self) -> None:
        known = DATASETS[self.dataset].metadata_columns
        if self.unit_column is not None and self.unit_column not in known:
            raise InputError(
                f"unit_column={self.unit_column!r} is not a column of {self.dataset}, which has "
                f"{', '.join(known) or 'none'}"
            )
        if self.max_rows_per_unit is not None and self.unit_column is None:
            raise InputError(
                "max_rows_per_unit is given without unit_column; name the column that says whose "
                "rows they are, or leave it out"
            )


@dataclass(frozen=True, config=_KNOWN_KEYS_ONLY)
class ModelConfig:
    """[model]: the architecture.

    Attributes:
        architecture: see `indpriv.training.models`.
        hidden: units of each hidden layer; for "mlp" only.
        activation: for "mlp" only.
    """

    architecture: Literal["mlp", "tanh_cnn", "resnet20_gn", "wrn16_4"]
    hidden: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    activation: Literal["tanh", "relu"] | None = None

    def __post_init__(self) -> None:
        if self.architecture != "mlp":
            for name in ("hidden", "activation"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f'{name} is for architecture = "mlp" only; leave it out of a '
                        f"{self.architecture}"
                    )


@dataclass(frozen=True, config=_KNOWN_KEYS_ONLY)
class TrainingConfig:
    """[training]: DP-SGD in Opacus's words.

    Attributes:
        epochs: passes over the data, in expectation.
        batch_size: expected size of a Poisson batch; the sampling rate is
            1 / ceil(n / batch_size), as in Opacus.
        learning_rate: learning rate of SGD with momentum.
        max_grad_norm: clipping norm.
        delta: delta of every epsilon of the run.
        target_epsilon: worst-case epsilon of one row; the noise is chosen to reach it. Pass either
            this or noise_multiplier.
        noise_multiplier: noise standard deviation divided by max_grad_norm.
        momentum: momentum of SGD.
        individual_clipping: clip each example at its last recorded level, which makes the account
            exact however rarely norms are recorded.
        clip_headroom: how far that level is above the norm, as a fraction of max_grad_norm; None
            for the Recorder's default.
        filter_epsilon: limit of a privacy filter: no example's epsilon exceeds it at delta,
            whatever the noise; None for no filter.
        grad_sample_mode: how Opacus computes per-example gradients: "hooks", or "ghost" (less
            memory, often faster).
        max_physical_batch_size: number of examples that are computed at once; None for whole
            batches.
        non_private_baseline: also train the same model without privacy, to compare attacks.
        non_private_learning_rate: learning rate of the baseline; None for learning_rate.
    """

    epochs: Count
    batch_size: Count
    learning_rate: Positive
    max_grad_norm: Positive
    delta: Annotated[float, Field(strict=True, gt=0, lt=1)]
    target_epsilon: Positive | None = None
    noise_multiplier: Positive | None = None
    momentum: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    individual_clipping: Flag = False
    clip_headroom: Share | None = None
    filter_epsilon: Positive | None = None
    grad_sample_mode: Literal["hooks", "ghost"] = "hooks"
    max_physical_batch_size: Count | None = None
    non_private_baseline: Flag = False
    non_private_learning_rate: Positive | None = None

    def __post_init__(self) -> None:
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise InputError("it has neither target_epsilon nor noise_multiplier; give one of them")
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise InputError("it has both target_epsilon and noise_multiplier; give one of them")
        if self.clip_headroom is not None and not self.individual_clipping:
            raise InputError(
                "clip_headroom is given without individual clipping; set individual_clipping = "
                "true or leave it out"
            )
        if self.non_private_learning_rate is not None and not self.non_private_baseline:
            raise InputError(
                "non_private_learning_rate is given without a baseline; set non_private_baseline = "
                "true or leave it out"
            )


@dataclass(frozen=True, config=_KNOWN_KEYS_ONLY)
class RecordingConfig:
    """[recording]: what the Recorder records, and how.

    Attributes:
        every, growth, longest, batch_norms, reference_examples, first: see `RecordingPolicy`.
        record_holdout: also record the norms of the test examples, for attacks that use epsilon.
        rounding: rounding of norms, as a fraction of max_grad_norm; 0 keeps full precision.
        rounding_mode: "up" (never under-reports) or "nearest" (as in the paper).
    """

    every: Count | Literal["epoch", "once"] | Epochs
    growth: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = 1.0
    longest: Count | Literal["epoch"] | Epochs | None = None
    batch_norms: Flag = False
    rounding: Share = 0.01
    rounding_mode: Literal["up", "nearest"] = "up"
    reference_examples: CountOrZero = 0
    first: CountOrZero = 0
    record_holdout: Flag = False

    def __post_init__(self) -> None:
        check_rounding(self.rounding)
        self.to_policy()

    def to_policy(self) -> RecordingPolicy:
        """The Recorder's policy; InputError if gaps, growth and longest do not fit together."""
        return RecordingPolicy(
            self.every,
            self.growth,
            self.longest,
            self.batch_norms,
            self.reference_examples,
            self.first,
        )


@dataclass(frozen=True, config=_KNOWN_KEYS_ONLY)
class CheckpointConfig:
    """[checkpoints]: number of steps between checkpoints, or "epoch".

    The first and the last model are always saved.
    """

    every: Count | Literal["epoch"]


@dataclass(frozen=True, config=_KNOWN_KEYS_ONLY)
class GroupConfig:
    """[audit]: the columns whose groups are compared, "label" or metadata; chosen beforehand.

    participation and neighbouring are those of `indpriv audit`; None for its defaults.
    """

    groups: tuple[Name, ...] = ("label",)
    participation: Literal["secret", "known"] | None = None
    neighbouring: Literal["add_remove", "zero_out", "replace_one"] | None = None

    def __post_init__(self) -> None:
        if len(set(self.groups)) < len(self.groups):
            raise InputError(f"groups = {list(self.groups)} has a name twice; list each once")


@dataclass(frozen=True, config=_KNOWN_KEYS_ONLY)
class AttackConfig:
    """[attacks]: canaries in the run itself, and what attacks on this audit need.

    Attributes:
        gradient_canaries: number of made-up gradients that audit the run while it trains, see
            `indpriv.recording.GradientCanaries`; 0 for none.
        canary_lengths: their norms over max_grad_norm, taken in turn.
        references: number of reference models that `indpriv shadow` trains.
        labels: it also takes labels of perturbed copies, for label-only attacks.
        checkpoints: it also takes the mean confidence over the checkpoints.
        attributes: categorical columns of a table, such as "sex", that an attacker is to infer from
            the model that `indpriv train` trains.
    """

    gradient_canaries: CountOrZero = 0
    canary_lengths: Annotated[tuple[PositiveShare, ...], Field(min_length=1)] = (1.0,)
    references: Count = 4
    labels: Flag = False
    checkpoints: Flag = False
    attributes: tuple[Name, ...] = ()


@dataclass(frozen=True, config=_KNOWN_KEYS_ONLY)
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

    def __post_init__(self) -> None:
        if self.data.unit_column is not None and self.training.target_epsilon is not None:
            raise InputError(
                "[training] target_epsilon is of one row, and [data] unit_column makes units of "
                "several; give noise_multiplier"
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

    @classmethod
    def from_toml(cls, path: str | Path) -> AuditConfig:
        """Read an audit file.

        Raises:
            InputError: no such file, broken TOML, or a key that is unknown, missing, or of a wrong
                type or range; the message names file, table, key, value and what is accepted.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                tables = tomllib.load(file)
        except FileNotFoundError as error:
            raise InputError(
                f"{path} does not exist; pass an audit file such as audits/adult.toml"
            ) from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"{path} cannot be read as TOML: {error}") from error
        try:
            return cls.from_dict(tables)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> AuditConfig:
        """Make a configuration from the tables of a TOML file; InputError as in `from_toml`.

        Former names of keys are accepted.
        """
        renamed = {
            name: _with_current_keys(name, table) if isinstance(table, Mapping) else table
            for name, table in tables.items()
        }
        try:
            return _ADAPTER.validate_python(renamed)
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


def _with_current_keys(section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return with_current_names(table)
    except InputError as error:
        raise InputError(f"[{section}] {error}") from error


_ADAPTER = TypeAdapter(AuditConfig)
