"""The ladder of attackers, and whom the strongest attack reaches: by group and person."""

from collections.abc import Sequence

from indpriv._formatting import (
    capitalised,
    format_number,
    format_share,
    format_share_up,
)
from indpriv.analysis.attacks.strongest import StrongestAttack, UnitRates
from indpriv.analysis.statistics.bootstrap import Interval
from indpriv.analysis.summary import AttackFindings
from indpriv.attack_scores import RUNGS
from indpriv.report.document import (
    Block,
    Span,
    paragraph,
    table,
)
from indpriv.report.wording import MOST_ROWS, NO_EVIDENCE

AT_THESE_NORMS = "Ceiling at these norms"
INDIVIDUAL = (
    "The ceiling at these norms is the largest share that one threshold can reach over all "
    "training examples by their own privacy curves, as false positives go where epsilon is large. "
    "It is of steps with the recorded norms, which depend on the run: only the worst case is a "
    "guarantee, and where epsilons are estimates, so is this."
)
_ON_UPDATES = (
    "An attacker who sees every noisy update is measured on gradient canaries, which stand for "
    "examples at the worst case; the intervals of that row are for it alone. "
)
_NONE_ON_UPDATES = (
    "No attacker who sees every noisy update was tried on this run: train with gradient_canaries "
    "= 1000 in the table [attacks] of the audit file. To attack examples in this way, train "
    "several runs with white_box = 1000 there, then type: indpriv validate RUN RUN. "
)


def ladder(attacks: AttackFindings) -> list[Block]:
    """The strongest attack of every attacker, from the one who sees least; then the ceilings."""
    results, rows = attacks.every, []
    for sees, title in RUNGS.items():
        on_rung = [found for found in results.of("dp") if found.sees == sees]
        best = next((found for found in on_rung if found.discrimination is not None), None)
        if best is None or best.discrimination is None:
            continue
        control = [found for found in results.of("non_dp") if found.name == best.name]
        tpr, without = best.discrimination.tpr_at_fpr["0.01"], control[0] if control else None
        rows.append(
            (
                capitalised(title),
                best.title,
                f"{best.auc:.3f}",
                auc_span(best.auc_joint),
                format_share(tpr, 2),
                rate_span(best.tpr_joint.get("0.01")),
                "–" if without is None else f"{without.auc:.3f}",
                "–"
                if without is None or without.discrimination is None
                else format_share(without.discrimination.tpr_at_fpr["0.01"], 2),
            )
        )
    if not rows:
        return []
    if (found := attacks.updates) is not None:
        rows.append(
            (
                "Every noisy update",
                found.title,
                f"{found.auc:.3f}",
                auc_span(found.auc_interval),
                format_share(found.tpr, 2),
                rate_span(found.tpr_interval),
                "–",
                "–",
            )
        )
    if results.ceilings is not None:
        for name, rates in (
            (AT_THESE_NORMS, results.ceilings.common_threshold),
            ("What no attacker exceeds, worst case", results.ceilings.worst_case),
        ):
            limit = format_share_up(rates["0.01"])
            rows.append((name, "–", "–", "–", limit, "–", "–", "–"))
    head = ("The attacker sees", "Strongest attack", "AUC", "interval", "TPR at 1 % FPR")
    return [
        table(
            (*head, "interval", "without DP: AUC", "TPR at 1 %"),
            rows,
            caption="The ladder: from the attacker who sees least to what none exceeds",
        ),
        paragraph(
            "Intervals hold at 95 % for all attacks on models together (Bonferroni). ",
            _NONE_ON_UPDATES if attacks.updates is None else _ON_UPDATES,
            Span(NO_EVIDENCE),
            style="note",
        ),
    ]


def by_group(found: StrongestAttack | None) -> list[Block]:
    """The strongest attack by group."""
    shown = [] if found is None else [row for row in found.groups if row.auc is not None]
    if found is None or not shown:
        return []
    head = ("Column", "Group", "Members", "AUC", "95 % interval", "TPR", "95 % interval", "FPR")
    rows = [
        (
            row.by,
            row.name,
            f"{row.n_members:,}",
            format_number(row.auc, 3),
            auc_span(row.auc_interval),
            format_share(row.tpr, 2),
            rate_span(row.tpr_interval),
            format_share(row.fpr, 2),
        )
        for row in shown[:MOST_ROWS]
    ]
    note = (
        "One threshold serves all rows: one non-member in a hundred is above it, in a row more or "
        "fewer (FPR). Each interval is for this threshold and its row alone, so some miss."
    )
    caption = f"The strongest attack ({found.name}) by group"
    return [table(head, rows, caption=caption), paragraph(note, style="note")]


def on_units(found: Sequence[UnitRates], unit: str) -> list[Block]:
    """Attacks on people with several rows; empty where each unit has one row."""
    if not found:
        return []
    rows = [
        (
            of.name,
            of.rule,
            f"{of.n_units:,} / {of.n_groups:,}",
            format_number(of.auc, 3),
            auc_span(of.auc_interval),
            format_share(of.tpr, 2),
            rate_span(of.tpr_interval),
        )
        for of in found
    ]
    head = ("Attack", "Rule", "In / out", "AUC", "interval", "TPR at 1 % FPR", "interval")
    note = (
        f"The score of a {unit} is the maximum, mean or log-sum of the scores of its rows, ranked "
        "among random groups of as many test rows, which stand for those who were not in the "
        f"data. Rows of one {unit} are often alike, which random groups are not: a rate above "
        "chance may come from that. Intervals hold for all rows of the table together."
    )
    return [table(head, rows, caption=f"Attacks by {unit}"), paragraph(note, style="note")]


def auc_span(interval: Interval | None) -> str:
    """An interval of an AUC, whose third decimal matters."""
    return "–" if interval is None else f"[{interval.low:.3f}, {interval.high:.3f}]"


def rate_span(interval: Interval | None) -> str:
    """An interval of a small rate."""
    if interval is None:
        return "–"
    return f"{_percent(interval.low)} to {_percent(interval.high)} %"


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}"
