import numpy as np
import pytest

from indpriv.release import Request, mechanisms
from indpriv.release.draw import draw

COUNTS = np.full(100, 7)
GRID = np.arange(1, 101) / 50
REQUESTS = [
    Request(epsilon=0.3),
    Request(mean=True, epsilon=0.3),
    Request((), mean=True, epsilon=0.3, public_n=700),
    Request(mean=True, epsilon=0.3, method="histogram"),
    Request((0.5,), epsilon=0.3, by="sex", groups=("Male",)),
    Request(mean=True, epsilon=0.3, delta=1e-6, method="descent"),
    Request((0.2, 0.8), epsilon=0.3, delta=1e-6, method="descent"),
    Request((0.2, 0.8), epsilon=0.3, delta=1e-6, method="descent", public_n=700),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: f"{request.method} {request.shares}")
def test_what_opendp_charges_adds_up_to_the_budget(request_, monkeypatch):
    charges = []
    monkeypatch.setattr(mechanisms, "_check_cost", lambda charged, share: charges.append(charged))
    draw(request_, COUNTS, GRID)
    limit = request_.epsilon
    if request_.method == "descent":  # charged in zero-concentrated privacy
        limit = 0.5 / mechanisms.gaussian_scale(request_.epsilon, request_.delta) ** 2
    assert 0.999 * limit < sum(charges) <= limit


def test_quantiles_do_not_decrease(monkeypatch):
    cells = iter([60, 20, 40])
    monkeypatch.setattr(mechanisms, "select_quantile", lambda *_: next(cells))
    assert (
        list(draw(Request((0.1, 0.5, 0.9), epsilon=1), COUNTS, GRID).quantiles.values()) == GRID[[20, 40, 60]].tolist()
    )


def test_a_mean_that_is_all_noise_is_not_given(monkeypatch):
    monkeypatch.setattr(mechanisms, "noisy_sums", lambda *_: (-3000, 2000))
    figures = draw(Request((), mean=True, epsilon=1), COUNTS, GRID)
    assert (figures.mean, figures.mean_error, figures.count) == (None, None, -10)
