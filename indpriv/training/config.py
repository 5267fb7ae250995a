"""AuditConfig: what an audit trains and records, read from a TOML file. No torch here, and nothing sensitive.

A configuration holds public choices only; the data, the run directory and a seed are arguments of whoever runs it.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from indpriv._checks import check_rounding, with_current_names
from indpriv.errors import InputError
from indpriv.norm_log.recording_policy import RecordingPolicy, epochs_of
from indpriv.training.datasets import DATASETS
from indpriv.training.values import (
    Check,
    check_keys,
    flag,
    identifier,
    list_of,
    number,
    one_of,
    optional,
    steps_or,
    whole,
)

ARCHITECTURES = ("mlp", "tanh_cnn", "resnet20_gn", "wrn16_4")
ACTIVATIONS = ("tanh", "relu")
GRAD_SAMPLE_MODES = ("hooks", "ghost")


class _Section:
    """A part of a configuration: every field is checked when it is made, by the check in its metadata."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = item.metadata["check"](item.name, getattr(self, item.name))
            object.__setattr__(self, item.name, value)


@dataclass(frozen=True)
class DataConfig(_Section):
    """[data]: which rows are trained on, and whose they are.

    Attributes:
        dataset: one of `indpriv.training.datasets.DATASETS`.
        unit_column: metadata column that says whose row each is: the run's unit is then "user"; None where a row is a unit.
        max_rows_per_unit: the first so many rows of each unit are trained on; None for all.
    """

    dataset: str = field(metadata={"check": one_of(DATASETS)})
    unit_column: str | None = field(default=None, metadata={"check": optional(identifier)})
    max_rows_per_unit: int | None = field(default=None, metadata={"check": optional(whole(1))})

    def __post_init__(self) -> None:
        super().__post_init__()
        known = DATASETS[self.dataset].metadata_columns
        if self.unit_column is not None and self.unit_column not in known:
            raise InputError(
                f"unit_column={self.unit_column!r} is no column of {self.dataset}, which has {', '.join(known) or 'none'}"
            )
        if self.max_rows_per_unit is not None and self.unit_column is None:
            raise InputError(
                "max_rows_per_unit is given without unit_column; say whose rows are whose, or leave it out"
            )


@dataclass(frozen=True)
class ModelConfig(_Section):
    """[model]: architecture; for "mlp" also hidden (units of each hidden layer) and activation."""

    architecture: str = field(metadata={"check": one_of(ARCHITECTURES)})
    hidden: tuple[int, ...] | None = field(
        default=None, metadata={"check": optional(list_of(whole(1), minimum=1))}
    )
    activation: str | None = field(default=None, metadata={"check": optional(one_of(ACTIVATIONS))})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.architecture != "mlp":
            for name in ("hidden", "activation"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f'{name} is for architecture = "mlp" only; leave it out of a {self.architecture}'
                    )


@dataclass(frozen=True)
class TrainingConfig(_Section):
    """[training]: DP-SGD in Opacus's words.

    Attributes:
        epochs: passes over the data, in expectation.
        batch_size: expected size of a Poisson batch; the sampling rate is 1 / ceil(n / batch_size), as in Opacus.
        learning_rate: of plain SGD with momentum.
        max_grad_norm: the clipping norm.
        delta: of every epsilon of the run.
        target_epsilon: worst-case epsilon (of one row) that the noise is chosen for; or noise_multiplier: the noise itself.
        noise_multiplier: noise standard deviation over max_grad_norm.
        momentum: of SGD.
        individual_clipping: clip each example at its last recorded level, which makes the account exact at any K.
        clip_headroom: how far that level is above the norm, as a fraction of max_grad_norm; None for the Recorder's default.
        filter_epsilon: of a privacy filter: nobody passes it at delta, whatever the noise; None for no filter.
        grad_sample_mode: Opacus's way to per-example gradients: "hooks", or "ghost" (less memory, often faster).
        max_physical_batch_size: examples that are worked on at once; None for whole batches.
        non_dp_twin: also train the same model without privacy, to compare attacks.
        non_dp_learning_rate: of the twin; None for learning_rate.
    """

    epochs: int = field(metadata={"check": whole(1)})
    batch_size: int = field(metadata={"check": whole(1)})
    learning_rate: float = field(metadata={"check": number(above=0)})
    max_grad_norm: float = field(metadata={"check": number(above=0)})
    delta: float = field(metadata={"check": number(above=0, below=1)})
    target_epsilon: float | None = field(
        default=None, metadata={"check": optional(number(above=0))}
    )
    noise_multiplier: float | None = field(
        default=None, metadata={"check": optional(number(above=0))}
    )
    momentum: float = field(default=0.0, metadata={"check": number(at_least=0, below=1)})
    individual_clipping: bool = field(default=False, metadata={"check": flag})
    clip_headroom: float | None = field(
        default=None, metadata={"check": optional(number(at_least=0, at_most=1))}
    )
    filter_epsilon: float | None = field(
        default=None, metadata={"check": optional(number(above=0))}
    )
    grad_sample_mode: str = field(default="hooks", metadata={"check": one_of(GRAD_SAMPLE_MODES)})
    max_physical_batch_size: int | None = field(
        default=None, metadata={"check": optional(whole(1))}
    )
    non_dp_twin: bool = field(default=False, metadata={"check": flag})
    non_dp_learning_rate: float | None = field(
        default=None, metadata={"check": optional(number(above=0))}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            given = self.target_epsilon is not None
            both = f"it has {'both' if given else 'neither'} target_epsilon {'and' if given else 'nor'} noise_multiplier"
            raise InputError(f"{both}; give exactly one of the two")
        if self.clip_headroom is not None and not self.individual_clipping:
            raise InputError(
                "clip_headroom is given without individual clipping; set individual_clipping = true or leave it out"
            )
        if self.non_dp_learning_rate is not None and not self.non_dp_twin:
            raise InputError(
                "non_dp_learning_rate is given without a twin; set non_dp_twin = true or leave it out"
            )


def _gap_or(*words: str) -> Check:
    """A gap between full passes: as `steps_or`, or so many epochs."""

    def check(key: str, value: Any) -> int | str:
        return steps_or(*words)(key, value) if epochs_of(value) is None else str(value)

    return check


@dataclass(frozen=True)
class RecordingConfig(_Section):
    """[recording]: what the Recorder is told.

    Attributes:
        every, growth, longest, batch_norms, reference_examples, first: as of `RecordingPolicy`.
        record_holdout: also record the test examples' norms, for attacks judged by epsilon.
        rounding: of norms, as a fraction of max_grad_norm; 0 keeps full precision.
        rounding_mode: "up" (never under-reports) or "nearest" (the paper's).
    """

    every: int | str = field(metadata={"check": _gap_or("epoch", "once")})
    growth: float = field(default=1.0, metadata={"check": number(at_least=1)})
    longest: int | str | None = field(default=None, metadata={"check": optional(_gap_or("epoch"))})
    batch_norms: bool = field(default=False, metadata={"check": flag})
    rounding: float = field(default=0.01, metadata={"check": number(at_least=0, at_most=1)})
    rounding_mode: str = field(default="up", metadata={"check": one_of(("up", "nearest"))})
    reference_examples: int = field(default=0, metadata={"check": whole(0)})
    first: int = field(default=0, metadata={"check": whole(0)})
    record_holdout: bool = field(default=False, metadata={"check": flag})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rounding(self.rounding)
        self.to_policy()

    def to_policy(self) -> RecordingPolicy:
        """The same in the Recorder's words; InputError where gaps, growth and longest do not fit together."""
        return RecordingPolicy(
            self.every,
            self.growth,
            self.longest,
            self.batch_norms,
            self.reference_examples,
            self.first,
        )


@dataclass(frozen=True)
class CheckpointConfig(_Section):
    """[checkpoints]: every so many steps, or "epoch"; the first and the last model are always saved."""

    every: int | str = field(metadata={"check": steps_or("epoch")})


@dataclass(frozen=True)
class GroupConfig(_Section):
    """[audit]: groups, the columns that examples are compared by: "label" or metadata columns. Chosen beforehand."""

    groups: tuple[str, ...] = field(
        default=("label",), metadata={"check": list_of(identifier, minimum=0)}
    )


@dataclass(frozen=True)
class AuditConfig:
    """One audit, as its TOML file says. `to_dict` gives the same tables back.

    >>> config = AuditConfig.from_dict({
    ...     "name": "small", "data": {"dataset": "digits"}, "model": {"architecture": "mlp"},
    ...     "training": {"epochs": 1, "batch_size": 128, "learning_rate": 0.5, "max_grad_norm": 1.0,
    ...                  "delta": 1e-5, "target_epsilon": 3.0},
    ...     "recording": {"every": 1}, "checkpoints": {"every": "epoch"}})
    >>> config.training.momentum, config.audit.groups
    (0.0, ('label',))
    """

    name: str
    data: DataConfig
    model: ModelConfig
    training: TrainingConfig
    recording: RecordingConfig
    checkpoints: CheckpointConfig
    audit: GroupConfig = field(default_factory=GroupConfig)

    def __post_init__(self) -> None:
        identifier("name", self.name)
        if self.data.unit_column is not None and self.training.target_epsilon is not None:
            raise InputError(
                "[training] target_epsilon is of one row, and [data] unit_column makes units of several; give noise_multiplier"
            )
        known = ("label", *DATASETS[self.data.dataset].metadata_columns)
        for group in self.audit.groups:
            if group not in known:
                raise InputError(
                    f"[audit] groups has {group!r}; the data set {self.data.dataset} has {', '.join(map(repr, known))}"
                )

    @classmethod
    def from_toml(cls, path: str | Path) -> AuditConfig:
        """Read an audit file.

        Raises:
            InputError: no such file, broken TOML, or a key that is unknown, missing, or of a wrong type or range; the
                message names file, key, value and what is accepted.
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
        """Make a configuration from the tables of a TOML file; InputError as in `from_toml`."""
        sections = {
            "data": DataConfig,
            "model": ModelConfig,
            "training": TrainingConfig,
            "recording": RecordingConfig,
            "checkpoints": CheckpointConfig,
            "audit": GroupConfig,
        }
        check_keys(
            "the file", tables, required={"name", *sections} - {"audit"}, known=["name", *sections]
        )
        return cls(
            name=tables["name"],
            **{
                name: _read_section(kind, name, tables[name])
                for name, kind in sections.items()
                if name in tables
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """The tables of an equivalent TOML file, defaults filled in."""
        tables: dict[str, Any] = {"name": self.name}
        for section in dataclasses.fields(self)[1:]:
            values = dataclasses.asdict(getattr(self, section.name))
            tables[section.name] = {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if value is not None
            }
        return tables


def _read_section(kind: type[Any], name: str, table: object) -> Any:
    if not isinstance(table, dict):
        raise InputError(f"{name} = {table!r} is no table; write it as [{name}]")
    table = with_current_names(table)
    items = dataclasses.fields(kind)
    required = {item.name for item in items if item.default is dataclasses.MISSING}
    check_keys(f"[{name}]", table, required=required, known=[item.name for item in items])
    try:
        return kind(**table)
    except InputError as error:
        raise InputError(f"[{name}] {error}") from error
