"""The distribution of individual epsilon, and where the epsilon of one example is."""

from indpriv._formatting import capitalised, format_edges, format_epsilon, format_share
from indpriv.analysis.lookup import MOST_EXAMPLES
from indpriv.analysis.summary import Audit
from indpriv.report.document import Details, Figure, Search, Section, Span, paragraph, table


def drawn_worst_case(summary: Audit) -> float | None:
    """The worst case that figures show; None if that of the largest unit is far off their scale."""
    worst = summary.guarantee.worst_case_epsilon
    beyond = summary.unit_sizes and worst > summary.individual.edges[-1]
    return None if beyond else worst


def distribution(summary: Audit) -> Section:
    """Quantiles and histogram; the tail is always part of it."""
    individual, account = summary.individual, summary.account
    plural, share = account.plural, individual.share_at_worst_case
    values = (
        individual.mean,
        individual.median,
        individual.p75,
        individual.p95,
        individual.p99,
        individual.max,
        summary.guarantee.worst_case_epsilon,
    )
    head = ("Mean", "Median", "75 %", "95 %", "99 %", "Largest", "Worst case", "At worst case")
    edges = format_edges(individual.edges)
    bins = zip(edges, edges[1:], (f"{count:,}" for count in individual.counts), strict=False)
    return Section(
        "distribution",
        "Distribution of individual epsilon",
        (
            paragraph(
                "An individual epsilon says how much this training run depended on one "
                f"{plural[:-1]}. {format_share(share)} of the {plural} are "
                f"{account.at_worst_case}; three quarters have an epsilon of at most "
                f"{format_epsilon(individual.p75)}."
            ),
            Figure(
                "histogram",
                (individual, drawn_worst_case(summary), plural),
                f"Each bar counts {plural}; epsilon at {account.describe()}. "
                f"{capitalised(summary.claim)}.",
            ),
            table(head, [(*map(format_epsilon, values), format_share(share, 1))], row_names=False),
            paragraph(
                f"{capitalised(summary.claim)}; {account.describe()}; {individual.n:,} "
                f"{plural}. Every epsilon in this report is rounded up at the last digit shown.",
                style="note",
            ),
            Details(
                "Table behind the figure",
                (table(("From", "To", capitalised(plural)), bins, row_names=False),),
            ),
        ),
    )


def lookup(summary: Audit) -> Section:
    """The file with every epsilon, and the search box of a page that holds them."""
    plural = summary.account.plural
    where = paragraph(
        "The file ",
        Span("epsilon.parquet", "code"),
        f", which the audit writes beside this report, has the epsilon of each {plural[:-1]}. "
        f"For at most {MOST_EXAMPLES:,} {plural}, the page that ",
        Span("indpriv audit", "code"),
        " writes can also be searched.",
        style="note",
    )
    return Section("lookup", f"One {plural[:-1]}", (Search(), where))
