"""The histogram of individual epsilon."""

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from indpriv._formatting import format_epsilon, format_share
from indpriv.analysis.distribution import Distribution
from indpriv.report.figures.svg import ACCENT, INK, WARN, bare, new_figure, style, to_svg


def epsilon_histogram(
    individual: Distribution,
    worst_case_epsilon: float | None,
    everybody: str = "examples",
    name: str = "histogram",
) -> str:
    """Histogram of individual epsilon with the median marked, and the worst case unless it is None (far beyond)."""
    edges, counts = np.array(individual.edges), np.array(individual.counts)
    with style():
        figure = new_figure(3.1)
        axes = figure.add_axes((0.07, 0.18, 0.91, 0.66))
        centres = (edges[:-1] + edges[1:]) / 2
        sns.histplot(
            x=centres,
            weights=counts,
            bins=edges.tolist(),
            ax=axes,
            color=ACCENT,
            alpha=0.85,
            linewidth=0,
            shrink=0.86,
        )
        top = float(counts.max()) * 1.04
        axes.set_ylim(0, top)
        axes.set_xlim(edges[0], edges[-1] * 1.012)
        axes.set_xlabel("individual epsilon")
        axes.set_ylabel(everybody)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(axis="y")
        bare(axes)
        if worst_case_epsilon is not None:
            axes.axvline(worst_case_epsilon, color=WARN, linewidth=1.6)
            share = format_share(individual.share_at_worst_case)
            text = f"worst case {format_epsilon(worst_case_epsilon)}: {share} of {everybody}"
            _above(axes, worst_case_epsilon, text, WARN, align="right")
        axes.plot(
            [individual.median] * 2, [0, top], color=INK, linewidth=1.0, linestyle=(0, (2, 2))
        )
        close = individual.median > 0.4 * edges[-1]
        _above(
            axes,
            individual.median,
            f"median {format_epsilon(individual.median)}",
            INK,
            align="right" if close else "left",
            row=1 if close else 0,
        )
        return to_svg(
            figure,
            name,
            "Histogram of individual epsilon",
            f"{individual.n:,} {everybody} in {len(counts)} bins from 0 to "
            f"{format_epsilon(float(edges[-1]))}. Median {format_epsilon(individual.median)}, "
            f"95th percentile {format_epsilon(individual.p95)}; "
            f"{format_share(individual.share_at_worst_case)} are at the worst case"
            + (
                "."
                if worst_case_epsilon is None
                else f" of {format_epsilon(worst_case_epsilon)}, marked by a line."
            ),
        )


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
