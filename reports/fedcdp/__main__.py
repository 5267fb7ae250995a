"""reports/fedcdp.md and reports/fedcdp.json by one command: `make fedcdp`.

python reports/make_fedcdp.py [--write-only | --runs-only]

The figures of a finished run are kept, so the command goes on where it was stopped. MNIST
and LFW are read from the folder in INDPRIV_DATA. All runs take about an hour on one core.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from typing import Any

from fedcdp.accounts import accounts
from fedcdp.cost import cost
from fedcdp.leakage import leakage
from fedcdp.page import render
from fedcdp.proposition import averaging, proposition_2
from fedcdp.training import figures_of, runs
from page_command import write_page


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
