"""The audit of a run: from a run directory to an audit directory. All it writes is sensitive.

    run directory -> NormLog -> EpsilonTable
    EpsilonTable + ExampleTable -> findings -> epsilon.parquet, audit.json, report.html

An audit directory holds copies of what later commands need, so they need neither the run nor its
data.
"""

from indpriv.audit.audit_directory import groups_of, read_audit, read_summary
from indpriv.audit.pipeline import audit

__all__ = ["audit", "groups_of", "read_audit", "read_summary"]
