"""What a curator is advised of one run: for each group, what would lower its epsilons. Sensitive.

Section 3.4 of Yu, Kamath, Kulkarni, Liu, Yin and Zhang (arXiv 2206.02617v7) names this use of
individual epsilons: to see, while data are collected, which groups need more records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from indpriv._plain import AtLeastZero, Count, Share, to_json
from indpriv._progress import Advance
from indpriv.accountant.method import Method
from indpriv.analysis.advice.group_quantiles import HIGH, LOW, MIDDLE, Group, read_quantiles
from indpriv.analysis.advice.settings_advice import Remedy, remedies
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.guarantee import Guarantee
from indpriv.analysis.run_facts import Range
from indpriv.analysis.statistics.bootstrap import Interval
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER, EpsilonTable
from indpriv.norm_log.norm_log import NormLog

PREDICTION = (
    "The settings here are predictions of a run to come and promise nothing: only the audit of "
    "that run can say what its epsilons are, and only its worst case is a guarantee."
)
ASSUMES_NORMS = (
    "Noise and clipping norm: the steps of this run, accounted anew under the other setting. That "
    "assumes that gradient norms stay what they were. With more noise a model usually fits less "
    "well and its norms are larger, so the epsilons of such a run can be above the prediction."
)
SAME_NOISE = (
    "Clipping norm: a lower one under the same standard deviation of noise. Only examples whose "
    "norms are above it gain. To lower it at the same noise multiplier lowers the noise as well, "
    "and then no epsilon falls."
)
AT_WORST_CASE = (
    "Where a group's figure is the worst case itself, more of it than the quantile leaves out is "
    "clipped in every step, and only a setting that brings the worst case to the target helps."
)
OF_A_SAMPLE = (
    "Intervals here (95 %) are of the quantile in a larger population, if the people of a group "
    "are a random sample of it. They do not say how another run of the same settings would differ."
)


@dataclass(frozen=True)
class GroupAdvice:
    """What would bring one group to the target.

    Attributes:
        by: the column; None for all examples.
        name: of the group, or "all".
        n: number of its examples, or units.
        too_small: fewer than ten.
        quantile: of its epsilons in this run.
        interval: of the quantile.
        noise: the noise multiplier, as a multiple of the run's.
        clipping: the clipping norm under the same noise, as a share of the run's; None where the
            run does not clip each gradient as a whole.
    """

    by: str | None
    name: str
    n: Count
    too_small: bool
    quantile: AtLeastZero
    interval: Interval
    noise: Remedy
    clipping: Remedy | None


@dataclass(frozen=True)
class Advice:
    """What a curator is advised of one run.

    Attributes:
        name: of the run.
        meaning: what every epsilon here means.
        plural: what epsilons are of.
        claim: of the individual epsilons of this run. claim_reason: why.
        target: largest epsilon that the quantile of a group is to have.
        quantile: which one, e.g. 0.95.
        guarantee: of this run.
        noise_multiplier, max_grad_norm: of this run.
        unclipped: why no clipping norm is advised; "" if one is.
        groups: all examples first; then by column, the largest quantile first.
    """

    name: str
    meaning: str
    plural: str
    claim: str
    claim_reason: str
    target: AtLeastZero
    quantile: Share
    guarantee: Guarantee
    noise_multiplier: Range
    max_grad_norm: Range
    unclipped: str
    groups: tuple[GroupAdvice, ...]

    @property
    def of_settings(self) -> tuple[str, ...]:
        """What the noise and the clipping norms assume, in sentences."""
        worst = self.guarantee.worst_case_epsilon
        at_worst = any(one.quantile >= worst * (1 - 1e-9) for one in self.groups)
        return (
            ASSUMES_NORMS,
            self.unclipped or SAME_NOISE,
            *([AT_WORST_CASE] if at_worst else []),
            OF_A_SAMPLE,
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What all figures assume, in sentences."""
        return self.of_settings

    def to_json(self) -> dict[str, Any]:
        """The content of advice.json."""
        fixed = {"sensitive": SENSITIVE, "disclaimer": DISCLAIMER, "prediction": PREDICTION}
        return {**fixed, **to_json(self), "assumptions": list(self.assumptions)}


def advise(
    log: NormLog,
    method: Method,
    table: EpsilonTable,
    groups: Sequence[Group],
    guarantee: Guarantee,
    *,
    name: str,
    target: float,
    quantile: float,
    unclipped: str,
    advance: Advance,
) -> Advice:
    """Advise on one run; arguments are those of `Advice` and of `remedies`."""
    noise, clipping = remedies(
        log,
        method,
        table,
        groups,
        target=target,
        quantile=quantile,
        clipping=not unclipped,
        advance=advance,
    )
    found = [
        GroupAdvice(
            by=group.by,
            name=group.name,
            n=len(group.members),
            too_small=len(group.members) < MIN_GROUP,
            quantile=float(ends[MIDDLE]),
            interval=Interval(float(ends[LOW]), float(ends[HIGH])),
            noise=more,
            clipping=lower,
        )
        for group, ends, more, lower in zip(
            groups, read_quantiles(table, groups, quantile), noise, clipping, strict=True
        )
    ]
    columns = list(dict.fromkeys(group.by for group in groups))
    found.sort(key=lambda one: (columns.index(one.by), -one.quantile))
    return Advice(
        name=name,
        meaning=table.account.describe(),
        plural=table.account.plural,
        claim=table.claim,
        claim_reason=table.claim_reason,
        target=target,
        quantile=quantile,
        guarantee=guarantee,
        noise_multiplier=Range.of(log.settings.noise_multiplier),
        max_grad_norm=Range.of(log.settings.max_grad_norm),
        unclipped=unclipped,
        groups=tuple(found),
    )
