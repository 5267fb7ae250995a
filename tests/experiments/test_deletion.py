"""Whose epsilon rises without some records, on epsilons made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from audits.advice.deletion import compare_without
from indpriv.analysis.advice import Group
from indpriv.errors import InputError
from synthetic import epsilon_table

N = 60
STAY = np.arange(N) % 3 != 0  # 40 of 60
SEX = np.where(np.arange(N) % 2, "m", "f")
GROUPS = [
    Group(None, "all", np.arange(N)),
    Group("sex", "f", np.flatnonzero(SEX == "f")),
    Group("sex", "m", np.flatnonzero(SEX == "m")),
    Group("gone", "yes", np.flatnonzero(~STAY)),
]


def runs(factor, seeds=2):
    """Tables with and without; the epsilon of each is multiplied by a factor, and by its seed."""
    base = np.linspace(0.5, 1.5, N)
    before = [epsilon_table(base * (1 + 0.01 * seed), worst_case=2.0) for seed in range(seeds)]
    order = np.random.default_rng(0).permutation(np.flatnonzero(STAY))
    after = [
        epsilon_table((base * factor * (1 - 0.01 * seed))[order], worst_case=2.2, ids=order)
        for seed in range(seeds)
    ]
    return before, after


def compared(factor, seeds=2):
    found = compare_without(
        *runs(factor, seeds), GROUPS, name="small", deleted="sex=x", quantile=0.5
    )
    return found, {(one.by, one.name): one for one in found.groups}


def test_examples_are_matched_by_id_and_groups_sorted_by_their_rise():
    found, groups = compared(np.where(SEX == "m", 1.5, 1.0))
    assert (found.n_deleted, found.n_left) == (20, 40)
    assert (found.worst_case_with, found.worst_case_without) == (2.0, 2.2)
    assert [(one.by, one.name) for one in found.groups] == [
        (None, "all"),
        ("sex", "m"),
        ("sex", "f"),
    ]
    men, women = groups["sex", "m"], groups["sex", "f"]
    assert (men.n, men.n_deleted) == (20, 10)
    assert men.relative_change == pytest.approx(1.5 * 0.995 / 1.005 - 1)
    assert women.relative_change == pytest.approx(0.995 / 1.005 - 1)
    mean = np.linspace(0.5, 1.5, N)[STAY & (SEX == "m")].mean()
    assert men.mean_with == pytest.approx(mean * 1.005)
    assert (men.share_rises, men.share_falls) == (1.0, 0.0)
    assert (women.share_rises, women.share_falls, women.rises_by_chance) == (0.0, 0.0, 0.0)
    changes = np.array([1.5, 1.5 * 0.99 / 1.01]) - 1
    middle = (men.interval.low + men.interval.high) / 2
    assert middle == pytest.approx(changes.mean())
    assert men.interval.low < changes.min() < changes.max() < men.interval.high


def test_runs_whose_epsilons_mean_other_things_say_which():
    """Without some records, updates may tell how many there are: epsilons are of zero-out then."""
    before, after = runs(1.0)
    options = {"name": "small", "deleted": "x", "quantile": 0.5}
    same = compare_without(before, after, GROUPS, **options).meaning
    assert same == before[0].account.describe()
    zero = [
        replace(table, account=replace(table.account, neighbouring="zero_out")) for table in after
    ]
    found = compare_without(before, zero, GROUPS, **options).meaning
    assert found == f"{same} (with them), and {zero[0].account.describe()} (without them)"


def test_what_chance_does_is_read_off_the_runs_with_all_records():
    rng = np.random.default_rng(1)
    before = [epsilon_table(rng.lognormal(0, 0.3, N), worst_case=9.0) for _ in range(3)]
    after = [epsilon_table(table.epsilon[STAY], ids=np.flatnonzero(STAY)) for table in before]
    found = compare_without(before, after, GROUPS, name="s", deleted="x", quantile=0.95).groups[0]
    assert found.share_rises == found.share_falls == 0.0
    pairs = [(a.epsilon[STAY], b.epsilon[STAY]) for a in before for b in before if a is not b]
    assert found.rises_by_chance == pytest.approx(np.mean([(b > 1.1 * a).mean() for a, b in pairs]))
    assert found.rises_by_chance > 0.2


def test_one_seed_has_no_interval():
    _, groups = compared(1.2, seeds=1)
    one = groups[None, "all"]
    assert one.interval is one.rises_by_chance is None
    assert one.relative_change == pytest.approx(0.2)
    assert one.quantile_without == pytest.approx(1.2 * one.quantile_with)


def test_nobody_deleted_is_refused():
    before, _ = runs(1.0)
    with pytest.raises(InputError, match="60 of 60 would stay"):
        compare_without(before, before, GROUPS, name="s", deleted="nobody", quantile=0.5)
