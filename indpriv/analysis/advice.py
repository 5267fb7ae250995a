"""What a curator is advised of one run: for each group, what would lower its epsilons. Sensitive.

Section 3.4 of Yu, Kamath, Kulkarni, Liu, Yin and Zhang (arXiv 2206.02617v7) names this use of
individual epsilons: to see, while data are collected, which groups need more records.

The interval of a quantile treats the examples of a group as a sample and assumes no law of epsilon:
its ends are order statistics, whose ranks follow from the binomial law (David and Nagaraja 2003,
section 7.1). Of a small group the upper end can lie beyond its largest epsilon; the worst case is
then the end.

The steps of the run are accounted anew under other settings, with the norms that they had. That is
exact for those norms, but a run with other settings has other norms: what is found here predicts
such a run, and bounds nothing.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy import stats

from indpriv._facts import text
from indpriv._plain import to_json
from indpriv._types import FloatArray, IntArray, Progress
from indpriv.accountant.account import table_for
from indpriv.accountant.method import Method
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.statistics import CONFIDENCE, Interval
from indpriv.analysis.summary import SENSITIVE, record
from indpriv.epsilon_table import DISCLAIMER, EpsilonTable
from indpriv.norm_log.norm_log import NormLog, clipped_lower, coarser, noisier

Remedy: Any = record("remedy")
GroupAdvice: Any = record("group_advice")
ALL = "all"  # name of the group of all examples
LOW, MIDDLE, HIGH = range(3)  # columns of a reading
MOST_NOISE = 10.0  # times that of the run; more is not tried
_NOISE_RATIO = 1.01  # of neighbouring noise multipliers
_CLIPPING_SHARES = 100  # tried where norms are not rounded


@dataclass(frozen=True)
class Group:
    """Positions in a table of all examples ("all", by None), or of those with a value of `by`."""

    by: str | None
    name: str
    members: IntArray


def ranks(n: int, quantile: float) -> tuple[int, int, int]:
    """Ranks of a quantile of n values and of the ends of its interval; 0 and n + 1 are beyond.

    The quantile is the smallest value that at least this share of the values do not exceed.

    >>> ranks(1000, 0.95), ranks(20, 0.95)
    ((936, 950, 964), (17, 19, 21))
    """
    tail = (1 - CONFIDENCE) / 2
    low, high = (int(stats.binom.ppf(p, n, quantile)) for p in (tail, 1 - tail))
    return low, int(np.ceil(n * quantile - 1e-9)), high + 1


def read_quantiles(table: EpsilonTable, groups: Sequence[Group], quantile: float) -> FloatArray:
    """(n_groups, 3): lower end of the interval, quantile, upper end."""
    found = np.empty((len(groups), 3))
    for row, group in enumerate(groups):
        values = np.sort(table.epsilon[group.members])
        ordered = np.concatenate([[0.0], values, [table.worst_case_epsilon]])
        found[row] = ordered[list(ranks(len(values), quantile))]
    return found


def remedies(
    log: NormLog,
    method: Method,
    table: EpsilonTable,
    groups: Sequence[Group],
    *,
    target: float,
    quantile: float,
    clipping: bool,
    progress: Progress,
) -> tuple[list[Remedy], list[Remedy | None]]:
    """More noise, and a lower clipping norm under the same noise, for each group of a table.

    noise_multiplier is tried in steps of 1 %, up to MOST_NOISE times that of the run, max_grad_norm
    in steps of the log's rounding and only if `clipping`. The table is the log's account by
    `method`; `progress` is told of each further one, and of the most that can be needed.
    """
    if not log.levels.rounding and log.batch_norms is None:
        # Norms in full rounded up to shares of max_grad_norm, whose accounts take far less time:
        # what is found can be up to a share too high, never too low for these norms.
        log = coarser(log, 1 / _CLIPPING_SHARES)
    steps = int(np.floor(np.log(MOST_NOISE) / np.log(_NOISE_RATIO)))
    noise = np.asarray(_NOISE_RATIO ** np.arange(steps + 1))
    clips = np.arange(_CLIPPING_SHARES, 0, -1) / _CLIPPING_SHARES  # shares of max_grad_norm
    if log.levels.rounding:
        clips = np.asarray(log.levels.fractions[:0:-1])  # all levels above 0
    done, most = itertools.count(1), len(noise) + len(clips) - 2

    def under(view: Callable[[NormLog, float], NormLog], factors: FloatArray) -> list[Remedy]:
        """Of factors that lower epsilons more and more; the first is 1, the run as it was."""

        @cache
        def reading(trial: int) -> tuple[FloatArray, float]:
            """(n_groups, 3) quantiles, and the worst case."""
            account = table
            if trial:
                account = table_for(view(log, float(factors[trial])), method)
                progress(next(done), most)
            return read_quantiles(account, groups, quantile), account.worst_case_epsilon

        def reached(group: int, end: int) -> int:
            """The first trial that brings an end of the group's interval to the target."""
            return bisect_left(
                range(len(factors)), True, key=lambda k: bool(reading(k)[0][group, end] <= target)
            )

        found, tried = [], [*factors.tolist(), None]
        for group in range(len(groups)):
            low, chosen, high = (reached(group, end) for end in (LOW, MIDDLE, HIGH))
            quantiles, worst = (None, None) if chosen == len(factors) else reading(chosen)
            met = None if quantiles is None else float(quantiles[group, MIDDLE])
            found.append(Remedy(tried[chosen], tried[low], tried[high], met, worst))
        return found

    found = under(noisier, noise)
    return found, [*under(clipped_lower, clips)] if clipping else [None] * len(groups)


class _Advice:
    @property
    def of_settings(self: Any) -> tuple[str, ...]:
        """What the noise and the clipping norms assume, in sentences."""
        worst = self.guarantee.worst_case_epsilon
        at_worst = any(one.quantile >= worst * (1 - 1e-9) for one in self.groups)
        cases = ("same_norms", "same_noise", "at_worst_case", "of_a_sample")
        norms, noise, worst_case, sample = (text("sentence.advice", case) for case in cases)
        return norms, self.unclipped or noise, *([worst_case] if at_worst else []), sample

    assumptions = of_settings  # what all figures assume

    def to_json(self: Any) -> dict[str, Any]:
        """The content of advice.json."""
        fixed = {
            "sensitive": SENSITIVE,
            "disclaimer": DISCLAIMER,
            "prediction": text("sentence.advice", "prediction"),
        }
        return {**fixed, **to_json(self), "assumptions": list(self.assumptions)}


Advice: Any = record("advice", _Advice)


def advised(
    table: EpsilonTable,
    groups: Sequence[Group],
    quantile: float,
    found: tuple[Sequence[Remedy], Sequence[Remedy | None]],
) -> tuple[GroupAdvice, ...]:
    """The advice for each group; found: what `remedies` found for them."""
    rows = [
        GroupAdvice(
            by=group.by,
            name=group.name,
            n=len(group.members),
            too_small=len(group.members) < MIN_GROUP,
            quantile=float(ends[MIDDLE]),
            interval=Interval(float(ends[LOW]), float(ends[HIGH])),
            noise=noise,
            clipping=clipping,
        )
        for group, ends, noise, clipping in zip(
            groups, read_quantiles(table, groups, quantile), *found, strict=True
        )
    ]
    columns = list(dict.fromkeys(group.by for group in groups))
    return tuple(sorted(rows, key=lambda one: (columns.index(one.by), -one.quantile)))
