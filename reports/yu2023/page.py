"""The two pages: reports/yu2023/README.md, and the table of results in docs/explanation/results.md. Both from committed files alone."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from indpriv._formatting import format_epsilon, format_number, format_share
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.page import escape
from reports.shared.markdown_table import table
from reports.shared.verdicts import WORDS
from reports.yu2023 import rules
from reports.yu2023.audits import (
    AUDITS,
    DEFAULT,
    PRESET,
    Audit,
    Summary,
    attack_of,
    groups_of,
    means_of,
    trained_by,
)
from reports.yu2023.figures import figures
from reports.yu2023.measured import DISTRIBUTION, MACHINE
from reports.yu2023.paper import RUNS, SOURCE, run_named
from reports.yu2023.sections import NOTHING, Known, Section, named, percent, shown
from reports.yu2023.tables import tables, theorems

COMMAND = "make reproduce"
_NO_REPORT = (
    "digits",
    "cifar10_public",
    "cifar10_clip",
    "adult_label_dp",
    "adult_weight_decay",
    "mnist_label_dp",
)  # for trying things out; parts of other runs; swept; varied by pages of their own
_TRIED = "Tried "  # begins a paragraph in the head of an audit file
_RUN = ("Run before", "Run again", "Run once")
_WIDTH = 125  # of lines in that page
_RECIPE = ("epochs", "batch_size", "learning_rate", "weight_decay", "schedule", "max_grad_norm")
_MARKED = re.compile(r"(<!-- results.*?-->\n).*?(<!-- end of results -->)", re.DOTALL)


def why_declared(known: Known) -> list[str]:
    """Why guarantees of audits are not "supported", each reason once."""
    of: dict[str, list[str]] = {}
    for name, audit in known.audits.items():
        for reason in audit.default["guarantee"]["reasons"]:
            of.setdefault(reason, []).append(name)
    return [
        f"{reason[0].upper()}{reason[1:]} ({', '.join(names)})." for reason, names in of.items()
    ]


def render_page(known: Known, audits_dir: Path) -> str:
    """reports/yu2023/README.md."""
    found = (*figures(known), *tables(known))
    parts = [
        "# The figures and tables of Yu et al. 2023, one by one",
        f"Written by `{COMMAND}` (and, of seeded pairs of whole runs, `python -m reports.yu2023 NAME --whole-seeds`) from [yu2023.json](yu2023.json) and the audits' `audit.json`; do not edit it by hand. The paper: Yu, Kamath, Kulkarni, Liu, Yin, Zhang, *Individual Privacy "
        f"Accounting for Differentially Private Stochastic Gradient Descent*, TMLR 09/2023, {SOURCE}; its numbers are quoted from "
        "that version (`paper.py` in this folder). Ours come from the audits in `reports/`, each of one run on a small "
        "machine, accounted twice: as the paper did (preset yu2023: norms rounded to the nearest 0.01 C, carried from the last "
        "record, conversion of Mironov 2017) and by the sound default. Models, data and noise are not the paper's, so absolute "
        "values are not expected to agree; what is judged is the finding, by the rules at the end.",
        f"> {DISCLAIMER}",
        *why_declared(known),
        "## Overview\n\n" + overview(found),
        "## Settings\n\n"
        + settings(known)
        + "\n\n"
        + changed_since(known, audits_dir)
        + tried_before(known, audits_dir)
        + waiting(known, audits_dir),
        "## What every epsilon here means\n\n" + meanings(known),
        "## Machine\n\n" + machine(known),
        *(section.render() for section in found),
        theorems(),
        "## Rules\n\n"
        + table(
            ["finding", "when it counts as reproduced"],
            [[name, escape(rule)] for name, rule in rules.RULES.items()],
        )
        + "\n\nEverything else is **not reproduced**; what has no run is **not run**. Each figure is of one run: it says "
        "nothing about the outcome of another training of the same model.",
    ]
    return "\n\n".join(parts) + "\n"


def overview(sections: tuple[Section, ...]) -> str:
    """Verdict words by section and data set; two where the accounts differ, the preset's first."""
    titles = [run.title for run in RUNS]
    rows = [
        [
            f"{section.number}: {section.title}",
            *(
                shown(section.words[title]) if title in section.words else NOTHING
                for title in titles
            ),
        ]
        for section in sections
    ]
    return (
        table(["", *titles], rows)
        + "\n\nTwo words: preset yu2023 / sound default. A dash: the paper has none either.\n\n"
        + counted(sections)
    )


def counted(sections: tuple[Section, ...]) -> str:
    """How many findings there are of each word, by the sound default where it has one."""
    words = Counter(
        each[-1]
        for section in sections
        for by_name in section.words.values()
        for each in by_name.values()
    )
    counts = ", ".join(f"{words[word]} {word}" for word in WORDS)
    return f"Of {words.total()} findings, by the sound default where it has a word: {counts}."


def settings(known: Known) -> str:
    """The paper's setting and ours, by data set."""
    rows = []
    for name in AUDITS:
        run, audit = run_named(name), known.audits.get(name)
        if audit is not None or run is not None:
            rows.append(
                [
                    name if run is None else run.title,
                    NOTHING if run is None else run.setting,
                    "**not run**" if audit is None else _setting(audit.default),
                ]
            )
    return table(
        ["", "paper (delta 1e-5, full norms three times an epoch, rounded to 0.01 C)", "ours"], rows
    )


def _setting(summary: Summary) -> str:
    run, declared = summary["run"], summary["run"]["declared"]
    model, config = declared["model"], declared["config"]["training"]
    batch = run["recorder"]["expected_batch_size"]
    passes = run["n_records"] / run["expected_epochs"]
    kept = config.get("non_private_baseline", config.get("non_dp_twin"))
    baseline = "with a non-private baseline" if kept else "without a non-private baseline"
    source = declared["config"].get("model", {}).get("pretrained")
    pretrained = (
        "not pre-trained"
        if source is None
        else f"pre-trained by `audits/{trained_by(source)}.toml`"
    )
    rounding = (
        "norms not rounded"
        if run["rounding"] == 0
        else f"norms rounded {run['rounding_mode']} to {run['rounding']:g} C"
    )
    return (
        f"{run['n_examples']:,}; {model['architecture']}, {model['parameters']:,} parameters, {pretrained}; "
        f"C = {_range(run['max_grad_norm'])}, noise multiplier {_range(run['noise_multiplier'])}, batch {batch:,}, "
        f"{run['expected_epochs']:.0f} epochs ({run['total_steps']:,} steps); {passes:.3g} full passes an epoch, {rounding}, "
        f"{run['n_exact_examples']:,} reference examples; {baseline}"
    )


def _range(values: Mapping[str, float]) -> str:
    low, high = values["min"], values["max"]
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def changed_since(known: Known, audits_dir: Path) -> str:
    """Runs of other settings than their audit files have by now; "" where there are none."""
    changed = []
    for name, audit in known.audits.items():
        path = audits_dir / f"{name}.toml"
        if not path.is_file():
            continue
        now = tomllib.loads(path.read_text(encoding="utf-8"))["training"]
        then = audit.default["run"]["declared"]["config"]["training"]
        keys = [key for key in _RECIPE if key in now and now[key] != then.get(key)]
        if keys:
            changed.append(f"{name} ({', '.join(keys)})")
    if not changed:
        return ""
    return f"Run before their audit files were changed, and not since: {'; '.join(changed)}.\n\n"


def tried_before(known: Known, audits_dir: Path) -> str:
    """What the heads of audit files say of settings that were changed after a result was seen, and of earlier runs."""
    tried = _said(known, audits_dir, _TRIED)
    before = _said(known, audits_dir, _RUN)
    return "".join(
        ["Settings that were changed after a result was seen:\n\n", *tried, "\n"] * bool(tried)
    ) + "".join(["Other runs of the same settings:\n\n", *before, "\n"] * bool(before))


def _said(known: Known, audits_dir: Path, start: str | tuple[str, ...]) -> list[str]:
    """Items of a list: paragraphs of the heads of audit files that begin with these words."""
    rows = []
    for name in dict.fromkeys((*known.audits, *AUDITS)):
        path = audits_dir / f"{name}.toml"
        head = path.read_text(encoding="utf-8").split("\n\n")[0] if path.is_file() else ""
        paragraphs = re.sub(r"^# ?", "", head, flags=re.MULTILINE).split("\n\n")
        rows += [
            f"- {name}: {' '.join(part.split('name = ')[0].split())}\n"
            for part in paragraphs
            if part.startswith(start)
        ]
    return rows


def waiting(known: Known, audits_dir: Path) -> str:
    """Audit files of which there is no report, and no run on another page."""
    figures = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in audits_dir.parent.glob("reports/*/*.json")
    ]
    elsewhere = {run for each in figures if isinstance(each, dict) for run in each.get("runs", ())}
    rows = []
    for path in sorted(audits_dir.glob("*.toml")):
        if path.stem in known.audits or path.stem in elsewhere or path.stem in _NO_REPORT:
            continue
        text = path.read_text(encoding="utf-8")
        if "\n# Run once" in text:
            continue
        model = tomllib.loads(text)["model"]["architecture"]
        rows.append(f"`audits/{path.name}` ({model})")
    return "Ready but **not run** here: " + (", ".join(rows) if rows else "none") + "."


def meanings(known: Known) -> str:
    """Claim, delta, unit, neighbouring relation, sampler and accountant of each account."""
    rows = [
        [
            name,
            "preset yu2023" if account == PRESET else "sound default",
            f"{format_epsilon(summary['guarantee']['worst_case_epsilon'])} ({summary['guarantee']['status']})",
            summary["claim"],
            summary["meaning"],
            summary["account"]["conversion"],
        ]
        for name, audit in known.audits.items()
        for account, summary in audit.accounts.items()
    ]
    head = ["audit", "account", "worst case", "individual epsilon", "at", "conversion"]
    return (
        "The worst case is the guarantee of its run; individual epsilons are estimates where the table says so. The data sets are "
        "public.\n\n" + table(head, rows)
    )


def machine(known: Known) -> str:
    """The machine, and what each run took."""
    found = known.measured.get(MACHINE)
    lines = []
    if found is not None:
        versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
        lines.append(
            f"Table 1 was measured on: {found['processor']}, {found['cores']} cores, {found['system']}, torch threads "
            f"{found['torch_threads']}, {found['date']}; {versions}. Seconds below are wall time as each run recorded it, on a "
            "machine that did other work too."
        )
    rows = []
    for name, audit in known.audits.items():
        run = audit.default["run"]
        recorder, declared = run["recorder"], run["declared"]
        versions = recorder["versions"]
        rows.append(
            [
                name,
                declared["training"]["device"],
                f"{versions['torch']}, {versions['opacus']}",
                audit.default["created"][:10],
                _seconds(recorder["training_seconds"]),
                _seconds(recorder["pass_seconds"]),
                _seconds(declared.get("wall_seconds")),
            ]
        )
    head = [
        "audit",
        "device",
        "torch, opacus",
        "audited",
        "training, s",
        "norm passes, s",
        "in all, s",
    ]
    return "\n\n".join([*lines, table(head, rows)])


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def render_results(known: Known) -> str:
    """The table of results in docs/explanation/results.md."""
    rows = [_result(name, audit, known) for name, audit in known.audits.items()]
    head = [
        "audit", "n", "test accuracy", "worst case", "individual: smallest, median, largest", "r with log loss",
        "mean of the lowest and the highest group, ratio", "attack with DP", "without DP",
    ]  # fmt: skip
    meanings: dict[str, list[str]] = {}
    for name, audit in known.audits.items():
        meanings.setdefault(audit.default["meaning"], []).append(name)
    *few, (usual, _) = sorted(meanings.items(), key=lambda item: len(item[1]))
    claimed = "; ".join(
        [*(f"{each} ({', '.join(names)})" for each, names in few), f"{usual} (the others)"]
    )
    note = (
        f"Individual epsilon is an estimate unless marked exact. It is at {claimed}. {DISCLAIMER} The data sets are public. Groups: "
        "labels, or races of people. Attack: success of a loss threshold on all examples, with its 95 % interval; chance is 50 %. "
        f"One run each. `{COMMAND}` makes the table again."
    )
    beside = "The same runs beside every figure and table of the paper: [reports/yu2023](../../reports/yu2023/README.md)."
    return (
        "\n\n".join(
            [
                table(head, rows),
                *(
                    fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
                    for text in (note, beside)
                ),
            ]
        )
        + "\n"
    )


def _result(name: str, audit: Audit, known: Known) -> list[str]:
    summary = audit.default
    individual, loss, groups = summary["individual"], summary["loss"], groups_of(summary, audit.by)
    guarantee, smallest = summary["guarantee"], known.part(DISTRIBUTION, name, DEFAULT)
    sound = guarantee["status"] == "supported"
    epsilons = [
        None if smallest is None else smallest["smallest"],
        individual["median"],
        individual["max"],
    ]
    return [
        f"[{name}](../../reports/{name}/audit.md)",
        f"{summary['run']['n_examples']:,}",
        format_share(summary["run"]["test_accuracy"], 1),
        format_epsilon(guarantee["worst_case_epsilon"])
        + ("" if sound else f" ({guarantee['status']})"),
        ", ".join(map(format_epsilon, epsilons)) + " (exact)" * (summary["claim"] == "exact"),
        format_number(None if loss is None else loss["pearson_log_loss"], 2),
        NOTHING if groups is None else _extremes(means_of(summary, audit.by), groups["ratio"]),
        *(_attack(attack_of(summary, model, audit.by)) for model in ("dp", "non_dp")),
    ]


def _extremes(means: Mapping[str, float], ratio: Mapping[str, Any] | None) -> str:
    lowest, highest = (pick(means, key=means.__getitem__) for pick in (min, max))
    text = f"{named(lowest)}: {format_epsilon(means[lowest])}; {named(highest)}: {format_epsilon(means[highest])}"
    return text if ratio is None else f"{text}; {format_number(ratio['value'])}"


def _attack(attack: Mapping[str, Any] | None) -> str:
    if attack is None:
        return NOTHING
    return percent(attack["overall"])


def write_results(page: Path, text: str) -> None:
    """Put the table of results between its markers."""
    content = page.read_text(encoding="utf-8")
    changed, places = _MARKED.subn(lambda match: f"{match[1]}{text}{match[2]}", content)
    if places != 1:
        raise SystemExit(f"{page} has {places} places marked <!-- results ... -->; it needs one")
    page.write_text(changed, encoding="utf-8")
