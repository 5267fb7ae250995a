import copy
import inspect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv._facts import Fact
from indpriv.analysis.attacks.attributes import measure_attribute
from indpriv.analysis.attacks.canaries import (
    measure_attack,
    measure_gradient_canaries,
    simulated_evidence,
)
from indpriv.analysis.attacks.rates import exceeds
from indpriv.analysis.distribution import describe
from indpriv.analysis.groups import Reversal
from indpriv.analysis.reconstruction import reconstruction_of
from indpriv.analysis.summary import BINS, TRIED, findings, nothing
from indpriv.attack_scores import AttackScores
from indpriv.audit.gate import _beside, judge
from indpriv.cli import run as run_command
from indpriv.errors import InputError
from indpriv.norm_log.evidence import CHECKS
from indpriv.norm_log.fields import StepSettings
from reconstructions import scores as reconstructed
from summaries import summary_of
from synthetic import epsilon_table, knowledge, small_run

STRICT = {
    "max_worst_case_epsilon": 2.0, "max_delta": 1e-5, "max_p99_epsilon": 2.0, "max_epsilon": 1.9, "min_coverage": 1.0,
    "unit": "example", "exact": True, "verified": True, "max_group_ratio": 100.0, "min_test_accuracy": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return small_run()


@pytest.fixture(scope="module")
def summary(run):
    return summary_of(*run)


@pytest.fixture
def content(summary):
    return json.loads(json.dumps(summary.to_json()))


def failed(content, **limits):
    return [condition.name for condition in judge(content, limits) if not condition.passed]


def test_a_good_audit_passes(content):
    assert all(condition.passed for condition in judge(content, STRICT))
    assert len(judge(content, STRICT)) > 10


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_worst_case_epsilon": 1.8999}, "worst-case epsilon"),
        ({"max_delta": 9.9e-6}, "delta"),
        ({"max_median_epsilon": 0.01}, "individual epsilon, median (exact)"),
        ({"max_p95_epsilon": 0.01}, "individual epsilon, p95 (exact)"),
        ({"max_p99_epsilon": 0.01}, "individual epsilon, p99 (exact)"),
        ({"max_epsilon": 1.8}, "individual epsilon, max (exact)"),
        ({"min_test_accuracy": 1.0}, "test accuracy"),
        ({"unit": "user"}, "unit of privacy"),
    ],
)
def test_each_limit_fails_alone(content, limits, name):
    assert failed(content, **limits) == [name]


def test_limits_on_other_audits(content):
    content["claim"], content["run"]["recorded_share"], content["guarantee"]["status"] = (
        "estimate",
        0.999,
        "declared",
    )
    assert failed(content) == []
    assert failed(content, exact=True) == ["claim"]
    assert failed(content, min_coverage=1.0) == ["steps recorded"]
    assert failed(content, verified=True) == ["guarantee checked"]


def test_a_limit_of_zero_is_a_limit_and_one_of_another_name_is_none(content):
    assert failed(content, max_epsilon=0.0) == ["individual epsilon, max (exact)"]
    assert failed(content, max_epsilon=None, exact=False) == []
    with pytest.raises(InputError, match="limit='max_epsilo'"):
        judge(content, {"max_epsilo": 1.0})


def test_a_limit_is_inclusive_and_compares_what_was_computed(content):
    worst = content["guarantee"]["worst_case_epsilon"]
    assert failed(content, max_worst_case_epsilon=worst) == []
    assert failed(content, max_worst_case_epsilon=math.nextafter(worst, 0)) == [
        "worst-case epsilon"
    ]


@given(
    value=st.floats(0.001, 30),
    limit=st.one_of(st.floats(0.001, 30).map(lambda limit: round(limit, 3)), st.just(1.2345678)),
    most=st.booleans(),
)
def test_a_figure_stands_on_its_side_of_the_limit_that_was_typed(value, limit, most):
    """A rounded limit would show one that nobody typed, and a figure that fails within it."""
    found, asked = _beside(value, limit, "eps", most)
    assert asked == f"at {'most' if most else 'least'} {limit:.15g}"
    assert (
        (float(found) <= limit) == (value <= limit)
        if most
        else (float(found) >= limit) == (value >= limit)
    )


def test_limits_are_shown_as_they_were_typed(content):
    limits = {"max_worst_case_epsilon": 3.0000001, "min_test_accuracy": 0.10009, "min_coverage": 1}
    limits |= {"max_group_ratio": 100.00001, "max_delta": 1.23456789e-5}
    asked = {one.name: one.asked for one in judge(content, limits)}
    assert asked["worst-case epsilon"] == "at most 3.0000001"
    assert asked["test accuracy"] == "at least 10.009 %"
    assert asked["steps recorded"] == "at least 100 %"
    assert asked["delta"] == "at most 1.23456789e-05"
    assert "at most 100.00001" in asked.values()


def test_a_limit_that_holds_only_between_two_examples_fails(run):
    """19 of 20 people have 1, and a line to the last one passes there at 1.2."""
    summary = summary_of(*run)
    values = np.append(np.ones(19), 5.0)
    between = np.quantile(values, 0.95)
    found = summary.replace(individual=describe(epsilon_table(values, worst_case=9.0)))
    assert 1 < between < found.individual.p95 == 5
    assert failed(found.to_json(), max_p95_epsilon=between) == ["individual epsilon, p95 (exact)"]
    assert failed(found.to_json(), max_p95_epsilon=5.0) == []


def test_group_ratios(content):
    ratios = [table["ratio"]["value"] for table in content["groups"]]
    assert len(failed(content, max_group_ratio=max(ratios))) == 0
    assert len(failed(content, max_group_ratio=max(ratios) * 0.999)) == 1
    content["groups"][0]["ratio"] |= {"value": None}
    assert len(failed(content, max_group_ratio=1e9)) == 1
    for table in content["groups"]:
        table["ratio"] = None
    with pytest.raises(
        InputError, match=r"group_ratio: by .*, no two groups have 10 training exam"
    ):
        judge(content, {"max_group_ratio": 2.0})
    content["groups"] = []
    with pytest.raises(InputError, match="compares no groups"):
        judge(content, {"max_group_ratio": 2.0})


def test_a_run_that_was_seeded(run):
    assert "guarantee" in failed(
        summary_of(*run, evidence={"recorder": {"seeded": True}}).to_json()
    )


LENGTH = StepSettings.from_values(60, 1.0, 1.0, 0.1)


def above_the_worst_case(model="dp"):
    """An attack that names every member, beside a guarantee of next to nothing."""
    member = np.arange(400) < 200
    scores = AttackScores(member.astype(float), member, "an attack")
    row = {"attack": "rmia", "title": "RMIA", "model": model, "references": 1, "n_members": 200}
    row |= dict.fromkeys(("sees", "source", "caveat"), "") | {"n_others": 200}
    row |= {"adversary": scores.adversary}
    above = model == "dp" and exceeds(scores, (0.1, 1e-5), tests=1)
    return {"attacks": TRIED.of_rows([row | {"above_worst_case": above}])}


def bin_above_the_worst_case(above_worst_case=True):
    row = {
        "attack": "a threshold",
        "target_fpr": 0.01,
        "threshold": 0.0,
        "above": 0.0,
        "up_to": 1.0,
    }
    row |= {"n_members": 9, "n_others": 9, "tpr": 1.0, "fpr": 0.0, "reference": 0.1}
    row |= {"above_reference": True, "above_worst_case": above_worst_case}
    return {"attack_by_epsilon": BINS.of_rows([row])}


def attribute_above_the_ceiling():
    found = measure_attribute(
        knowledge(leak=2.0), "with_imputation", model="dp", groups={}, ceiling=0.05
    )
    return {"attribute_attacks": found}


def reconstruction_above_its_ceiling():
    return {"reconstruction": (reconstruction_of(reconstructed(np.arange(200) < 60, 1.0)),)}


def bin_of_reconstructions_above_its_ceiling():
    epsilon = np.repeat([1.0, 2.0, 3.0, 4.0], 250)
    found = reconstruction_of(reconstructed(np.arange(1000) >= 890, 1.0), epsilon)
    assert not found.above_ceiling
    return {"reconstruction": (found,)}


def canaries_that_prove_more():
    member = np.arange(400) % 2 == 0
    scores = AttackScores(member.astype(float), member, "canaries", fair_coins=True)
    return {"canaries": measure_attack(scores, ceiling=1.9)}


def gradient_canaries_that_disagree(noise=0.5):
    rng, member = np.random.default_rng(0), np.arange(400) % 2 == 0
    actual = StepSettings.from_values(60, noise, 1.0, 0.1)
    scores = AttackScores(
        scores=simulated_evidence(actual, 1.0, member, rng),
        member=member,
        method="simulated",
        groups=np.full(400, "1", dtype=object),
        fair_coins=True,
        adversary="updates",
    )
    return {"gradient_canaries": measure_gradient_canaries(scores, LENGTH)}


def without_a_guarantee(status):
    return lambda summary: {"guarantee": replace(summary.guarantee, status=status)}


def delta_above_1_over_n(summary):
    return {"guarantee": replace(summary.guarantee, delta_times_n=1.0)}


def a_refuted_line(summary):
    first, *rest = summary.guarantee.lines
    lines = (replace(first, status="refuted"), *rest)
    return {"guarantee": replace(summary.guarantee, status="declared", lines=lines)}


def a_failed_check(summary):
    return {"checks": (*summary.checks, CHECKS["records"].fact("failed", "odd"))}


# For each finding, what it may find against the account: changes of an audit that is sound.
CASES = {
    "verdict": [
        without_a_guarantee("void"),
        without_a_guarantee("unproven"),
        delta_above_1_over_n,
        a_refuted_line,
    ],
    "checks": [a_failed_check],
    "membership": [lambda _: above_the_worst_case()],
    "by_epsilon": [lambda _: bin_above_the_worst_case()],
    "attributes": [lambda _: attribute_above_the_ceiling()],
    "canaries": [lambda _: canaries_that_prove_more()],
    "gradient_canaries": [lambda _: gradient_canaries_that_disagree()],
    "reconstruction": [
        lambda _: reconstruction_above_its_ceiling(),
        lambda _: bin_of_reconstructions_above_its_ceiling(),
    ],
}


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, changes in CASES.items() for change in changes]
)
def test_each_alarm_fails_alone(summary, name, change):
    finding = next(one for one in findings() if one.name == name)
    found = summary.replace(**change(summary))
    assert len(list(finding.alarms(found))) == 1
    assert failed(json.loads(json.dumps(found.to_json()))) == [finding.watched]
    others = [one for one in findings() if one.name != name]
    assert not [text for one in others for text in one.alarms(found)]


def test_every_finding_with_alarms_is_watched_and_has_a_case():
    watched = {one.name for one in findings() if one.alarms is not nothing}
    assert watched == set(CASES) == {one.name for one in findings() if one.watched}
    assert len({one.watched for one in findings() if one.watched}) == len(watched)
    for one in findings():  # each sentence that its code can say is tried
        if one.name in watched:
            said = inspect.getsource(one.alarms).count("yield") or 1
            assert len(CASES[one.name]) >= said, one.name


def small_groups(summary):
    table = summary.groups[0]
    rows = table.rows.assign(too_small=True)
    return summary.replace(groups=(replace(table, rows=rows), *summary.groups[1:]))


def reversed_groups(summary):
    table = summary.groups[0]
    reversals = (Reversal("1", 0.001),)
    return summary.replace(groups=(replace(table, reversals=reversals), *summary.groups[1:]))


def duplicates(summary):
    twins = Fact("duplicates", "scope", "Duplicates", "failed", "some rows are alike")
    hazards = (*summary.hazards, twins)
    return summary.replace(hazards=hazards)


def a_place_to_look(summary):
    found = bin_above_the_worst_case(above_worst_case=False)
    return summary.replace(**found)


def canaries_that_agree(summary):
    found = gradient_canaries_that_disagree(noise=1.0)
    return summary.replace(**found)


def test_canaries_too_few_to_judge_agree_with_nothing(summary):
    found = gradient_canaries_that_disagree()["gradient_canaries"]
    few = summary.replace(gradient_canaries=replace(found, lengths=(), left_out=("too few",)))
    names = [one.name for one in judge(json.loads(json.dumps(few.to_json())), {})]
    assert "gradient canaries that contradict the account" in names
    assert not any("canaries agree" in name for name in names)


def an_attack_on_the_baseline(summary):
    found = above_the_worst_case("non_dp")
    return summary.replace(**found)


@pytest.mark.parametrize(
    "note",
    [
        small_groups, reversed_groups, duplicates, a_place_to_look, canaries_that_agree,
        an_attack_on_the_baseline,
    ],
)  # fmt: skip
def test_a_note_fails_no_gate(summary, note):
    assert failed(json.loads(json.dumps(note(summary).to_json()))) == []


@pytest.mark.parametrize(
    "limits",
    [
        {"max_p99_epsilon": math.nan},
        {"max_epsilon": math.inf},
        {"min_coverage": 100.0},
        {"max_delta": -1e-5},
    ],
)
def test_limits_that_limit_nothing_are_refused(content, limits):
    with pytest.raises(InputError, match=r"^--(max|min) \w+=.* is not in \[0, "):
        judge(content, limits)


def test_a_unit_that_no_run_has_is_refused(content):
    with pytest.raises(InputError, match="--require unit='person' is not known"):
        judge(content, {"unit": "person"})


@pytest.mark.parametrize(
    "path", [("guarantee", "status"), ("guarantee", "delta_times_n"), ("checks",), ("claim",)]
)
def test_what_is_missing_never_passes(content, path):
    broken = copy.deepcopy(content)
    part = broken
    for name in path[:-1]:
        part = part[name]
    for value in (None, math.nan, True):
        part[path[-1]] = value
        with pytest.raises(InputError, match="make the audit again"):
            judge(broken, {"exact": True})
    del part[path[-1]]
    with pytest.raises(InputError, match=r"lacks .*make the audit again"):
        judge(broken, {"exact": True})


def test_another_schema_is_refused(content):
    with pytest.raises(InputError, match="schema_version=7"):
        judge(content | {"schema_version": 7}, {})


@pytest.fixture
def audit_dir(content, tmp_path):
    (tmp_path / "audit.json").write_text(json.dumps(content))
    return str(tmp_path)


def test_exit_codes(audit_dir, capsys):
    command = [
        "gate",
        audit_dir,
        "--max",
        "worst_case_epsilon=8",
        "--max",
        "p99_epsilon=6",
        "--min",
        "coverage=1.0",
    ]
    assert run_command(command) == 0
    assert run_command([*command, "--max", "delta=1e-7"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert run_command([*command, "--max", "epsilon=nan"]) == 2
    assert run_command(["gate", audit_dir + "/nowhere", "--max", "delta=1"]) == 2
    assert "make an audit first" in " ".join(capsys.readouterr().err.split())


def test_a_log_shows_no_figure_of_the_data_unless_asked(audit_dir, content, capsys):
    command = [
        "gate",
        audit_dir,
        "--max",
        "p99_epsilon=0.5",
        "--max",
        "worst_case_epsilon=8",
        "--json",
    ]
    assert run_command(command) == 1
    quiet = json.loads(capsys.readouterr().out)
    found = {row["name"]: row for row in quiet["conditions"]}
    assert found["individual epsilon, p99 (exact)"] == {
        "name": "individual epsilon, p99 (exact)", "passed": False, "found": "withheld", "asked": "at most 0.5",
        "known": "believed",
    }  # fmt: skip
    assert found["attacks above the worst case"]["found"] == "withheld"
    assert found["guarantee"]["found"] == "supported"
    assert found["worst-case epsilon"]["found"] == "1.90"
    assert run_command([*command, "--figures"]) == 1
    assert "withheld" not in capsys.readouterr().out
