"""What was reconstructed from gradients, beside the most that any attack can reach."""

from collections.abc import Sequence

from indpriv._formatting import (
    capitalised,
    format_epsilon,
    format_number,
    format_share,
    format_share_up,
)
from indpriv.analysis.reconstruction import CLOSE, Reconstruction
from indpriv.analysis.summary import Audit
from indpriv.report import document as doc
from indpriv.report.wording import NO_EVIDENCE, finding, percent_span

_HEAD = ("Attack", "Identified", "95 %", "At most", "By chance", "Label", "Median error", "Same")
MEANING = (
    "A reconstruction identifies an example if the example is nearer to it than every other "
    "candidate. At most: the largest share that any attack can name on average among these "
    "candidates under this noise, at one look at this model (Hayes, Mahloujifar and Balle 2023). "
    "Error: the mean squared error of a value, where inputs range from 0 to 1. Same: the share of "
    f"reconstructions with an error below {CLOSE:g}, and in brackets of those of other examples. "
    "indpriv leak computes gradients anew and draws noise by the recorded settings: it shows what "
    f"such noise hides, not that the run drew it. {NO_EVIDENCE}"
)
ABOVE = (
    "More examples are identified than any attack can under the stated noise (95 % confidence): "
    "there was less noise, or the candidates were not drawn as the examples were."
)


def reconstruction(summary: Audit) -> doc.Section | None:
    """None where no gradients were attacked."""
    every = summary.reconstruction
    if not every:
        return None
    blocks: list[doc.Block] = [reconstruction_rows(every)]
    if any(found.findings for found in every):
        blocks.append(finding(ABOVE))
    for found in every:
        if found.bins:
            blocks += [doc.Heading(capitalised(found.named), 4), _by_epsilon(found)]
    blocks += [doc.Reconstructions(), doc.paragraph(MEANING, style="note")]
    lines = tuple(
        doc.paragraph(
            f"{found.named}: identified {format_share(found.identified, 1)} of "
            f"{found.n_examples:,} (95 %: {percent_span(found.interval)}); at most "
            f"{format_share_up(found.ceiling)} on average, by chance "
            f"{format_share(found.chance, 1)}",
            style="alarm" if found.findings else "",
        )
        for found in every
    )
    screen = (doc.Entry("RECONSTRUCTION", lines),)
    return doc.Section("reconstruction", "Reconstruction", tuple(blocks), screen)


def reconstruction_rows(every: Sequence[Reconstruction]) -> doc.Table:
    """One row for each attack."""
    return doc.table(
        _HEAD,
        [
            (
                capitalised(found.named),
                format_share(found.identified, 1),
                percent_span(found.interval),
                format_share_up(found.ceiling),
                format_share(found.chance, 1),
                format_share(found.label_found),
                "failed" if found.error is None else format_number(found.error, 2),
                f"{format_share(found.close)} ({format_share(found.close_by_chance)})",
            )
            for found in every
        ],
        caption="Examples reconstructed from gradients",
        wide=frozenset({4, 7}),
    )


def _by_epsilon(found: Reconstruction) -> doc.Table:
    return doc.table(
        ("Individual epsilon up to", "Examples", "Identified", "95 %", "At most"),
        [
            (
                format_epsilon(part.high),
                f"{part.n_examples:,}",
                format_share(part.identified, 1),
                percent_span(part.interval),
                format_share_up(part.ceiling),
            )
            for part in found.bins
        ],
        row_names=False,
    )
