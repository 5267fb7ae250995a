from dataclasses import replace

from indpriv.report.renderers.markdown import render_markdown


def test_r_with_a_floor_is_shown_where_it_differs(summary):
    alike = replace(summary.loss, pearson_with_floor=summary.loss.every.pearson)
    assert "below 0.001 nats" not in render_markdown(summary.replace(loss=alike))
    other = replace(summary.loss, pearson_with_floor=0.12, pearson_with_floor_interval=None)
    text = render_markdown(summary.replace(loss=other))
    assert "With every loss below 0.001 nats raised to it, r over all is 0.12." in text
