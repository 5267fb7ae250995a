"""What the runs of a study say of the account: figures of reports/validation/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from indpriv._plain import to_json
from indpriv.analysis.attacks.evidence import Identity, agree, identities, separation_of
from indpriv.analysis.attacks.rates import FALSE_POSITIVE_RATES, separation
from indpriv.analysis.statistics import CONFIDENCE
from indpriv.errors import InputError
from reports.validation.study import Study, StudyData

BINS = 8
RATES = (0.01, 0.1)  # of false positives
TOLERANCE = 0.05  # of mu: what the design asks for
POWER = 2.0  # standard errors that must fit into it, or a bin says nothing about it


def read_runs(study: Study, folder: Path) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Evidence of all targets in all runs; their positions; and simulated evidence."""
    targets = StudyData.load(study).targets
    parts, example, simulated = [], [], []
    for number in range(study.runs):
        with np.load(folder / f"run-{number:03}.npz") as file:
            run = dict(file)
        rows = np.isin(run["example"], targets)
        example.append(run["example"][rows])
        simulated.append(run["simulated"][rows])
        both = run["with_example"], run["without_example"]
        predicted = pd.DataFrame(
            dict(zip(("with_example", "without_example"), both, strict=True))
            | {"separation": sum(both)}
            | dict(zip(run["orders"].tolist(), run["renyi"], strict=True))
        ).iloc[rows]
        seen = {name: run[name][rows] for name in ("evidence", "member")}
        parts.append(predicted.assign(**seen, run=number))
    return pd.concat(parts), np.concatenate(example), np.concatenate(simulated)


def true_positives(scores: np.ndarray, member: np.ndarray, rate: float) -> float:
    """Share of members above the threshold that this share of others exceeds."""
    return float((scores[member] > np.quantile(scores[~member], 1 - rate)).mean())


@dataclass(frozen=True)
class Bin:
    """Targets of like epsilon, in all runs."""

    epsilon: float
    separation: Identity
    rates: tuple[tuple[float, float], ...]

    @property
    def mu(self) -> float:
        """Observed mu: the root of the separation, 0 if that is negative."""
        return float(np.sqrt(max(0.0, self.separation.mean)))

    @property
    def predicted(self) -> float:
        """The mu of the account."""
        return float(np.sqrt(self.separation.expected))

    @property
    def error(self) -> float:
        """Standard error of the observed mu, by the delta method at the predicted one."""
        return self.separation.standard_error / (2 * self.predicted)

    @property
    def off(self) -> float:
        """How far the observed mu is from that of the account, as a share of it."""
        return self.mu / self.predicted - 1

    @property
    def has_power(self) -> bool:
        """Whether a difference of 5 % could be seen."""
        return POWER * self.error / self.predicted <= TOLERANCE


def bins(evidence: pd.DataFrame, simulated: np.ndarray, epsilon: np.ndarray) -> Iterator[Bin]:
    """Bins of about equal size, from small to large epsilon."""
    edges = np.unique(np.quantile(epsilon, np.linspace(0, 1, BINS + 1)))
    number = np.clip(np.searchsorted(edges, epsilon, side="right") - 1, 0, len(edges) - 2)
    for k in range(len(edges) - 1):
        rows = number == k
        part = evidence[rows]
        scores, member = part["evidence"].to_numpy(), part["member"].to_numpy()
        yield Bin(
            float(epsilon[rows].mean()),
            separation_of(part),
            tuple(
                (
                    true_positives(simulated[rows], member, rate),
                    true_positives(scores, member, rate),
                )
                for rate in RATES
            ),
        )


def figures(study: Study, folder: Path) -> dict[str, Any]:
    """Identities, bins of epsilon, and rates of the attacker over runs."""
    evidence, example, simulated = read_runs(study, folder)
    *epsilons, worst = np.load(folder / "epsilon.npy").tolist()
    found = identities(evidence)
    return {
        "worst_case": worst,
        "agree": agree(found),
        "identities": [{**to_json(one), "z": one.z} for one in found],
        "bins": [
            {
                "epsilon": one.epsilon,
                "mu_predicted": one.predicted,
                "mu_observed": one.mu,
                "mu_error": one.error,
                "has_power": one.has_power,
                "within": abs(one.off) <= TOLERANCE,
                "rates": one.rates,
            }
            for one in bins(evidence, simulated, np.array(epsilons)[example])
        ],
        "rates": {
            "observed": rates(evidence, evidence["evidence"].to_numpy()),
            "predicted": rates(evidence, simulated),
        },
    }


def rates(evidence: pd.DataFrame, scores: np.ndarray) -> dict[str, Any]:
    """AUC and true-positive rates at thresholds for all runs, with a jackknife over runs.

    Members are compared with the others of all runs. Those of the same run alone would not do: their
    scores know the noise that all of a run share, so that ranks within it give memberships away.
    """
    run, member = evidence["run"].to_numpy(), evidence["member"].to_numpy()
    n_runs = len(np.unique(run))
    every = _rates(scores, member)
    kept = (run != number for number in range(n_runs))
    left_out = np.array([_rates(scores[rows], member[rows]) for rows in kept])
    error = np.sqrt((n_runs - 1) * left_out.var(axis=0))
    width = stats.t.ppf((1 + CONFIDENCE) / 2, n_runs - 1) * error
    auc, *spans = [
        {"low": low, "high": high}
        for low, high in zip((every - width).tolist(), (every + width).tolist(), strict=True)
    ]
    keys = [f"{rate:g}" for rate in FALSE_POSITIVE_RATES]
    return {
        "auc": float(every[0]),
        "auc_interval": auc,
        "tpr_at_fpr": dict(zip(keys, every[1:].tolist(), strict=True)),
        "tpr_at_fpr_intervals": dict(zip(keys, spans, strict=True)),
    }


def _rates(scores: np.ndarray, member: np.ndarray) -> np.ndarray:
    found = {row["rate"]: row["value"] for row in separation(scores[member], scores[~member])}
    if not found:
        raise InputError("these runs have no members, or no others")
    return np.array(
        [found[name] for name in ("auc", *(f"tpr_{rate:g}" for rate in FALSE_POSITIVE_RATES))]
    )
