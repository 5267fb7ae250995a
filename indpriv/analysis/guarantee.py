"""The run's guarantee, what it means to an attacker, and whether the evidence supports what it assumes. Releasable where its status says so."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from indpriv._formatting import format_delta, format_epsilon
from indpriv.accountant.risk import worst_case_risk
from indpriv.analysis.summary import Guarantee, Membership
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.evidence import FAILED, WORST_CASE, Check
from indpriv.norm_log.norm_log import NormLog

SUPPORTED, DECLARED, UNPROVEN, VOID = "supported", "declared", "unproven", "void"


FALSE_POSITIVE_RATE = 0.01  # at which reports say what the guarantee leaves a test for membership


def guarantee_of(
    table: EpsilonTable,
    checks: Sequence[Check],
    recorder: Mapping[str, Any],
    membership: Membership | None = None,
) -> Guarantee:
    """State the worst case of a run.

    Args:
        table: its account.
        checks: evidence held against the assumptions; empty where none was.
        recorder: what the recorder noted about the run; "seeded" voids every claim.
        membership: see `worst_case_membership`.
    """
    account = table.account
    failed = [
        check.detail for check in checks if check.status == FAILED and check.bears_on == WORST_CASE
    ]
    if recorder.get("seeded"):
        status, reasons = (
            VOID,
            [
                "the run was seeded (reproducible: no privacy): whoever has the seed can regenerate noise and sampling"
            ],
        )
    elif account.sampler != "poisson" or failed:
        sampling = (
            []
            if account.sampler == "poisson"
            else [f"batches were {account.sampler}, not Poisson-sampled"]
        )
        status, reasons = UNPROVEN, [*sampling, *failed]
    elif not checks:
        status, reasons = (
            DECLARED,
            ["no evidence was checked: sampler, steps and settings stand on the log's word"],
        )
    elif recorder.get("replayed") or recorder.get("converted"):
        status, reasons = (
            DECLARED,
            ["nobody watched the training: sampler, steps and settings are as declared"],
        )
    else:
        status, reasons = SUPPORTED, []
    return Guarantee(
        worst_case_epsilon=table.worst_case_epsilon,
        delta=account.delta,
        delta_times_n=account.delta * len(table),
        status=status,
        statement=_statement(table, status)
        + (
            " Delta is not below 1/n, so that this promises next to nothing and is not to be published."
            if status in (SUPPORTED, DECLARED) and account.delta * len(table) >= 1
            else ""
        ),
        reasons=tuple(reasons),
        membership=membership,
    )


def worst_case_membership(log: NormLog, delta: float) -> Membership | None:
    """What the worst case leaves the best test for membership; None where a unit has several rows, so that one row is too little."""
    if (
        log.unit != "example"
        and log.unit_ids is not None
        and len(np.unique(log.unit_ids)) < log.n_examples
    ):
        return None
    risk = worst_case_risk(log, delta=delta, false_positive_rate=FALSE_POSITIVE_RATE)
    return Membership(
        false_positive_rate=FALSE_POSITIVE_RATE,
        true_positive_rate=float(risk.true_positive_rate[0, 0]),
        advantage=float(risk.advantage[0]),
        mu=float(risk.mu[0]),
    )


def true_positive_bound(epsilon: float, delta: float, false_positive_rate: float) -> float:
    """How often a test for membership can be right about an example that was in, at this false-positive rate.

    Args:
        epsilon: of the guarantee, in both directions of the neighbouring relation.
        delta: of the guarantee.
        false_positive_rate: how often the test says "in" of an example that was not.

    Returns:
        the smaller of e^epsilon FPR + delta and 1 - e^-epsilon (1 - delta - FPR), at most 1: the privacy region of
        Kairouz, Oh and Viswanath 2015 (arXiv:1311.0776), after Wasserman and Zhou 2010 (arXiv:0811.2501).
    """
    above = (
        math.exp(min(epsilon, 700.0)) * false_positive_rate + delta
    )  # e^700 is near the largest float
    below = 1.0 - math.exp(-epsilon) * (1.0 - delta - false_positive_rate)
    return min(1.0, above, below)


def _statement(table: EpsilonTable, status: str) -> str:
    account = table.account
    relation = account.neighbouring.replace("_", "/")
    bound = f"epsilon {format_epsilon(table.worst_case_epsilon)} and delta {format_delta(account.delta)}"
    if status == VOID:
        return "This run has no differential-privacy guarantee: its random numbers are reproducible from a seed."
    if status == UNPROVEN:
        return (
            "No guarantee is proven for this run. Had every assumption held, all its model states together would satisfy "
            f"differential privacy with {bound} ({relation} one {account.one_unit}, Poisson sampling, "
            f"{account.guaranteed_by})."
        )
    return (
        "All model states of this training run together, every checkpoint and the final model, satisfy differential "
        f"privacy with {bound} ({relation} one {account.one_unit}, Poisson sampling, "
        f"{account.guaranteed_by})."
    )
