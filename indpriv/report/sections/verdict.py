"""The verdict in plain words: the guarantee, what it rests on, and this run's epsilons."""

import math

from indpriv._formatting import (
    capitalised,
    format_delta,
    format_epsilon,
    format_share,
    format_share_up,
    sentence,
)
from indpriv.analysis.disclosures import recording
from indpriv.analysis.guarantee import Guarantee
from indpriv.analysis.summary import Audit
from indpriv.epsilon_table import FALSE_POSITIVE_RATE
from indpriv.report import document as doc
from indpriv.report.wording import disclaimer, joined

# From this true-positive rate on, the report says that the guarantee hardly protects anyone.
_VACUOUS = 0.9


def verdict(summary: Audit) -> doc.Section:
    """The guarantee and the epsilons of this run, each with what it means."""
    guarantee = summary.guarantee
    title = "Exact for this trajectory." if summary.claim == "exact" else "An estimate."
    blocks: list[doc.Block] = [
        doc.Paragraph(joined(lead(summary)), "lead"),
        _key_figures(summary),
        _facts(summary),
    ]
    if guarantee.reasons and not guarantee.stands:
        reasons = tuple(doc.paragraph(sentence(reason)) for reason in guarantee.reasons)
        blocks.append(doc.Callout(reasons, warn=True))
    claim = doc.paragraph(doc.Span(title), f" {capitalised(summary.claim_reason)}")
    blocks.append(doc.Callout((claim, disclaimer(summary))))
    if summary.missing:
        blocks += [
            doc.paragraph("Not in this audit:", style="note"),
            doc.Listing(summary.missing),
        ]
    screen = (
        doc.Entry("GUARANTEE", _guarantee_lines(summary)),
        doc.Entry("THIS RUN", _run_lines(summary)),
    )
    return doc.Section("verdict", "Verdict", tuple(blocks), screen)


def lead(summary: Audit) -> list[doc.Text]:
    """The verdict in sentences; every epsilon and every bound in it is rounded up."""
    guarantee = summary.guarantee
    if guarantee.status == "void":
        return [
            doc.Span("This run gives no privacy guarantee."),
            "Its random numbers are reproducible: anyone who has the seed can regenerate the "
            "noise.",
        ]
    if guarantee.status == "unproven":
        return [
            doc.Span("No guarantee is proven for this run."),
            "A check of its assumptions failed. The figures below show what the run would "
            "guarantee if every assumption held.",
        ]
    found: list[doc.Text] = []
    if guarantee.reasons:
        why = "; ".join(guarantee.reasons)
        found += [doc.Span("The guarantee is declared, not supported:"), sentence(why)]
    delta = format_delta(guarantee.delta)
    if not guarantee.publishable:
        found += [
            doc.Span("Delta is too large:"),
            f"{delta} is at least 1/n (delta times n is {guarantee.delta_times_n:.2g}). At such a "
            "delta a mechanism may publish one person’s data outright and still keep this "
            "guarantee, so it is worth almost nothing.",
        ]
    true_positive = guarantee.true_positive_limit(guarantee.worst_case_epsilon)
    found.append(
        "An attacker who sees every checkpoint and knows all the other data can identify a "
        f"training {summary.account.unit} in at most {format_share_up(true_positive)} of cases, "
        f"if at most {format_share(FALSE_POSITIVE_RATE)} of accusations against non-members are "
        "tolerated. At any false-positive rate, the attacker’s true-positive rate is at most "
        f"{odds(guarantee.worst_case_epsilon)} times that rate, plus {delta}."
    )
    if true_positive >= _VACUOUS:
        found.append(doc.Span("This is hardly any protection."))
    if summary.claim == "exact":
        found.append(
            f"In the training that happened, half of the {summary.account.plural} had an "
            f"individual epsilon of at most {format_epsilon(summary.individual.median)}."
        )
    return found


def _key_figures(summary: Audit) -> doc.Table:
    guarantee, individual, account = summary.guarantee, summary.individual, summary.account
    name = "Guarantee: worst-case epsilon"
    if not guarantee.publishable:
        useful = "useful " if guarantee.stands else ""
        name = f"Worst-case epsilon, no {useful}guarantee"
    meaning = f"delta {format_delta(guarantee.delta)}, {account.relation}, {account.sampling}"
    tail = f"99 %: {format_epsilon(individual.p99)}; largest: {format_epsilon(individual.max)}"
    return doc.table(
        ("Figure", "Value", "Meaning"),
        [
            (name, format_epsilon(guarantee.worst_case_epsilon), meaning),
            (
                "Median individual epsilon",
                format_epsilon(individual.median),
                f"{summary.claim}; not a guarantee",
            ),
            (f"95 % of {account.plural} have at most", format_epsilon(individual.p95), tail),
            (
                f"{capitalised(account.plural)} {account.at_worst_case}",
                format_share(individual.share_at_worst_case),
                account.why_at_worst_case,
            ),
        ],
        style="key",
    )


def _facts(summary: Audit) -> doc.Table:
    account = summary.account
    of = {item.key: item for item in summary.disclosures}
    relation, sampler = of["neighbouring"], of["sampler"]
    return doc.table(
        ("Fact", "Value"),
        [
            ("Status of the guarantee", summary.guarantee.status),
            ("Evidence", summary.guarantee.evidence),
            ("Unit of privacy", f"one {account.one_unit}"),
            ("Neighbouring relation", f"{relation.value} ({relation.status})"),
            ("Sampler", f"declared {sampler.value} ({sampler.status})"),
            ("Accountant", account.guaranteed_by),
            *(("Brackets of individual epsilon", text) for text in _brackets(summary)),
            ("Delta times n", f"{summary.guarantee.delta_times_n:.2g}"),
            *_membership(summary.guarantee),
        ],
        style="facts",
    )


def _membership(guarantee: Guarantee) -> list[tuple[str, str]]:
    """What a test for membership can achieve; nothing without a guarantee that limits it."""
    found = guarantee.membership
    if found is None or not guarantee.stands:
        return []
    text = (
        "advantage (true-positive less false-positive rate) at most "
        f"{format_share_up(found.advantage)}; comparable to a Gaussian mechanism with mu "
        f"{format_epsilon(found.mu)}"
    )
    return [("Best test for membership", text)]


def _guarantee_lines(summary: Audit) -> tuple[doc.Paragraph, ...]:
    guarantee, account = summary.guarantee, summary.account
    value = (
        f"worst-case epsilon {format_epsilon(guarantee.worst_case_epsilon)} (delta "
        f"{format_delta(guarantee.delta)}, {account.relation}, {account.sampling}, "
        f"{account.guaranteed_by}; covers all checkpoints)"
    )
    if guarantee.stands:
        why = f"Declared, not supported: {'; '.join(guarantee.reasons)}"
        lines = [doc.paragraph(why, style="warn")] if guarantee.reasons else []
        lines += [doc.paragraph(value), doc.paragraph(f"Evidence: {guarantee.evidence}")]
        if not guarantee.publishable:
            times_n = f"delta times n is {guarantee.delta_times_n:.2g}"
            text = f"DO NOT PUBLISH: delta is at least 1/n ({times_n})"
            lines.append(doc.paragraph(text, style="alarm"))
        return tuple(lines)
    word = "NONE" if guarantee.status == "void" else "NOT PROVEN"
    reasons = [f"{word}: {guarantee.reasons[0]}", *guarantee.reasons[1:]]
    return (
        *(doc.paragraph(reason, style="alarm") for reason in reasons),
        doc.paragraph(f"Evidence: {guarantee.evidence}"),
        doc.paragraph(f"If every assumption held: {value}"),
    )


def _run_lines(summary: Audit) -> tuple[doc.Paragraph, ...]:
    individual, run, account = summary.individual, summary.run, summary.account
    median, p75, p95, p99, largest = map(
        format_epsilon,
        (individual.median, individual.p75, individual.p95, individual.p99, individual.max),
    )
    worst = f"{format_share(individual.share_at_worst_case)} {account.at_worst_case}"
    lines = [
        f"individual epsilon, {summary.claim.upper()} ({_read(summary)})",
        f"median {median} | 75 % at most {p75} | {worst}",
        f"95 % at most {p95} | 99 % at most {p99} | largest {largest}",
    ]
    lines += [f"brackets by PLD: {text}" for text in _brackets(summary)]
    if summary.claim != "exact" or run.settings.individually_clipped:
        lines.append(summary.claim_reason)
    if how_recorded := recording(run):
        lines.append(f"recorded: {how_recorded}")
    if summary.loss is not None and summary.loss.every.pearson is not None:
        accuracy = (
            ""
            if run.test_accuracy is None
            else f"; test accuracy {format_share(run.test_accuracy, 1)}"
        )
        lines.append(f"Pearson's r with log loss {summary.loss.every.pearson:.2f}{accuracy}")
    return (*map(doc.paragraph, lines), disclaimer(summary))


def _brackets(summary: Audit) -> list[str]:
    """For how many the tight accountant is tight; empty for another one."""
    found, plural = summary.individual, summary.account.plural
    if found.wide is None:
        return []
    text = f"tight, at most 1 % wide, for {found.n - found.wide:,} of {found.n:,} {plural}"
    return [f"{text}; of {found.wide:,} only the upper end says something" if found.wide else text]


def _read(summary: Audit) -> str:
    """What epsilons were computed from, in few words."""
    account, run = summary.account, summary.run
    total = f"{run.settings.total_steps:,}"
    if account.participation == "known":
        batches = round(account.recorded_share * run.settings.total_steps)
        return f"Gaussian; norms of {batches:,} of {total} batches"
    return f"{account.accountant.upper()}; {run.records.n_records:,} of {total} steps recorded"


def odds(epsilon: float) -> str:
    """E to the epsilon, rounded up.

    >>> odds(1.0), odds(8.0), odds(40.0)
    ('2.8', '2,981', '10^18')
    """
    if epsilon > 30:
        return f"10^{math.ceil(epsilon / math.log(10))}"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 10) / 10:.1f}" if factor < 100 else f"{math.ceil(factor):,}"
