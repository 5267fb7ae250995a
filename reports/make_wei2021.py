"""reports/wei2021.md and reports/wei2021.json by one command: `make wei2021`.

python reports/make_wei2021.py [--write-only]

Runs that lie under reports/runs/wei2021 are kept, so the command goes on where it was stopped. MNIST
is read from the folder in INDPRIV_DATA. Each run takes about four minutes on one core that is idle.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from wei2021.accounts import accounts, grey_pictures, largest_norm_attack
from wei2021.page import render
from wei2021.training import train_missing, trained

from indpriv._files import read_json, write_json

REPORTS = Path(__file__).resolve().parent
FOLDER, FIGURES = REPORTS / "runs" / "wei2021", REPORTS / "wei2021.json"


def main() -> None:
    """Train what is missing, compute the accounts, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-only", action="store_true", help="train and compute nothing")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    known = read_json(FIGURES) if FIGURES.is_file() else {}
    if not options.write_only:
        train_missing(FOLDER, console.print)
        known |= {
            "accounts": accounts(),
            "grey": grey_pictures(),
            "largest_norm": largest_norm_attack(),
        }
    if FOLDER.is_dir():
        known["runs"] = trained(FOLDER)
    write_json(FIGURES, known)
    page = render(known)
    (REPORTS / "wei2021.md").write_text(page, encoding="utf-8")
    console.print(page)


if __name__ == "__main__":
    main()
