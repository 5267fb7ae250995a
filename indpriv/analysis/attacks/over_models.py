"""What an attack achieves over many models, each attacked with the others as references. Sensitive.

Examples of one model share its noise, so that errors over models are the ones to trust; the models
also share references, which these errors leave out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from indpriv._arrays import FloatArray
from indpriv._plain import Count, Share
from indpriv.analysis.attacks.roc import FALSE_POSITIVE_RATES, discriminate
from indpriv.analysis.statistics.bootstrap import Interval
from indpriv.analysis.statistics.student import student_interval
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError


@dataclass(frozen=True)
class RatesOverModels:
    """Means over models, with Student's intervals of these means.

    Attributes:
        title: of the attack.
        n_models: number of attacked models.
        n_scores: number of scores of all of them.
        auc: mean area under the curve.
        auc_interval: None for one model.
        tpr_at_fpr: mean true-positive rate at the false-positive rates "0.001" and "0.01".
        tpr_at_fpr_intervals: of these; empty for one model.
    """

    title: str
    n_models: Count
    n_scores: Count
    auc: Share
    auc_interval: Interval | None
    tpr_at_fpr: Mapping[str, Share]
    tpr_at_fpr_intervals: Mapping[str, Interval]


def rates_over_models(scores: Iterable[AttackScores]) -> RatesOverModels:
    """Measure an attack on one model after the other; only one model's scores are held at once.

    Raises:
        InputError: no scores, a model without members or without non-members, or scores that share
            the noise of their model's training, which ranks within a model do not hold for.
    """
    keys = [f"{rate:g}" for rate in FALSE_POSITIVE_RATES]
    rows, n_scores, title = [], 0, ""
    for of_model in scores:
        of_model.check_one_model("a rate of one model")
        of_model.check_adversary("a rate of one model")
        member = of_model.member
        found = discriminate(of_model.scores[member], of_model.scores[~member], with_roc=False)
        if found is None:
            raise InputError("an attacked model has no members, or no non-members")
        rows.append([found.auc, *(found.tpr_at_fpr[key] for key in keys)])
        n_scores, title = n_scores + len(member), of_model.method
    if not rows:
        raise InputError("there are no scores of any model")
    table = np.array(rows)
    mean, intervals = table.mean(axis=0), _intervals(table)
    return RatesOverModels(
        title=title,
        n_models=len(rows),
        n_scores=n_scores,
        auc=float(mean[0]),
        auc_interval=intervals[0] if intervals else None,
        tpr_at_fpr=dict(zip(keys, mean[1:].tolist(), strict=True)),
        tpr_at_fpr_intervals=dict(zip(keys, intervals[1:], strict=False)),
    )


def _intervals(table: FloatArray) -> list[Interval]:
    """Of each column's mean, cut to [0, 1]; none for one row."""
    found = (student_interval(column, 0.0, 1.0) for column in table.T)
    return [interval for interval in found if interval is not None]
