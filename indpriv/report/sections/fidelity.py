"""How far an estimate lies from exact values, or how far it moves with the spacing of records."""

from indpriv._formatting import capitalised, format_epsilon, format_number, format_share
from indpriv.analysis.audited_run import NO_EXACT_VALUES, has_exact_values
from indpriv.analysis.fidelity import Fidelity, Spacing
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.summary import Audit
from indpriv.report.document import Block, Details, Entry, Figure, Row, Section, paragraph, table
from indpriv.report.wording import correlation, spaced

_MOST_GROUPS = 60  # of one table; audit.json has all


def fidelity(summary: Audit) -> Section:
    """Errors where exact values exist; otherwise the effect of the spacing of records, if known."""
    blocks: list[Block] = []
    screen = []
    if summary.fidelity:
        blocks += _errors(summary)
        screen.append(Entry("FIDELITY", tuple(map(paragraph, _lines(summary)))))
    elif summary.spacing is None:
        known = (
            "These epsilons are exact for this trajectory."
            if summary.claim == "exact"
            else "How far these estimates lie from the exact values is unknown."
        )
        if not (has_exact_values(summary) or summary.run.settings.individually_clipped):
            known = f"{known} {NO_EXACT_VALUES}"
        blocks.append(paragraph(known))
    if summary.spacing is not None:
        moved = paragraph(_spacing(summary.spacing, summary.account.plural))
        blocks.append(moved)
        screen.append(Entry("SPACING", (moved,)))
    blocks += [_by_group(row) for row in summary.fidelity if row.groups]
    return Section("fidelity", "Fidelity", tuple(blocks), tuple(screen))


def _errors(summary: Audit) -> list[Block]:
    found, plural = summary.fidelity, summary.account.plural
    head = (
        "K, steps",
        "Epochs",
        "Between records",
        capitalised(plural),
        "Pearson’s r",
        "Signed bias",
    )
    return [
        paragraph(
            "Recording norms only every K steps is cheaper, and makes epsilon an estimate. The "
            f"table compares what larger K would have said about this run with {found[0].source}. "
            "Pearson’s r alone proves nothing: a constant error leaves it at 1."
        ),
        Figure(
            "fidelity",
            (found, plural),
            "“last” holds the last known norm until the next record; “closest” takes the record "
            f"closest in time. Median exact epsilon: {format_epsilon(found[0].median_exact)}.",
        ),
        table(
            (*head, "Mean error", "95 % error", "Largest", "Too small", "by over 1 %"),
            [
                (
                    f"{row.every:,}",
                    f"{row.epochs:.2f}",
                    spaced(row.between_records) + (" (this log)" if row.is_this_log else ""),
                    f"{row.n:,}",
                    correlation(row.pearson),
                    f"{row.signed_bias:+.3f}",
                    *(
                        f"{e:.3f}"
                        for e in (
                            row.mean_absolute,
                            row.p95_absolute,
                            row.largest_absolute,
                        )
                    ),
                    format_share(row.share_under),
                    format_share(row.share_under_1_percent),
                )
                for row in found
            ],
            row_names=False,
        ),
        paragraph(
            "Errors are estimate minus exact, in epsilon; “too small” is the share of "
            f"{plural} whose epsilon would have been under-reported.",
            style="note",
        ),
    ]


def _by_group(row: Fidelity) -> Details:
    more = f" These are the first {_MOST_GROUPS} of {len(row.groups):,}; audit.json has all."
    head = ("Group", "By", "Examples", "Mean exact", "Signed bias", "Mean error", "Largest")
    groups = [
        Row(
            (
                group.name,
                group.by,
                f"{group.n:,}",
                format_epsilon(group.mean_exact),
                f"{group.signed_bias:+.3f}",
                f"{group.mean_absolute:.3f}",
                f"{group.largest_absolute:.3f}",
                format_share(group.share_under_1_percent),
            ),
            "small" if group.too_small else "",
        )
        for group in row.groups[:_MOST_GROUPS]
    ]
    note = f"Groups of fewer than {MIN_GROUP} compared examples are in italics: too small to read."
    return Details(
        f"By group, at K = {row.every:,} steps ({spaced(row.between_records)})",
        (
            paragraph(note + more * (len(row.groups) > _MOST_GROUPS), style="note"),
            table((*head, "Too small by over 1 %"), groups),
        ),
    )


def _lines(summary: Audit) -> list[str]:
    """Errors under the rule between records that the account uses by default."""
    return [
        f"{'this log' if row.is_this_log else f'K = {row.every} steps'}: r "
        f"{format_number(row.pearson, 4)}, bias {row.signed_bias:+.3f}, largest "
        f"{row.largest_absolute:.3f}, too small {format_share(row.share_under)}"
        for row in summary.fidelity
        if row.between_records == summary.fidelity[0].between_records
    ]


def _spacing(found: Spacing, plural: str) -> str:
    return (
        f"No exact values exist. With every second record left out ({found.n_kept:,} of "
        f"{found.n_records:,} kept; records of this run are {found.every:,} steps apart), epsilons "
        f"move by {found.mean_shift:+.3f} on average, by at most {found.p95_absolute:.3f} for 95 % "
        f"of {plural} and by at most {found.largest_absolute:.3f} for all (Pearson’s r "
        f"{correlation(found.pearson)}). The error of these epsilons is of that order and may be "
        "larger: this is no bound."
    )
