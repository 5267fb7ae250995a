"""reports/papernot/README.md and papernot.json by one command.

python -m reports.papernot [--write-only] [--run DIR]

Trains audits/mnist_papernot.toml where there is no finished run (about a quarter of an hour on one core that is idle;
MNIST is read from the folder in INDPRIV_DATA), audits it by the sound default and by the preset yu2023, and writes the page.
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
from reports.papernot.page import render
from reports.shared.page_command import finished

HERE = Path(__file__).parent
AUDIT_FILE = REPORTS.parent / "audits" / "mnist_papernot.toml"


def main() -> None:
    """Train, audit and write what is missing."""
    parser = argparse.ArgumentParser(prog="python -m reports.papernot", description=__doc__)
    parser.add_argument("--write-only", action="store_true", help="train and audit nothing")
    parser.add_argument("--run", type=Path, default=REPORTS / "runs" / "mnist_papernot")
    options = parser.parse_args()
    if not options.write_only:
        if not finished(options.run):
            _call("audits", "train", str(AUDIT_FILE), "--run-dir", str(options.run))
        write_json(HERE / "papernot.json", figures_of(options.run))
    page = render(read_json(HERE / "papernot.json"))
    (HERE / "README.md").write_text(page, encoding="utf-8")


def _call(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True)


def _audited(run: Path, *options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _call("indpriv", "audit", str(run), "--output-dir", folder, *options)
        found: dict[str, Any] = read_json(Path(folder) / "audit.json")
    return found


def figures_of(run: Path) -> dict[str, Any]:
    """What the page shows of the run and of its two audits."""
    audits = {"default": _audited(run), "preset": _audited(run, "--set", "preset=yu2023")}
    default = audits["default"]
    recorder = default["run"]["recorder"]
    examples = pd.read_parquet(run / "examples-non-dp.parquet")
    versions = ("python", "torch", "opacus")
    fidelity = next(each for each in default["fidelity"] if each["is_this_log"])
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
        "runs": ["mnist_papernot"],
        "status": default["guarantee"]["status"],
        "test_accuracy": default["run"]["test_accuracy"],
        "non_private_test_accuracy": float(
            examples.loc[examples["split"] == "test", "correct"].mean()
        ),
        "total_steps": default["run"]["total_steps"],
        "training_seconds": recorder["training_seconds"],
        "pass_seconds": recorder["pass_seconds"],
        "versions": ", ".join(f"{name} {recorder['versions'][name]}" for name in versions),
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
