import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv.errors import InputError
from indpriv.norm_log.records import Levels

norms = st.lists(st.floats(0, 1e6) | st.just(float("inf")), min_size=1, max_size=30).map(np.array)
roundings = st.sampled_from([0.001, 0.01, 0.03, 0.07, 0.1, 0.3, 0.5, 1.0]) | st.floats(1e-3, 1.0)
clips = st.floats(1e-3, 1e3)


@given(norms, roundings, clips)
def test_rounding_up_is_never_below_the_contribution_and_costs_at_most_a_level(
    norms, rounding, clip
):
    levels = Levels(rounding, "up")
    contribution = np.minimum(norms / clip, 1)
    rounded = levels.relative(levels.encode(norms, clip))
    assert np.all(rounded >= contribution)
    assert np.all(rounded <= contribution + rounding * (1 + 1e-9))


@given(norms, roundings, clips)
def test_nearest_rounding_is_within_half_a_level(norms, rounding, clip):
    levels = Levels(rounding, "nearest")
    contribution = np.minimum(norms / clip, 1)
    rounded = levels.relative(levels.encode(norms, clip))
    assert np.all(np.abs(rounded - contribution) <= rounding / 2 * (1 + 1e-9))


@given(norms, roundings, clips)
def test_codes_tell_clipped_norms_and_how_large_they_were(norms, rounding, clip):
    levels = Levels(rounding, "up")
    codes = levels.encode(norms, clip)
    assert np.array_equal(codes > levels.top, norms / clip > 1)
    inside = codes < levels.max_code
    assert np.all(levels.norms(codes, clip)[inside] >= norms[inside] * (1 - 1e-12))
    clipped = inside & (codes > levels.top)
    assert np.all(levels.norms(codes, clip)[clipped] <= norms[clipped] * 2 ** (1 / 8) * (1 + 1e-9))


@pytest.mark.parametrize("rounding", [0.01, 0.03, 0.07, 0.3, 1.0])
def test_a_level_keeps_its_own_value_and_the_clipping_norm_is_one(rounding):
    levels = Levels(rounding, "up")
    codes = np.arange(levels.top + 1)
    assert np.array_equal(levels.encode(levels.fractions * 2.0, 2.0), codes)
    assert levels.fractions[0] == 0
    assert levels.fractions[-1] == 1


def test_one_byte_holds_the_default_rounding():
    assert Levels(0.01, "up").dtype is np.uint8
    assert Levels(0.01, "up").top == 100
    assert Levels(0.001, "up").dtype is np.uint16


@pytest.mark.parametrize("rounding", [-0.1, 1.1, float("nan"), 1e-6, "a"])
def test_bad_rounding_is_refused_by_name(rounding):
    with pytest.raises(InputError, match="rounding="):
        Levels(rounding, "up")


def test_unknown_mode_is_refused():
    with pytest.raises(InputError, match="rounding_mode='down'"):
        Levels(0.01, "down")
