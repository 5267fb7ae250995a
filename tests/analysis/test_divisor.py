import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opacus.data_loader import DPDataLoader
from torch.utils.data import DataLoader, TensorDataset

from indpriv.analysis.guarantee import divisor_of, scale_advantage


def made_by_opacus(n, batch_size):
    """Expected batch size and number of batches as make_private sets them."""
    data = TensorDataset(torch.zeros(n, 1))
    loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=batch_size))
    return int(n * (1 / len(loader))), len(loader)


def found(n, batch_size, steps=10, rows=1, **changes):
    expected, batches = made_by_opacus(n, batch_size)
    recorder = {
        "expected_batch_size": expected,
        "steps_per_epoch": batches,
        "loss_reduction": "mean",
        "n_parameters": 100,
        **changes,
    }
    return divisor_of(n, steps, recorder, rows=rows)


@given(st.integers(3, 60), st.integers(1, 60), st.integers(1, 2))
def test_what_changes_with_n_is_found(n, batch_size, rows):
    """Compared with what Opacus sets up for the neighbouring data sets."""
    batch_size = min(batch_size, n)
    mine = found(n, batch_size, rows=rows)
    if mine is None:  # Opacus's own divisor is 0
        return
    others = [made_by_opacus(n - rows, batch_size), made_by_opacus(n + rows, batch_size)]
    if any(other != made_by_opacus(n, batch_size) for other in others):
        assert mine.tells_n
    assert (mine.advantage > 0) == (mine.neighbour is not None)


def test_figures_of_two_runs():
    assert not found(60_000, 256).tells_n  # 255.3
    told = found(60_000, 600)
    assert (told.batch_size, told.neighbour) == (600, 599)
    assert "would be 599 with one example more or fewer" in told.describe()
    assert "an advantage of up to 99.7 %" in found(60_000, 600, 240, n_parameters=26_010).describe()


@pytest.mark.parametrize(
    "changes", [{"expected_batch_size": 7}, {"steps_per_epoch": None}, {"ranks": 2}]
)
def test_a_divisor_that_opacus_did_not_derive_from_n_is_left_alone(changes):
    assert found(120, 12, **changes) is None


def test_a_sum_is_not_divided():
    assert found(120, 12, loss_reduction="sum").neighbour is None


@pytest.mark.parametrize(("ratio", "numbers"), [(2.0, 1), (1.1, 40), (600 / 599, 10_000)])
def test_the_advantage_is_that_of_the_best_test(ratio, numbers):
    rng = np.random.default_rng(0)
    draws = rng.chisquare(numbers, 200_000)
    thresholds = np.quantile(draws, np.linspace(0.001, 0.999, 500))
    best = max(float((draws <= t).mean() - (draws * ratio**2 <= t).mean()) for t in thresholds)
    assert scale_advantage(ratio, numbers) == pytest.approx(best, abs=5e-3)
    assert scale_advantage(1 / ratio, numbers) == scale_advantage(ratio, numbers)
    assert math.isclose(scale_advantage(ratio, 10**12), 1.0) or ratio < 1.001


@pytest.mark.parametrize("n", [71, 121, 122, 130, 131])
def test_a_rate_of_so_many_examples_by_their_number_changes_with_one_example(n):
    """As trainers set it: batch size over n, whatever 1 / rate is rounded to."""
    about = {"expected_batch_size": 12, "steps_per_epoch": int(n / 12), "sample_rate": 12 / n}
    assert divisor_of(n, 30, {**about, "loss_reduction": "mean"}).rate_changes


def test_a_rate_of_opacus_is_judged_by_its_number_of_batches():
    n, batches = 122, 10
    about = {"expected_batch_size": int(n / batches), "steps_per_epoch": batches}
    for rate in ({}, {"sample_rate": 1 / batches}):
        assert not divisor_of(n, 30, {**about, **rate, "loss_reduction": "mean"}).rate_changes
