"""Audit: everything an audit found, by key of audit.json; what every report shows. Sensitive."""

from collections.abc import Mapping
from typing import Annotated, Any

import pandas as pd

from indpriv._plain import Limits, empty, fields_schema, read_fields, records, to_json
from indpriv.analysis.attacks.attributes import AttributeFindings
from indpriv.analysis.attacks.by_epsilon import BINS
from indpriv.analysis.attacks.canary_findings import CanaryResults
from indpriv.analysis.attacks.ceilings import Ceilings
from indpriv.analysis.attacks.rates import RATES, TRIED, AttackMeasures
from indpriv.analysis.attacks.threshold_attack import UnequalAttack
from indpriv.analysis.disclosures import Disclosure
from indpriv.analysis.distribution import Distribution, UnitSizes
from indpriv.analysis.exactness import Exactness
from indpriv.analysis.federated.views import View
from indpriv.analysis.fidelity import BatchNormFidelity, Fidelity, Sensitivity, Spacing
from indpriv.analysis.groups import GroupTable
from indpriv.analysis.guarantee import Guarantee, as_read
from indpriv.analysis.hazards import Hazard
from indpriv.analysis.loss import LossRelation
from indpriv.analysis.norms_over_training import Drivers
from indpriv.analysis.reconstruction import Reconstruction
from indpriv.analysis.run_facts import RunFacts
from indpriv.analysis.schedule import ScheduleFindings
from indpriv.epsilon_table import DISCLAIMER, Account
from indpriv.errors import InputError
from indpriv.norm_log.evidence import Check

SCHEMA_VERSION = 2
SENSITIVE = "SENSITIVE: for the curator only"
NO_EXACT_VALUES = (
    "There are no exact values to compare the estimate with: record every step, some reference "
    "examples, or batch norms."
)
# Key of audit.json: the kind of its value, and what it holds. A key without a value is empty.
KEYS: dict[str, tuple[Any, str]] = {
    "name": (str, "Of the run."),
    "created": (str, "ISO 8601, UTC."),
    "versions": (Mapping[str, str], "Of the tool and its libraries."),
    "command": (str, "Reproduces the audit."),
    "account": (Account, "What every epsilon here means."),
    "claim": (
        Annotated[str, Limits(texts=("exact", "estimate"))],
        "Of the individual epsilons: exact or estimate.",
    ),
    "claim_reason": (str, "Why."),
    "guarantee": (Guarantee, "The worst case, the only figure that is a guarantee."),
    "run": (RunFacts, "What was run."),
    "individual": (Distribution, "Distribution of individual epsilon."),
    "unit_sizes": (
        tuple[UnitSizes, ...],
        "Units by their number of rows, and what a cap on it would cost; empty where each has one "
        "row.",
    ),
    "drivers": (Drivers, "Norms over training by class, and the examples at both ends."),
    "loss": (LossRelation | None, "Epsilon and loss; null without an example table."),
    "groups": (tuple[GroupTable, ...], "One table per column asked for."),
    "schedule": (ScheduleFindings | None, "Noise, clipping and accuracy over training."),
    "views": (
        tuple[View, ...],
        "What each observer of a federated run can learn; empty for other runs.",
    ),
    "exactness": (
        Exactness | None,
        "How exact the figures are; null if each comes from every example by itself.",
    ),
    "attacks": (
        Annotated[pd.DataFrame, TRIED],
        "Every attack on this model and on the non-private baseline; those on this model first, "
        "the strongest by AUC first.",
    ),
    "rates": (
        Annotated[pd.DataFrame, RATES],
        "Of these attacks over all examples, by group and by unit, and of gradient canaries.",
    ),
    "ceilings": (
        Ceilings | None,
        "What any attack can reach; null where the unit has several rows.",
    ),
    "unchecked": (
        tuple[str, ...],
        "What could not be checked about the reference models, in sentences.",
    ),
    "roc": (
        Mapping[str, tuple[tuple[float, float], ...]],
        "(false-positive rate, true-positive rate) of thresholds on the loss, by model.",
    ),
    "most_exposed": (
        tuple[UnequalAttack, ...],
        "Tests of the group with the largest mean epsilon, by model and column.",
    ),
    "attack_seed": (int, "Of the random choices of attacks; not a seed of training."),
    "attack_by_epsilon": (
        Annotated[pd.DataFrame, BINS],
        "One attack in bins of epsilon; empty where the norms of the hold-out were not recorded.",
    ),
    "canaries": (
        AttackMeasures | None,
        "What canaries prove about the worst case; null where the run had none.",
    ),
    "gradient_canaries": (
        CanaryResults | None,
        "What gradient canaries prove, beside the account; null where the run had none.",
    ),
    "attribute_attacks": (
        tuple[AttributeFindings, ...],
        "Attacks that guess attributes; empty where the run says nothing of them.",
    ),
    "reconstruction": (
        tuple[Reconstruction, ...],
        "Attacks on gradients that someone reads, one for each file of RUN/leakage.",
    ),
    "fidelity": (
        tuple[Fidelity, ...],
        "What larger K would have given, where exact values exist.",
    ),
    "batch_norms": (
        BatchNormFidelity | None,
        "What batch norms prove about the estimate; null where the account uses none.",
    ),
    "sensitivity": (
        tuple[Sensitivity, ...],
        "How far epsilons move with the rounding of norms and with what is assumed between "
        "records.",
    ),
    "spacing": (
        Spacing | None,
        "How far the estimate still moves with the spacing of records, where no exact values "
        "exist.",
    ),
    "checks": (
        tuple[Check, ...],
        "What the session counts and the files prove about the assumptions.",
    ),
    "disclosures": (tuple[Disclosure, ...], "Facts about the run, each with how it is known."),
    "hazards": (tuple[Hazard, ...], "How this account can be wrong or misread."),
    "missing": (tuple[str, ...], "What this audit lacks, and why."),
}


class Audit:
    """What an audit found: an attribute for each key of `KEYS`; without a value, it is empty."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getattr__(self, key: str) -> Any:
        if key not in KEYS:
            raise AttributeError(f"an audit has no {key!r}")
        return self._values[key] if key in self._values else empty(KEYS[key][0])

    def replace(self, **values: Any) -> "Audit":
        """The same with other values."""
        return Audit(**(self._values | values))

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json: dicts, lists, texts and finite numbers."""
        fixed = {key: schema["const"] for key, schema in _FIXED.items()}
        content = {key: to_json(getattr(self, key)) for key in KEYS}
        return {**fixed, "meaning": self.account.describe(), **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Audit":
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
        return cls(**read_fields(KEYS, content))


def attacks_on(found: Audit, model: str) -> list[Any]:
    """Rows of the attacks on one model, the strongest first."""
    return list(records(found.attacks[found.attacks["model"] == model]))


def above_worst_case(found: Audit) -> int:
    """Number of attacks, and of bins of epsilon, that do better than the worst case allows."""
    tried = (found.attacks, found.attack_by_epsilon)
    return int(sum(of["above_worst_case"].sum() for of in tried))


def has_exact_values(found: Audit) -> bool:
    """Whether the estimate could be compared with exact values."""
    return bool(found.fidelity) or found.batch_norms is not None


_FIXED: dict[str, dict[str, Any]] = {
    "schema_version": {"const": SCHEMA_VERSION},
    "sensitive": {"const": SENSITIVE},
    "disclaimer": {"const": DISCLAIMER},
}


def audit_schema() -> dict[str, Any]:
    """The JSON Schema of audit.json, which report/audit.schema.json holds."""
    schema = fields_schema(KEYS)
    meaning = {
        "description": "What every epsilon in this file means, in one line.",
        "type": "string",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:indpriv:audit:{SCHEMA_VERSION}",
        "title": "indpriv audit",
        **schema,
        "description": f"audit.json of an audit directory. {SENSITIVE}. "
        "Every number is finite; what is undefined is null.",
        "required": [*_FIXED, "meaning", *schema["required"]],
        "properties": {**_FIXED, "meaning": meaning, **schema["properties"]},
    }
