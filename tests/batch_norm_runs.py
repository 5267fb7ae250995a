"""Small logs with batch norms, and what must be read from them."""

from __future__ import annotations

import numpy as np

from indpriv.norm_log.records import Levels
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from synthetic import session_counts

N, STEPS = 40, 30
LEVELS = Levels(0.01, "up")


def draws(seed=0, n=N, steps=STEPS, rate=0.2):
    """Positions and norms of the batch of each step; some are empty."""
    rng = np.random.default_rng(seed)
    batches = [np.flatnonzero(rng.random(n) < rate * (step % 5 != 0)) for step in range(steps)]
    return [(batch, rng.exponential(0.5, len(batch))) for batch in batches]


def flat(batches):
    steps = np.repeat(np.arange(len(batches)), [len(batch) for batch, _ in batches])
    return steps, *(np.concatenate([batch[part] for batch in batches]) for part in (0, 1))


def writer_of(run_dir, rounding=0.01):
    """The writer of a log that `write` begins or began."""
    header = LogHeader(rounding, "up", "example", "add_remove", "poisson", False, {"caveats": []})
    return NormLogWriter(run_dir, header, np.arange(N), None, np.zeros(0, np.int64))


def write(run_dir, batches, *, flush=10, close=True, rounding=0.01, resume_at=None):
    """A run with one full record, whose batch norms are flushed every so many steps."""
    writer = writer_of(run_dir, rounding)
    if resume_at is None:
        writer.record(0, np.ones(N) / 2, max_grad_norm=1.0, targets_fingerprint="same", seconds=0.1)
    else:
        writer.truncate(resume_at)
    for first in range(resume_at or 0, len(batches), flush):
        part = batches[first : first + flush]
        writer.free(first, part, np.ones(len(part)))
        counts = session_counts(first + len(part), N, 0.2)
        writer.steps(
            first,
            len(part),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=0.2,
            counts=counts,
        )
    try:
        if close:
            finish(writer, len(batches))
    finally:
        writer.close()


def finish(writer, total_steps):
    """What a recorder does last."""
    writer.finish(session_counts(total_steps, N, 0.2))


def as_dict(entries, offset=0):
    columns = (entries.position.tolist(), entries.step.tolist(), entries.norm.tolist())
    return {(position + offset, step): norm for position, step, norm in zip(*columns, strict=True)}


def expected(batches, encode=True):
    return {
        (int(i), step): LEVELS.encode(np.array([norm]), 1.0)[0] if encode else norm
        for step, (batch, norms) in enumerate(batches)
        for i, norm in zip(batch, norms, strict=True)
    }
