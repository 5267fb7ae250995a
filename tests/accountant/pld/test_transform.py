"""One step's transform and the bound of its decay, compared with 25-digit quadrature."""

import mpmath
import numpy as np
import pytest

from indpriv.accountant.pld import decay, transform
from indpriv.accountant.pld.decay import log_decay
from indpriv.accountant.pld.loss_sum import StepLaws
from indpriv.accountant.pld.quadrature import QUADRATURE_ERROR

CASES = [
    (0.3, 0.05, "remove", 4.0),
    (2.0, 0.001, "remove", 1.5),
    (1.0, 0.3, "add", 6.0),
    (0.05, 0.5, "add", 20.0),
]


def reference(shift, rate, direction, w):
    """E[f^(w + 1)] (remove) or E[f^-w] (add), z standard normal."""
    with mpmath.workdps(25):
        shift, rate, power = (
            mpmath.mpf(shift),
            mpmath.mpf(rate),
            w + 1 if direction == "remove" else -w,
        )

        def integrand(z):
            return (
                mpmath.npdf(z) * (1 - rate + rate * mpmath.exp(z * shift - shift**2 / 2)) ** power
            )

        top = 12 + max(float(mpmath.re(power)), 1.0) * float(shift)
        return mpmath.quadgl(integrand, np.linspace(-12, top, 24).tolist(), maxdegree=5)


@pytest.mark.parametrize(("shift", "rate", "direction", "tilt"), CASES)
def test_a_contour_is_the_transform_to_its_stated_error(shift, rate, direction, tilt):
    kinds, frequencies = StepLaws(np.array([shift]), np.array([rate])), 0.37 * np.arange(40)
    table = transform.contour_table(kinds, tilt, direction, frequencies)
    at_rest = reference(shift, rate, direction, mpmath.mpf(tilt))
    law = transform.tilted_law(kinds, tilt, direction)
    assert law.log_transform[0] == pytest.approx(float(mpmath.log(at_rest)), rel=1e-12, abs=1e-18)
    for column in (1, 39):
        w = mpmath.mpc(tilt, frequencies[column])
        truth = mpmath.log(reference(shift, rate, direction, w) / at_rest)
        off = abs(complex(table.logarithm[0, column]) - complex(truth))
        allowed = table.error[0] * (1 + abs(complex(w))) + QUADRATURE_ERROR
        assert off <= allowed / abs(complex(mpmath.exp(truth)))
        assert off <= 1e-12


@pytest.mark.parametrize("n_frequencies", [1, 2, 3, 50, 1000])
def test_any_number_of_frequencies_gives_the_same_values(n_frequencies):
    law = transform.tilted_law(
        StepLaws(np.array([0.7, 0.2]), np.array([0.1, 0.4])), 3.0, "remove", highest_frequency=20.0
    )
    found = transform.characteristic_log(law, 0.02 * np.arange(n_frequencies))
    plain = np.array(
        [np.exp(1j * np.outer(0.02 * np.arange(n_frequencies), row)) for row in law.losses]
    )
    plain = np.log(np.einsum("kfn,kn->kf", plain, law.weights))
    np.testing.assert_allclose(found, plain, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("shift", "rate", "direction", "tilt"), CASES)
def test_a_cut_law_is_the_transform_of_what_is_left(shift, rate, direction, tilt):
    kinds = StepLaws(np.array([shift]), np.array([rate])).cut_at(1e-3, direction)
    law = transform.tilted_law(kinds, tilt, direction)
    power = tilt + 1 if direction == "remove" else -tilt
    low, high = (-12.0, kinds.cut[0]) if direction == "remove" else (-kinds.cut[0], 12.0 + shift)
    z, step = np.linspace(low, high, 400_001, retstep=True)
    values = (
        np.exp(-(z**2) / 2)
        / np.sqrt(2 * np.pi)
        * (1 - rate + rate * np.exp(z * shift - shift**2 / 2)) ** power
    )
    assert law.log_transform[0] == pytest.approx(
        np.log(step * (values.sum() - (values[0] + values[-1]) / 2)), abs=1e-9
    )


@pytest.mark.parametrize(("shift", "rate", "direction", "tilt"), CASES)
def test_decay_lies_above_the_transform_at_and_beyond_each_frequency(shift, rate, direction, tilt):
    kinds = StepLaws(np.array([shift]), np.array([rate]))
    frequencies = np.geomspace(0.1, 200.0, 25)
    bound = log_decay(kinds, tilt, direction, frequencies)[0]
    fine = 0.05 * np.arange(5000)
    truth = transform.contour_table(kinds, tilt, direction, fine).logarithm[0].real
    assert np.all(np.diff(bound) <= 0)
    for omega, above in zip(frequencies, bound, strict=True):
        assert above >= truth[fine >= omega].max() - 1e-12


@pytest.mark.parametrize(("direction", "tilt"), [("remove", 4.0), ("add", 6.0)])
def test_shared_decay_lies_above_each_transform(monkeypatch, direction, tilt):
    monkeypatch.setattr(decay, "_MANY", 0)
    shift, rate = np.meshgrid(np.geomspace(0.3, 2.0, 12), [0.01, 0.3])
    kinds, frequencies = StepLaws(shift.ravel(), rate.ravel()), np.geomspace(0.1, 100.0, 20)
    bound = log_decay(kinds, tilt, direction, frequencies)
    fine = 0.05 * np.arange(2500)
    truth = transform.contour_table(kinds, tilt, direction, fine).logarithm.real
    assert np.all(np.diff(bound, axis=1) <= 1e-15)
    for column, omega in enumerate(frequencies):
        assert np.all(bound[:, column] >= truth[:, fine >= omega].max(axis=1) - 1e-12)
    own = decay._own_decay(kinds, tilt, direction, frequencies)
    counts = own > -0.2  # runs of many steps need no more
    assert np.all(bound[counts] <= 0.6 * own[counts])  # what sharing loses, at most
    assert np.mean(bound == own) < 0.7  # else nothing was shared
