import numpy as np
import pytest

from indpriv import EvidenceError, InputError, NormLog, account
from indpriv.errors import PrivacyWarning
from indpriv.norm_log.fields import RecordingPolicy, StepSettings

GOOD = {"total_steps": 4, "noise_multiplier": 1.0, "max_grad_norm": 2.0, "sample_rate": 0.1}


def make(norms=((0.5, 1.0, 9.0), (0.1, 2.0, 0.0)), steps=(0, 2), **changes):
    return NormLog.from_arrays(np.array(norms), np.array(steps), **{**GOOD, **changes})


def test_codes_are_relative_to_the_clipping_norm_of_their_own_step():
    log = make(max_grad_norm=np.array([1.0, 1.0, 2.0, 2.0]), rounding=0.1)
    assert np.array_equal(np.minimum(log.read(), log.levels.top), [[5, 10, 10], [1, 10, 0]])


def test_no_rounding_keeps_the_norms():
    assert np.array_equal(make(rounding=0).read(), [[0.5, 1.0, 9.0], [0.1, 2.0, 0.0]])


def test_thin_keeps_only_what_a_larger_k_would_have_recorded():
    log = make(norms=np.arange(12).reshape(4, 3) / 10, steps=[0, 1, 2, 3])
    thin = log.thin(2)
    assert thin.recorded_steps.tolist() == [0, 2]
    assert np.array_equal(thin.read(), log.read()[[0, 2]])
    assert thin.total_steps == log.total_steps


def test_take_and_blocks_agree_with_read():
    log = make()
    assert np.array_equal(log.take([2, 0]).read(), log.read()[:, [2, 0]])
    assert log.take([2, 0]).example_ids.tolist() == [2, 0]
    whole = np.concatenate([log.read(0, 2), log.read(2)], axis=1)
    assert np.array_equal(whole, log.read())


def test_infinite_norm_counts_as_clipped():
    with pytest.warns(
        PrivacyWarning, match=r"1 gradient norms of 1 examples are infinite, e.g. ids \[0\]"
    ):
        log = make(norms=[[np.inf]], steps=[0])
    assert log.levels.relative(log.read())[0, 0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"norms": [[0.1, np.nan, 0.2]], "steps": [0]},
            r"NaN gradient norms for 1 examples, e.g. ids \[1\]",
        ),
        (
            {"norms": [[0.1, -0.5, 0.2]], "steps": [0]},
            r"negative gradient norms for 1 examples, e.g. ids \[1\]",
        ),
        ({"norms": [0.1, 0.2], "steps": [0]}, "norms has shape"),
        ({"norms": [["a"]], "steps": [0]}, "norms has shape"),
        ({"norms": np.zeros((1, 0)), "steps": [0]}, "no examples"),
        ({"steps": [2, 1]}, "strictly increasing"),
        ({"steps": [0, 0]}, "strictly increasing"),
        ({"steps": [-1, 0]}, "at least 0"),
        ({"steps": [0, 4]}, "ends at 4"),
        ({"steps": [0]}, "recorded_steps has shape"),
        ({"steps": [0.0, 1.5]}, "whole number"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0"),
        ({"noise_multiplier": np.nan}, "noise_multiplier=nan"),
        ({"noise_multiplier": [1.0, 1.0, np.inf, 1.0]}, "noise_multiplier=inf at step 2"),
        ({"noise_multiplier": [1.0, 1.0]}, "noise_multiplier has shape"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"sample_rate": 1.3}, r"sample_rate=1.3 is not in \(0, 1\]"),
        ({"sample_rate": 0.0}, "sample_rate=0.0"),
        ({"sample_rate": "often"}, "sample_rate='often' is not a number"),
        ({"example_ids": [7, 7, 8]}, "1 duplicates, e.g.*7"),
        ({"example_ids": [1, 2]}, "example_ids has shape"),
        ({"unit_ids": [1]}, "unit_ids has shape"),
        ({"rounding": 2.0}, "rounding=2.0"),
        ({"rounding_mode": "down"}, "rounding_mode='down'"),
        ({"sampler": "lottery"}, "sampler='lottery'"),
        ({"neighbouring": "replace"}, "neighbouring='replace'"),
        ({"unit": "planet"}, "unit='planet'"),
        ({"unit": "user"}, 'unit="user" needs unit ids'),
    ],
)
def test_bad_input_is_refused_by_name_and_value(changes, message):
    with pytest.raises(InputError, match=message):
        make(**changes)


def test_a_log_without_records_is_the_worst_case():
    log = NormLog.from_arrays(np.zeros((0, 3)), [], **GOOD)
    assert log.n_examples == 3
    assert log.coverage == 0


def test_one_example_is_a_log():
    assert make(norms=[[0.3]], steps=[0]).n_examples == 1


def test_a_header_has_a_policy_under_its_own_names():
    kept = {"every": 4, "free_records": True, "exact_examples": 3}
    policy = RecordingPolicy.from_header({"policy": kept})
    assert policy == RecordingPolicy(every=4, batch_norms=True, reference_examples=3)
    assert RecordingPolicy.from_header({"policy": policy.to_dict()}) == policy
    with pytest.raises(EvidenceError, match=r"the policy in the header .* is none: 'batch_norms'"):
        RecordingPolicy.from_header({"policy": {**kept, "batch_norms": True}})


def test_between_records_the_smallest_clipping_norm_is_counted():
    clip = [5.0, 4.0, 6.0, 3.0, 7.0, 2.0, 8.0]
    given = StepSettings.from_values(7, 1.0, clip, 0.1)
    steady = given.steady_between(np.array([1, 4])).max_grad_norm
    np.testing.assert_array_equal(steady, [4.0, 4.0, 3.0, 3.0, 7.0, 2.0, 2.0])
    np.testing.assert_array_equal(given.steady_between(np.arange(7)).max_grad_norm, clip)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_norms_in_less_precision_are_rounded_up_and_make_estimates(dtype):
    # 0.1 of float16 is 0.09998, and 0.2500 + 4e-5 is 0.25: each a level too low
    norms, levels = np.array([[0.1, 0.25 + 4e-5]]), 1e-3 if dtype == "float16" else 1e-4
    given = {"total_steps": 1, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.1}
    given["rounding"] = levels
    exact = NormLog.from_arrays(norms, [0], **given)
    drawn = ([0, 0], [0, 1])
    batches = {"batch_norms": (*drawn, norms[0].astype(dtype)), "sampler": "shuffled"}
    narrow = NormLog.from_arrays(norms.astype(dtype), [0], **given)
    of_batches = NormLog.from_arrays(norms, [0], **given | batches)
    assert (narrow.read() >= exact.read()).all()
    assert (of_batches.batch_norms.read(0, 2).norm >= exact.read()[0]).all()
    for log, claim in ((exact, "exact"), (narrow, "estimate"), (of_batches, "estimate")):
        found = account(log, delta=1e-5)
        assert found.claim == claim
        assert (dtype in found.claim_reason) == (claim == "estimate")
    assert account(of_batches, delta=1e-5).account.participation == "known"
