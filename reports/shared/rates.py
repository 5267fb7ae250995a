"""Rates of attacks, as cells of a table."""

from collections.abc import Mapping
from typing import Any

from indpriv._formatting import round_down, round_up

Figures = Mapping[str, Any]
RATES = ("0.01", "0.001")  # of false positives
HEAD = ("AUC", "TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %")


STUDENT = (
    "Intervals over models are Student's and leave out that models are each other's references: simulated, they cover 90 to 93 % for",
    "the AUC of LiRA (80 % where nothing leaks) and 89 to 96 % for other rates ([figures](../../benchmarks/README.md#intervalspy)).",
)


def student(*studies: Figures) -> list[str]:
    """What is to say of intervals that were made before models counted as each other's references."""
    return [] if all(study.get("jackknife") for study in studies) else [*STUDENT, ""]


def number(
    value: float, interval: Figures | None, *, percent: bool = False, digits: int | None = None
) -> str:
    """A figure with its interval."""
    scale, usual = (100, 2) if percent else (1, 4)
    digits = usual if digits is None else digits
    shown = f"{round(scale * value, digits) + 0.0:.{digits}f}"  # never -0.00
    if interval is None:
        return shown
    ends = round_down(scale * interval["low"], digits), round_up(scale * interval["high"], digits)
    return f"{shown} ({ends[0]} to {ends[1]})"


def rates(found: Figures, *, digits: int | None = None) -> tuple[str, ...]:
    """AUC, with these digits, and true-positive rates of one attack, as cells."""
    spans = found["tpr_at_fpr_intervals"]
    return (
        number(found["auc"], found["auc_interval"], digits=digits),
        *(number(found["tpr_at_fpr"][rate], spans.get(rate), percent=True) for rate in RATES),
    )


def limit(value: float, digits: int = 1) -> str:
    """What nothing exceeds (a ceiling in per cent, an epsilon), rounded up."""
    return round_up(value, digits)
