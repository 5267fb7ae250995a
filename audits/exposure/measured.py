"""The exposures of a run beside its account, and what is printed of them. Sensitive."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console

from audits.exposure.findings import CHANCE, ExposureFindings, ExposureRow
from audits.exposure.ranks import Exposures
from indpriv._formatting import format_delta, format_epsilon, format_p_value
from indpriv._plain import to_json
from indpriv.accountant import account
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import SECRETS, holds_log
from indpriv.report.document import Paragraph, Table, paragraph, table
from indpriv.report.renderers.terminal import print_blocks
from indpriv.report.wording import NO_EVIDENCE, p_value, span

HEAD = (
    "rows with the secret",
    "secrets",
    "mean exposure",
    "95 %",
    "extracted",
    "epsilon of the owner",
    "ceiling",
    "worst case",
    "ceiling",
    "p",
)


def exposure_of_run(run_dir: Path, *, delta: float) -> tuple[Exposures, EpsilonTable | None]:
    """The secrets of a run, and the epsilons of its units; None if it was trained without DP.

    Raises:
        InputError: the run had no secrets.
    """
    path = run_dir / SECRETS
    if not path.is_file():
        raise InputError(
            f"{run_dir} has no {SECRETS}; train a run with secrets: python -m audits exposure NEW"
        )
    table = account(NormLog.open(run_dir), delta=delta) if holds_log(run_dir) else None
    return Exposures.from_parquet(path), table


def exposure_document(found: ExposureFindings) -> dict[str, Any]:
    """What --json prints."""
    return {"sensitive": SENSITIVE, **to_json(found)}


def print_exposure(found: ExposureFindings, console: Console) -> None:
    """Print the exposure of secrets by number of rows."""
    most = math.log2(found.n_candidates)
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        exposure_rows(found),
        paragraph(
            f"Exposure is in bits: {CHANCE:.2f} on average if the model knows nothing of a secret, "
            f"{most:.2f} if the secret ranks first of {found.n_candidates:,} candidates. Intervals "
            "are over the secrets of this model."
        ),
    ]
    if found.control_p_value is not None:
        blocks.append(
            paragraph(
                "Secrets that were inserted nowhere: by chance their ranks would be as far from "
                f"uniform with p = {format_p_value(found.control_p_value)}."
            )
        )
    if found.delta is not None:
        blocks.append(
            paragraph(
                "An epsilon is that of the owner with all rows of the secret, at delta "
                f"{format_delta(found.delta)}. A ceiling is the largest mean exposure that it "
                "allows: for the worst case a guarantee, which p tests; for the individual epsilon "
                "a description of this run."
            )
        )
    if found.findings:
        blocks.append(
            paragraph(
                "Secrets are more exposed than the worst case allows: the run or its account is "
                "wrong.",
                style="alarm",
            )
        )
    print_blocks([*blocks, paragraph(NO_EVIDENCE)], console)


def exposure_rows(found: ExposureFindings) -> Table:
    """The table of exposures."""
    return table(HEAD, map(_cells, found.rows), caption="Exposure of secrets")


def _cells(row: ExposureRow) -> tuple[str, ...]:
    return (
        f"{row.rows}" if row.rows else "none",
        f"{row.n_secrets}",
        f"{row.mean:.2f}",
        span(row.interval),
        f"{row.extracted}",
        format_epsilon(row.mean_epsilon),
        _bits(row.individual_ceiling),
        format_epsilon(row.worst_case_epsilon),
        _bits(row.ceiling),
        p_value(row.p_value),
    )


def _bits(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
