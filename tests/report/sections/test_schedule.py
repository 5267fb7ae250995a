from dataclasses import replace

from indpriv.analysis.schedule import Curve
from indpriv.report.renderers.html import render_html
from indpriv.report.renderers.markdown import render_markdown
from indpriv.report.sections.schedule import schedule

CURVE = Curve((0, 10), (0.1, 0.9), (0.0, 2.0))


def test_a_run_whose_settings_stay_as_they_are_has_no_section(summary):
    assert not summary.schedule.moves
    assert schedule(summary) is None


def test_the_section_shows_settings_accuracy_and_rules_that_are_no_bounds(summary):
    moved = replace(summary.schedule, max_grad_norm=(4.0, 2.0), noise_multiplier=(1.0, 1.0))
    moved = replace(moved, steps=(0, 1), noise_std=(4.0, 2.0), curve=CURVE)
    changed = summary.replace(schedule=moved)
    text, page = render_markdown(changed), render_html(changed)
    assert "### Noise and clipping over training" in text
    assert "| 1.00 | 50 % |" in text
    assert "first reached" in text.lower()
    for words in ("moments accountant of 2017", "which are not bounds", "optimal composition"):
        assert words in page
    void = changed.replace(schedule=replace(moved, curve=replace(CURVE, epsilon=())))
    assert "first reached" not in render_markdown(void).lower()
