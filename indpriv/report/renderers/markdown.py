"""Markdown in which texts of others stay text, and the summary of an audit as audit.md. The summary is sensitive."""

import re
from collections.abc import Sequence

from indpriv._formatting import (
    format_epsilon,
    format_interval,
    format_number,
    format_rows,
    format_share,
)
from indpriv.analysis.attacks.threshold_attack import ThresholdAttack
from indpriv.analysis.groups.group_table import GroupTable
from indpriv.analysis.summary import SENSITIVE, AuditSummary
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.verdict import verdict

_ROWS = 40  # of one table; audit.json has all


def escape(text: str) -> str:
    r"""A text on one line, in which neither Markdown nor HTML is obeyed.

    >>> print(escape("a|b <b> *x* _y_ sample_rate"))
    a\|b \<b\> \*x\* \_y\_ sample_rate
    """
    return re.sub(r"[\\`*\[\]<>|~$&]|(?<!\w)[_#]|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are Markdown already. The first column is aligned left, others right where all are numbers."""
    numbers = [
        all(re.match(r"[-+\d<>–\[]", row[column]) for row in rows) for column in range(len(head))
    ]
    rule = ["---:" if number and column else "---" for column, number in enumerate(numbers)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def render_markdown(summary: AuditSummary) -> str:
    """The summary of an audit as Markdown: verdict first, no figure, no single example."""
    sections = [
        f"**{SENSITIVE}**\n\n# Privacy audit of {escape(summary.name)}\n\n{_verdict(summary)}",
        f"## What you may publish\n\n{_publish(summary)}",
        f"## Run and assumptions\n\n{_run(summary)}",
        f"## Distribution of individual epsilon\n\n{_distribution(summary)}",
        *(f"## Groups by {escape(found.by)}\n\n{_groups(found)}" for found in summary.groups),
        f"## Attacks\n\n{_attacks(summary.attacks.by_group)}",
        f"## Hazards\n\n{_hazards(summary)}",
        f"## Reproduce\n\n```text\n{summary.provenance.command.replace('`', ' ')}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _verdict(summary: AuditSummary) -> str:
    found = verdict(summary)
    text = [f"**{part}**" if strong else part for part, strong in found.lead]
    reasons = "".join(f"\n- {escape(reason)}" for reason in summary.guarantee.reasons)
    facts = table(
        ["", ""], [[name, escape(value)] for name, value in (*found.figures, *found.facts)]
    )
    quote = "" if summary.guarantee.publishable else " This run has none to quote."
    return "\n\n".join(
        [
            " ".join(text) + reasons,
            facts,
            f"Claim: {escape(summary.claim_reason)}",
            f"*{DISCLAIMER}{quote}*",
        ]
    )


def _publish(summary: AuditSummary) -> str:
    if summary.guarantee.publishable:
        declared = " The assumptions of this statement were declared and not checked."
        sentence = summary.guarantee.statement + declared * (summary.guarantee.status == "declared")
        rows = " The number of rows in that sentence is private too, unless it is a cap that was set without looking at the data."
        return (
            f"> {escape(sentence)}\n\nBesides it the settings in the first table below that are not marked “no”; nothing else "
            f"in this file.{rows if summary.unit_sizes else ''}"
        )
    return f"Nothing that speaks of a guarantee.\n\n> {escape(summary.guarantee.statement)}"


def _run(summary: AuditSummary) -> str:
    rows = [
        [
            escape(item.title),
            escape(item.value or "not stated"),
            item.status,
            "no" if item.private else "",
        ]
        for item in summary.notes.disclosures
    ]
    checks = [
        [escape(check.title), escape(check.detail), check.status] for check in summary.notes.checks
    ]
    found = table(["Item", "Value", "Status", "For publication"], rows)
    return found + ("\n\n" + table(["Check", "Finding", "Status"], checks) if checks else "")


def _distribution(summary: AuditSummary) -> str:
    individual = summary.individual
    names = ("mean", "median", "p75", "p95", "p99", "max")
    cells = [format_epsilon(getattr(individual, name)) for name in names]
    head = ["Mean", "Median", "75 %", "95 %", "99 %", "Largest", "At worst case"]
    lines = [
        f"{summary.claim.capitalize()}; {escape(summary.account.describe())}; {individual.n:,} {summary.account.everybody}.",
        table(head, [[*cells, format_share(individual.share_at_worst_case, 1)]]),
    ]
    if summary.unit_sizes:
        lines.append(_unit_sizes(summary))
    if summary.loss is not None and summary.loss.every.pearson is not None:
        lines.append(f"Pearson's r of epsilon and log loss: {summary.loss.every.pearson:.2f}.")
    return "\n\n".join(lines)


def _unit_sizes(summary: AuditSummary) -> str:
    """Worst case beside individual epsilon, by the number of rows of a unit."""
    rows = [
        [
            format_rows(row.least, row.most),
            f"{row.n_units:,}",
            *(format_epsilon(value) for value in (row.worst_case_epsilon, row.median, row.max)),
            f"{row.rows_dropped:,} ({format_share(row.rows_dropped / row.n_rows)})",
        ]
        for row in summary.unit_sizes
    ]
    head = [f"Rows of one {summary.account.unit}", summary.account.everybody.capitalize()]
    return table(
        [*head, "Worst case", "Median", "Largest", "Rows that a cap here would drop"], rows
    )


def _groups(found: GroupTable) -> str:
    rows = [
        [
            escape(row.name) + (" (too few)" if row.too_small else ""),
            f"{row.n:,}",
            format_epsilon(row.epsilon.mean),
            "–"
            if row.epsilon.mean_interval is None
            else format_interval(row.epsilon.mean_interval.low, row.epsilon.mean_interval.high),
            format_epsilon(row.standardised.mean),
            format_epsilon(row.epsilon.p95),
            format_epsilon(row.epsilon.p99),
            format_epsilon(row.epsilon.max),
            format_share(row.test_accuracy.share, 1),
        ]
        for row in found.rows[:_ROWS]
    ]
    head = [
        "Group",
        "n",
        "Mean",
        "95 % interval",
        "Label-stand.",
        "95 %",
        "99 %",
        "Largest",
        "Test accuracy",
    ]
    notes = []
    if found.ratios.raw is not None:
        ratio = f"{escape(found.ratios.raw.worst)} over {escape(found.ratios.raw.best)}: {format_number(found.ratios.raw.value)} raw"
        if found.ratios.standardised is not None:
            ratio += f", {format_number(found.ratios.standardised.value)} label-standardised"
        notes.append(f"{ratio}.")
    if found.reversed_labels:
        notes.append(
            f"**The order reverses** among {', '.join(map(escape, found.reversed_labels))}."
        )
    if len(found.rows) > _ROWS:
        notes.append(f"{len(found.rows) - _ROWS:,} more groups are in audit.json.")
    return "\n\n".join([table(head, rows), *notes])


def _attacks(attacks: Sequence[ThresholdAttack]) -> str:
    if not attacks:
        return "No attack was run; it needs losses of training and test examples."
    rows = []
    for attack in attacks:
        model = "this model" if attack.model == "dp" else "without DP"
        overall = [attack.overall] if attack.by == attacks[0].by else []  # the same by every column
        for row in (*overall, *attack.rows[:_ROWS]):
            limits = (
                "–"
                if row.interval is None
                else f"{format_share(row.interval.low, 1)} to {format_share(row.interval.high, 1)}"
            )
            name = (
                escape(row.name)
                if row is attack.overall
                else f"{escape(attack.by)}: {escape(row.name)}"
            )
            rows.append([name, model, format_share(row.success_rate, 1), limits])
    protocol, caveat = escape(attacks[0].protocol), escape(attacks[0].caveat)
    text = f"{protocol} An attack that fails is no evidence of privacy. {caveat}"
    return f"{text}\n\n{table(['Group', 'Model', 'Success', '95 % interval'], rows)}"


def _hazards(summary: AuditSummary) -> str:
    rows = [
        [escape(hazard.title), hazard.status, escape(hazard.detail)]
        for hazard in summary.notes.hazards
    ]
    return table(["Hazard", "Status", "Detail"], rows)
