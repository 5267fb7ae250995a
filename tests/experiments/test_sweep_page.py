"""The page of a sweep, from an audit whose figures are changed."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from audits.sweep.findings import TUNING, TrialResult, sweep_of
from audits.sweep.page import page_of
from indpriv.analysis.schedule import Curve
from indpriv.errors import InputError
from indpriv.report.page import render_markdown
from indpriv.report.report import print_whole
from summaries import summary_of
from synthetic import small_run


@pytest.fixture(scope="module")
def summary():
    return summary_of(*small_run())


def trial(summary, accuracies, smallest):
    curve = Curve((0, 10, 20), accuracies, (0.0, 1.0, 2.0))
    run = replace(summary.run, test_accuracy=accuracies[-1])
    schedule = replace(summary.schedule, curve=curve)
    return TrialResult(summary.replace(run=run, schedule=schedule), smallest)


@pytest.fixture
def found(summary):
    good = [trial(summary, (0.1, 0.5, 0.8), 0.5), trial(summary, (0.1, 0.7, 0.9), 0.7)]
    bad = [trial(summary, (0.1, 0.2, 0.3), 0.1), trial(summary, (0.1, 0.2, 0.6), 0.1)]
    return sweep_of("small", [({"max_grad_norm": 1.0}, good), ({"max_grad_norm": "<b>"}, bad)])


def test_curves_are_compared_where_every_run_came(found):
    assert (found.at_epsilon, found.at_accuracy) == (2.0, 0.3)
    good, bad = found.settings
    assert good.accuracy_at_epsilon.mean == pytest.approx(0.85)
    assert good.epsilon_at_accuracy.mean == pytest.approx((0.5 + 1 / 3) / 2)
    assert bad.epsilon_at_accuracy.mean == pytest.approx((2.0 + 1.25) / 2)
    assert good.figures["smallest_epsilon"].mean == pytest.approx(0.6)
    assert good.curve_accuracy == pytest.approx((0.1, 0.6, 0.85))


def test_gaps_are_of_the_groups_that_can_be_read(summary, found):
    (groups, *_) = summary.groups
    means = groups.rows["mean"][~groups.rows["too_small"]]
    figure = found.settings[0].figures[f"epsilon_gap: {groups.by}"]
    assert figure.mean == pytest.approx(max(means) - min(means))
    assert figure.interval.low == pytest.approx(figure.interval.high)


def test_the_page_escapes_and_says_what_tuning_costs(found, capsys):
    page = page_of(found)
    html = page.html()
    text = render_markdown(page.template, **page.values)
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "<svg" in html
    assert r"| 85.0 % \[21.5 %, 100.0 %\] |" in text
    for shown in (re.sub(r"<[^>]+>", "", html), text.replace("\\", "")):
        assert TUNING.split(";")[0] in shown
    print_whole(page, Console(width=200))
    assert "max_grad_norm = 1.0" in capsys.readouterr().out


def test_what_a_part_of_the_seeds_reached_has_no_mean(summary):
    runs = [trial(summary, (0.1, 0.5, 0.8), 0.5), trial(summary, (0.1, 0.2, 0.4), 0.5)]
    found = sweep_of("small", [({"momentum": 0.5}, runs)], at_accuracy=0.7)
    assert found.settings[0].epsilon_at_accuracy.mean is None
    page = page_of(found)
    assert "1 of 2 runs" in render_markdown(page.template, **page.values)


def test_settings_whose_epsilons_mean_other_things_say_which(summary):
    """A sweep over delta, or over batch sizes by whose updates n is told, compares unlike ones."""
    run = trial(summary, (0.1, 0.5, 0.8), 0.5)
    account = replace(summary.account, delta=1e-3, neighbouring="zero_out")
    other = replace(run, summary=run.summary.replace(account=account))
    found = sweep_of("small", [({"delta": 1e-5}, [run]), ({"delta": 1e-3}, [other])])
    meanings = [one.account.describe() for one in (run.summary, other.summary)]
    assert found.meaning == (f"{meanings[0]} (delta = 1e-05), and {meanings[1]} (delta = 0.001)")
    assert sweep_of("small", [({"delta": 1e-5}, [run, run])]).meaning == meanings[0]


def test_a_run_without_a_worst_case_at_checkpoints_is_refused(summary):
    void = summary.replace(schedule=replace(summary.schedule, curve=None))
    with pytest.raises(InputError, match="no worst case at its checkpoints"):
        sweep_of("small", [({"momentum": 0.5}, [TrialResult(void, 0.5)])])
