"""The paper's accounts computed again, and what the same runs are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from indpriv import NormLog, account
from indpriv._types import FloatArray
from indpriv.accountant.laws import gaussian_epsilons
from indpriv.accountant.rdp import compute_rdp, epsilon_offsets
from reports.fedcdp import paper
from reports.fedcdp.paper import CLIENT_RATE, DELTA, NOISE, Setting

_CLIENTS = (100, 1_000, 10_000)
_COPIES = (10, 100)
_COIN, _LOCAL_STEPS, _LOCAL_RATE = 0.05, 100, 0.01  # of the example of shared coins, noise 1


def accounts() -> dict[str, Any]:
    """Table VI, honest figures beside it, and the computations of what does not hold."""
    return {
        "table_6": {name: table_6(one) for name, one in paper.SETTINGS.items()},
        "honest": {name: honest(one) for name, one in paper.SETTINGS.items()},
        "most_frequent": {str(n): _most_frequent(n) for n in _CLIENTS},
        "copies": {str(n): known(10 * n / NOISE**2) for n in _COPIES},
        "cancer_copies": known(paper.SETTINGS["cancer"].rounds * 10 / NOISE**2),
        "shared_coins": shared_coins(),
        "fixed_size": {
            str(noise): [
                worst_case(noise, CLIENT_RATE, 100),
                worst_case(noise, CLIENT_RATE, 100, "fixed_size", "replace_one"),
            ]
            for noise in (1.0, NOISE)
        },
    }


def table_6(setting: Setting) -> list[float]:
    """Fed-CDP with one local step and with all, Fed-SDP, as the paper computes them.

    The first and the last take one round more than there is.
    """
    steps = setting.rounds * setting.local_steps
    return [
        _moments(paper.STATED_RATE, setting.rounds + 1),
        _moments(paper.STATED_RATE, steps),
        _moments(CLIENT_RATE, setting.rounds + 1),
    ]


def honest(setting: Setting) -> dict[str, float]:
    """Epsilons under known participation (zero out); of clients of Fed-SDP also with secret coins.

    A row is used once a round. A client adds up to B rows to each of L noisy steps.
    """
    expected = max(1, round(CLIENT_RATE * setting.rounds))
    row = 1 / NOISE**2
    client = setting.local_steps * setting.batch**2 / NOISE**2
    return {
        "rounds": expected,
        "row": known(expected * row),
        "row_of_layers": known(expected * row * paper.LAYERS),
        "row_in_every_round": known(setting.rounds * row),
        "client_one_round": known(client),
        "client_one_round_one_step": known(setting.batch**2 / NOISE**2),
        "client": known(expected * client),
        "sdp_secret": worst_case(NOISE, CLIENT_RATE, setting.rounds),
        "sdp_client": known(expected * row),
        "sdp_client_in_every_round": known(setting.rounds * row),
        "sdp_row": known(expected * 4 * row),  # its client's update is replaced: twice as far
    }


def known(squared_mu: float) -> float:
    """Epsilon where everyone knows who took part."""
    return float(gaussian_epsilons(np.array([np.sqrt(squared_mu)]), DELTA)[1][0])


def worst_case(
    noise: float,
    rate: float,
    steps: int,
    sampler: str = "poisson",
    neighbouring: str | None = None,
    **method: Any,
) -> float:
    """Epsilon of a run of equal steps, for a member at the clipping norm."""
    log = NormLog.from_arrays(
        [[1.0]],
        [0],
        total_steps=steps,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=rate,
        sampler=sampler,
    )
    method = {"delta": DELTA, "neighbouring": neighbouring} | method
    return account(log, **method).worst_case_epsilon


def _moments(rate: float, steps: int) -> float:
    return worst_case(NOISE, rate, steps, orders=paper.ORDERS, conversion="mironov2017")


def _most_frequent(clients: int) -> dict[str, float]:
    """Of the client that takes part most often in 100 rounds: the median number of rounds."""
    rounds = float(stats.binom.ppf(0.5 ** (1 / clients), 100, CLIENT_RATE))
    return {"rounds": rounds, "epsilon": known(rounds / NOISE**2)}


def shared_coins() -> dict[str, list[float]]:
    """Of a row: as if the product of two rates were drawn anew in each step, and as it is.

    A client comes by one coin; then it draws its rows anew in each local step. The rest of its
    update tells whether it came, so the second law is (1 - coin) times "out", plus coin times the
    local steps. Loss distributions: its delta is the coin times the delta of the local steps.
    """
    return {
        "moments": shared_coins_by_moments(),
        "pld": [
            worst_case(1.0, _COIN * _LOCAL_RATE, _LOCAL_STEPS, accountant="pld"),
            worst_case(1.0, _LOCAL_RATE, _LOCAL_STEPS, accountant="pld", delta=DELTA / _COIN),
        ],
    }


def shared_coins_by_moments() -> list[float]:
    """The two by the moments accountant of the paper."""
    orders = np.array(paper.ORDERS)
    local = _LOCAL_STEPS * _divergences(_LOCAL_RATE, orders)
    shared = np.logaddexp(np.log1p(-_COIN), np.log(_COIN) + (orders - 1) * local) / (orders - 1)
    independent = _LOCAL_STEPS * _divergences(_COIN * _LOCAL_RATE, orders)
    offsets = epsilon_offsets(orders, DELTA, "mironov2017")
    return [float((one + offsets).min()) for one in (independent, shared)]


def _divergences(rate: float, orders: FloatArray) -> FloatArray:
    found = compute_rdp(sample_rate=rate, noise_multiplier=1.0, relative_norms=[1.0], orders=orders)
    return np.asarray(found).reshape(len(orders))
