"""reports/extraction.md by one command: secrets and attributes, with DP and without.

python reports/make_extraction.py [--write-only]

Runs that lie under reports/runs/extraction are kept, so the command goes on where it was stopped.
All of it takes about an hour on one core of a busy machine.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from extraction.secrets import train_secrets
from rich.console import Console

REPORTS = Path(__file__).resolve().parent
FOLDER = REPORTS / "runs" / "extraction"


def main() -> None:
    """Take the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-only", action="store_true", help="train nothing")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    if not options.write_only:
        train_secrets(FOLDER, console.print)


if __name__ == "__main__":
    main()
