"""The run's guarantee, what it means to an attacker, and whether checks support it.

Releasable where its status says so.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri

from indpriv._facts import DECLARED, FAILED, REFUTED, WORST_CASE, Fact, refused, text
from indpriv._formatting import sentence
from indpriv._plain import shown, to_json
from indpriv._types import FloatArray, IntArray
from indpriv.accountant import method as methods
from indpriv.accountant.account import with_norms_it_uses
from indpriv.accountant.blocks import in_blocks
from indpriv.accountant.laws import GAUSSIAN_ERROR, gaussian_delta, gaussian_mu
from indpriv.accountant.pairs import Pairs
from indpriv.accountant.risk import has_risk_curve, worst_case_risk
from indpriv.accountant.runs import Tuning
from indpriv.accountant.steps import Steps
from indpriv.accountant.tight import Met, deltas
from indpriv.analysis.attacks.rates import FALSE_POSITIVE_RATES
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.summary import SENSITIVE, Audit, Finding, record
from indpriv.epsilon_table import DISCLAIMER, FALSE_POSITIVE_RATE, Account, EpsilonTable
from indpriv.norm_log import evidence
from indpriv.norm_log.fields import is_covered
from indpriv.norm_log.norm_log import NormLog

Membership: Any = record("membership")
Ceilings: Any = record("ceilings")
SUPPORTED, UNPROVEN, VOID = "supported", "unproven", "void"
STATUSES = (SUPPORTED, DECLARED, UNPROVEN, VOID)  # the weakest last
STANDS = (SUPPORTED, DECLARED)  # the statuses of a guarantee that no check contradicts


@dataclass(frozen=True)
class Divisor:
    """How Opacus's divisor, the expected batch size, depends on the number of examples.

    Opacus divides the sum of clipped gradients and noise by int(n / L), where L = ceil(n / batch
    size) is the number of batches of an epoch and 1 / L the sampling rate (Opacus issues 571 and
    819). Where one unit more or fewer (of `rows` rows at most) changes that divisor, `neighbour` is
    the other one: it changes the scale of the noise in every coordinate of every step, and a test
    of the variance that sees every update tells the two data sets apart with this `advantage`,
    whatever epsilon says. So add/remove is not the relation that such a run satisfies; with
    "zero_out", n and with it the divisor are the same in both data sets.
    """

    batch_size: int
    neighbour: int | None
    rate_changes: bool
    advantage: float
    rows: int

    @property
    def tells_n(self) -> bool:
        """Whether updates tell how many examples there are."""
        return self.neighbour is not None or self.rate_changes

    def describe(self) -> str:
        """What is found, in sentences."""
        told = self.neighbour is not None
        return text(
            "hazard.divisor",
            "told" if told else "rate" if self.rate_changes else "same",
            divisor=self,
            more="one example" if self.rows == 1 else f"{self.rows:,} rows",
        )


def divisor_of(
    n_examples: int, total_steps: int, recorder: Mapping[str, Any], *, rows: int = 1
) -> Divisor | None:
    """The divisor of a run that Opacus set up; None if it is not known, or was set by the user.

    The batch size that was given to the loader is not known, so the rate counts as changing if some
    batch size with this number of batches would change it. rows: largest number of rows of a unit.
    """
    n, batches = n_examples, recorder.get("steps_per_epoch")
    batch_size, ranks = recorder.get("expected_batch_size"), recorder.get("ranks", 1)
    if batches is None or batch_size is None or ranks != 1 or n <= rows:
        return None
    rate = recorder.get("sample_rate") or 1 / batches
    of_n = math.isclose(rate * n, batch_size, rel_tol=1e-9)  # trainers set it so
    if of_n and not math.isclose(rate * batches, 1, rel_tol=1e-9):
        return Divisor(int(batch_size), None, True, 0.0, rows)
    if batch_size < 1 or batch_size != _divisor(n, batches):
        return None
    # Batch sizes b with ceil(n / b) = L, for which fewer or more rows need L - 1 or L + 1 batches.
    one_batch_more = -(-n // batches) * batches < n + rows
    one_batch_fewer = batches > 1 and -(-(n - rows) // (batches - 1)) * (batches - 1) < n
    rate_changes = one_batch_more or one_batch_fewer
    if recorder.get("loss_reduction") != "mean":
        return Divisor(batch_size, None, rate_changes, 0.0, rows)
    others = {_divisor(n - rows, batches), _divisor(n + rows, batches)} - {batch_size, 0}
    neighbour = min(others, default=None)
    numbers = total_steps * int(recorder.get("n_parameters") or 1)
    advantage = 0.0 if neighbour is None else scale_advantage(batch_size / neighbour, numbers)
    return Divisor(int(batch_size), neighbour, rate_changes, advantage, rows)


def _divisor(n: int, batches: int) -> int:
    return int(n * (1 / batches))


def scale_advantage(ratio: float, numbers: int) -> float:
    """Total variation of this many normal numbers with standard deviation 1, and with `ratio`.

    The likelihood ratio grows with the sum of squares, which is chi-squared.

    >>> round(scale_advantage(600 / 599, 240 * 26_010), 4)
    0.9968
    """
    squared = max(ratio, 1 / ratio) ** 2
    threshold = numbers * math.log(squared) * squared / (squared - 1)
    law = stats.chi2(numbers)
    return float(law.cdf(threshold) - law.cdf(threshold / squared))


class _Guarantee:
    def __post_init__(self: Any) -> None:
        if self.status == SUPPORTED and not evidence.is_earned(self.lines):
            raise refused("refusal.compared", "supported")

    @property
    def stands(self: Any) -> bool:
        """Whether no check contradicts the guarantee."""
        return self.status in STANDS

    @property
    def publishable(self: Any) -> bool:
        """Whether the statement may be published: no check failed and delta is below 1/n."""
        return bool(self.stands and self.delta_times_n < 1)

    def true_positive_limit(self: Any, epsilon: float, own: float = 1.0) -> float:
        """Largest true-positive rate at FALSE_POSITIVE_RATE of a test bounded by this epsilon.

        epsilon is at most the worst case, so the limit of the worst case's privacy curve holds too.
        own: an example's own limit, by all of its divergences.
        """
        limit = min(own, true_positive_bound(epsilon, self.delta, FALSE_POSITIVE_RATE))
        return min(limit, self.membership.true_positive_rate) if self.membership else limit

    @property
    def withheld(self: Any) -> str:
        """Why the statement may not be published; "" if it may."""
        if self.publishable:
            return ""
        return {
            VOID: self.reasons[0].rpartition(": ")[0] if self.reasons else "it has no privacy",
            UNPROVEN: "a check of its assumptions failed",
        }.get(self.status, "delta is at least 1/n")


Guarantee: Any = record("guarantee", _Guarantee)


def guarantee_of(
    table: EpsilonTable,
    checks: Sequence[Fact],
    recorder: Mapping[str, Any],
    membership: Membership | None = None,
    divisor: Divisor | None = None,
    said: Mapping[str, str | None] | None = None,
) -> Guarantee:
    """State the worst case of a run; the lines of evidence decide its status.

    `recorder` is what the recorder noted about the run: "seeded" and "no_privacy", the reason why
    its noise protects nobody, void the guarantee. `divisor` refutes adding or removing an example
    where it tells their number. `said` is the user's word on what nobody can see; see `lines_of`.
    """
    account = table.account
    by_size = account.sampler == "fixed_size" and is_covered(account.sampler, account.neighbouring)
    left_out = (
        evidence.OF_SECRECY if account.participation == "known" or by_size else frozenset[str]()
    )
    lines = evidence.lines_of(
        [*checks, evidence.ANY_CHOICE] if left_out and account.sampler == "other" else checks,
        recorder,
        said,
        left_out,
    )
    status, reasons = _status(table, checks, recorder, divisor, lines, left_out)
    delta_times_n, bound = account.delta * len(table), _bound(table, account.guaranteed_by)
    statement = text(
        "sentence.guarantee",
        "void" if status == VOID else "unproven" if status == UNPROVEN else "stands",
        bound=bound,
        reason=next(iter(reasons), ""),
    )
    if status in STANDS and delta_times_n >= 1:
        statement += f" {text('sentence.guarantee', 'delta')}"
    return Guarantee(
        worst_case_epsilon=table.worst_case_epsilon,
        delta=account.delta,
        delta_times_n=delta_times_n,
        status=status,
        statement=statement,
        reasons=tuple(reasons),
        membership=membership,
        lines=lines,
        evidence=evidence.evidence(lines),
    )


def _status(
    table: EpsilonTable,
    checks: Sequence[Fact],
    recorder: Mapping[str, Any],
    divisor: Divisor | None,
    lines: Sequence[Fact],
    left_out: frozenset[str],
) -> tuple[str, list[str]]:
    """The status of the guarantee, and why it is not "supported"."""
    if void := evidence.SEEDED if recorder.get("seeded") else recorder.get("no_privacy"):
        return VOID, [void]
    account = table.account
    known = account.participation == "known"
    covered = is_covered(account.sampler, account.neighbouring)
    reasons = [
        check.detail
        for check in checks
        if check.status == FAILED and check.bears_on == WORST_CASE and check.key not in left_out
    ]
    if account.neighbouring == "add_remove" and divisor is not None and divisor.tells_n:
        reasons.append(text("sentence.guarantee", "divisor", found=divisor.describe()))
    if not covered and not known:
        reasons.insert(0, text("sentence.guarantee", "sampler", account=account))
    if reasons:
        return UNPROVEN, reasons
    if not checks:
        reasons = [text("sentence.guarantee", "not_checked")]
    elif recorder.get("rounds"):
        reasons = [text("sentence.guarantee", "rounds")]
    elif recorder.get("replayed") or recorder.get("converted"):
        reasons = [text("sentence.guarantee", "not_recorded")]
    reasons += evidence.open_lines(lines)
    return (DECLARED if reasons or not evidence.is_earned(lines) else SUPPORTED), reasons


def membership_of(log: NormLog, table: EpsilonTable) -> Membership | None:
    """The worst case's limit for the best membership test.

    None where a unit has several rows or an account has no such curve: the guarantee itself bounds
    the test too (`true_positive_bound`).
    """
    several = (methods.most_rows(log) or 1) > 1
    known = table.account.participation == "known"
    if not known and (several or not has_risk_curve(table.account)):
        return None
    rates, advantage, mu = worst_case_limits(log, table, (FALSE_POSITIVE_RATE,))
    return Membership(FALSE_POSITIVE_RATE, float(rates[0]), advantage, mu)


def worst_case_limits(
    log: NormLog, table: EpsilonTable, false_positive_rates: Sequence[float]
) -> tuple[FloatArray, float, float]:
    """Largest true-positive rates at these false-positive rates, largest advantage, and mu.

    With known participation they are those of a Gaussian mechanism, with which a private clipping
    norm may come.
    """
    account = table.account
    if account.participation != "known":
        risk = worst_case_risk(log, delta=account.delta, false_positive_rate=false_positive_rates)
        return risk.true_positive_rate[0], float(risk.advantage[0]), float(risk.mu[0])
    cost = account.clipping_norm_epsilon
    mu = gaussian_mu(np.array([table.worst_case_epsilon - cost]), np.array([account.delta]))
    found = ndtr(ndtri(methods.rate_after_release(false_positive_rates, cost)) + mu)
    advantage = float(methods.advantage_with_release(2 * ndtr(mu / 2) - 1, cost)[0])
    return found, advantage, float(methods.mu_with_release(mu, cost)[0])


def true_positive_bound(epsilon: float, delta: float, false_positive_rate: float) -> float:
    """Largest true-positive rate of a membership test at this false-positive rate.

    The smaller of e^epsilon FPR + delta and 1 - e^-epsilon (1 - delta - FPR), at most 1: the
    privacy region of Kairouz, Oh and Viswanath 2015 (arXiv:1311.0776), after Wasserman and Zhou
    2010 (arXiv:0811.2501). Epsilon holds in both directions of the neighbouring relation.
    """
    factor = math.exp(min(epsilon, 700.0))  # e^700 is near the largest float
    above = factor * false_positive_rate + delta
    below = 1.0 - math.exp(-epsilon) * (1.0 - delta - false_positive_rate)
    return min(1.0, above, below)


def _bound(table: EpsilonTable, method: str) -> str:
    return text("sentence.guarantee", "bound", table=table, account=table.account, method=method)


def usual_relation(log: NormLog, recorder: Mapping[str, Any]) -> str | None:
    """Zero-out where updates tell the number of examples, so that add/remove does not hold."""
    rows = methods.most_rows(log) or 1
    divisor = divisor_of(log.n_examples, log.total_steps, recorder, rows=rows)
    told = divisor is not None and divisor.tells_n and log.neighbouring == "add_remove"
    return "zero_out" if told else None


def guarantee_of_run(run: AuditedRun, membership: Membership | None = None) -> Guarantee:
    """The guarantee of a run by its checks; membership: its limit for the best test."""
    recorder, rows = run.recorded.recorder, run.epsilons.account.rows_per_unit or 1
    divisor = divisor_of(run.log.n_examples, run.log.total_steps, recorder, rows=rows)
    said, checks = run.recorded.declared.of_lines, run.recorded.checks
    return guarantee_of(run.epsilons, checks, recorder, membership, divisor, said)


@dataclass(frozen=True)
class Composition:
    """Several runs accounted together: epsilons over all runs, and the weakest guarantee."""

    table: EpsilonTable
    # each by itself, at the delta of the whole: path, sampling, steps, n people or examples,
    # worst_case_epsilon and median_epsilon
    runs: tuple[Mapping[str, Any], ...]
    status: str
    statement: str
    reasons: tuple[str, ...]  # why the status is not "supported", by run

    def to_json(self) -> dict[str, Any]:
        """What composition.json holds: nothing about single people."""
        table, own = self.table, ("status", "statement", "reasons")
        return {
            "sensitive": SENSITIVE,
            "disclaimer": DISCLAIMER,
            "account": to_json(table.account),
            **{name: getattr(table, name) for name in ("claim", "claim_reason")},
            "worst_case_epsilon": table.worst_case_epsilon,
            "guarantee": {name: to_json(getattr(self, name)) for name in own},
            "runs": to_json(self.runs),
        }

    @property
    def by_number(self) -> list[dict[str, Any]]:
        """Individual epsilons of those who were in so many runs."""
        each, found = self.table.details["n_runs"], []
        for number in np.unique(each).tolist():
            epsilon = self.table.epsilon[each == number]
            ends = np.quantile(epsilon, (0.5, 0.95, 1.0), method="higher").tolist()
            row = {"number": number, "n": len(epsilon), "share": len(epsilon) / len(each)}
            found.append(row | dict(zip(("median", "p95", "largest"), ends, strict=True)))
        return found


def composed_statement(table: EpsilonTable, status: str, n_runs: int, tuning: Tuning | None) -> str:
    """The guarantee of several runs in one sentence."""
    if status == VOID:
        return text("sentence.composition", "void")
    what = text("sentence.composition", "runs", n_runs=n_runs)
    method = table.account.guaranteed_by
    if tuning is not None:
        # The price of tuning is one of Rényi divergences, whatever accounts for each person
        what, method = text("sentence.composition", "best", tuning=tuning), "RDP accountant"
    bound = _bound(table, method)
    if status == UNPROVEN:
        return text("sentence.composition", "unproven", what=what, bound=bound)
    large = table.account.delta * len(table) >= 1
    caution = f" {text('sentence.guarantee', 'delta')}" if large else ""
    return f"{what} {'satisfy' if tuning is None else 'satisfies'} {bound}.{caution}"


def _find(run: AuditedRun) -> dict[str, Any]:
    found = {name: getattr(run.epsilons, name) for name in ("account", "claim", "claim_reason")}
    return found | {"guarantee": guarantee_of_run(run, membership_of(run.log, run.epsilons))}


def _alarms(audit: Audit) -> Iterator[str]:
    guarantee = audit.guarantee
    if guarantee.status == VOID:
        yield f"This run has no privacy guarantee: {'; '.join(guarantee.reasons)}."
    elif not guarantee.stands:
        yield f"No guarantee is proven for this run: {'; '.join(guarantee.reasons)}."
    if guarantee.delta_times_n >= 1:
        times_n = f"Delta times n is {shown(guarantee, 'delta_times_n')}."
        yield f"{text('sentence.guarantee', 'delta')} {times_n}"
    for line in guarantee.lines:
        if line.status == REFUTED:
            yield f"{line.title} is refuted: {line.detail}."


def _shown(audit: Audit) -> str:
    """The status, and what fails, without figures of the data."""
    guarantee = audit.guarantee
    refuted = [line.title for line in guarantee.lines if line.status == REFUTED]
    large = ["delta is at least 1/n"] * (guarantee.delta_times_n >= 1)
    return "; ".join([guarantee.status, *large, *(f"refuted: {title}" for title in refuted)])


def _open(audit: Audit) -> list[str]:
    lines = [one for one in audit.guarantee.lines if one.advice]
    said = evidence.open_lines(lines) if len(lines) < len(evidence.SEEN) else ()
    return [sentence(one) for one in said]  # of all together, the status says why


def _failed(audit: Audit) -> list[Fact]:
    return [check for check in audit.checks if check.status == FAILED]


# --- what any attack on the run can reach at most


def ceilings_of(log: NormLog, table: EpsilonTable) -> Ceilings | None:
    """The worst case's limits and those of all examples together.

    None for units of several rows, if neighbours differ by a replaced example, or if batches were
    truncated.
    """
    if log.unit_ids is not None or not has_risk_curve(table.account):
        return None
    limits, advantage, _ = worst_case_limits(log, table, FALSE_POSITIVE_RATES)
    worst = dict(zip(FALSE_POSITIVE_RATES, limits.tolist(), strict=True))
    own = {rate: min(individual_ceiling(log, table, rate), most) for rate, most in worst.items()}
    by_name = ({f"{rate:g}": most for rate, most in one.items()} for one in (worst, own))
    return Ceilings(*by_name, advantage)


def individual_ceiling(log: NormLog, table: EpsilonTable, rate: float) -> float:
    """Largest share of all examples that any attack accuses in runs that train on them.

    An attack has one threshold, so its false positives go where epsilon is large. A test of example
    i has rates y_i <= delta_i(t) + e^t x_i for every t, by its privacy curve delta_i. So the mean
    of y_i is at most that of delta_i(t) plus e^t times the mean of x_i, which is `rate`, however
    false positives are split: a bound for any t, and smallest where e^t is the likelihood ratio of
    the common threshold. Beyond its epsilon an example's delta_i is at most the account's delta.
    Before it, a tight account has a proven bound; otherwise delta_i is that of a Gaussian mechanism
    (exact with known participation, else an approximation from above: see `mu_of`).
    """
    account = table.account
    cost = account.clipping_norm_epsilon
    epsilon, rate = table.epsilon - cost, float(methods.rate_after_release(rate, cost))
    if rate >= 1:
        return 1.0
    mu = _gaussian_mu(epsilon, account.delta)

    def bound(at: float, of_steps: Callable[[IntArray, float], FloatArray]) -> float:
        above = np.flatnonzero(epsilon > at)
        deltas = of_steps(above, at).sum() + (len(epsilon) - len(above)) * account.delta
        return float(min(1.0, deltas / len(epsilon) + np.exp(at) * rate))

    def gaussian(above: IntArray, at: float) -> FloatArray:
        found = gaussian_delta(np.full(len(above), at), mu[above])
        return np.asarray(found * (1 + GAUSSIAN_ERROR))

    # The best test at false-positive rate x has its threshold at most at the ratio 1 / x
    limits = (0.0, -np.log(rate))
    best = minimize_scalar(bound, args=(gaussian,), bounds=limits, method="bounded")
    if account.participation == "known" or account.accountant != "pld":
        return float(best.fun)
    return bound(float(best.x), partial(_tight_deltas, log, account))


def _tight_deltas(log: NormLog, account: Account, rows: IntArray, at: float) -> FloatArray:
    """(n_rows,) delta of the steps of some examples at one epsilon, from above."""
    between = account.between_records
    method = methods.Method(delta=account.delta, accountant="pld", between_records=between)
    log = with_norms_it_uses(log, method)
    steps = Steps.of(log, between)
    pairs = Pairs(steps.laws, account.delta, float(log.total_steps))

    def of_block(block: NormLog) -> FloatArray:
        met = Met.of(steps.counts(block))
        return deltas(pairs.above[0], met, np.full(len(met), at))

    found = in_blocks(log.take(rows), of_block, size=steps.block_size)
    return np.concatenate([np.zeros(0), *found])


def mu_of(table: EpsilonTable) -> FloatArray:
    """(n_examples,) mu of a Gaussian mechanism with the epsilon of each example at delta.

    Such a mechanism allows about what the run allows, and rather more: a sampled run with the same
    epsilon at a small delta has a smaller mu in its body (see `indpriv.membership_risk`). A private
    clipping norm has a curve of its own.
    """
    cost = table.account.clipping_norm_epsilon
    mu = _gaussian_mu(table.epsilon - cost, table.account.delta)
    return methods.mu_with_release(mu, cost) if cost else mu


def _gaussian_mu(epsilon: FloatArray, delta: float) -> FloatArray:
    distinct, codes = np.unique(epsilon, return_inverse=True)
    return gaussian_mu(distinct, np.full(len(distinct), delta))[codes]


def true_positive_rate(mu: FloatArray, false_positive_rate: float) -> FloatArray:
    """Of the best test at this false-positive rate: Dong, Roth and Su 2022, equation 6.

    >>> true_positive_rate(np.array([0.0, 0.66]), 0.01).round(3)
    array([0.01 , 0.048])
    """
    return np.asarray(ndtr(ndtri(false_positive_rate) + mu))


def _ceilings(run: AuditedRun) -> dict[str, Any]:
    if run.recorded.dp.confidence is None and not run.recorded.dp.attributes:
        return {}
    return {"ceilings": ceilings_of(run.log, run.attacked_epsilons)}


FINDINGS = (
    Finding("verdict", _find, alarms=_alarms, watched="guarantee", public=_shown, notes=_open),
    Finding(
        "checks",
        lambda run: {"checks": tuple(run.recorded.checks)},
        alarms=lambda audit: [f"{check.title}: {check.detail}" for check in _failed(audit)],
        watched="evidence",
        public=lambda audit: ", ".join(one.title for one in _failed(audit)) or "no check failed",
    ),
    Finding("ceilings", _ceilings),
)
