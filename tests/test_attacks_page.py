"""reports/attacks/README.md: its figures, its verdicts, and the code that trains and attacks."""

import copy
import re
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from indpriv._files import read_json
from indpriv.analysis.summary import Audit
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.references import rmia
from indpriv.report.report import print_audit
from reports.attacks.figures import few, figures
from reports.attacks.page import render, targets
from reports.attacks.training import BASELINE, DP, SEED, Task
from reports.demo.__main__ import SHOWN_AS
from reports.released import __main__ as released
from synthetic import signals_with_effect

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reports"


@pytest.fixture
def known():
    return read_json(REPORTS / "attacks" / "attacks.json")


def verdicts(known):
    return [reached for _, _, reached in targets(known)]


def rates(known, task, kind, title):
    return next(row for row in known[task][kind]["rates"] if row["title"] == title)


def test_the_page_is_written_from_its_figures(known):
    assert (REPORTS / "attacks" / "README.md").read_text(encoding="utf-8") == render(known)


def test_the_page_on_the_released_model_is_written_from_its_figures(known):
    found = read_json(REPORTS / "released" / "released.json")
    page = (REPORTS / "released" / "README.md").read_text(encoding="utf-8")
    assert page == released.render(found, known, read_json(REPORTS / "language" / "language.json"))
    for name, part in found.items():  # no attacker of a model with DP exceeds the worst case
        worst = known[name]["run"]["ceilings"]["worst_case"]
        for one in part[DP]["attacks"].values():
            assert all(one["tpr_at_fpr"][rate] < limit for rate, limit in worst.items())
        for one in part.get("canaries", {DP: {}})[DP].values():
            assert one["bounds"]["epsilon_fdp"] < one["epsilon"]
            assert "add/remove" in one["meaning"] or "zero out" in one["meaning"]


def test_one_run_of_adult_is_on_every_page(known):
    """Its audit, the page of attacks and the first screen: python -m reports.yu2023 adult, make attacks, make figures."""
    audit = read_json(REPORTS / "adult" / "audit.json")
    assert known["adult"]["run"]["id"] == audit["run"]["recorder"]["id"]
    assert known["adult"]["run"]["status"] == audit["guarantee"]["status"] == "supported"
    found = StringIO()
    print_audit(Audit.from_json(audit), Console(file=found, width=80), report=SHOWN_AS)
    screen = re.sub(r" +$", "", found.getvalue(), flags=re.MULTILINE)
    assert screen == (REPORTS / "demo" / "adult.txt").read_text(encoding="utf-8")


def test_a_run_without_a_guarantee_is_not_said_to_have_one(known):
    known["adult"]["run"]["status"] = "void"
    assert "no run of this page has a guarantee" in render(known)


def too_strong(known):
    spans = rates(known, "mnist", DP, "RMIA")["tpr_at_fpr_intervals"]["0.01"]
    spans["low"] = known["mnist"]["run"]["ceilings"]["worst_case"]["0.01"] + 1e-6


def found_in_the_run(known):
    known["adult"]["run"]["results"][0]["above_worst_case"] = True


def as_weak_as_a_threshold(known):
    row, threshold = (rates(known, "mnist", BASELINE, name) for name in ("LiRA", "loss threshold"))
    row["auc_interval"]["low"] = threshold["auc_interval"]["high"]


def without_power_at_few_errors(known):
    row, threshold = (rates(known, "mnist", BASELINE, name) for name in ("RMIA", "loss threshold"))
    row["tpr_at_fpr_intervals"]["0.01"] = threshold["tpr_at_fpr_intervals"]["0.01"]


def as_strong_on_labels_with_dp(known):
    row, bare = (rates(known, "mnist", kind, "RMIA on labels") for kind in (DP, BASELINE))
    row["auc_interval"]["high"] = bare["auc_interval"]["low"]


def too_slow(known):
    known["adult"]["timing"]["wall"] = 180.0


@pytest.mark.parametrize(
    ("change", "target"),
    [
        (as_weak_as_a_threshold, 0),
        (without_power_at_few_errors, 1),
        (too_strong, 4),
        (found_in_the_run, 4),
        (too_slow, 5),
        (as_strong_on_labels_with_dp, 6),
    ],
)
def test_a_target_that_is_missed_is_called_so(known, change, target):
    changed = copy.deepcopy(known)
    for row in changed.values():  # as if all had been reached
        for found in row[DP]["rates"]:
            for span in found["tpr_at_fpr_intervals"].values():
                span["low"] = 0.0
    assert verdicts(changed)[target] == "yes"
    change(changed)
    assert [k for k, reached in enumerate(verdicts(changed)) if reached != "yes"] == [target]


def test_few_references_are_the_models_that_follow():
    signals = signals_with_effect(1.0, 6, 40)
    found = list(few(signals, "rmia", 2))
    rows = [5, 0, 1]
    expected = rmia(AttackSignals.from_arrays(signals.signal[rows], signals.member[rows]), 0)
    assert len(found) == 6
    assert found[5].scores == pytest.approx(expected.scores)
    assert np.array_equal(found[5].member, signals.member[5])


@pytest.mark.slow
def test_a_task_is_trained_once_and_measured(tmp_path):
    config = AuditConfig.from_toml(ROOT / "audits" / "digits.toml")
    training = replace(config.training, epochs=2, batch_size=512)
    task = Task(
        "digits", "Digits", "Small.", replace(config, training=training),
        partial(load_dataset, "digits"), {DP: 8, BASELINE: 8},
    )  # fmt: skip
    task.train(tmp_path / "digits", lambda _: None)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix == ".f32"}
    task.train(tmp_path / "digits", lambda _: None)
    assert times == {path: path.stat().st_mtime_ns for path in times}
    found = figures(task, tmp_path / "digits")
    assert found[DP]["models"] == found[BASELINE]["models"] == 8
    for model in (DP, BASELINE):
        rows = [row for row in found["run"]["results"] if row["model"] == model]
        assert {row["references"] for row in rows} == {0, 4}
    assert len(times) == 8  # three signals of each study; four references for each model
    assert SEED == 18
