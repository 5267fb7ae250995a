import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indpriv import NormLog
from indpriv.accountant.steps import GoverningNorms, clipped_steps, snapped, snapped_rates
from indpriv.errors import InputError
from indpriv.norm_log.fields import ACCOUNT_WORDS


def make_log(recorded_steps, total_steps, n_examples=1, **changes):
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.1, **changes}
    norms = np.full((len(recorded_steps), n_examples), 0.5)
    return NormLog.from_arrays(norms, recorded_steps, total_steps=total_steps, **arguments)


CLIPPED = -1  # the row of steps at max_grad_norm


def steps_by_record(groups):
    n = groups.log.n_records + len(groups.pairs)
    each = groups.steps.sum(axis=1).tolist()
    return {row if row < n else CLIPPED: steps for row, steps in enumerate(each)}


def test_last_holds_each_record_until_the_next():
    groups = GoverningNorms.of(make_log([2, 5, 6], 10), "last")
    assert steps_by_record(groups) == {CLIPPED: 2, 0: 3, 1: 1, 2: 4}


def test_worst_case_counts_only_recorded_steps_below_the_clipping_norm():
    groups = GoverningNorms.of(make_log([2, 5, 6], 10), "worst_case")
    assert steps_by_record(groups) == {CLIPPED: 7, 0: 1, 1: 1, 2: 1}


def test_closest_splits_gaps_in_the_middle_and_pairs_ties():
    groups = GoverningNorms.of(make_log([1, 4, 8], 12), "closest")
    # step 0 at C; 1, 2 | 3, 4, 5 | tie at 6 | 7 to 11
    assert steps_by_record(groups) == {CLIPPED: 1, 0: 2, 1: 3, 3: 1, 2: 5}
    assert groups.pairs.tolist() == [1]


def test_no_record_counts_every_step_at_the_clipping_norm():
    for between_records in ACCOUNT_WORDS["between_records"]:
        assert steps_by_record(GoverningNorms.of(make_log([], 7), between_records)) == {CLIPPED: 7}


def test_unknown_rule_is_refused():
    with pytest.raises(InputError, match="between_records='nearest'"):
        GoverningNorms.of(make_log([0], 3), "nearest")


def test_ten_million_steps_of_one_setting_need_no_array_of_steps():
    groups = GoverningNorms.of(make_log([0, 4_000_000], 10_000_000), "closest")
    assert steps_by_record(groups) == {0: 2_000_000, 1: 7_999_999, 2: 1}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_step_is_counted_once_under_its_own_setting(data):
    total_steps = data.draw(st.integers(1, 30))
    recorded = sorted(data.draw(st.sets(st.integers(0, total_steps - 1))))
    noise = np.array(
        data.draw(
            st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=total_steps, max_size=total_steps)
        )
    )
    rate = np.array(
        data.draw(st.lists(st.sampled_from([0.1, 1.0]), min_size=total_steps, max_size=total_steps))
    )
    log = make_log(recorded, total_steps, noise_multiplier=noise, sample_rate=rate)
    for between_records in ACCOUNT_WORDS["between_records"]:
        groups = GoverningNorms.of(log, between_records)
        assert groups.steps.sum() == total_steps
        assert np.all(groups.steps.data > 0)
        for sigma in (0.5, 1.0, 2.0):
            for q in (0.1, 1.0):
                chosen = (groups.settings.noise_multiplier == sigma) & (
                    groups.settings.sample_rate == q
                )
                counted = groups.steps.sum(axis=0)[chosen].sum()
                assert counted == ((noise == sigma) & (rate == q)).sum()


def test_worst_case_merges_settings_that_differ_in_the_clipping_norm_only():
    log = make_log(
        [0],
        4,
        max_grad_norm=np.array([1.0, 2.0, 1.0, 2.0]),
        noise_multiplier=np.array([1.0, 1.0, 3.0, 3.0]),
    )
    kinds, steps = clipped_steps(log)
    assert kinds.shift.tolist() == [1.0, 1 / 3]
    assert steps.tolist() == [2.0, 2.0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), apart=st.sampled_from([1e-4, 1e-2, 0.5, 3.0]))
def test_what_is_snapped_moves_one_way_and_by_little(seed, apart):
    rng = np.random.default_rng(seed)
    noise, rate = np.exp(rng.normal(0, 2, 50)), rng.uniform(0.001, 1, 50)
    rate[: rng.integers(0, 3)] = 1.0
    for values, snap in ((noise, snapped), (rate, snapped_rates)):
        up, down = (snap(values, apart, down=down) for down in (False, True))
        assert np.all((values <= up) & (up <= values * np.exp(apart) * (1 + 1e-9)))
        assert np.all((down <= values) & (values <= down * np.exp(apart) * (1 + 1e-9)))
    up = snapped_rates(rate, apart, down=False)
    assert np.all((up < 1) == (rate < 1))
    assert not np.isin(up[up > rate], rate).any()  # cases_of counts on it


def test_norms_that_settings_snapped_up_count_are_no_smaller():
    rng = np.random.default_rng(1)
    changes = {
        "noise_multiplier": rng.uniform(0.5, 2, 300),
        "max_grad_norm": rng.uniform(0.1, 1, 300),
        "sample_rate": rng.uniform(0.01, 0.5, 300),
    }
    log = make_log([0], 300, **changes)
    means = []
    for down in (True, False):
        groups = GoverningNorms.of(log, "last", apart=0.05, down=down)
        table = groups.codes.table(groups.settings.max_grad_norm)
        noise, rate = groups.settings.noise_multiplier, groups.settings.sample_rate
        [mean] = groups.steps @ np.column_stack([table / noise[:, None], rate]) / 300
        means.append(mean)
    exact = log.settings
    own = np.minimum(GoverningNorms.of(log, "last").codes.table(exact.max_grad_norm), 1)
    truth = np.column_stack([own / exact.noise_multiplier[:, None], exact.sample_rate]).mean(axis=0)
    assert np.all((means[0] <= truth * (1 + 1e-12)) & (truth <= means[1] * (1 + 1e-12)))
    assert np.all(means[1] <= means[0] * 1.2 + 1e-300)
