"""Figures as inline SVG, drawn from bins and group means, never from single examples. Sensitive."""

from collections.abc import Callable, Mapping

from indpriv.report.figures.dots import hundred_dots
from indpriv.report.figures.fidelity import fidelity_against_k
from indpriv.report.figures.groups import group_bars
from indpriv.report.figures.histogram import epsilon_histogram
from indpriv.report.figures.loss import epsilon_against_loss
from indpriv.report.figures.norms_over_training import norms_over_training
from indpriv.report.figures.roc import roc_curves
from indpriv.report.figures.schedule import schedule

# By the name that a section gives; each returns an SVG element, or "" if there is nothing to draw.
FIGURES: Mapping[str, Callable[..., str]] = {
    "dots": hundred_dots,
    "histogram": epsilon_histogram,
    "norms over training": norms_over_training,
    "groups": group_bars,
    "loss": epsilon_against_loss,
    "roc": roc_curves,
    "fidelity": fidelity_against_k,
    "schedule": schedule,
}
