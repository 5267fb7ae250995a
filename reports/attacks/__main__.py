"""reports/attacks/README.md and attacks.json beside it by one command: `make attacks`.

python -m reports.attacks [--write-only]

Models that lie under reports/runs/attacks are kept, so the command goes on where it was stopped.
MNIST is read from the folder in INDPRIV_DATA. All takes half an hour on one core that is idle.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console

from indpriv._files import read_json, write_json
from reports import REPORTS
from reports.attacks.figures import figures
from reports.attacks.page import render
from reports.attacks.training import TASKS

FOLDER, FIGURES = REPORTS / "runs" / "attacks", REPORTS / "attacks" / "attacks.json"


def main() -> None:
    """Train what is missing, attack it, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m reports.attacks", description=__doc__)
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
    (REPORTS / "attacks" / "README.md").write_text(page, encoding="utf-8")
    console.print(page)


if __name__ == "__main__":
    main()
