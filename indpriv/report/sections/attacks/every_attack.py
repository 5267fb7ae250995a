"""Every attack that was run, beside what any attack can reach; attacks that guess attributes."""

from collections.abc import Sequence

from indpriv._formatting import (
    capitalised,
    format_share,
    format_share_up,
)
from indpriv.analysis.attacks.results import AttackResult, AttackResults
from indpriv.analysis.attacks.strongest import StrongestAttack
from indpriv.analysis.summary import AttackFindings
from indpriv.attack_scores import ADVERSARIES
from indpriv.report.document import (
    Block,
    Callout,
    Paragraph,
    Span,
    Table,
    paragraph,
    table,
)
from indpriv.report.sections.attacks.ladder import (
    AT_THESE_NORMS,
    INDIVIDUAL,
    auc_span,
    by_group,
    ladder,
    rate_span,
)
from indpriv.report.wording import percent_span

_READABLE = 100  # members of a group; with fewer, a rate at 1 % is a few accusations
_RATES = ("0.01", "0.001")
_HEAD = (
    "Attack",
    "References",
    "AUC",
    "95 % interval",
    "TPR at 1 % FPR",
    "95 % interval",
    "at 0.1 %",
    "95 % interval",
)
ABOVE = (
    "The run or its account is wrong, unless training and test examples differ in other ways too: "
    "was the split random?"
)


def strongest_lines(attacks: AttackFindings) -> tuple[Paragraph, ...]:
    """Lines of the first screen on the strongest attack; empty where none used references."""
    results = attacks.every
    ours = results.of("dp")
    if not any(found.references for found in ours) or ours[0].discrimination is None:
        return ()
    best, of = ours[0], ours[0].discrimination
    text = (
        f"strongest of {len(ours)}: {_name(best)} on {ADVERSARIES[best.adversary]}: AUC "
        f"{of.auc:.3f} {auc_span(best.auc_joint or of.auc_interval)}"
        f"{', corrected for choosing the strongest' if best.auc_joint else ''}; at 1 % false "
        f"positives {format_share(of.tpr_at_fpr['0.01'], 1)}{_limits(results)}"
    )
    same = [found for found in results.of("non_dp") if found.name == best.name]
    if same and same[0].discrimination is not None:
        rate = format_share(same[0].discrimination.tpr_at_fpr["0.01"], 1)
        text += f"; without DP AUC {same[0].auc:.3f}, {rate}"
    lines = [paragraph(f"{text}.")]
    lines += [paragraph(line) for line in _against(attacks.strongest)]
    if results.findings:
        lines.append(paragraph(f"{_above(results)} {ABOVE}", style="alarm"))
    return tuple(lines)


def _against(found: StrongestAttack | None) -> list[str]:
    """Against which group the strongest attack succeeds most often."""
    if found is None:
        return []
    known = [row for row in found.groups if row.tpr is not None and row.n_members >= _READABLE]
    if not known:
        return []
    worst = max(known, key=lambda row: row.tpr or 0.0)
    return [
        f"of {len(known)} groups most often against {worst.by} {worst.name}: "
        f"{format_share(worst.tpr, 1)} [{percent_span(worst.tpr_interval)}], false positives "
        f"{format_share(worst.fpr, 1)}"
    ]


def every_attack(attacks: AttackFindings) -> list[Block]:
    """The ladder of attackers and the table of all attacks; empty where none was run."""
    results = attacks.every
    ours, baseline = results.of("dp"), results.of("non_dp")
    if not ours:
        return []
    blocks: list[Block] = []
    if results.findings:
        blocks.append(
            Callout((paragraph(Span(_above(results)), f" {ABOVE}"),), warn=True),
        )
    blocks += ladder(attacks)
    blocks.append(rate_table(results))
    if baseline:
        caption = "The same attacks on the model trained without DP"
        blocks.append(table(_HEAD, _rows(baseline), caption=caption))
    blocks.append(
        paragraph(
            "Attacks are listed by their AUC on these same examples, so the first one was chosen "
            "after seeing the results. Each interval is at 95 % for one attack alone, and among "
            "several some miss; that of the first screen is corrected for their number. All treat "
            "examples as independent. "
            + (f"{INDIVIDUAL} " if results.ceilings is not None else "")
            + "Reference models are trained on the data: never publish them.",
            style="note",
        )
    )
    blocks += unchecked_lines(results)
    blocks += by_group(attacks.strongest)
    sources = [(found.title, found.source, found.caveat) for found in ours]
    blocks.append(table(("Attack", "Source", "What to know"), sources))
    return blocks


def unchecked_lines(results: AttackResults) -> list[Paragraph]:
    """What could not be checked about the reference models."""
    return [paragraph(text, style="warn") for text in results.unchecked]


def rate_table(results: AttackResults) -> Table:
    """Rates of the attacks on the audited model, and their ceilings."""
    rows = [*_rows(results.of("dp")), *_ceiling_rows(results)]
    return table(_HEAD, rows, caption="Every attack")


def _name(found: AttackResult) -> str:
    if not found.references:
        return found.title
    models = "model" if found.references == 1 else "models"
    return f"{found.title}, {found.references} reference {models},"


def _limits(results: AttackResults) -> str:
    ceilings = results.ceilings
    if ceilings is None:
        return ""
    worst = f"worst case {format_share_up(ceilings.worst_case['0.01'])}"
    at_most = format_share_up(ceilings.common_threshold["0.01"])
    return f" (ceiling at these norms {at_most}, {worst})"


def _above(results: AttackResults) -> str:
    names = ", ".join(found.title for found in results.results if found.above_worst_case)
    return f"Success rates above what the worst case allows: {names}."


def _rows(results: Sequence[AttackResult]) -> list[tuple[str, ...]]:
    rows = []
    for found in results:
        of = found.discrimination
        if of is None:
            continue
        rates = [
            cell
            for rate in _RATES
            for cell in (
                format_share(of.tpr_at_fpr[rate], 2),
                rate_span(of.tpr_at_fpr_intervals[rate]),
            )
        ]
        auc = (f"{of.auc:.3f}", auc_span(of.auc_interval))
        rows.append((capitalised(found.title), f"{found.references}", *auc, *rates))
    return rows


def _ceiling_rows(results: AttackResults) -> list[tuple[str, ...]]:
    """The ceilings, in the columns of the rates."""
    ceilings = results.ceilings
    if ceilings is None:
        return []
    parts = [(AT_THESE_NORMS, ceilings.common_threshold), ("Worst case", ceilings.worst_case)]
    return [
        (
            name,
            "–",
            "–",
            "–",
            *(cell for rate in _RATES for cell in (format_share_up(of[rate]), "–")),
        )
        for name, of in parts
    ]
