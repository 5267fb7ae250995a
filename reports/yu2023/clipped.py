"""Figures 7 and 8, Table 3 and appendix B.2: what individual clipping changes.

Of each data set one pair of whole runs, with and without; several seeded pairs besides, of all images or of few.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from indpriv._formatting import format_number, format_share
from reports.shared.verdicts import NOT_RUN
from reports.yu2023 import paper, rules
from reports.yu2023.audits import DEFAULT, INDIVIDUAL, Audit, Summary, means_of
from reports.yu2023.measured import TABLE_3, TABLE_3_WHOLE
from reports.yu2023.paper import PaperRun
from reports.yu2023.sections import (
    FEW,
    SEEDS,
    WHOLE,
    Found,
    Known,
    Row,
    Section,
    Texts,
    Words,
    block,
    named,
    not_run_rows,
    only,
    told_apart,
    words_of,
)

_PEARSON = "Pearson's r"
_PAIR = "individual, ordinary"
_ARMS = ("individual", "ordinary")
_NO_HEADROOM = "no_headroom"
_LEAST_BELOW = 0.01  # share of levels below max_grad_norm, for a comparison
_CLOSE = "mean epsilons of groups, largest difference"

Pair = Mapping[str, tuple[Summary, Summary]]  # account -> with and without individual clipping
Seeded = Mapping[str, Any]  # runs of several seeds, by arm


def figure_7(known: Known) -> Section:
    """Epsilon and loss under individual clipping."""
    expected = f"above {paper.LEAST_PEARSON:g}"

    def whole(run: PaperRun, individual: Summary, ordinary: Summary) -> Found:
        loss = individual["loss"] or {}
        found, interval = loss.get("pearson_log_loss"), loss.get("pearson_interval")
        low = None if interval is None else interval["low"]
        return Found({_PEARSON: format_number(found)}, {"": rules.loss(found, low)})

    def seeded(found: Seeded) -> Found:
        texts, verdicts = {}, {}
        for name, arm in _without_headroom_too(found):
            values = [result["pearson"] for result in found[arm]]
            smallest = None if None in values else min(values)
            texts[" ".join(["smallest", _PEARSON, name]).strip()] = format_number(smallest)
            verdicts[name] = rules.loss(smallest, None)
        return Found(texts, verdicts)

    return _section(
        ("Figure 7", "epsilon and loss under individual clipping"),
        known,
        lambda run: {_PEARSON: expected},
        whole,
        seeded,
        compares=False,
    )


def figure_8(known: Known) -> Section:
    """Groups under individual clipping, and how close their mean epsilons are to those without it."""

    def whole(run: PaperRun, individual: Summary, ordinary: Summary) -> Found:
        return _compared([tuple(means_of(each, run.by) for each in (individual, ordinary))])

    def seeded(found: Seeded) -> Found:
        texts, verdicts = {}, {}
        for name, arm in _without_headroom_too(found, ", "):
            pairs = zip(found[arm], found["ordinary"], strict=True)
            one = _compared(
                [(these["means"], those["means"]) for these, those in pairs], found["seeds"]
            )
            texts |= {key + name: text for key, text in one.texts.items()}
            verdicts |= {key + name: verdict for key, verdict in one.verdicts.items()}
        return Found(texts, verdicts)

    return _section(
        ("Figure 8", "groups under individual clipping"),
        known,
        lambda run: {"order": "the same", _CLOSE: "close"},
        whole,
        seeded,
        note="Groups by mean epsilon, the lowest first: with individual clipping / without.",
    )


def table_3(known: Known) -> Section:
    """Test accuracy with individual and with ordinary clipping."""

    def printed(run: PaperRun) -> Texts:
        values = paper.TABLE_3.get(run.name)
        return {} if values is None else {_PAIR: ", ".join(_spread(*each) for each in values)}

    def whole(run: PaperRun, individual: Summary, ordinary: Summary) -> Found:
        pair = [100 * each["run"]["test_accuracy"] for each in (individual, ordinary)]
        text = ", ".join(f"{value:.2f}" for value in pair)
        return Found({_PAIR: text}, {"": rules.paired_accuracies([pair[0] - pair[1]])})

    def seeded(found: Seeded) -> Found:
        accuracies = {
            arm: [result["accuracy"] for result in found[arm]]
            for arm in (*_ARMS, _NO_HEADROOM)
            if arm in found
        }
        ordinary, verdicts = accuracies["ordinary"], {}
        texts = {_PAIR: ", ".join(_mean_and_deviation(accuracies[arm]) for arm in _ARMS)}
        for name, arm in _without_headroom_too(found):
            pairs = zip(accuracies[arm], ordinary, strict=True)
            verdicts[name] = rules.paired_accuracies([one - other for one, other in pairs])
            if name:
                texts[f"individual {name}"] = _mean_and_deviation(accuracies[arm])
        return Found(texts, verdicts)

    note = "Test accuracy in per cent (standard deviation over seeds). One pair of runs cannot tell a small difference from chance."
    return _section(
        ("Table 3", "test accuracy with individual and with ordinary clipping"),
        known,
        printed,
        whole,
        seeded,
        note=note,
    )


def _section(
    heading: tuple[str, str],
    known: Known,
    printed: Callable[[PaperRun], Texts],
    whole: Callable[[PaperRun, Summary, Summary], Found],
    seeded: Callable[[Seeded], Found],
    *,
    note: str = "",
    compares: bool = True,
) -> Section:
    """A block of rows for the whole pair of each data set that the paper shows, and for each kind of its seeded runs.

    compares: the pair with and without individual clipping, which then may differ in nothing else.
    """
    rows: list[Row] = []
    words: dict[str, Words] = {}
    notes, shared = [note] if note else [], []
    for run in paper.RUNS:
        expected, pair = printed(run), _pair(known, run.name)
        if not expected:
            continue
        mine: dict[str, tuple[str, ...]] = {}
        apart = told_apart(known, run.name)
        if pair and not (apart and compares):
            found = {account: whole(run, *each) for account, each in pair.items()}
            rows += block(f"{run.title}, {WHOLE}", expected, found)
            mine.update(words_of(found, WHOLE))
        elif pair:
            rows += not_run_rows(f"{run.title}, {WHOLE}", expected)
            mine[WHOLE] = (NOT_RUN,)
            notes.append(apart)
        for part, kind in ((TABLE_3_WHOLE, SEEDS), (TABLE_3, FEW)):
            entry = known.measured.get(part, {}).get(run.name)
            if entry is not None and _clips_differently(entry["found"]):
                found = {DEFAULT: seeded(entry["found"])}
                rows += block(f"{run.title}, {kind}", expected, found)
                mine.update(words_of(found, kind))
                own, common = _seeded_runs(f"{run.title}, {kind}", entry["found"])
                notes.append(own)
                shared.append(common)
            elif entry is not None:
                rows += not_run_rows(f"{run.title}, {kind}", expected)
                mine[kind] = (NOT_RUN,)
                notes.append(
                    f"{run.title}, {kind}: hardly any norm lay below C, so that both kinds of clipping are the same."
                )
        if not mine:
            rows += not_run_rows(run.title, expected)
        words[run.title] = mine or only(NOT_RUN)
    return Section(
        *heading, tuple(rows), words, " ".join(filter(None, [*notes, *dict.fromkeys(shared)]))
    )


def _without_headroom_too(found: Seeded, before: str = "") -> list[tuple[str, str]]:
    """The arms of individual clipping: how a row names one, and its key."""
    arms = {"": _ARMS[0], f"{before}without headroom": _NO_HEADROOM}
    return [(name, arm) for name, arm in arms.items() if arm in found]


def _clips_differently(found: Seeded) -> bool:
    """Whether some levels of individual clipping lay below max_grad_norm, so that it is another clipping."""
    return max(result["below"] for result in found["individual"]) >= _LEAST_BELOW


def _pair(known: Known, name: str) -> Pair:
    """The whole runs with and without individual clipping, by account; nothing where one is missing."""
    audits: list[Audit] = [
        audit for each in (name + INDIVIDUAL, name) if (audit := known.audits.get(each)) is not None
    ]
    if len(audits) < len(_ARMS):
        return {}
    individual, ordinary = (audit.accounts for audit in audits)
    return {
        account: (individual[account], ordinary[account])
        for account in individual
        if account in ordinary
    }


def _compared(
    pairs: Sequence[tuple[Mapping[str, float], ...]], seeds: Sequence[int] | None = None
) -> Found:
    """Order and closeness of the mean epsilons of groups with and without individual clipping, of each pair of runs."""
    orders = [[sorted(means, key=means.__getitem__) for means in pair] for pair in pairs]
    labels = ["order"] if seeds is None else [f"order, seed {seed}" for seed in seeds]
    texts = {
        label: " / ".join(" ".join(map(named, names)) for names in pair)
        for label, pair in zip(labels, orders, strict=True)
    }
    largest = max(
        abs(individual[name] / ordinary[name] - 1)
        for individual, ordinary in pairs
        for name in ordinary
    )
    return Found(
        {**texts, _CLOSE: format_share(largest, 1)},
        {
            "order": rules.same_order([(one, other) for one, other in orders]),
            "closeness": rules.close(largest),
        },
    )


def _spread(mean: float, deviation: float) -> str:
    return f"{mean:.2f} ({deviation:.2f})"


def _mean_and_deviation(values: Sequence[float]) -> str:
    return _spread(statistics.fmean(values), statistics.stdev(values))


def _seeded_runs(title: str, found: Seeded) -> tuple[str, str]:
    """What a kind of seeded runs is, and what all have in common, which is said once."""
    seeds = found["seeds"]
    where = f"on {found['device']}" if "device" in found else "far smaller than the paper's"
    return (
        f"{title}: {found['setting']}; {where}.",
        f"Seeded runs have the seeds {seeds[0]} to {seeds[-1]}, and both arms the same batches and noise (reproducible: no "
        f"privacy); norms are recorded once an epoch, rounded up to 0.01 C, with a headroom of {found['headroom']:g} C that the paper does not have. "
        "Of few images: benchmarks/individual_clipping.py; of all: `python -m reports.yu2023 NAME --whole-seeds`.",
    )
