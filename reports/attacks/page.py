"""reports/attacks/README.md from the figures in attacks.json beside it. No figure is typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from indpriv._formatting import format_epsilon
from reports.attacks.training import BASELINE, DP
from reports.shared.markdown_table import table
from reports.shared.rates import HEAD, RATES, limit, number, rates, student
from reports.shared.recorded import SEEDED

Figures = Mapping[str, Any]
LIMIT = 180.0  # seconds for RMIA with four references on Adult, on two cores
THRESHOLD, RMIA, LIRA = "loss threshold", "RMIA", "LiRA"
ON_LABELS = ("RMIA on labels", "calibrated robustness of labels")
LABELS_ALONE = "DP lowers what attacks on labels alone reach"
TITLES = {DP: "with DP", BASELINE: "without DP"}

EARLIER = (
    "were computed by earlier rules, and are left out until its models are",
    "trained again: ceilings of the audited runs by individual epsilon (the mean of each example's",
    "own limit at its own false-positive rate, which is no ceiling of an attack with one threshold),",
    "and 95 % intervals of true-positive rates of the audited runs (they took the threshold as known).",
    "",
)


def render(figures: Figures) -> str:
    """The page."""
    lines = [
        "# What attacks on the final model reach",
        "",
        "Made by `make attacks` from [attacks.json](attacks.json). An attack that fails is no evidence of privacy. An attacker who",
        "sees every update reaches far more: [what an epsilon assumes](../validation/README.md).",
        "",
        *status_lines(figures),
        "",
        "A **study** trains many models of one audit: half of its training examples are in every",
        "model, and a fair coin decides for each of the others and each model. Every model is",
        "attacked with all others as references. Rates are means over models, with 95 % intervals",
        "over models. An **audited run** is one model that is trained on all training examples and",
        "attacked on them and on test examples, with 95 % intervals over examples. All seeds are 18",
        "and were fixed before the first result; a run with a guarantee has none.",
        "",
        *earlier_lines(figures),
        "The scores of LiRA equal those of TensorFlow Privacy 0.8.12 on the same signals (a test",
        "compares them where that is installed). No package with RMIA could be installed: the",
        "newest Privacy Meter on PyPI, 1.0.1, is older than RMIA, and leakpro 0.0.1 holds no",
        "attack; a test compares RMIA with a slow form of its algorithm instead.",
        "",
        "## What the design asked for",
        "",
        table(("target", "found", "reached"), list(targets(figures))),
        "",
    ]
    for part in figures.values():
        lines.extend(task_lines(part))
    return "\n".join(lines) + "\n"


def status_lines(figures: Figures) -> Iterator[str]:
    """What the guarantees of the models rest on."""
    kept = [part["title"] for part in figures.values() if part["run"].get("status") == "supported"]
    if not kept:
        yield SEEDED
        return
    yield f"The audited run of {', '.join(kept)} has a guarantee, which is supported. All other models are trained from chosen seeds:"
    yield "none of them has one."


def earlier_lines(figures: Figures) -> Iterator[str]:
    """What is left out of audited runs whose figures are by earlier rules."""
    old = [part["title"] for part in figures.values() if is_old(part)]
    if old:
        yield f"Two kinds of figures of {' and of '.join(old)},"
        yield from EARLIER


def targets(figures: Figures) -> Iterator[Sequence[str]]:
    """Each target of the design, what was found, and whether that reaches it."""
    adult, mnist = figures["adult"], figures["mnist"]
    base = mnist[BASELINE]
    for title in (LIRA, RMIA):
        clear = all(
            apart(row(base, title), row(base, THRESHOLD), rate) for rate in (None, RATES[0])
        )
        yield (
            f"{title} clearly beats a loss threshold where the model overfits ({mnist['title']}, "
            f"{base['models']} models)",
            beside(row(base, title), row(base, THRESHOLD)),
            verdict(clear),
        )
    for kind in (DP, BASELINE):
        found = adult[kind]
        yield (
            f"RMIA beats it by little where the model hardly memorises (Adult, {TITLES[kind]})",
            beside(row(found, RMIA), row(found, THRESHOLD)),
            verdict(apart(row(found, RMIA), row(found, THRESHOLD), None)),
        )
    above = [
        f"{part['title']}: {found['title']}"
        for part in figures.values()
        for found in part[DP]["rates"]
        for rate in RATES
        if found["tpr_at_fpr_intervals"][rate]["low"] > part["run"]["ceilings"]["worst_case"][rate]
    ]
    single = [
        f"{part['title']}: {found['title']}"
        for part in figures.values()
        for found in part["run"]["results"]
        if found["above_worst_case"]
    ]
    yield (
        "no attack on a model with DP exceeds its worst case",
        ", ".join(above + single) or "none does, in the studies and in the audited runs",
        verdict(not above and not single),
    )
    timing = adult["timing"]
    yield (
        "RMIA with four references on Adult takes less than three minutes on two cores",
        f"{timing['cpu']:.0f} s of one core, training included; {timing['wall']:.0f} s passed on "
        f"two cores that {timing['load']:.0f} processes shared",
        verdict(timing["cpu"] < LIMIT and timing["wall"] < LIMIT),
    )
    yield (
        f"{LABELS_ALONE} ({mnist['title']}; stated after these figures were known)",
        "; ".join(
            f"{title}: {beside(row(mnist[DP], title), row(base, title))}" for title in ON_LABELS
        ),
        verdict(lower_on_labels(figures)),
    )


def lower_on_labels(figures: Figures) -> bool:
    """Whether each attack on labels alone has an AUC with DP clearly below that without DP, where the model overfits."""
    mnist = figures["mnist"]
    return all(
        apart(row(mnist[BASELINE], title), row(mnist[DP], title), None) for title in ON_LABELS
    )


def verdict(reached: bool) -> str:
    """Whether a target is reached, in a word."""
    return "yes" if reached else "**no**"


def row(study: Figures, title: str) -> Figures:
    """The rates of one attack in a study."""
    return next(found for found in study["rates"] if found["title"] == title)


def apart(one: Figures, other: Figures, rate: str | None) -> bool:
    """Whether the interval of one attack lies above that of the other; rate None: of the AUC."""
    spans = [
        found["auc_interval"] if rate is None else found["tpr_at_fpr_intervals"][rate]
        for found in (one, other)
    ]
    return bool(spans[0]["low"] > spans[1]["high"])


def beside(one: Figures, other: Figures) -> str:
    """AUC and TPR at 1 % of two attacks."""
    return (
        f"AUC {number(one['auc'], one['auc_interval'])} against "
        f"{number(other['auc'], other['auc_interval'])}; TPR at 1 % "
        f"{100 * one['tpr_at_fpr'][RATES[0]]:.2f} % against "
        f"{100 * other['tpr_at_fpr'][RATES[0]]:.2f} %"
    )


def is_old(part: Figures) -> bool:
    """Whether figures of the audited run are by earlier rules."""
    return "common_threshold" not in part["run"]["ceilings"]


def of_run(found: Figures, *, known: bool) -> tuple[str, ...]:
    """The same of an audited run; without intervals of rates that took the threshold as known."""
    return rates(found if known else {**found, "tpr_at_fpr_intervals": {}})


def ceiling_lines(limits: Mapping[str, float] | None) -> Iterator[str]:
    """What one threshold can reach at the norms of the audited run."""
    if limits is not None:
        yield f"At its norms no threshold accuses more than {limit(100 * limits['0.01'])} % at 1 % and"
        yield f"{limit(100 * limits['0.001'], 2)} % at 0.1 %."


def task_lines(part: Figures) -> Iterator[str]:
    """The sections of one audit."""
    run = part["run"]
    worst = run["ceilings"]["worst_case"]
    yield from (
        f"## {part['title']}",
        "",
        part["detail"],
        f"The worst case is epsilon {format_epsilon(run['epsilon'])} at delta {run['delta']:g}. No attack on a",
        f"model with DP can have a true-positive rate above {limit(100 * worst['0.01'])} % at 1 % false",
        f"positives, or above {limit(100 * worst['0.001'], 2)} % at 0.1 %. The audited run gets",
        f"{100 * run['train_accuracy']:.1f} % of its training examples right and",
        f"{100 * run['test_accuracy']:.1f} % of its test examples; without DP",
        f"{100 * run['baseline_accuracy'][0]:.1f} % and {100 * run['baseline_accuracy'][1]:.1f} %.",
        "",
    )
    for kind in (DP, BASELINE):
        yield from study_lines(part[kind], kind)
    yield from (
        "### The audited run",
        "",
        "What its audit found, with four references for each of its two models.",
        *ceiling_lines(run["ceilings"].get("common_threshold")),
        "",
        table(
            ("attack", "model", "references", *HEAD),
            [
                (
                    found["title"],
                    TITLES[found["model"]],
                    str(found["references"]),
                    *of_run(found["discrimination"], known=not is_old(part)),
                )
                for found in run["results"]
            ],
        ),
        "",
    )


def study_lines(study: Figures, kind: str) -> Iterator[str]:
    """One study: its attacks, fewer references, and effects by individual epsilon."""
    effects = study["effects"]
    yield from (
        f"### {study['models']} models {TITLES[kind]}",
        "",
        f"{study['targets']:,} examples with coins; {study['models'] - 1} references.",
        "",
        table(("attack", *HEAD), [(found["title"], *rates(found)) for found in study["rates"]]),
        "",
        *student(study),
        "With fewer references, and Student's intervals:",
        "",
        table(
            ("attack", "references", *HEAD),
            [(found["title"], str(found["references"]), *rates(found)) for found in study["few"]],
        ),
        "",
        "How far being trained on moves the confidence in an example, in standard deviations of",
        "that confidence between models, by the individual epsilon of the example in the audited",
        "run with DP (p is corrected for all bins):",
        "",
        effect_table(effects["bins"], with_mu=kind == DP),
        "",
        f'By {effects["redraws"]:,} redrawn coins, "no effect at all" has p =',
        f'{effects["p_value"]:.3f} and "no trend over epsilon" has p =',
        f"{effects['trend_p_value']:.3f}. The raw correlation of epsilon and effect is",
        f"{effects['correlation']:.3f}; the reliability of the effects of single examples is",
        f"{number(effects['reliability'], effects['reliability_interval'])}"
        + (
            ", too low to correct it."
            if effects["corrected"] is None
            else f", and the corrected correlation {number(effects['corrected'], effects['corrected_interval'])}."
        ),
        "",
    )


def effect_table(bins: Sequence[Figures], *, with_mu: bool) -> str:
    """Effects of membership, with mu of a Gaussian mechanism of that epsilon for models with DP."""
    head = ("mean epsilon", "examples", "effect", "p") + ("mu",) * with_mu
    return table(
        head,
        [
            (
                format_epsilon(part["mean_epsilon"]),
                f"{part['n_examples']:,}",
                f"{part['effect']:.3f} ± {part['error']:.3f}",
                f"{part['p_value']:.3f}",
            )
            + (f"{part['mu']:.3f}",) * with_mu
            for part in bins
        ],
    )
