"""Who sees what of a federated run: epsilon by unit and by what is read. Sensitive."""

from indpriv._formatting import format_epsilon, format_number
from indpriv.analysis.federated.views import OBSERVERS, View
from indpriv.analysis.summary import Audit
from indpriv.report.document import Entry, Paragraph, Section, paragraph, table

_READ = {
    "outsider": "every published model (outsider)",
    "update": "the update of a client (server, and readers on its way)",
    "gradient": "the gradient of a row in training",
}


def views(summary: Audit) -> Section | None:
    """Where the run was federated."""
    found = summary.views
    if not found:
        return None
    rows = [
        (
            f"a {view.unit}",
            _READ[view.observer],
            "none" if view.noise_multiplier is None else format_number(view.noise_multiplier),
            view.participation,
            _epsilon(view.worst_case_epsilon),
            "–" if view.median_epsilon is None else format_epsilon(view.median_epsilon),
            view.reason,
        )
        for view in found
    ]
    head = ("Of", "To readers of", "Noise multiplier", "Participation", "Worst case", "Median", "")
    blocks = (
        paragraph(
            "Noise protects only from those who read what has it. One number for all readers and "
            "units would be wrong. The worst case limits what they learn; the median describes "
            "this run."
        ),
        table(head, rows),
        paragraph(
            "Metrics, numbers of examples and statistics that clients send beside their updates "
            "are in none of these accounts.",
            style="note",
        ),
    )
    lines = tuple(_line(unit, found) for unit in dict.fromkeys(view.unit for view in found))
    return Section("views", "Who sees what", blocks, (Entry("WHO SEES", lines),), nested=True)


def _line(unit: str, found: tuple[View, ...]) -> Paragraph:
    """One line of the first screen."""
    words = {"outsider": "models", "update": "an update", "gradient": "own gradient"}
    cells = {view.observer: view for view in found if view.unit == unit}
    parts = [
        f"{words[name]} {_epsilon(view.worst_case_epsilon)}{_given(view)}"
        for name in OBSERVERS
        if (view := cells.get(name)) is not None
    ]
    return paragraph(f"of a {unit}, worst case: {' | '.join(parts)}")


def _given(view: View) -> str:
    return "" if view.worst_case_epsilon is None else f" ({view.participation})"


def _epsilon(value: float | None) -> str:
    return "none" if value is None else format_epsilon(value)
