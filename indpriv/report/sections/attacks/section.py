"""Membership inference by a threshold on the loss, with and without DP."""

from collections.abc import Sequence

from indpriv._formatting import format_share
from indpriv.analysis.attacks.threshold_attack import AttackRow, ThresholdAttack, UnequalAttack
from indpriv.analysis.summary import AuditSummary
from indpriv.report.document import (
    Block,
    Entry,
    Figure,
    Paragraph,
    Row,
    Section,
    Span,
    paragraph,
    table,
)
from indpriv.report.sections.attacks.every_attack import every_attack, strongest_lines
from indpriv.report.sections.attacks.ladder import on_units
from indpriv.report.wording import MOST_ROWS, NO_EVIDENCE, p_value, shorten, span

_CHANCE = 0.5
_NONE = "No attack was run; it needs losses of training and test examples."


def attacks(summary: AuditSummary) -> Section:
    """Discrimination over all thresholds, and success rates by group."""
    pairs = _pairs(summary.attacks.by_group)
    if not pairs:
        entry = Entry("ATTACK", (paragraph(_NONE),))
        return Section("attacks", "Attacks", (paragraph(_NONE),), (entry,))
    first = pairs[0][0]
    blocks: list[Block] = [
        *every_attack(summary.attacks),
        *on_units(summary.attacks.by_unit, summary.account.unit),
        paragraph(
            "Membership inference by a threshold on the loss. The protocol was fixed before the "
            f"attack was run. {first.protocol} Intervals are 95 % Clopper–Pearson intervals, each "
            "taken alone: among many groups, some exclude 50 % by chance. ",
            Span(NO_EVIDENCE),
            f" {first.caveat}",
        ),
        *_discrimination(summary, *pairs[0]),
    ]
    for pair in pairs:
        blocks += _by_group(*pair)
    blocks.append(
        paragraph(
            f"Members and halves are chosen at random with the analysis seed {first.seed}. Success "
            "rates are not lower bounds on epsilon, and only their intervals tell whether they "
            "differ from chance: there is no other null calibration.",
            style="note",
        )
    )
    return Section("attacks", "Attacks", tuple(blocks), (Entry("ATTACK", _screen(summary, pairs)),))


_Pair = tuple[ThresholdAttack, ThresholdAttack | None]


def _pairs(found: Sequence[ThresholdAttack]) -> list[_Pair]:
    """The attack by each column, with the same attack on the model trained without DP."""
    baselines = {attack.by: attack for attack in found if attack.model == "non_dp"}
    return [(attack, baselines.get(attack.by)) for attack in found if attack.model == "dp"]


def _discrimination(
    summary: AuditSummary, attack: ThresholdAttack, baseline: ThresholdAttack | None
) -> list[Block]:
    rows = []
    for name, of in (("This model", attack), ("Without DP", baseline)):
        if of is not None and (found := of.overall.discrimination) is not None:
            rates = (format_share(found.tpr_at_fpr[rate], 1) for rate in ("0.001", "0.01"))
            advantage = (f"{found.advantage:.3f}", span(found.advantage_interval))
            rows.append((name, f"{found.auc:.3f}", span(found.auc_interval), *rates, *advantage))
    if not rows:
        return []
    head = (
        "Model",
        "AUC",
        "95 % interval",
        "TPR at 0.1 % FPR",
        "at 1 %",
        "Advantage",
        "95 % interval",
    )
    return [
        table(head, rows, caption="Over all thresholds, all examples"),
        paragraph(
            "The advantage is the largest difference of true-positive and false-positive rate. "
            "It is picked on these same scores, so it is above 0 by chance alone; its interval "
            "holds for all thresholds together.",
            style="note",
        ),
        Figure(
            "roc",
            (summary.attacks.by_group,),
            "True-positive against false-positive rates, both logarithmic. An attack that guesses "
            "at random lies on the dashed line.",
        ),
    ]


def _by_group(attack: ThresholdAttack, baseline: ThresholdAttack | None) -> list[Block]:
    others = {row.name: row for row in baseline.rows} if baseline else {}
    tried = [row for row in attack.rows if row.trials][:MOST_ROWS]
    pairs = [(attack.overall, baseline.overall if baseline else None)]
    pairs += [(row, others.get(row.name)) for row in tried]
    rows = []
    for index, (row, other) in enumerate(pairs):
        cells = [row.name, f"{row.trials:,}", *_rate(row), *(_rate(other) if baseline else ())]
        rows.append(Row(tuple(cells), "small" if row.too_small else "" if index else "total"))
    head = [attack.by or "group", "Guesses", "This model", "95 % interval"]
    caption = f"Success rate by {attack.by}" if attack.by else "Success rate"
    if baseline:
        head += ["Without DP", "95 % interval"]
        caption += ", on this model and on the same model trained without DP"
    blocks: list[Block] = [table(head, rows, caption=caption)]
    blocks += [
        paragraph(_unequal(name, of.unequal))
        for name, of in (("This model", attack), ("Without DP", baseline))
        if of is not None and of.unequal is not None
    ]
    if skipped := len(attack.rows) - len(tried):
        text = (
            f"{skipped:,} groups (too few scores, or too many rows for a page) are in audit.json."
        )
        blocks.append(paragraph(text, style="note"))
    return blocks


def _unequal(model: str, found: UnequalAttack) -> str:
    """The test of the most exposed group, in a sentence."""
    own, rest = found.successes / found.trials, found.rest_successes / found.rest_trials
    chi_squared = (
        ""
        if found.chi_squared_p is None
        else f" Chi-squared test of the rates in the table: p {p_value(found.chi_squared_p)}."
    )
    return (
        f"{model}: one threshold for all groups, measured on all scores, is right on "
        f"{format_share(own, 1)} of the guesses on {found.exposed}, the group with the largest "
        f"mean epsilon, and on {format_share(rest, 1)} of those on the others (Fisher’s exact "
        f"test, one-sided: p {p_value(found.p_value)}, not corrected for other groupings)."
        + chi_squared
    )


def _rate(row: AttackRow | None) -> tuple[str, str]:
    if row is None or row.interval is None:
        return "–", "–"
    low, high = (f"{100 * limit:.1f}" for limit in (row.interval.low, row.interval.high))
    return format_share(row.success_rate, 1), f"{low} to {high} %"


def _screen(summary: AuditSummary, pairs: Sequence[_Pair]) -> tuple[Paragraph, ...]:
    return (*strongest_lines(summary.attacks), *_lines(pairs))


def _lines(pairs: Sequence[_Pair]) -> tuple[Paragraph, ...]:
    attack, baseline = next((pair for pair in pairs if pair[0].by != "label"), pairs[0])
    text = f"{attack.method} {_summary(attack)}"
    text += (
        "; no baseline without DP." if baseline is None else f"; without DP {_summary(baseline)}."
    )
    rows = (attack.overall, *attack.rows)
    beating = [row.name for row in rows if row.interval is not None and row.interval.low > _CHANCE]
    if not beating:
        return paragraph(text), paragraph(NO_EVIDENCE)
    names = ", ".join(shorten(name, 24) for name in beating[:4]) + ", ..." * (len(beating) > 4)
    above = f"Above chance (95 % intervals, each taken alone): {names}."
    return paragraph(text), paragraph(above, style="warn")


def _summary(attack: ThresholdAttack) -> str:
    overall = attack.overall
    if overall.success_rate is None or overall.interval is None:
        return "has too few scores"
    low, high = overall.interval.low, overall.interval.high
    text = f"{overall.success_rate:.2f} [{low:.2f}, {high:.2f}]"
    readable = [row for row in attack.rows if not row.too_small]
    rates = [row.success_rate for row in readable if row.success_rate is not None]
    if len(rates) < 2:
        return text
    return f"{text}, by {attack.by} {min(rates):.2f} to {max(rates):.2f}"
