"""reports/language/README.md by one command: membership and extraction of the same secrets.

python -m reports.language [--write-only]

It needs transformers and peft. What lies under reports/runs/language is kept, so the command goes
on where it was stopped. All of it takes about eight minutes on a core.
"""

import argparse
import os
import shutil

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console

from indpriv._files import read_json, write_json
from reports import REPORTS
from reports.language.page import aucs, render

FOLDER, FIGURES = REPORTS / "runs" / "language", REPORTS / "language" / "language.json"


def main() -> None:
    """Train the models that are missing, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m reports.language", description=__doc__)
    parser.add_argument("--write-only", action="store_true", help="train nothing")
    if not parser.parse_args().write_only:
        train()
    page = render(read_json(FIGURES))
    (REPORTS / "language" / "README.md").write_text(page, encoding="utf-8")


def train() -> None:
    """Figures of every setting that has none yet."""
    from reports.language.training import ABOUT, SETTINGS, measured, public_model, texts

    tell = Console(highlight=False).print
    FOLDER.mkdir(parents=True, exist_ok=True)
    public, private, secrets = texts()
    base = public_model(public, FOLDER / "public", tell)
    figures = []
    for setting in SETTINGS:
        run_dir = FOLDER / setting.file_name
        kept = run_dir.with_suffix(".json")
        if not kept.is_file():
            tell(setting.title)
            shutil.rmtree(run_dir, ignore_errors=True)  # an interrupted run
            write_json(kept, measured(setting, base, private, secrets, run_dir))
        figures.append(read_json(kept) | {"learning_rate": setting.learning_rate})
    known = read_json(FIGURES) if FIGURES.is_file() else {}
    before = known.get("before", [])  # runs have no seed, so none is left out
    if known and aucs(known) != aucs({"models": figures}):  # rules of bounds may be others
        before.append({"models": known["models"]})
    write_json(FIGURES, {"about": ABOUT, "models": figures, "before": before})


if __name__ == "__main__":
    main()
