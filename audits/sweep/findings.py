"""What a sweep found: the figures of each setting over its seeds. Sensitive.

After Figures 9 and 10 and appendix E of Yu, Kamath, Kulkarni, Liu, Yin and Zhang (arXiv
2206.02617v7), who compare individual epsilons under several clipping norms and worst cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from audits.intervals import student_interval
from audits.words import attributed
from indpriv._plain import AtLeastZero, Count, Share, to_json
from indpriv.analysis.groups import GroupTable
from indpriv.analysis.schedule import Curve
from indpriv.analysis.statistics import Interval
from indpriv.analysis.summary import SENSITIVE, Audit
from indpriv.epsilon_table import DISCLAIMER
from indpriv.errors import InputError

TUNING = (
    "Choosing settings by these figures costs privacy that no epsilon here includes. All runs are "
    "seeded, so no model of a sweep has a guarantee. To publish a model of private data, sweep on "
    "public data; or draw the number of trials at random, train them without a seed, and account "
    "for publishing the best one: indpriv compose RUN RUN --set tuning_mean=MEAN"
)

_SHARE, _EPSILON = (0.0, 1.0), (0.0, np.inf)
_RANGES = {
    "test_accuracy": _SHARE,
    "share_at_worst_case": _SHARE,
    "accuracy_gap": _SHARE,
    "pearson_log_loss": (-1.0, 1.0),
}  # of figures that are no epsilon


@dataclass(frozen=True)
class TrialResult:
    """One audited run of a sweep.

    Attributes:
        summary: of its audit.
        smallest: the smallest individual epsilon.
    """

    summary: Audit
    smallest: float

    @property
    def curve(self) -> Curve:
        """Test accuracy and worst case at its checkpoints."""
        schedule = self.summary.schedule
        if schedule is None or schedule.curve is None or not schedule.curve.epsilon:
            raise InputError(
                f"{self.summary.name} has no worst case at its checkpoints, which a sweep compares"
            )
        return schedule.curve

    def figures(self) -> dict[str, float | None]:
        """The figures that a sweep compares, by name; None where undefined."""
        summary, individual = self.summary, self.summary.individual
        gaps = {
            f"{name}: {table.by}": gap
            for table in summary.groups
            for name, gap in _gaps(table).items()
        }
        return {
            "test_accuracy": summary.run.test_accuracy,
            "worst_case_epsilon": summary.guarantee.worst_case_epsilon,
            "smallest_epsilon": self.smallest,
            "median_epsilon": individual.median,
            "p95_epsilon": individual.p95,
            "largest_epsilon": individual.max,
            "share_at_worst_case": individual.share_at_worst_case,
            "pearson_log_loss": None if summary.loss is None else summary.loss.pearson_log_loss,
            **gaps,
        }


def _gaps(table: GroupTable) -> dict[str, float | None]:
    """Largest less smallest mean epsilon, and test accuracy, of the groups that are readable."""
    rows, found = table.rows[~table.rows["too_small"]], {}
    for name, column in (("epsilon_gap", "mean"), ("accuracy_gap", "test_accuracy")):
        known = rows[column].dropna()
        found[name] = float(known.max() - known.min()) if len(known) > 1 else None
    return found


@dataclass(frozen=True)
class OverSeeds:
    """A figure over the seeds of one setting.

    Attributes:
        mean: over all seeds; None unless each has the figure.
        interval: Student's, of the mean over seeds of training, cut to what the figure can be;
            None for one seed.
        n: number of seeds that have the figure.
    """

    mean: float | None
    interval: Interval | None
    n: Count

    @classmethod
    def of(
        cls, values: Sequence[float | None], limits: tuple[float, float] = _EPSILON
    ) -> "OverSeeds":
        """The mean of one value for each seed, which lies between these limits."""
        known = np.array([value for value in values if value is not None])
        if not len(known) or len(known) < len(values):
            return cls(None, None, len(known))
        return cls(float(known.mean()), student_interval(known, *limits), len(known))


@dataclass(frozen=True)
class SettingResult:
    """One combination of values.

    Attributes:
        values: by key of the audit file.
        figures: by name; see `TrialResult.figures`.
        accuracy_at_epsilon: test accuracy when the worst case was that of the sweep.
        epsilon_at_accuracy: worst case when test accuracy first reached that of the sweep.
        curve_epsilon, curve_accuracy: at each checkpoint, means over seeds.
    """

    values: Mapping[str, Any]
    figures: Mapping[str, OverSeeds]
    accuracy_at_epsilon: OverSeeds
    epsilon_at_accuracy: OverSeeds
    curve_epsilon: tuple[AtLeastZero, ...]
    curve_accuracy: tuple[Share, ...]

    @property
    def name(self) -> str:
        """The values as a row shows them."""
        return _name(self.values)


@dataclass(frozen=True)
class Sweep:
    """All settings of a sweep.

    Attributes:
        name: of the audit file.
        meaning: what every epsilon here means; where settings differ in it, which mean what.
        claims: of the individual epsilons: "exact" or "estimate", each once.
        n_seeds: number of runs of each setting, with the seeds 0, 1, ...
        at_epsilon, at_accuracy: where `SettingResult` reads the curves.
        settings: in the order asked for.
    """

    name: str
    meaning: str
    claims: tuple[str, ...]
    n_seeds: Count
    at_epsilon: AtLeastZero
    at_accuracy: Share
    settings: tuple[SettingResult, ...]

    def to_json(self) -> dict[str, Any]:
        """The content of sweep.json."""
        fixed = {"sensitive": SENSITIVE, "disclaimer": DISCLAIMER, "tuning": TUNING}
        return {**fixed, **to_json(self)}


def sweep_of(
    name: str,
    trials: Sequence[tuple[Mapping[str, Any], Sequence[TrialResult]]],
    *,
    at_epsilon: float | None = None,
    at_accuracy: float | None = None,
) -> Sweep:
    """Compare settings over their seeds.

    Args:
        name: of the audit file.
        trials: the values of each setting, with one result for each seed.
        at_epsilon: worst case at which accuracies are compared; default the largest that every
            run reached.
        at_accuracy: test accuracy at which worst cases are compared; default the largest that
            every run reached.
    """
    every = [result for _, results in trials for result in results]
    if at_epsilon is None:
        at_epsilon = min(result.curve.epsilon[-1] for result in every)
    if at_accuracy is None:
        at_accuracy = min(max(result.curve.test_accuracy) for result in every)
    return Sweep(
        name=name,
        meaning=attributed(
            [
                (result.summary.account.describe(), _name(values))
                for values, results in trials
                for result in results
            ]
        ),
        claims=tuple(sorted({result.summary.claim for result in every})),
        n_seeds=len(trials[0][1]),
        at_epsilon=at_epsilon,
        at_accuracy=at_accuracy,
        settings=tuple(
            _setting(values, results, at_epsilon, at_accuracy) for values, results in trials
        ),
    )


def _name(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _setting(
    values: Mapping[str, Any], results: Sequence[TrialResult], epsilon: float, accuracy: float
) -> SettingResult:
    figures, curves = [one.figures() for one in results], [one.curve for one in results]
    return SettingResult(
        values=values,
        figures={
            key: OverSeeds.of(
                [found.get(key) for found in figures],
                _RANGES.get(key.partition(":")[0], _EPSILON),
            )
            for key in figures[0]
        },
        accuracy_at_epsilon=OverSeeds.of([curve.accuracy_at(epsilon) for curve in curves], _SHARE),
        epsilon_at_accuracy=OverSeeds.of([curve.epsilon_at(accuracy) for curve in curves]),
        curve_epsilon=tuple(np.mean([curve.epsilon for curve in curves], axis=0).tolist()),
        curve_accuracy=tuple(np.mean([curve.test_accuracy for curve in curves], axis=0).tolist()),
    )
