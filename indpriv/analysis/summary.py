"""AuditSummary: everything an audit found, as plain data; what every report shows. Sensitive."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pandas as pd

from indpriv._plain import Limits, from_json, json_schema, records, to_json
from indpriv.analysis.attacks.attributes import AttributeFindings
from indpriv.analysis.attacks.by_epsilon import BINS
from indpriv.analysis.attacks.canary_findings import CanaryResults
from indpriv.analysis.attacks.ceilings import Ceilings
from indpriv.analysis.attacks.rates import RATES, TRIED, AttackMeasures, table
from indpriv.analysis.attacks.threshold_attack import UnequalAttack
from indpriv.analysis.disclosures import Disclosure
from indpriv.analysis.distribution import Distribution
from indpriv.analysis.exactness import Exactness
from indpriv.analysis.federated.views import View
from indpriv.analysis.fidelity.batch_norms import BatchNormFidelity
from indpriv.analysis.fidelity.comparison import Fidelity, Sensitivity, Spacing
from indpriv.analysis.groups import GroupTable
from indpriv.analysis.guarantee import Guarantee, as_read
from indpriv.analysis.hazards import Hazard
from indpriv.analysis.loss.relation import LossRelation
from indpriv.analysis.norms_over_training import Drivers
from indpriv.analysis.reconstruction import Reconstruction
from indpriv.analysis.run_facts import RunFacts
from indpriv.analysis.schedule.findings import ScheduleFindings
from indpriv.analysis.units import UnitSizes
from indpriv.epsilon_table import DISCLAIMER, Account
from indpriv.errors import InputError
from indpriv.norm_log.evidence import Check

SCHEMA_VERSION = 1
SENSITIVE = "SENSITIVE: for the curator only"
NO_EXACT_VALUES = (
    "There are no exact values to compare the estimate with: record every step, some reference "
    "examples, or batch norms."
)


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


@dataclass(frozen=True, eq=False)
class AttackFindings:
    """What attacks on the run achieved.

    Attributes:
        tried: every attack on this model and on the non-private baseline; those on this model
            first, the strongest by AUC first.
        rates: of these attacks over all examples, by group and by unit, and of gradient canaries.
        ceilings: what any attack can reach; None where the unit has several rows.
        unchecked: what could not be checked about the reference models, in sentences.
        roc: (false-positive rate, true-positive rate) of thresholds on the loss, by model.
        most_exposed: tests of the group with the largest mean epsilon, by model and column.
        seed: of the random choices of attacks; not a seed of training.
        by_epsilon: one attack in bins of epsilon; empty where the norms of the hold-out were not
            recorded.
        canaries: what canaries prove about the worst case; None where the run had none.
        gradient_canaries: what gradient canaries prove, beside the account; None where the run had
            none.
        attributes: attacks that guess attributes; empty where the audit file names none.
        reconstruction: attacks on gradients that someone reads, one for each file of RUN/leakage.
    """

    # Without a default: an audit of before rates were a table lacks this key, and is refused.
    rates: Annotated[pd.DataFrame, RATES]
    tried: Annotated[pd.DataFrame, TRIED] = field(metadata={"json": "attacks"})
    by_epsilon: Annotated[pd.DataFrame, BINS] = field(
        default_factory=lambda: table(BINS), metadata={"json": "attack_by_epsilon"}
    )
    ceilings: Ceilings | None = None
    unchecked: tuple[str, ...] = ()
    roc: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    most_exposed: tuple[UnequalAttack, ...] = ()
    seed: int = field(default=0, metadata={"json": "attack_seed"})
    canaries: AttackMeasures | None = None
    gradient_canaries: CanaryResults | None = None
    attributes: tuple[AttributeFindings, ...] = field(
        default=(), metadata={"json": "attribute_attacks"}
    )
    reconstruction: tuple[Reconstruction, ...] = ()

    def of(self, model: str) -> list[Any]:
        """Rows of the attacks on one model, the strongest first."""
        return list(records(self.tried[self.tried["model"] == model]))

    @property
    def above_worst_case(self) -> int:
        """Number of attacks, and of bins of epsilon, that do better than the worst case allows."""
        return int(sum(of["above_worst_case"].sum() for of in (self.tried, self.by_epsilon)))


NO_ATTACKS = AttackFindings(table(RATES), table(TRIED))


@dataclass(frozen=True)
class FidelityFindings:
    """How far the epsilons can lie from exact ones.

    Attributes:
        against_k: what larger K would have given, where exact values exist.
        batch_norms: what batch norms prove about the estimate; None where the account uses none.
        sensitivity: how far epsilons move with the rounding of norms and with what is assumed
            between records.
        spacing: how far the estimate still moves with the spacing of records, where no exact values
            exist.
    """

    against_k: tuple[Fidelity, ...] = field(default=(), metadata={"json": "fidelity"})
    batch_norms: BatchNormFidelity | None = field(default=None, metadata={"json": "free_fidelity"})
    sensitivity: tuple[Sensitivity, ...] = ()
    spacing: Spacing | None = None

    @property
    def has_exact_values(self) -> bool:
        """Whether the estimate could be compared with exact values."""
        return bool(self.against_k) or self.batch_norms is not None


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
        unit_sizes: units by their number of rows, and what a cap on it would cost; empty where each
            has one row.
        drivers: norms over training by class, and the examples at both ends.
        loss: epsilon and loss; None without an example table.
        groups: one table per column asked for.
        schedule: noise, clipping and accuracy over training.
        exactness: how exact the figures are; None if each comes from every example by itself.
        views: what each observer of a federated run can learn; empty for other runs.
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
    schedule: ScheduleFindings | None = None
    views: tuple[View, ...] = ()
    exactness: Exactness | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json: dicts, lists, texts and finite numbers."""
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
                f"audit.json has schema_version={version!r}, not {SCHEMA_VERSION}; make the audit "
                "again"
            )
        if isinstance(guarantee := content.get("guarantee"), Mapping):
            content = {**content, "guarantee": as_read(guarantee)}
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
        "description": f"audit.json of an audit directory. {SENSITIVE}. "
        "Every number is finite; what is undefined is null.",
        "required": [*_FIXED, "meaning", *schema["required"]],
        "properties": {**_FIXED, "meaning": meaning, **schema["properties"]},
    }
