"""What drives individual epsilon: gradient norms over training, and the examples at both ends."""

from indpriv._formatting import format_number, format_share
from indpriv.analysis.summary import Audit
from indpriv.norm_log.validation import CONTRIBUTIONS
from indpriv.report.document import Block, Details, Examples, Figure, Section, paragraph, table


def norms_over_training(summary: Audit) -> Section:
    """Norms by class, and the ids at both ends."""
    blocks = (*_by_class(summary), *_ends(summary))
    title = "Norms over training" if summary.drivers.classes else "The examples at both ends"
    return Section("norms", title, blocks, nested=True)


def _by_class(summary: Audit) -> tuple[Block, ...]:
    found = summary.drivers
    if not found.classes or not found.steps:
        return ()
    epsilon = "The epsilon of an example grows with each of its norms."
    if summary.unit_sizes:
        epsilon = f"The epsilon of a {summary.account.unit} grows with the norms of all its rows."
    if summary.run.settings.individually_clipped:
        epsilon += (
            " Training clipped each example individually: the figure shows the levels at which "
            "it was clipped, headroom included."
        )
    first, last = (f"step {found.steps[index]:,}" for index in (0, -1))
    shown = "Gradient norms before clipping, by class; a norm above 1 is clipped."
    clipping = summary.run.recorder.get("clipping")
    if clipping in CONTRIBUTIONS:
        shown = f"What the log holds by class, {CONTRIBUTIONS[clipping]}; 1 is the worst case."
    return (
        Figure(
            "norms over training",
            (found,),
            f"{shown} {epsilon}",
        ),
        table(
            ("Class", f"Median norm at {first}", f"at {last}", f"Clipped at {first}", f"at {last}"),
            [
                (
                    label,
                    *(format_number(norms[index]) for index in (0, -1)),
                    *(format_share(shares[index]) for index in (0, -1)),
                )
                for label, norms, shares in zip(
                    found.classes, found.median_norm, found.clipped_share_by_class, strict=True
                )
            ],
        ),
    )


def _ends(summary: Audit) -> tuple[Block, ...]:
    found, plural = summary.drivers, summary.account.plural
    ends = (
        ("Least protected", "Largest", found.least_protected, found.n_at_most),
        ("Most protected", "Smallest", found.most_protected, found.n_at_least),
    )
    texts = (
        paragraph(
            f"{which} epsilon ({n:,} {plural} share the {which.lower()}): "
            f"{', '.join(map(str, ids))}."
        )
        for _, which, ids, n in ends
    )
    return (
        Details(f"Ids of the least and the most protected {plural}", tuple(texts)),
        *(Examples(title, ids) for title, _, ids, _ in ends),
    )
