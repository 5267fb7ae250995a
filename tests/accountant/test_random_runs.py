"""Epsilons of random runs in each relation, compared with dp_accounting's loss distributions.

Noise multipliers of 0.3 and 50, single steps and steps without sampling are among them.
"""

from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from indpriv import NormLog, account
from indpriv.accountant.method import Method
from indpriv.accountant.pairs import tight_worst_case

DELTA = 1e-5
# exp(epsilon) overflows in dp_accounting beyond 709; pld/test_hard_grid.py compares brackets of
# epsilons up to 5 million with exact values
_LARGEST = 600.0


def drawn(rng):
    n, rate = int(rng.choice([20, 300, 5000])), float(rng.choice([1.0, 0.3, 0.05, 0.01]))
    return {
        "sigma": float(rng.choice([0.3, 0.8, 1.5, 5.0, 50.0])),
        "rate": rate,
        "steps": int(rng.choice([1, 10, 100, 500])),
        "norm": float(rng.choice([0.1, 0.5, 1.0])),
        "n": n,
        "cap": max(1, int(n * rate * rng.uniform(0.7, 1.5))),
        "rows": int(rng.integers(2, 5)),
    }


def log_of(run, norms, **changes):
    settings = {
        "noise_multiplier": run["sigma"],
        "max_grad_norm": 1.0,
        "sample_rate": run["rate"],
        "total_steps": run["steps"],
        **changes,
    }
    return NormLog.from_arrays(np.array([norms]), [0], **settings)


def one_example(run):
    table = account(log_of(run, [run["norm"]]), delta=DELTA, accountant="pld")
    return table.epsilon[0]


def one_person(run):
    rows = log_of(run, [1.0] * run["rows"], unit="user", unit_ids=["a"] * run["rows"])
    return account(rows, delta=DELTA, accountant="pld").epsilon[0]


def replaced(run):
    log = replace(log_of(run, [1.0]), neighbouring="replace_one")
    return tight_worst_case(log, Method(delta=DELTA), np.inf)


def truncated(run):
    options = {"sampler": "truncated_poisson", "max_batch_size": run["cap"]}
    return tight_worst_case(log_of(run, [1.0] * run["n"], **options), Method(delta=DELTA), np.inf)


def sampled(noise, rate, width, **options):
    return pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=width, **options
    )


def step_of_example(run, width):
    return sampled(run["sigma"] / run["norm"], run["rate"], width)


def step_of_person(run, width):
    number = np.arange(run["rows"] + 1)
    law = stats.binom.pmf(number, run["rows"], run["rate"])
    return pld.from_mixture_gaussian_mechanism(
        run["sigma"], number[law > 0], law[law > 0], value_discretization_interval=width
    )


def step_of_replaced(run, width):
    relation = NeighboringRelation.REPLACE_ONE
    return sampled(run["sigma"], run["rate"], width, neighboring_relation=relation)


def fixed_size(run):
    log = replace(log_of(run, [1.0], sampler="fixed_size"), neighbouring="replace_one")
    return tight_worst_case(log, Method(delta=DELTA), np.inf)


def step_of_fixed_size(run, width):
    """Losses above 0 of a Poisson pair, and their opposites: see `pairs`."""
    law = sampled(run["sigma"] / 2, run["rate"], width)._pmf_remove.to_dense_pmf()
    losses = law._lower_loss + np.arange(law.size)
    above = losses > 0
    losses, mass = losses[above], law._probs[above]
    found = dict(zip(losses.tolist(), mass.tolist(), strict=True))
    opposite = mass * np.exp(-losses * width)
    found |= dict(zip((-losses).tolist(), opposite.tolist(), strict=True))
    found[0] = max(0.0, 1 - sum(found.values()))
    create = pld.PrivacyLossDistribution.create_from_rounded_probability
    return create(found, law._infinity_mass, width)


def step_of_truncated(run, width):
    n, cap, rate = run["n"], run["cap"], run["rate"]
    plain, full = sampled(run["sigma"], rate, width), stats.binom.sf(cap - 1, n - 1, rate)
    if not full:
        return plain
    then = stats.binom.sf(cap, n, rate) * cap / n / full
    return sampled(run["sigma"] / 2, then, width).compute_mixture(plain, full)


def ends(step, run):
    """Bounds of the true epsilon: the peer's is too large by about the square of a width."""
    width, before = min(run["rate"] / run["sigma"] / 4, 0.05), np.inf
    for _ in range(12):
        found = step(run, width).self_compose(run["steps"]).get_epsilon_for_delta(DELTA)
        if before - found <= 3e-5 * found:
            return found - (before - found), found
        before, width = found, width / 2
    raise AssertionError(f"dp_accounting does not converge: {run}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "step", "n_runs"),
    [
        (one_example, step_of_example, 200),
        (replaced, step_of_replaced, 200),
        (truncated, step_of_truncated, 200),
        (fixed_size, step_of_fixed_size, 200),
        (one_person, step_of_person, 200),  # five minutes, nearly all of them the peer's
    ],
)
def test_epsilons_are_those_of_dp_accounting(ours, step, n_runs):
    rng, compared = np.random.default_rng(3), 0
    while compared < n_runs:
        run = drawn(rng)
        least, most = ends(step, run)
        if most > _LARGEST:
            continue
        # Smoothing moves log delta by 5e-5 [2.1]: of small epsilons, by up to 4e-4
        assert least * (1 - 1e-9) <= ours(run) <= most * (1 + 5e-4), run
        compared += 1
