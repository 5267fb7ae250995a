"""Accuracy and epsilon of several settings."""

from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from audits.sweep.findings import OverSeeds, SettingResult
from indpriv.report import figures


@figures.styled
def frontier(settings: Sequence[SettingResult], name: str = "frontier") -> str:
    """Test accuracy against the worst case at checkpoints, and against median epsilon at the end.

    Returns "" with more settings than a figure can tell apart.
    """
    if len(settings) > figures.MOST_LINES:
        return ""
    figure = figures.new_figure(3.3)
    worst = figure.add_axes((0.07, 0.17, 0.29, 0.7))
    individual = figure.add_axes((0.44, 0.17, 0.29, 0.7))
    for index, setting in enumerate(settings):
        label = figures.placeholder(index)
        (line,) = worst.plot(setting.curve_epsilon, setting.curve_accuracy, label=label)
        epsilon, accuracy = setting.figures["median_epsilon"], setting.figures["test_accuracy"]
        if epsilon.mean is not None and accuracy.mean is not None:
            individual.errorbar(
                [epsilon.mean],
                [accuracy.mean],
                xerr=_bar(epsilon),
                yerr=_bar(accuracy),
                fmt="o" if line.get_linestyle() == "-" else "s",
                color=line.get_color(),
                linewidth=1.0,
                markersize=4.5,
            )
    for axes, label in (
        (worst, "worst-case epsilon"),
        (individual, "median individual epsilon"),
    ):
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(figures.PER_CENT)
        axes.set(xlabel=label, title="test accuracy")
    legend = worst.get_legend_handles_labels()
    figure.legend(*legend, loc="upper left", bbox_to_anchor=(0.745, 0.9), fontsize=7.5)
    return figures.to_svg(
        figure,
        name,
        "Accuracy and epsilon of several settings\n"
        f"Left: test accuracy of {len(settings)} settings against the worst-case epsilon at "
        "checkpoints. Right: test accuracy against the median individual epsilon at the end, "
        "with intervals over seeds.",
        texts=[setting.name for setting in settings],
    )


def _bar(found: OverSeeds) -> list[list[float]] | None:
    """Lengths below and above the mean, as matplotlib takes them."""
    if found.interval is None or found.mean is None:
        return None
    return [[found.mean - found.interval.low], [found.interval.high - found.mean]]
