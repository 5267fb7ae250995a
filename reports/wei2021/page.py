"""reports/wei2021/README.md, from wei2021.json beside it and what the paper prints. No figure is typed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from scipy import stats

from indpriv._formatting import format_epsilon
from indpriv.analysis.schedule import Curve
from reports.shared.markdown_table import table
from reports.shared.pictures import SUCCESS
from reports.shared.recorded import status_of
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED
from reports.wei2021 import paper
from reports.wei2021.cost import RULE as COST_RULE
from reports.wei2021.cost import cost_section, verdict_of_cost
from reports.wei2021.leakage import (
    ALL_DATA,
    PROTECTIONS,
    leakage_section,
    verdicts_of_leakage,
    what_clipping_fools,
)
from reports.wei2021.leakage import CLAIMS as LEAKAGE_CLAIMS
from reports.wei2021.leakage import RULE as LEAKAGE_RULE
from reports.wei2021.training import (
    FIXED_STD,
    METHODS,
    MOVING,
    NOISE,
    RATE,
    RUNS,
    SCHEDULED,
    STEPS,
)

Figures = Mapping[str, Any]
SIGNIFICANCE = 0.05
COMMAND = "make wei2021"
RULES = {
    "accounts (V, VIII)": "reproduced within 0.15 % (V) or 4 iterations (VIII)",
    "order of methods (IV, XI)": "reproduced where the mean accuracy lies above the baseline's by more "
    f"than chance (Welch's t test, one-sided, {SIGNIFICANCE:g}) at every clipping norm of the claim, "
    "differs where at some; of three runs each it tells differences of about three standard deviations",
    "leakage (III)": LEAKAGE_RULE,
    "cost (X, XI)": COST_RULE,
    "epsilon at an accuracy (VI, VII, IX)": "reproduced where decay reaches the baseline's final "
    "accuracy in at least two of three runs, and with less epsilon on average over those",
}


def render(known: Figures) -> str:
    """The page."""
    lines = [
        "# Dynamic privacy parameters: Wei and Liu 2021, table by table",
        "",
        f"Made by `{COMMAND}` from [wei2021.json](wei2021.json); the paper is {paper.SOURCE}. Its epsilons are worst cases by five",
        "rules, of which only the moments accountant (MA) is a bound; ours are at delta 1e-5. An",
        "individual epsilon describes the run that happened; it is no guarantee.",
        "",
        *status_of(known.get("runs", {})),
        *_overview(known),
        *_settings(),
        *_table_5(known["accounts"]),
        *_table_8(known["accounts"]),
        *_figure_4(known["accounts"]),
        *_runs(known.get("runs", {})),
        *_at_accuracy(known.get("runs", {})),
        *cost_section(known.get("cost", {})),
        *leakage_section(known.get("leakage", [])),
        *_not_run(known.get("leakage", [])),
        *_what_does_not_hold(known),
        "## Rules",
        "",
        table(["finding", "when it counts as reproduced"], [list(row) for row in RULES.items()]),
    ]
    return "\n".join(lines) + "\n"


def findings(known: Figures) -> list[list[str]]:
    """Item, what is asked, and the word of its rule."""
    runs = known.get("runs", {})
    return [
        ["I", "which of C, S and sigma moves", "settings; see below"],
        ["IV", "accuracy by clipping norm: does dynS[Cdecay] help?", verdict_of_accuracy(runs)],
        ["IV", "and dynS[l2-max], not private?", verdict_of_accuracy(runs, "l2max")],
        ["IV", "and dynS, not private?", verdict_of_accuracy(runs, "dyns")],
        [
            "XI",
            "does quantile clipping help, C = 4?",
            verdict_of_accuracy(runs, "quantile", only=4.0),
        ],
        ["XI", "and AdaClip?", verdict_of_accuracy(runs, "adaclip", only=4.0)],
        ["XI", "and dyn[S,sigma], not private?", verdict_of_moving(runs)],
        ["V", "five accountants", verdict_of_table_5(known["accounts"])],
        ["VI, IX", "epsilon at the baseline's accuracy", verdict_at_accuracy(runs)],
        ["IX", "the same, dyn[S,sigma]: not private, so without an epsilon", "no rule"],
        [
            "VII",
            "the same, noise standard deviation held fixed",
            verdict_at_accuracy(runs, FIXED_STD.name),
        ],
        ["VIII", "iterations at a budget", verdict_of_table_8(known["accounts"])],
        ["Figure 4", "noise over training", "computed; no rule"],
        *(
            [item.split(",")[0], LEAKAGE_CLAIMS[item], word]
            for item, word in verdicts_of_leakage(known.get("leakage", [])).items()
        ),
        ["X, XI", "cost of a step", verdict_of_cost(known.get("cost", {}))],
    ]


def _overview(known: Figures) -> Iterator[str]:
    yield from ("## Overview", "", table(["item", "what", "verdict"], findings(known)), "")


def _settings() -> Iterator[str]:
    yield from ("## Table I: systems", "")
    yield table(
        ["system", "clipping norm", "scale of the noise", "noise multiplier", "private?"],
        [[*row, "no" if "largest" in row[2] else "yes"] for row in paper.TABLE_1],
    )
    yield from (
        "",
        "Noise whose scale depends on the batch is no differential privacy; the last section shows",
        "it. An audit file names each private system by two keys; see audits/docs/schedules.md.",
        "",
    )


def verdict_of_table_5(accounts: Figures) -> str:
    """Whether all five rules agree with the paper's."""
    ratio = [
        ours / theirs - 1
        for steps, printed in paper.TABLE_5.items()
        for ours, theirs in zip(accounts["table_5"][str(steps)], printed, strict=True)
    ]
    return REPRODUCED if max(map(abs, ratio)) <= 1.5e-3 else NOT_REPRODUCED


def _table_5(accounts: Figures) -> Iterator[str]:
    rows = []
    for steps, printed in paper.TABLE_5.items():
        rows.append([f"{steps:,}", "paper", *(f"{value:.3f}" for value in printed)])
        ours = accounts["table_5"][str(steps)]
        rows.append([f"{steps:,}", "ours", *(f"{value:.3f}" for value in ours)])
    flat, per_layer = accounts["worst_case"], accounts["per_layer"]
    yield from ("## Table V: five accountants", "", table(["steps", "", *paper.RULES], rows), "")
    yield from (
        f"What the first row is worth with flat clipping: {format_epsilon(flat['rdp'])} by RDP and",
        f"{format_epsilon(flat['pld'])} by loss distributions. The paper clips each of M layers at C and adds",
        "noise of sigma C to each, which is the noise multiplier sigma / sqrt(M) of the whole:",
        " and ".join(
            f"{found['moments']:.2f} by its own rule with {layers} layers ({format_epsilon(found['rdp'])} by RDP)"
            for layers, found in per_layer.items()
        )
        + ",",
        "where it states 0.823.",
        "",
    )


def verdict_of_table_8(accounts: Figures) -> str:
    """Whether iterations agree for the two laws whose constants are known."""
    gaps = [
        abs(ours - theirs)
        for law, found in accounts["table_8"].items()
        for ours, theirs in zip(found, paper.TABLE_8[law], strict=True)
    ]
    return f"{REPRODUCED} (cyclic: {NOT_RUN})" if max(gaps) <= 4 else NOT_REPRODUCED


def _table_8(accounts: Figures) -> Iterator[str]:
    rows = []
    for law, printed in paper.TABLE_8.items():
        rows.append([law, "paper", *(f"{value:,}" for value in printed)])
        ours = accounts["table_8"].get(law)
        shown = ["not run"] * 5 if ours is None else [f"{value:,}" for value in ours]
        rows.append([law, "ours", *shown])
    yield from ("## Table VIII: iterations at the budget of Table V", "")
    yield table(["noise", "", *paper.RULES], rows)
    yield from (
        "",
        "The laws are linear and exponential in 1 / sigma, by the constants of the published code:",
        "the laws `inverse_linear` and `inverse_exponential` here. AdvC of a schedule is the form",
        "that the paper prints; its budget is the classic AdvC of Table V. The constants of the",
        "cyclic law are printed nowhere.",
        "",
    )


def _figure_4(accounts: Figures) -> Iterator[str]:
    rows = [
        [law, *(f"{value * paper.CLIP:.1f}" for value in values)]
        for law, values in accounts["figure_4"].items()
    ]
    rows.append(["constant", *[f"{paper.NOISE * paper.CLIP:.1f}"] * 5])
    yield from ("## Figure 4: noise standard deviation over training, C = 4", "")
    yield table(["law", "step 0", "2,500", "5,000", "7,500", "9,999"], rows)
    yield ""


def by_norm(runs: Figures, method: str) -> dict[float, list[Figures]]:
    """Runs of a method, by clipping norm."""
    found: dict[float, list[Figures]] = {}
    for name, run in runs.items():
        its_method, norm, _ = name.split("-")
        if its_method == method:
            found.setdefault(float(norm), []).append(run)
    return found


def _accuracies(runs: Sequence[Figures]) -> list[float]:
    return [run["test_accuracy"][-1] for run in runs]


def verdict_of_accuracy(runs: Figures, method: str = "cdecay", only: float | None = None) -> str:
    """Whether a method beats the baseline by more than chance, where both were run three times (or at one clipping norm only)."""
    ours, base = by_norm(runs, method), by_norm(runs, "baseline")
    both = [
        norm
        for norm in base
        if only in (None, norm) and min(len(base[norm]), len(ours.get(norm, ()))) >= RUNS
    ]
    if not both:
        return NOT_RUN
    better = [
        stats.ttest_ind(
            _accuracies(ours[norm]),
            _accuracies(base[norm]),
            equal_var=False,
            alternative="greater",
        ).pvalue
        <= SIGNIFICANCE
        for norm in both
    ]
    return REPRODUCED if all(better) else DIFFERS if any(better) else NOT_REPRODUCED


def verdict_of_moving(runs: Figures) -> str:
    """That of the laws of dyn[S,sigma] at C = 4, or `differs` where they differ."""
    words = {verdict_of_accuracy(runs, method.name, only=paper.CLIP) for method in MOVING}
    return words.pop() if len(words) == 1 else DIFFERS


def _runs(runs: Figures) -> Iterator[str]:
    rows = []
    for method in (*METHODS, *MOVING):
        for norm in method.clipping_norms:
            found = by_norm(runs, method.name).get(norm, [])
            printed = paper.TABLE_4.get(method.name, {}).get(norm)
            if norm == paper.CLIP:
                of_table_11 = paper.MOVING if method in MOVING else paper.TABLE_11.get(method.name)
                printed = printed or of_table_11
            epsilons = [
                _epsilons([run["worst_case"] for run in found][:1]),
                _epsilons([run["median_epsilon"] for run in found]),
                _spread([100 * run["at_worst_case"] for run in found], "{:.0f}"),
            ]
            rows.append(
                [
                    method.title,
                    f"{norm:g}",
                    "–" if printed is None else f"{printed:.3f}",
                    _spread(_accuracies(found)),
                    *(["none"] * 3 if _is_not_private(method.title) else epsilons),
                    str(len(found)),
                ]
            )
    head = ["system", "C", "paper", "accuracy", "worst case", "median epsilon", "% at it", "runs"]
    yield from ("## Tables IV and XI: accuracy by clipping norm", "", table(head, rows), "")
    yield from (
        f"MNIST, {STEPS:,} steps at the rate {RATE:g} with noise multiplier {NOISE:g}, which is the",
        "paper's MA epsilon 0.823 in a tenth of its steps; learning rate 0.5 / C, tanh network. The",
        "worst case is by RDP; noise scaled by the largest norm has none, whatever an accountant prints.",
        "A clipping norm that falls pushes examples towards the worst case. dynS and dyn[S,sigma] were run",
        "on another machine than the rest, with torch 2.11.",
        f"Empty cells are NOT RUN: `{COMMAND}` trains them.",
        "",
    )


def _is_not_private(title: str) -> bool:
    """By the title of a system; its keys may take seconds to compute."""
    return title.endswith("not private")


def _spread(values: Sequence[float], form: str = "{:.3f}") -> str:
    """The mean, and the range of several."""
    if not values:
        return "–"
    found = form.format(mean(values))
    if len(values) == 1:
        return found
    return f"{found} ({form.format(min(values))} to {form.format(max(values))})"


def _epsilons(values: Sequence[float]) -> str:
    """The same of epsilons, rounded up."""
    return _spread([math.ceil(1000 * value * (1 - 1e-9)) / 1000 for value in values])


def curve_of(run: Figures) -> Curve:
    """Accuracy and worst case at its checkpoints; without epsilons where it has no privacy."""
    epsilons = run["worst_case_epsilon"]
    return Curve(run["step"], run["test_accuracy"], () if None in epsilons else epsilons)


def _found_at_accuracy(runs: Figures, name: str) -> tuple[list[float], int]:
    """Epsilons of the runs of a method at C = 4 that reach the baseline's accuracy, of how many."""
    base, own = (by_norm(runs, method).get(paper.CLIP, []) for method in ("baseline", name))
    if not base:
        return [], len(own)
    accuracy = mean(_accuracies(base))
    reached = [curve_of(run).epsilon_at(accuracy) for run in own]
    return [one for one in reached if one is not None], len(own)


def verdict_at_accuracy(runs: Figures, decay: str = "cdecay") -> str:
    """Whether decay, by the name of its runs, reaches the baseline's accuracy with less epsilon."""
    (base, n_base), (ours, n_ours) = (
        _found_at_accuracy(runs, name) for name in ("baseline", decay)
    )
    if min(n_base, n_ours) < RUNS:
        return NOT_RUN
    enough = len(ours) >= 2 and base
    return REPRODUCED if enough and mean(ours) < mean(base) else NOT_REPRODUCED


def _at_accuracy(runs: Figures) -> Iterator[str]:
    titles = {method.name: method.title for method in (*METHODS, *SCHEDULED, *MOVING)}
    yield from ("## Tables VI, VII and IX: epsilon at the baseline's accuracy, C = 4", "")
    rows = [
        _row_at_accuracy(
            runs, decay if name == "cdecay" else name, titles.get(name, name), fixed, value
        )
        for fixed, printed, decay in (
            ("noise multiplier", paper.TABLE_9, "cdecay"),
            ("standard deviation", paper.TABLE_7, FIXED_STD.name),
        )
        for name, value in printed.items()
    ]
    rows += [
        _row_at_accuracy(runs, method.name, method.title, "clipping norm", None)
        for method in SCHEDULED
    ]
    yield table(["system", "held fixed", "paper (MA)", "ours (RDP)", "runs that reach it"], rows)
    yield from (
        "",
        "Read off the curve of each run, on a line between checkpoints. To stop at an accuracy is a",
        "plan made afterwards, which looks at test data. The baseline's runs are the same in both",
        "parts: its clipping norm is constant. While C falls, a noise standard deviation that is",
        "held fixed means a noise multiplier that rises, from 2.07 to 4.14. The other systems of the",
        "paper's Table VII are not private and have no epsilon. dynsigma, of which the paper prints no",
        "epsilon at an accuracy: the noise multiplier falls by the constants of the published code,",
        "scaled to the worst case of the baseline.",
        "",
    )


def _row_at_accuracy(
    runs: Figures, name: str, title: str, fixed: str, printed: float | None
) -> list[str]:
    """One system: what the paper prints, and the epsilons of those of its runs that reach the accuracy."""
    shown = "–" if printed is None else f"{printed:.3f}"
    epsilons, n = _found_at_accuracy(runs, name)
    if _is_not_private(title):
        return [title, fixed, shown, "none", NOT_RUN if not n else "–"]
    return [title, fixed, shown, _epsilons(epsilons), f"{len(epsilons)} of {n}"]


def _not_run(rows: Sequence[Figures]) -> Iterator[str]:
    attacked = {(row["data"], row["protection"]) for row in rows}
    lacking = [
        f"{PROTECTIONS[one]} of {data}"
        for data in ALL_DATA
        for one in PROTECTIONS
        if (data, one) not in attacked
    ]
    yield from ("## Not run", "")
    if lacking:
        yield f"- Table III: {'; '.join(lacking)}. About half an hour of a core by `make wei2021`."
    yield from (
        "- Table IV at C = 2, 8 and 16, and Table VII at C = 8: copy audits/mnist.toml, set",
        "  `max_grad_norm` or `noise_std` (48 at C = 8) in it, and compare its run with the baseline's:",
        "  `indpriv show RUN RUN --set at_accuracy=0.96`.",
        "- Tables VIII and IX of the cyclic law, whose constants are printed nowhere; and the",
        "  accuracies of Table VIII, which need 10,000 steps: `python -m audits train` with `stop_at_epsilon`.",
        "- The other data sets and the full 10,000 steps: `python -m audits train audits/fashion_mnist.toml`,",
        "  `lfw_people.toml` or `cifar10.toml`, with `steps = 10000`. Purchase has no loader;",
        "  `location30` is a data set of the same kind.",
        "",
    )


def _more_claims(known: Figures) -> Iterator[str]:
    """Claims that the accounts and the runs contradict."""
    constant = paper.NOISE * paper.CLIP
    first, *_, last = (
        value / paper.NOISE for value in known["accounts"]["figure_4"]["exponential"]
    )
    yield from (
        "- **Leakage at the first step says nothing of the run.** The falling noise that is attacked",
        f"  there is {first:.1f} times the baseline's {constant:g} by construction, and {last:.1f} times at the end.",
        "- **AdvC is printed with OptC's formula**; ours is the one that gives its numbers.",
    )
    found = by_norm(known.get("runs", {}), "baseline").get(1.0, [])
    if found:
        yield from (
            '- **"Fixed parameters [do] not gain any privacy"** by an account that ignores that a smaller',
            "  norm is a smaller loss: the median example of the baseline with C = 1 has "
            f"{format_epsilon(mean(run['median_epsilon'] for run in found))}",
            f"  where the worst case is {format_epsilon(found[0]['worst_case'])}.",
        )


def _what_does_not_hold(known: Figures) -> Iterator[str]:
    attack, grey = known["largest_norm"], known["grey"]
    per_layer = known["accounts"]["per_layer"]["3"]
    yield from (
        "## What does not hold",
        "",
        "- **Noise scaled by the largest clipped norm in the batch betrays its largest member.** One",
        f"  update of a network on MNIST, C = 32, sigma = 6, where one step claims epsilon "
        f"{format_epsilon(attack['claimed_epsilon'])}:",
        f"  the length of the update alone tells in {attack['hits']} of {attack['trials']} updates that the",
        f"  member is there, and in {attack['false_alarms']} of {attack['trials']} without it that it is; the",
        f"  attacker knows both scales, {attack['largest']:.2f} with the member and "
        f"{attack['second']:.2f} without.",
        "- **Clipping each of M layers at C with noise sigma C is not accounted by sigma**, but by",
        f"  sigma / sqrt(M): {per_layer['moments']:.2f} instead of 0.823 for three layers.",
        f"- **A mean squared error below {SUCCESS:.2f} is no success.** On pixels from",
        f"  {grey['low']:g} to {grey['high']:g}, a grey picture has {grey['grey']:.3f} and succeeds on "
        f"{grey['grey_success']:.0%} of MNIST; the mean image has {grey['mean']:.3f}.",
        *what_clipping_fools(known.get("leakage", [])),
        *_more_claims(known),
        "",
    )
