"""One draw of a private release: mechanisms on counts over a public grid answer a request.

What they return is releasable.
"""

import math
from typing import Any

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv._reading import Number, table
from indpriv.release import mechanisms
from indpriv.release.mechanisms import GaussianNoise, LaplaceNoise, Noise
from indpriv.release.request import DESCENT, HISTOGRAM, Request, as_fraction

# Released statistics of one group, as in release.json: "quantiles" (quantile as text -> value,
# increasing), "mean" (None if it was not requested, or if the noise is larger than the group),
# "count" (noisy number of people, None if none was needed) and "expected_error" of each, which is
# what the mechanism alone says: of a mean a bound in its unit, of a count in people, of a quantile
# in people by "rank" where values are close together, and "rank_at_most" for any data (None if
# there is no bound, as in descent).
Figures = dict[str, Any]
_RANK_ERROR = table({Number: "rank rank_at_most?"})
_ERRORS = table({dict[str, _RANK_ERROR]: "quantiles", Number: "mean? count?"})  # type: ignore[valid-type]
FIGURES = table({dict[str, Number]: "quantiles", Number: "mean? count?", _ERRORS: "expected_error"})

_Answer = tuple[float, dict[str, float | None]]  # a released quantile and its error


def draw(request: Request, counts: IntArray, grid: FloatArray) -> Figures:
    """Answer a request about one group of people, spending all of its budget.

    Args:
        request: what to release.
        counts: (n_cells,) people at each value of the grid.
        grid: (n_cells,) public, increasing values; for a mean they must be k / n_cells of the
            largest, k = 1, 2, ...
    """
    noise = _noise(request)
    mean, count, mean_error = _mean_and_count(request, counts, float(grid[-1]), noise)
    if isinstance(noise, GaussianNoise):
        answers = _by_descent(request, counts, grid, noise, count)
    else:
        by_method = _from_distribution if request.method == HISTOGRAM else _by_selection
        answers = by_method(request, counts, grid, noise)
    names = [f"{quantile:g}" for quantile in request.quantiles]
    ordered = sorted(value for value, _ in answers)  # sorting costs nothing and lowers errors
    rank_errors = {name: error for name, (_, error) in zip(names, answers, strict=True)}
    # With a mean it is the sum of two noises: 1.5 (Laplace) or 1.42 (Gaussian) times one's error
    count_error = None if count is None else noise.unit_error * (1.5 if request.mean else 1.0)
    return {
        "quantiles": dict(zip(names, ordered, strict=True)),
        "mean": mean,
        "count": None if count is None else float(count),
        "expected_error": {"quantiles": rank_errors, "mean": mean_error, "count": count_error},
    }


def _noise(request: Request) -> Noise:
    """The noise of one share of the budget."""
    parts = len(request.shares)
    if request.method != DESCENT:
        return LaplaceNoise(request.epsilon / parts)
    scale = mechanisms.gaussian_scale(request.epsilon, request.delta)
    return GaussianNoise(scale * math.sqrt(parts))


def _mean_and_count(
    request: Request, counts: IntArray, upper: float, noise: Noise
) -> tuple[float | None, int | None, float | None]:
    """Mean, noisy count and expected error of the mean (to first order); None where unavailable."""
    if not request.mean:
        return None, mechanisms.noisy_count(counts, noise) if request.counts_people else None, None
    if request.public_n is not None:
        centred = mechanisms.noisy_centred_sum(counts, noise) / (len(counts) * request.public_n)
        mean = upper * min(max((1 + centred) / 2, 0.0), 1.0)
        return mean, None, noise.unit_error * upper / 2 / request.public_n
    low, high = mechanisms.noisy_sums(counts, noise)
    count = round((low + high) / len(counts))
    if count < 1:
        return None, count, None
    # The error is largest if all values are at one end of the range; only the noisy count is known
    return upper * min(max(low / (low + high), 0.0), 1.0), count, noise.unit_error * upper / count


def _by_selection(
    request: Request, counts: IntArray, grid: FloatArray, noise: LaplaceNoise
) -> list[_Answer]:
    answers = []
    for quantile in map(as_fraction, request.quantiles):
        cell = mechanisms.select_quantile(counts, quantile, noise.epsilon)
        errors = mechanisms.selection_errors(quantile, len(grid), noise.epsilon)
        answers.append((float(grid[cell]), _rank_error(*errors)))
    return answers


def _from_distribution(
    request: Request, counts: IntArray, grid: FloatArray, noise: LaplaceNoise
) -> list[_Answer]:
    if not request.quantiles:
        return []
    cumulative, cells = mechanisms.noisy_distribution(counts, noise)
    leaves = np.searchsorted(cumulative, np.array(request.quantiles) * cumulative[-1])
    error = _rank_error(*mechanisms.distribution_errors(len(counts), noise))
    return [(float(grid[cells[leaf]]), error) for leaf in leaves]


def _by_descent(
    request: Request, counts: IntArray, grid: FloatArray, noise: GaussianNoise, count: int | None
) -> list[_Answer]:
    """By a share for each quantile.

    Its error in rank is that of one comparison, since no bound on convergence is known.
    """
    of_a_round = GaussianNoise(noise.scale * math.sqrt(mechanisms.ROUNDS))
    people = float(request.public_n or max(count or 0, 1))
    error = _rank_error(of_a_round.unit_error / 2, None)

    def answer(value: int) -> float:
        return float(of_a_round.add([value], 1)[0])

    values = (
        mechanisms.descend_to_quantile(counts, grid, as_fraction(quantile), people, answer)
        for quantile in request.quantiles
    )
    return [(value, error) for value in values]


def _rank_error(rank: float, at_most: float | None) -> dict[str, float | None]:
    return {"rank": rank, "rank_at_most": at_most}
