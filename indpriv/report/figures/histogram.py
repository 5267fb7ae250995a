"""The histogram of individual epsilon."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from indpriv._formatting import format_edges, format_epsilon, format_share
from indpriv.analysis.distribution import Distribution
from indpriv.report.figures.svg import ACCENT, INK, WARN, bare, new_figure, style, to_svg


def epsilon_histogram(
    individual: Distribution,
    worst_case_epsilon: float | None,
    plural: str = "examples",
    name: str = "histogram",
) -> str:
    """Histogram with the median marked, and the worst case unless it is None (far beyond)."""
    edges, counts = np.array(individual.edges), np.array(individual.counts)
    median, share = format_epsilon(individual.median), format_share(individual.share_at_worst_case)
    description = (
        f"{individual.n:,} {plural} in {len(counts)} bins from 0 to "
        f"{format_epsilon(float(edges[-1]))}. Median {median}, 95th percentile "
        f"{format_epsilon(individual.p95)}; {share} are at the worst case"
    )
    with style():
        figure = new_figure(3.1)
        top = float(counts.max()) * 1.04
        left = 0.05 + 0.009 * len(f"{top:,.0f}")  # room for the counts, and their label
        axes = figure.add_axes((left, 0.18, 0.98 - left, 0.66))
        centres, widths = (edges[:-1] + edges[1:]) / 2, 0.86 * np.diff(edges)
        axes.bar(centres, counts, widths, color=ACCENT, alpha=0.85, linewidth=0)
        for index, centre in enumerate(centres):  # also where a bar is too low to point at
            axes.bar(centre, top, edges[1] - edges[0], color="none", gid=f"tip{index}")
        axes.set_ylim(0, top)
        axes.set_xlim(edges[0], edges[-1] * 1.012)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        bare(axes, "individual epsilon", plural)
        if worst_case_epsilon is not None:
            worst = format_epsilon(worst_case_epsilon)
            description += f" of {worst}, marked by a line"
            axes.axvline(worst_case_epsilon, color=WARN, linewidth=1.6)
            label = f"worst case {worst}: {share} of {plural}"
            _above(axes, worst_case_epsilon, label, WARN, align="right")
        middle = [individual.median] * 2
        axes.plot(middle, [0, top], color=INK, linewidth=1.0, linestyle=(0, (2, 2)))
        close = individual.median > 0.4 * edges[-1]  # the labels would meet
        align = "right" if close else "left"
        _above(axes, individual.median, f"median {median}", INK, align=align, row=int(close))
        texts = format_edges(individual.edges)
        tips = [
            f"{low} to {high}: {count:,} {plural if count != 1 else plural[:-1]}"
            for low, high, count in zip(texts, texts[1:], individual.counts, strict=False)
        ]
        return to_svg(figure, name, "Histogram of individual epsilon", f"{description}.", tips=tips)


def _above(axes: Axes, x: float, text: str, colour: str, *, align: str, row: int = 0) -> None:
    """A label above the plotting area at x."""
    axes.annotate(
        text,
        (x, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 5 + 12 * row),
        textcoords="offset points",
        ha=align,
        va="bottom",
        color=colour,
        fontsize=9,
        annotation_clip=False,
    )
