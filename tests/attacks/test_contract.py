"""What every attack of the registry must do."""

from dataclasses import fields, replace

import numpy as np
import pytest

from indpriv.attacks import ATTACKS, Attack, Material
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from synthetic import small_run

EVERYTHING = Material(final_losses=small_run()[1])

every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=lambda attack: attack.name)


def test_names_are_keys():
    assert all(attack.name == name for name, attack in ATTACKS.items())


@every_attack
def test_it_says_what_it_needs_and_what_it_is_worth(attack: Attack):
    assert attack.needs
    assert attack.needs <= {field.name for field in fields(Material)}
    assert attack.source
    assert attack.caveat.endswith(".")


@every_attack
def test_it_runs_only_with_all_that_it_needs(attack: Attack):
    assert attack.can_use(EVERYTHING)
    for need in attack.needs:
        without = replace(EVERYTHING, **{need: None})
        assert not attack.can_use(without)
        with pytest.raises(InputError):
            attack.scores(without, None)


@every_attack
def test_it_scores_members_and_non_members_in_groups(attack: Attack):
    found = attack.scores(EVERYTHING, "sex")
    assert found.method == attack.title
    assert set(found.member.tolist()) == {True, False}
    assert set(found.groups) == {"Male", "Female"}
    ungrouped = attack.scores(EVERYTHING, None)
    assert ungrouped.groups is None
    assert np.array_equal(ungrouped.scores, found.scores)


@every_attack
def test_scores_do_not_depend_on_the_order_of_the_examples(attack: Attack):
    frame = EVERYTHING.final_losses.frame
    shuffled = frame.sample(frac=1.0, random_state=0).reset_index(drop=True)
    mine = attack.scores(EVERYTHING, None)
    other = attack.scores(Material(final_losses=ExampleTable(shuffled)), None)
    for side in (True, False):
        assert sorted(mine.scores[mine.member == side]) == sorted(
            other.scores[other.member == side]
        )
