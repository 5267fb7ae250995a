"""Evidence: checks of a run, and the lines that an account rests on, each with one of four words.

The checks compare the counts of each session with what an account of the run assumes. The account
is of the run that was trained if the first five lines hold at every step. Words come from checks
alone, and what was not checked is never called verified. All texts stand in indpriv/_facts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from indpriv import _facts
from indpriv._facts import FAILED, NOT_CHECKED, PASSED, Fact, damaged, fact, templates, text
from indpriv.norm_log import journal_state, run_files
from indpriv.norm_log import session_counts as counted
from indpriv.norm_log.session_counts import SessionCounts, TrainingCounts

SEEDED, LARGEST_NORM = text("line.source", "seeded"), text("line.noise", "largest_norm")
CHECKS, LINES = templates("check"), templates("line")
# Keys of what a Recorder compares with its own recomputation of training.
COMPARISONS = tuple(key for key, one in CHECKS.items() if "never" in one.texts)
NOT_COMPARED = text(f"check.{COMPARISONS[0]}", "before")
# Assumptions of accounts with secret participation alone: those of Poisson sampling.
OF_SECRECY = frozenset(key for key, one in CHECKS.items() if one.only == "secret participation")
# Assumptions of accounts that use full records or clip levels, which those with known participation
# do not read.
OF_FULL_RECORDS = frozenset(key for key, one in CHECKS.items() if one.only == "full records")
# Of batches that were chosen in a way that no recorder knows.
ANY_CHOICE = fact("check.batch_for_every_step", NOT_CHECKED, "any_choice")
SEEN = tuple(key for key, one in LINES.items() if one.needs)  # lines that a recorder can verify

# The chance that a sound run fails a test of its sampling; a failure costs the claim "exact".
FALSE_ALARM = 1e-6
_FEW_NORMS = 1e-3  # of the norms compared
_SMALL_EXCESS = 1e-6  # of max_grad_norm, on average over the norms compared
_LARGEST_EXCESS = 1e-2  # of max_grad_norm: where max pools are nearly tied, rounding chooses
# Loops over the loader that took no step, such as a look at the data, beyond one in each epoch.
_MAX_LOOKS = 2
# A session that is interrupted mostly ends with a batch in hand, or is killed because of it, where
# memory is short. So many are allowed, and any number if all ended after equally many steps.
_MAX_ENDS = 3
_SHARE = 0.2  # of the steps: a fault in as many is what the odds of comparisons are about
_POISSON = ("poisson", "truncated_poisson")
_UNKNOWN = ("random_numbers", "batch_for_every_step")  # what may be wrong, beside comparisons

_CHANCE = 1e-9  # that the variance of sound noise is as small; tensors are at most some thousands
_DEVIATIONS = 6.0  # of a product, which sound noise exceeds once in 10^9
_SMALL_DEFICIT = 0.002  # of the variance: rounding, or noise a thousandth too small
_MANY_VALUES = 10**5  # with fewer, the mean fourth power is not nearly normal
_MORE_NOISE = 0.02  # of the variance: some parameters may have more than accounted, which is safe
_SMALL_FOURTH = 0.01  # of the mean fourth power
_FOURTH = 3.0  # mean fourth power of standard normal numbers, whose variance is 96


def session_checks(state: journal_state.LogState) -> list[Fact]:
    """Compare settings and the counts of all sessions with what an account assumes."""
    sessions, voided = state.sessions, state.voided_steps
    checks = [fact("check.closed", PASSED if state.closed else FAILED)]
    if unwatched := [one for one in sessions if one.converted or one.replayed or one.rounds]:
        return [*checks, *_unwatched(state, unwatched[0]), *_private_clipping_norm(state)]
    left = [steps for steps, in_hand in state.ends if in_hand]
    told = len(set(state.ends)) == 1 and min(left, default=0) > 0
    if len(left) > _MAX_ENDS and not told:
        checks.append(fact("check.batch_for_every_step", NOT_CHECKED, "ends", n=len(left)))
    case = "resumed" if len(sessions) > 1 and not voided else ""
    checks.append(fact("check.no_voided_steps", FAILED if voided else PASSED, case, n=voided))
    first = [one.training.first_draw for one in sessions if one.training]
    if len(set(first) - {""}) < sum(map(bool, first)):
        checks.append(fact("check.random_numbers", FAILED, "sessions"))
    at_levels = {
        "individual_clipping": state.header["individually_clipped"],
        "privacy_filter": state.header["privacy_filter"],
    }
    for session in sessions:
        training = session.training
        if training is None or session.draws is None:
            raise damaged("refusal.journal", "no_counts", session=session)
        checks += _of_randomness(session, training)
        checks += [_compared(key, training) for key in COMPARISONS]
        checks += _of_steps(training, session.draws.draws, session.steps_of_other_batches)
        checks.append(noise_check(session.noise))
        for key in (key for key, told in at_levels.items() if told):
            same = training.gradients_at_levels == training.gradients
            status, case = (PASSED, "at_levels") if same else (FAILED, "at_others")
            checks.append(fact(f"check.{key}", status, case, training=training))
        checks += _of_draws(state, session)
        checks += _of_norms_and_accountant(training)
    return [*checks, *_private_clipping_norm(state)]


def caveats_of(
    state: journal_state.LogState, checks: Iterable[Fact], *, participation_known: bool = False
) -> tuple[str, ...]:
    """Why an account is an estimate: what the norm pass found, and checks refuted or left open."""
    # With known participation norms are as training clipped them: no sampler or norm pass matters.
    found, left_out = list(state.norm_caveats), frozenset[str]()
    if participation_known:
        found = [caveat for one in state.sessions if not one.training for caveat in one.caveats]
        found += filter(None, [state.no_privacy])
        left_out = OF_SECRECY | OF_FULL_RECORDS
    compared = {key for key in (*COMPARISONS, *_UNKNOWN) if not CHECKS[key].optional}
    found += [
        check.detail
        for check in checks
        if check.key not in left_out
        and (check.status == FAILED or (check.status == NOT_CHECKED and check.key in compared))
    ]
    return tuple(dict.fromkeys(found))


def _unwatched(state: journal_state.LogState, first: SessionCounts) -> Iterator[Fact]:
    """Checks of a run that no recorder saw; first: the first session that says so."""
    if first.converted is not None:
        source = first.converted.source
        yield _declared_sampler(first.sampler, run_files.RUN_JSON)
        yield fact("check.opacus_accountant", NOT_CHECKED, "converted")
        yield fact("check.training_watched", NOT_CHECKED, "converted", source=source)
        yield from _of_draws(state, first)
    elif first.replayed is not None:
        sources = first.replayed.sources
        names = [name for name in sources if name not in ("delta", "sampler")]
        settings = ", ".join(f"{name} by {sources[name]}" for name in names)
        status = PASSED if first.replayed.accountant_counted_all else NOT_CHECKED
        yield _declared_sampler(first.sampler, sources["sampler"])
        yield fact("check.opacus_accountant", status, "replayed", settings=settings)
        yield fact("check.training_watched", NOT_CHECKED, "replayed")
        refuted = first.replayed.refuted
        yield from (CHECKS[key].fact(FAILED, refuted[key]) for key in CHECKS if key in refuted)
    else:
        voided = state.voided_steps
        status, case = (FAILED, "rounds_voided") if voided else (PASSED, "rounds")
        yield fact("check.no_voided_steps", status, case, n=voided)
        yield fact("check.training_watched", NOT_CHECKED, "rounds")
        for session in state.sessions:
            yield _declared_sampler(session.sampler, "the federated trainer")
            if session.rounds is not None:
                yield from _of_draws(state, session)


def _declared_sampler(sampler: str, source: str) -> Fact:
    """How batches were drawn, according to a source."""
    status, case = (NOT_CHECKED, "declared") if sampler in _POISSON else (FAILED, "declared_other")
    return fact("check.sampler", status, case, seen="declared", source=source, sampler=sampler)


def _of_randomness(session: SessionCounts, training: TrainingCounts) -> Iterator[Fact]:
    """What drew batches and noise."""
    yield fact(
        "check.sampler",
        PASSED if session.sampler in _POISSON else FAILED,
        "truncated" if session.sampler == "truncated_poisson" else "",
        seen=training.sampler_class,
    )
    status, case = NOT_CHECKED, "source" if training.source else ""
    if training.unmoved:
        status, case = FAILED, "unmoved"
    elif training.guessable_seed and not session.seeded:
        status, case = FAILED, "guessable"
    yield fact("check.seeds", status, case, training=training)
    if training.moved:
        yield fact("check.random_numbers", NOT_CHECKED, "moved", training=training)
    if training.repeated_draws:
        yield fact("check.random_numbers", FAILED, "repeated", training=training)


def _compared(key: str, training: TrainingCounts) -> Fact:
    """One comparison of a session with its recomputation, whether it was made or not."""
    steps = training.steps
    if training.compared is None:
        return fact(f"check.{key}", NOT_CHECKED, "before")
    found = training.compared.found.get(key)
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


def _of_steps(training: TrainingCounts, draws: int, others: int) -> Iterator[Fact]:
    """How steps and batches belong together, and what their gradients were clipped at."""
    if training.changed_outside:
        yield fact("check.parameters", NOT_CHECKED, training=training)
    if training.ranks != 1:  # ranks that differ stop the run before the step: what is logged passed
        yield fact("check.ranks", PASSED, training=training)
    steps, looks, left = training.steps, training.peeks, training.left_batches or 0
    faults = {
        "undrawn": others - training.unmatched_steps,
        "unstepped": training.unstepped_draws + (left if left > _MAX_LOOKS else 0),
        "looks": looks if looks > _MAX_LOOKS + training.passes else 0,
        "dropped": training.dropped_batches,
        "unmatched": training.unmatched_steps,
    }
    case = next((case for case, n in faults.items() if n), "")
    doubt = "uncounted" if training.left_batches is None else "left" if left else ""
    status = FAILED if case else NOT_CHECKED if doubt else PASSED
    values = {"n": faults.get(case, left), "steps": steps, "draws": draws}
    yield fact("check.batch_for_every_step", status, case or doubt, **values)
    unfinished = training.interrupted_batches
    yield fact("check.whole_batches", FAILED if unfinished else PASSED, n=unfinished)
    status, case = PASSED, "excess" if training.clip_excess > counted.NEGLIGIBLE_EXCESS else ""
    if training.misclipped_gradients:
        status, case = FAILED, "other_norm"
    elif training.underestimated_norms:
        status, case = FAILED, "ghost"
    yield fact("check.clipping", status, case, training=training)
    if training.clip_rounding:
        yield fact("check.clipping_precision", PASSED, training=training)


def _of_norms_and_accountant(training: TrainingCounts) -> Iterator[Fact]:
    """Whether norms in training are those recorded, and Opacus's accountant counted all steps."""
    compared, larger = training.compared_norms, training.larger_norms
    few, most = _FEW_NORMS * compared, min(_LARGEST_EXCESS * larger, _SMALL_EXCESS * compared)
    small = larger <= few and training.largest_excess * larger <= most
    case = "smaller" if not larger and (training.smaller_norms or 0) > few else ""
    trifle = small and (larger > 0 or case == "smaller")
    more = training.larger_clipped_norms > few
    if trifle:
        yield fact("check.norm_precision", FAILED, case, training=training)
    if not compared:
        yield fact("check.norms_in_training", NOT_CHECKED, "none")
    elif more or not trifle:
        status = FAILED if not small else NOT_CHECKED if more else PASSED
        yield fact("check.norms_in_training", status, training=training)
    steps, earlier = training.accountant_steps, training.earlier_steps
    same = steps == training.steps and training.accountant_settings_match and not earlier
    case = "none" if steps is None else "earlier" if earlier else ""
    status = PASSED if same else FAILED
    yield fact("check.opacus_accountant", status, case, training=training, steps=training.steps)


def _private_clipping_norm(state: journal_state.LogState) -> Iterator[Fact]:
    """Whether all steps were clipped at one norm, where it was set to a private release."""
    if not (state.clipping_norm_epsilon and state.steps):
        return
    norms = state.settings().max_grad_norm
    starts = sorted(session.from_step for session in state.sessions)
    sessions = [part for part in np.split(norms, starts) if len(part)]
    moved = any(np.ptp(part) for part in sessions)
    yield fact(
        "check.private_clipping_norm",
        NOT_CHECKED if moved else FAILED if np.ptp(norms) else PASSED,
        norm=norms[0],
        norms=", ".join(f"{part[0]:.6g}" for part in sessions),
        steps=len(norms),
        epsilon=state.clipping_norm_epsilon,
    )


# --- were batches Poisson-sampled, and is the noise what is accounted?


def _of_draws(state: journal_state.LogState, session: SessionCounts) -> list[Fact]:
    """Whether draws, and those of each example, fit Poisson sampling, where somebody counted."""
    n_examples, counts = state.header["n_examples"], session.draws
    of = session.rounds.of if session.rounds else "example"
    if counts is None:
        return []
    if session.sampler != "poisson" or not counts.draws:
        keys = ("check.batch_sizes", "check.participation")
        return [fact(key, NOT_CHECKED, of=of) for key in keys]
    from scipy import stats  # takes longer to import than the rest of the audit side

    draws, trials = counts.draws, n_examples * counts.draws
    rate = counts.expected_participations / trials
    seen = counts.participations
    below, above = stats.binom.cdf(seen, trials, rate), stats.binom.sf(seen - 1, trials, rate)
    chances = {"": 2 * float(min(below, above))}
    constant = math.isclose(counts.participations_variance, draws * rate * (1 - rate))
    if counts.size_min is not None and counts.size_max is not None and constant:
        ends = stats.binom.cdf([counts.size_min - 1, counts.size_max], n_examples, rate)
        # Any of so many ranges could have been the one that holds all sizes.
        chances["sizes"] = (n_examples + 1) ** 2 * float(np.diff(ends)[0]) ** draws
    if counts.together and counts.together_expected:
        # Chernoff's bound, for a sum of independent events.
        ratio = max(counts.together / counts.together_expected, 1.0)
        chances["together"] = (math.exp(1 - 1 / ratio) / ratio) ** counts.together
    case = min(chances, key=chances.__getitem__)
    of_size = len(chances) * chances[case]
    few = n_examples * float(stats.binom.cdf(counts.participations_min, draws, rate))
    many = n_examples * float(stats.binom.sf(counts.participations_max - 1, draws, rate))
    evenness = _chance_of_evenness(n_examples, counts)
    even = evenness < FALSE_ALARM
    of_each = evenness if even else min(few, many)
    # No rate above 1 has a chance, which is then not a number.
    size_status, each_status = (
        PASSED if chance >= FALSE_ALARM else FAILED for chance in (of_size, of_each)
    )
    values = {"counts": counts, "of": of, "rate": rate, "expected": rate * trials}
    case = case * (size_status == FAILED)
    return [
        fact("check.batch_sizes", size_status, case, **values, chance=of_size),
        fact("check.participation", each_status, "even" * even, **values, chance=of_each),
    ]


def _chance_of_evenness(n_examples: int, counts: counted.DrawCounts) -> float:
    """An upper bound of the chance that independent draws give so little spread.

    Spread is the sum over examples of Y = (participations - expected)**2 >= 0, so that
    P(sum <= E[sum] - t) <= exp(-t**2 / (2 n E[Y**2])) (Maurer 2003, A bound on the deviation
    probability for sums of non-negative random variables, Theorem 2.1), and
    E[Y**2] <= variance + 3 variance**2 for a sum of independent draws.
    """
    variance = counts.participations_variance
    if not variance:
        return 1.0
    missing = max(0.0, n_examples * variance - counts.participations_spread)
    return math.exp(-(missing**2) / (2 * n_examples * (variance + 3 * variance**2)))


def noise_check(noise: counted.NoiseCounts | None) -> Fact:
    """Compare the noise of one session with independent normal noise of the accounted size."""
    if noise is None:
        return fact("check.noise", NOT_CHECKED)
    case = _fault(noise)
    error = math.sqrt(2 / max(noise.values, 1))
    return fact("check.noise", FAILED if case else PASSED, case, noise=noise, error=error)


def _fault(noise: counted.NoiseCounts) -> str:
    """What is wrong with the noise; "" if nothing is."""
    if too_small(noise.variance, noise.values):
        return "small"
    if too_small(noise.least_variance, noise.least_values):
        return "small_somewhere"
    for case in ("along_sum", "previous", "first", "repeated", "signed"):
        if abs(getattr(noise, case)) > _DEVIATIONS:
            return case
    if noise.values < _MANY_VALUES or noise.variance > 1 + _MORE_NOISE:
        return ""  # the fourth power of few values, or of more noise than accounted, says nothing
    excess = abs(noise.fourth_moment / noise.variance**2 - _FOURTH)
    normal = excess <= max(_SMALL_FOURTH, _DEVIATIONS * math.sqrt(96 / noise.values))
    return "" if normal else "shape"


def too_small(variance: float, values: int) -> bool:
    """Whether so many sound values of variance 1 would hardly have so small a mean square."""
    from scipy.special import gammainc  # takes longer to import than the rest of the audit side

    if 1 - variance <= _SMALL_DEFICIT:
        return False
    return bool(gammainc(values / 2, values * variance / 2) < _CHANCE)  # of chi squared


# --- what the checks say of the lines of evidence


def if_known(checks: Iterable[Fact]) -> tuple[Fact, ...]:
    """Checks of a run as an account with known participation reads them."""
    return tuple(
        replace(check, status=NOT_CHECKED, detail=text(f"check.{check.key}", "if_known"), advice="")
        if check.key in OF_SECRECY
        else check
        for check in checks
    )


def lines_of(
    checks: Sequence[Fact],
    recorder: Mapping[str, Any],
    said: Mapping[str, str | None] | None = None,
    left_out: frozenset[str] = frozenset(),
) -> tuple[Fact, ...]:
    """Every line of a run, from its checks and what the header of its log says.

    said: key of a line that nobody can see -> what the user says of it. left_out: checks of what
    the account does not assume.
    """
    words = {"start": recorder.get("start"), **(said or {})}
    void = {"noise": recorder.get("no_privacy"), "source": SEEDED if recorder.get("seeded") else ""}
    lines = []
    for key, line in LINES.items():
        mine = [
            check
            for check in checks
            if check.key in CHECKS and CHECKS[check.key].line == key and check.key not in left_out
        ]
        failed = [check.detail for check in mine if check.status == FAILED]
        unknown = [c for c in mine if c.status == NOT_CHECKED and not CHECKS[c.key].optional]
        passed = {check.key for check in mine if check.status == PASSED}
        missing = [k for k in line.needs if k not in passed | left_out | {c.key for c in unknown}]
        if failed or void.get(key):
            word, found = _facts.REFUTED, [void.get(key) or "", *failed]
        elif not line.needs:
            user = words.get(key) or ""
            word = _facts.DECLARED if user else _facts.ON_TRUST
            if key == "start":  # random items may hold anything
                unknown += [c for c in checks if c.key == "rows" and c.status == NOT_CHECKED]
            found = [user or line.texts.get("on_trust", ""), *(check.detail for check in unknown)]
            found = found if any(found) else ["nothing was seen of it"]
        elif unknown or missing:
            word, found = _facts.DECLARED, _by_detail(unknown)
            titles = ", ".join(CHECKS[key].title for key in missing)
            found += [f"not compared: {titles}"] * bool(missing)
        else:
            word, found = _facts.VERIFIED, _by_detail([c for c in mine if c.key in line.needs])
        lines.append(line.fact(word, "; ".join(filter(None, dict.fromkeys(found)))))
    return tuple(lines)


def unverified(lines: Sequence[Fact]) -> list[Fact]:
    """Of the lines that a recorder can verify, those that are not."""
    return [line for line in lines if line.key in SEEN and line.status != _facts.VERIFIED]


def is_earned(lines: Sequence[Fact]) -> bool:
    """Whether "supported" may be said: all lines that a recorder can verify are there, verified."""
    words = {line.key: line.status for line in lines}
    return _facts.REFUTED not in words.values() and all(
        words.get(key) == _facts.VERIFIED for key in SEEN
    )


def open_lines(lines: Sequence[Fact]) -> list[str]:
    """Which lines are not verified, and what would verify them, in sentences."""
    found = unverified(lines)
    if len(found) < len(SEEN):
        return [
            f"not verified: {line.title.lower()} ({line.detail}); to verify it, {line.advice}"
            for line in found
        ]
    titles = ", ".join(line.title.lower() for line in found)
    return [
        f"not verified: {titles}; to verify them, record training as it runs, with today's Recorder"
    ]


def evidence(lines: Sequence[Fact]) -> str:
    """What an account rests on, in one sentence that holds nothing of the data."""
    left = unverified(lines)
    return "; ".join(
        [f"{len(SEEN) - len(left)} of {len(SEEN)} lines verified"]
        + [
            f"{line.title.lower()} {line.status}"
            for line in lines
            if line in left or line.status == _facts.REFUTED or line.key in ("source", "start")
        ]
    )


def _by_detail(checks: Sequence[Fact]) -> list[str]:
    """What was found, once, after the titles of the checks that found it."""
    titles: dict[str, list[str]] = {}
    for check in checks:
        titles.setdefault(check.detail, []).append(check.title)
    return [f"{', '.join(dict.fromkeys(named))}: {detail}" for detail, named in titles.items()]
