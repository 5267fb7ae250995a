"""Figures as inline SVG, drawn from bins and group means, never from single examples. Sensitive.

Each returns an SVG element, or "" if there is nothing to draw.
"""

import base64
import html
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from indpriv._facts import refused, text
from indpriv._formatting import clean, format_edges, format_epsilon, format_number, formatted
from indpriv._plain import shown
from indpriv.analysis.distribution import Distribution, LossBins, LossRelation
from indpriv.analysis.fidelity import Fidelity
from indpriv.analysis.groups import MIN_GROUP, GroupTable
from indpriv.analysis.schedule import Drivers, ScheduleFindings
from indpriv.analysis.summary import GROUPS
from indpriv.report.formats import TEMPLATES, shown_rows

# Drawn in these, replaced by the page's custom properties, which change with light and dark mode.
# figures.mplstyle has them too.
_THEME = {
    **{"ink": "#01020a", "muted": "#01020b", "rule": "#01020c"},
    **{"accent": "#01020d", "second": "#01020e", "warn": "#01020f"},
}
INK, MUTED, RULE, ACCENT, SECOND, WARN = _THEME.values()
WIDTH = 9.0  # inches; the page scales figures to its column
_TEXT_LENGTH = 22  # characters of a text from the data; the table beside it shows all of them


def escape(text: str) -> str:
    """A text of the data inside SVG."""
    return html.escape(clean(text))


def new_figure(height: float) -> Figure:
    """An empty transparent figure of the page's width; draw on it inside `style()`."""
    figure = Figure(figsize=(WIDTH, height), facecolor="none")
    FigureCanvasSVG(figure)
    return figure


def style() -> AbstractContextManager[None]:
    """Context in which figures are drawn and written."""
    return mpl.rc_context(fname=TEMPLATES / "figures.mplstyle")


def bare(axes: Axes, xlabel: str, ylabel: str = "", *, title: str = "") -> None:
    """Label axes, leave only the lower edge of their frame, and draw horizontal lines."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, color=INK, pad=8)
    axes.grid(axis="y")
    sns.despine(ax=axes, left=True)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_color(RULE)


def placeholder(index: int) -> str:
    """What to draw instead of the index-th text from the data."""
    return f"TEXT{index:05d}"


def shorten(text: str) -> str:
    """A text from the data as a figure shows it."""
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 1] + "…"


def _font(match: re.Match[str]) -> str:
    """Keep size and weight; the family is the page's."""
    weight = f"font-weight: {600 if match[1] in ('bold', '700') else 400}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}"


def to_svg(
    figure: Figure,
    name: str,
    title: str,
    description: str,
    texts: Sequence[str] = (),
    tips: Sequence[str] = (),
) -> str:
    """A figure as an inline SVG element.

    Args:
        figure: drawn in the colours of this module, inside `style()`.
        name: unique on the page; prefixes every id.
        title: its accessible name.
        description: alternative text: what the figure shows.
        texts: what placeholder(0), placeholder(1), ... stand for.
        tips: what is shown where the pointer is on the part with the gid tip0, tip1, ...
    """

    def tip(match: re.Match[str]) -> str:
        return f'<g class="tip"><title>{escape(tips[int(match[1])])}</title>'

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for pattern, instead in (
        (r"(?s)<metadata>.*?</metadata>", ""),
        (r"(?s)<!--.*?-->\s*", ""),
        (r'\bid="([^"]+)"', rf'id="{name}-\1"'),
        (rf'<g id="{name}-tip(\d+)">', tip),
        (r'href="#([^"]+)"', rf'href="#{name}-\1"'),
        (r"url\(#([^)]+)\)", rf"url(#{name}-\1)"),
        (r"(?s)<style.*?</style>", ""),  # its rule for * would hold for the whole page
        (r" font-family: [^;\"]+;?", ""),
        (r"font: (?:(\w+) )?([0-9.]+px) [^;\"]+", _font),
    ):
        svg = re.sub(pattern, instead, svg)
    for variable, colour in _THEME.items():
        svg = svg.replace(colour, f"var(--{variable})")
    svg = re.sub(r"TEXT(\d{5})", lambda match: escape(shorten(texts[int(match[1])])), svg)
    view = re.search(r'viewBox="[^"]+"', svg)
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        'class="figure" '
        f'{view.group(0) if view else ""} role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>'
    )
    return head + svg[svg.index(">") + 1 :].strip()


_MOST_GROUPS = 14  # bars that can be read; of more groups, the worst and the best are drawn
_MOST_LABELS = 3  # panels within label that fit beside each other
_LEFT, _GAP, _RIGHT = 0.2, 0.018, 0.985  # of the panels of groups, as fractions of the figure
_MOST_LINES = 10  # that a figure can tell apart
_FEW_DECADES = 2  # of a logarithmic axis, on which powers of ten alone would be too few ticks
_OF_RULES = {"last": ACCENT, "closest": INK, "worst_case": MUTED}


def _per_cent(axis: Axis) -> None:
    axis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0, symbol=" %"))


def _short(axis: Axis) -> None:
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))


def lines(n: int) -> Iterator[tuple[str, str]] | None:
    """Colours and dashes of n lines; None for more than a figure can tell apart."""
    if n > _MOST_LINES:
        return None
    colours = (ACCENT, SECOND, WARN, INK, MUTED)
    return ((colours[i % len(colours)], "-" if i < len(colours) else "--") for i in range(n))


def epsilon_histogram(
    individual: Distribution,
    worst_case_epsilon: float | None,
    plural: str = "examples",
    name: str = "histogram",
) -> str:
    """Histogram with the median marked, and the worst case unless it is None (far beyond)."""
    edges, counts = np.array(individual.edges), np.array(individual.counts)
    median, share = shown(individual, "median"), shown(individual, "share_at_worst_case")
    said = {"n": shown(individual, "n"), "plural": plural, "bins": len(counts), "share": share}
    said |= {"last": float(edges[-1]), "median": median, "p95": shown(individual, "p95")}
    description = text("sentence.figures", "histogram", **said)
    with style():
        figure = new_figure(3.1)
        top = float(counts.max()) * 1.04
        left = 0.05 + 0.009 * len(f"{top:,.0f}")  # room for the counts, and their label
        axes = figure.add_axes((left, 0.18, 0.98 - left, 0.66))
        centres, widths = (edges[:-1] + edges[1:]) / 2, 0.86 * np.diff(edges)
        axes.bar(centres, counts, widths, color=ACCENT, alpha=0.85, linewidth=0)
        for index, centre in enumerate(centres):  # also where a bar is too low to point at
            axes.bar(centre, top, edges[1] - edges[0], color="none", gid=f"tip{index}")
        axes.set(ylim=(0, top), xlim=(edges[0], edges[-1] * 1.012))
        axes.yaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
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


def group_bars(table: GroupTable, worst_case_epsilon: float | None, name: str) -> str:
    """Bars of mean epsilon by group (raw, within label, label-standardised) and of test accuracy.

    Returns "" where no group has examples.
    """
    rows = table.rows.iloc[drawn := shown_rows(table.rows, _MOST_GROUPS)]
    if not drawn:
        return ""
    texts = rows["name"].tolist()
    epsilons = {"epsilon, all": rows["mean"]}
    for within in table.within_label if len(table.within_label) <= _MOST_LABELS else ():
        epsilons[placeholder(len(texts))] = within.rows["mean"].iloc[drawn]
        texts.append(within.label)
    epsilons["standardised"] = rows["standardised_mean"]
    limit = max(worst_case_epsilon or 0.0, pd.concat(epsilons).max()) or 1.0
    panels = {**epsilons, "test accuracy": rows["test_accuracy"]}
    panels = {title: values for title, values in panels.items() if values.notna().any()}
    with style():
        height = 0.62 + 0.3 * len(rows)
        figure = new_figure(height)
        width = (_RIGHT - _LEFT - _GAP * (len(panels) - 1)) / len(panels)
        for index, (title, values) in enumerate(panels.items()):
            left, bottom = _LEFT + index * (width + _GAP), 0.1 / height
            axes = figure.add_axes((left, bottom, width, 1 - 0.44 / height))
            if title in epsilons:
                _bars(axes, values, limit, ACCENT)
                if worst_case_epsilon is not None:
                    axes.axvline(worst_case_epsilon, color=WARN, linewidth=1.0, alpha=0.8)
            else:
                _bars(axes, values, 1.0, SECOND)
            stressed = index == 0 or title not in epsilons
            axes.set_title(title, fontsize=8.5, color=INK if stressed else MUTED, pad=7)
            if index == 0:
                names = list(map(placeholder, range(len(rows))))
                axes.set_yticks(range(len(rows)), names, color=INK)
        skipped = len(table.rows) - len(rows)
        description = f"Bars of {len(rows)} groups, worst first"
        description += f" ({skipped} groups not drawn)" if skipped else ""
        if worst_case_epsilon is not None:
            worst = format_epsilon(worst_case_epsilon)
            description += f"; a line marks the worst case of {worst}"
        title = f"Mean epsilon and test accuracy by {table.by}"
        return to_svg(figure, name, title, f"{description}; the table holds the values.", texts)


def _bars(axes: Axes, values: "pd.Series[float]", limit: float, colour: str) -> None:
    """Horizontal bars of a column of groups, with their values beside them."""
    form = GROUPS.columns[str(values.name)].form
    axes.barh(range(len(values)), values.fillna(0), height=0.62, color=colour, alpha=0.85, lw=0)
    axes.set(xlim=(0, limit * 1.62), ylim=(len(values) - 0.5, -0.5))
    for row, value in enumerate(values):
        label = formatted(None if np.isnan(value) else value, form)
        axes.text(limit * 1.02, row, f" {label}", va="center", fontsize=8, color=INK)
    axes.set(xticks=[], yticks=[])
    sns.despine(ax=axes, bottom=True)


def epsilon_against_loss(
    loss: LossRelation,
    worst_case_epsilon: float | None,
    plural: str = "examples",
    name: str = "loss",
) -> str:
    """Counts by loss and epsilon, with quartiles and the fitted logarithm; "" where undefined."""
    bins, intercept, slope = loss.bins, loss.intercept, loss.slope
    if bins is None or slope is None or intercept is None:
        return ""
    edges, top = np.array(bins.loss_edges), bins.epsilon_edges[-1]
    with style():
        figure = new_figure(4.2)
        axes = figure.add_axes((0.07, 0.13, 0.91, 0.82))
        axes.set_xscale("log")
        _density(axes, bins)
        _quartiles(axes, bins)
        fitted = intercept + slope * np.log(edges)
        fitted[(fitted < 0) | (fitted > top)] = np.nan
        sign = "+" if slope >= 0 else "−"
        label = f"{shown(loss, 'intercept')} {sign} {format_number(abs(slope))} ln(loss)"
        dashes = (0, (4, 2))
        axes.plot(edges, fitted, color=SECOND, linewidth=1.6, linestyle=dashes, label=label)
        if worst_case_epsilon is not None:
            worst = f"worst case {format_epsilon(worst_case_epsilon)}"
            axes.axhline(worst_case_epsilon, color=WARN, linewidth=1.4, label=worst)
        axes.set(xlim=(edges[0], edges[-1]), ylim=(0, top * 1.05))
        _short(axes.xaxis)
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
        bare(axes, "loss of the final model (nats, logarithmic)", "individual epsilon")
        axes.legend(loc="upper left", bbox_to_anchor=(0.01, 0.93), handlelength=1.8)
        said = {"n": shown(loss, "n"), "plural": plural, "bins": len(bins.counts)}
        words = text("sentence.figures", "loss", r=shown(loss, "pearson_log_loss"), **said)
        return to_svg(figure, name, *words.split("\n"))


def _density(axes: Axes, bins: LossBins) -> None:
    """Cells of the two-dimensional histogram, darker where there are more examples."""
    x, y, counts = np.array(bins.loss_edges), np.array(bins.epsilon_edges), np.array(bins.counts)
    shades = np.round(np.sqrt(counts / counts.max()), 1)
    for shade in np.unique(shades[counts > 0]):
        cells = [
            Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j])
            for i, j in np.argwhere((counts > 0) & (shades == shade))
        ]
        axes.add_collection(
            PatchCollection(cells, facecolor=ACCENT, alpha=0.06 + 0.5 * float(shade), linewidth=0)
        )


def _quartiles(axes: Axes, bins: LossBins) -> None:
    """Median and quartiles of epsilon in each bin of loss with enough examples."""
    x = np.array(bins.loss_edges)
    enough = np.array(bins.counts).sum(axis=1) >= MIN_GROUP
    centres = np.sqrt(x[:-1] * x[1:])[enough]
    low, middle, high = (
        np.array([np.nan if value is None else value for value in part])[enough]
        for part in (bins.p25, bins.median, bins.p75)
    )
    axes.vlines(centres, low, high, color=INK, linewidth=0.8, alpha=0.55)
    label = "median and quartiles of a bin"
    axes.plot(centres, middle, color=INK, linewidth=1.4, marker="o", markersize=2.6, label=label)


def roc_curves(curves: Mapping[str, Sequence[tuple[float, float]]], name: str = "roc") -> str:
    """ROC of all examples, of this model and of the one trained without DP; "" without a curve."""
    shown = []
    for model, label, colour in (("dp", "this model", ACCENT), ("non_dp", "without DP", SECOND)):
        points = [(x, y) for x, y in curves.get(model, ()) if x > 0 and y > 0]
        if len(points) > 1:
            shown.append((points, label, colour))
    if not shown:
        return ""
    lowest = min(min(x, y) for points, _, _ in shown for x, y in points)
    with style():
        figure = new_figure(3.6)
        axes = figure.add_axes((0.09, 0.15, 0.5, 0.8))
        ends, dashes = [lowest, 1], (0, (4, 2))
        axes.plot(ends, ends, color=MUTED, linewidth=1.0, linestyle=dashes, label="chance")
        for points, label, colour in shown:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=label)
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            axis.set_minor_locator(ticker.NullLocator())
        axes.set(xlim=(lowest, 1), ylim=(lowest, 1))
        bare(axes, "false-positive rate", "true-positive rate")
        axes.grid(axis="x")
        axes.legend(loc="lower right", handlelength=1.8)
        words = text("sentence.figures", "roc", models=" and ".join(line[1] for line in shown))
        return to_svg(figure, name, *words.split("\n"))


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
    with style():
        figure = new_figure(2.4)
        width = 0.88 / len(panels)
        for index, (title, steps, values) in enumerate(panels):
            axes = figure.add_axes((0.07 + index * width, 0.2, width - 0.07, 0.62))
            axes.plot(steps, values, color=ACCENT, linewidth=1.5)
            axes.set_ylim(0, 1 if title == "test accuracy" else 1.1 * max(values))
            axes.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(ticker.MaxNLocator(4))
            (_per_cent if title == "test accuracy" else _short)(axes.yaxis)
            bare(axes, "step", title=title)
        return to_svg(figure, name, *text("sentence.figures", "schedule").split("\n"))


def norms_over_training(drivers: Drivers, name: str = "drivers") -> str:
    """Median norm by class and share of clipped examples over training.

    Returns "" with fewer than two records, without classes or with too many of them.
    """
    drawn = lines(len(drivers.classes))
    if len(drivers.steps) < 2 or not drivers.classes or drawn is None:
        return ""
    with style():
        figure = new_figure(3.3)
        norms = figure.add_axes((0.07, 0.17, 0.33, 0.7))
        clipped = figure.add_axes((0.485, 0.17, 0.33, 0.7))
        for index, (colour, line) in enumerate(drawn):
            medians = _numbers(drivers.median_norm[index])
            shares = _numbers(drivers.clipped_share_by_class[index])
            label = placeholder(index)
            norms.plot(drivers.steps, medians, line, color=colour, linewidth=1.5)
            clipped.plot(drivers.steps, shares, line, color=colour, linewidth=1.2, label=label)
        every = drivers.clipped_share
        clipped.plot(drivers.steps, every, ":", color=INK, linewidth=2.0, label="all examples")
        norms.axhline(1.0, color=WARN, linewidth=1.0, alpha=0.8)
        for axes, title in (
            (norms, "median norm over max_grad_norm"),
            (clipped, "share of examples clipped"),
        ):
            axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
            bare(axes, "step", title=title)
        legend = clipped.get_legend_handles_labels()
        figure.legend(*legend, loc="upper left", bbox_to_anchor=(0.825, 0.9), fontsize=7.5)
        values = [value for line in drivers.median_norm for value in line if value is not None]
        if min(values) > 0:
            norms.set_yscale("log")
            if max(1.0, *values) < 10**_FEW_DECADES * min(1.0, *values):
                norms.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            _short(norms.yaxis)
            norms.yaxis.set_minor_locator(ticker.NullLocator())
        clipped.set_ylim(0, 1)
        _per_cent(clipped.yaxis)
        said = {"classes": len(drivers.classes), "records": len(drivers.steps)}
        title, description = text("sentence.figures", "norms", **said).split("\n")
        return to_svg(figure, name, title, description, drivers.classes)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def fidelity_against_k(
    rows: Sequence[Fidelity], plural: str = "examples", name: str = "fidelity"
) -> str:
    """Errors and share under-reported against K, one colour a rule; "" with fewer than two K."""
    rows = sorted((row for row in rows if not row.is_this_log), key=lambda row: row.every)
    if len({row.every for row in rows}) < 2:
        return ""
    with style():
        figure = new_figure(3.3)
        error = figure.add_axes((0.07, 0.17, 0.41, 0.68))
        share = figure.add_axes((0.575, 0.17, 0.41, 0.68))
        curves = (
            (error, "o--", "p95_absolute", "95th percentile"),
            (error, "o-", "mean_absolute", "mean"),
            (share, "o--", "share_under", "by any amount"),
            (share, "o-", "share_under_1_percent", "by more than 1 %"),
        )
        for rule in dict.fromkeys(row.between_records for row in rows):
            line = [row for row in rows if row.between_records == rule]
            for axes, shape, field, what in curves:
                axes.plot(
                    [row.epochs for row in line],
                    [getattr(row, field) for row in line],
                    shape,
                    color=_OF_RULES[rule],
                    label=f"{rule.replace('_', ' ')}: {what}",
                    markersize=3,
                    linewidth=1.6 if shape == "o-" else 1.2,
                )
        for axes, title in (
            (error, "absolute error of epsilon"),
            (share, f"share of {plural} under-reported"),
        ):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(ticker.FixedLocator(sorted({row.epochs for row in rows})))
            axes.xaxis.set_minor_locator(ticker.NullLocator())
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.2g}"))
            axes.set_ylim(bottom=0)
            bare(axes, "K, in epochs", title=title)
            axes.legend(loc="best", handlelength=2.2, fontsize=7.5)
        share.set_ylim(0, 1)
        _per_cent(share.yaxis)
        error.yaxis.set_major_locator(ticker.MaxNLocator(5))
        words = text("sentence.figures", "fidelity", plural=plural)
        return to_svg(figure, name, *words.split("\n"))


# By the name that a template gives.
FIGURES: Mapping[str, Callable[..., str]] = {
    "histogram": epsilon_histogram,
    "norms over training": norms_over_training,
    "groups": group_bars,
    "loss": epsilon_against_loss,
    "roc": roc_curves,
    "fidelity": fidelity_against_k,
    "schedule": schedule,
}


def check_images(inputs: NDArray[np.float32]) -> None:
    """Raise InputError unless inputs is (n_examples, one or three channels, height, width)."""
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        raise refused("refusal.pictures", "shape", shape=inputs.shape[1:])


def pictures_of(drivers: Drivers, images: NDArray[np.float32]) -> dict[Any, str]:
    """PNGs as data URIs, by example id, of the examples at both ends.

    Args:
        drivers: whose ids are positions in images.
        images: (n_examples, channels, height, width); all are drawn on one scale, the range of
            those shown.

    Raises:
        InputError: not images, or ids that are not positions.
    """
    check_images(images)
    ids = [*drivers.least_protected, *drivers.most_protected]
    others = [each for each in ids if not isinstance(each, int) or not 0 <= each < len(images)]
    if others:
        raise refused("refusal.pictures", "id", example=others[0], n=len(images))
    shown = images[np.array(ids, dtype=np.int64)]
    low, high = float(shown.min(initial=0.0)), float(shown.max(initial=1.0))
    return {each: data_uri(_png((images[each] - low) / (high - low))) for each in ids}


def picture_pairs(pairs: NDArray[np.float32]) -> bytes:
    """A PNG of pictures above their reconstructions, on one scale.

    Args:
        pairs: (k, 2, channels, height, width).

    Raises:
        InputError: not images.
    """
    check_images(pairs[:, 0])
    low, high = float(pairs.min()), float(pairs.max())
    rows = [np.concatenate(list(pairs[:, row]), axis=2) for row in (0, 1)]
    scaled = (np.concatenate(rows, axis=1) - low) / max(high - low, 1e-12)
    return _png(scaled.astype(np.float32))


def data_uri(png: bytes) -> str:
    """A PNG as a page holds it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _png(image: NDArray[np.float32]) -> bytes:
    """A PNG of an image (channels, height, width) with values in [0, 1]."""
    buffer = io.BytesIO()
    pixels = image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)
    imsave(buffer, np.clip(pixels, 0.0, 1.0), format="png", cmap="gray", vmin=0.0, vmax=1.0)
    return buffer.getvalue()
