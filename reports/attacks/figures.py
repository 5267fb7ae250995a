"""What the attacks on the finished runs found, as plain data for attacks.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from indpriv._files import read_json
from indpriv._plain import records, to_json
from indpriv.analysis.attacks.effects import membership_effects
from indpriv.analysis.attacks.rates import FALSE_POSITIVE_RATES, rates_over_models
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import CONFIDENCE, AttackSignals, open_signals
from indpriv.attacks import ATTACKS, Material
from indpriv.audit import read_audit, read_summary
from indpriv.audit.attacks import attack_study
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES_NON_DP
from reports.attacks.training import AUDIT, BASELINE, DP, SEED, TIMING, Task

FEW = {"rmia": (1, 2, 4, 16), "lira": (4, 16), "lira_plain": (4, 16)}  # numbers of references
KEPT = ("title", "model", "references", "above_worst_case")


def figures(task: Task, folder: Path) -> dict[str, Any]:
    """Everything that the page says of one task."""
    table, _ = read_audit(folder / AUDIT)
    found: dict[str, Any] = {
        "title": task.title,
        "detail": task.detail,
        "run": run_figures(task, folder),
        "timing": read_json(folder / TIMING),
    }
    for kind in (DP, BASELINE):
        signals = open_signals(folder / kind)
        main = signals[CONFIDENCE]
        found[kind] = {
            "jackknife": True,
            "models": main.n_models,
            "targets": main.n_examples,
            "rates": [of_study(rates) for _, rates in by_attack(attack_study(signals))],
            "few": [
                {"references": count, **of_study(rates_over_models(few(main, name, count)))}
                for name, counts in FEW.items()
                for count in counts
                if count < main.n_models - 1
            ],
            "effects": to_json(membership_effects(main, table, seed=SEED)),
        }
    return found


def run_figures(task: Task, folder: Path) -> dict[str, Any]:
    """The audited run: its guarantee, its accuracy, and the attacks of its audit."""
    summary = read_summary(folder / AUDIT)
    rates = pd.DataFrame(summary["rates"])
    return {
        "id": summary["run"]["recorder"]["id"],
        "status": summary["guarantee"]["status"],
        "epsilon": summary["guarantee"]["worst_case_epsilon"],
        "delta": summary["account"]["delta"],
        "train_accuracy": summary["run"]["train_accuracy"],
        "test_accuracy": summary["run"]["test_accuracy"],
        "baseline_accuracy": baseline_accuracy(task.run(folder)),
        "ceilings": summary["ceilings"],
        "results": [
            {key: one[key] for key in KEPT}
            | {"discrimination": of_attack(rates, one["attack"], one["model"])}
            for one in summary["attacks"]
        ],
    }


def by_attack(rates: pd.DataFrame) -> Any:
    """(attack, its rows), in their order."""
    return rates.groupby("attack", sort=False)


def of_study(rates: pd.DataFrame) -> dict[str, Any]:
    """Rates of one attack over the models of a study."""
    first = rates.iloc[0]
    return {
        "title": first["attack"],
        "n_models": int(first["n"]),
        "n_scores": int(first["n_members"] + first["n_others"]),
        **figures_of(rates),
    }


def of_attack(rates: pd.DataFrame, attack: str, model: str) -> dict[str, Any] | None:
    """Rates of one attack over all examples of one model; None without members or others."""
    chosen = (rates["attack"] == attack) & (rates["model"] == model) & (rates["by"] == "")
    found = rates[chosen]
    return figures_of(found) if (found["rate"] == "auc").any() else None


def figures_of(rates: pd.DataFrame) -> dict[str, Any]:
    """AUC, true-positive rates and advantage of one attack, with their intervals."""
    rows = {row.rate: row for row in records(rates)}
    spans = {
        name: None if row.low is None else {"low": row.low, "high": row.high}
        for name, row in rows.items()
    }
    found: dict[str, Any] = {}
    for name in ("auc", "advantage"):
        if name in rows:
            found |= {name: rows[name].value, f"{name}_interval": spans[name]}
    tprs = [f"{rate:g}" for rate in FALSE_POSITIVE_RATES]
    found["tpr_at_fpr"] = {rate: rows[f"tpr_{rate}"].value for rate in tprs}
    found["tpr_at_fpr_intervals"] = {rate: spans[f"tpr_{rate}"] for rate in tprs}
    return found


def baseline_accuracy(run_dir: Path) -> list[float]:
    """Training and test accuracy of the model that was trained without DP."""
    examples = ExampleTable.from_parquet(run_dir / EXAMPLES_NON_DP)
    return [float(part["correct"].mean()) for part in (examples.train, examples.test)]


def few(signals: AttackSignals, name: str, references: int) -> Iterator[AttackScores]:
    """Scores of each model, attacked with the models after it as references."""
    for target in range(signals.n_models):
        rows = [(target + k) % signals.n_models for k in range(references + 1)]
        part = replace(signals, signal=signals.signal[rows], member=signals.member[rows], audited=0)
        yield ATTACKS[name].scores(Material(confidence=part))
