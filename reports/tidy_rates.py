"""Brings audit.json of before 27 November 2026 into the form in which rates of attacks are one table.

python reports/tidy_rates.py reports/*/audit.json

No figure changes. What an older audit does not say, such as joint intervals, stays unknown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
ALL = "all examples"
OLD = ("attacks", "attack_on_updates", "strongest_attack", "attacks_on_units", "every_attack")
PUT_AFTER = "groups"


def audit(document: Mapping[str, Any]) -> dict[str, Any]:
    """The content of audit.json, with all rates in one table."""
    if "rates" in document:
        return dict(document)
    every = document.get("every_attack") or {"results": [], "ceilings": None, "unchecked": []}
    by_group, seen = document["attacks"], [found["model"] for found in every["results"]]
    alone = {found["model"]: found for found in by_group if found["model"] not in seen}
    tidy = {
        "attacks": [_tried(one) for one in every["results"]]
        + [_tried_alone(model, found) for model, found in alone.items()],
        "rates": list(_rates(document, every["results"], alone)),
        "ceilings": every["ceilings"],
        "unchecked": every.get("unchecked", []),
        "roc": {
            found["model"]: found["overall"]["discrimination"]["roc"]
            for found in by_group
            if found["overall"]["discrimination"] is not None
        },
        "most_exposed": [
            {"model": found["model"], "by": found["by"], **found["unequal"]}
            for found in by_group
            if found.get("unequal") is not None
        ],
        "attack_seed": by_group[0]["seed"] if by_group else 0,
    }
    made: dict[str, Any] = {}
    for key, value in document.items():
        if key == "attack_by_epsilon":
            made[key] = [] if value is None else _bins(value)
        elif key == "canaries":
            made[key] = None if value is None else _canaries(value)
        elif key not in OLD:
            made[key] = value
        if key == PUT_AFTER:
            made |= tidy
    return made


def _tried(one: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("title", "model", "adversary", "references", "n_members", "above_worst_case")
    found = {key: one[key] for key in (*kept, "source", "caveat")}
    return {
        "attack": one["name"],
        **found,
        "sees": one.get("sees", ""),
        "n_others": one["n_nonmembers"],
    }


def _tried_alone(model: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The loss threshold, in an audit of before there were others."""
    return {
        "attack": "loss_threshold",
        "title": found["method"],
        "model": model,
        "adversary": "final_model",
        "references": 0,
        "n_members": found["overall"]["n_members"],
        "n_others": found["overall"]["n_nonmembers"],
        "above_worst_case": False,
        "source": "",
        "caveat": found["caveat"],
        "sees": "losses",
    }


def _rates(
    document: Mapping[str, Any], results: Sequence[Mapping[str, Any]], alone: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    for one in results:
        key = _key(one, one["name"], one["model"])
        joint = {"auc": one.get("auc_joint")}
        joint |= {f"tpr_{rate}": span for rate, span in (one.get("tpr_joint") or {}).items()}
        for row in _separation(key, one["discrimination"]):
            span = joint.get(row["rate"])
            yield row if span is None else row | _ends(span, "joint_")
    for model, found in alone.items():
        overall = found["overall"]
        yield from _separation(_key(overall, "loss_threshold", model), overall["discrimination"])
    overall_of = {found["model"]: found["overall"] for found in reversed(document["attacks"])}
    for model, overall in overall_of.items():
        yield _success(_key(overall, "loss_threshold", model), overall)
    for found in document["attacks"]:
        for row in found["rows"]:
            key = _key(row, "loss_threshold", found["model"], found["by"], row["name"])
            yield _success(key, row)
            yield from _separation(key, row["discrimination"])
    strongest = document.get("strongest_attack") or {"name": "", "groups": []}
    for row in strongest["groups"]:
        key = _key(row, strongest["name"], "dp", row["by"], row["name"])
        if row["auc"] is not None:
            yield {**key, **_auc(key, row["auc"]), **_ends(row["auc_interval"])}
        yield {
            **key,
            **{"rate": "accused", "value": row["tpr"], "n": row["n_members"]},
            **_ends(row["tpr_interval"]),
        }
        yield {**key, "rate": "falsely_accused", "value": row["fpr"], "n": row["n_nonmembers"]}
    for row in document.get("attacks_on_units") or ():
        key = _key(row, row["name"], "dp", part=row["rule"])
        if row["auc"] is not None:
            yield {**key, **_auc(key, row["auc"]), **_ends(row["auc_interval"], "joint_")}
            found = {"rate": "tpr_0.01", "value": row["tpr"], "n": row["n_units"]}
            yield {**key, **found, **_ends(row["tpr_interval"], "joint_")}
    if (row := document.get("attack_on_updates")) is not None:
        key = _key(row, row["title"], part="longest canaries")
        yield {**key, **_auc(key, row["auc"]), **_ends(row["auc_interval"])}
        found = {"rate": "tpr_0.01", "value": row["tpr"], "n": row["n_members"]}
        yield {**key, **found, **_ends(row["tpr_interval"])}


def _key(
    of: Mapping[str, Any], attack: str, model: str = "dp", by: str = "", part: str = ALL
) -> dict[str, Any]:
    n_members = of["n_units"] if "n_units" in of else of["n_members"]
    n_others = of["n_groups"] if "n_groups" in of else of["n_nonmembers"]
    key = {"attack": attack, "model": model, "by": by, "part": part}
    return {**key, "n_members": n_members, "n_others": n_others}


def _ends(interval: Mapping[str, float] | None, prefix: str = "") -> dict[str, Any]:
    ends = {"low": None, "high": None} if interval is None else interval
    return {f"{prefix}{end}": ends[end] for end in ("low", "high")}


def _auc(key: Mapping[str, Any], auc: float) -> dict[str, Any]:
    return {"rate": "auc", "value": auc, "n": key["n_members"] + key["n_others"]}


def _separation(key: Mapping[str, Any], found: Mapping[str, Any] | None) -> Rows:
    """Rows of AUC, true-positive rates and advantage."""
    if found is None or found.get("auc") is None:
        return []
    n, n_members = key["n_members"] + key["n_others"], key["n_members"]
    rows = [("auc", found["auc"], found["auc_interval"], n)]
    rows += [
        (f"tpr_{rate}", value, found["tpr_at_fpr_intervals"][rate], n_members)
        for rate, value in found["tpr_at_fpr"].items()
    ]
    rows.append(("advantage", found["advantage"], found["advantage_interval"], n))
    return [
        {**key, "rate": rate, "value": value, **_ends(interval), "n": n_of}
        for rate, value, interval, n_of in rows
    ]


def _success(key: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    ends = {"low": row["low"], "high": row["high"]}
    return {
        **key,
        "rate": "success",
        "value": row["success_rate"],
        **ends,
        "n": row["trials"],
    }


def _bins(found: Mapping[str, Any]) -> Rows:
    kept = ("n_members", "tpr", "fpr", "reference", "worst_case_reference")
    return [
        {
            "attack": found["method"],
            "target_fpr": part["target_fpr"],
            "threshold": part["threshold"],
            "above": row["low"],
            "up_to": row["high"],
            "n_others": row["n_nonmembers"],
            **{key: row[key] for key in (*kept, "above_reference", "above_worst_case")},
            **_ends(row["tpr_interval"]),
        }
        for part in found["thresholds"]
        for row in part["bins"]
    ]


def _canaries(found: Mapping[str, Any]) -> dict[str, Any]:
    """What canaries prove, as audit.json had it."""
    kept = {key: found[key] for key in ("attack", "method", "delta", "seed")}
    rates: Rows = []
    for row in (found["overall"], *found["groups"]):
        by = "" if row is found["overall"] else "group"
        key = _key(row, found["attack"], by=by, part=row["name"])
        bound = row["bound"]
        rates += _separation(key, row["discrimination"])
        rates += _bound(key, bound["epsilon"], bound, bound["tried"], found["null_trials"])
    whole = found["overall"]["discrimination"]
    return {**kept, "rates": rates, "roc": [] if whole is None else whole["roc"]}


def _bound(
    key: Mapping[str, Any], epsilon: float, of: Mapping[str, Any], tried: int, trials: int
) -> Rows:
    right = of["correct"] / of["guesses"] if of["guesses"] else None
    return [
        {**key, "rate": "epsilon", "value": epsilon, "n": tried},
        {**key, "rate": "right", "value": right, "n": of["guesses"]},
        {
            **key,
            "rate": "false_alarms",
            "value": of["false_alarm_rate"],
            **_ends(of["false_alarm_interval"]),
            "n": trials,
        },
    ]


def measures(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `indpriv attack --scores FILE --json` printed."""
    kept = {key: found[key] for key in ("attack", "method", "delta", "seed")}
    rates: Rows = []
    for row in (found, *found["groups"]):
        by = "" if row is found else "group"
        key = _key(row, found["attack"], by=by, part=ALL if row is found else row["name"])
        null = row["null_calibration"]
        alarms = {
            "false_alarm_rate": null["false_alarm_rate"],
            "false_alarm_interval": null["interval"],
        }
        rates += _separation(key, row)
        rates += _bound(
            key,
            row["epsilon_lower_bound"],
            {**row, **alarms},
            row["thresholds_tried"],
            null["trials"],
        )
    return {**kept, "rates": rates, "roc": found.get("roc", [])}


def study(found: Sequence[Mapping[str, Any]]) -> Rows:
    """Rates over the models of a study, as `indpriv attack run AUDIT.toml --json` printed them."""
    rows = []
    for one in found:
        named = [("auc", one["auc"], one["auc_interval"])]
        named += [
            (f"tpr_{rate}", value, one["tpr_at_fpr_intervals"].get(rate))
            for rate, value in one["tpr_at_fpr"].items()
        ]
        rows += [
            {"attack": one["title"], "rate": rate, "value": value, **_ends(span)}
            | {"n": one["n_models"], "n_scores": one["n_scores"]}
            for rate, value, span in named
        ]
    return rows


def main() -> None:
    """Convert the files that are named."""
    for path in map(Path, sys.argv[1:]):
        document = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(audit(document), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
