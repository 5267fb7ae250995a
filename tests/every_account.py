"""Small logs of every kind that there is an account of: by name, what makes one, and how to account."""

from dataclasses import replace

import numpy as np

from indpriv import NormLog, PrivacyFilter
from indpriv.norm_log.norm_log import Filtered

DELTA = 1e-5
N = 230  # examples, or people of one to three rows each: five parts of 50


def log_of(n=N, **options):
    """Six records in 30 steps, each example in some batches; a few are clipped all the time."""
    rng = np.random.default_rng(0)
    norms = rng.gamma(2.0, 0.3, (6, n)).round(2)
    norms[:, ::40] = 2.0
    step, position = np.nonzero(rng.random((30, n)) < 0.2)
    batch_norms = (step, position, np.maximum(norms[step // 5, position], 0.01))
    run = {"total_steps": 30, "noise_multiplier": 1.2, "max_grad_norm": 1.0, "sample_rate": 0.2}
    return NormLog.from_arrays(
        norms, 5 * np.arange(6), **run | {"batch_norms": batch_norms} | options
    )


def people(together=True, rows=(1, 2, 3), **options):
    """The same of people, whose rows are neighbours in the log or are not."""
    owners = np.repeat(np.arange(N), np.resize(rows, N))
    if not together:
        owners = np.random.default_rng(1).permutation(owners)
    owners = np.array([f"person {owner}" for owner in owners])
    return log_of(len(owners), unit="user", unit_ids=owners, **options)


def filtered(log):
    """The log of a run whose filter left out who had spent the most, in the middle."""
    clipped = np.flatnonzero((log.read() >= 100).all(axis=0))
    left_out_at = np.full(log.n_examples, 30)
    left_out_at[clipped] = 15
    cap = float(PrivacyFilter(8.0, 1.0).spent(log, left_out_at).max())
    return replace(log, filtered=Filtered(8.0, cap, left_out_at))


KNOWN, REPLACED = {"participation": "known"}, {"neighbouring": "replace_one"}
MOVING_NOISE = {"noise_multiplier": np.linspace(1.0, 1.4, 30)}
ACCOUNTS = {
    "rdp": (log_of, {}),
    "pld": (log_of, {"accountant": "pld"}),
    "yu2023": (lambda: log_of(rounding=0), {"preset": "yu2023"}),
    "clipping norm": (lambda: log_of(clipping_norm_epsilon=0.3), {}),
    "people": (people, {}),
    "people by pld": (lambda: people(batch_norms=None, rounding=0.5), {"accountant": "pld"}),
    "people anywhere": (lambda: people(together=False), {}),
    "people of one row": (lambda: people(rows=(1,)), {}),
    "people of two rows": (lambda: people(rows=(2,), rounding=0), {}),
    "known": (lambda: log_of(**MOVING_NOISE), KNOWN),
    "known, replaced": (log_of, KNOWN | REPLACED),
    "known, people": (lambda: people(**MOVING_NOISE, clipping_norm_epsilon=0.3), KNOWN),
    "known, people anywhere": (lambda: people(together=False, **MOVING_NOISE), KNOWN),
    "truncated": (lambda: log_of(sampler="truncated_poisson", max_batch_size=50), {}),
    "rarely truncated": (lambda: log_of(sampler="truncated_poisson", max_batch_size=150), {}),
    "replaced": (log_of, REPLACED),
    "replaced by pld": (log_of, REPLACED | {"accountant": "pld"}),
    "fixed size": (lambda: log_of(sampler="fixed_size"), REPLACED),
    "filter": (lambda: filtered(log_of(individually_clipped=True)), {}),
    "filter, people": (lambda: filtered(people()), {}),
    "filter, people anywhere": (lambda: filtered(people(together=False)), {}),
}
QUICK = [kind for kind in ACCOUNTS if "pld" not in kind and kind not in ("replaced", "fixed size")]
