from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from indpriv.analysis.attacks.attributes import BY_EPSILON, attribute_attacks, measure_attribute
from indpriv.analysis.attacks.membership import epsilon_edges
from indpriv.attacks import Material
from indpriv.attacks.attributes import GUESSERS, guesses
from indpriv.errors import InputError
from synthetic import epsilon_table, knowledge


def measured(known, guesser="with_imputation", **options):
    return measure_attribute(known, guesser, **({"model": "dp", "groups": {}} | options))


def measure(known, guesser="with_imputation", **options):
    """Over all examples."""
    return measured(known, guesser, **options).iloc[0]


def test_the_advantage_is_the_difference_of_four_accuracies():
    known = knowledge(600, leak=0.5)
    found = measure(known)
    right = guesses(GUESSERS["with_imputation"].logs(known)) == known.truth
    base = guesses(known.imputed) == known.truth
    counts = {
        (member, name): sum(
            bool(hit) for hit, m in zip(hits, known.member, strict=True) if m == member
        )
        for member in (True, False)
        for name, hits in (("right", right), ("base", base))
    }
    assert found.guessed == counts[True, "right"] / 300
    assert found.others_imputed == counts[False, "base"] / 300
    expected = counts[True, "right"] - counts[True, "base"]
    expected -= counts[False, "right"] - counts[False, "base"]
    assert found.advantage == pytest.approx(expected / 300)
    assert found.low < found.advantage < found.high


def test_what_holds_in_the_population_is_no_leak():
    """The model knows the value of members and of others, and so does imputation."""
    known = knowledge()
    sure = np.where(known.truth[:, None] == np.arange(3), 0.0, -20.0)
    found = measure(replace(known, likelihood=sure, imputed=sure), "inversion")
    assert found.guessed == found.imputed == found.others_guessed == 1
    assert found.advantage == 0
    found = measure(replace(known, likelihood=sure))  # imputation could not know it
    assert found.guessed - found.imputed > 0.2
    assert found.low < 0 < found.high


def test_intervals_cover_no_advantage_where_nothing_leaks():
    spans = [measure(knowledge(400, seed=seed)) for seed in range(100)]
    assert sum(span.low > 0 or span.high < 0 for span in spans) <= 9


def test_an_advantage_beyond_the_worst_case_is_a_finding_against_the_run_only():
    leaky, calm = knowledge(leak=2.0), knowledge()
    assert measure(leaky).low > 0.05
    assert measure(leaky, ceiling=0.05, tests=6).above_ceiling
    assert not measure(leaky, ceiling=0.9).above_ceiling
    assert not measure(leaky, ceiling=0.05, model="non_dp").above_ceiling
    assert not measure(calm, ceiling=0.0).above_ceiling


def test_groups_and_bins_take_members_and_others_apart():
    known = knowledge(leak=1.0)
    epsilon = np.where(known.truth == 0, 2.0, 1.0) + np.tile(np.linspace(0, 0.5, 2000), 2)
    members = epsilon_table(epsilon[known.member], worst_case=3.0)
    mu = np.where(known.member, epsilon / 3, np.nan)
    found = measured(
        known,
        groups={"sex": np.where(known.truth == 0, "f", "m"), "split": known.member.astype(str)},
        mu=mu,
        bins=(epsilon, epsilon_edges(members)),
        ceiling=0.4,
    )
    by_sex, bins = found[found["by"] == "sex"], found[found["by"] == BY_EPSILON]
    assert by_sex["name"].tolist() == ["f", "m"]
    assert "split" not in set(found["by"])  # of members or of others only
    women = known.truth == 0
    assert by_sex["n_members"].iloc[0] == (women & known.member).sum()
    assert bins["n_members"].sum() == 2000
    assert bins["n_others"].sum() >= 1990  # the last bins may have no members
    ceilings = bins["individual_ceiling"]
    assert ceilings.is_monotonic_increasing
    assert ceilings.max() <= 0.4
    assert measured(known)["by"].tolist() == [""]


def test_ids_of_the_hold_out_may_be_texts_and_others_are_refused():
    """An id that is not found must not stand for the last example."""
    known, half = knowledge(), 2000
    members = epsilon_table(np.linspace(0.1, 3.0, half))
    sides = {"dp": Material(attributes=(known,))}
    holdouts = [
        epsilon_table(np.linspace(3.0, 0.1, half), ids=np.arange(half).astype(kind))
        for kind in (np.int64, str)
    ]
    whole, texts = (attribute_attacks(sides, members=members, holdout=of) for of in holdouts)
    pd.testing.assert_frame_equal(whole, texts)
    few = epsilon_table(np.linspace(0.1, 3.0, half - 1))
    for wrong in ({"members": few, "holdout": holdouts[0]}, {"members": members, "holdout": few}):
        with pytest.raises(InputError, match="1 attacked examples are not"):
            attribute_attacks(sides, **wrong)
