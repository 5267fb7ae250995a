"""The audit of a run: from a run directory to an audit directory. All it writes is sensitive.

    run directory -> NormLog -> EpsilonTable
    EpsilonTable + ExampleTable -> findings -> epsilon.parquet, audit.json, report.html

An audit directory holds copies of what later commands need, so they need neither the run nor its
data.
"""

from indpriv.audit.audit_directory import read_audit, read_summary, write_audit
from indpriv.audit.compare import compare_audits, comparison_json
from indpriv.audit.compose import compose_runs, write_composition
from indpriv.audit.groups import choose_groups, groups_json, groups_of
from indpriv.audit.pipeline import audit
from indpriv.audit.run_attacks import attributes_of_run, results_of_run
from indpriv.audit.run_directory import RecordedRun
from indpriv.audit.study import attack_study
from indpriv.audit.summarise import summarise
from indpriv.audit.variants import effect_of_spacing, fidelity_against_k, sensitivity

__all__ = [
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
    "groups_json",
    "groups_of",
    "read_audit",
    "read_summary",
    "results_of_run",
    "sensitivity",
    "summarise",
    "write_audit",
    "write_composition",
]
