"""The paper's tables, its footnote 3 and its theorems, and what was not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from indpriv._formatting import format_delta, format_number
from indpriv.release.ledger import DESCENT
from reports.shared.markdown_table import table
from reports.shared.verdicts import NOT_RUN
from reports.yu2023 import paper, rules
from reports.yu2023.audits import DEFAULT, PRESET
from reports.yu2023.clipped import table_3
from reports.yu2023.measured import DISTRIBUTION, FOOTNOTE_3, METHODS, TABLE_1, TABLE_2
from reports.yu2023.paper import PaperRun
from reports.yu2023.sections import NOTHING, Found, Known, Row, Section, not_run, only, words_of

_ACCOUNTS = {PRESET: "preset yu2023", DEFAULT: "sound default"}


def tables(known: Known) -> tuple[Section, ...]:
    """Tables 1 to 3 and footnote 3."""
    return (table_1(known), table_2(known), table_3(known), footnote_3(known))


def table_1(known: Known) -> Section:
    """The cost of an account with and without rounding."""
    number, title = "Table 1", "what rounding norms saves"
    found = known.single(TABLE_1)
    if found is None:
        expected = {
            f"{name}, {count} computations": seconds
            for name, (count, seconds) in paper.TABLE_1.items()
        }
        return not_run(number, title, "CIFAR-10", expected)
    verdict = rules.cost(found["paper_with_rounding"], found["paper_without_rounding"])
    rows = [
        (
            "CIFAR-10" if key == "with_rounding" else "",
            f"{name}, {count} computations",
            seconds,
            theirs,
            ours,
        )
        for key, (name, (count, seconds)) in zip(
            ("with_rounding", "without_rounding"), paper.TABLE_1.items(), strict=True
        )
        for theirs, ours in [(_seconds(found[f"paper_{key}"]), _seconds(found[f"ours_{key}"]))]
    ]
    note = (
        "50,000 examples x 200 records. The paper: 5 cores of an EPYC 7V13. Here the column of the preset is the paper's method, "
        f"one call of Opacus's compute_rdp a norm at its own orders ({1000 * found['call']:.2f} ms, a sample of 40, extrapolated to "
        "all norms); the other is our whole account of such norms (log-normal ones), from norms to epsilons, with the conversion and "
        "the search for the best order. Each on one core, its own time. See table_1 in benchmarks/accountant.py."
    )
    return Section(
        number,
        title,
        (*rows, ("", "verdict", "", str(verdict), NOTHING)),
        {"CIFAR-10": only(verdict.word)},
        note,
    )


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value < 100 else f"{value:,.0f} s"


def table_2(known: Known) -> Section:
    """Statistics of individual epsilon released in private."""
    rows: list[Row] = []
    words, extra, descents = {}, [], set()
    for run in paper.RUNS:
        if run.release is None:
            continue
        found = {
            account: known.part(TABLE_2, run.name, account)
            for account in _ACCOUNTS
            if run.name in known.audits
        }
        drawn = {account: value for account, value in found.items() if value is not None}
        if not drawn:
            rows.append(
                (
                    run.title,
                    "",
                    f"error rate {run.release.error_rate} %",
                    f"**{NOT_RUN}**",
                    f"**{NOT_RUN}**",
                )
            )
            words[run.title] = only(NOT_RUN)
            continue
        verdicts = {
            account: _verdicts(known, run, account, value) for account, value in drawn.items()
        }
        names = dict.fromkeys(name for each in verdicts.values() for name in each)
        rows += [
            (
                run.title if index == 0 else "",
                METHODS.get(name, name),
                f"{run.release.error_rate} %" if name == DESCENT else NOTHING,
                *(str(verdicts.get(account, {}).get(name, NOTHING)) for account in _ACCOUNTS),
            )
            for index, name in enumerate(names)
        ]
        words[run.title] = words_of(
            {account: Found({}, each) for account, each in verdicts.items()}
        )
        extra.append(_layout(known, run, drawn))
        descents |= {value["descent"] for value in drawn.values() if "descent" in value}
    note = (
        f"Average and quantiles at ({paper.RELEASE_EPSILON:g}, {format_delta(paper.DELTA)}) together; ours without noise that needs a delta at "
        f"({paper.RELEASE_EPSILON:g}, 0). One record more or less; each person one record; the number of examples is private and "
        "estimated with noise. One real draw each, paid for in the ledger of its audit and drawn once: the same page is made "
        "again from the stored answers. **Non-private values are printed here because these data sets are public; of other data "
        "they are for the curator only.** Settings of these runs were tried on the same data, and earlier runs were "
        "released from; no ledger here counts that. The step size and the mean's share of the budget are ours, the paper names "
        "the default setup of Andrew et al. only. Mean errors over many draws: benchmarks/release.py."
    )
    note += "".join(f" Drawn by {text}." for text in sorted(descents))
    title = "average and quantiles of individual epsilon, released in private"
    return Section("Table 2", title, tuple(rows), words, note, "\n\n".join(extra))


def _verdicts(
    known: Known, run: PaperRun, account: str, drawn: Mapping[str, Any]
) -> dict[str, rules.Verdict]:
    """By method; one where the release was refused."""
    more = known.part(DISTRIBUTION, run.name, account)
    if "refused" in drawn or more is None:
        return {
            "": rules.Verdict(
                NOT_RUN, f"refused: {drawn['refused']}" if more else "no non-private values"
            )
        }
    return {
        name: rules.release(rules.error_rate(drawn["methods"][name], more["statistics"]))
        for name in METHODS
    }


def _layout(known: Known, run: PaperRun, drawn: Mapping[str, Mapping[str, Any]]) -> str:
    """The paper's layout of one data set."""
    release = run.release
    rows = (
        []
        if release is None
        else [
            _line("paper, non-private", release.non_private),
            _line("paper, private", release.private),
        ]
    )
    for account, found in drawn.items():
        more = known.part(DISTRIBUTION, run.name, account)
        if more is not None:
            rows.append(_line(f"{_ACCOUNTS[account]}, non-private", more["statistics"]))
        drawn_by = found.get("methods", {})
        rows += [
            _line(f"{_ACCOUNTS[account]}: {text}", drawn_by[name])
            for name, text in METHODS.items()
            if name in drawn_by
        ]
    return table([run.title, *paper.TABLE_2_COLUMNS], rows)


def _line(name: str, values: Any) -> list[str]:
    return [name, *(NOTHING if value is None else f"{value:.3f}" for value in values)]


def footnote_3(known: Known) -> Section:
    """The private median of gradient norms, to choose C by."""
    number, title = "Footnote 3", "the median gradient norm at initialisation, released in private"
    entries = {
        name: entry["found"]
        for name, entry in known.measured.get(FOOTNOTE_3, {}).items()
        if name in known.audits and entry["source"] == known.audits[name].run_id
    }
    theirs = "{}, private {}".format(*paper.FOOTNOTE_3)
    rows, words = [], {}
    if "utkface_gender" not in entries:
        rows.append(("UTKFace-Gender", "median norm", theirs, NOTHING, f"**{NOT_RUN}**"))
        words["UTKFace-Gender"] = only(NOT_RUN)
    for name, found in entries.items():
        run = paper.run_named(name)
        heading = name if run is None else run.title
        expected = theirs if name == "utkface_gender" else NOTHING
        if "refused" in found:
            rows.append(
                (
                    heading,
                    "median norm",
                    expected,
                    NOTHING,
                    f"{format_number(found['non_private'])}; **{NOT_RUN}** (refused: {found['refused']})",
                )
            )
            words[heading] = only(NOT_RUN)
            continue
        verdict = rules.release(rules.error_rate([found["private"]], [found["non_private"]]))
        rows.append(
            (
                heading,
                "median norm",
                expected,
                NOTHING,
                "{}, private {}".format(
                    *map(format_number, (found["non_private"], found["private"]))
                ),
            )
        )
        rows.append(("", "verdict", "", NOTHING, str(verdict)))
        words[heading] = only(verdict.word)
    note = (
        f"`indpriv publish quantiles RUN --of norms --quantiles 0.5 --epsilon {paper.RELEASE_EPSILON:g}`: at ({paper.RELEASE_EPSILON:g}, 0), the paper's "
        f"at ({paper.RELEASE_EPSILON:g}, {format_delta(paper.DELTA)}). Add/remove one example. Norms follow the model, so that theirs and ours "
        "have no reason to be equal; the verdict is on how near the private value comes. A C chosen so costs this much on top."
    )
    return Section(number, title, tuple(rows), words, note)


def theorems() -> str:
    """What stands for the paper's theorems."""
    rows = [
        [
            "Theorem 3.1",
            "the accounting theorem: the Rényi divergences of the steps of one trajectory add up",
            "`indpriv.account`; against Opacus, dp-accounting and an integral by definition in tests/accountant/test_rdp.py and "
            "tests/accountant/test_contract.py",
        ],
        [
            "Theorem 3.2 (section 3.4)",
            "telling an owner their epsilon costs others nothing, where the map to value and trajectory is bijective",
            "`indpriv publish statement` states the condition and reads nothing else of the data: tests/release/test_statement.py; where "
            "settings were chosen from the data it refuses: tests/release/test_assumptions.py",
        ],
    ]
    return (
        "## Theorems\n\nA theorem is proven, not reproduced; here is what stands for it.\n\n"
        + table(["theorem", "what it says", "in this project"], rows)
    )
