"""What commands print of what they read, and the JSON beside it: values of templates. Sensitive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.text import Text

from indpriv._facts import FAILED, SEVERITIES, Fact
from indpriv._formatting import format_number
from indpriv._plain import to_json
from indpriv._shown import clean
from indpriv.analysis.advice import MOST_NOISE, PREDICTION, Advice, Remedy
from indpriv.analysis.attacks.canaries import BOUNDS, EACH_BY_ITSELF, AttackMeasures, CanaryResults
from indpriv.analysis.attacks.effects import MembershipEffects
from indpriv.analysis.attacks.evidence import Identity
from indpriv.analysis.attacks.lower_bound import NULL_TRIALS
from indpriv.analysis.attacks.rates import ALL, MIN_TRIALS, interval, parts
from indpriv.analysis.comparison import SAME, TOP_SHARE, AuditComparison
from indpriv.analysis.composed_runs import Composition
from indpriv.analysis.groups import GroupTable
from indpriv.analysis.reconstruction import CLOSE, Reconstruction
from indpriv.analysis.run_facts import Range
from indpriv.analysis.statistics.intervals import CONFIDENCE
from indpriv.analysis.summary import SENSITIVE, Audit
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report import report
from indpriv.report.formats import MOST_ROWS, counted, setting
from indpriv.report.page import Head, Page, Template, print_page

OF_BOUNDS = (
    "The lower bound is on the worst-case epsilon that differential privacy promises for every "
    "example (add/remove one example), not on the output-specific epsilon of any one. A bound of "
    "0 proves nothing. " + report.NO_EVIDENCE
)
OF_LINT = (
    "Most thresholds are rules of thumb. A setting that passes may still be a bad one; `indpriv "
    "check` says what the guarantee rests on."
)
SHARED: dict[str, Any] = {
    "confidence": CONFIDENCE,
    "disclaimer": DISCLAIMER,
    "interval": interval,
    "most_rows": MOST_ROWS,
    "no_evidence": report.NO_EVIDENCE,
}


def print_sensitive(template: Template, console: Console, **values: Any) -> None:
    """Print a template below a line that says that it is sensitive."""
    console.print(Text(SENSITIVE, style="bold red"))
    print_page(template, console, **SHARED | values)


def print_whole(page: Page, console: Console) -> None:
    """Print a page with what stands above it."""
    console.print(Text(SENSITIVE, style="bold red"))
    console.print(Text(clean(page.head.title), style="bold"))
    console.print(Text(clean(page.head.meta)))
    print_page(page.template, console, **page.values)


def lint_document(path: str, findings: Sequence[Fact]) -> dict[str, Any]:
    """The JSON of rules: every one, failed ones first."""
    found = Counter(finding.kind for finding in findings if finding.status == FAILED)
    failed = {severity: found[severity] for severity in SEVERITIES}
    return {"path": path, "meaning": OF_LINT, "failed": failed, "findings": to_json(findings)}


def print_lint(path: str, findings: Sequence[Fact], console: Console) -> None:
    """Print failed rules in full, and the titles of the others."""
    print_page("lint", console, **lint_document(path, findings))


def attack_document(measures: AttackMeasures) -> dict[str, Any]:
    """The JSON of an attack's scores: every rate of all examples, then of each group."""
    return {"sensitive": SENSITIVE, "meaning": OF_BOUNDS, **to_json(measures)}


def print_attack(measures: AttackMeasures, console: Console) -> None:
    """Print what the scores of one attack prove."""
    values = {"measures": measures, "meaning": OF_BOUNDS, "null_trials": NULL_TRIALS}
    rows = [(ALL, measures.overall), *parts(measures.rates, by="group").items()]
    print_sensitive("attack", console, rows=rows, min_trials=MIN_TRIALS, **values)


def print_results(results: Audit, attributes: pd.DataFrame, console: Console) -> None:
    """Print the attacks on one run, and on attributes of its model and of the baseline."""
    print_sensitive(
        "attacks",
        console,
        m={"rows": report.attack_rows(results)},
        attribute_attacks=attributes,
        unchecked=results.unchecked,
    )


def print_rates(rates: pd.DataFrame, console: Console) -> None:
    """Print the attacks on every model of a study."""
    rows = [parts(rates, attack=attack)[ALL] for attack in rates["attack"].unique()]
    print_sensitive("study", console, rows=rows)


def print_effects(found: MembershipEffects, console: Console) -> None:
    """Print effects of membership by individual epsilon."""
    print_page("effects", console, found=found)


def reconstruction_document(every: Sequence[Reconstruction]) -> dict[str, Any]:
    """The JSON of reconstructions."""
    return {"sensitive": SENSITIVE, "reconstruction": to_json(tuple(every))}


def print_reconstruction(every: Sequence[Reconstruction], console: Console) -> None:
    """Print one row for each attack."""
    print_sensitive("reconstructions", console, reconstruction=every, close=CLOSE)


def validation_document(
    found: Sequence[Identity], canaries: Mapping[str, CanaryResults]
) -> dict[str, Any]:
    """The JSON of attacks that could contradict an account."""
    return {
        "identities": [{**to_json(one), "z": one.z} for one in found],
        "canaries": {run: to_json(of.lengths) for run, of in canaries.items()},
        "canaries_left_out": {run: list(of.left_out) for run, of in canaries.items()},
    }


def print_validation(
    found: Sequence[Identity], canaries: Mapping[str, CanaryResults], console: Console
) -> None:
    """Print the identities, and the bounds that canaries prove."""
    print_page(
        "validation",
        console,
        found=found,
        canaries=canaries,
        each_by_itself=EACH_BY_ITSELF,
        bounds=BOUNDS,
    )


def print_groups(
    tables: Sequence[GroupTable], audit: Mapping[str, Any], console: Console, *, raw: bool = True
) -> None:
    """Print whole group tables; raw: also those over all labels, not only those within label.

    `audit` is the content of audit.json, which says what the epsilons mean.
    """
    values = {"tables": tables, "audit": audit, "raw": raw}
    print_sensitive("group_tables", console, **values)


def print_comparison(found: AuditComparison, console: Console) -> None:
    """Print which examples are better or worse off than in the first audit, and what is stable."""
    print_sensitive(
        "comparison",
        console,
        found=found,
        readings=list(enumerate(found.readings, 1)),
        same=SAME,
        top_share=TOP_SHARE,
        between_checkpoints=report.BETWEEN_CHECKPOINTS,
    )


def print_composition(found: Composition, console: Console) -> None:
    """Print the guarantee of all runs together, and individual epsilons by number of runs."""
    print_sensitive("composition", console, found=found, by_number=list(_by_number(found)))


def _by_number(found: Composition) -> Iterator[dict[str, Any]]:
    whole, each = found.table, found.table.details["n_runs"]
    for number in np.unique(each).tolist():
        epsilon = whole.epsilon[each == number]
        ends = np.quantile(epsilon, (0.5, 0.95, 1.0), method="higher").tolist()
        row = {"number": number, "n": len(epsilon), "share": len(epsilon) / len(whole)}
        yield row | dict(zip(("median", "p95", "largest"), ends, strict=True))


def advice_page(found: Advice, template: Template = "advice") -> Page:
    """The page of an advice; template: another one with these values."""
    head = Head(
        title=f"Advice on {found.name}",
        eyebrow="What would lower the epsilons of a group",
        name=found.name,
        meta=f"{counted(found.groups[0].n, found.plural[:-1])} · target epsilon {found.target:g} "
        f"for {format_number(100 * found.quantile)} % of each group",
    )
    values = {"found": found, "prediction": PREDICTION, "remedy": _remedy}
    return Page(template, head, SHARED | values)


def _remedy(found: Remedy, now: Range, up: bool) -> str:
    """A setting with its interval; a factor where the setting changed in the run."""

    def shown(factor: float | None) -> str:
        if factor is None:
            return f"> {MOST_NOISE:g} times" if up else "none"
        if now.min != now.max:
            return f"× {setting(factor, up=up)}"
        return setting(now.min * factor, up=up)

    ends = sorted(
        (found.factor_low, found.factor_high), key=lambda end: math.inf if end is None else end
    )
    text = "as now" if found.factor == 1 else shown(found.factor)
    return text if ends == [found.factor] * 2 else f"{text} [{shown(ends[0])}, {shown(ends[1])}]"
