"""A private release as an HTML page, on a terminal, and in a block for a model card. Releasable.

The page sees only the content of release.json, which a mechanism drew. The model card (YAML front
matter and Markdown, for Hugging Face) sees what the guarantee covers too: the worst case, and the
disclosures that an audit marks as publishable. All other figures of an audit are computed from the
data without noise, and are not read.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from indpriv._files import read_json
from indpriv._formatting import format_delta, format_epsilon, format_number
from indpriv._reading import AtLeastZero, Text, Whole, check, named, table
from indpriv.analysis.guarantee import STANDS
from indpriv.epsilon_table import relation_words
from indpriv.errors import InputError
from indpriv.release.ledger import RELEASE_JSON, SHAREABLE
from indpriv.release.request import FIGURES
from indpriv.release.sources import TEMPLATES, filled, paragraphs
from indpriv.report.page import print_page, render_markdown

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


def render_release(content: Mapping[str, Any]) -> str:
    """The page as text: self-contained, no script, every text escaped."""
    return filled("release.html.j2", release=content, **_shown(content))


def print_release(content: Mapping[str, Any], console: Console) -> None:
    """Print the figures, their expected errors, what was spent and what is assumed."""
    print_page(TEMPLATES / "release", console, release=content, **_shown(content))


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
        "errors": paragraphs(
            "errors.txt.j2",
            expected=expected,
            each=" of each group" if content["groups"] else "",
            method=content["method"],
            ranks="; ".join(ranks),
        ),
        "spent": paragraphs(
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
    show: Callable[..., str] = format_number
    if content["quantity"] == "individual epsilon":  # to three decimals, rounded up
        show = lambda value: f"{math.ceil(value * 1000 - 1e-6) / 1000:.3f}"  # noqa: E731
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

    InputError for a run without a guarantee that may be published, and for a release that composes
    with another guarantee.
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
    body = render_markdown(TEMPLATES / "model-card", **values)
    return f"{filled('front-matter.yaml.j2', public=public)}\n\n{body}"


def read_release(audit_dir: Path) -> dict[str, Any] | None:
    """The content of shareable/release.json, None if nothing was released."""
    path = audit_dir / SHAREABLE / RELEASE_JSON
    if not path.is_file():
        return None
    content: dict[str, Any] = read_json(path)
    check(_RELEASE, content, str(path))
    with named(path, "make it again with indpriv publish quantiles"):
        for figures in (content.get("groups") or {"": content}).values():
            check(FIGURES, figures, str(path))
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
        raise InputError(
            f"{SHAREABLE}/{RELEASE_JSON} composes with a guarantee of epsilon "
            f"{format_epsilon(training['epsilon'])}, delta {format_delta(training['delta'])}, "
            "which is not this audit's; make the release again"
        )
