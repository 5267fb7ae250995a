"""What others may read: releases (request -> ledger -> draw -> page), model cards and statements.

shareable/release.json and its page, which sees nothing else, are for everybody: a draw by
mechanisms on counts over a public grid. The model card (for Hugging Face) sees what the guarantee
covers too: the worst case, and the disclosures that an audit marks as publishable. All other
figures of an audit are computed from the data without noise, and are not read.

A statement is for one owner only, and costs no one else any privacy (docs/explanation/releases.md).
Nothing else of the data may enter it: not the audit's reason for its claim, which can count other
examples, and no number of examples.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console

from indpriv._facts import refused
from indpriv._files import first_at, read_json, write_atomically, write_json
from indpriv._folders import make_folder
from indpriv._formatting import format_number, format_share_up, round_up
from indpriv._plain import from_json
from indpriv._reading import AtLeastZero, Text, Whole, check, named, table
from indpriv._types import FloatArray, IntArray
from indpriv.analysis.guarantee import STANDS, Guarantee
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import EPSILON
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, EpsilonTable, relation_words
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES, LEAKAGE
from indpriv.release import ledger as ledgers
from indpriv.release import mechanisms, sources
from indpriv.release.ledger import SHAREABLE, Budget, Figures, Ledger, Request
from indpriv.report.page import print_page, render_markdown

RELEASE_HTML = "release.html"
SCHEMA_VERSION = 2


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
    empty_groups: bool = False,
) -> Published:
    """Release statistics of individual epsilon, or of gradient norms before the first step.

    Repeating a request returns the stored answer, at no further cost.

    Args:
        path: an audit directory, or a run directory for gradient norms.
        request: what to release, and what it may cost.
        budget: limit on all releases of this directory together; set once, then enforced.
        spend: draw again, and pay again, even if the same request was answered before.
        ledger_dir: of the ledger, by default `ledger` in path; copies that name one share it.
        empty_groups: release groups that nobody is in, too; else such a name is refused as a typo.

    Raises:
        InputError: values that cannot be released (see `assumptions`), a budget that does not cover
            the cost, a ledger that was cut, or a second process. Nothing is drawn or spent then.
    """
    mechanisms.opendp()
    directory = Path(path)
    if (directory / SHAREABLE / LEAKAGE).exists():
        raise refused("refusal.ledger", "shareable", path=directory / SHAREABLE / LEAKAGE)
    source = sources.open_source(directory, request)
    with closing(Ledger(directory, source.fingerprint, ledger_dir)) as ledger:
        if budget is not None:
            ledger.set_budget(budget)
        figures = None if spend else ledger.stored(request)
        fresh = figures is None
        if figures is None:
            if (limit := ledger.budget) and not limit.covers(ledger.spent + request.cost):
                said = {"budget": limit, "spent": ledger.spent, "cost": request.cost}
                raise refused("refusal.ledger", "budget", **said)
            for name, counts in source.counts.items():
                if request.by and not (empty_groups or counts.any()):
                    raise refused("refusal.source", "nobody", by=request.by, name=name)
            # All groups together cost what one does, as a person is in one at most.
            figures = {
                name: draw(request, counts, source.grid) for name, counts in source.counts.items()
            }
            ledger.record(request, figures)
        with named(Path(ledger_dir or directory / ledgers.FOLDER)):
            content = _content(request, source, figures, ledger)
            page = sources.filled("release.html.j2", release=content, **_shown(content))
        folder = make_folder(directory, SHAREABLE)
        write_json(folder / ledgers.RELEASE_JSON, content)
        write_atomically(folder / RELEASE_HTML, page.encode("utf-8"))
    return Published(content, fresh, folder)


def _content(
    request: Request, source: sources.Source, figures: dict[str, Figures], ledger: Ledger
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
        "method_description": sources.filled(
            "method.txt.j2", method=request.method, **vars(mechanisms)
        ),
        "shares": {name: 1 / len(shares) for name in shares},
        "spent": {
            "releases": len(ledger.releases),
            **ledger.spent.to_json(),
            "training": None if training is None else training.to_json(),
            "with_training": None if training is None else (training + ledger.spent).to_json(),
            "budget": None if budget is None else budget.to_json(),
        },
        "versions": {library: version(library) for library in ("indpriv", "opendp")},
    }


def draw(request: Request, counts: IntArray, grid: FloatArray) -> Figures:
    """Answer a request about one group of people, spending all of its budget.

    counts: (n_cells,) people at each value of the grid; for a mean these are equally spaced.
    """
    parts = len(request.shares)
    # of one share of the budget
    noise: mechanisms.Noise = mechanisms.LaplaceNoise(request.epsilon / parts)
    if request.method == ledgers.DESCENT:
        scale = mechanisms.gaussian_scale(request.epsilon, request.delta)
        noise = mechanisms.GaussianNoise(scale * math.sqrt(parts))
    mean, count, mean_error = _mean_and_count(request, counts, float(grid[-1]), noise)
    answers = list(_quantiles(request, counts, grid, noise, float(max(count or 0, 1))))
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
    request: Request, counts: IntArray, grid: FloatArray, noise: mechanisms.Noise, people: float
) -> Iterator[tuple[float, float, float | None]]:
    """Yield each quantile, its expected error in rank, and the largest for any data if known."""
    if isinstance(noise, mechanisms.GaussianNoise):  # a share each, and of it one for each round
        of_a_round = mechanisms.GaussianNoise(noise.scale * math.sqrt(mechanisms.ROUNDS))

        def answer(value: int) -> float:
            return float(of_a_round.add([value], 1)[0])

        for quantile in map(ledgers.as_fraction, request.quantiles):
            value = mechanisms.descend_to_quantile(counts, grid, quantile, people, answer)
            yield value, of_a_round.unit_error / 2, None  # of one comparison: no bound is known
    elif request.method == ledgers.HISTOGRAM and request.quantiles:
        cumulative, cells = mechanisms.noisy_distribution(counts, noise)
        errors = mechanisms.distribution_errors(len(counts), noise)
        for leaf in np.searchsorted(cumulative, np.array(request.quantiles) * cumulative[-1]):
            yield float(grid[cells[leaf]]), *errors
    else:
        for quantile in map(ledgers.as_fraction, request.quantiles):
            cell = mechanisms.select_quantile(counts, quantile, noise.epsilon)
            errors = mechanisms.selection_errors(quantile, len(grid), noise.epsilon)
            yield float(grid[cell]), *errors


def _mean_and_count(
    request: Request, counts: IntArray, upper: float, noise: mechanisms.Noise
) -> tuple[float | None, int | None, float | None]:
    """Mean, noisy count and expected error of the mean (to first order); None where unavailable."""
    if not request.mean:
        return None, mechanisms.noisy_count(counts, noise) if request.counts_people else None, None
    low, high = mechanisms.noisy_sums(counts, noise)
    count = round((low + high) / len(counts))
    if count < 1:
        return None, count, None
    # The error is largest if all values are at one end of the range; only the noisy count is known
    return upper * min(max(low / (low + high), 0.0), 1.0), count, noise.unit_error * upper / count


# --- the page of a release, and the model card

MODEL_CARD = "model-card.md"
_COST = table({AtLeastZero: "epsilon delta"})
_SPENT = table({AtLeastZero: "epsilon delta", Whole: "releases", _COST: "training? budget?"})
_RELEASE = table(
    {
        Text: "quantity meaning unit neighbouring method by?",
        list[Text]: "assumptions",
        dict[str, Any]: "groups?",
        _SPENT: "spent",
    }
)
_OF_ACCOUNT = ("delta", "unit", "neighbouring", "sampler", "accountant")
# With sample_rate, the expected batch size itself would give n away, and n is private
_NORMALISATION = {
    "mean": "sum of clipped gradients and noise over the expected, not the sampled, batch size",
    "sum": "sum of clipped gradients and noise, not divided",
}


def print_release(content: Mapping[str, Any], console: Console) -> None:
    """Print the figures, their expected errors, what was spent and what is assumed."""
    print_page(sources.TEMPLATES / "release", console, release=content, **_shown(content))


def _shown(content: Mapping[str, Any]) -> dict[str, Any]:
    """Of a release: its figures as a table, their expected errors, and what was spent."""
    expected = next(iter((content["groups"] or {"": content}).values()))["expected_error"]
    ranks = (
        f"{name}: {_people(error['rank'])}"
        + ("" if (most := error["rank_at_most"]) is None else f", at most {_people(most)}")
        for name, error in expected["quantiles"].items()
    )
    return {
        "figures": _figures(content),
        "errors": sources.paragraphs(
            "errors.txt.j2",
            expected=expected,
            each=" of each group" if content["groups"] else "",
            method=content["method"],
            ranks="; ".join(ranks),
        ),
        "spent": sources.paragraphs(
            "spent.txt.j2",
            release=content,
            spent=content["spent"],
            relation=relation_words(content["neighbouring"]),
        ),
    }


def _figures(content: Mapping[str, Any]) -> dict[str, Any]:
    """The released figures, one row for each group; with expected errors where there are any."""
    groups = content["groups"] or {"": content}
    names = sorted(next(iter(groups.values()))["quantiles"], key=float)
    is_epsilon = content["quantity"] == "individual epsilon"
    show: Callable[..., str] = (lambda one: round_up(one, 3)) if is_epsilon else format_number
    titles = {"mean": "mean", "count": "people"}
    shown = [name for name in titles if any(each[name] is not None for each in groups.values())]
    head = [content["by"] or "", *(f"quantile {name}" for name in names)]
    rows = []
    for group, figures in groups.items():
        row = [group, *(show(figures["quantiles"][name]) for name in names)]
        for name in shown:
            value, error = figures[name], figures["expected_error"][name]
            form = show if name == "mean" else format_number
            row.append(
                "all noise" if value is None else f"{form(value)} ± {format_number(error, 2)}"
            )
        rows.append(row)
    return {"head": [*head, *(titles[name] for name in shown)], "rows": rows}


def _people(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else format_number(value, 2)


def render_model_card(summary: Mapping[str, Any], release: Mapping[str, Any] | None) -> str:
    """The block as text; release is the content of release.json, None if nothing was released.

    InputError for a run without a guarantee that may be published, or a release of another one.
    """
    public = _public(summary)
    if release is not None:
        _check_same_training(public, release)
    settings = [(name, value or "not stated", status) for name, value, status in public["settings"]]
    if public["normalisation"]:
        settings.append(("Normalisation of the gradient", public["normalisation"], "verified"))
    values: dict[str, Any] = {"public": public, "settings": settings, "release": release}
    if release is not None:
        shown = _shown(release)
        values["figures"] = shown["figures"]
        values["notes"] = [*shown["errors"], *shown["spent"], *release["assumptions"]]
    body = render_markdown(sources.TEMPLATES / "model-card", **values)
    return f"{sources.filled('front-matter.yaml.j2', public=public)}\n\n{body}"


def read_release(audit_dir: Path) -> dict[str, Any] | None:
    """The content of shareable/release.json, None if nothing was released."""
    path = audit_dir / SHAREABLE / ledgers.RELEASE_JSON
    if not path.is_file():
        return None
    content: dict[str, Any] = read_json(path)
    if (version := first_at(content, ("schema_version",))) != SCHEMA_VERSION:
        raise refused("refusal.ledger", "other_schema", path=path, version=version)
    check(_RELEASE, content, str(path))
    with named(path, "make it again with indpriv publish quantiles"):
        for figures in (content.get("groups") or {"": content}).values():
            check(ledgers.FIGURES, figures, str(path))
        _shown(content)  # and what a page shows of it is there
    return content


def _public(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What may be published of an audit; the rest of this module sees nothing else of it."""
    guarantee, account, run = summary["guarantee"], summary["account"], summary["run"]
    why = "delta is at least 1/n" if guarantee["delta_times_n"] >= 1 else ""
    if guarantee["status"] not in STANDS:
        why = f"its guarantee is {guarantee['status']}"
    if why:
        raise InputError(f"a model card may state no guarantee of this run: {why}; see report.html")
    return {
        "name": summary["name"],
        **{name: guarantee[name] for name in ("worst_case_epsilon", "evidence", "statement")},
        **{name: account[name] for name in _OF_ACCOUNT},
        "participation": account.get("participation", "secret"),
        "normalisation": _NORMALISATION.get(run["recorder"].get("loss_reduction"), ""),
        "settings": [
            (item["title"], item["detail"], item["status"])
            for item in summary["disclosures"]
            if item["publishable"] and not item["private"]
        ],
        "version": summary["versions"]["indpriv"],
    }


def _check_same_training(public: Mapping[str, Any], release: Mapping[str, Any]) -> None:
    training = release["spent"]["training"]
    if training is None:  # norms before the first step do not depend on training
        return
    if (training["epsilon"], training["delta"]) != (public["worst_case_epsilon"], public["delta"]):
        raise refused("refusal.ledger", "other_guarantee", training=training)


# --- statements

STATEMENTS = "statements"
_WIDTH = 92
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Owner:
    """A person who owns records: an example or a unit, by its id; figures are of all their rows."""

    kind: str
    name: str
    n_rows: int
    epsilon: float
    worst_case_epsilon: float
    true_positive_limit: float


def owners(audit_dir: Path, *, example: str | None = None, unit: str | None = None) -> list[Owner]:
    """The owner of one example or of one unit, or all owners; InputError for an unknown id."""
    if example is not None and unit is not None:
        raise InputError("both --example and --unit were passed; pass one of them")
    table = EpsilonTable.open(audit_dir / EPSILON).table()
    by_unit, details = table.account.rows_per_unit is not None, table.details
    names = [str(item) for item in table.example_ids.tolist()]
    if example is not None and by_unit:
        raise refused("refusal.source", "of_people", example=example)
    if example is not None and example not in names:
        raise InputError(f"--example {example}: the audit has no training example of that id")
    unit_ids = names
    if not by_unit and (audit_dir / EXAMPLES).is_file():
        examples = ExampleTable.from_parquet(audit_dir / EXAMPLES).aligned(table.example_ids)
        unit_ids = [str(item) for item in examples["unit_id"].tolist()]
    if unit is not None and unit not in unit_ids:
        raise InputError(f"--unit {unit}: the audit has no training example of that unit")
    rows = pd.DataFrame(
        {
            "name": pd.Series(unit_ids, dtype=object),
            "n_rows": details.get("n_rows", 1),
            "epsilon": table.epsilon,
            "worst_case_epsilon": details.get("unit_worst_case", table.worst_case_epsilon),
            "true_positive_limit": details.get("true_positive_limit", 1.0),
        }
    )
    asked = unit if example is None else unit_ids[names.index(example)]
    rows = rows if asked is None else rows[rows["name"] == asked]
    for owner, n in rows["name"].value_counts(sort=False).items():
        if n > 1:
            raise refused("refusal.source", "several_rows", owner=owner, n=n)
    found = [Owner("unit", *row) for row in rows.itertuples(index=False)]
    return found if example is None else [replace(found[0], kind="example", name=example)]


def statement(owner: Owner, summary: Mapping[str, Any]) -> str:
    """One page of plain text for one owner, from the content of audit.json."""
    guarantee, own_odds = from_json(Guarantee, summary["guarantee"]), None
    odds = guarantee.true_positive_limit(guarantee.worst_case_epsilon)
    if guarantee.stands:  # else there is no test to compare with
        limit = guarantee.true_positive_limit(owner.epsilon, owner.true_positive_limit)
        own_odds = format_share_up(limit)
    parts = sources.paragraphs(
        "statement.txt.j2",
        owner=owner,
        guarantee=guarantee,
        account={"clipping_norm_epsilon": 0, **summary["account"]},
        usual=format_share_up(FALSE_POSITIVE_RATE),
        odds=format_share_up(odds),
        own_odds=own_odds,
        undeclared=sources.declared_choices(summary) is None,
        **{key: str(summary[key]) for key in ("name", "meaning", "claim")},
    )
    lines = [fill(parts[0], _WIDTH) + "\n"]
    for part in parts[1:]:
        title = part.startswith("# ")
        lines.append(f"\n{part[2:].upper()}" if title else fill(part, _WIDTH))
    return "\n".join(lines) + "\n"


def write_statements(
    audit_dir: Path,
    chosen: Sequence[Owner],
    output_dir: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Path]:
    """Write one file (0600) for each owner, by default in AUDIT_DIR/statements; their paths."""
    summary = read_summary(audit_dir)
    sources.check_one_record(summary)
    folder = make_folder(output_dir) if output_dir else make_folder(audit_dir, STATEMENTS)
    paths = []
    for number, owner in enumerate(chosen, 1):
        name = owner.name
        if not _SAFE_NAME.fullmatch(name):  # as a file name
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
            name = f"sha256-{digest[:32]}"
        path = folder / f"{owner.kind}-{name}.txt"
        write_atomically(path, statement(owner, summary).encode("utf-8", "replace"))
        paths.append(path)
        if progress is not None:
            progress("writing statements", number, len(chosen))
    return paths
