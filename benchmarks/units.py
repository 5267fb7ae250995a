"""Epsilon of 50,000 people with 1 to 20 rows each: CPU seconds; and how far above dp_accounting's mixture of Gaussians.

    python benchmarks/units.py

The peer's Rényi divergence is integrated from its own privacy loss, MixtureGaussianPrivacyLoss, of the sums of 1 to k
equal rows with binomial weights. At most 1e-4 above it and never below is what the account promises; 1e-8 is rounding of
the peer's sum, whose logarithm is small.
"""

from __future__ import annotations

import time

import numpy as np
from dp_accounting.pld import privacy_loss_mechanism
from scipy import special, stats

from indpriv import NormLog, account
from indpriv.accountant.steps import StepKinds

DELTA = 1e-6
N_PEOPLE, MOST_ROWS, N_RECORDS, TOTAL_STEPS = 50_000, 20, 30, 3_000
NOISE, RATE = 2.0, 0.01
PEER_ROWS, PEER_NOISE, PEER_ORDERS = (2, 3, 8, 20, 41, 64), (0.7, 1.0, 4.0), (1.5, 2.0, 4.0)
_PEER_STEP = 0.01  # of its numerical integration, in standard deviations
_PEER_REACH = 14.0


def people() -> NormLog:
    """A log of 50,000 people; a person's rows have norms of a common size that falls along the run."""
    rng = np.random.default_rng(0)
    n_rows = rng.integers(1, MOST_ROWS + 1, N_PEOPLE)
    person = np.repeat(np.arange(N_PEOPLE), n_rows)
    size = rng.lognormal(-1.0, 0.6, N_PEOPLE)[person] * rng.lognormal(0.0, 0.4, len(person))
    falling = np.linspace(1.5, 0.3, N_RECORDS)[:, None]
    norms = (size * falling).astype(np.float32) * rng.lognormal(
        0, 0.3, (N_RECORDS, len(person))
    ).astype(np.float32)
    return NormLog.from_arrays(
        norms,
        np.arange(0, TOTAL_STEPS, TOTAL_STEPS // N_RECORDS),
        total_steps=TOTAL_STEPS,
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
        sample_rate=RATE,
        unit="user",
        unit_ids=person,
    )


def peer_divergence(k: int, noise_multiplier: float, order: float) -> float:
    """Rényi divergence of k clipped rows, by the peer's privacy loss of its mixture of Gaussians."""
    j = np.arange(k + 1)
    weights = stats.binom.pmf(j, k, RATE)
    kept = weights > 0
    loss = privacy_loss_mechanism.MixtureGaussianPrivacyLoss(
        noise_multiplier, j[kept], weights[kept]
    )
    reach = _PEER_REACH * noise_multiplier
    x = np.arange(-reach - order * k, reach, _PEER_STEP * noise_multiplier)
    values = np.array([loss.privacy_loss(float(at)) for at in x])
    log_moment = special.logsumexp(order * values - np.square(x / noise_multiplier) / 2)
    return float((log_moment + np.log(_PEER_STEP / np.sqrt(2 * np.pi))) / (order - 1))


def main() -> None:
    """Print the ratios to the peer, then the time."""
    excess = []
    for k in PEER_ROWS:
        for noise in PEER_NOISE:
            mine = StepKinds(np.array([1 / noise]), np.array([RATE]), np.array([k]))
            found = mine.divergences_at(np.zeros(len(PEER_ORDERS), np.int64), np.array(PEER_ORDERS))
            excess += [
                value / peer_divergence(k, noise, order) - 1
                for value, order in zip(found, PEER_ORDERS, strict=True)
            ]
    print(
        f"{len(excess)} mixtures of up to {max(PEER_ROWS)} rows, over dp_accounting's: {min(excess):.1e} to {max(excess):.1e}"
    )
    log = people()
    wall, cpu = time.perf_counter(), time.process_time()
    table = account(log, delta=DELTA)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"{len(table):,} people with {log.n_examples:,} rows, {N_RECORDS} records, {TOTAL_STEPS:,} steps: "
        f"{cpu:.1f} s of CPU ({wall:.1f} s on the clock); median epsilon {np.median(table.epsilon):.3f}, worst case "
        f"{table.worst_case_epsilon:.3f}"
    )


if __name__ == "__main__":
    main()
