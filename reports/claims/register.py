"""reports/claims/README.md: claims and printed cells from the TOML files beside it, words and figures from the pages' JSON."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from indpriv._files import read_json
from reports import REPORTS
from reports.attacks import page as attacks
from reports.claims import cells
from reports.extraction import page as extraction
from reports.fedcdp import page as fedcdp
from reports.label_dp import page as label_dp
from reports.language import page as language
from reports.papernot import page as papernot
from reports.shared.markdown_table import table
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED, WORDS
from reports.tips import page as tips
from reports.wei2021 import page as wei2021
from reports.yu2023.audits import read_audits
from reports.yu2023.figures import figures
from reports.yu2023.measured import read_measured
from reports.yu2023.sections import Known
from reports.yu2023.tables import tables

HERE = Path(__file__).parent
PAPERS = ("yu2023", "wei2021", "fedcdp", "papernot", "jarmul")
_WORDS_OF_FINDINGS = {
    "refuted": NOT_REPRODUCED,
    "shown": REPRODUCED,
    "in part": DIFFERS,
    "not shown": NOT_REPRODUCED,
}
_NONE = "–"


@dataclass(frozen=True)
class Claim:
    """One claim of a paper about one data set, and its word; how: what it would take to run it."""

    item: str
    text: str
    word: str
    how: str = ""


@dataclass(frozen=True)
class Cell:
    """One printed number, ours beside it (None where there is none), and its word."""

    row: str
    column: str
    printed: float
    ours: float | None
    word: str


def paper(name: str) -> dict[str, Any]:
    """The TOML file of a paper."""
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))


def figures_of(page: str) -> Any:
    """The committed figures of a page."""
    return read_json(REPORTS / page / f"{page}.json")


@cache
def verdicts_of_yu2023() -> Mapping[tuple[str, str, str], str]:
    """(section, data set, verdict) -> word, by the sound default where it has one."""
    known = Known(read_audits(REPORTS), read_measured(REPORTS))
    return {
        (section.number, title, name): words[-1]
        for section in (*figures(known), *tables(known))
        for title, verdicts in section.words.items()
        for name, words in verdicts.items()
    }


def verdicts_of(page: str) -> Mapping[str, str]:
    """Finding -> word, of a page that is not yu2023."""
    known = figures_of(page)
    if page == "extraction":
        found = extraction.verdicts(known) | language.verdicts(figures_of("language"))
        lower = attacks.lower_on_labels(figures_of("attacks"))
        return {name: word for name, (word, _) in found.items()} | {
            **label_dp.verdicts(figures_of("label_dp")),
            **tips.verdicts(figures_of("tips")),
            attacks.LABELS_ALONE: REPRODUCED if lower else NOT_REPRODUCED,
        }
    if page == "papernot":
        return {name: word for name, (word, _) in papernot.verdicts(known).items()}
    if page == "fedcdp":
        return {what: word for _, what, word in fedcdp.findings(known)}
    return {what: word for _, what, word in wei2021.findings(known)}


def word_of(text: str) -> str:
    """One of the four words, of a page's: "reproduced (cyclic: not run)" is reproduced."""
    word = _WORDS_OF_FINDINGS.get(text, text.split(" (")[0])
    if word not in WORDS:
        raise ValueError(f"{text!r} is no verdict; choose from {', '.join(WORDS)}")
    return word


def claims_of(name: str) -> list[Claim]:
    """The claims of a paper, each once."""
    found = paper(name)
    words = {} if found["page"] == "yu2023" else verdicts_of(found["page"])
    claims = []
    for row in found["claim"]:
        text, how = row.get("claim", row.get("finding", "")), _how(row)
        for data in row.get("data", [""]):
            if "data" in row:
                word = verdicts_of_yu2023()[
                    row.get("section", row["item"]), data, row.get("verdict", "")
                ]
            elif key := row.get("finding", row.get("verdict")):
                word = words[key]
            else:
                word = NOT_RUN
            word = word_of(word)
            claims.append(
                Claim(
                    row["item"],
                    f"{text}, {data}" if data else text,
                    word,
                    how if word == NOT_RUN else "",
                )
            )
    return claims


def _how(row: Mapping[str, Any]) -> str:
    if "not_run" not in row:
        return ""
    return str(row["not_run"]) + (f" ({row['hours']:g} hours)" if "hours" in row else "")


def cells_of(name: str, item: str) -> list[Cell]:
    """The printed cells of a table, row by row."""
    found = paper(name)
    one = next(each for each in found["table"] if each["item"] == item)
    ours = cells.ours(name, item, figures_of(found["page"]))
    rows = {
        label.strip(): values.split()
        for label, values in (line.rsplit("|", 1) for line in one["rows"].strip().splitlines())
    }
    if unknown := {row for row, _ in ours} - set(rows):
        raise ValueError(f"{name}, {item}: no such rows: {', '.join(sorted(unknown))}")
    made = []
    for row, values in rows.items():
        for place, (column, value) in enumerate(zip(one["columns"], values, strict=True)):
            if value == "-":
                continue
            printed, mine = float(value), ours.get((row, place))
            beside = printed
            if base := one.get("ratio_to"):
                beside = printed / float(rows[base][place])
            made.append(Cell(row, column, printed, mine, judged(mine, beside, one)))
    return made


def judged(ours: float | None, printed: float, limits: Mapping[str, Any]) -> str:
    """How near a number is to the printed one: the larger over the smaller, less one, is at most `close`, or at most `fair`."""
    if ours is None:
        return NOT_RUN
    if not math.isfinite(ours):
        return NOT_REPRODUCED
    less, more = sorted((ours, printed))
    gap = more / less - 1 if less > 0 else math.inf if more > 0 else 0.0
    if gap <= limits["close"]:
        return REPRODUCED
    return DIFFERS if gap <= limits["fair"] else NOT_REPRODUCED


def counted(words: list[str]) -> list[str]:
    """How many there are of each word."""
    count = Counter(words)
    return [f"{count[word]}" for word in WORDS] + [f"{len(words)}"]


def counts() -> str:
    """How many claims there are, and how many of each word, for the index of pages."""
    every = [each.word for name in PAPERS for each in claims_of(name)]
    *found, total = counted(every)
    return "of {} claims {} reproduced, {} differ, {} not reproduced, {} not run".format(
        total, *found
    )


def render() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    claims = {name: claims_of(name) for name in PAPERS}
    tables_of = {name: [one["item"] for one in paper(name).get("table", ())] for name in PAPERS}
    yield from (
        "# Claims and printed cells of five papers",
        "",
        "Written by `python -m reports.claims`; do not edit it by hand. Claims and printed numbers stand in the",
        "TOML files of this folder, words and figures of ours come from the JSON files of the pages, and each",
        "rule stands on the page of its paper, those on [attacks on labels](../attacks/README.md), on [label-DP](../label_dp/README.md) and on [tips](../tips/README.md) on pages of their own.",
        "A claim counts once for each data set that the paper shows, or that we ran it on. Reproduced: the rule on that page holds; differs:",
        "part of it; not reproduced: less, or the opposite; not run: the last column says what it takes.",
        "",
        "## Claims",
        "",
    )
    head = ["paper", *WORDS, "in all"]
    rows = [[_link(name), *counted([each.word for each in claims[name]])] for name in PAPERS]
    every = [each.word for found in claims.values() for each in found]
    yield from (table(head, [*rows, ["all", *counted(every)]]), "")
    for name in PAPERS:
        yield from (f"### {paper(name)['paper']}", "")
        yield from (
            table(
                ["item", "claim", "word", "to run it"],
                [[each.item, each.text, each.word, each.how or _NONE] for each in claims[name]],
            ),
            "",
        )
        yield from (note, "") if (note := paper(name).get("note")) else ()
    yield from (
        "## Printed cells",
        "",
        "The word of a cell says how near our number is to the printed one (the larger over the smaller,",
        "less one: reproduced up to close, differs up to fair),",
        "with another network, fewer steps and other noise: it judges no claim. Every number that Yu et al. print",
        "stands on [their page](../yu2023/README.md), beside both accounts. As extracted from the papers' text.",
        "",
    )
    rows = []
    for name, items in tables_of.items():
        for item in items:
            words = [each.word for each in cells_of(name, item)]
            rows.append([paper(name)["paper"], item, *counted(words)])
    yield from (table(["paper", "table", *WORDS, "in all"], rows), "")
    for name, items in tables_of.items():
        for item in items:
            yield from _table(name, item)


def _link(name: str) -> str:
    page = paper(name)["page"]
    return f"[{paper(name)['paper']}](../{page}/README.md)"


def _table(name: str, item: str) -> Iterator[str]:
    one = next(each for each in paper(name)["table"] if each["item"] == item)
    yield from (f"### {paper(name)['paper']}, Table {item}: {one['title']}", "")
    rows: dict[str, list[str]] = {}
    for cell in cells_of(name, item):
        mine = NOT_RUN if cell.ours is None else f"{cell.ours:.4g}, {cell.word}"
        rows.setdefault(cell.row, []).append(f"{cell.printed:g} ({mine})")
    columns = one["columns"]
    yield table(
        ["", *columns],
        [[row, *found, *[_NONE] * (len(columns) - len(found))] for row, found in rows.items()],
    )
    notes = [f"Close {one['close']:g}, fair {one['fair']:g}."]
    notes += [f"{one['note']}."] if "note" in one else []
    notes += [f"Not run: {_how(one)}."] if "not_run" in one else []
    yield from ("", " ".join(notes), "")
