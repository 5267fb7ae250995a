"""The report of an audit: a page, Markdown, and the first screen of a terminal. Sensitive."""

from __future__ import annotations

import io
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from operator import attrgetter
from typing import Any

import pandas as pd
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from indpriv._facts import DECLARED, NOT_CHECKED, ON_TRUST, PASSED, REFUTED, VERIFIED
from indpriv._formatting import (
    capitalised,
    format_edges,
    format_epsilon,
    format_lower_bound,
    format_number,
    format_p_value,
    format_share,
    format_share_up,
)
from indpriv._plain import records
from indpriv._shown import clean
from indpriv.analysis.attacks.canaries import BOUNDS, EACH_BY_ITSELF
from indpriv.analysis.attacks.rates import ALL, MIN_TRIALS, PROTOCOL, UPDATES, interval, parts
from indpriv.analysis.audited_run import NO_EXACT_VALUES
from indpriv.analysis.disclosures import recording
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.lookup import MOST_EXAMPLES, Lookup
from indpriv.analysis.loss import STATED_FLOOR
from indpriv.analysis.reconstruction import CLOSE
from indpriv.analysis.statistics.intervals import CONFIDENCE
from indpriv.analysis.summary import (
    SENSITIVE,
    Audit,
    alarms_of,
    attacks_on,
    findings,
    keys,
    notes_of,
)
from indpriv.attack_scores import RUNGS
from indpriv.epsilon_table import DISCLAIMER, FALSE_POSITIVE_RATE
from indpriv.norm_log.validation import CONTRIBUTIONS
from indpriv.report.formats import FORMATS, MOST_ROWS, counted, listed, shorten, shown_rows
from indpriv.report.page import (
    TEMPLATES,
    Head,
    escape,
    print_page,
    render_html,
    render_markdown,
    titled,
)
from indpriv.report.script import search_data

NO_EVIDENCE = "An attack that fails is no evidence of privacy."
BETWEEN_CHECKPOINTS = (
    "Between checkpoints on a line. Had the run been planned to end there, that epsilon would be "
    "its guarantee; to end it because of its test accuracy is a choice made afterwards, and free "
    "only if the test data are public."
)
_SCREEN, _WIDTH, _KEY_WIDTH = 16, 80, 18  # lines, columns, columns of a line's first words
_ROOM = _WIDTH - _KEY_WIDTH
_OF_A_RUN = ("batch", "contribution", "noise", "update", "settings", "source", "start")
BY_LOSS = "loss_threshold"  # the attack of the paper's protocol
_MODELS = {"dp": "This model", "non_dp": "Without DP"}
_EMPTY_ROW = dict.fromkeys(
    ("title", "sees", "references", "auc", "auc_interval", "tpr", "tpr_interval", "small",
     "small_interval", "control_auc", "control_tpr")
)  # fmt: skip
ATTACK_COLUMNS = {
    "Attack": "title",
    "References": "references",
    "AUC": "auc|auc",
    "95 % interval": "auc_interval|auc_span",
    "TPR at 1 % FPR": "tpr",
    "95 % interval ": "tpr_interval|percent_span2",
    "at 0.1 %": "small",
    "95 % interval  ": "small_interval|percent_span2",
}
_GROUP_COLUMNS = {
    "n": "n|int",
    "Mean epsilon": "mean|eps",
    "95 % interval": "mean_interval|span",
    "To best": "ratio_to_best|num",
    "p": "p_value|p",
}
_STANDARDISED = {
    "Label-stand. mean": "standardised_mean|eps",
    "95 % interval ": "standardised_interval|span",
}
_RATES_OF_GROUPS = {
    "Test TPR": "true_positive_rate|share1",
    "Test FPR": "false_positive_rate|share1",
}


def _mean_loss(row: Any) -> str:
    return format_number(row.mean_loss) + (r"\*" if row.losses_left_out else "")


_MORE_OF_GROUPS: dict[str, Any] = {
    "Median": "median|eps",
    "95 %": "p95|eps",
    "99 %": "p99|eps",
    "Largest": "max|eps",
    "At worst case": "share_at_worst_case|share",
    "Mean loss": _mean_loss,
    "Train acc.": "train_accuracy|share1",
    "Test acc.": "test_accuracy|share1",
}
_SHARED: dict[str, Any] = {
    "attack_columns": ATTACK_COLUMNS,
    "between_checkpoints": BETWEEN_CHECKPOINTS,
    "bounds": BOUNDS,
    "close": CLOSE,
    "confidence": CONFIDENCE,
    "contributions": CONTRIBUTIONS,
    "each_by_itself": EACH_BY_ITSELF,
    "min_group": MIN_GROUP,
    "most_searched": MOST_EXAMPLES,
    "no_evidence": NO_EVIDENCE,
    "no_exact_values": NO_EXACT_VALUES,
    "protocol": PROTOCOL,
    "stated_floor": STATED_FLOOR,
}


def render_audit(
    audit: Audit,
    pictures: Mapping[Any, str] | None = None,
    lookup: Lookup | None = None,
    reconstructed: Mapping[str, str] | None = None,
    since: Audit | None = None,
) -> str:
    """The page of an audit, with every text of the data escaped.

    Args:
        audit: what was found.
        pictures: data URIs by example id, from `indpriv.report.pictures`; without them, no example
            is on the page.
        lookup: single examples that the page can be searched for; without them, no epsilon of one
            example is on the page.
        reconstructed: data URIs of pictures above their reconstructions, by the name of the attack.
        since: an earlier audit, with which the verdict compares this one.
    """
    run = audit.run
    head = Head(
        title=f"Privacy audit of {audit.name}",
        eyebrow="Individual privacy audit",
        name=audit.name,
        meta=f"{run.n_examples:,} training examples · {run.settings.total_steps:,} steps of DP-SGD "
        f"· audited {audit.created[:10]} with indpriv {audit.versions['indpriv']}",
    )
    beside = {
        "pictures": pictures,
        "reconstructed": reconstructed,
        "search_data": None if lookup is None else search_data(audit, lookup),
    }
    return render_html("report", head, beside, **values_of(audit, since))


def markdown_audit(audit: Audit, since: Audit | None = None) -> str:
    """The report of an audit as Markdown, without figures and what the page folds away."""
    text = render_markdown("report", **values_of(audit, since))
    return titled(f"Privacy audit of {audit.name}", text)


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
        values |= _first_screen(audit, values, report)
    print_page("verbose" if verbose else "screen", console, key_width=_KEY_WIDTH, **values)


def _first_screen(audit: Audit, values: Mapping[str, Any], report: str) -> dict[str, Any]:
    """Texts of the first screen, each as long as its room; points to look at fill what is left."""
    why, n_rows = _brief(_why(audit), audit.run.n_examples), audit.run.n_examples
    points = [shorten(_brief(text, n_rows), _ROOM) for text in values["alarms"] + values["notes"]]
    points = [text for text in dict.fromkeys(points) if text != shorten(why, _ROOM)]
    more = f"{report} | --verbose" if report else "--verbose"
    texts = {"group_lines": _group_lines(values), "evidence_line": _evidence(audit), "more": more}
    for most in range(160, 20, -20):
        texts |= {"why": shorten(why, most).rstrip("."), "looks": []}
        room = _SCREEN - _height({**values, **texts})
        if room >= 2:
            break
    if (left := len(points) - room) > 0:
        points[room - 1 :] = [f"{counted(left + 1, 'more point')} in the report"]
    return texts | {"looks": points}


def _height(values: Mapping[str, Any]) -> int:
    """Lines of the first screen with these values, the name of the run included."""
    lines = io.StringIO()
    console = Console(file=lines, width=_WIDTH)
    print_page("screen", console, key_width=_KEY_WIDTH, **values)
    return 1 + len(lines.getvalue().splitlines())


def _why(audit: Audit) -> str:
    """Why the guarantee is not supported, as the checks say it that failed."""
    found, failed = audit.guarantee, {one.detail: one for one in audit.checks}
    if found.stands and not found.publishable:
        return str(found.withheld)
    named = [f"{failed[text].title}: {text}" if text in failed else text for text in found.reasons]
    return named[0] if named else str(found.withheld)


def _brief(text: str, n_rows: int, key: str = "line") -> str:
    """What brief.toml says for a sentence, in a line or on a page; else the sentence."""
    for one in _briefs():
        if key in one and (found := re.search(one["match"], text)):
            named = found.groupdict()
            share = format_share(int(named.get("n", "0").replace(",", "")) / max(n_rows, 1))
            return one[key].format(**named, share=share)
    return text


@cache
def _briefs() -> list[dict[str, str]]:
    content = tomllib.loads((TEMPLATES / "brief.toml").read_text(encoding="utf-8"))
    found: list[dict[str, str]] = content["brief"]
    return found


def _group_lines(values: Mapping[str, Any]) -> list[str]:
    """At most four lines on groups, the grouping with the largest ratio first."""
    compared, small = values["compared"], values["small"]
    lines = [_group_line(*ends) for ends in compared[:3]]
    rest = []
    if small:
        rest.append(f"too few to compare: {shorten(listed(small, 2), 40)}")
    if len(compared) > 3:
        rest.append(f"{counted(len(compared) - 3, 'more grouping')} in the report")
    if values["groups"] and not compared and not small:
        rest.append("no two groups are large enough to compare")
    return [*lines, shorten("; ".join(rest), _ROOM)] if rest else lines


def _group_line(table: Any, best: Any, worst: Any) -> str:
    """Two groups with their means, sizes and ratio; names are cut to the room there is."""
    reversed_in = table.reversed_labels(beyond_chance=True)
    named = f" ! reversed among {quoted(reversed_in[0], 12)}" if reversed_in else ""
    marks = (named, " ! reversed", " !") if named else ("",)
    line = ""
    for mark, most, and_ in product(marks, range(24, 3, -1), (" vs ", ", ")):
        line = (
            f"{shorten(table.by, most)} {quoted(worst.name, most)} {format_epsilon(worst.mean)}"
            f" (n {_size(worst.n)}){and_}{quoted(best.name, most)} {format_epsilon(best.mean)}"
            f" ({_size(best.n)}) x{table.ratio.value:.2f}{mark}"
        )
        if cell_len(clean(line)) <= _ROOM:
            return line
    return shorten(line, _ROOM)


def _size(n: int) -> str:
    return f"{n:,}" if n < 1_000_000 else f"{n / 1e6:.1f} M"


def quoted(name: str, most: int) -> str:
    """A name in quotation marks, of at most this many columns."""
    return f'"{shorten(name, most)}"'


def _evidence(audit: Audit) -> str:
    """How many lines of evidence are verified, and what the others are."""
    lines = [one for one in audit.guarantee.lines if one.key in _OF_A_RUN]
    if not lines:
        return "none: recorded before training was compared"
    ours = [one for one in lines if one.key not in ("source", "start")]
    first = f"{sum(one.status == VERIFIED for one in ours)} of {len(ours)} verified"
    words = {
        word: [one.key for one in lines if one.status == word]
        for word in (REFUTED, DECLARED, ON_TRUST)
    }
    named = [f"{word}: {', '.join(keys)}" for word, keys in words.items() if keys]
    counts = [f"{len(keys)} {word}" for word, keys in words.items() if keys]
    repeated = re.search(r"equal at ([\d,]+ of [\d,]+ steps)", lines[1].detail)
    steps = f"{first} ({repeated[1]} repeated)" if repeated else first
    choices = map("; ".join, ([steps, *named], [first, *named], [first, *counts]))
    return next((line for line in choices if len(line) <= _ROOM), first)


def values_of(audit: Audit, since: Audit | None = None) -> dict[str, Any]:
    """What the templates of a report show: all that the audit found, and what follows from it."""
    quote = "" if audit.guarantee.publishable else " This run has no guarantee to quote."
    compared = [of for of in map(_ends, audit.groups) if of is not None]
    return {
        **{key: getattr(audit, key) for key in keys()},
        "audit": audit,
        "templates": [finding.name for finding in findings()],
        "alarms": alarms_of(audit),
        "notes": (notes := notes_of(audit)),
        "points": [_brief(text, audit.run.n_examples, "page") for text in notes],
        "disclaimer": DISCLAIMER + quote,
        "false_positive_rate": FALSE_POSITIVE_RATE,
        "disclosed": {one.key: one for one in audit.disclosures},
        "brackets": _brackets(audit),
        "worst_case_drawn": _worst_case_drawn(audit),
        "compared": sorted(compared, key=lambda of: -of[0].ratio.value),
        "small": _too_small(audit),
        "membership": (attacks := attack_values(audit)),
        "strongest": attacks["best"],
        "success": attacks["success"],
        "individual_bins": _bins(audit),
        "loss_bins": _loss_bins(audit.loss),
        "class_norms": _class_norms(audit.drivers),
        "moved_settings": _moved_settings(audit.schedule),
        "accuracy_read": _accuracy_read(audit.schedule),
        "canary_rows": canary_rows(audit.gradient_canaries),
        "groups_by_ratio": sorted(audit.groups, key=_by_ratio),
        "checked": _checked(audit),
        "how_recorded": recording(audit.run),
        "group_screen": group_screen,
        "seed_can_be_guessed": any(
            one.key == "seeds" and one.status != PASSED for one in audit.checks
        ),
        "declared_json": json.dumps(
            audit.run.declared.content, indent=2, ensure_ascii=False, default=str
        ),
        **_SHARED,
        "attribute_columns": attribute_columns,
        "group_columns": group_columns,
        "shown_groups": shown_groups,
        "interval_of": lambda row: FORMATS["percent_span"](interval(row)),
        "since": None if since is None else _since(since, audit),
        "since_date": "" if since is None else since.created[:10],
    }


def _checked(audit: Audit) -> dict[str, Any]:
    """Which checks passed, which were not made, and what is on trust."""
    checks, lines = audit.checks, audit.guarantee.lines
    hazards = [
        one.short
        for one in audit.hazards
        if one.kind == "assumption" and one.key not in {line.key for line in lines}
        if one.status not in ("verified", "failed", ON_TRUST)
    ]
    return {
        "passed": sum(one.status == PASSED for one in checks),
        "unknown": [one.title for one in checks if one.status == NOT_CHECKED],
        "origin": [
            f"{one.title}: {one.detail}"
            for one in checks
            if (one.key, one.status) == ("journal", PASSED)
        ],
        "trusted": [line.title.lower() for line in lines if line.status == ON_TRUST] + hazards,
    }


def _ends(table: Any) -> tuple[Any, Any, Any] | None:
    """A grouping with the rows of its best and its worst group; None where there are none."""
    if table.ratio is None or table.ratio.value is None:
        return None
    rows = {row.name: row for row in records(table.rows)}
    return table, rows[table.ratio.best], rows[table.ratio.worst]


def _too_small(audit: Audit) -> list[str]:
    return [
        f"{row.name} ({row.n:,})"
        for table in audit.groups
        for row in records(table.rows)
        if row.too_small and row.n
    ]


# What the verdict compares with an earlier audit.
_EPSILONS = {
    "Worst case": "guarantee.worst_case_epsilon",
    "Median": "individual.median",
    "Largest": "individual.max",
}
_COMPARED = {
    "Status": "guarantee.status",
    "Evidence": "guarantee.evidence",
    "Claim": "claim",
    "Accountant": "account.method",
    "Examples": "individual.n",
}


# --- rows of tables


def attack_values(found: Audit) -> dict[str, Any]:
    """Rows of the tables on attacks, and the first of them with its rates."""
    ours = attacks_on(found, "dp")
    rates = found.rates
    success = rates[(rates["rate"] == "success") & (rates["by"] != "")]
    columns, models = list(success["by"].unique()), set(rates["model"][rates["rate"] == "success"])
    threshold = [_success_rows(found, by, models) for by in columns if "dp" in models]
    best = _rates_of(found, ours[0], "dp") if any(one.references for one in ours) else None
    overall = parts(rates, model="dp", by="", part=ALL, rate="success").get(ALL, {})
    by_loss = [one for one in ours if one.attack == BY_LOSS]
    return {
        "every": ours,
        "rows": attack_rows(found),
        "baseline": list(_attack_rows(found, "non_dp")),
        "above": found.attacks.loc[found.attacks["above_worst_case"], "title"].tolist(),
        "ladder": _ladder(found),
        "on_updates": bool(parts(rates, by="", part=UPDATES)),
        "accused": _accused(found),
        "strongest": ours[0].attack if ours else "",
        "sources": ours,
        "units": _unit_rows(found),
        "threshold": threshold,
        "beating": list(dict.fromkeys(name for one in threshold for name in one["beating"])),
        "caveat": by_loss[0].caveat if by_loss else "",
        "discrimination": _discrimination(found, models),
        "best": best,
        "success": overall.get("success"),
        "sentence": _in_a_sentence(overall.get("success")),
    }


def _in_a_sentence(success: Any) -> str:
    if success is None or success.low is None or not success.low <= 0.5 <= success.high:
        return ""
    return (
        f"A threshold on the loss is right in {format_share(success.value, 1)} of its guesses on "
        f"members and non-members; guessing is right in 50 %. {NO_EVIDENCE}"
    )


def _rates_of(found: Audit, one: Any, model: str) -> dict[str, Any] | None:
    """An attack over all examples of one model with its rates; None where it has none."""
    of = parts(found.rates, attack=one.attack, model=model, by="").get(ALL, {})
    if "auc" not in of:
        return None
    row: dict[str, Any] = {"title": one.title, "references": one.references, "sees": one.sees}
    for name, rate in (("auc", "auc"), ("tpr", "tpr_0.01"), ("small", "tpr_0.001")):
        row |= {name: of[rate].value, f"{name}_interval": interval(of[rate])}
        row[f"{name}_joint"] = interval(of[rate], "joint_") or row[f"{name}_interval"]
    return row


def attack_rows(found: Audit) -> list[dict[str, Any]]:
    """Rates of the attacks on the audited model, and their ceilings."""
    return [*_attack_rows(found, "dp"), *_ceiling_rows(found, "Worst case")]


def _attack_rows(found: Audit, model: str) -> Iterator[dict[str, Any]]:
    for one in attacks_on(found, model):
        if (row := _rates_of(found, one, model)) is not None:
            yield {**row, "title": capitalised(one.title), "tpr": format_share(row["tpr"], 2)} | {
                "small": format_share(row["small"], 2)
            }


def _ceiling_rows(found: Audit, worst_case: str) -> Iterator[dict[str, Any]]:
    """What no attack exceeds, as rows of attacks; none where it is not known."""
    if found.ceilings is None:
        return
    limits = (found.ceilings.common_threshold, found.ceilings.worst_case)
    for name, of in zip(("Ceiling at these norms", worst_case), limits, strict=True):
        tpr, small = (format_share_up(of[rate]) for rate in ("0.01", "0.001"))
        yield _EMPTY_ROW | {"title": name, "sees": name, "tpr": tpr, "small": small}


def _ladder(found: Audit) -> list[dict[str, Any]]:
    """The strongest attack of every attacker, from the one who sees least; then the ceilings."""
    rows = []
    for sees, title in RUNGS.items():
        on_rung = (one for one in attacks_on(found, "dp") if one.sees == sees)
        for one in on_rung:
            if (row := _rates_of(found, one, "dp")) is None:
                continue
            control = _rates_of(found, one, "non_dp") or {"auc": None, "tpr": None}
            row |= {"sees": capitalised(title), "tpr": format_share(row["tpr"], 2)}
            row |= {f"{name}_interval": row[f"{name}_joint"] for name in ("auc", "tpr")}
            rows.append(row | {"control_auc": control["auc"], "control_tpr": control["tpr"]})
            break
    if not rows:
        return []
    for of in parts(found.rates, by="", part=UPDATES).values():
        own = {"sees": "Every noisy update", "title": of["auc"].attack, "auc": of["auc"].value}
        own |= {"auc_interval": interval(of["auc"]), "tpr_interval": interval(of["tpr_0.01"])}
        rows.append(_EMPTY_ROW | own | {"tpr": format_share(of["tpr_0.01"].value, 2)})
    limits = _ceiling_rows(found, "What no attacker exceeds, worst case")
    return [*rows, *({**row, "title": None} for row in limits)]


def _accused(found: Audit) -> list[dict[str, Any]]:
    """Groups and rates of those whom the strongest attack accuses at one threshold."""
    of_strongest = found.rates.loc[found.rates["rate"] == "accused"]
    rows = []
    for attack, by in of_strongest[["attack", "by"]].drop_duplicates().itertuples(index=False):
        for group, of in parts(found.rates, attack=attack, model="dp", by=by).items():
            if "accused" in of and "auc" in of:
                row = {"by": by, "part": group, "n_members": of["auc"].n_members}
                row |= {"auc": of["auc"].value, "auc_interval": interval(of["auc"])}
                row |= {"tpr": of["accused"].value, "tpr_interval": interval(of["accused"])}
                rows.append(row | {"fpr": of["falsely_accused"].value})
    return rows[:MOST_ROWS]


def _unit_rows(found: Audit) -> list[dict[str, Any]]:
    """Attacks on people with several rows; empty where each unit has one row."""
    rates = found.rates[found.rates["by"].eq("") & ~found.rates["part"].isin((ALL, UPDATES))]
    return [
        {
            "attack": attack,
            "part": rule,
            "n": f"{of['auc'].n_members:,} / {of['auc'].n_others:,}",
            "auc": of["auc"].value,
            "auc_interval": interval(of["auc"], "joint_"),
            "tpr": of["tpr_0.01"].value,
            "tpr_interval": interval(of["tpr_0.01"], "joint_"),
        }
        for attack in rates["attack"].unique()
        for rule, of in parts(rates, attack=attack).items()
    ]


def _discrimination(found: Audit, models: Collection[str]) -> list[dict[str, Any]]:
    """The loss threshold over all thresholds, on each model."""
    rows = []
    for model, name in _MODELS.items():
        of = parts(found.rates, attack=BY_LOSS, model=model, by="").get(ALL, {})
        if model in models and "auc" in of:
            row = {"model": name, "tpr_0_1": of["tpr_0.001"].value, "tpr_1": of["tpr_0.01"].value}
            for rate in ("auc", "advantage"):
                row |= {rate: of[rate].value, f"{rate}_interval": interval(of[rate])}
            rows.append(row)
    return rows


def _success_rows(found: Audit, by: str, models: Collection[str]) -> dict[str, Any]:
    """The table of success rates by one column, on this model and on the baseline."""
    total, *groups = _successes(found, by, "dp")
    others = _successes(found, by, "non_dp") if "non_dp" in models else []
    baseline = {(row.by, row.part): row for row in others}
    tried = [row for row in groups if row.n][:MOST_ROWS]
    rows = []
    for row in (total, *tried):
        other = baseline.get((row.by, row.part))
        rows.append(
            {
                "part": row.part,
                "n": row.n,
                "small": row.n < MIN_TRIALS,
                "total": not row.by,
                "value": row.value if interval(row) else None,
                "interval": interval(row),
                "other": other.value if other and interval(other) else None,
                "other_interval": interval(other) if other else None,
            }
        )
    columns = {by: "part", "Guesses": "n|int", "This model": "value|share1"}
    columns |= {"95 % interval": "interval|percent_span"}
    caption = f"Success rate by {by}"
    if others:
        columns |= {"Without DP": "other|share1", "95 % interval ": "other_interval|percent_span"}
        caption += ", on this model and on the same model trained without DP"
    tests = [
        _unequal(name, test)
        for model, name in _MODELS.items()
        for test in found.most_exposed
        if (test.model, test.by) == (model, by)
    ]
    readable = [row.value for row in groups if row.n >= MIN_TRIALS]
    beating = [row.part for row in (total, *groups) if (row.low or 0.0) > 0.5]
    skipped = len(groups) - len(tried)
    return {
        "by": by,
        "range": f"{min(readable):.2f} to {max(readable):.2f}" if len(readable) > 1 else "",
        "beating": beating,
        "rows": rows, "columns": columns, "caption": caption, "unequal": tests, "skipped": skipped
    }  # fmt: skip


def _successes(found: Audit, by: str, model: str) -> list[Any]:
    """Rows of success in all examples together, then in each group, the largest first."""
    of = {"attack": BY_LOSS, "model": model, "rate": "success"}
    total = parts(found.rates, by="", part=ALL, **of)
    groups = [row["success"] for row in parts(found.rates, by=by, **of).values()]
    return [total[ALL]["success"], *sorted(groups, key=lambda row: (-(row.value or 0.0), row.part))]


def _unequal(model: str, found: Any) -> str:
    """The test of the most exposed group, in a sentence."""
    own, rest = found.successes / found.trials, found.rest_successes / found.rest_trials
    text = (
        f"{model}: one threshold for all groups, measured on all scores, is right on "
        f"{format_share(own, 1)} of the guesses on {found.exposed}, the group with the largest "
        f"mean epsilon, and on {format_share(rest, 1)} of those on the others (Fisher’s exact "
        f"test, one-sided: p {format_p_value(found.p_value)}, not corrected for other groupings)."
    )
    if found.chi_squared_p is None:
        return text
    p = format_p_value(found.chi_squared_p)
    return f"{text} Chi-squared test of the rates in the table: p {p}."


def shown_groups(found: Any) -> dict[str, Any]:
    """The rows of a grouping that a page shows, and what has to be said of them."""
    shown = shown_rows(found.rows)
    rows = found.rows.iloc[shown]
    lacking = [
        f"{row.name} ({', '.join(row.lacks_labels)})" for row in records(rows) if row.lacks_labels
    ]
    return {
        "rows": rows,
        "positions": shown,
        "rated": _rated(rows),
        "skipped": len(found.rows) - len(rows),
        "lacking": lacking,
        "left_out": bool(rows["losses_left_out"].any()),
    }


def _rated(rows: pd.DataFrame) -> bool:
    return bool(rows[["true_positive_rate", "false_positive_rate"]].notna().any(axis=None))


def group_columns(by: str, rows: pd.DataFrame, standardised: bool) -> dict[str, Any]:
    """Columns of a table of groups; standardised: with label-standardised means."""
    columns: dict[str, Any] = {by: named_group, **_GROUP_COLUMNS}
    if standardised:
        columns |= _STANDARDISED
    columns |= _MORE_OF_GROUPS
    return columns | (_RATES_OF_GROUPS if _rated(rows) else {})


def group_screen(found: Any) -> dict[str, Any]:
    """Columns of a grouping on a terminal."""
    columns: dict[str, Any] = {f"by {found.by}": named_group, "n": "n|int", "mean": "mean|eps"}
    if found.within_label:
        columns["label-stand."] = "standardised_mean|eps"
    return columns | {"test accuracy": "test_accuracy|share1"}


def named_group(row: Any) -> str:
    """A group as tables call it, as Markdown."""
    by = getattr(row, "by", None)
    return escape(f"{by}: " * (by is not None) + row.name + " (too few)" * row.too_small)


def _by_ratio(table: Any) -> float:
    return -((table.ratio and table.ratio.value) or 0.0)


def attribute_columns(overall: bool) -> dict[str, str]:
    """Columns of rows of attacks on attributes; overall: of the findings themselves."""
    of = "overall." * overall
    return {
        "Imputed": f"{of}imputed|share1",
        "Guessed with the model": f"{of}guessed|share1",
        "Others imputed": f"{of}others_imputed|share1",
        "Others guessed": f"{of}others_guessed|share1",
        "Advantage": f"{of}advantage|points",
        "95 % interval": f"{of}interval|points_span",
        "Individual ceiling": f"{of}individual_ceiling|up",
    }


def _bins(audit: Audit) -> list[tuple[str, str, str]]:
    edges = format_edges(audit.individual.edges)
    counts = (f"{count:,}" for count in audit.individual.counts)
    return list(zip(edges, edges[1:], counts, strict=False))


def _loss_bins(loss: Any) -> list[tuple[str, ...]]:
    if loss is None or loss.bins is None:
        return []
    bins, edges = loss.bins, [f"{edge:.3g}" for edge in loss.bins.loss_edges]
    return [
        (edges[i], edges[i + 1], f"{sum(counts):,}", *map(format_epsilon, quartiles))
        for i, (counts, *quartiles) in enumerate(
            zip(bins.counts, bins.p25, bins.median, bins.p75, strict=True)
        )
    ]


def _class_norms(found: Any) -> list[tuple[str, ...]]:
    if not found.classes or not found.steps:
        return []
    each = zip(found.classes, found.median_norm, found.clipped_share_by_class, strict=True)
    return [
        (
            label,
            *(format_number(norms[index]) for index in (0, -1)),
            *(format_share(shares[index]) for index in (0, -1)),
        )
        for label, norms, shares in each
    ]


def _moved_settings(found: Any) -> list[tuple[str, ...]]:
    """First, middle and last step."""
    if found is None or not found.moves:
        return []
    last = len(found.steps) - 1
    settings = (found.max_grad_norm, found.noise_multiplier, found.noise_std)
    return [
        (f"{found.steps[index]:,}", *(format_number(values[index]) for values in settings))
        for index in sorted({0, last // 2, last})
    ]


def _accuracy_read(found: Any) -> dict[str, Any] | None:
    """Test accuracy at shares of the final worst case, and the worst case at shares of the best."""
    curve = None if found is None else found.curve
    if curve is None or len(curve.epsilon) < 2 or not curve.epsilon[-1]:
        return None
    at_epsilon = [
        (format_epsilon(epsilon), format_share(accuracy))
        for epsilon in (share * curve.epsilon[-1] for share in (0.25, 0.5, 0.75, 1.0))
        if (accuracy := curve.accuracy_at(epsilon)) is not None
    ]
    best = max(curve.test_accuracy)
    at_accuracy = [
        (format_share(accuracy), format_epsilon(epsilon), f"{step:,.0f}")
        for accuracy in (share * best for share in (0.9, 0.95, 0.99, 1.0))
        if (epsilon := curve.epsilon_at(accuracy)) is not None
        and (step := curve.step_at(accuracy)) is not None
    ]
    return {"at_epsilon": at_epsilon, "at_accuracy": at_accuracy}


def canary_rows(found: Any) -> list[tuple[str, ...]]:
    """One row for each length of gradient canaries."""
    return [
        (
            f"{one.length:g}",
            f"{one.n_members:,} / {one.n_others:,}",
            format_epsilon(one.ceiling),
            *(format_lower_bound(bound.epsilon) for bound in one.bounds),
            f"p = {format_p_value(one.p_value)}"
            if one.agrees
            else f"CONTRADICTED (p = {one.p_value:.1g})",
        )
        for one in (found.lengths if found else ())
    ]


def _worst_case_drawn(audit: Audit) -> float | None:
    """The worst case that figures show; None if that of the largest unit is far off their scale."""
    worst: float = audit.guarantee.worst_case_epsilon
    return None if audit.unit_sizes and worst > audit.individual.edges[-1] else worst


def _brackets(audit: Audit) -> str:
    """For how many the tight accountant is tight; empty for another one."""
    found, plural = audit.individual, audit.account.plural
    if found.wide is None:
        return ""
    text = f"tight, at most 1 % wide, for {found.n - found.wide:,} of {found.n:,} {plural}"
    return f"{text}; of {found.wide:,} only the upper end says something" if found.wide else text


def _since(before: Audit, audit: Audit) -> Sequence[tuple[str, str, str]]:
    """What an earlier audit said otherwise."""
    rows = []
    for name, path in _EPSILONS.items():
        first, second = (attrgetter(path)(one) for one in (before, audit))
        rows.append((name, format_epsilon(first), format_epsilon(second)))
    for name, path in _COMPARED.items():
        then, now = (str(attrgetter(path)(one)) for one in (before, audit))
        rows.append((name, then, now))
    old = {table.by: table.ratio for table in before.groups}
    for table in audit.groups:
        ratio, earlier = table.ratio, old.get(table.by)
        if ratio and earlier and ratio.value and earlier.value:
            name = f"{ratio.worst} over {ratio.best} ({table.by})"
            rows.append((name, f"{earlier.value:.2f}", f"{ratio.value:.2f}"))
    return [row for row in rows if row[1] != row[2]] or [("Everything compared", "same", "same")]
