import numpy as np
import pytest
import torch

from audits.training.baseline import example_table, fit_without_dp
from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.models import first_parameters
from audits.training.randomness import Randomness


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


def steps_of(dataset, **training):
    """The parameters after each step, as one vector."""
    found = []

    def after_step(module, step, steps_per_epoch):
        found.append(torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone())

    fit_without_dp(config(**training), dataset, seed=1, after_step=after_step)
    return found


def test_it_may_train_for_longer_with_the_schedule_and_weight_decay_of_the_run(digits):
    plain = steps_of(digits, epochs=1, momentum=0.0)
    longer = steps_of(digits, epochs=1, momentum=0.0, non_private_epochs=2, schedule="cosine")
    assert (len(plain), len(longer)) == (6, 12)
    assert torch.equal(plain[0], longer[0])
    assert (longer[-1] - longer[-2]).norm() < 0.1 * (longer[1] - longer[0]).norm()
    seed = Randomness.from_seed(1).first_parameters
    first = torch.nn.utils.parameters_to_vector(
        first_parameters(config().model, digits.input_shape, digits.n_classes, seed).parameters()
    )
    decayed = steps_of(digits, epochs=1, momentum=0.0, weight_decay=0.1)
    torch.testing.assert_close(decayed[0], plain[0] - 0.5 * 0.1 * first)
    free = steps_of(digits, epochs=1, momentum=0.0, weight_decay=0.1, non_private_weight_decay=0.0)
    assert torch.equal(free[0], plain[0])
