import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv._formatting import (
    FORMATS,
    clean,
    format_cost,
    format_delta,
    format_edges,
    format_epsilon,
    format_interval,
    format_lower_bound,
    format_number,
    format_p_value,
    format_rows,
    format_share,
    format_share_up,
)
from indpriv.analysis.statistics import Interval
from reports.shared.rates import limit, number

NOISE = 2e-12  # relative, or of 1: what a float can be off by is not shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_epsilon(2.9961), "3.00"),
        (format_epsilon(0.04741), "0.048"),
        (format_delta(0.01), "0.01"),
        (format_delta(1 / 60001), "1.66664e-5"),
        (format_edges([0.0, 0.075, 0.15]), ["0.000", "0.075", "0.150"]),
        (format_edges([0.0, 0.0021]), ["0.0000", "0.0021"]),
        (format_rows(1, 1), "1"),
        (format_rows(1001, 2000), "1,001 to 2,000"),
        (format_share(0.1719), "17 %"),
        (format_share(0.0004), "< 1 %"),
        (format_share(0.9997), "> 99 %"),
        (format_share(0.924, 1), "92.4 %"),
        (format_share(None), "–"),
        (format_share_up(0.20041), "20.1 %"),
        (format_share_up(0.01), "1 %"),
        (format_share_up(1.0), "100 %"),
        (format_number(0.85123), "0.851"),
        (format_number(32561.0), "32,561"),
        (format_number(None), "–"),
        (format_p_value(0.001), "0.0010"),
        (format_p_value(0.0312), "0.032"),
        (format_p_value(0.9999), "1.00"),
        (format_lower_bound(1.239), "1.23"),
        (format_lower_bound(0.0), "0"),
        (format_interval(1.234, 1.561), "[1.23, 1.57]"),
        (format_interval(0.5, 1.0), "[0.50, 1.00]"),
        (format_interval(0.99, 1e304), "[0.99, no limit]"),
        (format_cost(1.25, 5.0), "1.2 s of norm passes beside 5.0 s of training (25 %)"),
        (clean("a\x1b[2Jb\u202ec\nd"), "a\ufffd[2Jb\ufffdc\ufffdd"),
    ],
)
def test_figures_and_texts_as_they_are_shown(shown, expected):
    assert shown == expected


@given(st.floats(1e-12, 1e9))
def test_an_epsilon_is_never_shown_smaller_than_it_is(value):
    for form in ("eps", limit):
        shown = float(FORMATS[form](value) if isinstance(form, str) else form(value))
        assert value * (1 - NOISE) - NOISE * (form == limit) <= shown <= value + 0.101
    assert float(FORMATS["up"](min(value, 1.0)).rstrip(" %")) >= 100 * min(value, 1.0) * (1 - NOISE)


@pytest.mark.parametrize("form", [form for form in FORMATS if "span" in form])
def test_an_interval_with_an_unknown_end_is_a_dash(form):
    for ends in ((math.nan, 1.0), (0.0, math.nan)):
        assert FORMATS[form](Interval(*ends)) == "–"


@given(st.floats(0, 1e9))
def test_a_lower_bound_is_never_shown_larger_than_it_is(value):
    assert value - 0.0101 <= float(FORMATS["least"](value)) <= value + NOISE * max(1, value)


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_an_interval_holds_what_it_holds_when_it_is_shown(one, other):
    """Of an interval to nearest, one end in two would be inside the true one."""
    low, high = min(one, other), max(one, other)
    scales = {"span": 1, "span3": 1, "percent_span": 100, "percent_span2": 100, "points_span": 100}
    shown = {form: FORMATS[form](Interval(low, high)) for form in scales}
    shown |= {"page": number(0.0, {"low": low, "high": high}).removeprefix("0.0000 ")}
    shown |= {"per cent": number(0.0, {"low": low, "high": high}, percent=True)[5:]}
    for form, text in shown.items():
        ends = [float(end) for end in re.findall(r"[-+]?\d+\.\d+", text)]
        scale = scales.get(form, 100 if form == "per cent" else 1)
        assert len(ends) == 2, text
        assert ends[0] <= scale * low + scale * NOISE, form
        assert ends[1] >= scale * high - scale * NOISE, form
        assert ends[1] - ends[0] <= scale * (high - low) + 0.21


def test_epsilons_as_people_read_them():
    cases = {
        3.0: "3.00",
        2.9999: "3.00",
        3.0001: "3.01",
        0.0999: "0.100",
        0.0041: "0.0041",
        0.00411: "0.0042",
        0.0: "0",
    }
    assert {value: format_epsilon(value) for value in cases} == cases
    assert format_epsilon(1.55 + 1e-15) == "1.55"
    assert format_epsilon(None) == "–"


@given(st.floats(0, 1), st.integers(0, 2))
def test_nobody_is_rounded_away(value, digits):
    shown = format_share(value, digits)
    assert (shown == f"{0:.{digits}f} %") == (value == 0)
    assert (shown == f"{100:.{digits}f} %") == (value == 1)


@given(st.floats(1e-300, 1, exclude_max=True))
def test_a_delta_is_never_shown_smaller_than_it_is(value):
    assert value <= float(format_delta(value)) <= value * (1 + 1.1e-5)


@given(st.floats(1e-6, 50), st.integers(1, 60))
def test_edges_are_rounded_up_and_told_apart(top, bins):
    edges = [top * index / bins for index in range(bins + 1)]
    shown = format_edges(edges)
    assert len(set(shown)) == len(edges)
    assert all(
        float(text) >= edge - NOISE * max(1, edge) for text, edge in zip(shown, edges, strict=True)
    )
    assert float(shown[0]) == 0


def test_deltas_and_numbers():
    assert [format_delta(value) for value in (1e-5, 1e-10, 2.5e-7, 0.001)] == [
        "1e-5",
        "1e-10",
        "2.5e-7",
        "0.001",
    ]
    assert [format_number(value) for value in (32561, 0.123456, None)] == ["32,561", "0.123", "–"]
