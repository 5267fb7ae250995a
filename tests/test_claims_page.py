"""reports/claims and reports/papernot: written from committed files, each claim once, and each rule can fail."""

import copy
from collections import Counter
from pathlib import Path

import pytest

from indpriv._files import read_json
from reports.claims.register import (
    PAPERS,
    cells_of,
    claims_of,
    judged,
    paper,
    render,
    word_of,
)
from reports.papernot import page as papernot
from reports.shared.verdicts import NOT_RUN, WORDS

REPORTS = Path(__file__).parents[1] / "reports"


@pytest.fixture
def tutorial():
    return read_json(REPORTS / "papernot" / "papernot.json")


def test_the_committed_pages_are_the_generated_ones(tutorial):
    """Where this fails: python -m reports.papernot --write-only, then python -m reports.claims."""
    page = (REPORTS / "papernot" / "README.md").read_text(encoding="utf-8")
    assert page == papernot.render(tutorial)
    assert (REPORTS / "claims" / "README.md").read_text(encoding="utf-8") == render()


@pytest.mark.parametrize("name", PAPERS)
def test_a_claim_counts_once_and_says_what_would_run_it(name):
    claims = claims_of(name)
    assert max(Counter((each.item, each.text) for each in claims).values()) == 1
    assert {each.word for each in claims} <= set(WORDS)
    without = [each for each in claims if each.word == NOT_RUN and not each.how]
    assert not without, without


@pytest.mark.parametrize(
    ("name", "item"),
    [(name, one["item"]) for name in PAPERS for one in paper(name).get("table", ())],
)
def test_every_printed_cell_has_a_word(name, item):
    found = cells_of(name, item)
    one = next(each for each in paper(name)["table"] if each["item"] == item)
    assert found
    assert all((cell.ours is None) == (cell.word == NOT_RUN) for cell in found)
    assert "not_run" in one or all(cell.word != NOT_RUN for cell in found)


def test_what_the_pages_quote_of_a_paper_is_what_its_cells_say():
    accuracies = {
        (cell.row, cell.column): cell.printed
        for cell in cells_of("wei2021", "IV")
        if cell.row.startswith("MNIST")
    }
    assert accuracies["MNIST, DP-baseline", "4"] == 0.960
    assert accuracies["MNIST, dynS, not private", "32"] == 0.977
    errors = {(each.row, each.column): each.printed for each in cells_of("fedcdp", "VII")}
    assert errors["LFW, type 2, Fed-CDP(decay)", "error"] == 0.945


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        (None, "not run"),
        (1.01, "reproduced"),
        (1.05, "differs"),
        (1.5, "not reproduced"),
        (float("nan"), "not reproduced"),
    ],
)
def test_a_cell_is_judged_by_its_gap(ours, word):
    assert judged(ours, 1.0, {"close": 0.02, "fair": 0.1}) == word


def test_a_number_that_is_far_too_small_is_far_off():
    assert judged(4.0, 300.0, {"close": 0.25, "fair": 1.0}) == "not reproduced"
    assert judged(0.0, 0.3, {"close": 0.25, "fair": 1.0}) == "not reproduced"
    assert judged(0.0, 0.0, {"close": 0.25, "fair": 1.0}) == "reproduced"


def test_words_of_pages_become_the_four_words():
    assert word_of("reproduced (cyclic: not run)") == "reproduced"
    assert word_of("refuted") == "not reproduced"
    with pytest.raises(ValueError, match="no verdict"):
        word_of("computed; no rule")


@pytest.mark.parametrize(
    ("change", "claim", "word"),
    [
        ({"test_accuracy": 0.96}, "accuracy", "reproduced"),
        ({"test_accuracy": 0.93}, "accuracy", "differs"),
        ({"test_accuracy": 0.91}, "accuracy", "not reproduced"),
        ({"non_private_test_accuracy": None}, "without DP", "not run"),
        ({"non_private_test_accuracy": 0.98}, "without DP", "differs"),
        ({"non_private_test_accuracy": 0.95}, "without DP", "not reproduced"),
    ],
)
def test_rules_of_the_tutorial_can_fail(change, claim, word, tutorial):
    assert papernot.verdicts(tutorial | change)[claim][0] == word


def test_another_epsilon_is_not_that_of_the_tutorial(tutorial):
    other = copy.deepcopy(tutorial)
    assert papernot.verdicts(other)["epsilon"][0] == "reproduced"
    other["preset"]["worst_case_epsilon"] = 1.25
    assert papernot.verdicts(other)["epsilon"][0] == "not reproduced"


@pytest.mark.parametrize(
    ("accuracy", "epsilon", "word"),
    [
        (0.962, 3.004, "reproduced"),
        (0.95, 3.004, "differs"),
        (0.94, 3.004, "not reproduced"),
        (0.97, 3.03, "not reproduced"),
    ],
)
def test_the_second_setting_is_judged_by_epsilon_and_accuracy(accuracy, epsilon, word, tutorial):
    found = {"test_accuracy": accuracy, "preset": {"worst_case_epsilon": epsilon}}
    assert papernot.verdicts(tutorial | {"second": found})["second setting"][0] == word
    left = {name: value for name, value in tutorial.items() if name != "third"}
    assert papernot.verdicts(left)["third setting"][0] == "not run"


def test_the_index_has_every_page_and_the_counts_of_today():
    index = (REPORTS / "README.md").read_text(encoding="utf-8")
    pages = {path.parent.name for path in REPORTS.glob("*/README.md")}
    assert not {name for name in pages if f"({name}/README.md)" not in index}
    words = Counter(each.word for name in PAPERS for each in claims_of(name))
    counts = [words[word] for word in WORDS]
    shown = "of {} claims {} reproduced, {} differ, {} not reproduced, {} not run"
    assert shown.format(sum(counts), *counts) in index


def test_every_page_links_its_data_and_names_its_command():
    for page in REPORTS.glob("*/README.md"):
        name, text = page.parent.name, page.read_text(encoding="utf-8")
        assert "ade by `" in text or "ritten by `" in text, name
        data = page.parent / f"{name}.json"
        assert not data.is_file() or f"({name}.json)" in text, name
