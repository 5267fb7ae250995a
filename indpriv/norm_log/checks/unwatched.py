"""Check what little can be checked of a run that no recorder watched."""

from __future__ import annotations

from indpriv.norm_log.checks.sampling import batch_sizes, declared_sampler, participation
from indpriv.norm_log.evidence import (
    NOT_CHECKED,
    OPACUS_ACCOUNTANT,
    PASSED,
    TRAINING_WATCHED,
    Check,
)
from indpriv.norm_log.run_files import RUN_JSON
from indpriv.norm_log.session_counts import Replay, SessionCounts


def conversion_checks(n_examples: int, session: SessionCounts, source: str) -> list[Check]:
    """Norms from another trainer can only be checked against their own counts of draws."""
    checks = [
        declared_sampler(session.sampler, RUN_JSON),
        OPACUS_ACCOUNTANT.not_checked(
            "the run had no such accountant; run.json declares the settings"
        ),
        TRAINING_WATCHED.not_checked(
            f"indpriv did not watch the training: nothing confirms that the norms in {source} are "
            "what training clipped"
        ),
    ]
    if session.draws is not None:
        checks += [
            batch_sizes(n_examples, session.sampler, session.draws),
            participation(n_examples, session.sampler, session.draws),
        ]
    return checks


def replay_checks(sampler: str, replay: Replay) -> list[Check]:
    """A replay of checkpoints did not see the training, so little can be checked."""
    settings = ", ".join(
        f"{name} by {source}"
        for name, source in replay.sources.items()
        if name not in ("delta", "sampler")
    )
    counted = PASSED if replay.accountant_counted_all else NOT_CHECKED
    return [
        declared_sampler(sampler, replay.sources["sampler"]),
        OPACUS_ACCOUNTANT.check(counted, f"settings: {settings}"),
        TRAINING_WATCHED.not_checked(
            "indpriv did not watch the training: nothing confirms that each step used one batch, "
            "that clipping was flat, and that the norms replayed here are those of training"
        ),
    ]
