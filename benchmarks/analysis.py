"""Analysis, report and attack measures at size: python benchmarks/analysis.py [NAME ...] [--full] [--list].

Limits are those the project promises; the attack is compared with scikit-learn's AUC in the same run. In the style of
accountant.py, whose helpers it shares. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from accountant import benchmark, best_time, main, report
from indpriv import ExampleTable, NormLog, account
from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.analysis.groups import group_table
from indpriv.analysis.recorded_run import AuditedRun, RecordedRun, find_all
from indpriv.attack_scores import AttackScores
from indpriv.attacks import Material
from indpriv.audit.audit_directory import write_audit

DELTA = 1e-7  # below 1/n of every benchmark


def _artifacts(n: int) -> tuple[NormLog, ExampleTable]:
    """A log of three steps and the examples of n people, a fifth as many in the test set."""
    rng = np.random.default_rng(0)
    frames = []
    for split, size in (("train", n), ("test", n // 5)):
        label = rng.integers(0, 2, size)
        loss = rng.gamma(2.0, 0.3, size) * (1 + label)
        columns = {
            "example_id": np.arange(size),
            "unit_id": np.arange(size),
            "split": split,
            "label": label,
        }
        columns |= {
            "loss": loss,
            "correct": loss < 1.0,
            "sex": rng.choice(["Female", "Male"], size),
        }
        columns |= {"race": rng.choice(list("abcde"), size), "age": rng.integers(17, 90, size)}
        frames.append(pd.DataFrame(columns))
    norms = np.outer([1.2, 1.0, 0.8], frames[0]["loss"]) + 0.01
    settings = {
        "total_steps": 300,
        "noise_multiplier": 1.1,
        "max_grad_norm": 1.0,
        "sample_rate": 0.05,
    }
    return NormLog.from_arrays(norms, [0, 100, 200], **settings), ExampleTable(
        pd.concat(frames, ignore_index=True)
    )


def _audit(n: int) -> tuple[float, float]:
    """Seconds of analysis and report, and the size of the page in MB."""
    log, examples = _artifacts(n)
    table = account(log, delta=DELTA)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "audit"
        start = time.perf_counter()
        evidence = RecordedRun(Material(examples), Material(examples))
        by = ("sex", "race", "label", "age:bins=10", "sex,race", "race,age:bins=4")
        run = AuditedRun(log, table, evidence, name="benchmark", by=by)
        write_audit(directory, run, find_all(run))
        return time.perf_counter() - start, (directory / "report.html").stat().st_size / 1e6


@benchmark
def audit_of_adults_size(full: bool) -> list[bool]:
    """Analysis and report of 32,561 examples."""
    seconds, size = _audit(32_561)
    return [
        report("analysis and report of 32,561 examples", seconds, "s", at_most=10),
        report("its page", size, "MB", at_most=3),
    ]


@benchmark
def audit_of_a_million(full: bool) -> list[bool]:
    """Analysis and report of 10^6 examples, six groupings."""
    seconds, size = _audit(1_000_000)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [
        report(
            "analysis and report of 1,000,000 examples, six groupings", seconds, "s", at_most=60
        ),
        report("its page", size, "MB", at_most=3),
        report("peak memory of this process", peak, "GiB", at_most=4),
    ]


@benchmark
def ten_thousand_groups(full: bool) -> list[bool]:
    """Tests and intervals of a column with 10,000 values, 100,000 examples."""
    log, examples = _artifacts(100_000)
    table = account(log, delta=DELTA)
    train = examples.aligned(table.example_ids)
    train["many"] = np.random.default_rng(1).integers(0, 10_000, len(train)).astype(str)
    start = time.perf_counter()
    group_table(table, train, train[:0], "many")
    return [
        report("100,000 examples in 10,000 groups", time.perf_counter() - start, "s", at_most=10)
    ]


@benchmark
def attack_measures(full: bool) -> list[bool]:
    """ROC, low false-positive rates and the lower bound of 200,000 scores in 20 groups."""
    rng = np.random.default_rng(3)
    member = rng.random(200_000) < 0.5
    values = rng.normal(size=200_000) + 0.1 * member
    groups = rng.integers(0, 20, 200_000).astype(str).astype(object)
    scores = AttackScores(values, member, "benchmark", groups)
    ours, peer = (
        best_time(lambda: measure_attack(scores)),
        best_time(lambda: roc_auc_score(member, values)),
    )
    report("scikit-learn's AUC of 200,000 scores", peer, "s")
    return [
        report(
            "everything, for all and 20 groups, over scikit-learn's AUC alone",
            ours / peer,
            "x",
            at_most=40,
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
