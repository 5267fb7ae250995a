"""reports/fedcdp/README.md and fedcdp.json beside it by one command: `make fedcdp`.

python -m reports.fedcdp [--write-only | --runs-only]

The figures of a finished run are kept, so the command goes on where it was stopped. MNIST
and LFW are read from the folder in INDPRIV_DATA. All runs take about two hours on one core.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from typing import Any

from reports.fedcdp.accounts import accounts
from reports.fedcdp.cost import cost
from reports.fedcdp.leakage import leakage
from reports.fedcdp.page import render
from reports.fedcdp.proposition import averaging, proposition_2
from reports.fedcdp.training import figures_of, runs
from reports.shared.page_command import write_page


def computed() -> dict[str, Any]:
    """Figures that need no training."""
    return {
        "accounts": accounts(),
        "proposition_2": proposition_2(),
        "averaging": averaging(),
        "cost": cost(),
        "leakage": leakage(),
    }


if __name__ == "__main__":
    write_page("fedcdp", __doc__ or "", runs(), figures_of, computed, render)
