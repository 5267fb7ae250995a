import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from indpriv.analysis.attacks.by_epsilon import AttackByEpsilon, EpsilonBin, ThresholdBins
from indpriv.analysis.summary import FidelityFindings
from indpriv.attack_scores import AttackScores
from indpriv.audit.gate import Limits, judge
from indpriv.cli import run as run_command
from indpriv.errors import InputError
from indpriv.norm_log.evidence import RECORDS
from summaries import summary_of
from synthetic import small_run

STRICT = Limits(
    max_worst_case_epsilon=2.0, max_delta=1e-5, max_p99_epsilon=2.0, max_epsilon=1.9, min_coverage=1.0, unit="example",
    exact=True, verified=True, max_group_ratio=100.0, min_test_accuracy=0.1,
)  # fmt: skip


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
    return [
        condition.name for condition in judge(content, Limits(**limits)) if not condition.passed
    ]


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


def test_a_limit_is_inclusive_and_compares_what_was_computed(content):
    worst = content["guarantee"]["worst_case_epsilon"]
    assert failed(content, max_worst_case_epsilon=worst) == []
    assert failed(content, max_worst_case_epsilon=math.nextafter(worst, 0)) == [
        "worst-case epsilon"
    ]


def test_group_ratios(content):
    ratios = [table["ratio"]["value"] for table in content["groups"]]
    assert len(failed(content, max_group_ratio=max(ratios))) == 0
    assert len(failed(content, max_group_ratio=max(ratios) * 0.999)) == 1
    content["groups"][0]["ratio"] |= {"value": None}
    assert len(failed(content, max_group_ratio=1e9)) == 1
    content["groups"] = []
    with pytest.raises(InputError, match="compares no groups"):
        judge(content, Limits(max_group_ratio=2.0))


@pytest.mark.parametrize("status", ["void", "unproven"])
def test_without_a_guarantee_nothing_passes(content, status):
    content["guarantee"]["status"] = status
    assert failed(content) == ["guarantee"]


def test_a_run_that_was_seeded(run):
    assert "guarantee" in failed(
        summary_of(*run, evidence={"recorder": {"seeded": True}}).to_json()
    )


def test_what_is_always_asked(run, summary):
    member = np.arange(400) % 2 == 0
    canaries = AttackScores(member.astype(float), member, "canaries", fair_coins=True)
    proven = summary_of(*run, evidence={"canaries": canaries}, fidelity=FidelityFindings())
    assert proven.attacks.canaries.overall.bound.epsilon > proven.guarantee.worst_case_epsilon
    bin_above = EpsilonBin(0.0, 1.0, 9, 9, 1.0, None, 0.0, 0.1, 0.1, True, True)
    bins = (ThresholdBins(0.01, 0.0, (bin_above,)),)
    by_epsilon = AttackByEpsilon("a threshold", 1.9, 1e-5, 0.95, 0, bins)
    found = replace(
        summary,
        guarantee=replace(summary.guarantee, delta_times_n=1.0),
        attacks=replace(proven.attacks, by_epsilon=by_epsilon),
        notes=replace(summary.notes, checks=(*summary.notes.checks, RECORDS.failed("odd"))),
    )
    assert failed(found.to_json()) == [
        "delta times n", "evidence", "epsilon that canaries prove", "attacks above the worst case"
    ]  # fmt: skip
    harmless = replace(bin_above, above_worst_case=False)
    harmless = replace(by_epsilon, thresholds=(ThresholdBins(0.01, 0.0, (harmless,)),))
    quiet = replace(summary, attacks=replace(summary.attacks, by_epsilon=harmless))
    assert failed(quiet.to_json()) == []


@pytest.mark.parametrize(
    "limits",
    [
        {"max_p99_epsilon": math.nan},
        {"max_epsilon": math.inf},
        {"min_coverage": 100.0},
        {"max_delta": -1e-5},
    ],
)
def test_limits_that_limit_nothing_are_refused(limits):
    with pytest.raises(InputError, match=r"^--\w+-\w+.* is not a"):
        Limits(**limits)


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
            judge(broken, Limits(exact=True))
    del part[path[-1]]
    with pytest.raises(InputError, match=r"lacks .*make the audit again"):
        judge(broken, Limits(exact=True))


def test_another_schema_is_refused(content):
    with pytest.raises(InputError, match="schema_version=7"):
        judge(content | {"schema_version": 7}, Limits())


@pytest.fixture
def audit_dir(content, tmp_path):
    (tmp_path / "audit.json").write_text(json.dumps(content))
    return str(tmp_path)


def test_exit_codes(audit_dir, capsys):
    command = [
        "gate",
        audit_dir,
        "--max-worst-case-epsilon",
        "8",
        "--max-p99-epsilon",
        "6",
        "--min-coverage",
        "1.0",
    ]
    assert run_command(command) == 0
    assert run_command([*command, "--max-delta", "1e-7"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert run_command([*command, "--max-epsilon", "nan"]) == 2
    assert run_command(["gate", audit_dir + "/nowhere"]) == 2
    assert "make an audit first" in " ".join(capsys.readouterr().err.split())


def test_a_log_shows_no_figure_of_the_data_unless_asked(audit_dir, content, capsys):
    command = [
        "gate",
        audit_dir,
        "--max-p99-epsilon",
        "0.5",
        "--max-worst-case-epsilon",
        "8",
        "--json",
    ]
    assert run_command(command) == 1
    quiet = json.loads(capsys.readouterr().out)
    found = {row["name"]: row for row in quiet["conditions"]}
    assert found["individual epsilon, p99 (exact)"] == {
        "name": "individual epsilon, p99 (exact)", "passed": False, "found": "withheld", "asked": "at most 0.5"
    }  # fmt: skip
    assert found["delta times n"]["found"] == "withheld"
    assert found["worst-case epsilon"]["found"] == "1.90"
    assert run_command([*command, "--figures"]) == 1
    assert "withheld" not in capsys.readouterr().out
