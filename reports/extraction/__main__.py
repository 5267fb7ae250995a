"""reports/extraction/README.md by one command: secrets and attributes, with DP and without.

python -m reports.extraction [--write-only]

Runs that lie under reports/runs/extraction are kept, so the command goes on where it was stopped.
All of it takes about an hour on one core of a busy machine.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console

from indpriv._files import read_json, write_json
from indpriv._plain import to_json
from reports import REPORTS
from reports.extraction.attributes import audited_run, control
from reports.extraction.page import render
from reports.extraction.secrets import measured, train_secrets

FOLDER, FIGURES = REPORTS / "runs" / "extraction", REPORTS / "extraction" / "extraction.json"


def main() -> None:
    """Take the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m reports.extraction", description=__doc__)
    parser.add_argument("--write-only", action="store_true", help="train nothing")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    if not options.write_only:
        train_secrets(FOLDER, console.print)
        summary = audited_run(FOLDER, console.print)
        figures = {
            "secrets": measured(FOLDER),
            "worst_case_epsilon": summary.guarantee.worst_case_epsilon,
            "attributes": to_json(summary.attribute_attacks),
            "control": control(console.print),
        }
        write_json(FIGURES, figures)
    (REPORTS / "extraction" / "README.md").write_text(render(read_json(FIGURES)), encoding="utf-8")


if __name__ == "__main__":
    main()
