"""reports/wei2021/README.md and wei2021.json beside it by one command: `make wei2021`.

python -m reports.wei2021 [--write-only | --runs-only]

The figures of a finished run are kept, so the command goes on where it was stopped. MNIST
and LFW are read from the folder in INDPRIV_DATA. Each run takes about four minutes on one core
that is idle, the pictures together half an hour.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from typing import Any

from reports.shared.page_command import write_page
from reports.wei2021.accounts import accounts, grey_pictures, largest_norm_attack
from reports.wei2021.cost import cost
from reports.wei2021.leakage import leakage
from reports.wei2021.page import render
from reports.wei2021.training import figures_of, runs


def computed() -> dict[str, Any]:
    """Figures that need no training."""
    return {
        "accounts": accounts(),
        "grey": grey_pictures(),
        "largest_norm": largest_norm_attack(),
        "leakage": leakage(),
        "cost": cost(),
    }


if __name__ == "__main__":
    write_page("wei2021", __doc__ or "", runs(), figures_of, computed, render)
