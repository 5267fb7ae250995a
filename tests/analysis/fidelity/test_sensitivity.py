import pytest

from indpriv.analysis.fidelity.sensitivity import sensitivity_to
from synthetic import epsilon_table


def test_shifts_are_the_other_choice_minus_this_one():
    here = epsilon_table([1.0, 2.0, 3.0], rounding=0.01)
    found = sensitivity_to("rounding", here, epsilon_table([1.1, 1.8, 3.4], rounding=0.1))
    assert (found.here, found.instead, found.n) == ("0.01", "0.1", 3)
    assert found.mean_shift == pytest.approx(0.1)
    assert found.largest_absolute == pytest.approx(0.4)
    assert found.share_smaller == pytest.approx(1 / 3)
