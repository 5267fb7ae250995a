"""The page of `python -m audits sweep`, and what it prints. Sensitive."""

from collections.abc import Callable

from rich.console import Console

from audits.sweep.findings import TUNING, OverSeeds, Sweep
from audits.sweep.frontier import frontier
from indpriv._formatting import format_epsilon, format_share
from indpriv.analysis.summary import SENSITIVE
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.document import (
    Callout,
    Figure,
    Page,
    Paragraph,
    Section,
    Table,
    paragraph,
    table,
)
from indpriv.report.renderers.terminal import print_blocks

Format = Callable[[float], str]


def _share(value: float) -> str:
    return format_share(value, 1)


def _correlation(value: float) -> str:
    return f"{value:.3f}"


_EPSILONS: dict[str, tuple[str, Format]] = {
    "worst_case_epsilon": ("Worst case", format_epsilon),
    "smallest_epsilon": ("Smallest", format_epsilon),
    "median_epsilon": ("Median", format_epsilon),
    "p95_epsilon": ("95 % at most", format_epsilon),
    "largest_epsilon": ("Largest", format_epsilon),
    "share_at_worst_case": ("At the worst case", _share),
}
_GAPS: dict[str, tuple[str, Format]] = {
    "epsilon_gap": ("Epsilon gap", format_epsilon),
    "accuracy_gap": ("Accuracy gap", _share),
}


def _cell(found: OverSeeds, form: Format, n_seeds: int) -> str:
    if found.mean is None:
        return f"{found.n} of {n_seeds} runs" if found.n else "–"
    if found.interval is None:
        return form(found.mean)
    return f"{form(found.mean)} [{form(found.interval.low)}, {form(found.interval.high)}]"


def page_of(found: Sweep) -> Page:
    """The page of a sweep."""
    runs = "run" if found.n_seeds == 1 else "runs, of which intervals are Student's at 95 %"
    sections = (
        Section(
            "frontier",
            "Accuracy and epsilon",
            (
                Callout((paragraph(TUNING),), warn=True),
                paragraph(
                    f"Each row is the mean of {found.n_seeds} {runs}. Epsilon at {found.meaning}; "
                    f"individual epsilons are of the claim {' or '.join(found.claims)}."
                ),
                frontier_table(found),
                Figure(
                    frontier,
                    (found.settings,),
                    "Left: at checkpoints, means over seeds. Right: at the end; bars are intervals "
                    "over seeds.",
                ),
                paragraph(
                    "Both fixed points are read off the curve at the checkpoints, on a line "
                    "between them; 1 of 3 runs means that the others did not reach it. To end a "
                    "run because of its test accuracy is free only if the test data are public.",
                    style="note",
                ),
            ),
        ),
        Section("epsilons", "Individual epsilons", (epsilon_table(found),)),
        Section(
            "groups",
            "Groups",
            (
                gap_table(found),
                paragraph(
                    "A gap is the largest less the smallest group, by mean epsilon and by test "
                    "accuracy, among groups that are large enough to read.",
                    style="note",
                ),
            ),
        ),
    )
    return Page(
        title=f"Sweep of {found.name}",
        eyebrow="Individual privacy audits of several settings",
        name=found.name,
        meta=f"{len(found.settings)} settings · {found.n_seeds} seeded runs each",
        sections=sections,
        disclaimer=paragraph(DISCLAIMER, style="disclaimer"),
    )


def frontier_table(found: Sweep) -> Table:
    """Accuracy and worst case, at the end and at the fixed points; r of epsilon and ln(loss)."""
    n, rows = found.n_seeds, []
    for one in found.settings:
        figures = one.figures
        rows.append(
            (
                one.name,
                _cell(figures["test_accuracy"], _share, n),
                _cell(figures["worst_case_epsilon"], format_epsilon, n),
                _cell(one.accuracy_at_epsilon, _share, n),
                _cell(one.epsilon_at_accuracy, format_epsilon, n),
                _cell(figures["pearson_log_loss"], _correlation, n),
            )
        )
    head = (
        "Setting",
        "Test accuracy",
        "Worst case",
        f"Accuracy at epsilon {format_epsilon(found.at_epsilon)}",
        f"Epsilon at accuracy {_share(found.at_accuracy)}",
        "r with ln(loss)",
    )
    return table(head, rows)


def epsilon_table(found: Sweep) -> Table:
    """Quantiles of individual epsilon, and the share at the worst case."""
    rows = [
        (
            one.name,
            *(_cell(one.figures[key], form, found.n_seeds) for key, (_, form) in _EPSILONS.items()),
        )
        for one in found.settings
    ]
    return table(("Setting", *(title for title, _ in _EPSILONS.values())), rows)


def gap_table(found: Sweep) -> Table:
    """Gaps of epsilon and of accuracy by each column that groups the audits."""
    keys = [key for key in found.settings[0].figures if key.split(":")[0] in _GAPS]
    titles, forms = [], []
    for key in keys:
        name, _, column = key.partition(": ")
        titles.append(f"{_GAPS[name][0]} by {column}")
        forms.append(_GAPS[name][1])
    rows = [
        (
            one.name,
            *(
                _cell(one.figures[key], form, found.n_seeds)
                for key, form in zip(keys, forms, strict=True)
            ),
        )
        for one in found.settings
    ]
    return table(("Setting", *titles), rows)


def print_sweep(found: Sweep, console: Console) -> None:
    """Print the tables of a sweep."""
    blocks: list[Paragraph | Table] = [
        paragraph(SENSITIVE, style="alarm"),
        paragraph(f"SWEEP of {found.name}: epsilon at {found.meaning}"),
        frontier_table(found),
        epsilon_table(found),
        gap_table(found),
        paragraph(TUNING),
        paragraph(DISCLAIMER),
    ]
    print_blocks(blocks, console)
