import numpy as np
import pytest

from indpriv.release import Request, mechanisms
from indpriv.release.publish import draw

COUNTS = np.full(100, 7)
GRID = np.arange(1, 101) / 50
REQUESTS = [
    Request(epsilon=0.3),
    Request(mean=True, epsilon=0.3),
    Request(mean=True, epsilon=0.3, method="histogram"),
    Request((0.5,), epsilon=0.3, by="sex", groups=("Male",)),
    Request(mean=True, epsilon=0.3, delta=1e-6, method="descent"),
    Request((0.2, 0.8), epsilon=0.3, delta=1e-6, method="descent"),
]


def charged(request, monkeypatch):
    """What OpenDP charges for a draw, over the budget."""
    charges = []
    monkeypatch.setattr(mechanisms, "_check_cost", lambda charged, share: charges.append(charged))
    draw(request, COUNTS, GRID)
    limit = request.epsilon
    if request.method == "descent":  # charged in zero-concentrated privacy
        limit = 0.5 / mechanisms.gaussian_scale(request.epsilon, request.delta) ** 2
    return sum(charges) / limit


@pytest.mark.parametrize(
    "request_", REQUESTS, ids=lambda request: f"{request.method} {request.shares}"
)
def test_what_opendp_charges_adds_up_to_the_budget(request_, monkeypatch):
    assert 0.999 < charged(request_, monkeypatch) <= 1


@pytest.mark.parametrize("request_", [request for request in REQUESTS if len(request.shares) > 1])
def test_the_same_test_finds_statistics_that_do_not_share_the_budget(request_, monkeypatch):
    parts = len(request_.shares)
    monkeypatch.setattr(Request, "shares", ("everything",))
    assert charged(request_, monkeypatch) == pytest.approx(parts, rel=1e-3)


def test_the_same_test_finds_a_round_too_many(monkeypatch):
    descend = mechanisms.descend_to_quantile

    def one_more(counts, grid, quantile, size, answer):
        answer(0)
        return descend(counts, grid, quantile, size, answer)

    monkeypatch.setattr(mechanisms, "descend_to_quantile", one_more)
    request = Request((0.2, 0.8), epsilon=0.3, delta=1e-6, method="descent")
    over = 2 / 3 / mechanisms.ROUNDS  # the count of people has a third
    assert charged(request, monkeypatch) == pytest.approx(1 + over, rel=1e-3)


def test_quantiles_do_not_decrease(monkeypatch):
    cells = iter([60, 20, 40])
    monkeypatch.setattr(mechanisms, "select_quantile", lambda *_: next(cells))
    assert (
        list(draw(Request((0.1, 0.5, 0.9), epsilon=1), COUNTS, GRID)["quantiles"].values())
        == GRID[[20, 40, 60]].tolist()
    )


def test_a_mean_that_is_all_noise_is_not_given(monkeypatch):
    monkeypatch.setattr(mechanisms, "noisy_sums", lambda *_: (-3000, 2000))
    figures = draw(Request((), mean=True, epsilon=1), COUNTS, GRID)
    error = figures["expected_error"]["mean"]
    assert (figures["mean"], error, figures["count"]) == (None, None, -10)
