"""The page that holds our audits against the paper: its rules, its numbers, and that every figure of ours follows an audit."""

import copy
import re
import tomllib
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import indpriv
from indpriv._files import write_json
from indpriv.accountant.account import table_for
from indpriv.accountant.method import Method
from indpriv.analysis.fidelity import fidelity_against_k
from indpriv.analysis.recorded_run import Declared, RecordedRun
from indpriv.attacks import Material
from indpriv.epsilon_table import DISCLAIMER
from indpriv.example_table import ExampleTable
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED
from reports.yu2023 import paper, rules
from reports.yu2023.audits import (
    DEFAULT,
    INDIVIDUAL,
    PRESET,
    Audit,
    fidelity_of,
    read_audits,
    values_of,
)
from reports.yu2023.measured import read_measured
from reports.yu2023.page import render_page, render_results, write_results
from reports.yu2023.sections import Known
from reports.yu2023.sweeps import HINGE, LARGER, MULTIPLES, SWEPT
from summaries import audit_of, run_of
from synthetic import rows

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reports"
CLASSES = tuple(map(str, range(10)))
DECLARED = {
    "name": "mnist",
    "config": {"training": {"non_dp_twin": True}, "audit": {"groups": ["label"]}},
    "model": {"architecture": "tanh_cnn", "parameters": 26_010},
    "training": {"device": "cpu", "delta": 1e-5},
    "wall_seconds": 12.0,
}
RECORDER = {
    "id": "one-run",
    "steps_per_epoch": 6,
    "expected_batch_size": 100,
    "training_seconds": 5.0,
    "pass_seconds": 2.0,
    "versions": {"torch": "2.13", "opacus": "1.6.0"},
}


@pytest.fixture(scope="module")
def known():
    """One made-up audit by the name of MNIST: 600 examples of ten classes, the harder the later in the paper's order."""
    rng = np.random.default_rng(0)
    order = paper.run_named("mnist").order
    hard = np.array([order.index(name) for name in CLASSES])
    label = np.repeat(np.arange(10), 60)
    size = np.exp(rng.normal(-3.5, 0.25, 600) + 0.25 * hard[label])
    norms = size * np.linspace(1.2, 0.8, 60)[:, None]
    train = rows(
        "train", np.array(CLASSES, dtype=object)[label], loss=size, correct=rng.random(600) < 0.95
    )
    test_label = np.repeat(np.arange(10), 40)
    test = rows(
        "test",
        np.array(CLASSES, dtype=object)[test_label],
        loss=rng.choice(size, 400),
        correct=np.tile(np.arange(40), 10) < 40 - 2 * hard[test_label],
    )
    examples = ExampleTable(pd.concat([train, test], ignore_index=True))
    evidence = RecordedRun(
        Material(examples),
        Material(examples),
        declared=Declared(DECLARED),
        recorder=RECORDER,
    )
    summaries = []
    settings = {
        "total_steps": 60,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 1 / 6,
    }
    for mode, options in (("up", {}), ("nearest", {"preset": PRESET})):
        log = indpriv.NormLog.from_arrays(norms, np.arange(60), **settings, rounding_mode=mode)
        method = Method(delta=1e-5, neighbouring="zero_out", **options)  # batches of 100 of 600
        table = table_for(log, method)
        fidelity = {"fidelity": fidelity_against_k(run_of(log, method, table))}
        summaries.append(audit_of(log, table, evidence, name="mnist", fidelity=fidelity).to_json())
    measured = {
        "distribution": {
            name: {
                "source": values_of(summary),
                "found": {"smallest": 0.01, "statistics": [1.0, 0.5, 0.6, 0.7, 0.8, 0.9]},
            }
            for name, summary in zip(("mnist", "yu2023/preset/mnist"), summaries, strict=True)
        },
        "table_2": {
            "mnist": {
                "source": values_of(summaries[0]),
                "found": {
                    "methods": {
                        "exponential": [1.01, 0.5, 0.6, 0.7, 0.8, 0.9],
                        "histogram": [1.3, 0.5, 0.6, 0.7, 0.8, 0.9],
                        "descent": [None, 0.5, 0.6, 0.7, 0.8, 0.9],
                    }
                },
            }
        },
    }
    return Known({"mnist": Audit("mnist", *summaries)}, measured)


def section(page, number):
    return re.search(rf"## {number}: .*?(?=\n## |\Z)", page, re.DOTALL)[0]


def verdicts(page, number):
    """The verdict words of the one audit, preset first."""
    block = section(page, number).split("| MNIST |")[1]
    return re.findall(r"\| verdict.*?\*\*(.*?)\*\*.*?\*\*(.*?)\*\*", block)[0]


def changed(known, change):
    summaries = [
        copy.deepcopy(dict(summary))
        for summary in (known.audits["mnist"].default, known.audits["mnist"].preset)
    ]
    for summary in summaries:
        change(summary)
    return Known({"mnist": Audit("mnist", *summaries)}, known.measured)


def page_of(known):
    return render_page(known, ROOT / "audits")


def test_the_papers_own_numbers_agree_with_each_other():
    for run in paper.RUNS:
        assert len(set(run.order)) == len(run.order)
        if run.attack is not None:
            assert len(run.attack.with_dp) == len(run.attack.without_dp) == len(run.order)
        if run.release is not None:
            assert rules.error_rate(run.release.private, run.release.non_private) == pytest.approx(
                run.release.error_rate, abs=0.02
            )
        assert rules.fidelity(run.fidelity, run.fidelity).word == REPRODUCED
    assert sorted(paper.FIGURE_14_ORDER) == sorted(paper.run_named("cifar10").order)


def test_of_four_groups_only_the_same_order_is_reproduced():
    order = ("a", "b", "c", "d")
    words = {
        found: rules.order(order, {name: place for place, name in enumerate(found)}).word
        for found in permutations(order)
    }
    assert [found for found, word in words.items() if word == REPRODUCED] == [order]
    assert words["b", "a", "c", "d"] == DIFFERS
    assert words["d", "c", "b", "a"] == NOT_REPRODUCED
    assert rules.order(order, {"a": 1.0}).word == NOT_RUN


@pytest.mark.parametrize(
    ("verdict", "word"),
    [
        (rules.spread(0.4, 0.9, 1.0), REPRODUCED),
        (rules.spread(0.4, 0.96, 1.0), DIFFERS),
        (rules.spread(0.6, 0.9, 1.0), NOT_REPRODUCED),
        (rules.spread(0.19, 0.9, 1.0, 0.13), REPRODUCED),
        (rules.spread(0.3, 0.9, 1.0, 0.13), DIFFERS),
        (
            rules.spread(0.19, 1.0, 1.0, 0.13),
            DIFFERS,
        ),  # one example, and everybody else at the worst case
        (rules.spread(0.45, 0.9, 1.0, 0.13), NOT_REPRODUCED),
        (rules.share_at_worst_case(20.0, 35.0), REPRODUCED),
        (rules.share_at_worst_case(10.0, 35.0), DIFFERS),
        (rules.share_at_worst_case(0.0, 35.0), NOT_REPRODUCED),
        (rules.share_at_worst_case(13.0, 3.0), NOT_REPRODUCED),
        (rules.easier(3.0, 35.0), REPRODUCED),
        (rules.easier(4.5, 0.0), NOT_REPRODUCED),
        (rules.largest_between([1.0, 3.0, 2.0]), REPRODUCED),
        (rules.largest_between([3.0, 1.0, 2.0]), DIFFERS),
        (rules.largest_between([1.0, 2.0, 3.0]), NOT_REPRODUCED),
        (rules.largest_between([3.0, 2.0, 1.0]), NOT_REPRODUCED),
        (
            rules.worst_served({"a": 2.0, "b": 1.0, "c": 1.5}, {"a": 0.5, "b": 0.9, "c": 0.7}),
            REPRODUCED,
        ),
        (
            rules.worst_served({"a": 2.0, "b": 1.0, "c": 2.5}, {"a": 0.5, "b": 0.9, "c": 0.7}),
            DIFFERS,
        ),
        (rules.worst_served({"a": 1.0, "b": 2.0}, {"a": 0.5, "b": 0.9}), NOT_REPRODUCED),
        (rules.worst_served({"a": 1.2, "b": 1.0}, {"a": 0.5, "b": 0.9}, 35.0), REPRODUCED),
        (rules.worst_served({"a": 1.1, "b": 1.0}, {"a": 0.5, "b": 0.9}, 35.0), DIFFERS),
        (rules.stratified({"a": [9, 1, 1], "b": [1, 2, 2]}, ("a", "b"), 1), REPRODUCED),
        (rules.stratified({"a": [1, 1, 9], "b": [2, 2, 2]}, ("a", "b"), 0), DIFFERS),
        (rules.stratified({"a": [9, 9, 1], "b": [2, 2, 2]}, ("a", "b"), 0), NOT_REPRODUCED),
        (rules.stratified({"a": [9, 9], "b": [2, 2]}, ("a", "b"), 2), NOT_RUN),
        (rules.fidelity({1.0: (0.992, 0.06, 0.2)}, {1.0: (0.999, 0.04, 0.17)}), REPRODUCED),
        (rules.fidelity({1.0: (0.98, 0.06, 0.2)}, {1.0: (0.999, 0.04, 0.17)}), DIFFERS),
        (rules.fidelity({1.0: (0.999, 0.1, 0.2)}, {1.0: (0.999, 0.04, 0.17)}), DIFFERS),
        (rules.fidelity({1.0: (0.999, 0.04, 0.4)}, {1.0: (0.999, 0.04, 0.17)}), DIFFERS),
        (rules.fidelity({1.0: (0.85, 0.1, 0.2)}, {1.0: (0.999, 0.04, 0.17)}), NOT_REPRODUCED),
        (
            rules.fidelity(
                {1.0: (0.999, 0.04, 0.17)},
                {1.0: (0.999, 0.04, 0.17), 3.0: (0.999, 0.02, 0.1)},
            ),
            NOT_RUN,  # "at every gamma" is not known
        ),
        (rules.loss(0.91, 0.9), REPRODUCED),
        (rules.loss(0.5, 0.4), DIFFERS),
        (rules.loss(0.26, 0.2), NOT_REPRODUCED),
        (rules.loss(0.6, -0.1), NOT_REPRODUCED),
        (rules.loss(None, None), NOT_REPRODUCED),
        (rules.same_order([("ab", "ab"), ("ba", "ba")]), REPRODUCED),
        (rules.same_order([("abcdef", "abcdef"), ("abcdef", "abcdfe")]), DIFFERS),
        (rules.same_order([("ab", "ba")]), NOT_REPRODUCED),
        (rules.cost(3.0, 26_000.0), REPRODUCED),
        (rules.cost(3.1, 26_000.0), DIFFERS),
        (rules.cost(3.0, 2.0), DIFFERS),
        (rules.cost(3.1, 2.0), NOT_REPRODUCED),
        (rules.release(1.99), REPRODUCED),
        (rules.release(9.0), DIFFERS),
        (rules.release(11.0), NOT_REPRODUCED),
        (rules.paired_accuracies([-0.1, -0.05, -0.12, -0.09]), REPRODUCED),
        (rules.paired_accuracies([-0.9, 0.4, -0.5, 0.6]), DIFFERS),
        (rules.paired_accuracies([-7.0, -6.9, -7.2]), NOT_REPRODUCED),
        (rules.paired_accuracies([-0.1]), NOT_RUN),
        (rules.close(0.04), REPRODUCED),
        (rules.close(0.1), DIFFERS),
        (rules.close(0.2), NOT_REPRODUCED),
        (rules.quicker((4.8, 7.4), (4.2, 5.5)), REPRODUCED),
        (rules.quicker((4.8, 6.4), (4.2, 5.5)), DIFFERS),
        (rules.quicker((4.8, 5.4), (4.2, 5.5)), NOT_REPRODUCED),
        (rules.quicker((4.8, 4.4), (4.2, 3.0)), NOT_REPRODUCED),
    ],
)
def test_each_rule_gives_each_word(verdict, word):
    assert verdict.word == word


def attack(*successes, trials=2000):
    return [{"successes": found, "trials": trials, "too_small": False} for found in successes]


def pooled(low, high):
    return {"success_rate": (low + high) / 2, "low": low, "high": high, "trials": 10_000}


def test_membership_is_reproduced_where_dp_hides_it_and_its_absence_shows_it_unequally():
    quiet, loud = pooled(0.49, 0.51), pooled(0.52, 0.54)
    assert rules.membership(quiet, 0.01, 0.55).word == REPRODUCED
    assert rules.membership(loud, 0.01, 0.55).word == DIFFERS
    assert rules.membership(quiet, 0.3, 0.55).word == DIFFERS
    assert (
        rules.membership(quiet, 0.01, 0.49).word == DIFFERS
    )  # unequal, but no success on all examples
    assert rules.membership(loud, 0.01, 0.49).word == NOT_REPRODUCED


def test_few_guesses_that_could_not_have_shown_an_attack_are_no_evidence_of_its_failure():
    assert rules.membership(pooled(0.45, 0.55), 0.01, 0.55).word == DIFFERS
    assert rules.noticed(10_000) == pytest.approx(51.24, abs=0.01)
    assert rules.least_p_of_groups(attack(1000, 1020, 990)) > 0.05
    assert rules.least_p_of_groups(attack(1100, 1200, 1400)) < 1e-4


def swept(*settings, errors=None):
    """What a sweep of clipping norms found: smallest epsilon, share at the worst case, accuracy, r of each.

    Mean epsilons of the later classes rise more as the clipping norm falls; errors: of estimates at gamma 1.
    """
    return [
        {
            "values": {"max_grad_norm": norm, "learning_rate": 0.1},
            "figures": {
                "smallest_epsilon": smallest,
                "share_at_worst_case": share,
                "test_accuracy": accuracy,
                "pearson_log_loss": r,
                "epsilon_gap: label": accuracy,
                "accuracy_gap: label": 0.3,
            },
            "means": {
                name: place / norm**2 + 0.001 for place, name in enumerate(paper.FIGURE_13_ORDER)
            },
            "errors": {} if errors is None else {"1": errors},
        }
        for norm, (smallest, share, accuracy, r) in enumerate(settings, 1)
    ]


def page_with(name, settings):
    return page_of(Known({}, {SWEPT: {name: {"source": "", "found": settings}}}))


def test_figures_9_10_and_12_judge_the_direction_of_a_sweep():
    falling = [
        (1.6, 0.7, 0.60, 0.5),
        (1.0, 0.4, 0.64, 0.5),
        (0.9, 0.2, 0.65, 0.5),
        (0.5, 0.0, 0.6, 0),
    ]
    text = section(page_with(MULTIPLES, swept(*falling)), "Figures 9 and 10")
    assert re.findall(r"verdict: (.*?) \|.*?\*\*(.*?)\*\*", text) == [
        ("epsilon", REPRODUCED),
        ("accuracy", REPRODUCED),
        ("gap between classes", REPRODUCED),
        ("underserved class", REPRODUCED),
    ]
    rising = section(page_with(MULTIPLES, swept(*falling[::-1])), "Figures 9 and 10")
    assert f"**{NOT_REPRODUCED}**" in rising
    short = section(page_with(MULTIPLES, swept(*falling[:3])), "Figures 9 and 10")
    assert f"**{NOT_RUN}**" in short
    close = page_with(LARGER, swept((0, 0, 0, 0.85), (0, 0, 0, 0.86)))
    assert f"**{REPRODUCED}**" in section(close, "Figure 12")
    assert f"**{DIFFERS}**" in section(
        page_with(LARGER, swept((0, 0, 0, 0.8), (0, 0, 0, 0.9))), "Figure 12"
    )
    weak = page_with(LARGER, swept((0, 0, 0, 0.3), (0, 0, 0, 0.9)))
    assert f"**{NOT_REPRODUCED}**" in section(weak, "Figure 12")
    hinge = section(page_with(HINGE, swept((0, 0, 0, 0))), "Figure 13")
    assert f"**{REPRODUCED}** (tau 1.00" in hinge
    assert f"**{NOT_RUN}**" in hinge
    near = page_with(HINGE, swept((0, 0, 0, 0), errors=(0.999, 0.07, 0.4)))
    assert f"**{REPRODUCED}** (errors up to" in section(near, "Figure 13")


def test_every_figure_and_table_of_the_paper_has_its_place(known):
    for page in (page_of(Known({}, {})), page_of(known)):
        for number in (*range(1, 9), 11, 12, 13, 14):
            assert section(page, f"Figure {number}")
        for number in ("Figures 9 and 10", "Table 1", "Table 2", "Table 3", "Footnote 3"):
            assert section(page, number)
        assert all(name in page for name in ("Theorem 3.1", "Theorem 3.2", paper.SOURCE))


def test_without_a_run_nothing_is_claimed():
    page = page_of(Known({}, {}))
    shown = page.split("## Rules")[0]
    assert not any(f"**{word}" in shown for word in (REPRODUCED, NOT_REPRODUCED, DIFFERS))
    assert f"**{NOT_RUN}**" in section(page, "Table 1")


def test_verdicts_follow_the_audit(known):
    page = page_of(known)
    assert verdicts(page, "Figure 1") == (REPRODUCED, REPRODUCED)
    assert verdicts(page, "Figure 4") == (REPRODUCED, REPRODUCED)
    assert verdicts(page, "Figure 6") == (REPRODUCED, REPRODUCED)
    weak = changed(known, lambda summary: summary["loss"].update(pearson_log_loss=0.5))
    assert verdicts(page_of(weak), "Figure 5") == (DIFFERS, DIFFERS)
    assert "0.500" in section(page_of(weak), "Figure 5") or "0.5 " in section(
        page_of(weak), "Figure 5"
    )

    def reverse(summary):
        (table,) = (found for found in summary["groups"] if found["by"] == "label")
        for row in table["rows"]:
            row["mean"] = 10 - row["mean"]

    assert verdicts(page_of(changed(known, reverse)), "Figure 6") == (
        NOT_REPRODUCED,
        NOT_REPRODUCED,
    )

    def coarse(summary):
        for row in summary["fidelity"]:
            row["pearson"] = 0.5

    assert verdicts(page_of(changed(known, coarse)), "Figure 4") == (NOT_REPRODUCED, NOT_REPRODUCED)


def test_the_spread_is_over_the_largest_epsilon_not_over_the_worst_case(known):
    close = changed(known, lambda summary: summary["individual"].update(max=0.015))
    assert verdicts(page_of(close), "Figure 1") == (NOT_REPRODUCED, NOT_REPRODUCED)


def test_fidelity_is_of_equal_gaps_and_of_norms_carried_on():
    row = {"between_records": "last", "pearson": 0.9, "epochs": 1.02, "is_this_log": False}
    others = [
        {"epochs": 1.0, "is_this_log": True},
        {"epochs": 1.0, "between_records": "closest"},
        {"epochs": 1.4},
    ]
    others += [{"epochs": 1.0, "pearson": None}]
    summary = {"fidelity": [*({**row, **change} for change in others), row]}
    assert fidelity_of(summary, paper.GAMMAS) == {1.0: row}


def test_figures_are_those_of_the_audit(known):
    page, summary = page_of(known), known.audits["mnist"].default
    means = {row["name"]: row["mean"] for row in summary["groups"][0]["rows"]}
    assert ", ".join(sorted(means, key=means.get)) in section(page, "Figure 6")
    gamma_1 = next(
        row for row in summary["fidelity"] if row["every"] == 6 and row["between_records"] == "last"
    )
    line = f"{gamma_1['pearson']:.4f}, {gamma_1['mean_absolute']:.3f}, {gamma_1['largest_absolute']:.3f}"
    assert line in section(page, "Figure 4")
    assert "600; tanh_cnn, 26,010 parameters" in page
    results = render_results(known)
    assert f"| {summary['loss']['pearson_log_loss']:.2g} |" in results
    assert "[mnist](../../reports/mnist/audit.md)" in results


def test_no_epsilon_without_its_meaning(known):
    meaning = (
        "delta 1e-5, zero out the contribution of one example, Poisson sampling, RDP accountant"
    )
    for text in (page_of(known), " ".join(render_results(known).split())):
        assert meaning in text
        assert "estimate" in text or "exact" in text
    assert DISCLAIMER in page_of(known)
    assert DISCLAIMER in " ".join(render_results(known).split())


def test_table_2_has_the_papers_layout_and_a_warning(known):
    text = section(page_of(known), "Table 2")
    assert "| MNIST | average | 0.1 | 0.3 | median | 0.7 | 0.9 |" in text
    assert "| paper, private | 0.681 | 0.238 | 0.317 | 0.436 | 0.708 | 1.647 |" in text
    assert re.search(r"\| sound default: .*Andrew et al. 2021, 20 rounds \| – \| 0.500", text)
    assert "for the curator only" in text
    assert "average error rate 0.17 %" in text  # 1.01 for 1.00, one of six
    assert "average error rate 5.00 %" in text


def individually_clipped(known, **training):
    """The audit once more, as if another run of it had clipped individually."""
    summary = copy.deepcopy(dict(known.audits["mnist"].default))
    summary["run"]["declared"]["config"]["training"].update(individual_clipping=True, **training)
    summary["run"]["test_accuracy"] -= 0.01
    name = f"mnist{INDIVIDUAL}"
    return Known({**known.audits, name: Audit(name, summary, None)}, known.measured)


def test_individual_clipping_of_the_whole_set_is_held_against_the_ordinary_run(known):
    assert "**not run**" in section(page_of(known), "Figure 8")
    page = page_of(individually_clipped(known))
    assert "**reproduced** (same in 1 of 1" in section(page, "Figure 8")
    assert "**reproduced** (at most 0.0%)" in section(page, "Figure 8")
    assert "**not run** (one pair, -1.00 points)" in section(page, "Table 3")
    assert "also differ" not in page
    apart = page_of(individually_clipped(known, epochs=20))
    for number in ("Figure 8", "Table 3"):
        assert "also differ in epochs (20, None), and are not compared." in section(apart, number)
        assert "| MNIST, whole |" in section(apart, number)
        assert f"**{REPRODUCED}**" not in section(apart, number)
    assert "also differ" not in section(apart, "Figure 7")
    weak = individually_clipped(known)
    loss = weak.audits[f"mnist{INDIVIDUAL}"].default["loss"]
    loss.update(pearson_log_loss=0.02, pearson_interval={"low": -0.01, "high": 0.05})
    assert f"**{NOT_REPRODUCED}**" in section(page_of(weak), "Figure 7")  # the interval holds 0


def seeded_pairs(**changes):
    """What Table 3 has of few images, of four seeds."""
    results = {
        arm: [
            {
                "accuracy": 91.0 + seed / 10,
                "pearson": 0.95,
                "means": {"a": 1.0, "b": 2.0},
                "below": 0.3,
            }
            for seed in range(4)
        ]
        for arm in ("individual", "ordinary", "no_headroom")
    }
    for arm, change in changes.items():
        for result in results[arm]:
            result.update(change)
    return {"setting": "few images", "headroom": 0.1, "seeds": [1, 2, 3, 4], **results}


def test_seeded_pairs_of_few_images_are_judged_by_their_differences():
    def verdicts_with(**changes):
        found = {"table_3": {"mnist": {"source": "", "found": seeded_pairs(**changes)}}}
        page = page_of(Known({}, found))
        return [
            re.findall(r"verdict.*?\*\*(.*?)\*\*", section(page, number).split("MNIST, few |")[1])[
                :2
            ]
            for number in ("Figure 7", "Figure 8", "Table 3")
        ]

    assert verdicts_with() == [[REPRODUCED, REPRODUCED]] * 3
    assert verdicts_with(no_headroom={"pearson": 0.5})[0] == [REPRODUCED, DIFFERS]
    assert verdicts_with(individual={"means": {"a": 1.1, "b": 2.0}})[1] == [REPRODUCED, DIFFERS]
    assert verdicts_with(individual={"means": {"a": 3.0, "b": 2.0}})[1] == [NOT_REPRODUCED] * 2
    assert verdicts_with(no_headroom={"accuracy": 85.0})[2] == [REPRODUCED, NOT_REPRODUCED]
    same_clipping = verdicts_with(individual={"below": 0.0})
    assert all(REPRODUCED not in words for words in same_clipping)


def test_seeded_pairs_of_whole_runs_are_judged_likewise_and_need_no_arm_without_headroom():
    def page_with(**changes):
        found = {**seeded_pairs(**changes), "device": "cuda"}
        del found["no_headroom"]
        return page_of(Known({}, {"table_3_whole": {"mnist": {"source": "", "found": found}}}))

    for number, n in (("Figure 7", 1), ("Figure 8", 2), ("Table 3", 1)):
        part = section(page_with(), number)
        verdicts = re.findall(r"verdict.*?\*\*(.*?)\*\*", part.split("MNIST, whole, seeds |")[1])
        assert verdicts[:n] == [REPRODUCED] * n
        assert "on cuda" in part
        assert "without headroom" not in part
        assert "far smaller than the paper's" not in part
    lost = section(page_with(individual={"accuracy": 85.0}), "Table 3")
    assert f"**{NOT_REPRODUCED}**" in lost.split("MNIST, whole, seeds |")[1]


def test_the_page_names_runs_whose_audit_files_have_changed(known):
    file = tomllib.loads((ROOT / "audits" / "mnist.toml").read_text(encoding="utf-8"))["training"]
    other = changed(
        known, lambda summary: summary["run"]["declared"]["config"]["training"].update(file)
    )
    assert "Run before their audit files were changed" not in page_of(other)
    shorter = changed(
        other, lambda summary: summary["run"]["declared"]["config"]["training"].update(epochs=1)
    )
    assert "changed, and not since: mnist (epochs).\n" in page_of(shorter)


def test_the_page_counts_its_findings(known):
    page = page_of(known)
    counts = re.search(r"Of (\d+) findings.*?: (.*)\.", page)
    numbers = [int(part.split()[0]) for part in counts[2].split(", ")]
    assert sum(numbers) == int(counts[1])
    assert numbers[0] > 0
    empty = page_of(Known({}, {}))
    assert re.search(
        r"Of (\d+) findings.*?: 0 reproduced, 0 differs, 0 not reproduced, \1 not run", empty
    )


def test_a_guarantee_that_is_not_supported_says_so(known):
    status = known.audits["mnist"].default["guarantee"]["status"]
    assert status == "declared"
    assert "(declared) |" in render_results(known)
    sound = changed(known, lambda summary: summary["guarantee"].update(status="supported"))
    assert "(" not in render_results(sound).splitlines()[2].split("|")[4]


def test_a_refused_release_is_not_run(known):
    measured = copy.deepcopy(known.measured)
    measured["table_2"]["mnist"]["found"] = {"refused": "no guarantee"}
    assert "**not run** (refused: no guarantee)" in section(
        page_of(Known(known.audits, measured)), "Table 2"
    )


def test_what_was_measured_of_another_run_is_not_shown(known):
    other = changed(known, lambda summary: summary["run"]["recorder"].update(id="another"))
    text = page_of(other)
    assert verdicts(text, "Figure 1") == (NOT_RUN, NOT_RUN)
    assert f"**{NOT_RUN}**" in section(text, "Table 2").split("| MNIST |")[1]


def test_what_was_measured_of_another_account_is_not_shown(known):
    other = changed(known, lambda summary: summary["individual"].update(median=0.123))
    assert verdicts(page_of(other), "Figure 1") == (NOT_RUN, NOT_RUN)


def test_a_presets_audit_of_another_run_is_left_out(known, tmp_path):
    audit = known.audits["mnist"]
    other = copy.deepcopy(dict(audit.preset))
    for name, summary in (("mnist", audit.default), ("yu2023/preset/mnist", audit.preset)):
        (tmp_path / name).mkdir(parents=True)
        write_json(tmp_path / name / "audit.json", summary)
    assert set(read_audits(tmp_path)["mnist"].accounts) == {PRESET, DEFAULT}
    other["run"]["recorder"]["id"] = "another"
    write_json(tmp_path / "yu2023/preset/mnist" / "audit.json", other)
    assert set(read_audits(tmp_path)["mnist"].accounts) == {DEFAULT}


def test_results_go_between_their_markers(tmp_path):
    page = tmp_path / "results.md"
    page.write_text(
        "before\n<!-- results: x -->\nold\n<!-- end of results -->\nafter\n", encoding="utf-8"
    )
    write_results(page, "new\n")
    assert page.read_text(encoding="utf-8") == (
        "before\n<!-- results: x -->\nnew\n<!-- end of results -->\nafter\n"
    )
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(SystemExit):
        write_results(page, "new\n")


def test_the_committed_pages_are_the_generated_ones():
    """Where this fails after an audit was made again: python -m reports.yu2023 --write-only."""
    found = Known(read_audits(REPORTS), read_measured(REPORTS))
    assert (REPORTS / "yu2023" / "README.md").read_text(encoding="utf-8") == page_of(found)
    shown = re.search(
        r"<!-- results.*?-->\n(.*?)<!-- end of results -->",
        (ROOT / "docs/explanation/results.md").read_text("utf-8"),
        re.DOTALL,
    )
    assert shown[1] == render_results(found)
