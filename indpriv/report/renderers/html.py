"""The report of an audit as one self-contained HTML page: no script, no request to anywhere. Sensitive."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from indpriv._formatting import (
    format_delta,
    format_edges,
    format_epsilon,
    format_interval,
    format_lower_bound,
    format_number,
    format_p_value,
    format_rows,
    format_share,
)
from indpriv.analysis.attacks.measures import MIN_TRIALS
from indpriv.analysis.attacks.threshold_attack import AttackRow, ThresholdAttack
from indpriv.analysis.groups.group_rows import MIN_GROUP, GroupRow
from indpriv.analysis.groups.group_table import GroupTable
from indpriv.analysis.statistics.resampling import Interval
from indpriv.analysis.summary import SENSITIVE, AuditSummary
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.figures.distribution import (
    epsilon_against_loss,
    epsilon_histogram,
    fidelity_against_k,
    group_bars,
    shown_rows,
)
from indpriv.report.figures.norms_over_training import norms_over_training
from indpriv.report.figures.roc import roc_curves
from indpriv.report.pictures import Pictures
from indpriv.report.verdict import verdict

_TABLE_ROWS = 40  # rows of one group table on the page; audit.json has all


@dataclass(frozen=True)
class GroupSection:
    """One grouping on the page: its figure and the rows of its tables."""

    table: GroupTable
    figure: Markup
    positions: tuple[int, ...]
    skipped: int

    def rows(self, rows: Sequence[GroupRow]) -> list[GroupRow]:
        """The rows to show, of the raw table or of one within a label."""
        return [rows[index] for index in self.positions]


@dataclass(frozen=True)
class AttackSection:
    """The attack by one column, on the DP model and on its twin: rows are (name, dp, non_dp or None)."""

    by: str
    protocol: str
    caveat: str
    seed: int
    has_twin: bool
    overall: tuple[AttackRow, AttackRow | None]
    rows: tuple[tuple[AttackRow, AttackRow | None], ...]
    skipped: int


def render_html(summary: AuditSummary, pictures: Pictures | None = None) -> str:
    """The whole page as text. Every text of the data is escaped; no example is in it but those whose pictures are given."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        eps=format_epsilon,
        lower=format_lower_bound,
        p=_p_value,
        span=_span,
        delta=format_delta,
        unbroken=_unbroken,
        share=_share,
        number=format_number,
        rows=format_rows,
        tojson_text=_indented,
    )
    worst: float | None = summary.guarantee.worst_case_epsilon
    if summary.unit_sizes and worst is not None and worst > summary.individual.edges[-1]:
        worst = None  # of the most rows, far beyond what figures show
    everybody = summary.account.everybody
    return environment.get_template("report.html.j2").render(
        audit=summary,
        pictures=pictures,
        sensitive=SENSITIVE,
        disclaimer=DISCLAIMER,
        meaning=summary.account.describe(),
        everybody=everybody,
        min_group=MIN_GROUP,
        min_trials=MIN_TRIALS,
        verdict=verdict(summary),
        edges=format_edges(summary.individual.edges),
        histogram=Markup(epsilon_histogram(summary.individual, worst, everybody)),
        drivers_figure=Markup(norms_over_training(summary.drivers)),
        loss_figure=Markup(epsilon_against_loss(summary.loss, worst, everybody))
        if summary.loss
        else "",
        fidelity_figure=Markup(fidelity_against_k(summary.fidelity.against_k, everybody)),
        roc_figure=Markup(roc_curves(summary.attacks.by_group)),
        groups=[_group_section(table, worst, index) for index, table in enumerate(summary.groups)],
        attacks=attack_sections(summary.attacks.by_group),
    )


def _p_value(value: float | None) -> str:
    return "–" if value is None else format_p_value(value)


def _span(interval: Interval | None) -> str:
    """An interval that no line breaks; nothing where there is none."""
    return (
        ""
        if interval is None
        else format_interval(interval.low, interval.high).replace(" ", "\u00a0")
    )


def _indented(value: object) -> str:
    """JSON as text, which the page escapes."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def _unbroken(text: str) -> Markup:
    """Escaped text in which no line breaks inside a number such as 1e-5, or before a per cent sign."""
    text = re.sub(r"(\d) %", "\\1\u00a0%", text)
    return Markup(re.sub(r"\d[\d.]*e-\d+", r'<span class="nb">\g<0></span>', str(escape(text))))


def _share(value: float | None, digits: int = 0) -> str:
    """A share that no line breaks."""
    return format_share(value, digits).replace(" ", "\u00a0")


def _group_section(table: GroupTable, worst_case_epsilon: float | None, index: int) -> GroupSection:
    positions = shown_rows(table.rows, _TABLE_ROWS)
    return GroupSection(
        table=table,
        figure=Markup(group_bars(table, worst_case_epsilon, f"groups{index}")),
        positions=tuple(positions),
        skipped=len(table.rows) - len(positions),
    )


def attack_sections(attacks: Sequence[ThresholdAttack]) -> list[AttackSection]:
    """Attacks by column, the twin's rows beside the DP model's."""
    sections = []
    for attack in attacks:
        if attack.model != "dp":
            continue
        twin = next(
            (other for other in attacks if other.by == attack.by and other.model == "non_dp"), None
        )
        others = {row.name: row for row in twin.rows} if twin else {}
        rows = [(row, others.get(row.name)) for row in attack.rows if row.trials]
        sections.append(
            AttackSection(
                by=attack.by,
                protocol=attack.protocol,
                caveat=attack.caveat,
                seed=attack.seed,
                has_twin=twin is not None,
                overall=(attack.overall, twin.overall if twin else None),
                rows=tuple(rows[:_TABLE_ROWS]),
                skipped=len(attack.rows) - len(rows[:_TABLE_ROWS]),
            )
        )
    return sections
