"""Membership inference: every attack, the loss threshold by group, and an attack by epsilon."""

from collections.abc import Sequence
from typing import Any

from indpriv._formatting import (
    capitalised,
    format_epsilon,
    format_number,
    format_share,
    format_share_up,
)
from indpriv._plain import records
from indpriv.analysis.attacks.rates import ALL, MIN_TRIALS, UPDATES, interval, parts
from indpriv.analysis.attacks.threshold_attack import PROTOCOL, UnequalAttack
from indpriv.analysis.statistics.intervals import CONFIDENCE, Interval
from indpriv.analysis.summary import Audit, attacks_on
from indpriv.attack_scores import ADVERSARIES, RUNGS
from indpriv.report import document as doc
from indpriv.report.document import Block, Paragraph, Span, Table, paragraph, table
from indpriv.report.wording import (
    MOST_ROWS,
    NO_EVIDENCE,
    counted,
    finding,
    p_value,
    percent_span,
    shorten,
    span,
)

ABOVE = (
    "The run or its account is wrong, unless training and test examples differ in other ways too: "
    "was the split random?"
)
_BY_GROUP = "loss_threshold"  # the attack of the paper's protocol
_READABLE = 100  # members of a group; with fewer, a rate at 1 % is a few accusations
_RATES = ("tpr_0.01", "tpr_0.001")
_HEAD = (
    *("Attack", "References", "AUC", "95 % interval", "TPR at 1 % FPR", "95 % interval"),
    *("at 0.1 %", "95 % interval"),
)
_MODELS = {"dp": "This model", "non_dp": "Without DP"}
_CHANCE = 0.5
_NONE = "No attack was run; it needs losses of training and test examples."
_AT_THESE_NORMS = "Ceiling at these norms"
_INDIVIDUAL = (
    "The ceiling at these norms is the largest share that one threshold can reach over all "
    "training examples by their own privacy curves, as false positives go where epsilon is large. "
    "It is of steps with the recorded norms, which depend on the run: only the worst case is a "
    "guarantee, and where epsilons are estimates, so is this."
)
_ON_UPDATES = (
    "An attacker who sees every noisy update is measured on gradient canaries, which stand for "
    "examples at the worst case; the intervals of that row are for it alone. "
)
_NONE_ON_UPDATES = (
    "No attacker who sees every noisy update was tried on this run: train with gradient_canaries "
    "= 1000 in the table [attacks] of the audit file. To attack examples in this way, train "
    "several runs with white_box = 1000 there, then type: indpriv validate RUN RUN. "
)


def attacks(summary: Audit) -> doc.Section:
    """Every attack, and success rates of the loss threshold by group."""
    found = summary
    rows = found.rates[found.rates["rate"] == "success"]
    columns, models = [by for by in rows["by"].unique() if by], rows["model"].unique().tolist()
    blocks = [*_every_attack(found), *_on_units(found, summary.account.unit)]
    screen = _strongest_lines(found)
    if above := _above(found):
        screen.append(paragraph(f"{above} {ABOVE}", style="alarm"))
    if columns and "dp" in models:
        blocks += _loss_threshold(found, columns, models)
        screen += _lines(found, columns, models)
    if not blocks:
        blocks.append(paragraph(_NONE))
    if not screen:
        screen = [paragraph(NO_EVIDENCE if len(found.attacks) else _NONE)]
    return doc.Section("attacks", "Attacks", tuple(blocks), (doc.Entry("ATTACK", tuple(screen)),))


# --- every attack


def _every_attack(found: Audit) -> list[Block]:
    """The ladder of attackers and the table of all attacks; empty where none was run."""
    ours, baseline = attacks_on(found, "dp"), attacks_on(found, "non_dp")
    if not ours:
        return []
    blocks: list[Block] = []
    if above := _above(found):
        blocks.append(doc.Callout((paragraph(Span(above), f" {ABOVE}"),), warn=True))
    blocks += _ladder(found)
    blocks.append(rate_table(found))
    if baseline:
        caption = "The same attacks on the model trained without DP"
        blocks.append(table(_HEAD, _rows(found, "non_dp"), caption=caption))
    blocks.append(
        paragraph(
            "Attacks are listed by their AUC on these same examples, so the first one was chosen "
            "after seeing the results. Each interval is at 95 % for one attack alone, and among "
            "several some miss; that of the first screen is corrected for their number. All treat "
            "examples as independent. "
            + (f"{_INDIVIDUAL} " if found.ceilings is not None else "")
            + "Reference models are trained on the data: never publish them.",
            style="note",
        )
    )
    blocks += unchecked_lines(found)
    blocks += _strongest_by_group(found)
    sources = [(one.title, one.source, one.caveat) for one in ours]
    blocks.append(table(("Attack", "Source", "What to know"), sources))
    return blocks


def unchecked_lines(found: Audit) -> list[Paragraph]:
    """What could not be checked about the reference models."""
    return [paragraph(text, style="warn") for text in found.unchecked]


def rate_table(found: Audit) -> Table:
    """Rates of the attacks on the audited model, and their ceilings."""
    limits = [
        (name, "–", "–", "–", *(cell for rate in _RATES for cell in (_limit(of, rate), "–")))
        for name, of in _ceilings(found, "Worst case")
    ]
    return table(_HEAD, [*_rows(found, "dp"), *limits], caption="Every attack")


def _ceilings(found: Audit, worst_case: str) -> list[tuple[str, Any]]:
    if found.ceilings is None:
        return []
    limits = (found.ceilings.common_threshold, found.ceilings.worst_case)
    return list(zip((_AT_THESE_NORMS, worst_case), limits, strict=True))


def _limit(of: Any, rate: str) -> str:
    return format_share_up(of[rate.removeprefix("tpr_")])


def _of(found: Audit, attack: str, model: str) -> dict[str, Any]:
    """Rates of one attack over all examples of one model; empty where there are none."""
    return parts(found.rates, attack=attack, model=model, by="").get(ALL, {})


def _rows(found: Audit, model: str) -> list[tuple[str, ...]]:
    every = [(one, _of(found, one.attack, model)) for one in attacks_on(found, model)]
    return [
        (
            capitalised(one.title),
            f"{one.references}",
            *_auc(of["auc"]),
            *(cell for rate in _RATES for cell in _rate(of[rate])),
        )
        for one, of in every
        if "auc" in of
    ]


def _ladder(found: Audit) -> list[Block]:
    """The strongest attack of every attacker, from the one who sees least; then the ceilings."""
    rows = []
    for sees, title in RUNGS.items():
        on_rung = [
            (one, _of(found, one.attack, "dp"))
            for one in attacks_on(found, "dp")
            if one.sees == sees
        ]
        one, of = next(((one, of) for one, of in on_rung if "auc" in of), (None, {}))
        if one is None:
            continue
        control = _of(found, one.attack, "non_dp")
        rows.append(
            (
                capitalised(title),
                one.title,
                *_auc(of["auc"], "joint_"),
                *_rate(of[_RATES[0]], "joint_"),
                *(_auc(control["auc"])[:1] if "auc" in control else "–"),
                *(_rate(control[_RATES[0]])[:1] if "auc" in control else "–"),
            )
        )
    if not rows:
        return []
    on_updates = parts(found.rates, by="", part=UPDATES)
    for of in on_updates.values():
        updates = ("Every noisy update", of["auc"].attack)
        rows.append((*updates, *_auc(of["auc"]), *_rate(of[_RATES[0]]), "–", "–"))
    for name, limits in _ceilings(found, "What no attacker exceeds, worst case"):
        rows.append((name, "–", "–", "–", _limit(limits, _RATES[0]), "–", "–", "–"))
    head = ("The attacker sees", "Strongest attack", "AUC", "interval", "TPR at 1 % FPR")
    return [
        table(
            (*head, "interval", "without DP: AUC", "TPR at 1 %"),
            rows,
            caption="The ladder: from the attacker who sees least to what none exceeds",
        ),
        paragraph(
            "Intervals hold at 95 % for all attacks on models together (Bonferroni). ",
            _ON_UPDATES if on_updates else _NONE_ON_UPDATES,
            Span(NO_EVIDENCE),
            style="note",
        ),
    ]


def _strongest_lines(found: Audit) -> list[Paragraph]:
    """Lines of the first screen on the strongest attack; empty where none used references."""
    ours = attacks_on(found, "dp")
    of = _of(found, ours[0].attack, "dp") if any(one.references for one in ours) else {}
    if not of:
        return []
    best, joint = ours[0], interval(of["auc"], "joint_")
    name = best.title
    if best.references:
        name += f", {counted(best.references, 'reference model')},"
    text = (
        f"strongest of {len(ours)}: {name} on {ADVERSARIES[best.adversary]}: AUC "
        f"{of['auc'].value:.3f} {_auc_span(joint or interval(of['auc']))}"
        f"{', corrected for choosing the strongest' if joint else ''}; at 1 % false "
        f"positives {format_share(of[_RATES[0]].value, 1)}"
    )
    if limits := [_limit(limits, _RATES[0]) for _, limits in _ceilings(found, "")]:
        text += f" (ceiling at these norms {limits[0]}, worst case {limits[1]})"
    if control := _of(found, best.attack, "non_dp"):
        rate = format_share(control[_RATES[0]].value, 1)
        text += f"; without DP AUC {control['auc'].value:.3f}, {rate}"
    lines = [paragraph(f"{text}.")]
    known = [of for _, _, of in _accused(found) if of["accused"].n_members >= _READABLE]
    if known:
        worst = max(known, key=lambda of: of["accused"].value or 0.0)
        row = worst["accused"]
        lines.append(
            paragraph(
                f"of {len(known)} groups most often against {row.by} {row.part}: "
                f"{format_share(row.value, 1)} [{percent_span(interval(row))}], false positives "
                f"{format_share(worst['falsely_accused'].value, 1)}"
            )
        )
    return lines


def _above(found: Audit) -> str:
    names = found.attacks.loc[found.attacks["above_worst_case"], "title"]
    return f"Success rates above what the worst case allows: {', '.join(names)}." * (len(names) > 0)


def _accused(found: Audit) -> list[tuple[str, str, dict[str, Any]]]:
    """Column, group and rates of those whom the strongest attack accuses at one threshold."""
    of_strongest = found.rates.loc[found.rates["rate"] == "accused"]
    columns = of_strongest[["attack", "by"]].drop_duplicates().itertuples(index=False)
    return [
        (by, group, of)
        for attack, by in columns
        for group, of in parts(found.rates, attack=attack, model="dp", by=by).items()
        if "accused" in of
    ]


def _strongest_by_group(found: Audit) -> list[Block]:
    rows = [
        (
            by,
            group,
            f"{of['auc'].n_members:,}",
            format_number(of["auc"].value, 3),
            _auc_span(interval(of["auc"])),
            *_rate(of["accused"]),
            format_share(of["falsely_accused"].value, 2),
        )
        for by, group, of in _accused(found)
        if "auc" in of
    ]
    if not rows:
        return []
    head = ("Column", "Group", "Members", "AUC", "95 % interval", "TPR", "95 % interval", "FPR")
    note = (
        "One threshold serves all rows: one non-member in a hundred is above it, in a row more or "
        "fewer (FPR). Each interval is for this threshold and its row alone, so some miss."
    )
    caption = f"The strongest attack ({found.of('dp')[0].attack}) by group"
    return [table(head, rows[:MOST_ROWS], caption=caption), paragraph(note, style="note")]


def _on_units(found: Audit, unit: str) -> list[Block]:
    """Attacks on people with several rows; empty where each unit has one row."""
    rates = found.rates[found.rates["by"].eq("") & ~found.rates["part"].isin((ALL, UPDATES))]
    rows = []
    for attack in rates["attack"].unique():
        for rule, of in parts(rates, attack=attack).items():
            n = f"{of['auc'].n_members:,} / {of['auc'].n_others:,}"
            auc = format_number(of["auc"].value, 3), _auc_span(interval(of["auc"], "joint_"))
            rows.append((attack, rule, n, *auc, *_rate(of[_RATES[0]], "joint_")))
    if not rows:
        return []
    head = ("Attack", "Rule", "In / out", "AUC", "interval", "TPR at 1 % FPR", "interval")
    note = (
        f"The score of a {unit} is the maximum, mean or log-sum of the scores of its rows, ranked "
        "among random groups of as many test rows, which stand for those who were not in the "
        f"data. Rows of one {unit} are often alike, which random groups are not: a rate above "
        "chance may come from that. Intervals hold for all rows of the table together."
    )
    return [table(head, rows, caption=f"Attacks by {unit}"), paragraph(note, style="note")]


def _auc(row: Any, prefix: str = "") -> tuple[str, str]:
    return f"{row.value:.3f}", _auc_span(interval(row, prefix))


def _auc_span(ends: Interval | None) -> str:
    """An interval of an AUC, whose third decimal matters."""
    return "–" if ends is None else f"[{ends.low:.3f}, {ends.high:.3f}]"


def _rate(row: Any, prefix: str = "") -> tuple[str, str]:
    """A small rate with its interval."""
    ends = interval(row, prefix)
    both = "–" if ends is None else f"{100 * ends.low:.2f} to {100 * ends.high:.2f} %"
    return format_share(row.value, 2), both


# --- the loss threshold


def _loss_threshold(found: Audit, columns: Sequence[str], models: Sequence[str]) -> list[Block]:
    caveat = next((one.caveat for one in attacks_on(found, "dp") if one.attack == _BY_GROUP), "")
    return [
        paragraph(
            "Membership inference by a threshold on the loss. The protocol was fixed before the "
            f"attack was run. {PROTOCOL} Intervals are 95 % Clopper–Pearson intervals, each "
            "taken alone: among many groups, some exclude 50 % by chance. ",
            Span(NO_EVIDENCE),
            f" {caveat}",
        ),
        *_discrimination(found, models),
        *(block for by in columns for block in _by_group(found, by, models)),
        paragraph(
            "Members and halves are chosen at random with the analysis seed "
            f"{found.attack_seed}. Success rates are not lower bounds on epsilon, and only their "
            "intervals tell whether they differ from chance: there is no other null calibration.",
            style="note",
        ),
    ]


def _discrimination(found: Audit, models: Sequence[str]) -> list[Block]:
    rows = []
    for model, name in _MODELS.items():
        of = _of(found, _BY_GROUP, model) if model in models else {}
        if "auc" in of:
            auc, advantage = of["auc"], of["advantage"]
            rates = (format_share(of[rate].value, 1) for rate in reversed(_RATES))
            cells = (f"{auc.value:.3f}", span(interval(auc)), *rates)
            rows.append((name, *cells, f"{advantage.value:.3f}", span(interval(advantage))))
    if not rows:
        return []
    head = ("Model", "AUC", "95 % interval", "TPR at 0.1 % FPR", "at 1 %", "Advantage")
    return [
        table((*head, "95 % interval"), rows, caption="Over all thresholds, all examples"),
        paragraph(
            "The advantage is the largest difference of true-positive and false-positive rate. "
            "It is picked on these same scores, so it is above 0 by chance alone; its interval "
            "holds for all thresholds together.",
            style="note",
        ),
        doc.Figure(
            "roc",
            (found.roc,),
            "True-positive against false-positive rates, both logarithmic. An attack that guesses "
            "at random lies on the dashed line.",
        ),
    ]


def _groups(found: Audit, by: str, model: str) -> list[Any]:
    """Rows of success in all examples together, then in each group, the largest first."""
    of = {"attack": _BY_GROUP, "model": model, "rate": "success"}
    total = parts(found.rates, by="", part=ALL, **of)
    groups = [row["success"] for row in parts(found.rates, by=by, **of).values()]
    return [total[ALL]["success"], *sorted(groups, key=lambda row: (-(row.value or 0.0), row.part))]


def _by_group(found: Audit, by: str, models: Sequence[str]) -> list[Block]:
    total, *groups = _groups(found, by, "dp")
    baseline = _groups(found, by, "non_dp") if "non_dp" in models else []
    others = {(row.by, row.part): row for row in baseline}
    tried = [row for row in groups if row.n][:MOST_ROWS]
    rows = []
    for row in (total, *tried):
        other = _percent(others.get((row.by, row.part))) if baseline else ()
        small = "small" if row.n < MIN_TRIALS else "" if row.by else "total"
        rows.append(doc.Row((row.part, f"{row.n:,}", *_percent(row), *other), small))
    head = [by, "Guesses", "This model", "95 % interval"]
    caption = f"Success rate by {by}"
    if baseline:
        head += ["Without DP", "95 % interval"]
        caption += ", on this model and on the same model trained without DP"
    blocks: list[Block] = [table(head, rows, caption=caption)]
    blocks += [
        paragraph(_unequal(name, test))
        for model, name in _MODELS.items()
        for test in found.most_exposed
        if (test.model, test.by) == (model, by)
    ]
    if skipped := len(groups) - len(tried):
        text = (
            f"{skipped:,} groups (too few scores, or too many rows for a page) are in audit.json."
        )
        blocks.append(paragraph(text, style="note"))
    return blocks


def _unequal(model: str, found: UnequalAttack) -> str:
    """The test of the most exposed group, in a sentence."""
    own, rest = found.successes / found.trials, found.rest_successes / found.rest_trials
    chi_squared = (
        ""
        if found.chi_squared_p is None
        else f" Chi-squared test of the rates in the table: p {p_value(found.chi_squared_p)}."
    )
    return (
        f"{model}: one threshold for all groups, measured on all scores, is right on "
        f"{format_share(own, 1)} of the guesses on {found.exposed}, the group with the largest "
        f"mean epsilon, and on {format_share(rest, 1)} of those on the others (Fisher’s exact "
        f"test, one-sided: p {p_value(found.p_value)}, not corrected for other groupings)."
        + chi_squared
    )


def _percent(row: Any) -> tuple[str, str]:
    if interval(row) is None:
        return "–", "–"
    return format_share(row.value, 1), percent_span(interval(row))


def _lines(found: Audit, columns: Sequence[str], models: Sequence[str]) -> tuple[Paragraph, ...]:
    by = next((column for column in columns if column != "label"), columns[0])
    title = next(
        (one.title for one in attacks_on(found, "dp") if one.attack == _BY_GROUP), "attack"
    )
    ours = _groups(found, by, "dp")
    text = f"{title} {_summary(by, ours)}; "
    if "non_dp" in models:
        text += f"without DP {_summary(by, _groups(found, by, 'non_dp'))}."
    else:
        text += "no baseline without DP."
    beating = [row.part for row in ours if (row.low or 0.0) > _CHANCE]
    if not beating:
        return paragraph(text), paragraph(NO_EVIDENCE)
    names = ", ".join(shorten(name, 24) for name in beating[:4]) + ", ..." * (len(beating) > 4)
    above = f"Above chance (95 % intervals, each taken alone): {names}."
    return paragraph(text), paragraph(above, style="warn")


def _summary(by: str, rows: Sequence[Any]) -> str:
    overall, *groups = rows
    if interval(overall) is None:
        return "has too few scores"
    text = f"{overall.value:.2f} [{overall.low:.2f}, {overall.high:.2f}]"
    rates = [row.value for row in groups if row.n >= MIN_TRIALS]
    return text if len(rates) < 2 else f"{text}, by {by} {min(rates):.2f} to {max(rates):.2f}"


# --- by epsilon


def attack_by_epsilon(summary: Audit) -> doc.Section | None:
    """None where the norms of the hold-out were not recorded."""
    found = summary.attack_by_epsilon
    if found.empty:
        return None
    findings, look = (int(found[name].sum()) for name in ("above_worst_case", "above_reference"))
    blocks: list[Block] = []
    if findings:
        blocks.append(
            finding(
                f"In {counted(findings, 'bin')} below, the attack succeeds more often than "
                "the worst-case epsilon allows: the run or its account is wrong, if the test "
                "examples were split off at random."
            )
        )
    blocks.append(
        paragraph(
            f"The attack: {found['attack'].iloc[0]}. Members are binned by their epsilon, "
            "non-members by the epsilon they would have had on the same trajectory. At the false "
            "positives of a bin, the line says how often its members could be accused if the bin’s "
            "upper edge were a guarantee for them. Individual epsilon is no "
            "guarantee, so a bin above the line is no proof of an error, but it deserves a closer "
            f"look ({look} here, corrected for all bins and thresholds at "
            f"{format_share(CONFIDENCE)} confidence). Each bin’s interval is taken alone."
        )
    )
    head = (
        *("Epsilon to", "Members", "Non-members", "True positives", "95 % interval"),
        *("False positives", "Line", "Worst-case line", "Remark"),
    )
    for target, rows in found.groupby("target_fpr", sort=False):
        cells = [
            (
                format_epsilon(row.up_to),
                f"{row.n_members:,}",
                f"{row.n_others:,}",
                format_share(row.tpr, 1),
                percent_span(interval(row)),
                *(format_share(x, 1) for x in (row.fpr, row.reference, row.worst_case_reference)),
                "finding" if row.above_worst_case else "look here" if row.above_reference else "",
            )
            for row in records(rows)
        ]
        caption = f"Threshold for a false-positive rate of {format_share(float(str(target)))}"
        blocks.append(table(head, cells, caption=caption, row_names=False))
    text, style = "No bin of epsilon is above what its epsilon would allow.", ""
    if look:
        text = f"{counted(look, 'bin')} of epsilon above what their epsilon would allow: "
        text, style = text + "take a closer look.", "warn"
    if findings:
        text = f"{counted(findings, 'bin')} of epsilon above what the WORST CASE allows: a finding."
        style = "alarm"
    entry = doc.Entry("BY EPSILON", (paragraph(text, style=style),))
    title = "The attack by epsilon"
    return doc.Section("attack-by-epsilon", title, tuple(blocks), (entry,), nested=True)
