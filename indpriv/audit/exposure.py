"""Exposure of the secrets of a run beside its account. Sensitive."""

from pathlib import Path

from indpriv.accountant.per_example import account
from indpriv.attacks.exposure import Exposures
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import SECRETS, holds_log


def exposure_of_run(run_dir: Path, *, delta: float) -> tuple[Exposures, EpsilonTable | None]:
    """The secrets of a run, and the epsilons of its units; None if it was trained without DP.

    Raises:
        InputError: the run had no secrets.
    """
    path = run_dir / SECRETS
    if not path.is_file():
        raise InputError(
            f"{run_dir} has no {SECRETS}; train a run with secrets: indpriv attack exposure NEW_DIR"
        )
    table = account(NormLog.open(run_dir), delta=delta) if holds_log(run_dir) else None
    return Exposures.from_parquet(path), table
