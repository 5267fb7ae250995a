"""The release of an audit: request -> ledger -> draw -> shareable/release.json and release.html.

Besides the run's guarantee, what it writes is the only output of indpriv that is for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from indpriv._files import write_atomically, write_json
from indpriv._folders import make_folder
from indpriv._reading import named
from indpriv.errors import InputError
from indpriv.norm_log.run_files import LEAKAGE
from indpriv.release import mechanisms
from indpriv.release.draw import Figures, draw
from indpriv.release.ledger import FOLDER, RELEASE_JSON, SHAREABLE, Ledger
from indpriv.release.page import render_release
from indpriv.release.request import DESCENT, EXPONENTIAL, HISTOGRAM, Budget, Request
from indpriv.release.sources import Source, open_source

RELEASE_HTML = "release.html"
SCHEMA_VERSION = 1

_METHOD_TEXTS = {
    EXPONENTIAL: "private selection among the values, by distance in rank (permute-and-flip, a "
    "better form of the exponential mechanism; OpenDP)",
    HISTOGRAM: "one noisy cumulative distribution from a tree of counts with discrete Laplace "
    "noise (OpenDP)",
    DESCENT: f"quantile descent (Andrew et al. 2021): {mechanisms.ROUNDS} rounds, step size "
    f"{mechanisms.FIRST_STEP:g} * {mechanisms.DECAY:g}^round in the logarithm, from the middle of "
    "the range, discrete Gaussian noise (OpenDP)",
}


@dataclass(frozen=True)
class Published:
    """A release as it was written.

    Attributes:
        content: of release.json.
        fresh: whether it was drawn now.
        folder: that it was written to.
    """

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
    directory = Path(path)
    if (directory / SHAREABLE / LEAKAGE).exists():
        raise InputError(
            f"{directory / SHAREABLE / LEAKAGE} holds what was reconstructed of people, and what "
            "is shareable is for others; take it out"
        )
    source = open_source(directory, request)
    with Ledger(directory, source.fingerprint, ledger_dir) as ledger:
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
        "method_description": _METHOD_TEXTS[request.method],
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
