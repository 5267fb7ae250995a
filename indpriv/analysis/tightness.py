"""Epsilons of the tight accountant beside those of an audit, of examples drawn at random."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from indpriv._plain import AtLeastZero, Count
from indpriv.accountant.account import table_for
from indpriv.accountant.method import Method
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.summary import Finding

_DRAWN = 100  # examples of which a tight epsilon is computed
_BRACKETED = 4  # of them with a lower end, which costs more


@dataclass(frozen=True)
class Tightness:
    """What the tight accountant says of a run.

    Attributes:
        worst_case: epsilon of the run by privacy loss distributions, never below the truth.
        n: number of examples that were drawn at random; all if they are few.
        median: of their tight epsilon. median_told: of their epsilon in this audit.
        n_bracketed: of how many of them a lower end was computed; only where the audit's own
            accountant is the tight one.
        above: by how much their epsilon is above the lower end, as a share, at most.
    """

    worst_case: AtLeastZero
    n: Count
    median: AtLeastZero
    median_told: AtLeastZero
    n_bracketed: Count = 0
    above: AtLeastZero | None = None


def _find(run: AuditedRun) -> dict[str, Any]:
    account, method = run.epsilons.account, run.method
    alone = account.rows_per_unit is None and len(run.epsilons) == run.log.n_examples
    covered = account.neighbouring != "replace_one" and run.log.truncation is None
    if method is None or account.participation != "secret" or not (alone and covered):
        return {}
    rng = np.random.default_rng(run.seed)
    n = len(run.epsilons)
    drawn = np.sort(rng.choice(n, min(n, _DRAWN), replace=False))
    tight = Method(
        delta=account.delta,
        neighbouring=account.neighbouring,
        accountant="pld",
        between_records=account.between_records,
    )
    plain = replace(run.log, unit_ids=None, unit="example")
    told, worst = run.epsilons.take(drawn).epsilon, run.epsilons.worst_case_epsilon
    median_told = float(np.median(told))
    found = Tightness(worst, len(drawn), median_told, median_told)
    if account.accountant != "pld":
        table = table_for(plain.take(drawn), tight, workers=1)
        median = float(np.median(np.minimum(table.epsilon, told)))
        worst = min(table.worst_case_epsilon, worst)
        return {"tightness": replace(found, worst_case=worst, median=median)}
    few = np.sort(rng.choice(drawn, min(n, _BRACKETED), replace=False))
    ends = table_for(plain.take(few), replace(tight, brackets=True), workers=1)
    known = ends.epsilon_lower > 0
    above = float((ends.epsilon[known] / ends.epsilon_lower[known] - 1).max(initial=0.0))
    return {"tightness": replace(found, n_bracketed=int(known.sum()), above=above)}


FINDING = Finding(
    "tightness",
    11,
    _find,
    tightness=(
        Tightness | None,
        "Epsilons by the tight accountant, of examples drawn at random; null where a step is no "
        "Poisson sample of single rows, or who took part is known.",
    ),
)
