"""The tables of an audit file, except [training]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from audits.training.config.values import (
    KNOWN_KEYS_ONLY,
    Condition,
    Count,
    CountOrZero,
    Epochs,
    Flag,
    Name,
    Positive,
    PositiveShare,
    Share,
)
from audits.training.datasets import DATASETS
from indpriv._checks import check_choice, check_rounding
from indpriv._facts import refused
from indpriv.errors import InputError
from indpriv.leakage import Observation
from indpriv.norm_log.fields import RecordingPolicy

DatasetName = Annotated[
    str,
    Field(strict=True, json_schema_extra={"enum": list(DATASETS)}),
    AfterValidator(lambda name: check_choice("dataset", name, DATASETS)),
]


_ONLY_OF = {
    "hidden": "mlp",
    "activation": "mlp",
    "affine": "resnet20_gn",
    "weight_standardisation": "wrn16_4",
}


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class DataConfig:
    """[data]: the rows to train on, and whose they are.

    Attributes:
        dataset: one of `audits.training.datasets.DATASETS`.
        unit_column: metadata column that names the person behind each row; the run's unit is then
            "user". None if each row is its own unit.
        max_rows_per_unit: train on at most this number of rows of each unit, the first ones; None
            for all.
        share: train on this share of the units, drawn at random; None for all. A smaller share of
            the same share_seed lies in a larger one.
        share_seed: which of them are drawn.
        without: values of training rows that are left out, such as "race=Black".
        without_ids: ids of further rows that are left out: their places in the whole training set,
            from 0.
        label_epsilon: label differential privacy of each training label, by randomised response
            before training; of the label alone, and no part of the epsilon of DP-SGD. None to
            train on the labels as they are. See `audits.training.label_privacy`.
    """

    dataset: DatasetName
    unit_column: Name | None = None
    max_rows_per_unit: Count | None = None
    share: PositiveShare | None = None
    share_seed: CountOrZero | None = None
    without: tuple[Condition, ...] | None = None
    without_ids: tuple[CountOrZero, ...] | None = None
    label_epsilon: Positive | None = None

    @property
    def chooses(self) -> bool:
        """Whether some training rows are left out."""
        given = self.max_rows_per_unit, self.share, self.without, self.without_ids
        return any(value is not None for value in given)

    def __post_init__(self) -> None:
        known = DATASETS[self.dataset].metadata_columns
        if self.share_seed is not None and self.share is None:
            raise InputError("share_seed is given without share; leave it out, or draw a share")
        for condition in self.without or ():
            column = condition.partition("=")[0]
            check_choice(f"without {condition!r}: column", column, ("label", *known))
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


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class ModelConfig:
    """[model]: the architecture.

    Attributes:
        architecture: see `audits.training.models`.
        hidden: units of each hidden layer; for "mlp" only.
        activation: for "mlp" only.
        affine: whether each GroupNorm learns a scale and a shift; for "resnet20_gn" only, true if
            left out.
        weight_standardisation: convolutions use weights of mean 0 and variance 1 (Qiao et al.
            2019), as in De et al. 2022; for "wrn16_4" only.
        pretrained: file of parameters to start from (safetensors, or a checkpoint of torch.save),
            found from the folder in which the command runs. Its last layer may be of another number
            of classes, and then starts at random. No epsilon covers the data it was trained on.
    """

    architecture: Literal["mlp", "tanh_cnn", "resnet20_gn", "wrn16_4", "gpt2_lora"]
    hidden: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    activation: Literal["tanh", "relu"] | None = None
    affine: Flag | None = None
    weight_standardisation: Flag | None = None
    pretrained: Annotated[str, Field(strict=True, min_length=1)] | None = None

    def __post_init__(self) -> None:
        for name, architecture in _ONLY_OF.items():
            if getattr(self, name) is not None and self.architecture != architecture:
                raise InputError(
                    f'{name} is for architecture = "{architecture}" only; leave it out with '
                    f'architecture = "{self.architecture}"'
                )


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
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


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class CheckpointConfig:
    """[checkpoints]: number of steps between checkpoints, or "epoch".

    The first and the last model are always saved.
    """

    every: Count | Literal["epoch"]


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class GroupConfig:
    """[audit]: the columns whose groups are compared, "label" or metadata; chosen beforehand.

    participation and neighbouring are those of `indpriv audit`; None for its defaults.
    """

    groups: tuple[Name, ...] = ("label",)
    participation: Literal["secret", "known"] | None = None
    neighbouring: Literal["add_remove", "zero_out", "replace_one"] | None = None

    def __post_init__(self) -> None:
        if (self.participation, self.neighbouring) == ("known", "add_remove"):
            raise InputError(
                'participation = "known" with neighbouring = "add_remove": an attacker who knows '
                "who took part also knows who is in the data; say "
                'neighbouring = "zero_out" (one example contributes nothing) or "replace_one"'
            )
        if len(set(self.groups)) < len(self.groups):
            raise InputError(f"groups = {list(self.groups)} has a name twice; list each once")


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class AttackConfig:
    """[attacks]: canaries in the run itself, and what attacks on this audit need.

    Attributes:
        gradient_canaries: number of made-up gradients that audit the run while it trains, see
            `indpriv.recording.GradientCanaries`; 0 for none.
        canary_lengths: their norms over max_grad_norm, taken in turn.
        white_box: number of training examples, and of test examples, that are attacked through
            every noisy update, see `indpriv.recording.WhiteBox`; 0 for none. Norms of the test set
            are then recorded too, for `indpriv check` of several such runs.
        references: number of reference models that `python -m audits shadow` trains.
        labels: it also takes labels of perturbed copies, for label-only attacks.
        checkpoints: it also takes the mean confidence over the checkpoints.
        attributes: categorical columns of a table, such as "sex", that an attacker is to infer from
            the model that `python -m audits train` trains.
    """

    gradient_canaries: CountOrZero = 0
    canary_lengths: Annotated[tuple[PositiveShare, ...], Field(min_length=1)] = (1.0,)
    white_box: CountOrZero = 0
    references: Count = 4
    labels: Flag = False
    checkpoints: Flag = False
    attributes: tuple[Name, ...] = ()

    @property
    def in_run(self) -> bool:
        """Whether the run attacks itself while it trains."""
        return bool(self.white_box or self.gradient_canaries)

    def __post_init__(self) -> None:
        if self.white_box and self.gradient_canaries:
            raise InputError(
                "white_box and gradient_canaries are both given; a run makes one such attack, so "
                "train another run for the other"
            )


@dataclass(frozen=True, config=KNOWN_KEYS_ONLY)
class LeakagePlan:
    """[leakage]: which examples are reconstructed from gradients, and how.

    Attributes:
        see: what is read, as `Observation` has it with batch_size, local_steps, learning_rate and
            share. DP-SGD neither clips nor noises an update; a federated run protects it as
            [federated] says, and its learning rate is the local one.
        attacks: of `indpriv.leakage.INVERSIONS`.
        examples, at, knows_labels: as of `indpriv.leakage.leak.leak_run`.
        before_noise: what is read has no noise yet.
        knows_clipping: "lbfgs" clips the gradient of its guess; false is the attack of the papers.
    """

    see: Literal["row", "batch", "update"] = "row"
    attacks: tuple[Literal["informed", "first-layer", "lbfgs", "adam"], ...] = ()
    examples: Annotated[int, Field(strict=True, ge=2)] = 100
    at: Annotated[tuple[CountOrZero | Literal["last"], ...], Field(min_length=1)] = (0, "last")
    before_noise: Flag = False
    batch_size: Count = 1
    local_steps: Count = 1
    learning_rate: Positive = 0.1
    share: PositiveShare = 1.0
    knows_labels: Flag = False
    knows_clipping: Flag = True

    def __post_init__(self) -> None:
        if self.see == "row" and self.batch_size != 1:
            raise InputError('see = "row" reads one example; leave out batch_size, or see a batch')

    def check_central(self) -> None:
        """Raise InputError for noise on an update of a run that is not federated."""
        if self.see == "update" and not self.before_noise:
            raise refused("refusal.leakage", "update")

    @property
    def seen(self) -> Observation:
        """What is read, without protection."""
        local = {"local_steps": self.local_steps, "learning_rate": self.learning_rate}
        more: dict[str, Any] = local if self.see == "update" else {}
        return Observation(self.see, self.batch_size, share=self.share, **more)
