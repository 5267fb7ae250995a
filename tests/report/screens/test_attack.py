import io
import json

import numpy as np
from rich.console import Console

from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.attack_scores import AttackScores
from indpriv.report.report import attack_document, print_attack

RATES = ("auc", "tpr_0.001", "tpr_0.01", "advantage")
BOUNDS = ("steinke2023", "mahloujifar2024", "ranks", "gaussian_ranks")


def measures(n=400, groups=None):
    rng = np.random.default_rng(0)
    member = rng.random(n) < 0.5
    return measure_attack(AttackScores(member + rng.normal(size=n), member, "a threshold", groups))


def test_the_document_has_the_named_keys_of_all_examples_and_of_each_group():
    groups = np.array(["<b>", "=a", "a,b", "\x1b[31m"], dtype=object)[np.arange(400) % 4]
    document = json.loads(json.dumps(attack_document(measures(groups=groups)), allow_nan=False))
    found = {(row["by"], row["part"], row["rate"]): row for row in document["rates"]}
    every = [("", "all examples"), *(("group", name) for name in sorted(set(groups)))]
    assert list(found) == [(*part, name) for part in every for name in RATES]
    assert tuple(document["bounds"]) == BOUNDS
    assert list(document["group_bounds"]) == sorted(set(groups))
    bounds = [document["bounds"]["steinke2023"], *document["group_bounds"].values()]
    assert all(one["false_alarm_rate"] <= 0.05 for one in bounds)
    assert bounds[0]["epsilon"] > 0
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
    assert "360 more groups in --json" in buffer.getvalue()
    one = measure_attack(AttackScores(np.ones(1), np.ones(1, bool), "x"))
    (row,) = attack_document(one)["rates"]
    assert (row["rate"], row["value"], row["n"]) == ("auc", None, 1)
    assert {bound.epsilon for bound in one.bounds.values()} == {0.0}
    print_attack(one, Console(file=buffer, width=80))
    assert "turned" not in buffer.getvalue()


def test_scores_whose_sign_looks_turned_are_named():
    rng = np.random.default_rng(0)
    member = rng.random(400) < 0.5
    losses = AttackScores(rng.normal(size=400) - member, member, "losses")
    buffer = io.StringIO()
    print_attack(measure_attack(losses), Console(file=buffer, width=80))
    assert "pass minus the loss" in " ".join(buffer.getvalue().split())
    turned = [measure_attack(one) for one in (losses, AttackScores(member * 1.0, member, "x"))]
    assert [attack_document(one)["looks_turned"] for one in turned] == [True, False]
