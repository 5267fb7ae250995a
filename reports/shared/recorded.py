"""What a page says of the guarantees of its runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indpriv._facts import REFUTED
from indpriv.analysis.guarantee import ceilings_of
from indpriv.audit import audit, read_audit, read_summary
from indpriv.norm_log.evidence import NOT_COMPARED, lines_of, unverified
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import holds_log
from indpriv.norm_log.verify import verify

_WHY = NOT_COMPARED[0].upper() + NOT_COMPARED[1:]
EARLIER = f"{_WHY}: its guarantee is declared, not supported."
SEEDED = f"{_WHY}, and from chosen seeds: no run of this page has a guarantee."


def not_verified(run: Path) -> list[str]:
    """Keys of the lines of evidence of a run that are declared or refuted; see indpriv/_facts/lines.toml.

    None of a run without DP, which holds no log and has no guarantee.
    """
    if not holds_log(run):
        return []
    opened = open_run(run)
    header = opened.header["run"]
    lines = lines_of(verify(opened), header)
    return [line.key for line in lines if line in unverified(lines) or line.status == REFUTED]


def worst_case_of(run: Path) -> dict[str, Any]:
    """Audit a run: its epsilon, what it means, and the true-positive rates that no attack exceeds."""
    audit(run, run / "audit")
    table, content = read_audit(run / "audit")[0], read_summary(run / "audit")
    ceilings = ceilings_of(open_run(run).log, table)
    return {
        "epsilon": table.worst_case_epsilon,
        "meaning": content["meaning"],
        "ceiling": None if ceilings is None else dict(ceilings.worst_case),
    }


def status_of(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a page about runs whose figures hold `not_verified`; of earlier ones, EARLIER."""
    if any("not_verified" not in run for run in runs.values()):
        return [EARLIER, ""]
    found = sorted({key for run in runs.values() for key in run["not_verified"]})
    if not found:
        return []
    named = ", ".join(found)
    return [f"Its guarantees are not supported: not verified in some run are {named}.", ""]
