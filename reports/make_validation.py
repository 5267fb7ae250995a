"""reports/validation.md by one command: `make validate`.

python reports/make_validation.py [--runs 48] [--adult-runs 32] [--write-only]

Runs that lie under reports/runs/validation are kept, so the command goes on where it was stopped.
All runs and canaries take about an hour and a half on one core of a busy machine.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from validation.canary_runs import real_run, simulated_runs
from validation.page import render
from validation.study import STUDIES, take_runs

from indpriv._files import read_json, write_json

REPORTS = Path(__file__).resolve().parent
FOLDER, CANARIES = REPORTS / "runs" / "validation", REPORTS / "validation.json"
SIMULATED = ((1.0, 5000), (1.0, 1000), (0.4, 5000))  # length and number of canaries


def main() -> None:
    """Take the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=48, help="number of attacked runs of digits")
    parser.add_argument(
        "--adult-runs", type=int, default=32, help="number of attacked runs of Adult"
    )
    parser.add_argument("--write-only", action="store_true", help="train and simulate nothing")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    n_runs = {"digits": options.runs, "adult": options.adult_runs}
    if not options.write_only:
        for study in STUDIES:
            take_runs(
                study,
                FOLDER / study.name,
                n_runs[study.name],
                lambda done, n: console.print(f"run {done} of {n}"),
            )
        if not CANARIES.is_file():
            found = {
                "real": [real_run(mode, seed) for seed, mode in enumerate(("hooks", "ghost"))],
                "simulated": [simulated_runs(*one) for one in SIMULATED],
            }
            write_json(CANARIES, found)
    page = render(FOLDER, n_runs, read_json(CANARIES))
    (REPORTS / "validation.md").write_text(page, encoding="utf-8")
    console.print(page)


if __name__ == "__main__":
    main()
