"""reports/weight_decay/README.md, from weight_decay.json beside it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from scipy import stats

from indpriv._formatting import format_epsilon
from reports.shared.markdown_table import table
from reports.shared.recorded import status_of
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED

Figures = Mapping[str, Any]
VALUES, RUNS = (0.0, 0.0005, 0.005), 3
SIGNIFICANCE = 0.05
CLAIM = "more weight decay helps, on Adult"
RULE = (
    f"reproduced where the mean test accuracy at the largest weight decay lies above those at the usual one and at none by more "
    f"than chance (Welch's t test, one-sided, {SIGNIFICANCE:g}), differs where above one of them; of three runs each it tells "
    "differences of about three standard deviations"
)


def accuracies(runs: Figures, value: float) -> list[float]:
    """Of the runs with a weight decay."""
    return [
        run["test_accuracy"] for name, run in runs.items() if name.split("-")[0] == f"{value:g}"
    ]


def verdict(known: Figures) -> str:
    """The word of `CLAIM`, by `RULE`."""
    *less, most = (accuracies(known.get("runs", {}), value) for value in VALUES)
    if min(map(len, (*less, most))) < RUNS:
        return NOT_RUN
    above = [
        stats.ttest_ind(most, other, equal_var=False, alternative="greater").pvalue <= SIGNIFICANCE
        for other in less
    ]
    return REPRODUCED if all(above) else DIFFERS if any(above) else NOT_REPRODUCED


def render(known: Figures) -> str:
    """The page."""
    runs = known.get("runs", {})
    rows = []
    for value in VALUES:
        found = accuracies(runs, value)
        shown = f"{mean(found):.4f} ({min(found):.4f} to {max(found):.4f})" if found else NOT_RUN
        rows.append([f"{value:g}", shown, f"{len(found)}"])
    worst = max((run["epsilon"] for run in runs.values()), default=0.0)
    lines = [
        "# Weight decay with DP-SGD",
        "",
        "Made by `python -m reports.weight_decay` from [weight_decay.json](weight_decay.json): `audits/adult_weight_decay.toml`,",
        "UCI Adult, three runs of each weight decay. Jarmul 2025 advises to set it higher than normal, since noise adds variance.",
        "",
        f"Worst case of each run: epsilon {format_epsilon(worst)} of one example at delta 1e-5 (add/remove, Poisson sampling, RDP).",
        "",
        *status_of(runs),
        table(["weight decay", "test accuracy", "runs"], rows),
        "",
        f"**{CLAIM}: {verdict(known)}.** Rule, written before the first result: {RULE}.",
        "One data set, one network, one learning rate and fixed numbers of steps: weight decay acts together with all of these, and",
        "long runs, where noise makes parameters grow, may differ (see `audits/mnist.toml`, which has 0.01 for 100 epochs).",
    ]
    return "\n".join(lines) + "\n"
