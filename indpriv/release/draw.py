"""One draw of a private release: a request answered by mechanisms on counts over a public grid. Output is releasable."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.release import mechanisms
from indpriv.release.mechanisms import GaussianNoise, LaplaceNoise, Noise
from indpriv.release.request import DESCENT, HISTOGRAM, Request, as_fraction


@dataclass(frozen=True)
class Figures:
    """Released statistics of one group, with errors that the mechanism alone says.

    Attributes:
        quantiles: quantile as text -> value, increasing.
        mean: None where not asked for, or where the noise is larger than the group.
        count: noisy number of people, None where none was needed.
        rank_errors: quantile -> expected error in people where values lie close together.
        rank_error_bounds: quantile -> its bound whatever the data; None where there is none (descent).
        mean_error: bound on the expected error of the mean, in its own unit; it rests on the released count.
        count_error: expected error of the count.
    """

    quantiles: dict[str, float]
    mean: float | None
    count: float | None
    rank_errors: dict[str, float]
    rank_error_bounds: dict[str, float | None]
    mean_error: float | None
    count_error: float | None

    def to_json(self) -> dict[str, Any]:
        """The parts of release.json that are figures."""
        return {
            "quantiles": self.quantiles,
            "mean": self.mean,
            "count": self.count,
            "expected_error": {
                "quantiles": {
                    name: {"rank": error, "rank_at_most": self.rank_error_bounds[name]}
                    for name, error in self.rank_errors.items()
                },
                "mean": self.mean_error,
                "count": self.count_error,
            },
        }


def draw(request: Request, counts: IntArray, grid: FloatArray) -> Figures:
    """Answer a request about one group of people, spending all of its budget.

    Args:
        request: what is asked for.
        counts: (n_cells,) people at each value of the grid.
        grid: (n_cells,) public, increasing values; where a mean is asked for k/n_cells of the largest, k = 1, 2, ...
    """
    parts = len(request.shares)
    if request.method == DESCENT:
        gaussian = GaussianNoise(
            mechanisms.gaussian_scale(request.epsilon, request.delta) * math.sqrt(parts)
        )
        mean, count, mean_error = _mean_and_count(request, counts, float(grid[-1]), gaussian)
        answers = _by_descent(request, counts, grid, gaussian, count)
        unit_error = gaussian.unit_error
    else:
        laplace = LaplaceNoise(request.epsilon / parts)
        mean, count, mean_error = _mean_and_count(request, counts, float(grid[-1]), laplace)
        by_method = _from_distribution if request.method == HISTOGRAM else _by_selection
        answers = by_method(request, counts, grid, laplace)
        unit_error = laplace.unit_error
    names = [f"{quantile:g}" for quantile in request.quantiles]
    ordered = sorted(
        answer.value for answer in answers
    )  # quantiles do not decrease; sorting is free and lowers errors
    return Figures(
        quantiles=dict(zip(names, ordered, strict=True)),
        mean=mean,
        count=None if count is None else float(count),
        rank_errors={name: answer.error for name, answer in zip(names, answers, strict=True)},
        rank_error_bounds={name: answer.bound for name, answer in zip(names, answers, strict=True)},
        mean_error=mean_error,
        # Beside a mean it is the sum of two noises: 1.5 (Laplace) or 1.42 (Gaussian) times the error of one.
        count_error=None if count is None else unit_error * (1.5 if request.mean else 1.0),
    )


@dataclass(frozen=True)
class _Answer:
    """A released quantile, its expected error in rank, and the bound on that for any data."""

    value: float
    error: float
    bound: float | None


def _mean_and_count(
    request: Request, counts: IntArray, upper: float, noise: Noise
) -> tuple[float | None, int | None, float | None]:
    """Mean, noisy count and expected error of the mean (to first order); each None where it is not to be had."""
    if not request.mean:
        return None, mechanisms.noisy_count(counts, noise) if request.counts_people else None, None
    if request.public_n is not None:
        centred = mechanisms.noisy_centred_sum(counts, noise) / (len(counts) * request.public_n)
        return (
            upper * min(max((1 + centred) / 2, 0.0), 1.0),
            None,
            noise.unit_error * upper / 2 / request.public_n,
        )
    low, high = mechanisms.noisy_sums(counts, noise)
    count = round((low + high) / len(counts))
    if count < 1:
        return None, count, None
    # The error is largest where everybody is at one end of the range; n is known by its noisy count only.
    return upper * min(max(low / (low + high), 0.0), 1.0), count, noise.unit_error * upper / count


def _by_selection(
    request: Request, counts: IntArray, grid: FloatArray, noise: LaplaceNoise
) -> list[_Answer]:
    answers = []
    for quantile in map(as_fraction, request.quantiles):
        cell = mechanisms.select_quantile(counts, quantile, noise.epsilon)
        error, bound = mechanisms.selection_errors(quantile, len(grid), noise.epsilon)
        answers.append(_Answer(float(grid[cell]), error, bound))
    return answers


def _from_distribution(
    request: Request, counts: IntArray, grid: FloatArray, noise: LaplaceNoise
) -> list[_Answer]:
    if not request.quantiles:
        return []
    cumulative, cells = mechanisms.noisy_distribution(counts, noise)
    leaves = np.searchsorted(cumulative, np.array(request.quantiles) * cumulative[-1])
    error, bound = mechanisms.distribution_errors(len(counts), noise)
    return [_Answer(float(grid[cells[leaf]]), error, bound) for leaf in leaves]


def _by_descent(
    request: Request, counts: IntArray, grid: FloatArray, noise: GaussianNoise, count: int | None
) -> list[_Answer]:
    """By a share for each quantile; its error in rank is that of one comparison, since no bound on convergence is known."""
    of_a_round = GaussianNoise(noise.scale * math.sqrt(mechanisms.ROUNDS))
    people = request.public_n or max(count or 0, 1)

    def answer(value: int) -> float:
        return float(of_a_round.add([value], 1)[0])

    return [
        _Answer(
            mechanisms.descend_to_quantile(
                counts, grid, as_fraction(quantile), float(people), answer
            ),
            of_a_round.unit_error / 2,
            None,
        )
        for quantile in request.quantiles
    ]
