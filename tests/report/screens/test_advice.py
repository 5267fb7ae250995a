"""The page of an advice: every kind of answer, rounding, and texts of the data."""

from dataclasses import replace

import pytest
from rich.console import Console

from indpriv.analysis.advice import Advice, GroupAdvice, Remedy
from indpriv.analysis.disclosures import Range
from indpriv.analysis.guarantee import Guarantee
from indpriv.analysis.statistics import Interval
from indpriv.report.formats import CONSTANTS
from indpriv.report.page import render_markdown
from indpriv.report.report import advice_page, print_whole

REACHED = Remedy(1.0, 1.0, 1.0, 0.9, 3.0)
BEYOND = Remedy(None, None, None, None, None)


def group(name, noise, clipping, by="race", n=100):
    return GroupAdvice(by, name, n, n < 10, 2.0, Interval(1.9, 2.1), noise, clipping)


@pytest.fixture
def found():
    some, lower = Remedy(1.501, 1.2, None, 0.99, 1.2), Remedy(0.3219, 0.5, 0.2, 0.99, 1.3)
    groups = (
        group("all", some, lower, by=None, n=4000),
        group("<b>x</b>", some, lower),
        group("beyond", BEYOND, BEYOND),
        group("few", REACHED, REACHED, n=5),
    )
    guarantee = Guarantee(2.0, 1e-5, 0.04, "declared", "It holds.", (), None, (), "none")
    same = Range(1.0, 1.0)
    text = ("small", "delta 1e-5", "examples", "exact", "Every step was recorded.")
    return Advice(*text, 1.0, 0.95, guarantee, same, same, "", groups)


def markdown(found):
    page = advice_page(found)
    return render_markdown(page.template, **page.values)


def test_every_kind_of_answer(found):
    text = markdown(found).replace("\\", "")
    assert "| 1.51 [1.20, > 10 times] |" in text  # noise up
    assert "| 0.321 [0.200, 0.500] |" in text  # clipping norm down
    assert "| > 10 times | – | none | – |" in text
    assert "few (too few)" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## More noise, or a lower clipping norm"
    ]
    assert not any(sentence.startswith("Records") for sentence in found.assumptions)
    assert found.to_json()["assumptions"] == list(found.assumptions)


def test_texts_of_the_data_stay_text(found, capsys):
    page = advice_page(found)
    html = page.html()
    assert "<b>x</b>" not in html
    assert "&lt;b&gt;x" in html
    print_whole(page, Console(width=250))
    shown = " ".join(capsys.readouterr().out.split())
    assert "<b>x</b>" in shown
    assert CONSTANTS["prediction"] in shown


def test_settings_that_changed_in_the_run_are_factors(found):
    moved = replace(found, noise_multiplier=Range(0.8, 1.2))
    text = markdown(moved)
    assert "× 1.51" in text
    assert "0.8 to 1.2" in text
