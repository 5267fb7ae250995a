"""Attacks that guess an attribute of training examples, beside imputation."""

from collections.abc import Sequence

from indpriv._formatting import format_share, format_share_up
from indpriv.analysis.attacks.attributes import AttributeFindings, AttributeRow
from indpriv.analysis.statistics.intervals import Interval
from indpriv.analysis.summary import Audit
from indpriv.report.document import Block, Entry, Section, Span, Table, paragraph, table
from indpriv.report.sections.attacks.membership import ABOVE
from indpriv.report.wording import MOST_ROWS, NO_EVIDENCE, finding

_STRONGEST = "with_imputation"  # the attack shown by group and by epsilon
_ATTRIBUTE_HEAD = (
    *("Imputed", "Guessed with the model", "Others imputed", "Others guessed", "Advantage"),
    *("95 % interval", "Individual ceiling"),
)


def attribute_attacks(summary: Audit) -> Section | None:
    """None where the audit file names no attributes."""
    found = summary.attribute_attacks
    ours = [each for each in found if each.model == "dp"]
    if not ours:
        return None
    blocks: list[Block] = []
    if above := [each.attribute for each in ours if each.above_ceiling]:
        names = ", ".join(dict.fromkeys(above))
        blocks.append(finding(f"{names}: the advantage exceeds the worst case. {ABOVE}"))
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
