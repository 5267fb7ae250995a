"""Figures 9, 10, 12 and 13: CIFAR-10 at other clipping norms and with the hinge loss, of one short run each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from indpriv._files import read_json
from indpriv._formatting import format_epsilon, format_number, format_share
from reports.shared.verdicts import NOT_RUN
from reports.yu2023 import paper, rules
from reports.yu2023.audits import DEFAULT, errors_of, means_of
from reports.yu2023.sections import Found, Known, Section, block, named, not_run, words_of

SWEPT = "sweeps"  # the part of what was measured

AUDIT = "cifar10_clip"  # audits/<name>.toml


@dataclass(frozen=True)
class Planned:
    """One sweep, of one run for each setting.

    over: as `python -m audits sweep --over` takes it; folder: under reports/runs.
    """

    over: str
    folder: str


MULTIPLES, LARGER, HINGE = "multiples of the median norm", "larger clipping norms", "hinge loss"
SWEEPS = {  # learning rate times clipping norm is 0.34 throughout
    MULTIPLES: Planned("max_grad_norm+learning_rate=0.34:1.0,1.02:0.333,1.7:0.2,5.1:0.0667", AUDIT),
    LARGER: Planned("max_grad_norm+learning_rate=5.0:0.068,10.0:0.034", f"{AUDIT}_more"),
    HINGE: Planned("loss=hinge", "cifar10_hinge"),
}


_CIFAR10 = "CIFAR-10"
_PEARSON = "Pearson's r of epsilon and log loss"
_ORDER = "lowest to highest mean epsilon"
_RISES = "mean epsilon from 1.5 to 0.5 of the median norm"
_SETTING = (
    f"`audits/{AUDIT}.toml`: the small network, eight epochs and one seeded run of each setting, so that the sizes are not the "
    f"paper's (worst case {paper.MAX_EPSILON_SWEPT}); what is judged is the direction."
)

Settings = Sequence[Mapping[str, Any]]


def found_in(folder: Path) -> list[dict[str, Any]]:
    """What a sweep found: of each setting its values, figures, mean epsilon by label, and errors of estimates by gamma."""
    audits = [read_json(path) for path in sorted((folder / "audits").glob("*/audit.json"))]
    found = []
    for setting in read_json(folder / "sweep.json")["settings"]:
        summary = next(
            audit
            for audit in audits
            if setting["values"].items() <= audit["run"]["declared"]["config"]["training"].items()
        )
        errors = errors_of(summary, paper.GAMMAS)
        found.append(
            {
                "values": setting["values"],
                "figures": {name: each["mean"] for name, each in setting["figures"].items()},
                "means": means_of(summary, "label"),
                "errors": {f"{gamma:g}": values for gamma, values in errors.items()},
            }
        )
    return found


def figures_9_10(known: Known) -> Section:
    """Clipping norms below and above the median norm."""
    number, title = (
        "Figures 9 and 10",
        "clipping norms of 0.1, 0.3, 0.5 and 1.5 of the median norm (ResNet-20)",
    )
    theirs, theirs_by_class = paper.FIGURES_9_10, paper.APPENDIX_C
    expected = {
        "test accuracy": ", ".join(map(str, theirs.test_accuracy)) + " %",
        "smallest epsilon": ", ".join(map(str, theirs.smallest)),
        "at the worst case": theirs.share_at_worst_case,
        "largest less smallest class average": ", ".join(map(str, theirs.epsilon_gap)),
        "gaps in test accuracy between classes": ", ".join(map(str, theirs.accuracy_gap))
        + " points",
        _RISES: _rises(theirs_by_class),
    }
    settings = _settings(known, MULTIPLES, len(theirs.multiples))
    if settings is None:
        return not_run(number, title, _CIFAR10, expected)
    accuracy, smallest, share, gap, accuracy_gap = (
        [setting["figures"][name] for setting in settings]
        for name in (
            "test_accuracy",
            "smallest_epsilon",
            "share_at_worst_case",
            "epsilon_gap: label",
            "accuracy_gap: label",
        )
    )
    texts = {
        "max_grad_norm": _clipping_norms(settings),
        "test accuracy": _joined(accuracy, partial(format_share, digits=1)),
        "smallest epsilon": _joined(smallest, format_epsilon),
        "at the worst case": _joined(share, format_share),
        "largest less smallest class average": _joined(gap, format_epsilon),
        "gaps in test accuracy between classes": _joined(
            accuracy_gap, partial(format_share, digits=1)
        ),
    }
    rises = {
        name: (settings[-1]["means"][name], settings[-2]["means"][name])
        for name in paper.APPENDIX_C  # at 1.5 and 0.5 of the median norm
    }
    texts[_RISES] = _rises(rises)
    verdicts = {
        "epsilon": rules.falling_epsilon(smallest, share),
        "accuracy": rules.largest_between(accuracy),
        "gap between classes": rules.largest_between(gap),
        "underserved class": rules.quicker(*rises.values()),
    }
    note = (
        f"{_SETTING} The learning rate falls as the clipping norm rises, so that a wholly clipped step is as long: how the paper "
        "chose it is not said."
    )
    return _section(number, title, expected, Found(texts, verdicts), note)


def figure_12(known: Known) -> Section:
    """Clipping norms of 5 and 10."""
    number, title = "Figure 12", "clipping norms of 5 and 10"
    printed = tuple(paper.FIGURE_12.values())
    expected = {_PEARSON: ", ".join(map(str, printed))}
    settings = _settings(known, LARGER, len(printed))
    if settings is None:
        return not_run(number, title, _CIFAR10, expected)
    found = [setting["figures"]["pearson_log_loss"] for setting in settings]
    texts = {"max_grad_norm": _clipping_norms(settings), _PEARSON: _joined(found, format_number)}
    verdicts = {"": rules.loss_at(found, printed)}
    return _section(number, title, expected, Found(texts, verdicts), _SETTING)


def figure_13(known: Known) -> Section:
    """Hinge loss."""
    number, title = "Figure 13", "hinge loss"
    expected = {
        "gamma 1": "{:.3f}, {}, {}".format(*paper.FIGURE_13_FIDELITY),
        _ORDER: ", ".join(paper.FIGURE_13_ORDER),
    }
    settings = _settings(known, HINGE, 1)
    if settings is None:
        return not_run(number, title, _CIFAR10, expected)
    means, errors = settings[0]["means"], settings[0]["errors"].get("1")
    texts = {_ORDER: ", ".join(map(named, sorted(means, key=means.__getitem__)))}
    fidelity = rules.Verdict(NOT_RUN, "no exact values")
    if errors is not None:
        texts["gamma 1"] = "{:.4f}, {:.3f}, {:.3f}".format(*errors)
        fidelity = rules.fidelity({1.0: tuple(errors)}, {1.0: paper.FIGURE_13_FIDELITY})
    verdicts = {"order": rules.order(paper.FIGURE_13_ORDER, means), "fidelity": fidelity}
    return _section(number, title, expected, Found(texts, verdicts), _SETTING)


def _settings(known: Known, sweep: str, n: int) -> Settings | None:
    """The settings of a sweep, or None where they were not all run."""
    entry = known.measured.get(SWEPT, {}).get(sweep)
    return entry["found"] if entry is not None and len(entry["found"]) == n else None


def _clipping_norms(settings: Settings) -> str:
    return ", ".join(f"{setting['values']['max_grad_norm']:g}" for setting in settings)


def _rises(by_class: Mapping[str, tuple[float, float]]) -> str:
    return ", ".join(
        f"{named(name)} {format_epsilon(at)} to {format_epsilon(to)}"
        for name, (at, to) in by_class.items()
    )


def _joined(values: Sequence[float], form: Callable[[float], str]) -> str:
    return ", ".join(form(value) for value in values)


def _section(
    number: str, title: str, expected: Mapping[str, str], found: Found, note: str
) -> Section:
    both = {DEFAULT: found}
    rows = tuple(block(_CIFAR10, expected, both))
    return Section(number, title, rows, {_CIFAR10: words_of(both)}, note)
