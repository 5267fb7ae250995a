"""The ROC curves of an attack."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import FuncFormatter, NullLocator

from indpriv.report.figures.svg import ACCENT, MUTED, SECOND, bare, new_figure, style, to_svg


def roc_curves(curves: Mapping[str, Sequence[tuple[float, float]]], name: str = "roc") -> str:
    """ROC of all examples, of this model and of the one trained without DP; "" without a curve."""
    lines = []
    for model, label, colour in (("dp", "this model", ACCENT), ("non_dp", "without DP", SECOND)):
        points = [(x, y) for x, y in curves.get(model, ()) if x > 0 and y > 0]
        if len(points) > 1:
            lines.append((points, label, colour))
    if not lines:
        return ""
    lowest = min(min(x, y) for points, _, _ in lines for x, y in points)
    with style():
        figure = new_figure(3.6)
        axes = figure.add_axes((0.09, 0.15, 0.5, 0.8))
        ends, dashes = [lowest, 1], (0, (4, 2))
        axes.plot(ends, ends, color=MUTED, linewidth=1.0, linestyle=dashes, label="chance")
        for points, label, colour in lines:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            axis.set_minor_locator(NullLocator())
        axes.set_xlim(lowest, 1)
        axes.set_ylim(lowest, 1)
        bare(axes, "false-positive rate", "true-positive rate")
        axes.grid(axis="x")
        axes.legend(loc="lower right", handlelength=1.8)
        return to_svg(
            figure,
            name,
            "ROC of the loss-threshold attack",
            "True-positive against false-positive rates on logarithmic axes, for "
            f"{' and '.join(line[1] for line in lines)}; the dashed diagonal is an attack that "
            "guesses at random.",
        )
