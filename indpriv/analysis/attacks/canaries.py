"""What canaries prove about the worst case, and whether they agree with the account. Sensitive.

Gradient canaries of one length in one run have independent scores, whose distributions the account
predicts exactly. Four lower bounds, each with its assumption; see `lower_bound.BOUNDS`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, special, stats

from indpriv._checks import check_delta, check_positive_int
from indpriv._facts import refused, text
from indpriv._plain import shown
from indpriv._types import ArrayLike, BoolArray, FloatArray, IntArray, NDArray
from indpriv.accountant.account import account
from indpriv.accountant.risk import predicted_evidence
from indpriv.analysis import statistics, summary
from indpriv.analysis.attacks import lower_bound, rates
from indpriv.analysis.attacks.lower_bound import Bound
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.statistics import generator_of
from indpriv.analysis.summary import Audit, Finding, record
from indpriv.attack_scores import AttackScores, log_likelihood_ratio
from indpriv.errors import InputError
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.norm_log import NormLog

_THRESHOLDS = (0.25, 0.5, 0.75)  # quantiles of the predicted scores at which rates are counted
_SIMULATED = 20_000  # scores of each side, to compare distributions with
_LEAST = 8  # members, and others, of one length
SIGNIFICANCE = 1e-3  # of all tests of the account together
_UNFAIR = 1e-9  # probability of numbers of members that fair coins do not give


# --- any attack


class _AttackMeasures:
    def __post_init__(self: Any) -> None:
        if not lower_bound.PROOFS.keys() <= self.bounds.keys():
            raise InputError(f"{self.attack} lacks a lower bound by fair coins; audit again")

    @property
    def overall(self: Any) -> dict[str, Any]:
        """What it achieves on all examples: see `rates.achieved`."""
        return rates.achieved(self.rates, by="")[0]

    @property
    def looks_turned(self) -> bool:
        """Whether non-members score higher than members, by more than chance."""
        ends = self.overall["auc_interval"]
        return ends is not None and bool(ends.high < 0.5)


AttackMeasures: Any = record("attack_measures", _AttackMeasures)
CanaryFindings: Any = record("canary_findings")


def measure_attack(
    scores: AttackScores, *, delta: float = 1e-5, seed: int = 0, ceiling: float | None = None
) -> AttackMeasures:
    """Measure an attack, and bound the worst-case epsilon from below.

    The lower bound needs members that were chosen by fair coins. From other scores, equal numbers
    of random members and non-members are taken, so that unequal numbers cannot prove anything. The
    bound over all examples holds at 95 % by itself, those of the groups all together. Of all
    examples there are three more bounds, which assume more.

    `delta` is of the (epsilon, delta)-DP that is tested, `ceiling` the epsilon that is accounted;
    the seed decides which scores are left out and the order of ties. InputError for a delta outside
    (0, 1), a negative seed, scores of an adversary for whom the bound does not hold, or of several
    models; and for "fair coins" that were none, as all or most of a group are members, or an
    example has two scores.
    """
    delta = check_delta(delta)
    check_positive_int("seed", seed, minimum=0)
    scores.check_adversary("a lower bound from one run", ("full", "gradients"))
    groups, fair = rates.group_indices(scores), scores.fair_coins
    twice = int(pd.Series(scores.example_ids).dropna().duplicated().sum())
    if fair and twice:
        raise refused("refusal.scores", "coins_twice", n=twice)
    large = (len(index) >= 2 * lower_bound.LEAST_GUESSES for index in groups.values())
    joint = rates.bonferroni(sum(large))
    every = [(None, np.arange(len(scores.scores))), *groups.items()]
    if fair and len(scores.member):
        _check_coins(scores.member, groups)
    rows: list[dict[str, Any]] = []
    group_bounds = dict[str, Bound]()
    for name, index in every:
        values, member, rng = scores.scores[index], scores.member[index], generator_of(seed, name)
        key: dict[str, Any] = {"attack": scores.method, "model": "dp"}
        key |= {"by": "", "part": rates.ALL} if name is None else {"by": "group", "part": name}
        n = {"n_members": int(member.sum()), "n_others": int((~member).sum())}
        used = np.arange(len(index)) if fair else _balanced(member, rng)
        bounded = partial(
            lower_bound.lower_bound,
            values[used],
            member[used],
            delta=delta,
            n_coins=len(scores.scores),
            balanced=not fair,
            confidence=statistics.CONFIDENCE if name is None else joint,
            ceiling=ceiling,
        )
        found = [key | row for row in rates.separation(values[member], values[~member])]
        rows += found or [{**key, **n, "rate": "auc", "n": len(index)}]
        if name is not None:
            group_bounds[name] = bounded(rng=rng)
            continue
        f_dp = bounded(rng=generator_of(seed, name), proof="mahloujifar2024")
        bounds = {"steinke2023": bounded(rng=rng), "mahloujifar2024": f_dp}
        for bound, (least, tried) in lower_bound.OF_INDEPENDENT.items():
            epsilon = least(values, member, delta)
            bounds[bound] = Bound(epsilon, ceiling, statistics.CONFIDENCE, tried)
    method = text("sentence.canaries", "fair_coins" if fair else "balanced")
    table = summary.RATES.of_rows(rows)
    roc = rates.roc(scores)
    return AttackMeasures(scores.method, method, delta, seed, table, bounds, group_bounds, roc)


def _check_coins(member: BoolArray, groups: Mapping[str, IntArray]) -> None:
    """Refuse numbers of members, of all examples or of groups, that fair coins do not give."""
    every = [(rates.ALL, member), *((name, member[index]) for name, index in groups.items())]
    chances = [stats.binomtest(int(of.sum()), len(of)).pvalue for _, of in every]
    # Coins of groups are independent: Fisher's combination, which for counts errs on the safe side.
    if min(chances) < _UNFAIR or stats.combine_pvalues(chances[1:] or [1.0]).pvalue < _UNFAIR:
        part, of = every[int(np.argmin(chances))]
        n = {"n_members": int(of.sum()), "n_others": int((~of).sum()), "level": _UNFAIR}
        raise refused("refusal.scores", "not_fair", part=part, **n)


def _balanced(member: NDArray[np.bool_], rng: np.random.Generator) -> IntArray:
    """Positions of equal numbers of random members and non-members."""
    sides = [rng.permutation(np.flatnonzero(member == side)) for side in (True, False)]
    return np.concatenate([side[: min(map(len, sides))] for side in sides])


# --- gradient canaries


class _CanaryResults:
    @property
    def agree(self: Any) -> bool:
        """Whether the scores of every length agree with the account."""
        return all(found.agrees for found in self.lengths)


CanaryResults: Any = record("canary_results", _CanaryResults)


def measure_gradient_canaries(
    scores: AttackScores, settings: StepSettings, *, delta: float = 1e-5, seed: int = 0
) -> CanaryResults:
    """What the gradient canaries of a run prove, for each length with 8 canaries in and 8 out.

    Groups of the scores are lengths; InputError for scores of another attack.
    """
    delta = check_delta(delta)
    if scores.adversary != "updates" or scores.groups is None or not scores.fair_coins:
        raise refused("refusal.compared", "no_canaries", scores=scores)
    judged, left_out = dict[str, IntArray](), list[str]()
    for name, index in rates.group_indices(scores).items():
        inside, infinite = scores.member[index].sum(), (~np.isfinite(scores.scores[index])).sum()
        counts = {"inside": inside, "others": len(index) - inside, "least": _LEAST, "n": infinite}
        if infinite or min(inside, len(index) - inside) < _LEAST:
            why = "infinite" if infinite else "left_out"
            left_out.append(text("sentence.canaries", why, length=name, **counts))
        else:
            judged[name] = index
    found, about = list[CanaryFindings](), {"delta": delta, "n_coins": len(scores.scores)}
    for name, index in judged.items():
        own, rng = (scores.scores[index], scores.member[index]), generator_of(seed, name)
        found.append(_findings(*own, settings, float(name), rng, len(judged), about))
    return CanaryResults(delta, tuple(sorted(found, key=lambda one: one.length)), tuple(left_out))


def simulated_evidence(
    settings: StepSettings, relative_norms: ArrayLike, member: BoolArray, rng: np.random.Generator
) -> FloatArray:
    """(n,) sums over all steps of the log-likelihood ratio, in nats, for independent examples.

    relative_norms of clipped gradients over max_grad_norm are (total_steps, n), or broadcast to it;
    member: (n,) which examples take part; rng draws batches and noise.
    """
    shape = len(settings), len(member)
    evidence = np.zeros(len(member))
    for step, row in enumerate(np.broadcast_to(np.asarray(relative_norms, np.float64), shape)):
        setting = settings.at(step)
        drawn = member & (rng.random(len(member)) < setting.sample_rate)
        evidence += log_likelihood_ratio(
            rng.standard_normal(len(member)) + drawn * (row / setting.noise_multiplier),
            relative_norm=row,
            noise_multiplier=setting.noise_multiplier,
            sample_rate=setting.sample_rate,
        )
    return evidence


def _findings(
    scores: FloatArray,
    member: BoolArray,
    settings: StepSettings,
    length: float,
    rng: np.random.Generator,
    n_lengths: int,
    about: Mapping[str, Any],
) -> CanaryFindings:
    """Of the canaries of one length, by (n,) scores; about: delta, and the number of all coins."""
    side = np.repeat([True, False], _SIMULATED)
    simulated = simulated_evidence(settings, length, side, rng)
    difference, error, freedom = (float(of[0]) for of in separation(scores, member[None]))
    error, predicted = max(error, 1e-300), predicted_separation(settings, length)
    margin = float(special.stdtrit(freedom, (1 + statistics.CONFIDENCE) / 2) * error)
    tests = [2 * float(special.stdtr(freedom, -abs(difference - predicted) / error))]
    for test in (stats.ks_2samp, partial(stats.levene, center="median")):  # Brown and Forsythe
        pairs = ((scores[member], simulated[side]), (scores[~member], simulated[~side]))
        tests += [float(test(*pair).pvalue) for pair in pairs]
    p_value = min(1.0, n_lengths * len(tests) * min(tests))
    ceiling = epsilon_of_length(settings, length, about["delta"])
    bound = partial(lower_bound.lower_bound, scores, member, **about, rng=rng, ceiling=ceiling)
    proofs: dict[str, Bound] = {proof: bound(proof=proof) for proof in lower_bound.PROOFS}
    more = _bounds(scores, member, settings, simulated, rng, ceiling, about["delta"])
    return CanaryFindings(
        length=length,
        n_members=int(member.sum()),
        n_others=int((~member).sum()),
        ceiling=ceiling,
        bounds=proofs | dict(more),
        separation=difference,
        separation_interval=statistics.Interval(difference - margin, difference + margin),
        separation_predicted=predicted,
        p_value=p_value,
        agrees=p_value >= SIGNIFICANCE,
    )


def epsilon_of_length(settings: StepSettings, length: float, delta: float) -> float:
    """Epsilon of an example whose clipped gradient has this relative length in every step."""
    return float(account(_log_of(settings, length), delta=delta, accountant="pld").epsilon[0])


def predicted_separation(settings: StepSettings, length: float) -> float:
    """Mean score of members less that of others, by the account; length may be above 1."""
    return float(predicted_evidence(_log_of(settings, length), orders=())["separation"][0])


def _log_of(settings: StepSettings, length: float) -> NormLog:
    """A log of one example, whose gradient is as long as the noise at 1 / length is strong."""
    public: Any = {"total_steps": len(settings), "sample_rate": settings.sample_rate}
    noise = settings.noise_multiplier / length
    return NormLog.from_arrays([[1.0]], [0], noise_multiplier=noise, max_grad_norm=1.0, **public)


def separation(scores: FloatArray, member: BoolArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Differences of means, standard errors and Welch's degrees of freedom of memberships (k, n).

    Canaries may be eight: normal quantiles would miss 7 % instead of 5, and 0.2 % for 0.02.
    """
    sides = np.stack([member, ~member]).astype(np.float64)
    n = sides.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):  # redrawn coins can leave one on a side
        means = sides @ scores / n
        squares = (sides @ scores**2 - n * means**2) / (n - 1) / n
        whole = np.maximum(squares.sum(axis=0), 1e-300)
        freedom = 1 / ((squares / whole) ** 2 / (n - 1)).sum(axis=0)
    return means[0] - means[1], np.sqrt(whole), freedom


def _bounds(
    scores: FloatArray,
    member: BoolArray,
    settings: StepSettings,
    simulated: FloatArray,
    rng: np.random.Generator,
    ceiling: float,
    delta: float,
) -> Iterator[tuple[str, Bound]]:
    """Bounds that need what the account predicts; coins unrelated to the scores test each.

    "rates": Clopper-Pearson intervals of both rates at thresholds fixed by the account; then mu.
    "means": the shortest length that the account would need to explain the difference of means.
    """
    above = (scores > np.quantile(simulated, _THRESHOLDS)[:, None]).astype(np.float64)
    confidence = rates.bonferroni(len(_THRESHOLDS))  # two-sided: each end has half of the rest

    def largest_mu(member: BoolArray) -> FloatArray:
        sides = [(side @ above.T, side.sum(axis=1)[:, None]) for side in (member, ~member)]
        (low, _), (_, high) = (statistics.binomial_ends(*side, confidence) for side in sides)
        return np.asarray((special.ndtri(low) - special.ndtri(high)).max(axis=1))

    def least_difference(member: BoolArray) -> FloatArray:
        difference, error, freedom = separation(scores, member)
        return np.asarray(difference - special.stdtrit(freedom, statistics.CONFIDENCE) * error)

    def of_difference(proven: float) -> float:
        def excess(length: float) -> float:
            return predicted_separation(settings, length) - proven

        shortest, longest = 1e-3, 1.0
        if excess(shortest) >= 0:
            return 0.0
        while excess(longest) < 0:
            longest *= 2
        log = _log_of(settings, optimize.brentq(excess, shortest, longest, xtol=1e-4))
        return float(account(log, delta=delta, accountant="pld", brackets=True).epsilon_lower[0])

    of_mu = partial(lower_bound.gaussian_epsilon, delta=delta)
    for key, tried, least, epsilon_of in (
        ("rates", len(_THRESHOLDS), largest_mu, of_mu),
        ("means", 1, least_difference, of_difference),
    ):
        epsilon = epsilon_of(float(least(member[None])[0]))
        alarms = int((least(rng.random((lower_bound.NULL_TRIALS, len(scores))) < 0.5) > 0).sum())
        told = lower_bound.alarms_of(alarms)
        yield key, Bound(epsilon, ceiling, statistics.CONFIDENCE, tried, **told)


# --- findings


def _canaries(run: AuditedRun) -> dict[str, Any]:
    if (scores := run.recorded.canaries) is None:
        return {}
    delta, ceiling = run.epsilons.account.delta, run.audit.guarantee.worst_case_epsilon
    return {"canaries": measure_attack(scores, delta=delta, seed=run.seed, ceiling=ceiling)}


def _gradient_canaries(run: AuditedRun) -> dict[str, Any]:
    if (scores := run.recorded.gradient_canaries) is None:
        return {}
    about: Any = {"delta": run.epsilons.account.delta, "seed": run.seed}
    return {"gradient_canaries": measure_gradient_canaries(scores, run.log.settings, **about)}


def _proven(audit: Audit) -> Iterator[str]:
    bound = audit.canaries and audit.canaries.bounds["steinke2023"]
    if bound and bound.above_ceiling:
        proved, accounted = shown(bound, "epsilon"), shown(bound, "ceiling")
        yield text("sentence.canaries", "proven", proved=proved, accounted=accounted)


def _contradicted(audit: Audit) -> Iterator[str]:
    for one in audit.gradient_canaries.lengths if audit.gradient_canaries else ():
        if not one.agrees:
            yield text("sentence.canaries", "contradicted", length=shown(one, "length"))


FINDINGS = (
    Finding("canaries", _canaries, alarms=_proven, watched="epsilon that canaries prove"),
    Finding(
        "gradient_canaries",
        _gradient_canaries,
        alarms=_contradicted,
        watched="gradient canaries that contradict the account",
        notes=lambda audit: audit.gradient_canaries.left_out if audit.gradient_canaries else (),
    ),
)
