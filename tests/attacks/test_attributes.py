import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from audits.training.attributes import write_knowledge
from indpriv.attacks import ATTACKS, Material
from indpriv.attacks.attributes import (
    GUESSERS,
    guesses,
    read_knowledge,
)
from indpriv.errors import EvidenceError, InputError
from synthetic import knowledge


def test_the_posterior_is_that_of_bayes():
    known = knowledge(20)
    for example in range(20):
        parts = [math.exp(known.prior[example, v] + known.likelihood[example, v]) for v in range(3)]
        expected = [math.log(part / sum(parts)) for part in parts]
        np.testing.assert_allclose(known.log_posterior()[example], expected)


def test_a_leak_tells_members_from_others_and_chance_does_not():
    for leak, low, high in ((0.0, 0.47, 0.53), (1.0, 0.7, 1.0)):
        found = ATTACKS["attributes"].scores(Material(attributes=(knowledge(leak=leak),)))
        inside, outside = (found.scores[found.member == side] for side in (True, False))
        auc = stats.mannwhitneyu(inside, outside).statistic / (len(inside) * len(outside))
        assert low < auc < high


def test_several_attributes_add_up():
    one, two = knowledge(leak=0.3), knowledge(leak=0.3, name="size", seed=0)
    alone = ATTACKS["attributes"].scores(Material(attributes=(one,)))
    both = ATTACKS["attributes"].scores(Material(attributes=(one, two)))
    np.testing.assert_allclose(both.scores, 2 * alone.scores)
    other = knowledge(3000)
    with pytest.raises(InputError, match="other examples"):
        ATTACKS["attributes"].scores(Material(attributes=(one, other)))
    assert not ATTACKS["attributes"].can_use(Material())


def test_equal_scores_are_guessed_at_random():
    shares = np.bincount(guesses(np.zeros((30_000, 3)))) / 30_000
    np.testing.assert_allclose(shares, 1 / 3, atol=0.015)
    assert guesses(np.array([[0.0, 2.0, 1.0], [3.0, -np.inf, 1.0]])).tolist() == [1, 0]


def test_inversion_knows_the_shares_of_values_only():
    known = knowledge()
    shares = np.bincount(known.truth[~known.member]) / (~known.member).sum()
    np.testing.assert_allclose(np.exp(known.marginal()), shares, atol=0.03)
    logs = GUESSERS["inversion"].logs(known)
    np.testing.assert_allclose(logs - known.likelihood, np.tile(known.marginal(), (4000, 1)))


def test_files_are_read_back(tmp_path):
    known = (knowledge(50), knowledge(50, name="size", seed=1))
    write_knowledge(known, tmp_path / "attributes.parquet")
    again = read_knowledge(tmp_path / "attributes.parquet")
    assert [each.name for each in again] == ["colour", "size"]
    for before, after in zip(known, again, strict=True):
        np.testing.assert_equal(vars(after), vars(before))


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "attributes.parquet"
    write_knowledge((knowledge(50),), path)
    frame = pd.read_parquet(path)
    for damaged in (frame.iloc[1:], frame.assign(true=False), frame.drop(columns="prior")):
        damaged.to_parquet(path)
        with pytest.raises(EvidenceError):
            read_knowledge(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"truth": np.full(100, 3)}, "among 3 values"),
        ({"member": np.ones(100, dtype=bool)}, "non-members"),
        ({"likelihood": np.full((100, 3), np.nan)}, "not NaN"),
        ({"imputed": np.full((100, 2), -1.0)}, "shape"),
        ({"example_ids": np.arange(99)}, "numbers of ids"),
    ],
)
def test_arrays_that_do_not_match_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        knowledge(100, **changes)
