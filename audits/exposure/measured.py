"""The exposures of a run beside its account, and what is printed of them. Sensitive."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console

from audits.exposure.findings import CHANCE, ExposureFindings
from audits.exposure.ranks import Exposures
from indpriv._plain import to_json
from indpriv.accountant import account
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import SECRETS, holds_log
from indpriv.report.report import print_sensitive


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
    values = {"found": found, "chance": CHANCE, "most": math.log2(found.n_candidates)}
    print_sensitive(Path(__file__).with_name("exposure"), console, **values)
