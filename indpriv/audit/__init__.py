"""The audit of a run: from a run directory to an audit directory. All it writes is sensitive.

    run directory -> NormLog -> EpsilonTable
    EpsilonTable + ExampleTable -> findings -> epsilon.parquet, audit.json, report.html

An audit directory holds copies of what later commands need, so they need neither the run nor its
data.
"""

from indpriv.analysis.audited_run import AuditedRun, choose_groups, find_all
from indpriv.analysis.fidelity import effect_of_spacing, fidelity_against_k, sensitivity
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.audit.attacks import attack_study, attributes_of_run, results_of_run
from indpriv.audit.audit_directory import (
    groups_json,
    groups_of,
    read_audit,
    read_summary,
    write_audit,
)
from indpriv.audit.compare import compare_audits, comparison_json
from indpriv.audit.compose import compose_runs, write_composition
from indpriv.audit.pipeline import audit

__all__ = [
    "AuditedRun",
    "RecordedRun",
    "attack_study",
    "attributes_of_run",
    "audit",
    "choose_groups",
    "compare_audits",
    "comparison_json",
    "compose_runs",
    "effect_of_spacing",
    "fidelity_against_k",
    "find_all",
    "groups_json",
    "groups_of",
    "read_audit",
    "read_summary",
    "results_of_run",
    "sensitivity",
    "write_audit",
    "write_composition",
]
