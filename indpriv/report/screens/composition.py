"""What `indpriv compose` prints. Sensitive."""

import numpy as np
from rich.console import Console

from indpriv._formatting import format_epsilon, format_share
from indpriv.analysis.composed_runs import Composition
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.document import Paragraph, Table, paragraph, table
from indpriv.report.renderers.terminal import print_blocks

_QUANTILES = {"median": 0.5, "95 % at most": 0.95, "largest": 1.0}


def print_composition(found: Composition, console: Console) -> None:
    """Print the guarantee of all runs together, and individual epsilons by number of runs."""
    whole, each = found.table, found.table.details["n_runs"]
    alone = [
        (
            run.path,
            run.sampling,
            f"{run.steps:,}",
            f"{run.n:,}",
            format_epsilon(run.worst_case_epsilon),
            format_epsilon(run.median_epsilon),
        )
        for run in found.runs
    ]
    rows = []
    for number in np.unique(each).tolist():
        epsilon = whole.epsilon[each == number]
        quantiles = np.quantile(epsilon, list(_QUANTILES.values()), method="higher")
        rows.append(
            (
                f"{number}",
                f"{len(epsilon):,}",
                format_share(len(epsilon) / len(whole), 1),
                *map(format_epsilon, quantiles),
            )
        )
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(f"GUARANTEE ({found.status})  {found.statement}"),
        *(paragraph(f"  {reason}") for reason in found.reasons),
        paragraph(f"INDIVIDUAL EPSILON ({whole.claim}): {whole.account.describe()}"),
        table(("in runs", whole.account.plural, "share", *_QUANTILES), rows),
        paragraph(whole.claim_reason),
        table(
            ("run alone", "sampling", "steps", whole.account.plural, "worst case", "median"), alone
        ),
        paragraph(DISCLAIMER.replace("this run", "these runs")),
    ]
    print_blocks(blocks, console)
