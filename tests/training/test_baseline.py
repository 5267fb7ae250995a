import numpy as np
import pytest

from indpriv.training.baseline import example_table, fit_without_dp
from indpriv.training.config import AuditConfig
from indpriv.training.datasets import load_dataset


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def config(**training):
    tables = AuditConfig.from_toml("audits/digits.toml").to_dict()
    tables["training"] |= {"epochs": 8} | training
    return AuditConfig.from_dict(tables)


def train_without_dp(config, dataset, **options):
    return example_table(fit_without_dp(config, dataset, **options), dataset)


def test_the_baseline_learns_and_scores_every_example(digits):
    seen = []
    table = train_without_dp(config(), digits, progress=lambda *args: seen.append(args))
    assert table.test["correct"].mean() > 0.9
    assert table.train["example_id"].tolist() == list(range(1438))
    np.testing.assert_array_equal(table.test["label"], digits.test.targets)
    assert seen[-1] == ("training without DP", 48, 48)


def test_a_seed_makes_it_repeatable(digits):
    one, same, other = (
        train_without_dp(config(epochs=1), digits, seed=seed).frame for seed in (1, 1, 2)
    )
    assert one.equals(same)
    assert not np.allclose(one["loss"], other["loss"])


def test_its_learning_rate_may_differ(digits):
    slow = train_without_dp(config(non_private_learning_rate=1e-6), digits, seed=1)
    fast = train_without_dp(config(), digits, seed=1)
    assert fast.train["loss"].mean() < 0.5 < slow.train["loss"].mean()
