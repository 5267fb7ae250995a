"""Compare who took part according to batch norms with what a recorder counted at each step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from indpriv.norm_log.evidence import TOOK_PART, Check
from indpriv.norm_log.journal_state import LogState
from indpriv.norm_log.reader import Faults, batch_norms_of
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.writer import fingerprint_of_parts


def who_took_part(state: LogState, faults: Faults) -> list[Check]:
    """One check for each session that counted how often each example was in the batch of a step."""
    starts = [session.from_step for session in state.sessions]
    spans = pairwise([*starts, state.total_steps])
    return [
        _of_session(state, faults, range(first, stop), session.took_part[1], _kind(session))
        for session, (first, stop) in zip(state.sessions, spans, strict=True)
        if session.took_part is not None
        if session.took_part[0] == stop - first  # else resuming declared some steps void
    ]


def _kind(session: SessionCounts) -> str:
    """What takes part in a step."""
    return "example" if session.rounds is None else session.rounds.of


def _of_session(state: LogState, faults: Faults, steps: range, counted: str, kind: str) -> Check:
    norms, n_examples = batch_norms_of(state, faults), state.header["n_examples"]
    if norms is None or not np.isin(np.asarray(steps), norms.steps).all():
        return TOOK_PART.not_checked("some steps have no batch norms")
    total = 0

    def participations() -> Iterator[bytes]:
        nonlocal total
        for part in norms.participations(steps, n_examples):
            total += int(part.sum())
            yield part.tobytes()

    found = fingerprint_of_parts("i", (n_examples,), participations())
    detail = f"{total:,} participations in {len(steps):,} steps"
    if found == counted:
        return TOOK_PART.passed(f"{detail}, as counted at each step for each {kind}")
    return TOOK_PART.failed(
        f"by its batch norms {detail}, but these are not the {kind}s that were counted at each "
        "step: the log does not say who took part, so an account with known participation is wrong"
    )
