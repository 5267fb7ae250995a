import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indpriv import InputError
from indpriv.norm_log.fields import DEFAULT_POLICY, RecordingPolicy, epochs_of

growths = st.one_of(st.just(1.0), st.floats(1.001, 10.0))
policies = st.builds(
    lambda every, growth, extra, first: RecordingPolicy(
        every, growth, None if extra is None or growth == 1 else every + extra, first=first
    ),
    st.integers(1, 300),
    growths,
    st.none() | st.integers(0, 400),
    st.just(0) | st.integers(1, 400),
)
STEPS = 3000


def test_numbers_of_numpy_are_kept_as_json_has_them():
    policy = RecordingPolicy(np.int64(2), growth=2.0, longest=np.int32(8), first=np.int64(1))
    assert (
        json.loads(json.dumps(policy.to_dict()))
        == RecordingPolicy(2, growth=2.0, longest=8, first=1).to_dict()
    )
    with pytest.raises(InputError, match="longest"):
        RecordingPolicy(np.int64(9), growth=2.0, longest=np.int64(8))


def due_steps(policy, steps=STEPS):
    return [step for step in range(steps) if policy.due(step)]


@given(policies)
def test_gaps_begin_at_every_never_shrink_and_stop_at_longest(policy):
    steps = due_steps(policy)
    gaps = [after - before for before, after in pairwise(steps)]
    assert steps[0] == policy.first
    assert gaps[:1] in ([policy.every], [])
    assert all(gap >= policy.every for gap in gaps)
    assert all(
        after >= before - 1 for before, after in pairwise(gaps)
    )  # whole steps: a gap can be rounded off by one
    if policy.growth == 1:
        assert set(gaps) <= {policy.every}
    if policy.longest is not None:
        assert all(gap <= policy.longest for gap in gaps)
        if policy.longest in gaps[:-1]:
            assert set(gaps[gaps.index(policy.longest) + 1 :]) <= {
                policy.longest,
                policy.longest - 1,
            }


@given(policies, st.integers(0, 10**12))
def test_due_is_a_function_of_the_step_alone(policy, step):
    """Asked in any order, by a new object, far into a run: resuming goes on with the same schedule."""
    again = RecordingPolicy.from_header({"policy": policy.to_dict()})
    assert again == policy
    assert policy.due(step) is again.due(step)
    assert due_steps(policy, 200)[::-1] == [s for s in reversed(range(200)) if again.due(s)]


@given(
    st.integers(1, 50), st.sampled_from([Fraction(3, 2), Fraction(2), Fraction(5, 4), Fraction(3)])
)
def test_growing_gaps_are_the_geometric_series_in_whole_steps(every, growth):
    expected, total, gap = [], Fraction(0), Fraction(every)
    while total < STEPS:
        expected.append(int(total))
        total += gap
        gap *= growth
    assert due_steps(RecordingPolicy(every, float(growth))) == expected


@given(policies)
def test_a_later_start_shifts_all_passes(policy):
    from_zero = due_steps(replace(policy, first=0), STEPS - policy.first)
    assert due_steps(policy) == [policy.first + step for step in from_zero]


@pytest.mark.parametrize("first", [0, 4])
def test_once_is_a_single_pass(first):
    policy = RecordingPolicy("once", first=first)
    assert due_steps(policy) == [first]
    assert policy.in_steps(34) == policy


def test_longest_gaps_follow_without_end():
    assert due_steps(RecordingPolicy(1, 2.0, 8), 60) == [0, 1, 3, 7, 15, 23, 31, 39, 47, 55]
    assert RecordingPolicy(1, 2.0, 8).due(7 + 8 * 10**9)


def test_epochs_become_steps():
    assert due_steps(RecordingPolicy("epoch").in_steps(34), 100) == [0, 34, 68]
    grown = RecordingPolicy(5, 2.0, "epoch").in_steps(34)
    assert grown == RecordingPolicy(5, 2.0, 34)
    assert RecordingPolicy("12 epochs").in_steps(34) == RecordingPolicy(12 * 34)
    assert due_steps(RecordingPolicy(4, 2.0, "2 epochs").in_steps(34), 270) == [
        0,
        4,
        12,
        28,
        60,
        124,
        192,
        260,
    ]
    with pytest.raises(InputError, match="in_steps"):
        RecordingPolicy("2 epochs").due(0)
    with pytest.raises(InputError, match="in_steps"):
        RecordingPolicy("epoch").due(0)
    assert due_steps(RecordingPolicy(50, 2.0, "epoch").in_steps(34), 100) == [0, 34, 68]
    assert due_steps(RecordingPolicy("2 epochs", 2.0, 50).in_steps(34), 160) == [0, 50, 100, 150]


def test_the_default_records_often_early_whatever_an_epoch_has():
    assert due_steps(DEFAULT_POLICY.in_steps(34), 140) == [0, 4, 12, 28, 60, 94, 128]
    assert due_steps(DEFAULT_POLICY.in_steps(3), 10) == [0, 3, 6, 9]
    assert due_steps(DEFAULT_POLICY.in_steps(1), 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "week"}, 'every=\'week\' .* "epoch" or "once"'),
        ({"every": "once", "growth": 2.0}, "no gaps that could grow"),
        ({"growth": 2.0, "longest": "once"}, "longest='once'"),
        *(
            ({"every": word}, f"every='{word}'")
            for word in ("0 epochs", "1 epochs", "-2 epochs", "2.5 epochs", "2 epoch")
        ),
        ({"growth": 2.0, "longest": "02 epochs"}, "longest='02 epochs' .* \"2 epochs\""),
        ({"first": -1}, "first=-1"),
        ({"first": "epoch"}, "first='epoch'"),
        ({"every": 2.5}, "every=2.5"),
        ({"growth": 0.5}, r"growth=0.5 is not in \[1, 10\]"),
        ({"growth": float("nan")}, "growth=nan"),
        ({"growth": float("inf")}, "growth=inf"),
        ({"growth": "2"}, "growth='2'"),
        ({"growth": True}, "growth=True"),
        ({"longest": 10}, "limits gaps that do not grow"),
        ({"growth": 2.0, "longest": 0}, "longest=0"),
        ({"every": 20, "growth": 2.0, "longest": 10}, "longest=10 is below every=20"),
        (
            {"every": "3 epochs", "growth": 2.0, "longest": "2 epochs"},
            "longest='2 epochs' is below every='3 epochs'",
        ),
        ({"batch_norms": 1}, "batch_norms=1"),
        ({"reference_examples": -1}, "reference_examples=-1"),
    ],
)
def test_bad_policies_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        RecordingPolicy(**{"every": "epoch"} | fields)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (RecordingPolicy("epoch"), "a full pass every epoch"),
        (RecordingPolicy("2 epochs"), "a full pass every 2 epochs"),
        (
            RecordingPolicy(4, 2.0, "2 epochs"),
            "full passes after 4 steps, each gap 2 times the last, at most 2 epochs",
        ),
        (RecordingPolicy(every=1), "a full pass every step"),
        (
            RecordingPolicy(every=1200, reference_examples=2000),
            "a full pass every 1,200 steps; 2,000 reference examples",
        ),
        (RecordingPolicy("once"), "one full pass at the start"),
        (RecordingPolicy(every=34, first=4), "a full pass every 34 steps, the first before step 4"),
        (
            RecordingPolicy(8, 2.0, first=4),
            "full passes after 8 steps, each gap 2 times the last, the first before step 4",
        ),
        (
            RecordingPolicy(every=1, growth=1.5),
            "full passes after 1 step, each gap 1.5 times the last",
        ),
        (
            RecordingPolicy("epoch", 2.0, "epoch", batch_norms=True),
            "full passes after an epoch, each gap 2 times the last, at most an epoch; batch norms of sampled batches",
        ),
    ],
)
def test_a_policy_in_words(policy, text):
    assert policy.describe() == text


def test_gaps_in_epochs():
    assert (epochs_of("epoch"), epochs_of("2 epochs"), epochs_of(34)) == (1, 2, None)
