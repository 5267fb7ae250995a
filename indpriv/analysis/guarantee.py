"""The run's guarantee, what it means to an attacker, and whether checks support it.

Releasable where its status says so.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from scipy.special import ndtr, ndtri

from indpriv._facts import DECLARED, FAILED, REFUTED, WORST_CASE, Fact
from indpriv._formatting import format_delta, format_epsilon
from indpriv._plain import AtLeastZero, OneOf, Share
from indpriv.accountant.clipping_norm import (
    advantage_with_release,
    mu_with_release,
    rate_after_release,
)
from indpriv.accountant.gaussian import gaussian_mu
from indpriv.accountant.risk import has_risk_curve, risk_takes_long, worst_case_risk
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.divisor import Divisor, divisor_of
from indpriv.analysis.summary import Audit, Finding
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, Account, Epsilons
from indpriv.errors import InputError
from indpriv.norm_log.evidence import (
    ANY_CHOICE,
    OF_SECRECY,
    SEEDED,
    evidence,
    is_earned,
    lines_of,
    open_lines,
)
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.validation import is_covered

SUPPORTED, UNPROVEN, VOID = "supported", "unproven", "void"
STATUSES = (SUPPORTED, DECLARED, UNPROVEN, VOID)  # the weakest last
STANDS = (SUPPORTED, DECLARED)  # the statuses of a guarantee that no check contradicts

DELTA_TOO_LARGE = (
    "Delta is not below 1/n, so this guarantee promises almost nothing and is not to be published."
)
_WITHOUT_POISSON = (
    "; an audit with --participation known gives a guarantee that needs no Poisson sampling"
)


@dataclass(frozen=True)
class Membership:
    """What the best membership test can achieve if it sees every model state and all other data.

    For an example at max_grad_norm in every step, read off the whole privacy curve and rounded up:
    a limit that holds for every example.

    Attributes:
        false_positive_rate: how often the test accuses an example that was not in the data.
        true_positive_rate: how often it can then identify one that was, at most.
        advantage: the largest difference of the two rates, at any false-positive rate.
        mu: of a Gaussian mechanism like this run (mu-GDP); an approximation.
    """

    false_positive_rate: Share
    true_positive_rate: Share
    advantage: Share
    mu: AtLeastZero


@dataclass(frozen=True)
class Guarantee:
    """The run's differential-privacy guarantee.

    Attributes:
        worst_case_epsilon: of an example at max_grad_norm in every step, or with known
            participation of the most exposed one in the steps that it took part in.
        delta: of the guarantee.
        delta_times_n: expected number of people whom a delta failure could expose.
        status: "supported" (batch, contribution, noise, update and settings are verified: training
            was compared with its own recomputation), "declared" (nothing is refuted, but one of
            these is not verified), "unproven" (a check of an assumption failed) or "void" (no
            privacy at all).
        statement: one sentence with the unit, the neighbouring relation, the sampler and what is
            covered.
        reasons: why it is not "supported".
        membership: the limit for a membership test, tighter than (epsilon, delta) alone gives; None
            where a unit has several rows.
        lines: what the guarantee rests on, and how each is known.
        evidence: the same in one sentence that holds nothing of the data.
    """

    worst_case_epsilon: AtLeastZero
    delta: AtLeastZero
    delta_times_n: AtLeastZero
    status: Annotated[str, OneOf(*STATUSES)]
    statement: str
    reasons: tuple[str, ...]
    membership: Membership | None
    lines: tuple[Fact, ...]
    evidence: str

    def __post_init__(self) -> None:
        if self.status == SUPPORTED and not is_earned(self.lines):
            raise InputError(
                "audit.json calls its guarantee supported, but not every line of evidence is "
                "verified; make the audit again"
            )

    @property
    def stands(self) -> bool:
        """Whether no check contradicts the guarantee."""
        return self.status in STANDS

    @property
    def publishable(self) -> bool:
        """Whether the statement may be published: no check failed and delta is below 1/n."""
        return self.stands and self.delta_times_n < 1

    def true_positive_limit(self, epsilon: float, own: float = 1.0) -> float:
        """Largest true-positive rate at FALSE_POSITIVE_RATE of a test bounded by this epsilon.

        epsilon is at most the worst case, so the limit of the worst case's privacy curve holds too.
        own: an example's own limit, by all of its divergences.
        """
        limit = min(own, true_positive_bound(epsilon, self.delta, FALSE_POSITIVE_RATE))
        if self.membership is None:
            return limit
        return min(limit, self.membership.true_positive_rate)

    @property
    def withheld(self) -> str:
        """Why the statement may not be published; "" if it may."""
        if self.publishable:
            return ""
        return {
            VOID: self.reasons[0].rpartition(": ")[0] if self.reasons else "it has no privacy",
            UNPROVEN: "a check of its assumptions failed",
        }.get(self.status, "delta is at least 1/n")


def guarantee_of(
    table: Epsilons,
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
    left_out = OF_SECRECY if account.participation == "known" or by_size else frozenset[str]()
    lines = lines_of(
        [*checks, ANY_CHOICE] if left_out and account.sampler == "other" else checks,
        recorder,
        said,
        left_out,
    )
    status, reasons = _status(table, checks, recorder, divisor, lines, left_out)
    statement, delta_times_n = _statement(table, status, reasons), account.delta * len(table)
    if status in STANDS and delta_times_n >= 1:
        statement += f" {DELTA_TOO_LARGE}"
    return Guarantee(
        worst_case_epsilon=table.worst_case_epsilon,
        delta=account.delta,
        delta_times_n=delta_times_n,
        status=status,
        statement=statement,
        reasons=tuple(reasons),
        membership=membership,
        lines=lines,
        evidence=evidence(lines),
    )


def _status(
    table: Epsilons,
    checks: Sequence[Fact],
    recorder: Mapping[str, Any],
    divisor: Divisor | None,
    lines: Sequence[Fact],
    left_out: frozenset[str],
) -> tuple[str, list[str]]:
    """The status of the guarantee, and why it is not "supported"."""
    if void := SEEDED if recorder.get("seeded") else recorder.get("no_privacy"):
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
        reasons.append(
            f"{divisor.describe()}; an audit with --set neighbouring=zero_out allows for it"
        )
    if not covered and not known:
        reasons.insert(0, f"batches were {account.sampler}, not Poisson-sampled{_WITHOUT_POISSON}")
    if reasons:
        return UNPROVEN, reasons
    if not checks:
        reasons = ["nothing was checked: sampler, steps and settings are as the log says"]
    elif recorder.get("rounds"):
        reasons = ["clipping, noise and participants are as the federated trainer passed them"]
    elif recorder.get("replayed") or recorder.get("converted"):
        reasons = [
            "the training was not recorded as it ran: sampler, steps and settings are as declared"
        ]
    reasons += open_lines(lines)
    return (DECLARED if reasons or not is_earned(lines) else SUPPORTED), reasons


def worst_case_membership(log: NormLog, delta: float) -> Membership | None:
    """The worst case's limit for the best membership test.

    None where a unit has several rows, or where steps are so many or so different that it takes
    minutes: the guarantee itself bounds the test too (`true_positive_bound`).
    """
    if risk_takes_long(log) or (
        log.unit != "example"
        and log.unit_ids is not None
        and len(np.unique(log.unit_ids)) < log.n_examples
    ):
        return None
    risk = worst_case_risk(log, delta=delta, false_positive_rate=FALSE_POSITIVE_RATE)
    return Membership(
        false_positive_rate=FALSE_POSITIVE_RATE,
        true_positive_rate=float(risk.true_positive_rate[0, 0]),
        advantage=float(risk.advantage[0]),
        mu=float(risk.mu[0]),
    )


def membership_if_known(table: Epsilons) -> Membership:
    """The same for an account with known participation: that of a Gaussian mechanism.

    A private clipping norm may come with it.
    """
    cost = table.account.clipping_norm_epsilon
    worst = np.array([table.worst_case_epsilon - cost]), np.array([table.account.delta])
    mu = gaussian_mu(*worst)
    rate = rate_after_release(FALSE_POSITIVE_RATE, cost)
    return Membership(
        false_positive_rate=FALSE_POSITIVE_RATE,
        true_positive_rate=float(ndtr(ndtri(rate) + mu)[0]),
        advantage=float(advantage_with_release(2 * ndtr(mu / 2) - 1, cost)[0]),
        mu=float(mu_with_release(mu, cost)[0]),
    )


def true_positive_bound(epsilon: float, delta: float, false_positive_rate: float) -> float:
    """Largest true-positive rate of a membership test at this false-positive rate.

    Args:
        epsilon: of the guarantee, in both directions of the neighbouring relation.
        delta: of the guarantee.
        false_positive_rate: how often the test accuses an example that was not in the data.

    Returns:
        the smaller of e^epsilon FPR + delta and 1 - e^-epsilon (1 - delta - FPR), at most 1: the
        privacy region of Kairouz, Oh and Viswanath 2015 (arXiv:1311.0776), after Wasserman and Zhou
        2010 (arXiv:0811.2501).
    """
    factor = math.exp(min(epsilon, 700.0))  # e^700 is near the largest float
    above = factor * false_positive_rate + delta
    below = 1.0 - math.exp(-epsilon) * (1.0 - delta - false_positive_rate)
    return min(1.0, above, below)


def _statement(table: Epsilons, status: str, reasons: Sequence[str]) -> str:
    account = table.account
    if status == VOID:
        return f"This run has no differential-privacy guarantee: {reasons[0]}."
    bound = (
        f"epsilon {format_epsilon(table.worst_case_epsilon)} and delta "
        f"{format_delta(account.delta)} ({account.relation}, {account.sampling}, "
        f"{account.guaranteed_by})"
    )
    if status == UNPROVEN:
        return (
            "No guarantee is proven for this run. Had every assumption held, all its model states "
            f"together would satisfy differential privacy with {bound}."
        )
    return (
        "All model states of this training run together, every checkpoint and the final model, "
        f"satisfy differential privacy with {bound}."
    )


def divisor_of_run(log: NormLog, epsilons: Epsilons, recorder: Mapping[str, Any]) -> Divisor | None:
    """Whether the divisor of a run tells how many examples there are; as `divisor_of`."""
    rows = epsilons.account.rows_per_unit or 1
    return divisor_of(log.n_examples, log.total_steps, recorder, rows=rows)


def guarantee_of_run(run: AuditedRun, membership: Membership | None = None) -> Guarantee:
    """The guarantee of a run by its checks; membership: its limit for the best test."""
    recorded, said = run.recorded, run.recorded.declared.of_lines
    divisor = divisor_of_run(run.log, run.epsilons, recorded.recorder)
    checks, recorder = recorded.checks, recorded.recorder
    return guarantee_of(run.epsilons, checks, recorder, membership, divisor, said)


def _find(run: AuditedRun) -> dict[str, Any]:
    epsilons, membership = run.epsilons, None
    if epsilons.account.participation == "known":
        membership = membership_if_known(epsilons)
    elif has_risk_curve(epsilons.account):
        membership = worst_case_membership(run.log, epsilons.account.delta)
    return {
        "account": epsilons.account,
        "claim": epsilons.claim,
        "claim_reason": epsilons.claim_reason,
        "guarantee": guarantee_of_run(run, membership),
    }


def _alarms(audit: Audit) -> Iterator[str]:
    guarantee = audit.guarantee
    if guarantee.status == VOID:
        yield f"This run has no privacy guarantee: {'; '.join(guarantee.reasons)}."
    elif not guarantee.stands:
        yield f"No guarantee is proven for this run: {'; '.join(guarantee.reasons)}."
    if guarantee.delta_times_n >= 1:
        yield f"{DELTA_TOO_LARGE} Delta times n is {guarantee.delta_times_n:.2g}."
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
    return [f"{one.title}: {one.found}" for one in audit.guarantee.lines if one.advice]


def _failed(audit: Audit) -> list[Fact]:
    return [check for check in audit.checks if check.status == FAILED]


FINDINGS = (
    Finding(
        "verdict",
        1,
        _find,
        alarms=_alarms,
        watched="guarantee",
        public=_shown,
        notes=_open,
        account=(Account, "What every epsilon here means."),
        claim=(
            Annotated[str, OneOf("exact", "estimate")],
            "Of the individual epsilons: exact or estimate.",
        ),
        claim_reason=(str, "Why."),
        guarantee=(Guarantee, "The worst case, the only figure that is a guarantee."),
    ),
    Finding(
        "checks",
        2,
        lambda run: {"checks": tuple(run.recorded.checks)},
        alarms=lambda audit: [f"{check.title}: {check.detail}" for check in _failed(audit)],
        watched="evidence",
        public=lambda audit: ", ".join(one.title for one in _failed(audit)) or "no check failed",
        checks=(tuple[Fact, ...], "What counts and files prove about the assumptions."),
    ),
)
