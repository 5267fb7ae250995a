"""Check what little can be checked of a run that no recorder watched."""

from __future__ import annotations

from collections.abc import Sequence

from indpriv.norm_log.checks.sampling import batch_sizes, declared_sampler, participation
from indpriv.norm_log.evidence import (
    NO_VOIDED_STEPS,
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


def round_checks(
    n_clients: int, sessions: Sequence[SessionCounts], voided_steps: int
) -> list[Check]:
    """A `RoundRecorder` sees participants and norms, and neither clipping nor noise."""
    checks = [
        NO_VOIDED_STEPS.failed(
            f"{voided_steps} rounds were declared void on resuming: no account covers them, so "
            "anyone who saw their models saw more than the account covers"
        )
        if voided_steps
        else NO_VOIDED_STEPS.passed("the account covers every round that was recorded"),
        TRAINING_WATCHED.not_checked(
            "participants, norms and settings of each round are as the federated trainer passed "
            "them: nothing confirms how updates were clipped, or what noise was added"
        ),
    ]
    for session in sessions:
        checks.append(declared_sampler(session.sampler, "the federated trainer"))
        if session.draws is not None and session.rounds is not None:
            of = session.rounds.of
            checks += [
                batch_sizes(n_clients, session.sampler, session.draws, of),
                participation(n_clients, session.sampler, session.draws, of),
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
