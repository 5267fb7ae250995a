"""When measured noise fails the check."""

import pytest

from indpriv.norm_log.evidence import noise_check
from indpriv.norm_log.session_counts import NoiseCounts

SOUND = NoiseCounts(
    values=10**6,
    variance=1.0005,
    least_variance=0.97,
    least_values=2000,
    fourth_moment=3.01,
    previous=2.0,
    first=-1.5,
    repeated=0.5,
    along_sum=0.5,
)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "passed"),
        ({"variance": 1.5}, "passed"),  # more noise than accounted
        ({"variance": 0.985}, "failed"),
        ({"variance": 1.5, "fourth_moment": 9.0}, "passed"),  # in some parameters
        (
            {"variance": 0.9985, "fourth_moment": 3.0, "values": 10**9},
            "passed",
        ),  # less than a thousandth of the noise
        ({"least_variance": 0.0, "least_values": 60}, "failed"),
        ({"least_variance": 0.5, "least_values": 60}, "passed"),  # too few values to tell
        ({"fourth_moment": 3.2}, "failed"),
        ({"fourth_moment": 3.2, "values": 10**4}, "passed"),
        ({"previous": 9.0}, "failed"),
        ({"repeated": 9.0}, "failed"),
        ({"first": -9.0}, "failed"),
        ({"along_sum": -9.0}, "failed"),
    ],
)
def test_what_fails(changes, status):
    assert noise_check(SOUND.model_copy(update=changes)).status == status


def test_noise_that_was_not_measured_is_not_checked():
    assert noise_check(None).status == "not checked"
