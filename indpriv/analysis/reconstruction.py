"""Reconstruction from gradients beside its ceiling. Sensitive.

An attack names one of m candidates. Each example's name comes up by chance with some probability
nu_z, and these add up to 1, so on average at most the largest mean of Phi(Phi^-1(nu_z) + mu_z) is
found: Hayes, Mahloujifar and Balle 2023 (arXiv:2302.07225) for one example, added up over all.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import ndtr

from indpriv._facts import refused, text
from indpriv._plain import shown
from indpriv._types import BoolArray, FloatArray
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.statistics import CONFIDENCE, clopper_pearson
from indpriv.analysis.summary import Audit, Finding, record
from indpriv.attack_scores import AttackScores
from indpriv.epsilon_table import EpsilonTable

ReconstructionBin: Any = record("reconstruction_bin")
CLOSE = 1e-3  # mean squared error over the squared range, below which a picture is the same
_BINS = 4
_LEAST_MU = 1e-3  # smaller ones count as this


class _Reconstruction:
    @property
    def named(self: Any) -> str:
        """The attack, and when it saw what."""
        after = "" if self.step is None else f", after {shown(self, 'step')} steps"
        return f"{self.method}{after}"

    @property
    def findings(self: Any) -> int:
        """Number of shares above their ceilings: of all examples, and of each bin."""
        return sum(one.above_ceiling for one in (self, *self.bins))


Reconstruction: Any = record("reconstruction", _Reconstruction)


def reconstruction_of(
    scores: AttackScores, epsilon: FloatArray | None = None, *, tests: int = 1
) -> Reconstruction:
    """Measure one attack by scores of `indpriv.leakage.leak`; InputError for other scores.

    epsilon: (n_examples,) of the attacked examples; NaN where unknown. tests: number of attacks
    that are compared with their ceilings, for Bonferroni's correction.
    """
    member, facts = scores.member, _facts(scores)
    errors, others = -scores.scores[member], -scores.scores[~member]
    named, mu = facts["identified"] == 1, facts["mu"]
    chance = float(facts["chance"].mean())
    parts = () if epsilon is None else _parts(epsilon)
    level = 1 - (1 - CONFIDENCE) / (tests * (1 + len(parts)))
    known = facts["label_found"][~np.isnan(facts["label_found"])]
    median = float(np.median(errors))
    return Reconstruction(
        method=scores.method,
        step=int(facts["step"][0]) if "step" in facts else None,
        n_examples=len(named),
        chance=chance,
        **_compared(named, mu, chance, level),
        label_found=float(known.mean()) if len(known) else None,
        error=median if np.isfinite(median) else None,
        close=float(np.mean(errors < CLOSE)),
        close_by_chance=float(np.mean(others < CLOSE)),
        iterations=float(np.median(facts["iterations"])),
        bins=tuple(
            ReconstructionBin(low, high, n, **_compared(named[inside], mu[inside], most, level))
            for low, high, inside in parts
            for n in [int(inside.sum())]
            for most in [min(1.0, len(named) / n * chance)]
        ),
    )


def _facts(scores: AttackScores) -> dict[str, FloatArray]:
    """(n_examples,) each: what `leak` says of the members."""
    if missing := {"identified", "chance", "mu", "label_found", "iterations"} - set(scores.details):
        raise refused("refusal.compared", "no_column", scores=scores, column=min(missing))
    member = scores.member
    facts = {name: values[member] for name, values in scores.details.items()}
    if not ((facts["mu"] >= 0).all() and (facts["chance"] > 0).all() and member.any()):
        raise refused("refusal.compared", "range", scores=scores)
    return facts


def reconstructions_of(
    every: Sequence[AttackScores], table: EpsilonTable | None = None
) -> tuple[Reconstruction, ...]:
    """Measure each attack at each step, in bins of the epsilons of a table.

    Units of several rows have no bins: their epsilon is not that of one row.
    """
    parts = list[AttackScores]()
    for scores in every:
        steps = scores.details.get("step", np.zeros(len(scores.scores)))
        parts += [scores.take(steps == step) for step in np.unique(steps)]
    by_id = None
    if parts and table is not None and not table.account.rows_per_unit:
        by_id = pd.Series(table.epsilon, index=table.example_ids.astype(str))
    found = []
    for scores in parts:
        epsilon = None
        if by_id is not None and scores.example_ids is not None:
            attacked = scores.example_ids[scores.member].astype(str)
            epsilon = np.asarray(by_id.reindex(attacked), np.float64)
        found.append(reconstruction_of(scores, epsilon, tests=len(parts)))
    return tuple(found)


def identification_ceiling(mu: FloatArray, chance: float) -> float:
    """Largest share of examples that any attack can name, if names come up by chance this often.

    It is the maximum of the mean of Phi(Phi^-1(nu) + mu) over all nu with the mean `chance`, in (0,
    1]. mu: (n,) what each example adds over the standard deviation of the noise, at least 0.

    >>> round(identification_ceiling(np.array([1.0, 1.0]), 0.01), 4)
    0.0924
    """
    sure = np.isinf(mu)
    rest = np.maximum(mu[~sure], _LEAST_MU)
    budget = chance * len(mu)  # those without noise need none of it
    if len(rest) <= budget:
        return 1.0

    def quantiles(log_slope: float) -> FloatArray:
        return -(log_slope + rest**2 / 2) / rest

    def excess(log_slope: float) -> float:
        return float(ndtr(quantiles(log_slope)).sum() - budget)

    reach = float((rest**2).max() + 40 * rest.max())
    best = quantiles(brentq(excess, -reach, reach, xtol=1e-13))
    return float(min(1.0, (sure.sum() + ndtr(best + rest).sum()) / len(mu) + 1e-9))


def _compared(named: BoolArray, mu: FloatArray, chance: float, level: float) -> dict[str, Any]:
    """The share named, its interval, its ceiling, and whether it is above that."""
    hits, n = int(named.sum()), len(named)
    ceiling = identification_ceiling(mu, chance)
    above = bool(clopper_pearson(hits, n, level).low > ceiling)
    found = {"identified": hits / n, "interval": clopper_pearson(hits, n)}
    return found | {"ceiling": ceiling, "above_ceiling": above}


def _parts(epsilon: FloatArray) -> tuple[tuple[float, float, BoolArray], ...]:
    """Bins of about as many examples each: low, high, and which are inside."""
    known = epsilon[~np.isnan(epsilon)]
    if not len(known):
        return ()
    inner = np.quantile(known, np.linspace(0, 1, _BINS + 1)[1:], method="inverted_cdf")
    edges = sorted({0.0, *inner.tolist()})
    found = []
    for low, high in pairwise(edges):
        inside = ((epsilon > low) | (low == 0.0)) & (epsilon <= high)
        if inside.any():
            found.append((low, high, inside))
    return tuple(found)


def _alarms(audit: Audit) -> Iterator[str]:
    for found in audit.reconstruction:
        if found.findings:
            yield text("sentence.reconstruction", "above", named=found.named)


def _find(run: AuditedRun) -> dict[str, Any]:
    return {"reconstruction": reconstructions_of(run.recorded.leakage, run.attacked_epsilons)}


FINDING = Finding(
    "reconstruction", _find, alarms=_alarms, watched="reconstructions above their ceilings"
)
