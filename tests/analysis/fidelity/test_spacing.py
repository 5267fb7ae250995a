import numpy as np
import pytest

from indpriv.analysis.fidelity.spacing import spacing_effect
from synthetic import epsilon_table


def test_shifts_are_sparser_minus_all():
    table = epsilon_table([1.0, 2.0, 3.0, 4.0])
    found = spacing_effect(
        table, epsilon_table([1.5, 2.0, 2.9, 4.2]), n_records=4, n_kept=2, every=10
    )
    assert found.mean_shift == pytest.approx(0.15)
    assert found.mean_absolute == pytest.approx(0.2)
    assert found.largest_absolute == pytest.approx(0.5)
    assert found.share_larger == 0.5
    assert (found.n_records, found.n_kept, found.every, found.between_records) == (4, 2, 10, "last")


def test_no_shift():
    table = epsilon_table(np.linspace(0, 1, 5))
    found = spacing_effect(table, table, n_records=4, n_kept=2, every=10)
    assert (found.largest_absolute, found.share_larger, found.pearson) == (
        0.0,
        0.0,
        pytest.approx(1.0),
    )
