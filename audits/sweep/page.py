"""The page of `python -m audits sweep`. Sensitive."""

from collections.abc import Callable
from pathlib import Path

from audits.sweep.findings import TUNING, OverSeeds, Sweep
from audits.sweep.frontier import frontier
from indpriv._formatting import format_epsilon, format_share
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.page import Page

Format = Callable[[float], str]


def _share(value: float) -> str:
    return format_share(value, 1)


_EPSILONS: dict[str, tuple[str, Format]] = {
    "worst_case_epsilon": ("Worst case", format_epsilon),
    "smallest_epsilon": ("Smallest", format_epsilon),
    "median_epsilon": ("Median", format_epsilon),
    "p95_epsilon": ("95 % quantile", format_epsilon),
    "largest_epsilon": ("Largest", format_epsilon),
    "share_at_worst_case": ("At the worst case", _share),
}
_GAPS: dict[str, tuple[str, Format]] = {
    "epsilon_gap": ("Epsilon gap", format_epsilon),
    "accuracy_gap": ("Accuracy gap", _share),
}


def page_of(found: Sweep) -> Page:
    """The page of a sweep."""
    gaps = {}
    for key in found.settings[0].figures:
        name, _, by = key.partition(": ")
        if name in _GAPS:
            title, form = _GAPS[name]
            gaps[key] = f"{title} by {by}", form
    values = {
        "found": found,
        "frontier": frontier,
        "tables": [_frontier(found), _table(found, _EPSILONS), _table(found, gaps)],
        "tuning": TUNING,
        "disclaimer": DISCLAIMER,
    }
    return Page(
        Path(__file__).with_name("sweep"),
        title=f"Sweep of {found.name}",
        eyebrow="Individual privacy audits of several settings",
        name=found.name,
        meta=f"{len(found.settings)} settings · {found.n_seeds} seeded runs each",
        values=values,
    )


Rows = tuple[list[tuple[str, ...]], tuple[str, ...]]  # and their heading


def _frontier(found: Sweep) -> Rows:
    """Accuracy and worst case, at the end and at the fixed points; r of epsilon and ln(loss)."""
    n, rows = found.n_seeds, list[tuple[str, ...]]()
    for one in found.settings:
        figures = one.figures
        rows.append(
            (
                one.name,
                _cell(figures["test_accuracy"], _share, n),
                _cell(figures["worst_case_epsilon"], format_epsilon, n),
                _cell(one.accuracy_at_epsilon, _share, n),
                _cell(one.epsilon_at_accuracy, format_epsilon, n),
                _cell(figures["pearson_log_loss"], "{:.3f}".format, n),
            )
        )
    return rows, (
        *("Setting", "Test accuracy", "Worst case"),
        f"Accuracy at epsilon {format_epsilon(found.at_epsilon)}",
        f"Epsilon at accuracy {_share(found.at_accuracy)}",
        "r with ln(loss)",
    )


def _table(found: Sweep, columns: dict[str, tuple[str, Format]]) -> Rows:
    rows: list[tuple[str, ...]] = [
        (
            one.name,
            *(_cell(one.figures[key], form, found.n_seeds) for key, (_, form) in columns.items()),
        )
        for one in found.settings
    ]
    return rows, ("Setting", *(title for title, _ in columns.values()))


def _cell(found: OverSeeds, form: Format, n_seeds: int) -> str:
    if found.mean is None:
        return f"{found.n} of {n_seeds} runs" if found.n else "–"
    if found.interval is None:
        return form(found.mean)
    return f"{form(found.mean)} [{form(found.interval.low)}, {form(found.interval.high)}]"
