"""What the regression set compares: stored logs are opened, audited and accounted, figures taken.

Only public names are used here: the command line, keys of audit.json, and what `indpriv` exports.
"""

import contextlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd

from command_lines import run
from indpriv import NormLog, PrivacyFilter, account, membership_risk
from indpriv.accountant.rdp import epsilon_offsets

HERE = Path(__file__).parent
RUNS, ARRAYS, EXPECTED = HERE / "runs", HERE / "arrays", HERE / "expected"
DELTA = 1e-5
INDIVIDUAL_FIGURES = ("n", "mean", "median", "p75", "p95", "p99", "max", "share_at_worst_case")
GROUP_FIGURES = (
    *("n", "n_test", "mean", "median", "p95", "p99", "max", "share_at_worst_case", "too_small"),
    *("standardised_mean", "mean_loss", "train_accuracy", "test_accuracy"),
)
# Of how far an account is off: differences of epsilons, some of which nearly cancel.
ERROR_FIGURES = (
    *("choice", "instead", "between_records", "every", "n", "n_records", "n_entries"),
    *("median_exact", "signed_bias", "mean_absolute", "p95_absolute", "largest_absolute"),
    *("mean_shift", "mean_rdp"),
)


def command(*arguments):
    """What `indpriv ARGUMENTS` prints; exit codes 1 and 3 are of checks, figures like others."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run([*map(str, arguments)])
    assert code in (0, 1, 3), f"indpriv {' '.join(map(str, arguments))} ended with {code}"
    return printed.getvalue()


def private_copy(name, folder):
    """A stored run as it was: readable by its owner only, which git does not keep."""
    copy = shutil.copytree(RUNS / name, folder / name)
    for path in copy.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return copy


def audit_run(run_dir, options):
    """audit.json and epsilon.parquet of `indpriv audit`, which are written beside the run."""
    words = ["--delta", DELTA]
    for key, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            plain = key in ("by", "delta", "participation", "unit_column")
            words += [f"--{key.replace('_', '-')}", each] if plain else ["--set", f"{key}={each}"]
    output = run_dir.with_name("audit")
    summary = json.loads(command("audit", run_dir, "--output-dir", output, "--json", *words))
    return summary, pd.read_parquet(output / "epsilon.parquet")


def statuses(run_dir):
    """How many of the checks of `indpriv check` passed, failed and so on.

    The noise of these runs was not measured, and their training not compared with its own
    recomputation, since these checks came later.
    """
    [found] = json.loads(command("check", run_dir, "--set", "only=log", "--json"))["parts"]
    assert {line["status"] for line in found["lines"]} <= {"declared", "on trust", "refuted"}
    words = "recorded before training was compared"
    later = [c for c in found["checks"] if c["key"] == "noise" or c["detail"].startswith(words)]
    assert all(check["status"] == "not checked" for check in later)
    known = [check["status"] for check in found["checks"] if check not in later]
    return pd.Series(known).value_counts().to_dict()


def open_log(case):
    """The log of a case, from its run directory or its arrays, or the part of it that is meant."""
    if "run" in case:
        unreadable = case["options"].get("unreadable", "refuse")
        log = NormLog.open(RUNS / case["run"], unreadable=unreadable)
    else:
        with np.load(ARRAYS / f"{case['arrays']}.npz") as stored:
            found = {key: stored[key] for key in stored.files}
        names = ("free_steps", "free_positions", "free_norms")
        found["batch_norms"] = [found.pop(key) for key in names if key in found] or None
        found["total_steps"] = int(found["total_steps"])
        log = NormLog.from_arrays(**found, **case["from_arrays"])
    log = log.take(range(case["take"])) if "take" in case else log
    return log.thin(case["thin"]) if "thin" in case else log


def account_of(case):
    """The table of epsilons of a case."""
    kept = {key: value for key, value in case["options"].items() if key not in ("by", "unreadable")}
    return account(open_log(case), delta=DELTA, **kept)


def risk_of(case):
    """The figures of `membership_risk`, by example, with the worst case in the last row."""
    frame = membership_risk(open_log(case), delta=DELTA, **case["options"]).to_frame()
    worst = {"example_id": -1, **frame.attrs["worst_case"]}
    return pd.concat([frame, pd.DataFrame([worst])[frame.columns]], ignore_index=True)


def filter_of(planned):
    """Order and cap of a `PrivacyFilter`, what it guarantees, and what it charges for steps."""
    if "order" in planned:  # of one's own
        orders = np.array([planned["order"]])
        (offset,) = epsilon_offsets(orders, planned["delta"], "canonne2020").tolist()
        policy = PrivacyFilter(planned["order"], planned["epsilon"] - offset)
    else:
        policy = PrivacyFilter.for_epsilon(**planned)
    settings = {key: planned[key] for key in ("noise_multiplier", "sample_rate")}
    by_row = policy.charges([0.0, 0.25, 0.5, 1.0], **settings)
    by_unit = policy.charges([0.2, 0.5, 1.0, 1.0], **settings, units=np.array([0, 0, 1, 1]))
    return {
        "order": policy.order,
        "rdp_cap": policy.rdp_cap,
        "epsilon": policy.epsilon(delta=planned["delta"]),
        "epsilon_mironov2017": policy.epsilon(delta=planned["delta"], conversion="mironov2017"),
        "charges": by_row.tolist(),
        "charges_of_units": by_unit.tolist(),
    }


def each_example(frame):
    """The columns that are compared of a table of epsilons, of examples or of units."""
    frame = frame.rename(columns={"example_id": "id", "unit_id": "id"})
    return frame[["id", "epsilon", "epsilon_lower", "epsilon_upper"]]


def figures_of_table(table):
    """What an `EpsilonTable` says of the whole log."""
    return {
        "claim": table.claim,
        "has_claim_reason": bool(table.claim_reason),
        "worst_case_epsilon": table.worst_case_epsilon,
        "recorded_share": table.account.recorded_share,
        "rows_per_unit": table.account.rows_per_unit,
    }


def figures_of_audit(summary):
    """What audit.json says of the whole run, but for texts, intervals and attacks."""
    guarantee = summary["guarantee"]
    return {
        "claim": summary["claim"],
        "has_claim_reason": bool(summary["claim_reason"]),
        "worst_case_epsilon": guarantee["worst_case_epsilon"],
        "recorded_share": summary["account"]["recorded_share"],
        "rows_per_unit": summary["account"]["rows_per_unit"],
        "guarantee_status": guarantee["status"],
        "guarantee_membership": guarantee["membership"],
        "individual": _some(summary["individual"], INDIVIDUAL_FIGURES),
        "unit_sizes": [_numbers(row) for row in summary["unit_sizes"]],
        "groups": {
            table["by"]: {str(row["name"]): _some(row, GROUP_FIGURES) for row in table["rows"]}
            for table in summary["groups"]
        },
    }


def errors_of_audit(summary):
    """How far off audit.json says that the account is, or would be by other choices."""
    fewer = [row for row in summary["sensitivity"] if row["choice"] == "records"]
    shifts = ("here", "p95_absolute", "largest_absolute", "mean_shift")
    others = (row for row in summary["sensitivity"] if row not in fewer)
    return {
        "fidelity": [_some(row, ERROR_FIGURES) for row in summary["fidelity"]],
        "batch_norms": _some(summary["batch_norms"] or {}, ERROR_FIGURES),
        "sensitivity": [_some(row, ERROR_FIGURES) for row in others],
        "spacing": _some(fewer[0] if fewer else {}, shifts),
    }


def _some(row, names):
    return {name: row[name] for name in names if name in row}


def _numbers(row):
    return {name: value for name, value in row.items() if isinstance(value, int | float)}
