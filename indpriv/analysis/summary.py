"""AuditSummary: everything an audit found, as plain data; what every report shows. Sensitive."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any

from indpriv._plain import AtLeastZero, Count, Limits, Share, Via, from_json, json_schema, to_json
from indpriv.analysis.attacks.by_epsilon import AttackByEpsilon
from indpriv.analysis.attacks.measures import AttackMeasures
from indpriv.analysis.attacks.threshold_attack import ThresholdAttack
from indpriv.analysis.declared import Declared
from indpriv.analysis.distribution import Distribution
from indpriv.analysis.fidelity.batch_norms import BatchNormFidelity
from indpriv.analysis.fidelity.comparison import Fidelity, Sensitivity, Spacing
from indpriv.analysis.groups.group_table import GroupTable
from indpriv.analysis.loss import LossRelation
from indpriv.analysis.norms_over_training import Drivers
from indpriv.analysis.units import UnitSizes
from indpriv.epsilon_table import DISCLAIMER, Account
from indpriv.errors import InputError
from indpriv.norm_log.evidence import Check

SCHEMA_VERSION = 1
SENSITIVE = "SENSITIVE: for the curator only"

Knowledge = Annotated[
    str, Limits(texts=("verified", "declared", "unknown", "not covered", "failed"))
]  # how a statement is known


@dataclass(frozen=True)
class Range:
    """Smallest and largest realised value over all steps."""

    min: AtLeastZero
    max: AtLeastZero


@dataclass(frozen=True)
class Settings:
    """Settings of training, as the log recorded them at each step.

    Attributes:
        total_steps: number of steps of the run.
        expected_epochs: sum of sample_rate over the steps.
        noise_multiplier, max_grad_norm, sample_rate: realised values.
        individually_clipped: whether training clipped each example at its recorded level.
    """

    total_steps: Count
    expected_epochs: float
    noise_multiplier: Range
    max_grad_norm: Range
    sample_rate: Range
    individually_clipped: bool


@dataclass(frozen=True)
class Records:
    """Which norms were recorded.

    Attributes:
        n_records: number of steps with a record of every example.
        recorded_share: n_records over the number of steps.
        n_exact_examples: number of examples whose norm was recorded at every step.
        rounding: of norms, as a fraction of max_grad_norm; 0 if they were not rounded.
        rounding_mode: "up", "nearest" or "none".
    """

    n_records: Count
    recorded_share: Share
    n_exact_examples: Count
    rounding: AtLeastZero
    rounding_mode: str


@dataclass(frozen=True)
class RunFacts:
    """What was run, as the log recorded it.

    Attributes:
        n_examples, n_test_examples: number of training and test examples.
        n_units: number of distinct privacy units; None where each example is its own.
        train_accuracy, test_accuracy: of the final model; None where unknown.
        example_ids_sha256: fingerprint of the ids in order.
        caveats: reasons, found while recording, why individual epsilons are estimates.
        recorder: what the recorder read from the optimizer and the loader; part of the log's hash chain.
        declared: what run.json says in addition; not verified.
    """

    n_examples: Count
    n_test_examples: Count
    n_units: Count | None
    train_accuracy: Share | None
    test_accuracy: Share | None
    settings: Settings = field(metadata={"flatten": True})
    records: Records = field(metadata={"flatten": True})
    example_ids_sha256: str
    caveats: tuple[str, ...]
    recorder: Mapping[str, Any]
    declared: Declared = field(
        metadata={
            "via": Via(Mapping[str, Any], attrgetter("content"), Declared.from_run_json),
        }
    )


@dataclass(frozen=True)
class Membership:
    """What the best test for membership could do, if it sees every model state and knows all data but one example.

    Of an example at max_grad_norm in every step, read off the whole privacy curve: a limit for everybody, rounded up.

    Attributes:
        false_positive_rate: how often the test says "in" of an example that was not.
        true_positive_rate: how often it can then say so of one that was, at most.
        advantage: the largest difference of the two rates, at any false-positive rate.
        mu: of a Gaussian mechanism like this run (mu-GDP); an approximation.
    """

    false_positive_rate: float
    true_positive_rate: Share
    advantage: Share
    mu: AtLeastZero


@dataclass(frozen=True)
class Guarantee:
    """The run's differential-privacy guarantee.

    Attributes:
        worst_case_epsilon: of an example at max_grad_norm in every step.
        delta: of the guarantee; delta_times_n is the expected number of people whom a delta failure could expose.
        status: "supported" (every check of its assumptions passed), "declared" (assumptions were not checked),
            "unproven" (a check of an assumption failed) or "void" (no privacy at all).
        statement: one sentence with the unit, the neighbouring relation, the sampler and what is covered.
        reasons: why it is not "supported".
        membership: what it means to a test for membership, tighter than (epsilon, delta) says; None where a unit has
            several rows.
    """

    worst_case_epsilon: AtLeastZero
    delta: AtLeastZero
    delta_times_n: AtLeastZero
    status: Annotated[str, Limits(texts=("supported", "declared", "unproven", "void"))]
    statement: str
    reasons: tuple[str, ...]
    membership: Membership | None = None

    @property
    def publishable(self) -> bool:
        """Whether the statement may be published as a guarantee: nothing speaks against it, and delta is below 1/n."""
        return self.status in ("supported", "declared") and self.delta_times_n < 1


@dataclass(frozen=True)
class Disclosure:
    """One fact that a reader needs to judge the guarantee.

    Attributes:
        key: identifies it in code and files; never shown.
        title, value: as shown.
        status: "verified", "declared", "unknown", "not covered" or "failed".
        private: the value says something about the data, so it must not be published.
        publishable: the value may appear on a model card, if the run's guarantee may be published.
    """

    key: str
    title: str = field(metadata={"json": "item"})
    value: str
    status: Knowledge
    private: bool = False
    publishable: bool = False


@dataclass(frozen=True)
class Hazard:
    """One way in which this account can be wrong or misread.

    Attributes:
        key: identifies it in code and files; never shown.
        kind: "assumption" (the account relies on it; status says whether it holds), "reading" (a way to misread the
            figures) or "scope" (what is not counted).
        short: two words for a first screen.
        title, detail: as shown.
        status: as for `Disclosure`.
    """

    key: str
    kind: Annotated[str, Limits(texts=("assumption", "reading", "scope"))]
    short: str
    title: str = field(metadata={"json": "hazard"})
    status: Knowledge
    detail: str


@dataclass(frozen=True)
class Provenance:
    """Where an audit comes from.

    Attributes:
        created: ISO 8601, UTC.
        versions: of the tool and its libraries.
        command: reproduces the audit.
    """

    created: str
    versions: Mapping[str, str]
    command: str


@dataclass(frozen=True)
class AttackFindings:
    """What attacks on the run achieved.

    Attributes:
        by_group: success of each attack by column, on the DP model and on the non-private baseline.
        by_epsilon: the attack in bins of epsilon; None where the norms of the hold-out were not recorded.
        canaries: what canaries prove about the worst case; None where the run had none.
    """

    by_group: tuple[ThresholdAttack, ...] = field(default=(), metadata={"json": "attacks"})
    by_epsilon: AttackByEpsilon | None = field(default=None, metadata={"json": "attack_by_epsilon"})
    canaries: AttackMeasures | None = None


@dataclass(frozen=True)
class FidelityFindings:
    """How far the epsilons can lie from exact ones.

    Attributes:
        against_k: what larger K would have given, where exact values exist.
        batch_norms: what batch norms prove about the estimate; None where the account uses none.
        sensitivity: how far epsilons move with the rounding of norms and with what is assumed between records.
        spacing: how far the estimate still moves with the spacing of records, where no exact values exist.
    """

    against_k: tuple[Fidelity, ...] = field(default=(), metadata={"json": "fidelity"})
    batch_norms: BatchNormFidelity | None = field(default=None, metadata={"json": "free_fidelity"})
    sensitivity: tuple[Sensitivity, ...] = ()
    spacing: Spacing | None = None


@dataclass(frozen=True)
class Notes:
    """What a reader must know beside the figures.

    Attributes:
        checks: what the session counts and the files prove about the assumptions.
        disclosures: facts about the run, each with how it is known.
        hazards: how this account can be wrong or misread.
        missing: what this audit lacks, and why.
    """

    checks: tuple[Check, ...]
    disclosures: tuple[Disclosure, ...]
    hazards: tuple[Hazard, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class AuditSummary:
    """What an audit found.

    Attributes:
        name: of the run.
        account: what every epsilon here means.
        claim, claim_reason: of the individual epsilons: "exact" or "estimate", and why.
        guarantee: the worst case, the only figure that is a guarantee.
        run: what was run.
        individual: distribution of individual epsilon.
        unit_sizes: units by their number of rows, and what a cap on it would cost; empty where each has one row.
        drivers: norms over training by class, and the examples at both ends.
        loss: epsilon and loss; None without an example table.
        groups: one table per column asked for.
    """

    name: str
    provenance: Provenance = field(metadata={"flatten": True})
    account: Account
    claim: Annotated[str, Limits(texts=("exact", "estimate"))]
    claim_reason: str
    guarantee: Guarantee
    run: RunFacts
    individual: Distribution
    unit_sizes: tuple[UnitSizes, ...]
    drivers: Drivers
    loss: LossRelation | None
    groups: tuple[GroupTable, ...]
    attacks: AttackFindings = field(metadata={"flatten": True})
    fidelity: FidelityFindings = field(metadata={"flatten": True})
    notes: Notes = field(metadata={"flatten": True})

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json (see report/audit.schema.json): dicts, lists, texts and finite numbers."""
        fixed = {key: schema["const"] for key, schema in _FIXED.items()}
        return {**fixed, "meaning": self.account.describe(), **to_json(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "AuditSummary":
        """Read the content of audit.json.

        Raises:
            InputError: another schema version, a key is absent, or a value is of another kind.
        """
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"audit.json has schema_version={version!r}, not {SCHEMA_VERSION}; make the audit again"
            )
        return from_json(cls, content)


_FIXED: dict[str, dict[str, Any]] = {
    "schema_version": {"const": SCHEMA_VERSION},
    "sensitive": {"const": SENSITIVE},
    "disclaimer": {"const": DISCLAIMER},
}


def audit_schema() -> dict[str, Any]:
    """The JSON Schema of audit.json, which report/audit.schema.json holds."""
    schema = json_schema(AuditSummary)
    meaning = {
        "description": "What every epsilon in this file means, in one line.",
        "type": "string",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:indpriv:audit:{SCHEMA_VERSION}",
        "title": "indpriv audit summary",
        **schema,
        "description": f"audit.json of an audit directory. {SENSITIVE}. Every number is finite; what is undefined is null.",
        "required": [*_FIXED, "meaning", *schema["required"]],
        "properties": {**_FIXED, "meaning": meaning, **schema["properties"]},
    }
