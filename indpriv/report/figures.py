"""Figures as inline SVG, drawn from bins and group means, never from single examples. Sensitive.

Each returns an SVG element, or "" if there is nothing to draw.
"""

import base64
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from indpriv._facts import refused, text
from indpriv._formatting import clean, format_edges, format_epsilon, format_number, formatted
from indpriv._plain import shown
from indpriv.analysis.distribution import Distribution, LossRelation
from indpriv.analysis.groups import MIN_GROUP, GroupTable
from indpriv.analysis.schedule import Drivers, ScheduleFindings
from indpriv.analysis.summary import GROUPS
from indpriv.report.formats import TEMPLATES, shorten, shown_rows

# Drawn in these, replaced by the page's custom properties, which change with light and dark mode.
# figures.mplstyle has them too.
_THEME = {
    **{"ink": "#01020a", "muted": "#01020b", "rule": "#01020c"},
    **{"accent": "#01020d", "second": "#01020e", "warn": "#01020f"},
}
INK, MUTED, RULE, ACCENT, SECOND, WARN = _THEME.values()
styled = mpl.rc_context(fname=TEMPLATES / "figures.mplstyle")  # decorates what draws and writes
WIDTH = 9.0  # inches; the page scales figures to its column
_TEXT_LENGTH = 22  # characters of a text from the data; the table beside it shows all of them


def escape(text: str) -> str:
    """A text of the data inside SVG."""
    return html.escape(clean(text))


def new_figure(height: float) -> Figure:
    """An empty transparent figure of the page's width, for what is `styled`."""
    figure = Figure(figsize=(WIDTH, height), facecolor="none")
    FigureCanvasSVG(figure)
    return figure


def placeholder(index: int) -> str:
    """What to draw instead of the index-th text from the data."""
    return f"TEXT{index:05d}"


def _font(match: re.Match[str]) -> str:
    """Keep size and weight; the family is the page's."""
    weight = f"font-weight: {600 if match[1] in ('bold', '700') else 400}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}"


def to_svg(
    figure: Figure, name: str, words: str, *, texts: Sequence[str] = (), tips: Sequence[str] = ()
) -> str:
    """A figure, drawn in the colours of this module, as SVG; for what is `styled`.

    name: unique on the page, as it prefixes every id; words: the accessible name in a line, and
    alternative text; texts: what placeholder(0), placeholder(1), ... stand for; tips: what is shown
    where the pointer is on the part with the gid tip0, tip1, ...
    """
    title, _, description = words.partition("\n")

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
    short = [escape(shorten(text, _TEXT_LENGTH)) for text in texts]
    svg = re.sub(r"TEXT(\d{5})", lambda match: short[int(match[1])], svg)
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
MOST_LINES = 10  # that a figure can tell apart: figures.mplstyle has the colour and dashes of each
_FEW_DECADES = 2  # of a logarithmic axis, on which powers of ten alone would be too few ticks
_DASHES = (0, (4, 2))
PER_CENT = ticker.PercentFormatter(1.0, decimals=0, symbol=" %")


@styled
def epsilon_histogram(
    individual: Distribution, worst_case_epsilon: float | None, plural: str = "examples"
) -> str:
    """Histogram with the median marked, and the worst case unless it is None (far beyond)."""
    edges, counts = np.array(individual.edges), np.array(individual.counts)
    about = {key: shown(individual, key) for key in ("n", "median", "p95")}
    worst, share = format_epsilon(worst_case_epsilon), shown(individual, "share_at_worst_case")
    figure = new_figure(3.1)
    top = float(counts.max()) * 1.04
    left = 0.05 + 0.009 * len(f"{top:,.0f}")  # room for the counts, and their label
    axes = figure.add_axes((left, 0.18, 0.98 - left, 0.66))
    centres, widths = (edges[:-1] + edges[1:]) / 2, 0.86 * np.diff(edges)
    axes.bar(centres, counts, widths, alpha=0.85)
    for index, centre in enumerate(centres):  # also where a bar is too low to point at
        axes.bar(centre, top, edges[1] - edges[0], color="none", gid=f"tip{index}")
    axes.set(ylim=(0, top), xlim=(edges[0], edges[-1] * 1.012))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="individual epsilon", ylabel=plural)
    if worst_case_epsilon is not None:
        axes.axvline(worst_case_epsilon, color=WARN, linewidth=1.6)
        label = f"worst case {worst}: {share} of {plural}"
        _above(axes, worst_case_epsilon, label, WARN, "right")
    axes.plot([individual.median] * 2, [0, top], color=INK, linewidth=1.0, linestyle=(0, (2, 2)))
    close = individual.median > 0.4 * edges[-1]  # the labels would meet
    align = "right" if close else "left"
    _above(axes, individual.median, f"median {about['median']}", INK, align, int(close))
    texts = format_edges(individual.edges)
    tips = [
        f"{low} to {high}: {count:,} {plural if count != 1 else plural[:-1]}"
        for low, high, count in zip(texts, texts[1:], individual.counts, strict=False)
    ]
    about |= {"share": share, "bins": str(len(counts)), "last": format_epsilon(edges[-1])}
    about["line"] = f" of {worst}, marked by a line" if worst_case_epsilon is not None else ""
    words = text("sentence.figures", "histogram", plural=plural, **about)
    return to_svg(figure, "histogram", words, tips=tips)


def _above(axes: Axes, x: float, text: str, colour: str, align: str, row: int = 0) -> None:
    """A label above the plotting area at x."""
    place = axes.get_xaxis_transform()
    axes.text(x, 1.034 + 0.081 * row, text, color=colour, ha=align, va="bottom", transform=place)


@styled
def group_bars(table: GroupTable, worst_case_epsilon: float | None, name: str) -> str:
    """Bars of mean epsilon by group (raw, within label, label-standardised) and of test accuracy.

    Returns "" where no group has examples.
    """
    rows = table.rows.iloc[positions := shown_rows(table.rows, _MOST_GROUPS)]
    if not positions:
        return ""
    texts = rows["name"].tolist()
    epsilons = {"epsilon, all": rows["mean"]}
    for within in table.within_label if len(table.within_label) <= _MOST_LABELS else ():
        epsilons[placeholder(len(texts))] = within.rows["mean"].iloc[positions]
        texts.append(within.label)
    epsilons["standardised"] = rows["standardised_mean"]
    limit = max(worst_case_epsilon or 0.0, pd.concat(epsilons).max()) or 1.0
    panels = {**epsilons, "test accuracy": rows["test_accuracy"]}
    panels = {title: values for title, values in panels.items() if values.notna().any()}
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
    about: dict[str, Any] = {"by": " ".join(table.by.split()), "n": len(rows), "line": ""}
    about["skipped"] = f" ({skipped} groups not drawn)" if skipped else ""
    if worst_case_epsilon is not None:
        worst = format_epsilon(worst_case_epsilon)
        about["line"] = f"; a line marks the worst case of {worst}"
    return to_svg(figure, name, text("sentence.figures", "groups", **about), texts=texts)


def _bars(axes: Axes, values: "pd.Series[float]", limit: float, colour: str) -> None:
    """Horizontal bars of a column of groups, with their values beside them."""
    form = GROUPS.columns[str(values.name)].form
    axes.barh(range(len(values)), values.fillna(0), height=0.62, color=colour, alpha=0.85)
    axes.set(xlim=(0, limit * 1.62), ylim=(len(values) - 0.5, -0.5))
    for row, value in enumerate(values):
        label = formatted(None if np.isnan(value) else value, form)
        axes.text(limit * 1.02, row, f" {label}", va="center", fontsize=8)
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(True)


@styled
def epsilon_against_loss(
    loss: LossRelation, worst_case_epsilon: float | None, plural: str = "examples"
) -> str:
    """Counts by loss and epsilon, with quartiles and the fitted logarithm; "" where undefined."""
    bins, intercept, slope = loss.bins, loss.intercept, loss.slope
    if bins is None or slope is None or intercept is None:
        return ""
    x, y, counts = np.array(bins.loss_edges), np.array(bins.epsilon_edges), np.array(bins.counts)
    figure = new_figure(4.2)
    axes = figure.add_axes((0.07, 0.13, 0.91, 0.82))
    axes.set_xscale("log")
    cells = [
        Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j])
        for i, j in np.argwhere(counts > 0)
    ]
    shades = 0.06 + 0.5 * np.sqrt(counts[counts > 0] / counts.max()).round(1)
    colours = [(ACCENT, shade) for shade in shades]  # darker where there are more examples
    axes.add_collection(PatchCollection(cells, facecolors=colours, linewidth=0))
    enough = counts.sum(axis=1) >= MIN_GROUP
    centres = np.sqrt(x[:-1] * x[1:])[enough]
    low, middle, high = np.array([bins.p25, bins.median, bins.p75], float)[:, enough]
    axes.vlines(centres, low, high, color=INK, linewidth=0.8, alpha=0.55)
    label = "median and quartiles of a bin"
    axes.plot(centres, middle, "o-", color=INK, linewidth=1.4, markersize=2.6, label=label)
    fitted = intercept + slope * np.log(x)
    fitted[(fitted < 0) | (fitted > y[-1])] = np.nan
    sign = "+" if slope >= 0 else "−"
    label = f"{shown(loss, 'intercept')} {sign} {format_number(abs(slope))} ln(loss)"
    axes.plot(x, fitted, color=SECOND, linewidth=1.6, linestyle=_DASHES, label=label)
    if worst_case_epsilon is not None:
        worst = f"worst case {format_epsilon(worst_case_epsilon)}"
        axes.axhline(worst_case_epsilon, color=WARN, linewidth=1.4, label=worst)
    axes.set(xlim=(x[0], x[-1]), ylim=(0, y[-1] * 1.05))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
    axes.set(xlabel="loss of the final model (nats, logarithmic)", ylabel="individual epsilon")
    axes.legend(loc="upper left", bbox_to_anchor=(0.01, 0.93), handlelength=1.8)
    about: dict[str, Any] = {"n": shown(loss, "n"), "plural": plural, "bins": len(counts)}
    words = text("sentence.figures", "loss", r=shown(loss, "pearson_log_loss"), **about)
    return to_svg(figure, "loss", words)


@styled
def roc_curves(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """ROC of all examples, of this model and of the one trained without DP; "" without a curve."""
    found = []
    for model, label, colour in (("dp", "this model", ACCENT), ("non_dp", "without DP", SECOND)):
        points = [(x, y) for x, y in curves.get(model, ()) if x > 0 and y > 0]
        if len(points) > 1:
            found.append((points, label, colour))
    if not found:
        return ""
    lowest = min(min(x, y) for points, _, _ in found for x, y in points)
    figure = new_figure(3.6)
    axes = figure.add_axes((0.09, 0.15, 0.5, 0.8))
    ends = [lowest, 1]
    axes.plot(ends, ends, color=MUTED, linewidth=1.0, linestyle=_DASHES, label="chance")
    for points, label, colour in found:
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.minorticks_off()
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
    axes.grid(axis="x")
    axes.legend(loc="lower right", handlelength=1.8)
    models = " and ".join(line[1] for line in found)
    return to_svg(figure, "roc", text("sentence.figures", "roc", models=models))


@styled
def schedule(found: ScheduleFindings) -> str:
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
    figure = new_figure(2.4)
    width = 0.88 / len(panels)
    for index, (title, steps, values) in enumerate(panels):
        axes = figure.add_axes((0.07 + index * width, 0.2, width - 0.07, 0.62))
        axes.plot(steps, values)
        is_share = title == "test accuracy"
        axes.set(ylim=(0, 1 if is_share else 1.1 * max(values)), xlabel="step", title=title)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(ticker.MaxNLocator(4))
        axes.yaxis.set_major_formatter(PER_CENT if is_share else "{x:g}")
    return to_svg(figure, "schedule", text("sentence.figures", "schedule"))


@styled
def norms_over_training(drivers: Drivers) -> str:
    """Median norm by class and share of clipped examples over training.

    Returns "" with fewer than two records, without classes or with too many of them.
    """
    if len(drivers.steps) < 2 or not 0 < len(drivers.classes) <= MOST_LINES:
        return ""
    medians = np.array(drivers.median_norm, float)
    figure = new_figure(3.3)
    norms = figure.add_axes((0.07, 0.17, 0.33, 0.7))
    clipped = figure.add_axes((0.485, 0.17, 0.33, 0.7))
    for index, shares in enumerate(np.array(drivers.clipped_share_by_class, float)):
        norms.plot(drivers.steps, medians[index])
        clipped.plot(drivers.steps, shares, linewidth=1.2, label=placeholder(index))
    every = drivers.clipped_share
    clipped.plot(drivers.steps, every, ":", color=INK, linewidth=2.0, label="all examples")
    norms.axhline(1.0, color=WARN, linewidth=1.0, alpha=0.8)
    for axes in (norms, clipped):
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
        axes.set_xlabel("step")
    norms.set_title("median norm over max_grad_norm")
    clipped.set(title="share of examples clipped", ylim=(0, 1))
    clipped.yaxis.set_major_formatter(PER_CENT)
    legend = clipped.get_legend_handles_labels()
    figure.legend(*legend, loc="upper left", bbox_to_anchor=(0.825, 0.9), fontsize=7.5)
    low, high = np.nanmin(medians), np.nanmax(medians)
    if low > 0:
        norms.set_yscale("log")
        if max(1.0, high) < 10**_FEW_DECADES * min(1.0, low):
            norms.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        norms.yaxis.set_major_formatter("{x:g}")
        norms.minorticks_off()
    about = {"classes": len(drivers.classes), "records": len(drivers.steps)}
    words = text("sentence.figures", "norms", **about)
    return to_svg(figure, "drivers", words, texts=drivers.classes)


# By the name that a template gives.
FIGURES: Mapping[str, Callable[..., str]] = {
    "histogram": epsilon_histogram,
    "norms over training": norms_over_training,
    "groups": group_bars,
    "loss": epsilon_against_loss,
    "roc": roc_curves,
    "schedule": schedule,
}


def check_images(inputs: NDArray[np.float32]) -> None:
    """Raise InputError unless inputs is (n_examples, one or three channels, height, width)."""
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        raise refused("refusal.pictures", "shape", shape=inputs.shape[1:])


def pictures_of(drivers: Drivers, images: NDArray[np.float32]) -> dict[Any, str]:
    """PNGs as data URIs, by example id, of the examples at both ends.

    images: (n_examples, channels, height, width), in which the ids of drivers are positions; all
    are drawn on one scale, the range of those shown. InputError for no images, or other ids.
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
    """A PNG of pairs (k, 2, channels, height, width) of pictures above their reconstructions.

    They are on one scale. InputError for no images.
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
