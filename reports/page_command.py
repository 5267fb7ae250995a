"""The command of a page: what is missing is trained and computed, figures are kept, the page is written."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from indpriv._files import read_json, write_json

REPORTS = Path(__file__).resolve().parent
Tell = Callable[[str], None]


def write_page(
    name: str,
    about: str,
    train_missing: Callable[[Path, Tell], None],
    computed: Callable[[], dict[str, Any]],
    trained: Callable[[Path], dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
) -> None:
    """Write reports/NAME.json and reports/NAME.md; runs lie under reports/runs/NAME."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write-only", action="store_true", help="train and compute nothing")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    folder, figures = REPORTS / "runs" / name, REPORTS / f"{name}.json"
    known = read_json(figures) if figures.is_file() else {}
    if not options.write_only:
        train_missing(folder, console.print)
        known |= computed()
    if folder.is_dir():
        known["runs"] = trained(folder)
    write_json(figures, known)
    page = render(known)
    (REPORTS / f"{name}.md").write_text(page, encoding="utf-8")
    console.print(page)
