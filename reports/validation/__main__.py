"""reports/validation/README.md by one command: `make validate`.

python -m reports.validation [--write-only]

Runs that lie under reports/runs/validation are kept, so the command goes on where it was stopped.
MNIST is read from the folder in INDPRIV_DATA. All runs and canaries take about two hours on one core
of a busy machine. What they say is kept in validation.json beside it.
"""

import argparse
import os
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console

from indpriv._files import read_json, write_json
from reports import REPORTS
from reports.validation.canary_runs import real_run, simulated_runs
from reports.validation.figures import figures
from reports.validation.page import render
from reports.validation.study import STUDIES, take_runs

FOLDER, FIGURES = REPORTS / "runs" / "validation", REPORTS / "validation" / "validation.json"
SIMULATED = ((1.0, 5000), (1.0, 1000), (0.4, 5000))  # length and number of canaries


def main() -> None:
    """Take the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m reports.validation", description=__doc__)
    parser.add_argument(
        "--write-only",
        action="store_true",
        help="train and simulate nothing; read the runs that are there",
    )
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    known = read_json(FIGURES) if FIGURES.is_file() else {}
    if not options.write_only:
        for study in STUDIES:
            take_runs(study, FOLDER / study.name, partial(tell, console, study.name))
        if "real" not in known:
            known["real"] = [real_run(mode, seed) for seed, mode in enumerate(("hooks", "ghost"))]
            known["simulated"] = [simulated_runs(*one) for one in SIMULATED]
    for study in STUDIES:
        folder = FOLDER / study.name
        if (folder / f"run-{study.runs - 1:03}.npz").is_file():
            known.setdefault("studies", {})[study.name] = figures(study, folder)
    write_json(FIGURES, known)
    page = render(known)
    (REPORTS / "validation" / "README.md").write_text(page, encoding="utf-8")
    console.print(page)


def tell(console: Console, name: str, done: int, n_runs: int) -> None:
    """Say how far a study is."""
    console.print(f"{name}: run {done} of {n_runs}")


if __name__ == "__main__":
    main()
