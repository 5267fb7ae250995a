"""Noise, clipping norm and test accuracy over training."""

from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from indpriv.analysis.schedule import ScheduleFindings
from indpriv.report.figures import svg


def schedule(found: ScheduleFindings, name: str = "schedule") -> str:
    """Noise standard deviation and clipping norm by step, and accuracy at checkpoints.

    Returns "" with fewer than two steps.
    """
    if len(found.steps) < 2:
        return ""
    panels = [
        ("noise standard deviation", found.steps, found.noise_std),
        ("clipping norm", found.steps, found.max_grad_norm),
    ]
    if found.curve is not None:
        panels.append(("test accuracy", found.curve.steps, found.curve.test_accuracy))
    with svg.style():
        figure = svg.new_figure(2.4)
        width = 0.88 / len(panels)
        for index, (title, steps, values) in enumerate(panels):
            axes = figure.add_axes((0.07 + index * width, 0.2, width - 0.07, 0.62))
            axes.plot(steps, values, color=svg.ACCENT, linewidth=1.5)
            axes.set_ylim(0, 1 if title == "test accuracy" else 1.1 * max(values))
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            if title == "test accuracy":
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
            svg.bare(axes, "step", title=title)
        return svg.to_svg(
            figure,
            name,
            "Noise, clipping norm and test accuracy over training",
            "One line each by step: the standard deviation of the noise that is accounted, the "
            "clipping norm and, at checkpoints, the test accuracy.",
            (),
        )
