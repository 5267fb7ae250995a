"""Compare the counts of each recording session with what an account of the run assumes."""

from __future__ import annotations

from collections.abc import Sequence

from indpriv.errors import EvidenceError
from indpriv.norm_log.checks.compared import compared_checks
from indpriv.norm_log.checks.noise import noise_check
from indpriv.norm_log.checks.sampling import (
    batch_sizes,
    observed_sampler,
    participation,
)
from indpriv.norm_log.checks.unwatched import conversion_checks, replay_checks, round_checks
from indpriv.norm_log.evidence import (
    BATCH_FOR_EVERY_STEP,
    CLIPPING,
    CLIPPING_PRECISION,
    CLOSED,
    INDIVIDUAL_CLIPPING,
    NO_VOIDED_STEPS,
    NORM_PRECISION,
    NORMS_IN_TRAINING,
    OPACUS_ACCOUNTANT,
    PARAMETERS,
    PRIVACY_FILTER,
    RANDOM_NUMBERS,
    RANKS,
    SEEDS,
    WHOLE_BATCHES,
    Assumption,
    Check,
)
from indpriv.norm_log.session_counts import (
    NEGLIGIBLE_EXCESS,
    AccountantCounts,
    BatchCounts,
    ClippingCounts,
    ComparedNorms,
    RandomnessCounts,
    SessionCounts,
    TrainingCounts,
)

_FEW_NORMS = 1e-3  # of the norms compared
_SMALL_EXCESS = 1e-3  # of max_grad_norm
# Loops over the loader that drew a batch and took no step, such as a look at the data, are allowed
# once per epoch and this number of times more.
_MAX_LOOKS = 2

_RECORDED_LEVEL = "the recorded level of their example, which the account uses as its contribution"
_CHARGED_LEVEL = "what the privacy filter had charged their example for"


def session_checks(
    sessions: Sequence[SessionCounts],
    *,
    n_examples: int,
    closed: bool,
    voided_steps: int,
    individually_clipped: bool = False,
    filtered: bool = False,
) -> list[Check]:
    """Compare the counts that a Recorder took with what its account assumes.

    Args:
        sessions: the last counts of every recording session.
        n_examples: number of examples in the log.
        closed: whether the recorder closed the log.
        voided_steps: number of steps that were run and declared void on resuming.
        individually_clipped: whether training clipped each example at its recorded level.
        filtered: whether a privacy filter charged each example before each step.
    """
    checks = [_closed(closed)]
    for session in sessions:
        if session.conversion is not None:
            return [*checks, *conversion_checks(n_examples, session, session.conversion.source)]
        if session.replay is not None:
            return [*checks, *replay_checks(session.sampler, session.replay)]
        if session.rounds is not None:
            return [*checks, *round_checks(n_examples, sessions, voided_steps)]
    checks += [
        _no_voided_steps(voided_steps, resumed=len(sessions) > 1),
        *_different_random_states(sessions),
    ]
    for session in sessions:
        training, draws = session.training, session.draws
        if training is None or draws is None:
            raise EvidenceError(
                f"the session from step {session.from_step} has no counts of its training or of "
                "its draws; restore the journal from a copy"
            )
        checks += [
            observed_sampler(session.sampler, training.sampler_class),
            *_random_numbers(training.randomness, seeded=session.seeded),
            *compared_checks(training),
            *_parameters(training),
            *_ranks(training),
            _batch_for_every_step(training.batches, draws.draws),
            _whole_batches(training.batches),
            _clipping(training),
            *_clipping_precision(training.clipping),
            noise_check(session.noise),
        ]
        if individually_clipped:
            checks.append(_clipped_at(INDIVIDUAL_CLIPPING, training.clipping, _RECORDED_LEVEL))
        if filtered:
            checks.append(_clipped_at(PRIVACY_FILTER, training.clipping, _CHARGED_LEVEL))
        checks += [
            batch_sizes(n_examples, session.sampler, draws),
            participation(n_examples, session.sampler, draws),
            _norms_in_training(training.norms),
            _opacus_accountant(training.accountant, training.batches.steps),
        ]
    return checks


def _closed(closed: bool) -> Check:
    if closed:
        return CLOSED.passed("its writer saw the end of the run")
    return CLOSED.failed(
        "the log was not closed (the run crashed, was interrupted or is still training): it proves "
        "the steps that it holds, but any later step is missing"
    )


def _no_voided_steps(voided_steps: int, *, resumed: bool) -> Check:
    if voided_steps:
        return NO_VOIDED_STEPS.failed(
            f"{voided_steps} steps were run and declared void on resuming: no account covers them, "
            "so anyone who saw their checkpoints saw more than the account covers"
        )
    if not resumed:
        return NO_VOIDED_STEPS.passed("the account covers every step that was run")
    return NO_VOIDED_STEPS.passed(
        "the account covers every step that was logged; a process that was killed may have run up "
        "to 256 more, which no account covers, so no checkpoint of those may have been seen "
        "(Recorder.state_dict() logs all steps of its checkpoint)"
    )


def _different_random_states(sessions: Sequence[SessionCounts]) -> list[Check]:
    found = (session.training.randomness for session in sessions if session.training)
    first = [randomness.first_draw for randomness in found if randomness.first_draw]
    if len(set(first)) == len(first):
        return []
    return [
        RANDOM_NUMBERS.failed(
            "a resumed session drew its first batch from the same random state as an earlier "
            "session (was the same seed set before both?): its steps repeat batches and noise of "
            "that session, and differences of updates have none; train with private_generator()"
        )
    ]


def _random_numbers(counts: RandomnessCounts, *, seeded: bool) -> list[Check]:
    found = []
    if counts.unmoved:
        found.append(
            SEEDS.failed(
                f"the noise of {counts.unmoved} steps was not drawn from the optimizer's generator "
                "(a fork that is seeded?), so it is unknown who can draw it again; leave add_noise "
                "as Opacus made it"
            )
        )
    elif counts.guessable_seed and not seeded:
        found.append(
            SEEDS.failed(
                "noise or batches come from a generator with a chosen seed, such as "
                "torch.manual_seed(0) gives, from torch's default one, or from one that was seeded "
                "while training: anyone who guesses the seed can regenerate them, and then no "
                "epsilon holds; pass "
                "noise_generator=indpriv.recording.private_generator() to make_private, and one "
                "as the DataLoader's generator="
            )
        )
    else:
        found.append(SEEDS.not_checked(counts.source or "its seed was not seen to be chosen"))
    if moved := counts.moved:
        found.append(
            RANDOM_NUMBERS.not_checked(
                f"before {moved} draws of noise or of a batch something else had drawn from their "
                "generator, or set its state: whoever looks at the next numbers can choose those "
                "that suit; give noise and batches a private_generator() that nothing else uses"
            )
        )
    if repeated := counts.repeated_draws:
        found.append(
            RANDOM_NUMBERS.failed(
                f"{repeated} times noise or a batch was drawn again from the same state of a "
                "generator (torch.manual_seed during training?): a difference of two updates with "
                "the same noise has none; train with private_generator()"
            )
        )
    return found


def _parameters(counts: TrainingCounts) -> list[Check]:
    if not (changed := counts.changed_outside):
        return []
    return [
        PARAMETERS.not_checked(
            f"before {changed} of {counts.batches.steps} steps something other than the optimizer "
            "had changed parameters: projecting or loading them does no harm, but a gradient of "
            "these data that reached them this way was neither clipped nor noised, and then no "
            "epsilon holds"
        )
    ]


def _ranks(counts: TrainingCounts) -> list[Check]:
    """Ranks that differ stop the run before the step, so what is in the log has passed."""
    if (ranks := counts.ranks) == 1:
        return []
    return [
        RANKS.passed(
            f"{ranks} ranks trained one model: before each step their settings and shards agreed, "
            "no example was drawn by two of them, and their sampling seeds differed"
        )
    ]


def _batch_for_every_step(counts: BatchCounts, draws: int) -> Check:
    steps = counts.steps
    if undrawn := max(counts.undrawn_steps, steps - draws):
        fault = (
            f"{undrawn:,} of {steps:,} steps used no batch of their own from the attached loader"
        )
    elif unused := counts.unstepped_draws:
        fault = (
            f"{unused} of {draws:,} drawn batches never became a step (skipped empty batches or "
            "accumulated gradients); the account assumes one Poisson batch for each step"
        )
    elif (looks := counts.looks) > _MAX_LOOKS + counts.passes:
        fault = (
            f"{looks} times the loop over the loader drew a batch and ended without a step: if it "
            "looks at batches and chooses among them, they are not Poisson samples; step on every "
            "batch"
        )
    elif dropped := counts.dropped_batches:
        fault = (
            f"the sampler of a rank left out {dropped} local batches that were empty: the batches "
            "of the ranks no longer belong together; use larger batches or fewer ranks"
        )
    elif unmatched := counts.unmatched_steps:
        fault = (
            f"{unmatched} of {steps:,} steps clipped a number of gradients that differs from the "
            "size of their batch: draw every batch from the attached loader and take one step on "
            "each"
        )
    else:
        return BATCH_FOR_EVERY_STEP.passed(f"{steps:,} steps, {draws:,} batches drawn")
    return BATCH_FOR_EVERY_STEP.failed(fault)


def _whole_batches(counts: BatchCounts) -> Check:
    if interrupted := counts.interrupted_batches:
        return WHOLE_BATCHES.failed(
            f"{interrupted} times the loop left a batch unfinished (a break inside "
            "BatchMemoryManager): the next step included its gradients, and an example can count "
            "twice"
        )
    return WHOLE_BATCHES.passed("no epoch ended in the middle of a batch")


def _clipping(training: TrainingCounts) -> Check:
    counts = training.clipping
    gradients = counts.gradients
    if misclipped := counts.misclipped_gradients:
        return CLIPPING.failed(
            f"{misclipped} of {gradients:,} gradients were clipped at a max_grad_norm other than "
            "the one that the noise of their step was made for: change it only between steps"
        )
    if underestimated := counts.underestimated_norms:
        compared = training.norms.compared_norms
        return CLIPPING.failed(
            f"ghost mode clipped {underestimated} of {compared} gradients by norms smaller "
            "than recorded, which leaves them above max_grad_norm: either the recorder's "
            "loss is not that of training, or Opacus computes wrong norms for a layer; train in "
            "hooks mode to find out which"
        )
    if counts.clip_excess > NEGLIGIBLE_EXCESS:
        return CLIPPING.passed(
            "for gradients as long as this model's, Opacus on this machine computes norms that are "
            f"{100 * counts.clip_excess:.2g} % too small, because sums in float32 fall short, and "
            f"clipped gradients stay longer than max_grad_norm by as much; {_counted(counts)}"
        )
    return CLIPPING.passed(
        f"{gradients:,} gradients, all clipped at no more than the max_grad_norm of their step"
    )


def _clipping_precision(counts: ClippingCounts) -> list[Check]:
    if not (rounding := counts.clip_rounding):
        return []
    return [
        CLIPPING_PRECISION.passed(
            "Opacus clipped by norms in half precision, and rounding may leave a clipped gradient "
            f"longer than max_grad_norm by up to {100 * rounding:.2g} %; {_counted(counts)}"
        )
    ]


def _counted(counts: ClippingCounts) -> str:
    excess = 100 * counts.accounted_excess
    return f"epsilons count gradients up to {excess:.2g} % longer, which is less noise"


def _clipped_at(assumption: Assumption, counts: ClippingCounts, level: str) -> Check:
    """Whether every gradient was clipped at the threshold of its own example."""
    gradients, at_levels = counts.gradients, counts.gradients_at_levels
    if at_levels != gradients:
        return assumption.failed(
            f"only {at_levels:,} of {gradients:,} gradients were clipped at {level}"
        )
    return assumption.passed(f"{gradients:,} gradients, each clipped at {level}")


def _norms_in_training(counts: ComparedNorms) -> Check:
    compared, larger = counts.compared_norms, counts.larger_norms
    if not compared:
        return NORMS_IN_TRAINING.not_checked(
            "no norms from training could be compared with a record"
        )
    if larger:
        found = (
            f"{larger:,} of {compared:,} gradient norms that training clipped were larger than "
            f"recorded, by up to {counts.largest_excess:.2g} of max_grad_norm: "
        )
        if larger <= _FEW_NORMS * compared and counts.largest_excess <= _SMALL_EXCESS:
            return NORM_PRECISION.failed(
                f"{found}they are too few, and the differences too small, to come from other data "
                "or another loss, but they exceed the rounding errors that are allowed for"
            )
        return NORMS_IN_TRAINING.failed(
            f"{found}the recorder's data, loss, mode or precision are not those of training"
        )
    clipped = counts.larger_clipped_norms
    if clipped > _FEW_NORMS * compared:
        return NORMS_IN_TRAINING.not_checked(
            f"{clipped:,} of {compared:,} gradient norms were larger in training than recorded, "
            "but are clipped in both: training saw other inputs or another loss than the recorder. "
            "Augmentation changes nothing; but where examples are mixed with each other (mixup, "
            "contrastive losses), one contributes to several gradients and no epsilon holds"
        )
    return NORMS_IN_TRAINING.passed(
        f"{compared:,} gradient norms that training clipped, none larger than recorded"
    )


def _opacus_accountant(counts: AccountantCounts, steps: int) -> Check:
    counted = counts.accountant_steps
    if counted is None:
        return OPACUS_ACCOUNTANT.failed(
            "the optimizer's step hook does not lead to an Opacus accountant: if another hook "
            "replaced it, Opacus's own epsilon is too small"
        )
    if earlier := counts.earlier_steps:
        return OPACUS_ACCOUNTANT.failed(
            f"Opacus's accountant had counted {earlier} steps before recording began: no account "
            "here covers them"
        )
    if counted != steps or not counts.accountant_settings_match:
        return OPACUS_ACCOUNTANT.failed(
            f"Opacus's accountant counted {counted:,} steps where {steps:,} were taken, or other "
            "settings"
        )
    return OPACUS_ACCOUNTANT.passed(f"its history holds the same {steps:,} steps and settings")
