import io
import json

import numpy as np
from rich.console import Console

from indpriv.analysis.attacks.measures import measure_attack
from indpriv.attack_scores import AttackScores
from indpriv.report.screens.attack import attack_document, print_attack

NAMES = {"auc", "tpr_at_fpr", "advantage", "epsilon_lower_bound"}


def measures(n=400, groups=None):
    rng = np.random.default_rng(0)
    member = rng.random(n) < 0.5
    return measure_attack(AttackScores(member + rng.normal(size=n), member, "a threshold", groups))


def test_the_document_has_the_named_keys_of_all_examples_and_of_each_group():
    groups = np.array(["<b>", "=a", "a,b", "\x1b[31m"], dtype=object)[np.arange(400) % 4]
    document = json.loads(json.dumps(attack_document(measures(groups=groups)), allow_nan=False))
    assert {*NAMES, "method", "confidence"} <= set(document)
    assert set(document["tpr_at_fpr"]) == {"0.001", "0.01"}
    assert [row["name"] for row in document["groups"]] == sorted(set(groups))
    for row in document["groups"]:
        assert set(row) >= NAMES
        assert row["null_calibration"]["false_alarm_rate"] <= 0.05
    assert document["epsilon_lower_bound"] > 0
    assert "not on the output-specific epsilon of any one" in document["meaning"]


def test_the_screen_says_what_a_bound_means_and_obeys_no_name():
    groups = np.array(["[red]x[/red]", "\x1b[31m"], dtype=object)[np.arange(400) % 2]
    buffer = io.StringIO()
    print_attack(measures(groups=groups), Console(file=buffer, width=80))
    text = buffer.getvalue()
    assert "\x1b" not in text
    assert "[red]x[/red]" in text
    for words in (
        "SENSITIVE",
        "worst-case epsilon",
        "proves nothing",
        "delta 1e-5",
        "False alarms",
        "AUC",
    ):
        assert words in " ".join(text.split()), words


def test_many_groups_and_none_at_all():
    buffer = io.StringIO()
    print_attack(
        measures(groups=np.arange(400).astype(str).astype(object)), Console(file=buffer, width=80)
    )
    assert "360 more groups are in --json" in buffer.getvalue()
    one = measure_attack(AttackScores(np.ones(1), np.ones(1, bool), "x"))
    assert attack_document(one)["auc"] is None
    print_attack(one, Console(file=buffer, width=80))
