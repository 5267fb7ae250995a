"""The settings that are advised, compared with trying every one."""

import numpy as np
import pytest

from indpriv import NormLog
from indpriv.accountant.account import table_for
from indpriv.accountant.method import Method
from indpriv.analysis import advice
from indpriv.analysis.advice import MOST_NOISE, Group, read_quantiles, remedies
from indpriv.norm_log.norm_log import clipped_lower, coarser, noisier
from synthetic import small_run

METHOD = Method(delta=1e-5)
QUANTILE = 0.9
FACTORS, SHARES = 1.1 ** np.arange(25), np.arange(10, 0, -1) / 10


@pytest.fixture(autouse=True)
def _fewer_factors(monkeypatch):
    monkeypatch.setattr(advice, "_NOISE_RATIO", 1.1)


@pytest.fixture(scope="module")
def run():
    log, examples = small_run(steps=12)
    log = coarser(log, 0.1)
    sex = examples.aligned(log.example_ids)["sex"]
    groups = [Group(None, "all", np.arange(log.n_examples))]
    groups += [Group("sex", one, np.flatnonzero(sex == one)) for one in ("Female", "Male")]
    return log, table_for(log, METHOD), groups


def advised(run, target):
    log, table, groups = run
    return remedies(
        log,
        METHOD,
        table,
        groups,
        target=target,
        quantile=QUANTILE,
        clipping=True,
        progress=lambda done, most: None,
    )


@pytest.fixture(scope="module")
def tried(run):
    """Every account that could have been looked at: table and quantiles, by remedy."""
    log, _, groups = run
    found = []
    for factors, view in ((FACTORS, noisier), (SHARES, clipped_lower)):
        tables = [table_for(view(log, factor), METHOD) for factor in factors]
        quantiles = [read_quantiles(table, groups, QUANTILE) for table in tables]
        found.append((factors, tables, np.array(quantiles)))
    return found


@pytest.mark.parametrize("share", [0.4, 0.75])
def test_the_least_change_is_found_for_every_group_and_end(run, tried, share):
    _, table, groups = run
    target = share * float(read_quantiles(table, groups, QUANTILE)[:, 1].max())
    found = advised(run, target)
    for remedy, (factors, tables, quantiles) in zip(found, tried, strict=True):
        for group in range(len(groups)):
            reached = quantiles[:, group] <= target
            low, middle, high = (int(np.argmax(reached[:, end])) for end in range(3))
            one = remedy[group]
            assert (one.factor_low, one.factor, one.factor_high) == pytest.approx(
                tuple(factors[[low, middle, high]])
            )
            assert one.quantile == pytest.approx(quantiles[middle, group, 1], rel=1e-12)
            assert one.quantile <= target
            worst = tables[middle].worst_case_epsilon
            assert one.worst_case_epsilon == pytest.approx(worst, rel=1e-12)
    assert found[0][0].factor > 1 > found[1][0].factor


def test_a_group_below_the_target_needs_nothing(run):
    for found in advised(run, run[1].worst_case_epsilon):
        assert [one.factor for one in found] == [1.0, 1.0, 1.0]
        assert found[0].worst_case_epsilon == run[1].worst_case_epsilon


def test_what_ten_times_the_noise_does_not_reach_is_said(run):
    target = 1e-3
    most = noisier(run[0], MOST_NOISE)
    assert np.quantile(table_for(most, METHOD).epsilon, QUANTILE) > target
    noise, _ = advised(run, target)
    assert noise[0].factor is noise[0].quantile is noise[0].worst_case_epsilon is None


def test_norms_in_full_are_advised_of_as_if_rounded_up(run, monkeypatch):
    monkeypatch.setattr(advice, "_CLIPPING_SHARES", 10)
    log, table, groups = run
    fractions = log.levels.fractions
    norms = (fractions[np.minimum(log.read(), log.levels.top)] - 0.04).clip(0)  # below each level
    full = NormLog.from_arrays(
        norms * log.settings.max_grad_norm[0],
        log.recorded_steps,
        total_steps=log.total_steps,
        noise_multiplier=log.settings.noise_multiplier,
        max_grad_norm=log.settings.max_grad_norm,
        sample_rate=log.settings.sample_rate,
        rounding=0,
    )
    target = 0.75 * float(read_quantiles(table, groups, QUANTILE)[:, 1].max())
    for one, other in zip(
        advised((full, table, groups), target), advised(run, target), strict=True
    ):
        assert [each.factor for each in one] == pytest.approx([each.factor for each in other])
