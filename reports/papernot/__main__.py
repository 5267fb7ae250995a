"""reports/papernot/README.md and papernot.json by one command.

python -m reports.papernot [--write-only]

Trains audits/mnist_papernot.toml and the other two settings where there is no finished run (all take about an hour on one core that is
idle, the first a quarter of it; MNIST is read from the folder in INDPRIV_DATA), audits each by the sound default and by the preset
yu2023, and writes the page.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from indpriv._files import read_json, write_json
from reports import REPORTS
from reports.papernot.page import OTHERS, render
from reports.shared.page_command import finished

HERE = Path(__file__).parent
FIRST = "mnist_papernot"


def main() -> None:
    """Train, audit and write what is missing."""
    parser = argparse.ArgumentParser(prog="python -m reports.papernot", description=__doc__)
    parser.add_argument("--write-only", action="store_true", help="train and audit nothing")
    options = parser.parse_args()
    figures = HERE / "papernot.json"
    known = read_json(figures) if figures.is_file() else {}
    for setting in () if options.write_only else ("", *OTHERS):
        name = f"{FIRST}_{setting}" if setting else FIRST
        if name in known.get("runs", ()):
            continue
        run = REPORTS / "runs" / name
        if not finished(run):
            audit_file = REPORTS.parent / "audits" / f"{name}.toml"
            _call("audits", "train", str(audit_file), "--run-dir", str(run))
        found = other_setting(run) if setting else figures_of(run)
        known |= {setting: found} if setting else found
        known["runs"] = [*known.get("runs", ()), name]
        write_json(figures, known)
    page = render(known)
    (HERE / "README.md").write_text(page, encoding="utf-8")


def _call(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True)


def _audited(run: Path, *options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _call("indpriv", "audit", str(run), "--output-dir", folder, *options)
        found: dict[str, Any] = read_json(Path(folder) / "audit.json")
    return found


def _both(run: Path) -> dict[str, dict[str, Any]]:
    return {"default": _audited(run), "preset": _audited(run, "--set", "preset=yu2023")}


def _of_both(audits: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the page shows of every setting."""
    default = audits["default"]
    recorder = default["run"]["recorder"]
    versions = ("python", "torch", "opacus")
    return {
        account: {
            "worst_case_epsilon": each["guarantee"]["worst_case_epsilon"],
            "median": each["individual"]["median"],
            "largest": each["individual"]["max"],
            "share_at_worst_case": each["individual"]["share_at_worst_case"],
            "claim": each["claim"],
            "meaning": each["meaning"],
        }
        for account, each in audits.items()
    } | {
        "status": default["guarantee"]["status"],
        "test_accuracy": default["run"]["test_accuracy"],
        "total_steps": default["run"]["total_steps"],
        "training_seconds": recorder["training_seconds"],
        "pass_seconds": recorder["pass_seconds"],
        "versions": ", ".join(f"{name} {recorder['versions'][name]}" for name in versions),
    }


def other_setting(run: Path) -> dict[str, Any]:
    """What the page shows of the second or the third setting."""
    return _of_both(_both(run))


def figures_of(run: Path) -> dict[str, Any]:
    """What the page shows of the first setting and of its two audits."""
    audits = _both(run)
    default = audits["default"]
    examples = pd.read_parquet(run / "examples-non-dp.parquet")
    fidelity = next(each for each in default["fidelity"] if each["is_this_log"])
    return _of_both(audits) | {
        "non_private_test_accuracy": float(
            examples.loc[examples["split"] == "test", "correct"].mean()
        ),
        "groups": {
            row["name"]: {
                key: row[key] for key in ("n", "mean", "share_at_worst_case", "test_accuracy")
            }
            for row in _digits(default)
        },
        "fidelity": {key: fidelity[key] for key in ("n", "mean_absolute", "largest_absolute")},
        "attack": {
            key: row[key]
            for row in default["rates"]
            if (row["rate"], row["model"], row["by"]) == ("success", "dp", "")
            for key in ("value", "low", "high")
        },
    }


def _digits(audit: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = next(
        each["rows"] for each in audit["groups"] if each["by"] == "label"
    )
    return found


if __name__ == "__main__":
    main()
