"""reports/extraction/README.md: it is written from its figures, and each rule can fail."""

import copy
from pathlib import Path

import pytest

from indpriv._files import read_json
from reports.extraction.page import (
    ATTRIBUTES,
    ATTRIBUTES_HIDDEN,
    HIDDEN,
    MEMORISED,
    NULL,
    RULES,
    render,
    verdicts,
)

REPORTS = Path(__file__).parents[1] / "reports"


@pytest.fixture
def known():
    return read_json(REPORTS / "extraction" / "extraction.json")


def words(figures):
    return {name: word for name, (word, _) in verdicts(figures).items()}


def test_the_page_is_written_from_its_figures(known):
    assert (REPORTS / "extraction" / "README.md").read_text(encoding="utf-8") == render(known)


def test_two_null_tests_failed_and_the_page_says_so(known):
    found = verdicts(known)
    assert list(found) == list(RULES)
    assert found[NULL][0] == "failed"
    assert found[NULL][1].startswith("2 of 6 below 0.05")
    uniform = copy.deepcopy(known)
    for run in uniform["secrets"]:
        run["control_p_value"] = 0.3
    assert words(uniform)[NULL] == "passed"


@pytest.mark.parametrize(
    ("change", "finding", "word"),
    [
        (lambda row: row.update(extracted=row["extracted"] // 2), MEMORISED, "in part"),
        (lambda row: row.update(extracted=0), MEMORISED, "not shown"),
        (lambda row: row.update(extracted=1), HIDDEN, "not shown"),
        (lambda row: row["p_value"] and row.update(p_value=1e-6), HIDDEN, "refuted"),
    ],
)
def test_rules_of_secrets_can_fail(change, finding, word, known):
    assert words(known)[finding] == "shown"
    for run in known["secrets"]:
        for row in run["rows"]:
            change(row)
    assert words(known)[finding] == word


@pytest.mark.parametrize(
    ("part", "model", "low", "finding", "word"),
    [
        ("control", None, 0.1, ATTRIBUTES, "shown"),
        ("control", None, -0.1, ATTRIBUTES, "not shown"),
        ("attributes", "non_dp", 0.001, ATTRIBUTES_HIDDEN, "shown"),
        ("attributes", "non_dp", -0.1, ATTRIBUTES_HIDDEN, "not shown"),  # without power
        ("attributes", None, 0.001, ATTRIBUTES_HIDDEN, "not shown"),
        ("attributes", "dp", 0.9, ATTRIBUTES_HIDDEN, "refuted"),
    ],
)
def test_rules_of_attributes_can_fail(part, model, low, finding, word, known):
    assert words(known)[ATTRIBUTES] == "shown"
    assert words(known)[ATTRIBUTES_HIDDEN] == "not shown"
    for row in known[part]:
        if model in (None, row["model"]):
            row["low"] = low
    assert words(known)[finding] == word
