from hypothesis import given
from hypothesis import strategies as st

from indpriv._formatting import (
    format_delta,
    format_edges,
    format_epsilon,
    format_number,
    format_share,
)


@given(st.floats(1e-12, 1e6))
def test_an_epsilon_is_never_shown_smaller_than_it_is(value):
    shown = float(format_epsilon(value))
    assert shown >= value * (1 - 2e-9)
    assert shown <= value + max(0.0101, 0.0)


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
    assert all(float(text) >= edge * (1 - 2e-9) for text, edge in zip(shown, edges, strict=True))
    assert float(shown[0]) == 0


def test_deltas_and_numbers():
    assert [format_delta(value) for value in (1e-5, 1e-10, 2.5e-7, 0.001)] == [
        "1e-5",
        "1e-10",
        "2.5e-7",
        "0.001",
    ]
    assert [format_number(value) for value in (32561, 0.123456, None)] == ["32,561", "0.123", "–"]
