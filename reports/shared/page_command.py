"""The command of a page: runs that are missing are made, figures are kept, the page is written."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from indpriv._files import read_json, write_json
from indpriv.norm_log.run_files import RUN_JSON
from reports import REPORTS
from reports.shared.recorded import not_verified

Figures = dict[str, Any]
MakeRun = Callable[[Path], object]


def write_page(
    name: str,
    about: str,
    runs: Mapping[str, MakeRun],
    figures_of: Callable[[Path], Figures],
    computed: Callable[[], Figures],
    render: Callable[[Figures], str],
) -> None:
    """Write README.md and NAME.json in reports/NAME; runs lie under reports/runs/NAME.

    The figures of a run are kept as soon as it is finished, so that a run whose figures are known is
    not made again, on another machine either. Several processes may make runs side by side.

    Args:
        name: of the page.
        about: what `--help` says.
        runs: how each run is made, in a folder of its name.
        figures_of: what is kept of the folder of a finished run.
        computed: figures that need no run.
        render: the page.
    """
    parser = argparse.ArgumentParser(prog=f"python -m reports.{name}", description=about)
    parser.add_argument("--write-only", action="store_true", help="train and compute nothing")
    parser.add_argument("--runs-only", action="store_true", help="train, but compute nothing")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    folder, figures = REPORTS / "runs" / name, REPORTS / name / f"{name}.json"

    def keep(found: Figures) -> Figures:
        known = read_json(figures) if figures.is_file() else {}
        ours = {**known.get("runs", {}), **found.pop("runs", {})}
        known |= found | ({"runs": dict(sorted(ours.items()))} if ours else {})
        write_json(figures, known)
        return known

    def of_run(one: str) -> Figures:
        return figures_of(folder / one) | {"not_verified": not_verified(folder / one)}

    known = keep({"runs": {one: of_run(one) for one in runs if finished(folder / one)}})
    for one, make in () if options.write_only else runs.items():
        if one in keep({}).get("runs", {}):
            continue
        if (folder / one).exists():
            console.print(f"{folder / one}: begun and not finished; delete it to make it anew")
            continue
        console.print(f"{one}: training")
        make(folder / one)
        known = keep({"runs": {one: of_run(one)}})
    if not options.write_only and not options.runs_only:
        known = keep(computed())
    page = render(known)
    (REPORTS / name / "README.md").write_text(page, encoding="utf-8")
    console.print(page)


def finished(run: Path) -> bool:
    """Whether a folder holds a finished run."""
    record = run / RUN_JSON
    return record.is_file() and read_json(record).get("status") == "finished"
