"""Does an account hold for the attacker that it assumes? Evidence beside its prediction. Sensitive.

The attacker's evidence on an example is a sum of log-likelihood ratios (`indpriv.attack_scores`),
its prediction a sum of divergences (`indpriv.accountant.risk`). With L the evidence, and
K, K' and R the sums of KL(P||Q), KL(Q||P) and the Rényi divergence of order a:

    with the example     E[L - K] = 0,   E[exp(-L)] = 1,  E[exp((a - 1)(L - R))] = 1
    without the example  E[L + K'] = 0,  E[exp(L)] = 1,   E[exp(a L - (a - 1) R)] = 1

Each is a martingale with known increments, so it holds although norms depend on earlier noise (cf.
Feldman and Zrnic 2021, arXiv:2008.11193). Scores of one run share its noise: errors are those of
independent runs, never of examples.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from indpriv._types import BoolArray, FloatArray, IntArray
from indpriv.analysis.summary import record
from indpriv.errors import InputError

SIGNIFICANCE = 1e-3  # of all identities together
_TELLING = 6.0  # standard errors that decide, with enough runs
_NAMES = ["with_example", "without_example", "separation", "evidence", "member", "run"]
_ONE_RUN = "members, or others, are of one run, whose noise they share; pass several runs"
_ONE_SIDE = "the evidence has no members, or no others; both sides are compared"


class _Identity:
    @property
    def z(self: Any) -> float:
        """How many standard errors the mean is off.

        If the account holds, about Student's t with n_runs - 1 degrees of freedom. Infinite where
        a mean is beyond all floats, which has no error either.
        """
        z = float((self.mean - self.expected) / max(self.standard_error, 1e-300))
        return z if np.isfinite(self.standard_error) else np.inf


Identity: Any = record("identity", _Identity)


def identities(evidence: pd.DataFrame) -> tuple[Identity, ...]:
    """Every identity over all runs; the last one compares members with others of the same run.

    evidence: the columns of `predicted_evidence` of n examples of many runs, and evidence, what the
    strongest attacker has, as log-likelihood ratios in nats; member, whether the example took part
    in its run; run, the number of that run from 0 on, whose account predicts the evidence.
    """
    if evidence["run"].nunique() < 2:
        raise InputError(_ONE_RUN)
    found = []
    with np.errstate(over="ignore", invalid="ignore"):
        for name, values, expected, rows in _terms(evidence):
            if not len(values):
                raise InputError(_ONE_SIDE)
            mean, run = float(values.mean()), evidence["run"].to_numpy()[rows]
            error = _standard_error(values - mean, run) / len(values)
            found.append(Identity(name, mean, expected, error, len(np.unique(run))))
        return (*found, separation_of(evidence))


def _standard_error(excess: FloatArray, run: IntArray) -> float:
    """Of a sum of centred values, from the spread of its parts by run."""
    by_run = np.bincount(np.unique(run, return_inverse=True)[1], weights=excess)
    if len(by_run) < 2:
        raise InputError(_ONE_RUN)
    return float(np.sqrt(len(by_run) / (len(by_run) - 1) * np.sum(by_run**2)))


def agree(found: Sequence[Identity]) -> bool:
    """Whether no identity deviates at the level `SIGNIFICANCE`, after correction for their number.

    Deviations are compared with Student's t, whose degrees of freedom are those of the runs.
    """
    p_values = [2 * float(special.stdtr(one.n_runs - 1, -abs(one.z))) for one in found]
    return not p_values or min(p_values) * len(p_values) >= SIGNIFICANCE


def too_few_runs(found: Sequence[Identity]) -> tuple[int, float, int] | None:
    """Runs, the z that they would need to decide, and how many decide at a z of 6; else None."""
    if not found:
        return None

    def needed(runs: int) -> float:
        return float(-special.stdtrit(runs - 1, SIGNIFICANCE / len(found) / 2))

    runs = min(one.n_runs for one in found)
    enough = next(n for n in itertools.count(2) if needed(n) <= _TELLING)
    return None if runs >= enough else (runs, needed(runs), enough)


def separation_of(evidence: pd.DataFrame) -> Identity:
    """Mean L over members less that over others, which cancels noise that a run's examples share.

    Expected is the mean of K over members plus that of K' over others. For a Gaussian mechanism,
    both are the square of its mu.
    """
    names = ("evidence", "member", "run", "with_example", "without_example")
    told, member, run, with_it, without = (evidence[name].to_numpy() for name in names)
    observed, expected, excess = 0.0, 0.0, np.zeros(len(member))
    for side, sign, prediction in ((member, 1.0, with_it), (~member, -1.0, without)):
        if not side.any():
            raise InputError(_ONE_SIDE)
        observed += sign * float(told[side].mean())
        expected += float(prediction[side].mean())
        off = told[side] - sign * prediction[side]
        excess[side] = sign * (off - off.mean()) / side.sum()
    error, runs = _standard_error(excess, run), len(np.unique(run))
    return Identity("with less without: L", observed, expected, error, runs)


def _terms(evidence: pd.DataFrame) -> Iterator[tuple[str, FloatArray, float, BoolArray]]:
    """Name, values, their predicted mean, and the rows that they are of."""
    member = evidence["member"].to_numpy()
    (inside, with_it), (outside, without) = (
        evidence.loc[side, ["evidence", of]].to_numpy().T
        for side, of in ((member, "with_example"), (~member, "without_example"))
    )
    yield "with: L - K", inside - with_it, 0.0, member
    yield "without: L + K'", outside + without, 0.0, ~member
    yield "with: exp(-L)", np.exp(-inside), 1.0, member
    yield "without: exp(L)", np.exp(outside), 1.0, ~member
    orders: Any = evidence.columns.difference(_NAMES, sort=False)
    for order in orders:
        renyi = evidence[order].to_numpy()
        moment = np.exp((order - 1) * (inside - renyi[member]))
        yield f"with: exp((a - 1)(L - R)), a = {order:g}", moment, 1.0, member
        moment = np.exp(order * outside - (order - 1) * renyi[~member])
        yield f"without: exp(a L - (a - 1) R), a = {order:g}", moment, 1.0, ~member
