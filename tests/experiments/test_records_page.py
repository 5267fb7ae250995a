"""The page of an advice with runs on subsets: every kind of answer."""

import pytest
from rich.console import Console

from audits.advice.records import SubsetReading, records_needed
from audits.advice.records_page import records_page
from audits.advice.subsets import LINE_GOES_ON, AdviceOnRecords, GroupOnRecords
from indpriv.analysis.advice import Remedy
from indpriv.analysis.disclosures import Range
from indpriv.analysis.guarantee import Guarantee
from indpriv.analysis.statistics import Interval
from indpriv.report.formats import CONSTANTS
from indpriv.report.page import render_markdown
from indpriv.report.report import print_whole

SOME = Remedy(1.501, 1.2, None, 0.99, 1.2)


def records(power, n=100, runs=6):
    shares = (0.25, 0.5, 1.0, 0.25, 0.5, 1.0)[:runs]
    found = [
        SubsetReading(share, seed // 3, round(4000 * share), n, 2.0 * share**power)
        for seed, share in enumerate(shares)
    ]
    return records_needed(found, 4000, 1.0, lambda factor: 2.0)


def group(name, needed, by="race", n=100):
    return GroupOnRecords(by, name, n, n < 10, 2.0, Interval(1.9, 2.1), SOME, None, needed)


@pytest.fixture
def found():
    groups = (
        group("all", records(-0.5), by=None, n=4000),
        group("slow", records(-0.1)),
        group("rises", records(0.2)),
        group("few", records(-0.5, n=5), n=5),
    )
    guarantee = Guarantee(2.0, 1e-5, 0.04, "declared", "It holds.", (), None, (), "none")
    same = Range(1.0, 1.0)
    text = ("small", "delta 1e-5", "examples", "exact", "Every step was recorded.")
    return AdviceOnRecords(*text, 1.0, 0.95, guarantee, same, same, "Not clipped.", groups)


def test_every_kind_of_answer(found):
    page = records_page(found)
    text = render_markdown(page.template, **page.values).replace("\\", "")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        *("## More noise, or a lower clipping norm", "## More records"),
    ]
    assert "| > 40,000 | > 10.00 |" in text
    assert "| does not fall | does not fall |" in text
    assert "| unknown | unknown |" in text
    first = next(line for line in text.splitlines() if line.startswith("| all |") and "16," in line)
    number = int(first.split("|")[5].split()[0].replace(",", ""))
    assert 16000 <= number <= 16000 * 1.01 + 1


def test_what_the_line_assumes_is_said_everywhere(found, capsys):
    written = found.to_json()
    assert written["assumptions"] == list(found.assumptions)
    assert written["assumptions"][-1] == LINE_GOES_ON
    assert [one["records"]["status"] for one in written["groups"]] == [
        *("found", "beyond", "rises", "unknown"),
    ]
    print_whole(records_page(found), Console(width=250))
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(LINE_GOES_ON) == 1
    assert (
        shown.index(CONSTANTS["prediction"])
        < shown.index("needed in all")
        < shown.index(LINE_GOES_ON)
    )
