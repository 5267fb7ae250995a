"""The verdict of an audit in plain words, alike on every page: what the guarantee means, and what it rests on. Sensitive."""

import math
from dataclasses import dataclass

from indpriv._formatting import format_delta, format_epsilon, format_share, format_share_up
from indpriv.analysis.guarantee import FALSE_POSITIVE_RATE, true_positive_bound
from indpriv.analysis.summary import AuditSummary, Guarantee

VACUOUS = 0.9  # true-positive rate there from which a guarantee is called next to no promise


@dataclass(frozen=True)
class Verdict:
    """Sentences, each with whether it is stressed; figures, and the facts that none appears without, as (name, value)."""

    lead: tuple[tuple[str, bool], ...]
    figures: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]


def verdict(summary: AuditSummary) -> Verdict:
    """The verdict of an audit; every epsilon and every bound in it is rounded up."""
    return Verdict(tuple(_lead(summary)), tuple(_figures(summary)), tuple(_facts(summary)))


def _lead(summary: AuditSummary) -> list[tuple[str, bool]]:
    guarantee = summary.guarantee
    if guarantee.status == "void":
        reason = "It is reproducible from a seed: anyone with the seed can regenerate the noise."
        return [("This run gives nobody a guarantee.", True), (reason, False)]
    if guarantee.status == "unproven":
        rest = "A check of its assumptions failed. The figures below say what it would have been worth."
        return [("No guarantee is proven for this run.", True), (rest, False)]
    found = []
    delta = format_delta(guarantee.delta)
    if not guarantee.publishable:
        found += [
            ("Delta is too large:", True),
            (
                f"{delta} is at least 1/n (delta times n is {guarantee.delta_times_n:.2g}). At such a delta a mechanism "
                "may publish somebody’s data outright and still keep this guarantee, so it is worth next to nothing.",
                False,
            ),
        ]
    true_positive = true_positive_bound(
        guarantee.worst_case_epsilon, guarantee.delta, FALSE_POSITIVE_RATE
    )
    if guarantee.membership is not None:
        true_positive = min(true_positive, guarantee.membership.true_positive_rate)
    found.append(
        (
            f"Take any one {summary.account.unit}, and anyone who sees every checkpoint of this model and knows all other "
            "data. Whatever test they use, if it says “it was in the training data” wrongly in at most "
            f"{format_share(FALSE_POSITIVE_RATE)} of the runs without it, it says so rightly in at most "
            f"{format_share_up(true_positive)} of the runs with it. At any false-positive rate, the true-positive rate is at most "
            f"{odds(guarantee.worst_case_epsilon)} times it, plus {delta}.",
            False,
        )
    )
    if true_positive >= VACUOUS:
        found.append(("That is next to no promise.", True))
    if summary.claim == "exact":
        median = format_epsilon(summary.individual.median)
        text = f"Along the training that happened, half of the {summary.account.everybody} were exposed to at most an epsilon of {median}."
        found.append((text, False))
    return found


def _figures(summary: AuditSummary) -> list[tuple[str, str]]:
    guarantee, individual = summary.guarantee, summary.individual
    median, p95, p99, largest = map(
        format_epsilon, (individual.median, individual.p95, individual.p99, individual.max)
    )
    worst = f"epsilon {format_epsilon(guarantee.worst_case_epsilon)} at delta {format_delta(guarantee.delta)}"
    return [
        ("Worst case", f"{worst}; as a guarantee: {guarantee.status}"),
        (
            "Individual epsilon",
            f"{summary.claim}; median {median}, 95 % at most {p95}, 99 % {p99}, largest {largest}",
        ),
    ]


def _facts(summary: AuditSummary) -> list[tuple[str, str]]:
    account = summary.account
    sampler = next((item for item in summary.notes.disclosures if item.key == "sampler"), None)
    return [
        ("Unit of privacy", f"one {account.one_unit}"),
        (
            "Neighbouring relation",
            f"{account.neighbouring.replace('_', '/')} one {account.one_unit}",
        ),
        (
            "Sampler",
            account.sampler if sampler is None else f"declared {sampler.value} ({sampler.status})",
        ),
        ("Accountant", account.guaranteed_by),
        ("Delta times n", f"{summary.guarantee.delta_times_n:.2g}"),
        *_membership(summary.guarantee),
    ]


def _membership(guarantee: Guarantee) -> list[tuple[str, str]]:
    """Nothing where no guarantee limits a test."""
    found = guarantee.membership
    if found is None or guarantee.status not in ("supported", "declared"):
        return []
    advantage = format_share_up(found.advantage)
    text = f"advantage (true less false positives) at most {advantage}; like a Gaussian mechanism of mu {format_epsilon(found.mu)}"
    return [("Best test for membership", text)]


def odds(epsilon: float) -> str:
    """E to the epsilon, rounded up, as people read it.

    >>> odds(1.0), odds(8.0), odds(40.0)
    ('2.8', '2,981', '10^18')
    """
    if epsilon > 30:
        return f"10^{math.ceil(epsilon / math.log(10))}"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 10) / 10:.1f}" if factor < 100 else f"{math.ceil(factor):,}"
