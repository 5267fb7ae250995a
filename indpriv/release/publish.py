"""The release of an audit: request -> ledger -> draw -> shareable/release.json and release.html.

Besides the run's guarantee, what it writes is the only output of indpriv that is for others: a draw
by mechanisms on counts over a public grid.
"""

import math
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from indpriv._files import write_atomically, write_json
from indpriv._folders import make_folder
from indpriv._reading import named
from indpriv._types import FloatArray, IntArray
from indpriv.errors import InputError
from indpriv.norm_log.run_files import LEAKAGE
from indpriv.release import mechanisms
from indpriv.release import request as requests
from indpriv.release.ledger import FOLDER, RELEASE_JSON, SHAREABLE, Ledger
from indpriv.release.mechanisms import GaussianNoise, LaplaceNoise, Noise
from indpriv.release.page import render_release
from indpriv.release.request import Budget, Figures, Request
from indpriv.release.sources import Source, filled, open_source

RELEASE_HTML = "release.html"
SCHEMA_VERSION = 1


class Published(NamedTuple):
    """A release as it was written: release.json, whether it was drawn now, and its folder."""

    content: dict[str, Any]
    fresh: bool
    folder: Path


def release(
    path: str | Path,
    request: Request,
    *,
    budget: Budget | None = None,
    spend: bool = False,
    ledger_dir: str | Path | None = None,
) -> Published:
    """Release statistics of individual epsilon, or of gradient norms before the first step.

    Repeating a request returns the stored answer, at no further cost.

    Args:
        path: an audit directory, or a run directory for gradient norms.
        request: what to release, and what it may cost.
        budget: limit on all releases of this directory together; set once, then enforced.
        spend: draw again, and pay again, even if the same request was answered before.
        ledger_dir: of the ledger, by default `ledger` in path; copies that name one share it.

    Raises:
        InputError: values that cannot be released (see `assumptions`), a budget that does not cover
            the cost, a ledger that was cut, or a second process. Nothing is drawn or spent then.
    """
    mechanisms.opendp()
    directory = Path(path)
    if (directory / SHAREABLE / LEAKAGE).exists():
        raise InputError(
            f"{directory / SHAREABLE / LEAKAGE} holds what was reconstructed of people, and what "
            "is shareable is for others; take it out"
        )
    source = open_source(directory, request)
    with closing(Ledger(directory, source.fingerprint, ledger_dir)) as ledger:
        if budget is not None:
            ledger.set_budget(budget)
        figures = None if spend else ledger.stored(request)
        fresh = figures is None
        if figures is None:
            ledger.check_affordable(request.cost)
            # All groups together cost what one does, as a person is in one at most.
            figures = {
                name: draw(request, counts, source.grid) for name, counts in source.counts.items()
            }
            ledger.record(request, figures)
        with named(Path(ledger_dir or directory / FOLDER)):
            content = _content(request, source, figures, ledger)
            page = render_release(content)
        folder = make_folder(directory, SHAREABLE)
        write_json(folder / RELEASE_JSON, content)
        write_atomically(folder / RELEASE_HTML, page.encode("utf-8"))
    return Published(content, fresh, folder)


def _content(
    request: Request, source: Source, figures: dict[str, Figures], ledger: Ledger
) -> dict[str, Any]:
    """The content of release.json: figures from mechanisms, public texts and public settings."""
    nothing: Figures = {"quantiles": {}, "mean": None, "count": None, "expected_error": None}
    training, budget, shares = source.training, ledger.budget, request.shares
    return {
        "schema_version": SCHEMA_VERSION,
        **source.public,
        **figures.get("", nothing),
        "by": request.by or None,
        "groups": {name: figures[name] for name in request.groups} if request.by else None,
        **request.cost.to_json(),
        "method": request.method,
        "method_description": filled("method.txt.j2", method=request.method, **vars(mechanisms)),
        "shares": {name: 1 / len(shares) for name in shares},
        "public_n": request.public_n,
        "spent": {
            "releases": ledger.n_releases,
            **ledger.spent.to_json(),
            "training": None if training is None else training.to_json(),
            "with_training": None if training is None else (training + ledger.spent).to_json(),
            "budget": None if budget is None else budget.to_json(),
        },
        "versions": {library: version(library) for library in ("indpriv", "opendp")},
    }


def draw(request: Request, counts: IntArray, grid: FloatArray) -> Figures:
    """Answer a request about one group of people, spending all of its budget.

    counts: (n_cells,) people at each value of the public, increasing grid; for a mean its values
    must be k / n_cells of the largest, k = 1, 2, ...
    """
    parts = len(request.shares)
    noise: Noise = LaplaceNoise(request.epsilon / parts)  # of one share of the budget
    if request.method == requests.DESCENT:
        scale = mechanisms.gaussian_scale(request.epsilon, request.delta)
        noise = GaussianNoise(scale * math.sqrt(parts))
    mean, count, mean_error = _mean_and_count(request, counts, float(grid[-1]), noise)
    people = float(request.public_n or max(count or 0, 1))
    answers = list(_quantiles(request, counts, grid, noise, people))
    names = [f"{quantile:g}" for quantile in request.quantiles]
    ordered = sorted(value for value, *_ in answers)  # sorting costs nothing and lowers errors
    rank_errors = {
        name: {"rank": rank, "rank_at_most": at_most}
        for name, (_, rank, at_most) in zip(names, answers, strict=True)
    }
    # With a mean it is the sum of two noises: 1.5 (Laplace) or 1.42 (Gaussian) times one's error
    count_error = None if count is None else noise.unit_error * (1.5 if request.mean else 1.0)
    return {
        "quantiles": dict(zip(names, ordered, strict=True)),
        "mean": mean,
        "count": None if count is None else float(count),
        "expected_error": {"quantiles": rank_errors, "mean": mean_error, "count": count_error},
    }


def _quantiles(
    request: Request, counts: IntArray, grid: FloatArray, noise: Noise, people: float
) -> Iterator[tuple[float, float, float | None]]:
    """Yield each quantile, its expected error in rank, and the largest for any data if known."""
    if isinstance(noise, GaussianNoise):  # a share for each quantile, and of it one for each round
        of_a_round = GaussianNoise(noise.scale * math.sqrt(mechanisms.ROUNDS))

        def answer(value: int) -> float:
            return float(of_a_round.add([value], 1)[0])

        for quantile in map(requests.as_fraction, request.quantiles):
            value = mechanisms.descend_to_quantile(counts, grid, quantile, people, answer)
            yield value, of_a_round.unit_error / 2, None  # of one comparison: no bound is known
    elif request.method == requests.HISTOGRAM and request.quantiles:
        cumulative, cells = mechanisms.noisy_distribution(counts, noise)
        errors = mechanisms.distribution_errors(len(counts), noise)
        for leaf in np.searchsorted(cumulative, np.array(request.quantiles) * cumulative[-1]):
            yield float(grid[cells[leaf]]), *errors
    else:
        for quantile in map(requests.as_fraction, request.quantiles):
            cell = mechanisms.select_quantile(counts, quantile, noise.epsilon)
            errors = mechanisms.selection_errors(quantile, len(grid), noise.epsilon)
            yield float(grid[cell]), *errors


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
