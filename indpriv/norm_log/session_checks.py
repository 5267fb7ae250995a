"""Compare the counts of each recording session with what an account of the run assumes.

The texts of these checks stand in indpriv/_facts/checks.toml.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from indpriv._facts import FAILED, NOT_CHECKED, PASSED, Fact, fact
from indpriv.errors import EvidenceError
from indpriv.norm_log.evidence import COMPARISONS
from indpriv.norm_log.run_files import RUN_JSON
from indpriv.norm_log.sampling_checks import batch_sizes, noise_check, participation
from indpriv.norm_log.session_counts import (
    NEGLIGIBLE_EXCESS,
    AccountantCounts,
    BatchCounts,
    ComparedNorms,
    DrawCounts,
    RandomnessCounts,
    Replay,
    SessionCounts,
    TrainingCounts,
)
from indpriv.norm_log.step_settings import StepSettings

_FEW_NORMS = 1e-3  # of the norms compared
_SMALL_EXCESS = 1e-3  # of max_grad_norm
# Loops over the loader that drew a batch and took no step, such as a look at the data, are allowed
# once per epoch and this number of times more.
_MAX_LOOKS = 2
_SHARE = 0.2  # of the steps: a fault in as many is what the odds of comparisons are about
_POISSON = ("poisson", "truncated_poisson")


def session_checks(
    sessions: Sequence[SessionCounts],
    *,
    n_examples: int,
    closed: bool,
    voided_steps: int,
    individually_clipped: bool = False,
    filtered: bool = False,
) -> list[Fact]:
    """Compare the counts that a Recorder took with what its account assumes.

    Args:
        sessions: the last counts of every recording session.
        n_examples: number of examples in the log.
        closed: whether the recorder closed the log.
        voided_steps: number of steps that were run and declared void on resuming.
        individually_clipped: whether training clipped each example at its recorded level.
        filtered: whether a privacy filter charged each example before each step.
    """
    checks = [fact("check.closed", PASSED if closed else FAILED)]
    for session in sessions:
        if session.conversion is not None:
            return [*checks, *_converted(n_examples, session, session.conversion.source)]
        if session.replay is not None:
            return [*checks, *_replayed(session.sampler, session.replay)]
        if session.rounds is not None:
            return [*checks, *_rounds(n_examples, sessions, voided_steps)]
    checks += [_no_voided_steps(voided_steps, sessions), *_different_random_states(sessions)]
    for session in sessions:
        training, draws = session.training, session.draws
        if training is None or draws is None:
            raise EvidenceError(
                f"the session from step {session.from_step} has no counts of its training or of "
                "its draws; restore the journal from a copy"
            )
        checks += [
            _observed_sampler(session.sampler, training.sampler_class),
            *_random_numbers(training.randomness, seeded=session.seeded),
            *(_compared(key, training) for key in COMPARISONS),
            *_rarely_shown(training),
            _batch_for_every_step(training.batches, draws.draws),
            _whole_batches(training.batches),
            *_clipping(training),
            noise_check(session.noise),
        ]
        for key, clipped in (
            ("individual_clipping", individually_clipped),
            ("privacy_filter", filtered),
        ):
            checks += [_clipped_at(key, training)] if clipped else []
        checks += [
            *_draws(n_examples, session.sampler, draws),
            _norms_in_training(training.norms),
            _opacus_accountant(training.accountant, training.batches.steps),
        ]
    return checks


def private_clipping_norm(settings: StepSettings, starts: Sequence[int], epsilon: float) -> Fact:
    """Whether all steps were clipped at one norm, the only one that epsilons count.

    Args:
        settings: of all steps, at least one.
        starts: first step of every session.
        epsilon: of the private release that the norm was set to.
    """
    norms = settings.max_grad_norm
    sessions = [part for part in np.split(norms, sorted(starts)) if len(part)]
    moved = any(np.ptp(part) for part in sessions)
    return fact(
        "check.private_clipping_norm",
        NOT_CHECKED if moved else FAILED if np.ptp(norms) else PASSED,
        norm=norms[0],
        norms=", ".join(f"{part[0]:.6g}" for part in sessions),
        steps=len(norms),
        epsilon=epsilon,
    )


def _no_voided_steps(voided_steps: int, sessions: Sequence[SessionCounts]) -> Fact:
    case = "resumed" if len(sessions) > 1 and not voided_steps else ""
    return fact("check.no_voided_steps", FAILED if voided_steps else PASSED, case, n=voided_steps)


def _different_random_states(sessions: Sequence[SessionCounts]) -> list[Fact]:
    found = (session.training.randomness for session in sessions if session.training)
    first = [randomness.first_draw for randomness in found if randomness.first_draw]
    same = len(set(first)) < len(first)
    return [fact("check.random_numbers", FAILED, "sessions")] if same else []


def _observed_sampler(sampler: str, sampler_class: str) -> Fact:
    """How batches were drawn in a run that was watched."""
    return fact(
        "check.sampler",
        PASSED if sampler in _POISSON else FAILED,
        "truncated" if sampler == "truncated_poisson" else "",
        seen=sampler_class,
    )


def _declared_sampler(sampler: str, source: str) -> Fact:
    """How batches were drawn, according to a source."""
    status, case = (NOT_CHECKED, "declared") if sampler in _POISSON else (FAILED, "declared_other")
    return fact("check.sampler", status, case, seen="declared", source=source, sampler=sampler)


def _draws(
    n_examples: int, sampler: str, draws: DrawCounts | None, of: str = "example"
) -> list[Fact]:
    """Whether the numbers of draws fit Poisson sampling; nothing where nobody counted."""
    if draws is None:
        return []
    found = n_examples, sampler, draws, of
    return [batch_sizes(*found), participation(*found)]


def _random_numbers(counts: RandomnessCounts, *, seeded: bool) -> list[Fact]:
    if counts.unmoved:
        found = [fact("check.seeds", FAILED, "unmoved", counts=counts)]
    elif counts.guessable_seed and not seeded:
        found = [fact("check.seeds", FAILED, "guessable")]
    else:
        found = [fact("check.seeds", NOT_CHECKED, "source" if counts.source else "", counts=counts)]
    if counts.moved:
        found.append(fact("check.random_numbers", NOT_CHECKED, "moved", counts=counts))
    if counts.repeated_draws:
        found.append(fact("check.random_numbers", FAILED, "repeated", counts=counts))
    return found


def _compared(key: str, training: TrainingCounts) -> Fact:
    """One comparison of a session with its recomputation, whether it was made or not."""
    counts, steps = training.compared, training.batches.steps
    if counts is None:
        return fact(f"check.{key}", NOT_CHECKED, "before")
    found = counts.found.get(key)
    if found is None:
        return fact(f"check.{key}", NOT_CHECKED, "never", steps=steps)
    status, case = PASSED, "every" if found.steps >= steps else "drawn"
    if found.refuted:
        status, case = FAILED, "refuted"
    elif found.unknown:
        status, case = NOT_CHECKED, "unknown"
    return fact(
        f"check.{key}",
        status,
        case,
        found=found,
        note=f" ({found.detail})" if found.detail else "",
        compared=min(found.steps, steps),  # the state is compared once more at the end
        steps=steps,
        missed=max(100 * (1 - _SHARE) ** found.steps, 0.01),
    )


def _rarely_shown(training: TrainingCounts) -> list[Fact]:
    """Other changes of parameters, and several ranks, where there were any."""
    found = []
    if training.changed_outside:
        found.append(fact("check.parameters", NOT_CHECKED, training=training))
    if training.ranks != 1:  # ranks that differ stop the run before the step: what is logged passed
        found.append(fact("check.ranks", PASSED, training=training))
    return found


def _batch_for_every_step(counts: BatchCounts, draws: int) -> Fact:
    steps = counts.steps
    looks = counts.looks if counts.looks > _MAX_LOOKS + counts.passes else 0
    for case, n in (
        ("undrawn", max(counts.undrawn_steps, steps - draws)),
        ("unstepped", counts.unstepped_draws),
        ("looks", looks),
        ("dropped", counts.dropped_batches),
        ("unmatched", counts.unmatched_steps),
    ):
        if n:
            return fact("check.batch_for_every_step", FAILED, case, n=n, steps=steps, draws=draws)
    return fact("check.batch_for_every_step", PASSED, steps=steps, draws=draws)


def _whole_batches(counts: BatchCounts) -> Fact:
    n = counts.interrupted_batches
    return fact("check.whole_batches", FAILED if n else PASSED, n=n)


def _clipping(training: TrainingCounts) -> list[Fact]:
    counts = training.clipping
    if counts.misclipped_gradients:
        status, case = FAILED, "other_norm"
    elif counts.underestimated_norms:
        status, case = FAILED, "ghost"
    else:
        status, case = PASSED, "excess" if counts.clip_excess > NEGLIGIBLE_EXCESS else ""
    found = [fact("check.clipping", status, case, training=training)]
    if counts.clip_rounding:
        found.append(fact("check.clipping_precision", PASSED, training=training))
    return found


def _clipped_at(key: str, training: TrainingCounts) -> Fact:
    """Whether every gradient was clipped at the threshold of its own example."""
    if training.clipping.gradients_at_levels == training.clipping.gradients:
        return fact(f"check.{key}", PASSED, "at_levels", training=training)
    return fact(f"check.{key}", FAILED, "at_others", training=training)


def _norms_in_training(norms: ComparedNorms) -> Fact:
    compared, larger = norms.compared_norms, norms.larger_norms
    if not compared:
        return fact("check.norms_in_training", NOT_CHECKED, "none")
    if larger and larger <= _FEW_NORMS * compared and norms.largest_excess <= _SMALL_EXCESS:
        return fact("check.norm_precision", FAILED, norms=norms)
    if larger:
        return fact("check.norms_in_training", FAILED, norms=norms)
    more = norms.larger_clipped_norms > _FEW_NORMS * compared
    return fact("check.norms_in_training", NOT_CHECKED if more else PASSED, norms=norms)


def _opacus_accountant(counts: AccountantCounts, steps: int) -> Fact:
    counted, earlier = counts.accountant_steps, counts.earlier_steps
    same = counted == steps and counts.accountant_settings_match and not earlier
    return fact(
        "check.opacus_accountant",
        PASSED if same else FAILED,
        "none" if counted is None else "earlier" if earlier else "",
        counts=counts,
        steps=steps,
    )


def _converted(n_examples: int, session: SessionCounts, source: str) -> list[Fact]:
    """Norms from another trainer can only be checked against their own counts of draws."""
    return [
        _declared_sampler(session.sampler, RUN_JSON),
        fact("check.opacus_accountant", NOT_CHECKED, "converted"),
        fact("check.training_watched", NOT_CHECKED, "converted", source=source),
        *_draws(n_examples, session.sampler, session.draws),
    ]


def _rounds(n_clients: int, sessions: Sequence[SessionCounts], voided: int) -> list[Fact]:
    """A `RoundRecorder` sees participants and norms, and neither clipping nor noise."""
    checks = [
        fact(
            "check.no_voided_steps",
            FAILED if voided else PASSED,
            "rounds_voided" if voided else "rounds",
            n=voided,
        ),
        fact("check.training_watched", NOT_CHECKED, "rounds"),
    ]
    for session in sessions:
        checks.append(_declared_sampler(session.sampler, "the federated trainer"))
        if session.rounds is not None:
            of = session.rounds.of
            checks += _draws(n_clients, session.sampler, session.draws, of)
    return checks


def _replayed(sampler: str, replay: Replay) -> list[Fact]:
    """A replay of checkpoints did not see the training, so little can be checked."""
    settings = ", ".join(
        f"{name} by {source}"
        for name, source in replay.sources.items()
        if name not in ("delta", "sampler")
    )
    counted = PASSED if replay.accountant_counted_all else NOT_CHECKED
    return [
        _declared_sampler(sampler, replay.sources["sampler"]),
        fact("check.opacus_accountant", counted, "replayed", settings=settings),
        fact("check.training_watched", NOT_CHECKED, "replayed"),
    ]
