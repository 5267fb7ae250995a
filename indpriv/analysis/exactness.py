"""How exact the figures of a large audit are that come from histograms and samples. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from indpriv._plain import AtLeastZero, Count
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.loss import LossRelation
from indpriv.analysis.statistics import weighted
from indpriv.analysis.statistics.intervals import CONFIDENCE
from indpriv.analysis.summary import Finding
from indpriv.analysis.variants import MOST_COMPARED


@dataclass(frozen=True)
class Exactness:
    """How exact the figures of an audit of many examples are.

    Numbers of examples, means, largest values, shares and ratios of means are exact. Numeric
    columns with more than a million distinct values are cut into bins near their quantiles.
    Intervals and tests of groups are computed from histograms too, which changes them by far less
    than their resampling does.

    Attributes:
        most_exact: up to this number of examples, every figure is computed from each of them.
        quantile_error: largest relative error of medians and other quantiles of epsilon, of the
            median losses, and of the median norms of a log without rounding: the width of a bin.
        pair_error: the same of the quartiles by loss, which are of wider bins.
        pearson_error, spearman_error: the most by which Pearson's r and Spearman's rank correlation
            of epsilon and loss can be off; None where they are not known.
        attacked_members: number of random training examples that were attacked; None if all.
        attacked_nonmembers: number of random test examples that were attacked; None if all.
        attack_error: the most by which, in 95 of 100 such samples, the share of all members or of
            all non-members above one given threshold, or the AUC of one attack, differs from that
            of the sample; None if all were attacked. Figures of groups and of bins of epsilon,
            rates at a false-positive rate, and the advantage are less exact.
        compared: number of random examples that were accounted under other choices; None if all, or
            if no other choice was tried.
    """

    most_exact: Count
    quantile_error: AtLeastZero
    pair_error: AtLeastZero
    pearson_error: AtLeastZero | None
    spearman_error: AtLeastZero | None
    attacked_members: Count | None
    attacked_nonmembers: Count | None
    attack_error: AtLeastZero | None
    compared: Count | None


def exactness_of(
    n: int,
    loss: LossRelation | None,
    attacked_members: int | None,
    attacked_nonmembers: int | None,
    compared: int | None,
) -> Exactness | None:
    """How exact an audit of n examples is; None if every figure comes from each of them."""
    if n <= weighted.MOST_EXACT and attacked_members is None and attacked_nonmembers is None:
        return None
    errors = (None, None) if loss is None else (loss.pearson_error, loss.spearman_error)
    return Exactness(
        most_exact=weighted.MOST_EXACT,
        quantile_error=weighted.bin_width(),
        pair_error=weighted.bin_width(weighted.PAIR_BITS),
        pearson_error=errors[0],
        spearman_error=errors[1],
        attacked_members=attacked_members,
        attacked_nonmembers=attacked_nonmembers,
        attack_error=_attack_error(attacked_members, attacked_nonmembers),
        compared=compared,
    )


def _attack_error(*sampled: int | None) -> float | None:
    """Half of the widest interval of a share, and of an AUC.

    The variance of an AUC is at most AUC (1 - AUC) over the smaller number of scores (van Dantzig
    1951, Birnbaum and Klose 1957); that of a share p over n scores is at most p (1 - p) / n. Scores
    are drawn without replacement, which makes both smaller.
    """
    known = [n for n in sampled if n is not None]
    if not known:
        return None
    return float(stats.norm.ppf((1 + CONFIDENCE) / 2) * 0.5 / np.sqrt(min(known)))


def _find(run: AuditedRun) -> dict[str, Any]:
    attacked = run.recorded.attacked(run.seed)
    members, others = (None if found is None else len(found) for found in attacked)
    audit = run.audit
    tried = len(audit.sensitivity) or audit.spacing or audit.fidelity
    some = len(run.epsilons) > MOST_COMPARED and run.epsilons.account.rows_per_unit is None
    compared = MOST_COMPARED if tried and some else None
    return {"exactness": exactness_of(len(run.epsilons), audit.loss, members, others, compared)}


FINDING = Finding(
    "exactness",
    86,
    _find,
    exactness=(
        Exactness | None,
        "How exact the figures are; null if each comes from every example by itself.",
    ),
)
