import numpy as np
import pytest

from indpriv import NormLog
from indpriv.analysis import schedule as norms_module
from indpriv.analysis.schedule import describe_drivers
from synthetic import epsilon_table, rows


def log_of(norms, **options):
    settings = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 2.0,
        "sample_rate": 0.1,
        "total_steps": len(norms),
    }
    return NormLog.from_arrays(
        np.asarray(norms, float), np.arange(len(norms)), **(settings | options)
    )


@pytest.mark.parametrize("rounding", [0, 0.01])
def test_medians_and_clipped_shares_by_class(rounding):
    rng = np.random.default_rng(0)
    norms, label = rng.gamma(2.0, 1.0, (5, 41)), np.arange(41) % 3
    found = describe_drivers(
        log_of(norms, rounding=rounding), epsilon_table(np.arange(41.0)), rows("train", label)
    )
    assert found.steps == (0, 1, 2, 3, 4)
    assert found.classes == ("0", "1", "2")
    # A clipped norm is known up to an eighth of an octave, another up to one level.
    tolerance = {"abs": 0.01, "rel": 0.1} if rounding else {"rel": 1e-12}
    for step in range(5):
        assert found.clipped_share[step] == pytest.approx((norms[step] > 2).mean())
        for code in range(3):
            mine = norms[step][label == code] / 2
            assert found.median_norm[code][step] == pytest.approx(np.median(mine), **tolerance)
            assert found.clipped_share_by_class[code][step] == pytest.approx((mine > 1).mean())


def test_both_ends_are_named():
    epsilon = np.array([3.0, 0.5, 3.0, *np.linspace(1, 2, 20), 0.1])
    found = describe_drivers(
        log_of(np.ones((2, 24))), epsilon_table(epsilon, ids=[f"id{i}" for i in range(24)]), None
    )
    assert found.most_protected[:2] == ("id23", "id1")
    assert set(found.least_protected[:2]) == {"id0", "id2"}
    assert (found.n_at_most, found.n_at_least) == (2, 1)
    assert (found.classes, found.median_norm) == ((), ())


def test_many_records_and_many_labels():
    norms = np.ones((200, 30))
    found = describe_drivers(
        log_of(norms), epsilon_table(np.ones(30)), rows("train", np.arange(30) / 7)
    )
    assert len(found.steps) == 60
    assert (found.steps[0], found.steps[-1]) == (0, 199)
    assert found.classes == ()
    assert found.n_at_most == found.n_at_least == 30


@pytest.mark.parametrize("rounding", [0, 0.01])
def test_what_is_counted_in_blocks_is_counted_once(rounding, monkeypatch):
    rng = np.random.default_rng(0)
    log = log_of(rng.gamma(2.0, 1.0, (5, 41)), rounding=rounding)
    table, train = epsilon_table(rng.random(41)), rows("train", np.arange(41) % 3)
    whole = describe_drivers(log, table, train)
    monkeypatch.setattr(norms_module, "ROW_GROUP_SIZE", 7)
    assert describe_drivers(log, table, train) == whole


def test_of_equal_epsilons_the_outer_ones_are_named():
    epsilon = np.repeat([1.0, 2.0, 3.0], 12)
    found = describe_drivers(log_of(np.ones((2, 36))), epsilon_table(epsilon), None)
    assert found.most_protected == tuple(range(10))
    assert found.least_protected == tuple(range(35, 25, -1))
    assert (found.n_at_least, found.n_at_most) == (12, 12)
