"""reports/attacks/README.md and attacks.json beside it by one command: `make attacks`.

python -m reports.attacks [TASK ...] [--write-only]

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
from reports.attacks.training import DP, TASKS

FOLDER, FIGURES = REPORTS / "runs" / "attacks", REPORTS / "attacks" / "attacks.json"


def main() -> None:
    """Train what is missing, attack it, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m reports.attacks", description=__doc__)
    parser.add_argument(
        "--write-only", action="store_true", help="train nothing; attack what is there, if it is"
    )
    names = [task.name for task in TASKS]
    parser.add_argument(
        "tasks", nargs="*", metavar="TASK", help=f"of {', '.join(names)}; default all"
    )
    options = parser.parse_args()
    if unknown := set(options.tasks) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: no such task; choose from {', '.join(names)}")
    console = Console(highlight=False, soft_wrap=True)
    if not options.write_only:
        for task in (each for each in TASKS if each.name in (options.tasks or names)):
            task.train(FOLDER / task.name, console.print)
    known = read_json(FIGURES) if FIGURES.is_file() else {}
    there = [task for task in TASKS if (FOLDER / task.name / DP).is_dir()]
    known |= {task.name: figures(task, FOLDER / task.name) for task in there}
    write_json(FIGURES, known)
    page = render(known)
    (REPORTS / "attacks" / "README.md").write_text(page, encoding="utf-8")
    console.print(page)


if __name__ == "__main__":
    main()
