"""What our audits say: audit.json of the sound default and of the preset yu2023, found by name under reports/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indpriv.analysis.attacks.rates import MIN_TRIALS

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports"
INDIVIDUAL = "_individual"  # behind the name of the same audit with individual clipping
PAPERS = ("mnist", "cifar10", "utkface_gender", "utkface_age")  # the data sets of the paper
AUDITS = (
    *(name + clipping for name in PAPERS for clipping in ("", INDIVIDUAL)),
    "adult",
    "adult_long",
)  # audits/<name>.toml, as results show them
LABELS = ("mnist", "cifar10")  # whose groups are labels; those of the others are races
DEFAULT, PRESET = "default", "yu2023"  # the two accounts of a run
_NEAR = 0.15  # how far a K in whole steps may lie from a gamma, relatively

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Audit:
    """One run under both accounts: the content of audit.json; preset is None where only the default was made."""

    name: str
    default: Summary
    preset: Summary | None

    @property
    def accounts(self) -> dict[str, Summary]:
        """The accounts there are, the preset first."""
        found = {} if self.preset is None else {PRESET: self.preset}
        return {**found, DEFAULT: self.default}

    @property
    def by(self) -> str:
        """The column of groups that the results show."""
        return "label" if self.name.removesuffix(INDIVIDUAL) in LABELS else "race"

    @property
    def run_id(self) -> str:
        """Of the run that was audited."""
        return str(self.default["run"]["recorder"]["id"])


def folder_of(name: str, account: str) -> str:
    """The folder, under reports/, of the audit of a run under one account; also its key in yu2023.json."""
    return name if account == DEFAULT else f"yu2023/preset/{name}"


def trained_by(parameters: str) -> str:
    """The audit whose run, under reports/runs, the parameters of [model] pretrained come from."""
    return Path(parameters).parts[-3]


def values_of(summary: Summary) -> str:
    """Which epsilons a summary is of: the run, and the median, which moves with the account."""
    return f"{summary['run']['recorder']['id']} {summary['individual']['median']!r}"


def read_audits(reports: Path) -> dict[str, Audit]:
    """The audits there are, by name; a preset's audit of another run is left out."""
    found = {}
    for name in AUDITS:
        summaries = {
            account: _read(reports / folder_of(name, account)) for account in (DEFAULT, PRESET)
        }
        default, preset = summaries[DEFAULT], summaries[PRESET]
        if default is not None:
            same = (
                preset is not None
                and preset["run"]["recorder"]["id"] == default["run"]["recorder"]["id"]
            )
            found[name] = Audit(name, default, preset if same else None)
    return found


def _read(folder: Path) -> Summary | None:
    path = folder / "audit.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def groups_of(summary: Summary, by: str) -> Summary | None:
    """The table of groups by a column, or None."""
    return next((found for found in summary["groups"] if found["by"] == by), None)


def means_of(summary: Summary, by: str) -> dict[str, float]:
    """Mean epsilon of each readable group."""
    found = groups_of(summary, by)
    return (
        {}
        if found is None
        else {row["name"]: row["mean"] for row in found["rows"] if not row["too_small"]}
    )


def accuracies_of(summary: Summary, by: str) -> dict[str, float]:
    """Test accuracy of each readable group that has one."""
    found = groups_of(summary, by)
    return {
        row["name"]: row["test_accuracy"]
        for row in ([] if found is None else found["rows"])
        if not row["too_small"] and row["test_accuracy"] is not None
    }


def attack_of(summary: Summary, model: str, by: str) -> Summary | None:
    """Success of the loss threshold on a model ("dp" or "non_dp") by a column, or None.

    overall: its row over all examples; rows: those of groups, the largest rate first; unequal: the
    test of the most exposed group.
    """
    rows = [
        {"name": row["part"], "success_rate": row["value"], "trials": row["n"], **row}
        | {"successes": round((row["value"] or 0.0) * row["n"])}
        | {"too_small": row["n"] < MIN_TRIALS}
        for row in summary["rates"]
        if row["rate"] == "success" and row["model"] == model and row["by"] in ("", by)
    ]
    overall = next((row for row in rows if not row["by"]), None)
    groups = [row for row in rows if row["by"]]
    if overall is None or not groups:
        return None
    groups.sort(key=lambda row: (-(row["success_rate"] or 0.0), row["name"]))
    tests = (one for one in summary["most_exposed"] if (one["model"], one["by"]) == (model, by))
    return {"overall": overall, "rows": groups, "unequal": next(tests, None)}


def area_of(summary: Summary, model: str) -> Summary:
    """The area under the curve of the loss threshold on a model, over all examples."""
    return next(
        row
        for row in summary["rates"]
        if (row["attack"], row["rate"], row["model"], row["by"])
        == ("loss_threshold", "auc", model, "")
    )


def fidelity_of(summary: Summary, gammas: tuple[float, ...]) -> dict[float, Summary]:
    """Gamma (full passes an epoch) -> fidelity of norms carried from the last record, for those that were compared."""
    found = {}
    for gamma in gammas:
        rows = [
            row
            for row in summary["fidelity"]
            if row["between_records"] == "last"
            and not row["is_this_log"]  # whose records may lie at unequal gaps
            and row["pearson"] is not None
            and abs(row["epochs"] * gamma - 1) < _NEAR
        ]
        if rows:
            found[gamma] = min(rows, key=lambda row: abs(row["epochs"] * gamma - 1))
    return found


def errors_of(
    summary: Summary, gammas: tuple[float, ...]
) -> dict[float, tuple[float, float, float]]:
    """Gamma -> Pearson's r, mean and largest absolute error of `fidelity_of`."""
    return {
        gamma: (row["pearson"], row["mean_absolute"], row["largest_absolute"])
        for gamma, row in fidelity_of(summary, gammas).items()
    }
