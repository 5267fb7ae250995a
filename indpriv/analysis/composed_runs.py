"""What the accounts of several runs say together. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from indpriv._formatting import format_delta, format_epsilon
from indpriv._plain import to_json
from indpriv.accountant.runs import Tuning
from indpriv.analysis.guarantee import DELTA_TOO_LARGE, UNPROVEN, VOID
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER, EpsilonTable


@dataclass(frozen=True)
class ComposedRun:
    """One of the runs: its own account, at the delta of the whole.

    Attributes:
        path: of the run directory. sampling: what its account assumes of batches.
        steps: their number. n: people, or examples, in it.
        worst_case_epsilon, median_epsilon: of the run alone.
    """

    path: str
    sampling: str
    steps: int
    n: int
    worst_case_epsilon: float
    median_epsilon: float


@dataclass(frozen=True)
class Composition:
    """Several runs accounted together.

    Attributes:
        table: epsilon of everyone, over all runs.
        runs: each by itself.
        status: of the guarantee; the weakest of the runs (see `analysis.guarantee`).
        statement: the guarantee in one sentence.
        reasons: why it is not "supported", by run.
    """

    table: EpsilonTable
    runs: tuple[ComposedRun, ...]
    status: str
    statement: str
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What composition.json holds: nothing about single people."""
        table = self.table
        return {
            "sensitive": SENSITIVE,
            "disclaimer": DISCLAIMER,
            "account": to_json(table.account),
            "claim": table.claim,
            "claim_reason": table.claim_reason,
            "worst_case_epsilon": table.worst_case_epsilon,
            "guarantee": {
                "status": self.status,
                "statement": self.statement,
                "reasons": list(self.reasons),
            },
            "runs": to_json(self.runs),
        }


def composed_statement(table: EpsilonTable, status: str, n_runs: int, tuning: Tuning | None) -> str:
    """The guarantee in one sentence."""
    account = table.account
    # The price of tuning is one of Rényi divergences, whatever accounts for each person
    method = account.guaranteed_by if tuning is None else "RDP accountant"
    bound = (
        f"differential privacy with epsilon {format_epsilon(table.worst_case_epsilon)} and delta "
        f"{format_delta(account.delta)} ({account.relation}, "
        f"{account.sampling}, {method})"
    )
    if tuning is None:
        what = f"All model states of these {n_runs} runs together"
    else:
        what = (
            f"The best of a number of runs that follows the {tuning.law} law with mean "
            f"{tuning.mean:g}, each like one of these, by a score that uses none of these data,"
        )
    if status == VOID:
        return "These runs have no differential-privacy guarantee: one of them has no privacy."
    if status == UNPROVEN:
        return f"No guarantee is proven. Had every assumption held: {what} would satisfy {bound}."
    verb = "satisfy" if tuning is None else "satisfies"
    caution = f" {DELTA_TOO_LARGE}" if account.delta * len(table) >= 1 else ""
    return f"{what} {verb} {bound}.{caution}"
