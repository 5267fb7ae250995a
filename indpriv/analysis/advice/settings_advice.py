"""How much more noise, or how low a clipping norm, would bring a quantile to a target. Sensitive.

The steps of one run are accounted anew under other settings, with the norms that they had. That is
exact for those norms, but a run with other settings has other norms: what is found here predicts
such a run, and bounds nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from indpriv._arrays import FloatArray
from indpriv._plain import AtLeastZero
from indpriv._progress import Advance
from indpriv.accountant.method import Method
from indpriv.accountant.per_example import table_for
from indpriv.analysis.advice.group_quantiles import HIGH, LOW, MIDDLE, Group, read_quantiles
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.norm_log import NormLog, clipped_lower, coarser, noisier

MOST_NOISE = 10.0  # times that of the run; more is not tried
_NOISE_RATIO = 1.01  # of neighbouring noise multipliers
_CLIPPING_SHARES = 100  # tried where norms are not rounded


@dataclass(frozen=True)
class Remedy:
    """How far one setting must move to bring the quantile of a group to the target.

    Attributes:
        factor: by which the setting of the run is multiplied; None if no factor that was tried is
            enough.
        factor_low, factor_high: of the ends of the quantile's interval: the smaller and the larger
            change; None likewise.
        quantile: predicted under `factor`.
        worst_case_epsilon: the guarantee of a run under `factor`.
    """

    factor: AtLeastZero | None
    factor_low: AtLeastZero | None
    factor_high: AtLeastZero | None
    quantile: AtLeastZero | None
    worst_case_epsilon: AtLeastZero | None


@dataclass
class _Trials:
    """Quantiles of all groups under settings that lower them more and more.

    Attributes:
        factors: of each trial; the first is 1, the run as it was.
        table_under: the account under a factor.
        groups, quantile: what is read off it.
        advance: called with 1 for each account.
        known: what was read, and the worst case, by the number of the trial.
    """

    factors: FloatArray
    table_under: Callable[[float], EpsilonTable]
    groups: Sequence[Group]
    quantile: float
    advance: Advance
    known: dict[int, tuple[FloatArray, float]] = field(default_factory=dict)

    def reading(self, trial: int) -> tuple[FloatArray, float]:
        """(n_groups, 3) quantiles, and the worst case."""
        if trial not in self.known:
            table = self.table_under(float(self.factors[trial]))
            found = read_quantiles(table, self.groups, self.quantile)
            self.known[trial] = found, table.worst_case_epsilon
            self.advance(1)
        return self.known[trial]

    def first(self, group: int, end: int, target: float) -> int | None:
        """The first trial that brings an end of a group's quantile to the target."""

        def reached(trial: int) -> bool:
            return bool(self.reading(trial)[0][group, end] <= target)

        found = bisect_left(range(len(self.factors)), True, key=reached)
        return found if found < len(self.factors) else None

    def remedy(self, group: int, target: float) -> Remedy:
        """What brings one group to the target."""
        low, chosen, high = (self.first(group, end, target) for end in (LOW, MIDDLE, HIGH))
        quantile = worst = None
        if chosen is not None:
            found, worst = self.reading(chosen)
            quantile = float(found[group, MIDDLE])
        return Remedy(
            factor=self._factor(chosen),
            factor_low=self._factor(low),
            factor_high=self._factor(high),
            quantile=quantile,
            worst_case_epsilon=worst,
        )

    def _factor(self, trial: int | None) -> float | None:
        return None if trial is None else float(self.factors[trial])


def remedies(
    log: NormLog,
    method: Method,
    table: EpsilonTable,
    groups: Sequence[Group],
    *,
    target: float,
    quantile: float,
    clipping: bool,
    advance: Advance,
) -> tuple[list[Remedy], list[Remedy | None]]:
    """More noise, and a lower clipping norm under the same noise, for each group.

    Args:
        log: of the run.
        method: how to account it.
        table: its account by `method`.
        groups: positions are those of the table.
        target: largest epsilon that the quantile may have, positive.
        quantile: in (0, 1).
        clipping: whether a lower clipping norm is looked for.
        advance: called with 1 after each account.

    Returns:
        noise_multiplier in steps of 1 %, up to MOST_NOISE times that of the run; max_grad_norm in
        steps of the log's rounding.
    """
    log = _in_levels(log)

    def trials(factors: FloatArray, view: Callable[[NormLog, float], NormLog]) -> _Trials:
        known = {0: (read_quantiles(table, groups, quantile), table.worst_case_epsilon)}
        account = _accounting(log, method, view)
        return _Trials(factors, account, groups, quantile, advance, known)

    more = trials(_noise_factors(), noisier)
    noise = [more.remedy(group, target) for group in range(len(groups))]
    if not clipping:
        return noise, [None] * len(groups)
    lower = trials(_clipping_shares(log), clipped_lower)
    return noise, [lower.remedy(group, target) for group in range(len(groups))]


def _in_levels(log: NormLog) -> NormLog:
    """Norms in full rounded up to shares of max_grad_norm, whose accounts take far less time.

    What is found can be up to a share too high, never too low for these norms.
    """
    if log.levels is not None or log.batch_norms is not None:
        return log
    return coarser(log, 1 / _CLIPPING_SHARES)


def _accounting(
    log: NormLog, method: Method, view: Callable[[NormLog, float], NormLog]
) -> Callable[[float], EpsilonTable]:
    return lambda factor: table_for(view(log, factor), method)


def _noise_factors() -> FloatArray:
    steps = int(np.floor(np.log(MOST_NOISE) / np.log(_NOISE_RATIO)))
    return np.asarray(_NOISE_RATIO ** np.arange(steps + 1))


def _clipping_shares(log: NormLog) -> FloatArray:
    """Shares of max_grad_norm from 1 down: all levels of the log above 0."""
    if log.levels is not None:
        return np.asarray(log.levels.fractions[:0:-1])
    return np.arange(_CLIPPING_SHARES, 0, -1) / _CLIPPING_SHARES


def most_accounts(log: NormLog) -> int:
    """The most accounts that `remedies` can need."""
    return len(_noise_factors()) + len(_clipping_shares(log)) - 2
