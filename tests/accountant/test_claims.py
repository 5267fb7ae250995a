from dataclasses import replace

import numpy as np
import pytest

from indpriv import NormLog
from indpriv.accountant import Method
from indpriv.accountant.method import claim_of as claim_by


def claim_of(log, between_records):
    return claim_by(log, Method(delta=1e-5, between_records=between_records))


def make_log(recorded_steps=(0, 1, 2, 3), **changes):
    arguments = {
        "total_steps": 4,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.1,
        **changes,
    }
    return NormLog.from_arrays(
        np.full((len(recorded_steps), 2), 0.5), list(recorded_steps), **arguments
    )


@pytest.mark.parametrize(
    ("log", "between_records", "reason"),
    [
        (make_log(), "last", "Every step was recorded, and norms are rounded up."),
        (make_log(rounding=0), "closest", "Every step was recorded, and norms are not rounded."),
        (
            make_log((0, 2)),
            "worst_case",
            "Steps without a record count at max_grad_norm, and norms are rounded up.",
        ),
        (
            make_log((0, 2), individually_clipped=True),
            "last",
            "Training clipped each example at its last recorded level, and norms are rounded up.",
        ),
        (
            make_log((2, 3)),
            "last",
            "Every step was recorded from step 2 on, earlier ones count at max_grad_norm, and norms are rounded up.",
        ),
        (
            make_log(()),
            "last",
            "Nothing was recorded, so that every step counts at max_grad_norm, and norms are rounded up.",
        ),
    ],
)
def test_exact(log, between_records, reason):
    assert claim_of(log, between_records) == ("exact", reason)


@pytest.mark.parametrize(
    ("log", "between_records", "word"),
    [
        (make_log((0, 2)), "last", "last record"),
        (make_log((0, 2)), "closest", "closest record"),
        (make_log((0, 2), individually_clipped=True), "closest", "closest record"),
        (make_log((0, 1, 2)), "last", "3 of 4 steps"),
        (make_log(rounding_mode="nearest"), "last", "nearest"),
        (make_log((0, 2), rounding_mode="nearest"), "worst_case", "under-report"),
        (make_log(sampler="shuffled"), "last", "shuffled sampler"),
        (make_log(sampler="other"), "worst_case", "another sampler"),
        (
            make_log(caveats=["norms were replayed from checkpoints"]),
            "worst_case",
            "Norms were replayed from checkpoints.",
        ),
    ],
)
def test_estimate(log, between_records, word):
    claim, reason = claim_of(log, between_records)
    assert claim == "estimate"
    assert word in reason


def test_an_estimate_names_every_reason():
    log = make_log(
        (0, 2), rounding_mode="nearest", sampler="other", caveats=["replayed", "in float16."]
    )
    reason = claim_of(log, "last")[1]
    assert [
        reason.count(word)
        for word in ("nearest", "another sampler", "Replayed.", "In float16.", "2 of 4")
    ] == [1] * 5


def test_a_record_that_cannot_be_read_is_no_record_of_its_step():
    log = replace(make_log(), unreadable_steps=(1, 2))
    claim, reason = claim_of(log, "last")
    assert claim == "exact"
    assert reason == (
        "Every step has a record, readable or not, and norms are rounded up. 2 of the 4 records "
        "cannot be read: the steps that they govern count at max_grad_norm."
    )
    thinner = replace(make_log((0, 2)), unreadable_steps=(2,))
    claim, reason = claim_of(thinner, "last")
    assert claim == "estimate"
    assert "only 1 of 4 steps" in reason.lower()
    assert "1 of the 2 records cannot be read" in reason
    assert claim_of(thinner.thin(4), "worst_case")[1].count("cannot be read") == 0
