"""reports/tips/README.md, from tips.json beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from scipy import stats

from indpriv._formatting import format_epsilon
from reports.shared.markdown_table import table
from reports.shared.recorded import status_of
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED

Figures = Mapping[str, Any]
RUNS, EPSILON, DELTA, SIGNIFICANCE = 3, 3.0, 1e-5, 0.05
FIRST = "-first"  # the first phase of a run in two
WEIGHT_DECAYS = (0.0, 0.0005, 0.005)
PHASES = {  # batch size and law of the learning rate in each half of the epochs
    "constant": ((958, "constant"), (958, "constant")),
    "rate": ((958, "constant"), (958, "cosine")),
    "both": ((479, "constant"), (1916, "cosine")),
}
VIEWS = {"none": (1, 0), "one": (0, 1), "four": (1, 3)}  # pictures as they are, and shifted ones
ROWS_OF_MNIST = 5000
RULE = (
    "reproduced where the mean test accuracy in the last row lies above those in both other rows by more "
    f"than chance (Welch's t test, one-sided, {SIGNIFICANCE:g}), differs where above one of them; of {RUNS} runs each it tells "
    "differences of about three standard deviations"
)


@dataclass(frozen=True)
class Tip:
    """One tip, the runs that try it, the last setting being what it advises, and what a reader has to know."""

    title: str
    advice: str
    claim: str
    head: str
    settings: Mapping[str, str]  # of runs -> of its row
    made: tuple[str, ...]


TIPS = (
    Tip(
        "Weight decay",
        "Jarmul 2025 advises to set it higher than normal, since noise adds variance.",
        "more weight decay helps, on Adult",
        "weight decay",
        {f"decay_{value:g}": f"{value:g}" for value in WEIGHT_DECAYS},
        (
            "UCI Adult, `audits/adult_weight_decay.toml`. One network, one learning rate and fixed numbers of steps: weight decay acts",
            "together with all of these, and long runs, where noise makes parameters grow, may differ (see `audits/mnist.toml`, which has",
            "0.01 for 100 epochs).",
        ),
    ),
    Tip(
        "Batch size beside the learning rate",
        "Jarmul 2025 advises to use a scheduler of the batch size alongside that of the learning rate, which falls.",
        "a batch size scheduled beside the learning rate helps, on Adult",
        "schedule",
        {
            "batch_constant": "constant rate, batches of 958",
            "batch_rate": "rate that falls in the second half, batches of 958",
            "batch_both": "the same rate, batches of 479, then of 1,916",
        },
        (
            "UCI Adult, the same file without weight decay. Each run is two, of ten epochs each: the second starts from the last parameters",
            "of the first, and epsilon is of both together, as `indpriv compose` adds them up. Both have the same noise multiplier, chosen so",
            "that they reach it. The rate is 0.3, then falls to 0 as a cosine. Momentum starts anew in the second. One schedule, untuned.",
        ),
    ),
    Tip(
        "Augmentations in one batch",
        "Jarmul 2025 advises to keep a picture and its augmentations in the same batch.",
        "augmentations of an example in one batch help, on MNIST",
        "views of a picture in a step",
        {
            "views_none": "the picture",
            "views_one": "one, shifted at random",
            "views_four": "the picture and three, shifted at random",
        },
        (
            f"The first {ROWS_OF_MNIST:,} pictures of MNIST, the network `tanh_cnn`, five epochs in batches of 250, a learning rate of 0.5, clipping norm 1.",
            "Shifts are of up to two pixels. The gradients of the views of a picture are averaged before they are clipped, so that",
            "it contributes as much as one (De et al. 2022, arXiv:2204.13650): the same noise, at four times the cost. Epochs and network were",
            "chosen by the time that trials of two epochs took.",
        ),
    ),
)


def accuracies(runs: Figures, setting: str) -> list[float]:
    """Of the runs of a setting."""
    found = (runs.get(f"{setting}-{run}") for run in range(RUNS))
    return [run["test_accuracy"] for run in found if run is not None]


def verdicts(known: Figures) -> dict[str, str]:
    """Claim -> word, by `RULE`."""
    return {tip.claim: _verdict(tip, known.get("runs", {})) for tip in TIPS}


def _verdict(tip: Tip, runs: Figures) -> str:
    *others, advised = (accuracies(runs, setting) for setting in tip.settings)
    if min(map(len, (*others, advised))) < RUNS:
        return NOT_RUN
    above = [
        stats.ttest_ind(advised, other, equal_var=False, alternative="greater").pvalue
        <= SIGNIFICANCE
        for other in others
    ]
    return REPRODUCED if all(above) else DIFFERS if any(above) else NOT_REPRODUCED


def render(known: Figures) -> str:
    """The page."""
    return "\n".join(_lines(known.get("runs", {})))


def _lines(runs: Figures) -> Iterator[str]:
    words = verdicts({"runs": runs})
    yield from (
        "# Three tips on training with DP",
        "",
        "Made by `python -m reports.tips` from [tips.json](tips.json), three runs of each setting. Within a table every run has the same",
        f"number of epochs and the same worst case, at most epsilon {EPSILON:g} of one example at delta {DELTA:g} (add/remove, Poisson sampling, RDP).",
        f"Rule, written before the first result of each: {RULE}.",
        "",
    )
    for tip in TIPS:
        found = {
            name: run
            for name, run in runs.items()
            if name.removesuffix(FIRST).rpartition("-")[0] in tip.settings
        }
        rows = []
        for setting, title in tip.settings.items():
            each = accuracies(runs, setting)
            shown = f"{mean(each):.4f} ({min(each):.4f} to {max(each):.4f})" if each else NOT_RUN
            rows.append([title, shown, f"{len(each)}"])
        worst = max((run["epsilon"] for run in found.values()), default=0.0)
        seconds = sum(run.get("seconds", 0.0) for run in found.values())
        yield from (f"## {tip.title}", "", tip.advice, *tip.made, "")
        yield from status_of(found)
        yield table([tip.head, "test accuracy", "runs"], rows)
        yield from (
            "",
            f"**{tip.claim}: {words[tip.claim]}.**"
            + (f" Worst case of the runs: epsilon {format_epsilon(worst)}." if found else "")
            + (f" They took {seconds / 60:.1f} CPU minutes." if seconds else ""),
            "",
        )
