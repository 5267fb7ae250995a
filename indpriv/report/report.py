"""The report of an audit, and what commands print of what they found. Sensitive.

Pages, Markdown and the first screen of a terminal are templates; here are their values.
"""

import base64
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from indpriv import _facts
from indpriv._columns import grouping_of
from indpriv._formatting import clean, format_epsilon, format_share, format_share_up, formatted
from indpriv._plain import records, shown, to_json
from indpriv.analysis import summary
from indpriv.analysis.advice import MOST_NOISE, Advice, Remedy
from indpriv.analysis.attacks.canaries import AttackMeasures
from indpriv.analysis.attacks.rates import ALL, MIN_TRIALS, UPDATES, achieved, interval
from indpriv.analysis.disclosures import Range, recording
from indpriv.analysis.schedule import evenly_spaced_records, read_one
from indpriv.analysis.statistics import Interval
from indpriv.analysis.summary import SENSITIVE, Audit, keys
from indpriv.attack_scores import RUNGS
from indpriv.epsilon_table import DISCLAIMER, FALSE_POSITIVE_RATE, EpsilonTable
from indpriv.norm_log.norm_log import NormLog
from indpriv.report import formats
from indpriv.report.page import Page, Template, print_page

_SCREEN, _WIDTH, _KEY_WIDTH = 16, 80, 18  # lines, columns, columns of a line's first words
_ROOM = _WIDTH - _KEY_WIDTH
_OF_A_RUN = ("batch", "contribution", "noise", "update", "settings", "source", "start")


def audit_page(audit: Audit, since: Audit | None = None) -> Page:
    """The report of an audit; since: an earlier one to compare it with."""
    run = audit.run
    return Page(
        "report",
        title=f"Privacy audit of {audit.name}",
        eyebrow="Individual privacy audit",
        name=audit.name,
        meta=f"{shown(run, 'n_examples')} training examples · "
        f"{shown(run, 'total_steps')} steps of DP-SGD "
        f"· audited {audit.created[:10]} with indpriv {audit.versions['indpriv']}",
        values=values_of(audit, since),
    )


def print_audit(
    audit: Audit,
    console: Console,
    *,
    report: str = "",
    verbose: bool = False,
    since: Audit | None = None,
) -> None:
    """Print the first screen of an audit; verbose: what every section says in short.

    report: where the page is, for the last line.
    """
    head = Grid.grid(expand=True)
    head.add_column(overflow="ellipsis", no_wrap=True)
    head.add_column(justify="right", no_wrap=True)
    head.add_row(Text(clean(audit.name), style="bold"), Text(SENSITIVE, style="bold red"))
    console.print(head)
    values = values_of(audit, since)
    if not verbose:
        values = {**values, **_first_screen(audit, values, report)}
    print_page("verbose" if verbose else "screen", console, key_width=_KEY_WIDTH, **values)


def _first_screen(audit: Audit, values: Mapping[str, Any], report: str) -> dict[str, Any]:
    """Texts of the first screen, each as long as its room; points to look at fill what is left."""
    why, n_rows = _brief(_why(audit), audit.run.n_examples), audit.run.n_examples
    points = [
        formats.shorten(_brief(_as_check(audit, text), n_rows), _ROOM)
        for text in values["alarms"] + values["notes"]
    ]
    points = [text for text in dict.fromkeys(points) if text != formats.shorten(why, _ROOM)]
    more = f"{report} | --verbose" if report else "--verbose"
    texts = {"evidence_line": _evidence(audit), "more": more, "looks": []}
    for groupings, most in product((3, 2, 1), range(160, 20, -20)):
        texts |= {"why": formats.shorten(why, most).rstrip(".")}
        texts |= {"group_lines": _group_lines(values, groupings)}
        room = _SCREEN - _height({**values, **texts})
        if room >= 2:
            break
    if (left := len(points) - room) > 0:
        points[room - 1 :] = [f"{formats.counted(left + 1, 'more point')} in the report"]
    return texts | {"looks": points}


def _height(values: Mapping[str, Any]) -> int:
    """Lines of the first screen with these values, the name of the run included."""
    lines = io.StringIO()
    print_page("screen", Console(file=lines, width=_WIDTH), key_width=_KEY_WIDTH, **values)
    return 1 + len(lines.getvalue().splitlines())


def _why(audit: Audit) -> str:
    """Why the guarantee is not supported, as the checks say it that failed."""
    found = audit.guarantee
    withheld = (found.stands and not found.publishable) or not found.reasons
    return str(found.withheld) if withheld else _as_check(audit, found.reasons[0])


def _as_check(audit: Audit, text: str) -> str:
    """A sentence as the failed check says it whose finding it repeats, if it repeats one."""
    failed = (one for one in audit.checks if one.status == _facts.FAILED)
    return next((f"{one.title}: {one.detail}" for one in failed if one.detail in text), text)


def _brief(text: str, n_rows: int, key: str = "line") -> str:
    """What brief.toml says for a sentence, in a line or on a page; else the sentence."""
    for one in formats.data_of("brief")["brief"]:
        if key in one and (found := re.search(one["match"], text)):
            named = found.groupdict()
            share = format_share(int(named.get("n", "0").replace(",", "")) / max(n_rows, 1))
            brief: str = one[key].format(**named, share=share)
            return brief
    return text


def _group_lines(values: Mapping[str, Any], most: int) -> list[str]:
    """Lines on at most so many groupings, that with the largest ratio first, and on the others."""
    compared, small = values["compared"], values["small"]
    lines = [line for ends in compared[:most] for line in _group_line(*ends)]
    rest = []
    if len(compared) > most:
        rest.append(f"{formats.counted(len(compared) - most, 'more grouping')} in the report")
    if values["groups"] and not compared and not small:
        rest.append("no two groups are large enough to compare")
    if small:  # a number that is cut would be another number
        few = *(formats.listed(small, n) for n in (2, 1)), formats.counted(len(small), "group")
        ends = ["; ".join([f"too few to compare: {one}", *rest]) for one in few]
        rest = [_fitting(ends) or formats.shorten(ends[-1], _ROOM)]
    return [*lines, *rest]


def _group_line(table: Any, best: Any, worst: Any) -> list[str]:
    """Two groups with their means, sizes and ratio; on two lines before the column is cut."""
    reversed_in = table.reversed_labels(beyond_chance=True)
    named = f" ! reversed among {quoted(reversed_in[0], 12)}" if reversed_in else ""
    marks = (named, " ! reversed", " !") if named else ("",)
    pairs = [
        (
            f"{quoted(worst.name, most)} {shown(worst, 'mean')} (n {_size(worst.n)})",
            f"{quoted(best.name, most)} {shown(best, 'mean')} ({_size(best.n)}) "
            f"x{shown(table.ratio, 'value')}",
        )
        for most in range(24, 3, -1)
    ]
    together = product(marks, pairs[:13], (" vs ", ", "))
    if line := _fitting(f"{table.by} {a}{and_}{b}{mark}" for mark, (a, b), and_ in together):
        return [line]
    columns = (formats.shorten(table.by, most) for most in range(40, 3, -1))
    return [
        _fitting(f"{column} {first} vs" for column, (first, _) in product(columns, pairs[:17])),
        _fitting(f"{second}{mark}" for mark, (_, second) in product(marks, pairs)),
    ]


def _fitting(lines: Iterable[str]) -> str:
    return next((line for line in lines if cell_len(clean(line)) <= _ROOM), "")


def _size(n: int) -> str:
    return f"{n:,}" if n < 1_000_000 else f"{n / 1e6:.1f} M"


def quoted(name: str, most: int) -> str:
    """A name in quotation marks, of at most this many columns."""
    return f'"{formats.shorten(name, most)}"'


def _evidence(audit: Audit) -> str:
    """How many lines of evidence are verified, and what the others are."""
    lines = [one for one in audit.guarantee.lines if one.key in _OF_A_RUN]
    if not lines:
        return "none: recorded before training was compared"
    ours = [one for one in lines if one.key not in ("source", "start")]
    first = f"{sum(one.status == _facts.VERIFIED for one in ours)} of {len(ours)} verified"
    words = {
        word: [one.key for one in lines if one.status == word]
        for word in (_facts.REFUTED, _facts.DECLARED, _facts.ON_TRUST)
    }
    named = [f"{word}: {', '.join(of)}" for word, of in words.items() if of]
    counts = [f"{len(of)} {word}" for word, of in words.items() if of]
    choices = map("; ".join, ([first, *named], [first, *counts]))
    return next((line for line in choices if len(line) <= _ROOM), first)


@lru_cache(maxsize=1)  # a page, audit.md and the first screen are made of one audit
def values_of(audit: Audit, since: Audit | None = None) -> Mapping[str, Any]:
    """What the templates of a report show: all that the audit found, and what follows from it."""
    quote = "" if audit.guarantee.publishable else " This run has no guarantee to quote."
    worst, last = audit.guarantee.worst_case_epsilon, audit.individual.edges[-1]
    compared = [of for of in map(_ends, audit.groups) if of is not None]
    return {
        **{key: getattr(audit, key) for key in keys()},
        "audit": audit,
        "templates": [finding.name for finding in summary.findings()],
        "alarms": summary.alarms_of(audit),
        "notes": (notes := summary.notes_of(audit)),
        "points": [_brief(text, audit.run.n_examples, "page") for text in notes],
        "disclaimer": DISCLAIMER + quote,
        "disclosed": {one.key: one for one in audit.disclosures},
        # In figures; not where that of the largest unit is far off their scale
        "worst_case_drawn": None if audit.unit_sizes and worst > last else worst,
        "compared": sorted(compared, key=lambda of: -of[0].ratio.value),
        "small": [
            f"{row.name} ({shown(row, 'n')})"
            for table in audit.groups
            for row in records(table.rows)
            if row.too_small and row.n
        ],
        "membership": (attacks := attack_values(audit)),
        "strongest": attacks["best"],
        "success": attacks["success"],
        "groups_by_ratio": sorted(
            audit.groups, key=lambda one: -((one.ratio and one.ratio.value) or 0.0)
        ),
        "checked": _checked(audit),
        "how_recorded": recording(audit.run),
        "seed_can_be_guessed": any(
            (one.key, one.status) == ("seeds", _facts.FAILED) for one in audit.checks
        ),
        "declared_json": json.dumps(
            audit.run.declared.content, indent=2, ensure_ascii=False, default=str
        ),
        "interval_of": lambda row: formatted(interval(row), "percent_span"),
        "since": since,
    }


def _checked(audit: Audit) -> dict[str, Any]:
    """Which checks passed, which were not made, and what is on trust."""
    checks, lines = audit.checks, audit.guarantee.lines
    hazards = [
        one.short
        for one in audit.hazards
        if one.kind == "assumption" and one.key not in {line.key for line in lines}
        if one.status not in (_facts.VERIFIED, _facts.FAILED, _facts.ON_TRUST)
    ]
    passed = [one for one in checks if one.status == _facts.PASSED]
    trusted = [line.title.lower() for line in lines if line.status == _facts.ON_TRUST]
    return {
        "passed": len(passed),
        "unknown": [one.title for one in checks if one.status == _facts.NOT_CHECKED],
        "origin": [f"{one.title}: {one.detail}" for one in passed if one.key == "journal"],
        "trusted": trusted + hazards,
    }


def _ends(table: Any) -> tuple[Any, Any, Any] | None:
    """A grouping with the rows of its best and its worst group; None where there are none."""
    if table.ratio is None or table.ratio.value is None:
        return None
    rows = {row.name: row for row in records(table.rows)}
    return table, rows[table.ratio.best], rows[table.ratio.worst]


# --- rows of tables


def attack_values(found: Audit) -> dict[str, Any]:
    """Rows of the tables on attacks, and the first of them with its rates."""
    rates, ours = found.rates, summary.attacks_on(found, "dp")
    tried = list(_tried(found, "dp"))
    success = rates[(rates["rate"] == "success") & (rates["by"] != "")]
    columns = success["by"].unique() if (success["model"] == "dp").any() else ()
    threshold = [_success_rates(found, by) for by in columns]
    several = rates["by"].eq("") & ~rates["part"].isin((ALL, UPDATES))
    by_group = achieved(rates, model="dp")
    return {
        "every": ours,
        "rows": [*tried, *_ceilings(found)],
        "baseline": (baseline := list(_tried(found, "non_dp"))),
        "above": found.attacks.loc[found.attacks["above_worst_case"], "title"].tolist(),
        "ladder": _ladder(found, tried, baseline),
        "on_updates": bool(achieved(rates, by="", part=UPDATES)),
        "accused": [row for row in by_group if "accused" in row and "auc" in row][
            : formats.MOST_ROWS
        ],
        "units": achieved(rates[several]),
        "threshold": threshold,
        "beating": list(dict.fromkeys(name for one in threshold for name in one["beating"])),
        "discrimination": [
            row
            for row in achieved(rates, attack=formats.CONSTANTS["by_loss"], by="", part=ALL)
            if {"success", "auc"} <= row.keys()
        ],
        "best": tried[0] if tried and any(one.references for one in ours) else None,
        "success": next(iter(achieved(rates, model="dp", by="", part=ALL, rate="success")), None),
    }


def _row(**values: Any) -> dict[str, Any]:
    """A row of a table, which has None for what it lacks."""
    return defaultdict(lambda: None, values)


def _tried(found: Audit, model: str) -> Iterator[dict[str, Any]]:
    """Attacks over all examples of one model with their rates, the strongest first."""
    for one in summary.attacks_on(found, model):
        for row in achieved(found.rates, attack=one.attack, model=model, by="", part=ALL):
            if "auc" in row:
                yield _row(**one._asdict() | row | {"name": one.title})


def _ceilings(found: Audit) -> Iterator[dict[str, Any]]:
    """What no attack exceeds, as rows of attacks; none where it is not known."""
    if found.ceilings is None:
        return
    for title, sees, of in (
        ("Ceiling at these norms", "Ceiling at these norms", found.ceilings.common_threshold),
        ("Worst case", "What no attacker exceeds, worst case", found.ceilings.worst_case),
    ):
        most = {"tpr_0.01": of["0.01"], "tpr_0.001": of["0.001"], "limit": True}
        yield _row(title=title, sees=sees, control=_row(), **most)


def _ladder(found: Audit, tried: Sequence[Any], baseline: Sequence[Any]) -> list[dict[str, Any]]:
    """The strongest attack of every attacker, from the one who sees least; then the ceilings."""
    strongest = {one["sees"]: one for one in reversed(tried)}
    controls = {one["attack"]: one for one in baseline}
    rows = [
        row | {"control": controls.get(row["attack"], _row())}
        for sees in RUNGS
        if (row := strongest.get(sees))
    ]
    if not rows:
        return []
    for row in achieved(found.rates, by="", part=UPDATES):
        alone = {"auc_joint": None, "tpr_0.01_joint": None, "name": row["attack"]}
        rows.append(_row(**row | alone | {"sees": "Every noisy update", "control": _row()}))
    return [*rows, *_ceilings(found)]


def _success_rates(found: Audit, by: str) -> dict[str, Any]:
    """Success rates of the threshold in all examples together, then in each group of a column."""
    of = found.rates[found.rates["by"].isin(("", by))]
    ours, others = (
        achieved(of, attack=formats.CONSTANTS["by_loss"], rate="success", model=model)
        for model in ("dp", "non_dp")
    )
    baseline = {(row["by"], row["part"]): row for row in others}
    ours.sort(key=lambda row: (row["by"], -(row["success"] or 0.0), row["part"]))
    groups = [row for row in ours if row["by"]]
    tried = [row for row in groups if row["success_n"]][: formats.MOST_ROWS]
    readable = [row["success"] for row in groups if row["success_n"] >= MIN_TRIALS]
    none = {"success": None, "success_interval": None}
    return {
        "by": by,
        "rows": [
            row | {"baseline": baseline.get((row["by"], row["part"]), none)}
            for row in (*ours[: len(ours) - len(groups)], *tried)
        ],
        "baseline": bool(baseline),
        "range": formatted(Interval(min(readable), max(readable)), "percent_span")
        if len(readable) > 1
        else "",
        "beating": [
            row["part"] for row in ours if (of := row["success_interval"]) and of.low > 0.5
        ],
        "skipped": len(groups) - len(tried),
    }


def print_sensitive(template: Template, console: Console, **values: Any) -> None:
    """Print a template below a line that says that it is sensitive."""
    console.print(Text(SENSITIVE, style="bold red"))
    print_page(template, console, **values)


def print_whole(page: Page, console: Console) -> None:
    """Print a page with what stands above it."""
    console.print(Text(SENSITIVE, style="bold red"))
    console.print(Text(clean(page.title), style="bold"))
    console.print(Text(clean(page.meta)))
    print_page(page.template, console, **page.values)


def attack_document(measures: AttackMeasures) -> dict[str, Any]:
    """The JSON of an attack's scores: every rate of all examples, then of each group."""
    return {
        "sensitive": SENSITIVE,
        "meaning": formats.data_of("texts")["of_bounds"],
        "looks_turned": measures.looks_turned,
        **to_json(measures),
    }


def print_attack(measures: AttackMeasures, console: Console) -> None:
    """Print what the scores of one attack prove."""
    bounds = [measures.bounds["steinke2023"], *measures.group_bounds.values()]
    parts = zip(achieved(measures.rates), bounds, strict=True)
    rows = [_row(**one, bound=bound) for one, bound in parts]
    print_sensitive("attack", console, rows=rows, measures=measures)


def advice_page(found: Advice, template: Template = "advice") -> Page:
    """The page of an advice; template: another one with these values."""
    return Page(
        template,
        title=f"Advice on {found.name}",
        eyebrow="What would lower the epsilons of a group",
        name=found.name,
        meta=f"{formats.counted(found.groups[0].n, found.plural[:-1])} · "
        f"target epsilon {shown(found, 'target')} "
        f"for {shown(found, 'quantile')} of each group",
        values={"found": found, "remedy": _remedy},
    )


def _remedy(found: Remedy, now: Range, up: bool) -> str:
    """A setting with its interval; a factor where the setting changed in the run."""

    def shown(factor: float | None) -> str:
        if factor is None:
            return f"> {MOST_NOISE:g} times" if up else "none"
        if now.min != now.max:
            return f"× {formats.setting(factor, up=up)}"
        return formats.setting(now.min * factor, up=up)

    ends = sorted(
        (found.factor_low, found.factor_high), key=lambda end: math.inf if end is None else end
    )
    text = "as now" if found.factor == 1 else shown(found.factor)
    return text if ends == [found.factor] * 2 else f"{text} [{shown(ends[0])}, {shown(ends[1])}]"


# --- what the page's search reads of each example; the script only picks texts that are made here

CLIPPED = 101  # the code of a norm above max_grad_norm
_MOST_RECORDS = 16  # norms kept of each example


def search_data(
    audit: Audit, log: NormLog, table: EpsilonTable, train: pd.DataFrame | None
) -> Markup | None:
    """What the search reads, as JSON that can stand inside a script element.

    A coding has the facts that one code per example picks: each a name, and the text of each code.
    train: one row for each row of the table, in its order; None where groups are unknown. The
    result is None for more than MOST_EXAMPLES.
    """
    if len(table) > formats.MOST_EXAMPLES:
        return None
    ids, codings = table.example_ids, _figures(audit, table)
    for by in [groups.by for groups in audit.groups]:
        if train is not None:
            found = grouping_of(train, None, by, max_values=None)
            names = list(map(clean, found.names))
            codings.append(_coding([(clean(f"Group by {by}"), names)], found.codes(train)))
    # The norms of a unit's rows are not its own.
    rows = [] if table.account.rows_per_unit else evenly_spaced_records(log, _MOST_RECORDS)
    data = {
        "what": table.account.plural[:-1],
        "n": len(table),
        # Ids that are positions need no list.
        "ids": None
        if np.array_equal(ids, np.arange(len(ids)))
        else [clean(str(one)) for one in ids.tolist()],
        "codings": codings,
        "steps": log.recorded_steps[rows].tolist(),
        "norms": _packed(norms_in_per_cent(log, rows), 1),
        "clipped": CLIPPED,
    }
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def norms_in_per_cent(log: NormLog, rows: Sequence[int]) -> NDArray[np.uint8]:
    """(n_examples, n_records) per cent of max_grad_norm, rounded up; CLIPPED above it."""
    norms = np.zeros((log.n_examples, len(rows)), np.uint8)
    for column, row in enumerate(rows):
        codes, relative, above = read_one(log, row)
        percent = np.minimum(np.ceil(100 * relative * (1 - 1e-9)), 100)
        norms[:, column] = np.where(above, CLIPPED, percent)[codes]
    return norms


def _figures(audit: Audit, table: EpsilonTable) -> list[dict[str, Any]]:
    """Epsilon and what it would mean to an attacker; for units, their rows and their worst case."""
    shown, largest, codes = _shown(table.epsilon)
    facts = [(f"Individual epsilon ({audit.claim})", shown)]
    if audit.guarantee.stands:
        title = _facts.text("sentence.lookup", "membership", rate=FALSE_POSITIVE_RATE)
        own = np.zeros(len(shown))
        np.maximum.at(own, codes, table.details.get("true_positive_limit", np.float64(1.0)))
        limits = map(audit.guarantee.true_positive_limit, largest, own.tolist())
        facts.append((title, [f"finds it in at most {format_share_up(each)}" for each in limits]))
    found = [_coding(facts, codes)]
    if "unit_worst_case" in table.details:
        shown, _, codes = _shown(table.details["unit_worst_case"].astype(np.float64))
        found.append(_coding([("Worst case of this number of rows", shown)], codes))
        rows, codes = np.unique(table.details["n_rows"], return_inverse=True)
        found.append(_coding([("Rows", [f"{each:,}" for each in rows.tolist()])], codes))
    return found


def _shown(epsilon: NDArray[np.float64]) -> tuple[list[str], list[float], NDArray[np.integer]]:
    """The distinct texts of some epsilons, each rounded up, the largest epsilon of each, and codes.

    Texts grow with the epsilon, so that equal ones are neighbours.
    """
    values, inverse = np.unique(epsilon, return_inverse=True)
    texts = np.array([format_epsilon(value) for value in values.tolist()])
    first = np.append(True, texts[1:] != texts[:-1])
    last = np.append(first[1:], True)
    return texts[first].tolist(), values[last].tolist(), (np.cumsum(first) - 1)[inverse]


def _coding(
    facts: Sequence[tuple[str, Sequence[str]]], codes: NDArray[np.integer]
) -> dict[str, Any]:
    n_values = len(facts[0][1])
    width = 1 if n_values <= 1 << 8 else 2 if n_values <= 1 << 16 else 4
    return {"facts": facts, "bytes": width, "codes": _packed(codes, width)}


def _packed(codes: NDArray[np.integer], width: int) -> str:
    """Little-endian unsigned integers of this many bytes, in base64."""
    return base64.b64encode(codes.astype(f"<u{width}").tobytes()).decode("ascii")
