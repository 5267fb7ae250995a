"""reports/attacks.md and reports/attacks.json by one command: `make attacks`.

python reports/make_attacks.py [--write-only]

Models that lie under reports/runs/attacks are kept, so the command goes on where it was stopped.
MNIST is read from the folder in INDPRIV_DATA. All takes half an hour on one core that is idle.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from attacks.figures import figures
from attacks.page import render
from attacks.training import TASKS
from rich.console import Console

from indpriv._files import read_json, write_json

REPORTS = Path(__file__).resolve().parent
FOLDER, FIGURES = REPORTS / "runs" / "attacks", REPORTS / "attacks.json"


def main() -> None:
    """Train what is missing, attack it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write-only", action="store_true", help="train nothing; attack what is there, if it is"
    )
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    if not options.write_only:
        for task in TASKS:
            task.train(FOLDER / task.name, console.print)
    if FOLDER.is_dir():
        write_json(FIGURES, {task.name: figures(task, FOLDER / task.name) for task in TASKS})
    page = render(read_json(FIGURES))
    (REPORTS / "attacks.md").write_text(page, encoding="utf-8")
    console.print(page)


if __name__ == "__main__":
    main()
