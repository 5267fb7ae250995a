"""The first screen of an audit, and group tables, for a terminal or a pipe. Sensitive.

Texts of the data are shown as they are: no markup in them is obeyed, no control character reaches the terminal.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from indpriv._formatting import (
    format_delta,
    format_epsilon,
    format_interval,
    format_lower_bound,
    format_number,
    format_p_value,
    format_rows,
    format_share,
)
from indpriv.analysis.attacks.threshold_attack import ThresholdAttack
from indpriv.analysis.disclosures import recording
from indpriv.analysis.fidelity.batch_norms import BatchNormFidelity
from indpriv.analysis.fidelity.comparison import Fidelity, Sensitivity, Spacing
from indpriv.analysis.groups.group_rows import GroupRow
from indpriv.analysis.groups.group_table import GroupTable
from indpriv.analysis.statistics.resampling import Interval
from indpriv.analysis.summary import SENSITIVE, AuditSummary
from indpriv.epsilon_table import DISCLAIMER
from indpriv.norm_log.evidence import FAILED, NOT_CHECKED, PASSED

_KEY_WIDTH = 11
_INDENT = (0, 0, 0, 2)
_NAME_WIDTH = 24
_FIRST_SCREEN_TABLES = 2
_FIRST_SCREEN_ROWS = 6
_LABELS_BESIDE = 3  # labels that fit beside each other on 80 columns
_CHANCE = 0.5
_WIDEST = 500


def print_audit(summary: AuditSummary, console: Console) -> None:
    """Print the first screen: guarantee, this run, who is worse off, attack, fidelity, checked, on trust."""
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right", overflow="ellipsis", no_wrap=True)
    head.add_row(Text(SENSITIVE, style="bold red"), Text(clean(summary.name), style="bold"))
    console.print(head)
    _section(console, "GUARANTEE", _guarantee_lines(summary))
    _section(console, "THIS RUN", _run_lines(summary))
    if summary.unit_sizes:
        _print_unit_sizes(summary, console)
    for table in _first_tables(summary.groups):
        _print_worse_off(table, console)
    _section(
        console,
        "ATTACK",
        [*_attack_lines(summary.attacks.by_group), *_bin_lines(summary), *_canary_lines(summary)],
    )
    if summary.fidelity.against_k:
        _section(console, "FIDELITY", _fidelity_lines(summary.fidelity.against_k))
    if summary.fidelity.batch_norms is not None:
        _section(console, "BATCH NORMS", _free_lines(summary.fidelity.batch_norms))
    if summary.fidelity.spacing is not None:
        _section(console, "SPACING", _spacing_lines(summary.fidelity.spacing))
    if summary.fidelity.sensitivity:
        _section(console, "SENSITIVITY", _sensitivity_lines(summary.fidelity.sensitivity))
    passed, failed, unchecked = (
        [check for check in summary.notes.checks if check.status == status]
        for status in (PASSED, FAILED, NOT_CHECKED)
    )
    _section(
        console,
        "CHECKED",
        [
            ", ".join(_short(check.title) for check in passed)
            or "nothing: the log stands on its word"
        ],
    )
    if failed:
        _section(
            console,
            "FAILED",
            [Text(f"{clean(check.title)}: {clean(check.detail)}", "red") for check in failed],
        )
    if unchecked:
        _section(console, "NOT CHECKED", [", ".join(_short(check.title) for check in unchecked)])
    trusted = [
        h.short
        for h in summary.notes.hazards
        if h.kind == "assumption" and h.status not in ("verified", "failed")
    ]
    _section(console, "ON TRUST", [", ".join(map(clean, trusted)) or "nothing"])
    if summary.notes.missing:
        _section(console, "MISSING", [clean(text) for text in summary.notes.missing])


def print_groups(
    tables: Sequence[GroupTable], audit: Mapping[str, Any], console: Console, *, raw: bool = True
) -> None:
    """Print whole group tables.

    Args:
        tables: from `indpriv.audit.groups_of`.
        audit: the content of audit.json: what the epsilons mean.
        console: where to.
        raw: also the tables over all labels, not only those within label.
    """
    console.print(Text(SENSITIVE, style="bold red"))
    console.print(Text(f"individual epsilon ({audit['claim']}), {audit['meaning']}"))
    status = audit["guarantee"].get("status")
    none = f", no guarantee ({status})" if status in ("void", "unproven") else ""
    console.print(
        Text(f"worst case {format_epsilon(audit['guarantee']['worst_case_epsilon'])}{none}")
    )
    console.print(Text(DISCLAIMER, style="italic"))
    for table in tables:
        console.print()
        if raw:
            _print_table(
                f"{clean(table.by)}, all labels",
                table.rows,
                console,
                standardised=_is_standardised(table),
            )
        for line in [*_ratio_lines(table), *_test_lines(table)]:
            console.print(Padding(line, _INDENT))
        for within in table.within_label:
            _print_table(
                f"{clean(table.by)} among {clean(within.label)}",
                within.rows,
                console,
                standardised=False,
            )
        for note in table.notes:
            console.print(Text(clean(note)))


def clean(text: str) -> str:
    """A text of the data for a terminal: control and invisible characters become a replacement character."""
    return "".join(char if char.isprintable() or char == "\u200d" else "\ufffd" for char in text)


def _section(console: Console, key: str, lines: Sequence[str | Text]) -> None:
    grid = Table.grid(padding=(0, 0))
    grid.add_column(width=max(_KEY_WIDTH, cell_len(key) + 1), no_wrap=True)
    grid.add_column(overflow="fold")
    for index, line in enumerate(lines):
        grid.add_row(
            Text(key if index == 0 else "", style="bold"),
            line if isinstance(line, Text) else Text(line),
        )
    console.print(grid)


def _guarantee_lines(summary: AuditSummary) -> list[str | Text]:
    guarantee, account = summary.guarantee, summary.account
    relation = account.neighbouring.replace("_", "/")
    value = (
        f"worst-case epsilon {format_epsilon(guarantee.worst_case_epsilon)} (delta {format_delta(guarantee.delta)}, "
        f"{relation} one {account.one_unit}, Poisson sampling, {account.guaranteed_by}; covers all checkpoints)"
    )
    if guarantee.status in ("supported", "declared"):
        lines: list[str | Text] = [value]
        if guarantee.status == "declared":
            lines.append("Its assumptions are declared, not checked.")
        if not guarantee.publishable:
            times_n = f"delta times n is {guarantee.delta_times_n:.2g}"
            lines.append(
                Text(f"NOT TO BE PUBLISHED: delta is at least 1/n ({times_n})", "bold red")
            )
        return lines
    verdict = "NONE: " if guarantee.status == "void" else "NOT PROVEN: "
    return [
        *(
            Text(f"{verdict if index == 0 else ''}{clean(reason)}", "bold red")
            for index, reason in enumerate(guarantee.reasons)
        ),
        f"Had every assumption held: {value}",
    ]


def _run_lines(summary: AuditSummary) -> list[str | Text]:
    individual = summary.individual
    how = f"{summary.account.accountant.upper()}; {summary.run.records.n_records:,} of {summary.run.settings.total_steps:,} steps recorded"
    lines: list[str | Text] = [
        f"individual epsilon, {summary.claim.upper()} ({how})",
        f"median {format_epsilon(individual.median)} | 75 % at most {format_epsilon(individual.p75)} | "
        f"{format_share(individual.share_at_worst_case)} {summary.account.at_worst_case}",
        f"95 % at most {format_epsilon(individual.p95)} | 99 % at most {format_epsilon(individual.p99)} | "
        f"largest {format_epsilon(individual.max)}",
    ]
    if summary.claim != "exact" or summary.run.settings.individually_clipped:
        lines.append(clean(summary.claim_reason))
    if how_recorded := recording(summary.run):
        lines.append(f"recorded: {how_recorded}")
    if summary.loss is not None and summary.loss.every.pearson is not None:
        accuracy = (
            ""
            if summary.run.test_accuracy is None
            else f"; test accuracy {format_share(summary.run.test_accuracy, 1)}"
        )
        lines.append(f"Pearson's r with log loss {summary.loss.every.pearson:.2f}{accuracy}")
    quote = "" if summary.guarantee.publishable else " This run has none to quote."
    return [*lines, Text(DISCLAIMER + quote, style="italic")]


def _print_unit_sizes(summary: AuditSummary, console: Console) -> None:
    """Worst case beside individual epsilon, by the number of rows of a unit, and what a cap there would drop."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column(f"ROWS OF ONE {summary.account.unit.upper()}", no_wrap=True)
    for column in (summary.account.everybody, "worst case", "median", "largest", "a cap drops"):
        grid.add_column(column, justify="right", no_wrap=True)
    for row in summary.unit_sizes:
        grid.add_row(
            "  " + format_rows(row.least, row.most),
            f"{row.n_units:,}",
            format_epsilon(row.worst_case_epsilon),
            format_epsilon(row.median),
            format_epsilon(row.max),
            f"{format_share(row.rows_dropped / row.n_rows)} of rows"
            if row.rows_dropped
            else "nothing",
        )
    console.print(grid)


def _first_tables(tables: Sequence[GroupTable]) -> list[GroupTable]:
    """The tables of the first screen: those whose order reverses first, the label's last, at most two."""
    ordered = sorted(
        tables, key=lambda table: ("label" in table.columns, not table.reversed_labels)
    )
    return ordered[:_FIRST_SCREEN_TABLES]


def _print_worse_off(table: GroupTable, console: Console) -> None:
    """Mean epsilon by group: all, within label where that fits, and test accuracy."""
    rows = [row for row in table.rows if row.epsilon.mean is not None]
    positions = [index for index, row in enumerate(table.rows) if row.epsilon.mean is not None]
    skipped = max(0, len(rows) - _FIRST_SCREEN_ROWS)
    if skipped:
        half = _FIRST_SCREEN_ROWS // 2
        positions = positions[:half] + positions[-half:]
    title = f"WHO IS WORSE OFF by {clean(table.by)}"
    names = [_cut(table.rows[index].name) for index in positions]
    fixed = 2 + max(map(cell_len, [title, *names])) + 9 + 16
    labels = [_cut(within.label, 9) for within in table.within_label]
    beside = (
        len(labels) <= _LABELS_BESIDE
        and fixed + sum(2 + max(5, cell_len(label)) for label in labels) <= console.width
    )
    standardised = bool(labels) and not beside
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column(Text(title), no_wrap=True)
    grid.add_column("all", justify="right", no_wrap=True)
    for label in labels if beside else ():
        grid.add_column(Text(label), justify="right", no_wrap=True)
    if standardised:
        grid.add_column("label-stand.", justify="right", no_wrap=True)
    grid.add_column("test accuracy", justify="right", no_wrap=True)
    for index, name in zip(positions, names, strict=True):
        row = table.rows[index]
        cells = [format_epsilon(row.epsilon.mean)]
        if beside:
            cells += [
                format_epsilon(within.rows[index].epsilon.mean) for within in table.within_label
            ]
        if standardised:
            cells.append(format_epsilon(row.standardised.mean))
        mark = " (too few)" if row.too_small else ""
        grid.add_row(Text(f"  {name}{mark}"), *cells, format_share(row.test_accuracy.share, 1))
    print_whole(grid, console)
    if skipped:
        verb = "is" if skipped == 1 else "are"
        console.print(Text(f"  {_count(skipped, 'group')} between them {verb} in the report"))
    for line in _ratio_lines(table):
        console.print(Padding(line, _INDENT))


def _ratio_lines(table: GroupTable) -> list[Text]:
    lines = []
    ratio, standardised = table.ratios.raw, table.ratios.standardised
    if ratio is not None and ratio.value is not None:
        text = f"{clean(ratio.worst)}/{clean(ratio.best)}: raw {ratio.value:.2f}{_behind(ratio.interval)}"
        if standardised is not None:
            value = (
                f"{standardised.value:.2f}{_behind(standardised.interval)}"
                if standardised.value is not None
                else f"none ({clean(standardised.reason)})"
            )
            text += f", label-standardised {value}"
        if table.reversed_labels:
            among = ", ".join(map(clean, table.reversed_labels))
            lines.append(Text(f"! The order reverses among {among}. {text}", style="yellow"))
        else:
            lines.append(Text(text))
        if table.unsure_reversals:
            among = ", ".join(map(clean, table.unsure_reversals))
            lines.append(
                Text(
                    f"Among {among} the order is the reverse, by no more than chance (corrected p above 5 %)."
                )
            )
    if table.too_small:
        lines.append(
            Text(
                f"too small to read, of fewer than {table.min_size}: {_count(table.too_small, 'group')}"
            )
        )
    return lines


def _test_lines(table: GroupTable) -> list[Text]:
    """What the tests and the paper's headline say of a table."""
    lines = []
    for spread, what in (
        (table.tests.spread, "equal group means"),
        (table.tests.spread_within_label, "equal means within label"),
    ):
        if spread is not None:
            lines.append(
                f"permutation test of {what}: p {format_p_value(spread.corrected)} (corrected for all groups and "
                "groupings)"
            )
    headline, rank = table.ratios.lowest_accuracy, table.tests.accuracy_rank
    if headline is not None and headline.value is not None:
        lines.append(
            f"lowest over highest test accuracy, {clean(headline.worst)}/{clean(headline.best)}: mean epsilon "
            f"{headline.value:.2f}{_behind(headline.interval)}"
        )
    if rank is not None:
        lines.append(
            f"rank correlation of test accuracy and mean epsilon: {rank.value:.2f} over {rank.n_groups} groups, p "
            f"{format_p_value(rank.p_value)}"
        )
    return [Text(line) for line in lines]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + "s" * (n != 1)


def _behind(interval: Interval | None) -> str:
    """An interval as it stands behind its figure; nothing where there is none."""
    return "" if interval is None else f" {format_interval(interval.low, interval.high)}"


def _is_standardised(table: GroupTable) -> bool:
    return any(row.standardised.smallest_label_count is not None for row in table.rows)


def _attack_lines(attacks: Sequence[ThresholdAttack]) -> list[str | Text]:
    private = [attack for attack in attacks if attack.model == "dp"]
    if not private:
        return ["none run: it needs losses of training and test examples"]
    shown = next((attack for attack in private if attack.by != "label"), private[0])
    twin = next(
        (attack for attack in attacks if attack.by == shown.by and attack.model == "non_dp"), None
    )
    text = f"{clean(shown.method)} {_rate(shown)}"
    text += f"; without DP {_rate(twin)}." if twin is not None else "; no twin without DP."
    beating = [
        row.name
        for row in (shown.overall, *shown.rows)
        if row.interval is not None and row.interval.low > _CHANCE
    ]
    if beating:
        names = ", ".join(map(_cut, beating[:4])) + (", ..." if len(beating) > 4 else "")
        return [
            text,
            Text(f"Above chance (95 % intervals, each by itself): {names}.", style="yellow"),
        ]
    return [text, "An attack that fails is no evidence of privacy."]


def _bin_lines(summary: AuditSummary) -> list[str | Text]:
    """What the attack by epsilon calls for."""
    found = summary.attacks.by_epsilon
    if found is None:
        return []
    if found.findings:
        return [
            Text(
                f"{found.findings} bins of epsilon lie above what the WORST CASE allows: a finding.",
                "bold red",
            )
        ]
    if found.places_to_look:
        text = f"{found.places_to_look} bins of epsilon lie above what their epsilon would allow: look there."
        return [Text(text, "yellow")]
    return ["No bin of epsilon lies above what its epsilon would allow."]


def _canary_lines(summary: AuditSummary) -> list[str | Text]:
    """What canaries prove of the worst case; more than the guarantee allows is a finding against the run."""
    if summary.attacks.canaries is None:
        return []
    overall, worst = summary.attacks.canaries.overall, summary.guarantee.worst_case_epsilon
    text = (
        f"{overall.n_members + overall.n_nonmembers:,} canaries: worst-case epsilon at least "
        f"{format_lower_bound(overall.bound.epsilon)} with {format_share(summary.attacks.canaries.confidence)} confidence"
    )
    if overall.bound.epsilon > worst:
        return [
            Text(
                f"{text}: ABOVE THE {format_epsilon(worst)} ACCOUNTED. The run or its account is wrong.",
                "bold red",
            )
        ]
    return [f"{text} (accounted: {format_epsilon(worst)})"]


def _rate(attack: ThresholdAttack) -> str:
    overall = attack.overall
    if overall.success_rate is None or overall.interval is None:
        return "has too few scores"
    text = f"{overall.success_rate:.2f} [{overall.interval.low:.2f}, {overall.interval.high:.2f}]"
    rates = [
        row.success_rate
        for row in attack.rows
        if row.success_rate is not None and not row.too_small
    ]
    return text + (
        f", by {clean(attack.by)} {min(rates):.2f} to {max(rates):.2f}" if len(rates) > 1 else ""
    )


def _spacing_lines(spacing: Spacing) -> list[str | Text]:
    """How far the answer moves when every second record is left out."""
    return [
        f"with every second record ({spacing.n_kept:,} of {spacing.n_records:,}; here {spacing.every:,} steps apart): "
        f"r {format_number(spacing.pearson, 4)}, mean shift {spacing.mean_shift:+.3f}, 95 % within "
        f"{spacing.p95_absolute:.3f}, largest {spacing.largest_absolute:.3f}",
        "The error of these epsilons is of that order and may be larger: this is no bound.",
    ]


def _sensitivity_lines(rows: Sequence[Sensitivity]) -> list[str | Text]:
    """How far epsilons move under other choices."""
    return [
        f"{row.choice.replace('_', ' ')} {row.instead.replace('_', ' ')} instead of {row.here.replace('_', ' ')}: mean shift "
        f"{row.mean_shift:+.3f}, 95 % within {row.p95_absolute:.3f}, largest {row.largest_absolute:.3f}"
        for row in rows
    ]


def _free_lines(found: BatchNormFidelity) -> list[str | Text]:
    """What left-out batch norms and their weighted sum say of the account."""
    lines: list[str | Text] = [
        f"{found.n_entries:,} norms, each left out in turn, against what the account would use ({found.between_records}), in "
        f"max_grad_norm: bias {found.signed_bias:+.3f}, mean {found.mean_absolute:.3f}, 95 % within "
        f"{found.p95_absolute:.3f}, largest {found.largest_absolute:.3f}, too small by over 1 % "
        f"{format_share(found.share_under_1_percent)}",
        f"mean RDP at order {found.order:.3g}: account {found.mean_rdp:.4g}, of which bias {found.rdp_bias:+.2g} (standard "
        f"error {found.rdp_bias_error:.1g})",
    ]
    if found.unbiased_mean_rdp is not None and found.standard_error is not None:
        lines.append(
            f"without bias, from sampled steps alone: {found.unbiased_mean_rdp:.4g} (standard error {found.standard_error:.1g})"
        )
    return lines


def _fidelity_lines(rows: Sequence[Fidelity]) -> list[str | Text]:
    """What larger K, or this log's own, says against norms at every step: the rule that the account uses by default."""
    lines: list[str | Text] = []
    for row in rows:
        if row.between_records != rows[0].between_records:
            continue
        what = "this log" if row.is_this_log else f"K = {row.every} steps"
        lines.append(
            f"{what}: r {format_number(row.errors.pearson, 4)}, bias {row.errors.bias:+.3f}, "
            f"largest {row.errors.largest_absolute:.3f}, too small {format_share(row.errors.share_under)}"
        )
    return lines


def _print_table(
    title: str, rows: Sequence[GroupRow], console: Console, *, standardised: bool
) -> None:
    columns = [
        "n",
        "mean",
        "interval",
        "to best",
        "p",
        "median",
        "95 %",
        "99 %",
        "max",
        "at worst",
        "loss",
    ]
    columns += ["train acc.", "test acc."]
    if standardised:
        columns[3:3] = ["label-stand.", "interval"]
    grid = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    grid.add_column("group", no_wrap=True)
    for column in columns:
        grid.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row.n:,}",
            format_epsilon(row.epsilon.mean),
            _behind(row.epsilon.mean_interval).strip() or "–",
        ]
        if standardised:
            cells += [
                format_epsilon(row.standardised.mean),
                _behind(row.standardised.interval).strip() or "–",
            ]
        cells += [
            format_number(row.epsilon.ratio_to_best),
            "–" if row.epsilon.p_value is None else format_p_value(row.epsilon.p_value),
        ]
        cells += [
            format_epsilon(value)
            for value in (row.epsilon.median, row.epsilon.p95, row.epsilon.p99, row.epsilon.max)
        ]
        cells += [format_share(row.epsilon.share_at_worst_case), format_number(row.mean_loss)]
        cells += [
            format_share(row.train_accuracy.share, 1),
            format_share(row.test_accuracy.share, 1),
        ]
        grid.add_row(
            Text(_cut(row.name, 2 * _NAME_WIDTH) + (" (too few)" if row.too_small else "")), *cells
        )
    print_whole(grid, console)


def print_whole(grid: Table, console: Console) -> None:
    """Print a table at its full width even where the terminal is narrower: figures are never cut off."""
    width = max(
        Measurement.get(console, console.options.update(width=_WIDEST), grid).maximum, console.width
    )
    colours: Literal["truecolor"] | None = "truecolor" if console.color_system else None
    Console(
        file=console.file, width=width, force_terminal=console.is_terminal, color_system=colours
    ).print(grid)


def _cut(text: str, width: int = _NAME_WIDTH) -> str:
    text = clean(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _short(name: str) -> str:
    return clean(name.split(" (")[0])
