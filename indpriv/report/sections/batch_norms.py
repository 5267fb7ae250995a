"""What batch norms prove about the estimate."""

from indpriv._formatting import format_share
from indpriv.analysis.summary import AuditSummary
from indpriv.report.document import Entry, Section, paragraph


def batch_norms(summary: AuditSummary) -> Section | None:
    """None where the account uses none."""
    found = summary.fidelity.batch_norms
    if found is None:
        return None
    bias, mean, p95 = (
        f"{found.signed_bias:+.3f}",
        f"{found.mean_absolute:.3f}",
        f"{found.p95_absolute:.3f}",
    )
    largest, under = f"{found.largest_absolute:.3f}", format_share(found.share_under_1_percent)
    order, rdp = f"{found.order:.3g}", f"{found.mean_rdp:.4g}"
    rdp_bias = f"bias {found.rdp_bias:+.2g} (standard error {found.rdp_bias_error:.1g})"
    weighted, lines = "", []
    if found.unbiased_mean_rdp is not None and found.standard_error is not None:
        unbiased = f"{found.unbiased_mean_rdp:.4g}"
        error = f"standard error {found.standard_error:.1g}"
        weighted = f" The sampled steps alone, each weighted by 1 / sample_rate, give {unbiased} without bias ({error})."
        lines = [f"without bias, from the sampled steps alone: {unbiased} ({error})"]
    return Section(
        "batch-norms",
        "Batch norms",
        (
            paragraph(
                f"Each of {found.n_entries:,} norms of sampled examples was left out in turn and "
                "compared with what the account would have used in its place "
                f"(“{found.between_records}”). As fractions of max_grad_norm, the estimate is off "
                f"by {bias} on average, by {mean} in absolute value, by at most {p95} in 95 % of "
                f"cases and by at most {largest} in all; it is too small in "
                f"{format_share(found.share_under)} of cases, and by over 1 % in {under}."
            ),
            paragraph(
                f"At Rényi order {order}, which depends on the settings alone, the account’s mean "
                f"RDP is {rdp}, of which {rdp_bias}.{weighted} At a fixed order, mean epsilon is "
                "mean RDP plus a constant, so these are its errors too; they are not the errors "
                "of one example’s epsilon."
            ),
        ),
        (
            Entry(
                "BATCH NORMS",
                tuple(
                    map(
                        paragraph,
                        (
                            f"{found.n_entries:,} norms, each left out in turn and compared with "
                            f"what the account would use ({found.between_records}), in "
                            f"max_grad_norm: bias {bias}, mean {mean}, 95 % within {p95}, largest "
                            f"{largest}, too small by over 1 % {under}",
                            f"mean RDP at order {order}: account {rdp}, of which {rdp_bias}",
                            *lines,
                        ),
                    )
                ),
            ),
        ),
        nested=True,
    )
