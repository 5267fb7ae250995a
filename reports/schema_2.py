"""Brings audit.json from schema_version 1 to 2; no figure changes.

python -m reports.schema_2 reports/*/audit.json reports/yu2023/preset/*/audit.json

"Supported" stood for "no check failed" where an audit has no lines of evidence: it is now "declared".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indpriv._plain import empty, to_json
from indpriv.analysis.summary import SCHEMA_VERSION, Audit, keys
from indpriv.norm_log.evidence import NOT_COMPARED

RENAMED = {"free_fidelity": "batch_norms"}
NO_LINES = {
    "lines": [],
    "membership": None,
    "evidence": "no lines of evidence; this audit is from before training was compared",
}


def converted(document: Mapping[str, Any]) -> dict[str, Any]:
    """The content of audit.json by the keys of today; what an older audit does not say is empty."""
    said = {RENAMED.get(key, key): value for key, value in document.items()}
    guarantee = NO_LINES | said["guarantee"]
    if guarantee["status"] == "supported" and not guarantee["lines"]:
        reasons = [*guarantee["reasons"], NOT_COMPARED]
        guarantee |= {"status": "declared", "reasons": reasons}
    said |= {"schema_version": SCHEMA_VERSION, "guarantee": guarantee}
    said["individual"] = {key: one for key, one in said["individual"].items() if key != "wide"}
    said |= {key: to_json(empty(kind)) for key, (kind, _) in keys().items() if key not in said}
    Audit.from_json(said)  # or an error
    return said


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        text = json.dumps(converted(json.loads(path.read_text("utf-8"))), indent=2)
        path.write_text(text + "\n", "utf-8")
