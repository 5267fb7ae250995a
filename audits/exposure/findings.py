"""Exposure of secrets beside what epsilon allows. Sensitive.

A secret is drawn uniformly from its candidates, and its owner contributes every row that holds it.
Without the owner, the model does not depend on the secret, so that the share of candidates that
rank at least as high is at most u with probability u. With (epsilon, delta)-indistinguishability of
the runs with and without the owner, over secrets and runs,

    P[share <= u] <= e^epsilon u + delta.

Hence the mean exposure has a ceiling (`mean_exposure_ceiling`), and e^epsilon share + delta is a
p-value of the guarantee. Secrets of one model share its noise, so their p-values are combined by
twice their mean, which is valid whatever their dependence (Vovk and Wang 2020, arXiv:1212.4966v4).

The epsilon is that of the owner with all rows of the secret, never that of one row. The worst case
is a guarantee, and a secret beyond it a finding; an individual epsilon describes one run, and its
ceiling is a place to look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pandas as pd
from scipy import stats

from audits.exposure.ranks import Exposures
from audits.intervals import student_interval
from indpriv._plain import Count, Delta, Epsilon, PValue, figure
from indpriv._types import FloatArray
from indpriv.analysis.statistics import CONFIDENCE, Span
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError

CHANCE = 1 / math.log(2)  # mean exposure in bits of a secret that no row holds, of many candidates
_Bits = Annotated[float, figure(".2f", "bits", ge=0)]


@dataclass(frozen=True)
class ExposureRow:
    """The secrets with one number of rows.

    Attributes:
        rows: number of rows of the training data with each secret; 0 of controls.
        n_secrets: number of secrets.
        mean: mean exposure in bits.
        interval: of that mean over secrets of this model, at 95 percent (Student's t); None of one.
        extracted: number of secrets that rank first among all candidates.
        extrapolated: number of secrets whose exposure is extrapolated.
        worst_case_epsilon: of an owner with that number of rows; None without DP.
        ceiling: largest mean exposure in bits that the worst case allows; None without DP.
        mean_epsilon: mean individual epsilon of the owners; None without DP.
        individual_ceiling: mean of the mean exposures that individual epsilons would allow if they
            were guarantees; None without DP.
        p_value: of the guarantee, by these secrets; None without DP and of controls.
        above_ceiling: the secrets refute the guarantee, corrected for the numbers of rows.
    """

    rows: Count
    n_secrets: Count
    mean: _Bits
    interval: Span | None
    extracted: Count
    extrapolated: Count
    worst_case_epsilon: Epsilon | None
    ceiling: _Bits | None
    mean_epsilon: Epsilon | None
    individual_ceiling: _Bits | None
    p_value: PValue | None
    above_ceiling: bool


@dataclass(frozen=True)
class ExposureFindings:
    """Exposure of the secrets of one model.

    Attributes:
        n_candidates: what each secret could have been.
        delta: of the epsilons; None without DP.
        rows: by number of rows, controls first.
        control_p_value: that controls are exposed otherwise than by chance (Kolmogorov and Smirnov,
            shares against the uniform law); None with fewer than eight controls.
    """

    n_candidates: Count
    delta: Delta | None
    rows: tuple[ExposureRow, ...]
    control_p_value: PValue | None

    @property
    def findings(self) -> int:
        """Number of rows whose secrets refute the guarantee."""
        return sum(row.above_ceiling for row in self.rows)


def mean_exposure_ceiling(epsilon: float, delta: float, n_candidates: float) -> float:
    """Largest mean exposure in bits of a secret under (epsilon, delta).

    It is the integral of min(1, e^epsilon 2^-t + delta) over t from 0 to log2(n_candidates).

    Args:
        epsilon: of the owner of the secret, with all its rows.
        delta: of that epsilon, in [0, 1).
        n_candidates: what the secret could have been, at least 2.

    >>> round(mean_exposure_ceiling(0.0, 0.0, 10_000), 4), mean_exposure_ceiling(50.0, 0.0, 1024)
    (1.4426, 10.0)
    """
    most = math.log2(n_candidates)
    sure = (epsilon - math.log1p(-delta)) / math.log(2)  # up to here the bound is 1
    if sure >= most:
        return most
    tail = (1 - delta - math.exp(epsilon) / n_candidates) / math.log(2)
    return min(most, sure + tail + delta * (most - sure))


def measure_exposure(exposures: Exposures, table: EpsilonTable | None = None) -> ExposureFindings:
    """Exposure by number of rows, beside the epsilons of the owners.

    Args:
        exposures: of the secrets in one model.
        table: epsilons of the run by unit, whose ids are the owners; None without DP.

    Raises:
        InputError: an inserted secret whose owner is not in the table, or has another number of
            rows there.

    >>> found = Exposures.from_ranks(["anna", "ben"], [16, 1], [1, 512], 1024)
    >>> [(row.rows, row.mean, row.extracted) for row in measure_exposure(found).rows]
    [(1, 1.0, 0), (16, 10.0, 1)]
    """
    numbers = np.unique(exposures.rows)
    tests = int((numbers > 0).sum())
    epsilons = None if table is None else _of_owners(exposures, table)
    delta = None if table is None else table.account.delta
    rows = [_row(exposures, int(rows), epsilons, delta, tests) for rows in numbers]
    controls = exposures.share[~exposures.inserted]
    return ExposureFindings(
        n_candidates=exposures.n_candidates,
        delta=delta,
        rows=tuple(rows),
        control_p_value=float(stats.kstest(controls, "uniform").pvalue)
        if len(controls) >= 8
        else None,
    )


def exposure_table(exposures: Exposures, table: EpsilonTable | None = None) -> pd.DataFrame:
    """One row for each secret: its exposure, its owner's epsilon, and what that would allow.

    Columns: owner, rows, exposure, extrapolated, epsilon and ceiling (mean exposure in bits that
    this epsilon would allow as a guarantee); the last two are NaN of controls and without DP.
    Arguments and errors as `measure_exposure`.
    """
    frame = pd.DataFrame(
        {
            "owner": exposures.ids,
            "rows": exposures.rows,
            "exposure": exposures.exposure,
            "extrapolated": exposures.extrapolated,
            "epsilon": np.nan,
            "ceiling": np.nan,
        }
    )
    if table is not None:
        frame["epsilon"], _ = _of_owners(exposures, table)
        frame["ceiling"] = [
            mean_exposure_ceiling(each, table.account.delta, exposures.n_candidates)
            for each in frame["epsilon"]
        ]
    return frame


def _row(
    exposures: Exposures,
    rows: int,
    epsilons: tuple[FloatArray, FloatArray] | None,
    delta: float | None,
    tests: int,
) -> ExposureRow:
    mine = exposures.rows == rows
    bits, n = exposures.exposure[mine], exposures.n_candidates
    worst = mean_epsilon = ceiling = individual = p_value = None
    if epsilons is not None and delta is not None and rows:
        each, worst = epsilons[0][mine], float(epsilons[1][mine].max())
        mean_epsilon = float(each.mean())
        ceiling = mean_exposure_ceiling(worst, delta, n)
        individual = float(np.mean([mean_exposure_ceiling(one, delta, n) for one in each]))
        with np.errstate(over="ignore"):
            separate = np.minimum(1.0, np.exp(worst) * exposures.share[mine] + delta)
        p_value = min(1.0, (2 if len(bits) > 1 else 1) * float(separate.mean()))
    return ExposureRow(
        rows=rows,
        n_secrets=len(bits),
        mean=float(bits.mean()),
        interval=student_interval(bits, 0.0, math.log2(n)),
        extracted=int((exposures.share[mine] * n < 1.5).sum()),
        extrapolated=int(exposures.extrapolated[mine].sum()),
        worst_case_epsilon=worst,
        ceiling=ceiling,
        mean_epsilon=mean_epsilon,
        individual_ceiling=individual,
        p_value=p_value,
        above_ceiling=p_value is not None and p_value <= (1 - CONFIDENCE) / tests,
    )


def _of_owners(exposures: Exposures, table: EpsilonTable) -> tuple[FloatArray, FloatArray]:
    """(n,) individual and worst-case epsilon of each secret's owner; NaN of controls."""
    place = pd.Index(np.asarray(table.example_ids).astype(str)).get_indexer(
        exposures.ids.astype(str)
    )
    inserted = exposures.inserted
    if (place[inserted] < 0).any():
        missing = exposures.ids[inserted][place[inserted] < 0][0]
        raise InputError(
            f"the run has no unit {missing}, whose secret was inserted; make each owner "
            "of a secret a unit of the run (unit_ids)"
        )
    rows = table.details.get("n_rows", np.ones(len(table.epsilon), dtype=np.int64))
    worst = table.details.get("unit_worst_case", np.full(len(rows), table.worst_case_epsilon))
    if (differ := rows[place[inserted]] != exposures.rows[inserted]).any():
        raise InputError(
            f"{int(differ.sum())} owners of secrets have another number of rows in the run than "
            "the secrets; an owner's rows are those of the secret and no others"
        )
    epsilon, limit = np.full((2, len(place)), np.nan)
    epsilon[inserted], limit[inserted] = table.epsilon[place[inserted]], worst[place[inserted]]
    return epsilon, limit
