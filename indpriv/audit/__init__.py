"""The audit of a run: from a run directory to an audit directory. Everything it writes is sensitive.

    run directory -> NormLog -> EpsilonTable;  + ExampleTable -> findings -> epsilon.parquet,
    audit.json, report.html

An audit directory holds copies of what later commands need, so that they need neither the run nor
its data.
"""

from indpriv.audit.audit_directory import (
    groups_json,
    groups_of,
    read_audit,
    read_summary,
    write_audit,
)
from indpriv.audit.compare import compare_audits, comparison_json
from indpriv.audit.pipeline import audit
from indpriv.audit.run_directory import Evidence, name_labels
from indpriv.audit.summarise import choose_groups, summarise
from indpriv.audit.variants import effect_of_spacing, fidelity_against_k, sensitivity

__all__ = [
    "Evidence",
    "audit",
    "choose_groups",
    "compare_audits",
    "comparison_json",
    "effect_of_spacing",
    "fidelity_against_k",
    "groups_json",
    "groups_of",
    "name_labels",
    "read_audit",
    "read_summary",
    "sensitivity",
    "summarise",
    "write_audit",
]
