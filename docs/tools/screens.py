"""Run pages and write what they show: `make screens`, or python docs/tools/screens.py PAGE ...

Without a page, all that show an output of one run. The notebook follows its page.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from notebook import NOTEBOOK, PAGE, notebook_of, written
from pages import ROOT, blocks, facts_of, make_digits


def main(chosen: list[Path]) -> None:
    """Run each page in a new folder."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    with tempfile.TemporaryDirectory() as place:
        digits = Path(place) / "digits"
        for number, page in enumerate(chosen or every):
            if not any(block.is_output for block in blocks(page.read_text(encoding="utf-8"))):
                continue
            folder = Path(place) / str(number)
            if facts_of(page).get("given") == "digits":
                if not digits.exists():
                    make_digits(digits)
                shutil.copytree(digits, folder)
            print(page, flush=True)
            command = [sys.executable, "-W", "ignore", Path(__file__).with_name("pages.py")]
            subprocess.run([*command, page, folder, "--update"], check=True)
    NOTEBOOK.write_text(written(notebook_of(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]])
