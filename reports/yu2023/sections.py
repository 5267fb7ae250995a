"""One section of the page: the paper beside both of our accounts in one table, with a verdict for each data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from indpriv._formatting import format_interval
from indpriv.report.page import escape
from reports.shared.markdown_table import table
from reports.shared.verdicts import NOT_RUN
from reports.yu2023.audits import DEFAULT, INDIVIDUAL, PRESET, Audit, Summary, folder_of, values_of
from reports.yu2023.paper import RUNS, PaperRun
from reports.yu2023.rules import Verdict

HEAD = ("data set", "", "paper", "ours, preset yu2023", "ours, sound default")
NOTHING = "–"
_CLIPPING = (
    "individual_clipping",
    "clip_headroom",
    "non_dp_twin",
    "non_private_baseline",
    "non_dp_learning_rate",
    "non_private_learning_rate",
    "non_private_weight_decay",
    "non_private_epochs",
)  # what the two runs are to differ in
WHOLE, SEEDS, FEW = (
    "whole",
    "whole, seeds",
    "few",
)  # of individual clipping: one run of all images; several seeds of all; of few

Texts = Mapping[str, str]
Words = Mapping[str, tuple[str, ...]]  # verdict ("" where there is one) -> its word by each account
Row = tuple[str, ...]  # as many as HEAD


@dataclass(frozen=True)
class Section:
    """A figure or a table of the paper.

    Attributes:
        number, title: of the figure or table.
        rows: data set, quantity, paper, preset, default; Markdown.
        words: data set -> the words that the overview shows and counts.
        note: what differs, and how to read it; extra: further Markdown below the table.
    """

    number: str
    title: str
    rows: tuple[Row, ...]
    words: Mapping[str, Words]
    note: str = ""
    extra: str = ""

    def render(self) -> str:
        """Markdown of the section."""
        parts = [
            f"## {self.number}: {self.title}",
            self.note,
            table(HEAD, self.rows) if self.rows else "",
            self.extra,
        ]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Found:
    """What one account says for one figure: quantities, and verdicts by name ("" where there is one)."""

    texts: Texts
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """All that a page is made of: audits by name, and what was measured besides."""

    audits: Mapping[str, Audit]
    measured: Mapping[str, Any]

    def part(self, part: str, name: str, account: str) -> Mapping[str, Any] | None:
        """What was measured of the epsilons of an audit, or None where that was of others."""
        entry, summary = (
            self.measured.get(part, {}).get(folder_of(name, account)),
            self.audits[name].accounts.get(account),
        )
        same = entry is not None and summary is not None and entry["source"] == values_of(summary)
        return entry["found"] if same else None

    def single(self, part: str) -> Mapping[str, Any] | None:
        """What was measured once, of no audit of its own."""
        entries = list(self.measured.get(part, {}).values())
        return entries[0]["found"] if entries else None


def compare(
    number: str,
    title: str,
    known: Known,
    paper: Callable[[PaperRun], Texts],
    ours: Callable[[PaperRun, Summary, str], Found],
    *,
    names: Iterable[str] | None = None,
    note: str = "",
    extra: str = "",
) -> Section:
    """A section with a block of rows for each data set: the paper's texts, and those of both accounts.

    Args:
        number: of the figure; title: what it shows.
        title: see number.
        known: what there is.
        paper: the paper's texts by quantity.
        ours: of a run, the summary of one account, and the name of that account.
        names: the data sets it shows; default all four.
        note: see `Section`; likewise extra.
        extra: see note.
    """
    rows: list[Row] = []
    words = {}
    for run in RUNS:
        if names is not None and run.name not in names:
            continue
        expected, audit = paper(run), known.audits.get(run.name)
        if audit is None:
            rows += not_run_rows(run.title, expected)
            words[run.title] = only(NOT_RUN)
            continue
        found = {
            account: ours(run, summary, account) for account, summary in audit.accounts.items()
        }
        rows += block(run.title, expected, found)
        words[run.title] = words_of(found)
    return Section(number, title, tuple(rows), words, note, extra)


def block(title: str, expected: Texts, found: Mapping[str, Found]) -> list[Row]:
    """The rows of one data set: the paper's texts by quantity, and what each account found."""
    quantities = list(
        dict.fromkeys([*expected, *(name for each in found.values() for name in each.texts)])
    )
    verdicts = list(dict.fromkeys(name for each in found.values() for name in each.verdicts))
    cells = [
        (
            quantity,
            expected.get(quantity, NOTHING),
            *(_text(found, account, quantity) for account in (PRESET, DEFAULT)),
        )
        for quantity in quantities
    ]
    cells += [
        (
            f"verdict: {name}" if name else "verdict",
            "",
            *(_verdict(found, account, name) for account in (PRESET, DEFAULT)),
        )
        for name in verdicts
    ]
    return [(title if index == 0 else "", *row) for index, row in enumerate(cells)]


def _text(found: Mapping[str, Found], account: str, quantity: str) -> str:
    return found[account].texts.get(quantity, NOTHING) if account in found else NOTHING


def _verdict(found: Mapping[str, Found], account: str, name: str) -> str:
    each = found.get(account)
    return str(each.verdicts[name]) if each is not None and name in each.verdicts else NOTHING


def words_of(found: Mapping[str, Found], prefix: str = "") -> Words:
    """Words by verdict, of each account, the sound default last; prefix: before the verdicts' names."""
    names = dict.fromkeys(name for each in found.values() for name in each.verdicts)
    return {
        ", ".join(part for part in (prefix, name) if part): tuple(
            each.verdicts[name].word for each in found.values() if name in each.verdicts
        )
        for name in names
    }


def only(word: str) -> Words:
    """One word for the whole."""
    return {"": (word,)}


def shown(words: Words) -> str:
    """The words of a data set as text: one where the accounts agree."""
    return "; ".join(
        (f"{name}: " if name else "") + " / ".join(dict.fromkeys(each))
        for name, each in words.items()
    )


def not_run(number: str, title: str, name: str, expected: Texts) -> Section:
    """A section of what has no run, or was not measured yet, beside the paper's texts."""
    return Section(number, title, not_run_rows(name, expected), {name: only(NOT_RUN)})


def not_run_rows(title: str, expected: Texts) -> tuple[Row, ...]:
    """The rows of a data set without a run."""
    rows = [(quantity, value, NOTHING, NOTHING) for quantity, value in expected.items()]
    rows.append(("verdict", "", f"**{NOT_RUN}**", f"**{NOT_RUN}**"))
    return tuple((title if index == 0 else "", *row) for index, row in enumerate(rows))


def named(text: str) -> str:
    """A name from the data, so that Markdown does not obey it."""
    return escape(text)


def percent(row: Mapping[str, Any]) -> str:
    """The success rate of an attack with its interval, in per cent."""
    if row["success_rate"] is None:
        return NOTHING
    return f"{100 * row['success_rate']:.1f} {format_interval(100 * row['low'], 100 * row['high'], 1)} %"


def told_apart(known: Known, name: str) -> str:
    """In which settings, other than clipping, a data set's two whole runs differ; "" where they are alike, or not both there."""
    runs = [known.audits.get(each) for each in (name + INDIVIDUAL, name)]
    settings = [
        audit.default["run"]["declared"]["config"]["training"]
        for audit in runs
        if audit is not None
    ]
    if len(settings) < len(runs):
        return ""
    one, other = (
        {key: value for key, value in each.items() if key not in _CLIPPING} for each in settings
    )
    differing = [
        f"{key} ({one.get(key)}, {other.get(key)})"
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key)
    ]
    if not differing:
        return ""
    return f"The two runs of {name} also differ in {', '.join(differing)}, and are not compared."
