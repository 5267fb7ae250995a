from indpriv.analysis.schedule import Curve, ScheduleFindings
from indpriv.report.figures import schedule


def test_a_panel_for_noise_clipping_and_accuracy():
    settings = (4.0, 3.0), (2.0, 1.0), (8.0, 3.0)
    svg = schedule(ScheduleFindings((0, 9), *settings, Curve((0, 10), (0.1, 0.9), (0.0, 2.0))))
    for title in ("noise standard deviation", "clipping norm", "test accuracy"):
        assert title in svg
    without = schedule(ScheduleFindings((0, 9), *settings))
    assert svg.count("<clipPath") == without.count("<clipPath") + 1 == 3
    assert schedule(ScheduleFindings((0,), (4.0,), (2.0,), (8.0,))) == ""
