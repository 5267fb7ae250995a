"""What `indpriv attack run` prints: rates of attacks, and effects of membership. Sensitive."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from indpriv._formatting import format_epsilon, format_number, format_p_value, format_share
from indpriv.analysis.attacks.attributes import AttributeFindings
from indpriv.analysis.attacks.effects import MembershipEffects
from indpriv.analysis.attacks.rates import ALL, interval, parts
from indpriv.analysis.summary import SENSITIVE, Audit
from indpriv.report.document import Paragraph, Table, paragraph, table
from indpriv.report.renderers.terminal import print_blocks
from indpriv.report.sections.attacks.attributes import attribute_table
from indpriv.report.sections.attacks.membership import rate_table, unchecked_lines
from indpriv.report.wording import NO_EVIDENCE, span


def print_results(
    results: Audit, attributes: Sequence[AttributeFindings], console: Console
) -> None:
    """Print the attacks on one run, and on attributes of its model and of the baseline."""
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        rate_table(results),
        *_attribute_tables(attributes),
        *unchecked_lines(results),
        paragraph(NO_EVIDENCE),
    ]
    print_blocks(blocks, console)


def _attribute_tables(found: Sequence[AttributeFindings]) -> list[Table]:
    parts = {"dp": "Attributes", "non_dp": "Attributes, on the model trained without DP"}
    chosen = ((name, [each for each in found if each.model == key]) for key, name in parts.items())
    return [attribute_table(part, name) for name, part in chosen if part]


def print_rates(rates: pd.DataFrame, console: Console) -> None:
    """Print the attacks on every model of a study."""
    head = ("attack", "models", "AUC", "95 %", "TPR at 1 % FPR", "95 %", "at 0.1 %", "95 %")
    rows = []
    for attack in rates["attack"].unique():
        of = parts(rates, attack=attack)[ALL]
        cells = [attack, f"{of['auc'].n}", f"{of['auc'].value:.4f}", _span(of["auc"], 1, 4)]
        for row in (of["tpr_0.01"], of["tpr_0.001"]):
            cells += [format_share(row.value, 2), _span(row, 100, 2)]
        rows.append(cells)
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        table(head, rows, caption="Means over models; intervals are over models"),
        paragraph(NO_EVIDENCE),
    ]
    print_blocks(blocks, console)


def _span(row: Any, scale: int, digits: int) -> str:
    ends = interval(row)
    if ends is None:
        return "–"
    return f"{scale * ends.low:.{digits}f} to {scale * ends.high:.{digits}f}"


def print_effects(found: MembershipEffects, console: Console) -> None:
    """Print effects of membership by individual epsilon."""
    head = ("epsilon", "examples", "effect", "standard error", "mu", "p")
    rows = [
        (
            format_epsilon(part.mean_epsilon),
            f"{part.n_examples:,}",
            f"{part.effect:.3f}",
            f"{part.error:.3f}",
            f"{part.mu:.3f}",
            format_p_value(part.p_value),
        )
        for part in found.bins
    ]
    if found.corrected is None:
        corrected = "; the effects are too noisy to correct it"
    else:
        corrected = (
            f"; corrected for the noise in the effects {found.corrected:.2f} "
            f"{span(found.corrected_interval)}"
        )
    blocks: list[Paragraph | Table] = [
        table(
            head,
            rows,
            caption=f"Effect of membership on the confidence, {found.n_models} models "
            "(standard deviations)",
        ),
        paragraph(
            f"No effect at all: p = {format_p_value(found.p_value)}; no trend over epsilon: p = "
            f"{format_p_value(found.trend_p_value)} (both exact, {found.redraws:,} redrawn coins)."
        ),
        paragraph(
            f"Correlation of epsilon and effect: raw {format_number(found.correlation, 2)}, "
            f"reliability of the effects {format_number(found.reliability, 2)} "
            f"{span(found.reliability_interval)}{corrected}."
        ),
        paragraph(
            "Mu is of a Gaussian mechanism with the same epsilon: the effect that the best test "
            "has there on its own score, if it sees every update. It is no ceiling of effects."
        ),
    ]
    print_blocks(blocks, console)
