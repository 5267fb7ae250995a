"""Individual epsilon against the loss of the final model."""

from indpriv._formatting import capitalised, format_epsilon, format_number
from indpriv.analysis.loss import STATED_FLOOR, LossRelation
from indpriv.analysis.summary import Audit
from indpriv.report import document as doc
from indpriv.report.sections.distribution import drawn_worst_case
from indpriv.report.wording import after


def loss(summary: Audit) -> doc.Section | None:
    """None without an example table."""
    found = summary.loss
    if found is None:
        return None
    blocks: list[doc.Block] = []
    if found.every.pearson is None:
        blocks.append(doc.paragraph(f"No correlation is defined: {found.undefined_reason}."))
    else:
        blocks += [_correlations(summary, found), *_figure(summary, found)]
    notes = []
    if found.floored:
        notes.append(
            f"{found.floored:,} losses of zero were raised to {found.floor:.3g}, because the "
            "logarithm of zero is infinite."
        )
    if found.left_out:
        notes.append(f"{found.left_out:,} infinite, negative or missing losses were left out.")
    if notes:
        blocks.append(doc.paragraph(" ".join(notes), style="note"))
    return doc.Section("loss", "Epsilon against loss", tuple(blocks))


def _correlations(summary: Audit, found: LossRelation) -> doc.Paragraph:
    account, plural = summary.account, capitalised(summary.account.plural)
    whose = "whose rows, by their mean loss, the" if summary.unit_sizes else "that the"
    had = "had" if (found.every.pearson or 0) > 0 else "did not have"
    text = ""
    if found.below.pearson is not None:
        text += (
            f" Without the {account.plural} {account.at_worst_case}, whose epsilon can grow no "
            f"further, r is {found.below.pearson:.2f}{after(found.below.pearson_interval)} "
            f"({found.below.n:,} {account.plural})."
        )
    if found.pearson_with_floor not in (None, found.every.pearson):
        text += (
            f" With every loss below {STATED_FLOOR:g} nats raised to it, r over all is "
            f"{found.pearson_with_floor:.2f}{after(found.pearson_with_floor_interval)}."
        )
    at_worst, below = found.median_loss_at_worst_case, found.median_loss_below_worst_case
    if at_worst is not None and below is not None:
        text += (
            f" The median loss is {format_number(at_worst)} at the worst case and "
            f"{format_number(below)} below it."
        )
    rank = "undefined" if found.every.spearman is None else f"{found.every.spearman:.2f}"
    return doc.paragraph(
        f"{plural} {whose} final model learned poorly {had} less privacy: Pearson’s r of "
        "epsilon and log loss is ",
        doc.Span(f"{found.every.pearson:.2f}"),
        f"{after(found.every.pearson_interval)}, Spearman’s rank correlation "
        f"{rank}{after(found.every.spearman_interval)}.{text} In brackets: 95 % intervals.",
    )


def _figure(summary: Audit, found: LossRelation) -> tuple[doc.Block, ...]:
    bins = found.bins
    if bins is None or found.line.slope is None or found.line.intercept is None:
        return ()
    plural = summary.account.plural
    slope, intercept = format_number(found.line.slope), format_number(found.line.intercept)
    sign = "+" if found.line.slope >= 0 else "−"
    edges = [f"{edge:.3g}" for edge in bins.loss_edges]
    rows = [
        (edges[i], edges[i + 1], f"{sum(counts):,}", *map(format_epsilon, quartiles))
        for i, (counts, *quartiles) in enumerate(
            zip(bins.counts, bins.p25, bins.median, bins.p75, strict=True)
        )
    ]
    head = ("Loss from", "To", capitalised(plural), "25 %", "Median epsilon", "75 %")
    return (
        doc.Figure(
            "loss",
            (found, drawn_worst_case(summary), plural),
            f"Darker cells hold more {plural}. Fitted: epsilon ≈ {intercept} {sign} "
            f"{format_number(abs(found.line.slope))} · ln(loss), loss in nats; slope "
            f"{slope}{after(found.line.slope_interval)}, intercept "
            f"{intercept}{after(found.line.intercept_interval)}.",
        ),
        doc.Details("Table behind the figure", (doc.table(head, rows, row_names=False),)),
    )
