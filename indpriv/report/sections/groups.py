"""Who is worse off: epsilon and accuracy by group, raw and within label."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from indpriv._formatting import format_epsilon, format_number, format_share, sentence
from indpriv._plain import records
from indpriv.analysis.groups import MIN_GROUP, GroupTable, Ratio
from indpriv.analysis.summary import Audit
from indpriv.report import document as doc
from indpriv.report.sections.distribution import drawn_worst_case
from indpriv.report.wording import after, counted, p_value, shorten, shown_rows, span

_SCREEN_TABLES = 2
_SCREEN_ROWS = 6
_SCREEN_NAMES = 5  # of groupings that are left to the report
_SCREEN_LABELS = 3  # labels that fit beside each other on 80 columns
_RATES_OF = (
    "TPR and FPR: share of the group’s test rows with and without the label {0} that are predicted "
    "{0}."
)
_RATES_OF_CLASSES = (
    "TPR: share of a class that is recognised, averaged over classes. FPR is pooled over classes: "
    "of several classes it follows from the accuracy."
)
_accuracy = partial(format_share, digits=1)
# Heading, column of the frame, and how its values are shown.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("n", "n", "{:,}".format),
    ("Mean epsilon", "mean", format_epsilon),
    ("95 % interval", "mean_interval", span),
    ("To best", "ratio_to_best", format_number),
    ("p", "p_value", p_value),
    ("Label-stand. mean", "standardised_mean", format_epsilon),
    ("95 % interval", "standardised_interval", span),
    ("Median", "median", format_epsilon),
    ("95 %", "p95", format_epsilon),
    ("99 %", "p99", format_epsilon),
    ("Largest", "max", format_epsilon),
    ("At worst case", "share_at_worst_case", format_share),
    ("Mean loss", "mean_loss", format_number),
    ("Train acc.", "train_accuracy", _accuracy),
    ("Test acc.", "test_accuracy", _accuracy),
    ("Test TPR", "true_positive_rate", _accuracy),
    ("Test FPR", "false_positive_rate", _accuracy),
)
_NAME, _LABEL = 24, 9  # characters of a group's and a label's name on the first screen


def groups(summary: Audit) -> doc.Section | None:
    """None without an example table."""
    if not summary.groups:
        return None
    plural = summary.account.plural
    intro = doc.paragraph(
        "Groups by mean epsilon, worst first, raw and within each label. Where groups differ in "
        "their labels, a raw table alone misleads; the label-standardised mean says what a "
        "group’s mean would be if it had the label shares of the whole training set. Groups of "
        f"fewer than {MIN_GROUP} {plural} are in italics: they are too small to read. "
        "Intervals are 95 % bootstrap intervals, each taken alone; the interval of a ratio does "
        "not account for how its two groups were picked. The column p tests by permutation "
        "whether a group’s mean differs from the mean of all, corrected for the groups of its "
        "table; reversals are tested by permutation within label. All of this treats the "
        f"{plural} of this run as a sample: another training run would differ by more."
    )
    blocks = [block for found in summary.groups for block in _grouping(summary, found)]
    first = _first_tables(summary.groups)
    screen = [doc.Entry("", _first_screen(found)) for found in first]
    if rest := [found for found in summary.groups if found not in first]:
        screen.append(doc.Entry("", (_left_out(rest),)))
    return doc.Section("groups", "Who is worse off", (intro, *blocks), tuple(screen))


def group_table(
    by: str, rows: pd.DataFrame, caption: str, *, standardised: bool = False
) -> doc.Table:
    """Rows of a grouping, raw or within a label; standardised: with label-standardised means."""
    rated = _rated(rows)
    columns = [
        one
        for one in _COLUMNS
        if (standardised or "standardised" not in one[1]) and (rated or "positive" not in one[1])
    ]
    made = []
    for row in records(rows):
        cells = [row.name + " (too few)" * row.too_small]
        for _, name, text in columns:
            starred = name == "mean_loss" and row.losses_left_out > 0
            cells.append(text(getattr(row, name)) + "*" * starred)
        made.append(doc.Row(tuple(cells), "small" if row.too_small else ""))
    return doc.table((by, *(head for head, _, _ in columns)), made, caption=caption)


def _rated(rows: pd.DataFrame) -> bool:
    return bool(rows[["true_positive_rate", "false_positive_rate"]].notna().any(axis=None))


def tests(found: GroupTable) -> list[str]:
    """What the tests and the paper's headline say of a grouping, in sentences."""
    texts = []
    if found.spread is not None:
        within = found.spread_within_label
        also = (
            "" if within is None else f"; of the means within label: p {p_value(within.corrected)}"
        )
        texts.append(
            f"Permutation test of the means: p {p_value(found.spread.corrected)}{also} (each "
            "corrected for all groups and groupings; a small p says that the groups differ by "
            "more than chance)."
        )
    headline, rank = found.lowest_accuracy_ratio, found.accuracy_rank
    if headline is not None and headline.value is not None:
        texts.append(
            f"The group with the lowest test accuracy, {headline.worst}, has "
            f"{headline.value:.2f}{after(headline.interval)} times the mean epsilon of the one "
            f"with the highest, {headline.best}."
        )
    if rank is not None:
        texts.append(
            f"Over {rank.n_groups} groups, the rank correlation of test accuracy and mean epsilon "
            f"is {rank.value:.2f} (p {p_value(rank.p_value)})."
        )
    return texts


def readings(found: GroupTable) -> list[doc.Paragraph]:
    """The ratio of the worst to the best group, reversals of their order, and small groups."""
    if found.ratio is None:
        lines = [doc.paragraph("Fewer than two groups are large enough to compare.")]
    else:
        lines = [*_reversals(found, found.ratio), _ratio(found, found.ratio)]
    if found.too_small:
        few = counted(found.too_small, "group")
        lines.append(doc.paragraph(f"Too small to read (fewer than {found.min_size}): {few}."))
    return lines


def _reversals(found: GroupTable, raw: Ratio) -> list[doc.Paragraph]:
    smaller = f"{raw.worst} has a smaller mean epsilon than {raw.best}"
    sure, unsure = (", ".join(found.reversed_labels(beyond_chance=one)) for one in (True, False))
    lines = []
    if sure:
        text = f" among {sure}: there, {smaller}, by more than chance (corrected p at most 5 %)."
        lines.append(doc.paragraph(doc.Span("The order reverses"), text, style="warn"))
    if unsure:
        too = " too" if sure else ""
        text = (
            f"Among {unsure}, {smaller}{too}, but by no more than chance (corrected p above 5 %)."
        )
        lines.append(doc.paragraph(text))
    return lines


def _ratio(found: GroupTable, raw: Ratio) -> doc.Paragraph:
    parts: list[doc.Text] = [f"Mean epsilon of {raw.worst} over {raw.best}: raw ", _value(raw)]
    if found.standardised_ratio is not None:
        parts += [", label-standardised ", _value(found.standardised_ratio)]
    return doc.paragraph(*parts, ".")


def _value(ratio: Ratio) -> doc.Span:
    if ratio.value is None:
        return doc.Span(f"undefined ({ratio.reason})")
    return doc.Span(f"{ratio.value:.2f}{after(ratio.interval)}")


def _grouping(summary: Audit, found: GroupTable) -> list[doc.Block]:
    """One grouping on the page: findings, figure, table, and tables within label."""
    shown = shown_rows(found.rows)
    rows = found.rows.iloc[shown]
    within, plural = bool(found.within_label), summary.account.plural
    beside = f", over all {plural} and within label" if within else ""
    worst = "" if summary.unit_sizes else "; the thin line is the worst case"
    drawn = (found, drawn_worst_case(summary), f"groups{summary.groups.index(found)}")
    blocks: list[doc.Block] = [
        doc.Heading(f"By {found.by}"),
        *(
            doc.Callout((line,), warn=True) if line.style == "warn" else line
            for line in readings(found)
        ),
        *map(doc.paragraph, tests(found)),
        doc.Figure("groups", drawn, f"Mean epsilon by group{beside}, beside test accuracy{worst}."),
        group_table(found.by, rows, f"{found.by}, all labels", standardised=within),
    ]
    notes = [_RATES_OF.format(found.positive_class)] if found.positive_class else []
    if not notes and _rated(rows):
        notes.append(_RATES_OF_CLASSES)
    if skipped := len(found.rows) - len(rows):
        notes.append(f"{skipped:,} more groups are in audit.json.")
    if lacking := [
        f"{row.name} ({', '.join(row.lacks_labels)})" for row in records(rows) if row.lacks_labels
    ]:
        notes.append(
            f"Not label-standardised, because the group lacks a label: {', '.join(lacking)}."
        )
    if rows["losses_left_out"].any():
        notes.append("* Infinite and missing losses are left out of this mean.")
    blocks += [doc.paragraph(note, style="note") for note in (*notes, *map(sentence, found.notes))]
    tables = []
    for one in found.within_label:
        caption, ratio = f"{found.by} among {one.label}", one.ratio
        if ratio is not None and ratio.value is not None:
            caption += f": {ratio.worst} over {ratio.best} is {ratio.value:.2f}"
        tables.append(group_table(found.by, one.rows.iloc[shown], caption))
    return [*blocks, doc.Details("Within each label", tuple(tables))] if tables else blocks


def _first_tables(tables: Sequence[GroupTable]) -> list[GroupTable]:
    """The tables of the first screen: reversals first, the label's own last, at most two."""

    def place(found: GroupTable) -> tuple[bool, bool]:
        return "label" in found.columns, not found.reversed_labels(beyond_chance=True)

    return sorted(tables, key=place)[:_SCREEN_TABLES]


def _left_out(tables: Sequence[GroupTable]) -> doc.Paragraph:
    """Groupings that only the report shows, those with the largest ratio first."""

    def ratio(found: GroupTable) -> float:
        return (found.ratio and found.ratio.value) or 0.0

    names = []
    for found in sorted(tables, key=ratio, reverse=True)[:_SCREEN_NAMES]:
        raw = found.ratio
        of = f" ({raw.worst} over {raw.best}: {raw.value:.2f})" if raw and raw.value else ""
        names.append(found.by + of)
    more = len(tables) - len(names)
    last = f"; and {more:,} more" if more else ""
    return doc.paragraph(f"The report also has, largest ratio first: {'; '.join(names)}{last}.")


def _first_screen(found: GroupTable) -> tuple[doc.Paragraph | doc.Table, ...]:
    """Mean epsilon by group: all, within label where that fits, and test accuracy."""
    shown = shown_rows(found.rows, _SCREEN_ROWS)
    beside = found.within_label if len(found.within_label) <= _SCREEN_LABELS else ()
    labels = [shorten(within.label, _LABEL) for within in beside]
    standardised = ["label-stand."] if found.within_label else []
    made = []
    tables = (records(rows.iloc[shown]) for rows in (found.rows, *(one.rows for one in beside)))
    for row, *others in zip(*tables, strict=True):
        name = f"  {shorten(row.name, _NAME)}{' (too few)' if row.too_small else ''}"
        means = [row.mean, *(other.mean for other in others)]
        means += [row.standardised_mean] if standardised else []
        made.append((name, *map(format_epsilon, means), _accuracy(row.test_accuracy)))
    screen = doc.table(
        (f"WHO IS WORSE OFF by {found.by}", "all", *labels, *standardised, "test accuracy"),
        made,
        wide=frozenset(range(2, 2 + len(labels))),
        narrow=frozenset({2 + len(labels)} if labels else ()),
    )
    if skipped := int((found.rows["n"] > 0).sum()) - len(made):
        verb = "is" if skipped == 1 else "are"
        rest = doc.paragraph(f"{counted(skipped, 'group')} between them {verb} in the report")
        return (screen, rest, *readings(found))
    return (screen, *readings(found))
