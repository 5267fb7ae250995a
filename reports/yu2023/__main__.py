"""Everything of reports/yu2023/README.md and of docs/explanation/results.md by one command: `make reproduce`.

python -m reports.yu2023 [NAME ...] [--data-dir DIR] [--no-training] [--write-only]
                         [--device DEVICE] [--whole-seeds [--jobs N]]

For each audit: train it where no finished run lies under reports/runs/NAME, audit it under both accounts where their audits are
not of that run, measure and draw what no audit holds (yu2023.json), and write both pages. Without NAME, the sweeps of Figures 9
to 13 are run too. Stopped, it goes on where it was; a run that was interrupted is left alone, and named. All takes hours on two
cores. --no-training takes the runs there are, --write-only makes the pages of the audits there are.

--whole-seeds is a command of its own: four seeded pairs of whole runs of each NAME, for Table 3 and Figures 7 and 8. A data set is
kept when all of its eight runs have ended; those of MNIST and CIFAR-10 take five minutes or more on a GPU, and many hours on a core.
"""

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console

from audits.training.datasets import DATA_DIR_VARIABLE
from indpriv._files import read_json
from indpriv.errors import InputError
from reports.yu2023.audits import (
    AUDITS,
    DEFAULT,
    PAPERS,
    PRESET,
    REPORTS,
    ROOT,
    folder_of,
    read_audits,
    trained_by,
)
from reports.yu2023.measured import Pairs, measure, measure_seeds, read_measured
from reports.yu2023.page import render_page, render_results, write_results
from reports.yu2023.sections import Known
from reports.yu2023.sweeps import AUDIT, SWEEPS

BESIDE = ROOT.parent / "shared" / "data"  # where the data sets lie in our own checkouts
INDPRIV = Path(sys.executable).with_name("indpriv")
OPTIONS = {DEFAULT: (), PRESET: ("--set", f"preset={PRESET}")}


def main() -> int:
    """Make what was asked for; exit code 1 where a run is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m reports.yu2023",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(AUDITS)}; default all"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help=f"folder of the data sets; default {DATA_DIR_VARIABLE} or {BESIDE}",
    )
    parser.add_argument("--no-training", action="store_true", help="take the runs there are")
    parser.add_argument(
        "--whole-seeds",
        action="store_true",
        help="train four seeded pairs of whole runs of each NAME, and nothing else",
    )
    parser.add_argument("--device", default="cpu", help="to train on, e.g. cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time of --whole-seeds")
    parser.add_argument(
        "--write-only", action="store_true", help="train, audit and measure nothing"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(AUDITS):
        parser.error(
            f"{', '.join(sorted(unknown))}: no such audit; choose from {', '.join(AUDITS)}"
        )
    console, missing = Console(highlight=False, soft_wrap=True), []
    if not options.write_only:
        found = (
            options.data_dir
            or os.environ.get(DATA_DIR_VARIABLE)
            or (BESIDE if BESIDE.is_dir() else None)
        )
        data_dir = None if found is None else Path(found)
        if options.whole_seeds:
            if data_dir is None or not options.names or set(options.names) - set(PAPERS):
                parser.error(f"--whole-seeds needs a data folder, and NAMEs of {', '.join(PAPERS)}")
            pairs = Pairs(whole=True, device=options.device, jobs=options.jobs)
            try:
                measure_seeds(REPORTS, data_dir, console.print, options.names, pairs)
            except InputError as error:
                parser.error(str(error))
        else:
            device = None if options.no_training else options.device
            missing = [
                name
                for name in options.names or AUDITS
                if not make(name, data_dir, console, device)
            ]
            if not (options.names or options.no_training):
                sweep(data_dir, console)
            measure(REPORTS, data_dir, console.print)
    write_pages()
    for name in missing:
        console.print(f"{name}: no finished run; the pages say so")
    return 1 if missing else 0


def make(name: str, data_dir: Path | None, console: Console, device: str | None) -> bool:
    """Train (where there is a device for it) and audit one where that was not done; whether it has a finished run."""
    run_dir = REPORTS / "runs" / name
    if not trained(name, data_dir, console, device):
        return False
    record = read_json(run_dir / "run.json")
    rounding = record["config"]["recording"]
    fits = {
        DEFAULT: True,
        PRESET: rounding["rounding"] == 0 or rounding["rounding_mode"] == "nearest",
    }
    for account, options in OPTIONS.items():
        folder = REPORTS / folder_of(name, account)
        if fits[account] and audited(folder) != record["recorder"]["id"]:
            console.print(f"{name}: auditing, {account}")
            command = [
                "audit",
                str(run_dir.relative_to(ROOT)),
                "--output-dir",
                str(folder.relative_to(ROOT)),
                *options,
            ]
            subprocess.run([INDPRIV, *command], cwd=ROOT, check=True)
    return True


def trained(name: str, data_dir: Path | None, console: Console, device: str | None) -> bool:
    """Whether there is a finished run of an audit file; one is trained where there is none, and a device for it."""
    audit_file, run_dir = ROOT / "audits" / f"{name}.toml", REPORTS / "runs" / name
    status = status_of(run_dir)
    if status == "finished" or device is None:
        return status == "finished"
    model = tomllib.loads(audit_file.read_text(encoding="utf-8"))["model"]
    first = model.get("pretrained")
    if first and not trained(trained_by(first), data_dir, console, device):
        return False
    console.print(f"{name}: training")
    command = ["train", str(audit_file), "--run-dir", str(run_dir), "--device", device]
    command += given(data_dir)
    if status is not None:
        command.append("--resume")
    return not subprocess.run(
        [sys.executable, "-m", "audits", *command], cwd=ROOT, check=False
    ).returncode


def sweep(data_dir: Path | None, console: Console) -> None:
    """The runs of Figures 9, 10, 12 and 13 that there are not yet."""
    for name, planned in SWEEPS.items():
        folder = REPORTS / "runs" / planned.folder
        if (folder / "sweep.json").is_file():
            continue
        console.print(f"{name}: sweeping")
        command = ["sweep", f"audits/{AUDIT}.toml", "--over", planned.over, "--seeds", "1"]
        command += ["--output-dir", str(folder), *given(data_dir)]
        subprocess.run([sys.executable, "-m", "audits", *command], cwd=ROOT, check=False)


def given(data_dir: Path | None) -> list[str]:
    """The option of the folder of data sets."""
    return [] if data_dir is None else ["--data-dir", str(data_dir)]


def status_of(run_dir: Path) -> str | None:
    """What run.json says of a run; None where there is no run."""
    if not run_dir.exists():
        return None
    record = run_dir / "run.json"
    return str(read_json(record).get("status")) if record.is_file() else "not a run"


def audited(folder: Path) -> str | None:
    """The id of the run that an audit directory is of, if its epsilons lie beside it."""
    if not ((folder / "audit.json").is_file() and (folder / "epsilon.parquet").is_file()):
        return None
    return str(read_json(folder / "audit.json")["run"]["recorder"]["id"])


def write_pages() -> None:
    """Both pages, from committed files alone."""
    known = Known(read_audits(REPORTS), read_measured(REPORTS))
    (REPORTS / "yu2023" / "README.md").write_text(
        render_page(known, ROOT / "audits"), encoding="utf-8"
    )
    write_results(ROOT / "docs/explanation/results.md", render_results(known))


if __name__ == "__main__":
    sys.exit(main())
