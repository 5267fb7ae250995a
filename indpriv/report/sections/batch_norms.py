"""What batch norms prove about the estimate."""

from indpriv._formatting import format_share
from indpriv.analysis.summary import Audit
from indpriv.report.document import Entry, Section, paragraph


def batch_norms(summary: Audit) -> Section | None:
    """None where the account uses none."""
    found = summary.batch_norms
    if found is None:
        return None
    weighted = ""
    if found.unbiased_mean_rdp is not None and found.standard_error is not None:
        weighted = (
            " The sampled steps alone, each weighted by 1 / sample_rate, give "
            f"{found.unbiased_mean_rdp:.4g} without bias (standard error "
            f"{found.standard_error:.1g})."
        )
    texts = (
        paragraph(
            f"Each of {found.n_entries:,} norms of sampled examples was left out in turn and "
            "compared with what the account would have used in its place "
            f"(“{found.between_records}”). As fractions of max_grad_norm, the estimate is off by "
            f"{found.signed_bias:+.3f} on average, by {found.mean_absolute:.3f} in absolute "
            f"value, by at most {found.p95_absolute:.3f} in 95 % of cases and by at most "
            f"{found.largest_absolute:.3f} in all; it is too small in "
            f"{format_share(found.share_under)} of cases, and by over 1 % in "
            f"{format_share(found.share_under_1_percent)}."
        ),
        paragraph(
            f"At Rényi order {found.order:.3g}, which depends on the settings alone, the account’s "
            f"mean RDP is {found.mean_rdp:.4g}, of which {found.rdp_bias:+.2g} is bias (standard "
            f"error {found.rdp_bias_error:.1g}).{weighted} At a fixed order, mean epsilon is mean "
            "RDP plus a constant, so these are its errors too; they are not the errors of one "
            "example’s epsilon."
        ),
    )
    entry = Entry("BATCH NORMS", texts)
    return Section("batch-norms", "Batch norms", texts, (entry,), nested=True)
