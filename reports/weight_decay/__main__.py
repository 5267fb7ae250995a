"""reports/weight_decay/README.md and weight_decay.json beside it: more weight decay than usual with DP-SGD.

python -m reports.weight_decay [--write-only | --runs-only]

The figures of a finished run are kept, so the command goes on where it was stopped. All runs take about
three minutes on one core that is idle.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from audits.training.config import AuditConfig
from audits.training.dp_sgd import train
from indpriv._files import read_json
from indpriv.norm_log.run_files import RUN_JSON
from reports import REPORTS
from reports.shared.page_command import write_page
from reports.weight_decay.page import RUNS, VALUES, render

AUDIT = REPORTS.parent / "audits" / "adult_weight_decay.toml"


def runs() -> dict[str, Callable[[Path], object]]:
    """How each run is made, by its name: DECAY-RUN."""
    return {f"{value:g}-{run}": partial(_make, value) for run in range(RUNS) for value in VALUES}


def _make(value: float, path: Path) -> None:
    config = AuditConfig.from_toml(AUDIT)
    train(replace(config, training=replace(config.training, weight_decay=value)), path)


def figures_of(path: Path) -> dict[str, Any]:
    """Test accuracy and worst case of a run."""
    record = read_json(path / RUN_JSON)
    return {"test_accuracy": record["test_accuracy"], "epsilon": record["guarantee"]["epsilon"]}


if __name__ == "__main__":
    write_page("weight_decay", __doc__ or "", runs(), figures_of, dict, render)
