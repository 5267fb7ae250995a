"""Every attack that was run, beside what any attack can reach; attacks that guess attributes."""

from collections.abc import Sequence

from indpriv._formatting import capitalised, format_share, format_share_up
from indpriv.analysis.attacks.attributes import AttributeFindings, AttributeRow
from indpriv.analysis.attacks.results import AttackResult, AttackResults
from indpriv.analysis.statistics.bootstrap import Interval
from indpriv.analysis.summary import AuditSummary
from indpriv.attack_scores import ADVERSARIES
from indpriv.report.document import (
    Block,
    Callout,
    Entry,
    Paragraph,
    Section,
    Span,
    Table,
    paragraph,
    table,
)
from indpriv.report.wording import MOST_ROWS, NO_EVIDENCE, finding

_RATES = ("0.01", "0.001")
_HEAD = (
    "Attack",
    "References",
    "AUC",
    "95 % interval",
    "TPR at 1 % FPR",
    "95 % interval",
    "at 0.1 %",
    "95 % interval",
)
_ABOVE = (
    "The run or its account is wrong, unless training and test examples differ in other ways too: "
    "was the split random?"
)


def strongest_lines(results: AttackResults) -> tuple[Paragraph, ...]:
    """Lines of the first screen on the strongest attack; empty where none used references."""
    ours = results.of("dp")
    if not any(found.references for found in ours) or ours[0].discrimination is None:
        return ()
    best, of = ours[0], ours[0].discrimination
    text = (
        f"strongest of {len(ours)}: {_name(best)} on {ADVERSARIES[best.adversary]}: AUC "
        f"{of.auc:.3f} {_span(best.auc_joint or of.auc_interval)}"
        f"{', corrected for choosing the strongest' if best.auc_joint else ''}; at 1 % false "
        f"positives {format_share(of.tpr_at_fpr['0.01'], 1)}{_limits(results)}"
    )
    same = [found for found in results.of("non_dp") if found.name == best.name]
    if same and same[0].discrimination is not None:
        rate = format_share(same[0].discrimination.tpr_at_fpr["0.01"], 1)
        text += f"; without DP AUC {same[0].auc:.3f}, {rate}"
    lines = [paragraph(f"{text}.")]
    if results.findings:
        lines.append(paragraph(f"{_above(results)} {_ABOVE}", style="alarm"))
    return tuple(lines)


def every_attack(results: AttackResults) -> list[Block]:
    """The table of all attacks; empty where none was run."""
    ours, baseline = results.of("dp"), results.of("non_dp")
    if not ours:
        return []
    blocks: list[Block] = []
    if results.findings:
        blocks.append(
            Callout((paragraph(Span(_above(results)), f" {_ABOVE}"),), warn=True),
        )
    blocks.append(rate_table(results))
    if baseline:
        caption = "The same attacks on the model trained without DP"
        blocks.append(table(_HEAD, _rows(baseline), caption=caption))
    blocks.append(
        paragraph(
            "Attacks are listed by their AUC on these same examples, so the first one was chosen "
            "after seeing the results. Each interval is at 95 % for one attack alone, and among "
            "several some miss; that of the first screen is corrected for their number. All treat "
            "examples as independent. "
            + (
                "The individual ceiling is the mean over training examples of what a Gaussian "
                "mechanism of the same epsilon allows: it limits attacks on this run’s trajectory "
                "on average, not in every run. "
                if results.ceilings is not None
                else ""
            )
            + "Reference models are trained on the data: never publish them.",
            style="note",
        )
    )
    blocks += unchecked_lines(results)
    sources = [(found.title, found.source, found.caveat) for found in ours]
    blocks.append(table(("Attack", "Source", "What to know"), sources))
    return blocks


def unchecked_lines(results: AttackResults) -> list[Paragraph]:
    """What could not be checked about the reference models."""
    return [paragraph(text, style="warn") for text in results.unchecked]


def rate_table(results: AttackResults) -> Table:
    """Rates of the attacks on the audited model, and what no attack exceeds."""
    rows = [*_rows(results.of("dp")), *_ceiling_rows(results)]
    return table(_HEAD, rows, caption="Every attack")


def _name(found: AttackResult) -> str:
    if not found.references:
        return found.title
    models = "model" if found.references == 1 else "models"
    return f"{found.title}, {found.references} reference {models},"


def _limits(results: AttackResults) -> str:
    ceilings = results.ceilings
    if ceilings is None:
        return ""
    worst = f"worst case {format_share_up(ceilings.worst_case['0.01'])}"
    return f" (individual ceiling {format_share_up(ceilings.individual['0.01'])}, {worst})"


def _above(results: AttackResults) -> str:
    names = ", ".join(found.title for found in results.results if found.above_worst_case)
    return f"Success rates above what the worst case allows: {names}."


def _rows(results: Sequence[AttackResult]) -> list[tuple[str, ...]]:
    rows = []
    for found in results:
        of = found.discrimination
        if of is None:
            continue
        rates = [
            cell
            for rate in _RATES
            for cell in (
                format_share(of.tpr_at_fpr[rate], 2),
                f"{_percent(of.tpr_at_fpr_intervals[rate].low)} to "
                f"{_percent(of.tpr_at_fpr_intervals[rate].high)} %",
            )
        ]
        auc = (f"{of.auc:.3f}", _span(of.auc_interval))
        rows.append((capitalised(found.title), f"{found.references}", *auc, *rates))
    return rows


def _span(interval: Interval | None) -> str:
    """An interval of an AUC, whose third decimal matters."""
    return "–" if interval is None else f"[{interval.low:.3f}, {interval.high:.3f}]"


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}"


def _ceiling_rows(results: AttackResults) -> list[tuple[str, ...]]:
    """What no attack exceeds, in the columns of the rates."""
    ceilings = results.ceilings
    if ceilings is None:
        return []
    parts = [("Individual ceiling, mean", ceilings.individual), ("Worst case", ceilings.worst_case)]
    return [
        (
            name,
            "–",
            "–",
            "–",
            *(cell for rate in _RATES for cell in (format_share_up(of[rate]), "–")),
        )
        for name, of in parts
    ]


_STRONGEST = "with_imputation"  # the attack shown by group and by epsilon
_ATTRIBUTE_HEAD = (
    "Imputed",
    "Guessed with the model",
    "Others imputed",
    "Others guessed",
    "Advantage",
    "95 % interval",
    "Individual ceiling",
)


def attribute_attacks(summary: AuditSummary) -> Section | None:
    """None where the audit file names no attributes."""
    found = summary.attacks.attributes
    ours = [each for each in found if each.model == "dp"]
    if not ours:
        return None
    blocks: list[Block] = []
    if above := [each.attribute for each in ours if each.above_ceiling]:
        names = ", ".join(dict.fromkeys(above))
        blocks.append(finding(f"{names}: the advantage exceeds the worst case. {_ABOVE}"))
    blocks += [
        paragraph(
            "An attacker who knows the label and all other columns of a training example guesses "
            "an attribute. Imputation does so without the model, by a regression on test examples. "
            "The advantage is what the model adds for training examples, less what it adds for "
            "test examples: what holds in the population is no leak. ",
            Span(NO_EVIDENCE),
        ),
        attribute_table(ours),
    ]
    if baseline := [each for each in found if each.model == "non_dp"]:
        blocks.append(attribute_table(baseline, "Attributes, on the model trained without DP"))
    shown = [each for each in ours if each.guesser == _STRONGEST]
    for each in shown:
        blocks += _parts_of(each)
    best = max(shown, key=lambda each: each.overall.advantage)
    line = (
        f"{best.attribute}: with the model {format_share(best.overall.guessed, 1)} of training "
        f"examples are guessed, without it {format_share(best.overall.imputed, 1)}; advantage over "
        f"test examples {_points(best.overall.advantage)} {_points_span(best.overall.interval)} "
        f"points{_most(best)}; the largest of {len(shown)} attributes."
    )
    entry = Entry("ATTRIBUTES", (paragraph(line, style="alarm" if above else ""),))
    return Section("attributes", "Attributes", tuple(blocks), (entry,), nested=True)


def attribute_table(found: Sequence[AttributeFindings], caption: str = "Attributes") -> Table:
    """Attacks on attributes over all examples of one model."""
    rows = [(each.attribute, each.title, *_attribute_cells(each.overall)) for each in found]
    limits = [each.ceiling for each in found if each.ceiling is not None]
    if limits:
        caption += f"; the worst case allows an advantage of {format_share_up(max(limits))}"
    return table(("Attribute", "Attack", *_ATTRIBUTE_HEAD), rows, caption=caption)


def _parts_of(found: AttributeFindings) -> list[Block]:
    """Tables by group and by epsilon."""
    parts = [(f"{found.attribute} by {column}", rows) for column, rows in found.groups.items()]
    if found.bins:
        parts.append((f"{found.attribute} by individual epsilon", found.bins))
    return [
        table(
            ("", "Members", "Others", *_ATTRIBUTE_HEAD),
            [
                (row.name, f"{row.n_members:,}", f"{row.n_others:,}", *_attribute_cells(row))
                for row in rows[:MOST_ROWS]
            ],
            caption=caption,
        )
        for caption, rows in parts
        if rows
    ]


def _attribute_cells(row: AttributeRow) -> tuple[str, ...]:
    ceiling = row.individual_ceiling
    return (
        *(
            format_share(share, 1)
            for share in (row.imputed, row.guessed, row.others_imputed, row.others_guessed)
        ),
        f"{_points(row.advantage)} %",
        f"{_points_span(row.interval)} %",
        "–" if ceiling is None else format_share_up(ceiling),
    )


def _most(found: AttributeFindings) -> str:
    return "" if found.ceiling is None else f" (worst case {format_share_up(found.ceiling)})"


def _points(value: float) -> str:
    return f"{100 * value:+.2f}"


def _points_span(interval: Interval) -> str:
    return f"[{100 * interval.low:+.2f}, {100 * interval.high:+.2f}]"
