"""reports/validation/README.md: what the runs of the studies say of the account. No figure is typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from indpriv._formatting import format_epsilon, format_lower_bound
from indpriv.analysis.attacks.lower_bound import BOUNDS
from reports.shared.markdown_table import table
from reports.shared.rates import HEAD, limit, rates
from reports.shared.recorded import SEEDED
from reports.validation.study import DELTA, EPOCHS, STEPS_PER_EPOCH, STUDIES, Study

Figures = Mapping[str, Any]


def render(known: Figures) -> str:
    """The page, from validation.json."""
    lines = [
        "# Do individual epsilons hold for the attacker that they assume?",
        "",
        "Made by `make validate` from [validation.json](validation.json). An individual epsilon assumes an attacker who sees every noisy",
        "update and knows all other examples, their batches and every parameter. Here this attacker",
        "exists, and attacks many short Opacus runs, half in hooks mode and half in ghost mode. A",
        "fair coin decides which of its targets are in a run; all other examples are in every run.",
        "An individual epsilon describes the run that happened; it is no guarantee.",
        "[Attacks on the final model](../attacks/README.md) reach far less.",
        "",
        SEEDED,
        "",
        "L is what a run says of an example: the log-likelihood ratio of all its updates. K,",
        "K' and R are what the account says: sums over steps of KL(P||Q), KL(Q||P) and the Rényi",
        "divergence of order a. Errors are those of independent runs.",
        "",
        "Examples are binned by their epsilon in one more run, which is not attacked. mu is the",
        "square root of the difference in mean evidence between members and others. A true-positive",
        "rate is at the threshold that 1 % or 10 % of the others in the bin exceed: first as a",
        "simulation of the account's steps predicts it, then as observed. A bin has power if two",
        "standard errors of its mu are at most 5 % of it.",
        "",
    ]
    for study in STUDIES:
        lines.extend(study_lines(study, known["studies"][study.name]))
    return "\n".join([*lines, *canary_lines(known)]) + "\n"


def study_lines(study: Study, found: Figures) -> Iterator[str]:
    """The section of one study."""
    verdict = "agree with" if found["agree"] else "CONTRADICT"
    with_power = [part for part in found["bins"] if part["has_power"]]
    within = sum(part["within"] for part in with_power)
    last = found["identities"][-1]
    largest = max(abs(one["z"]) for one in found["identities"])
    tenth = last["expected"] / 10 / last["standard_error"]
    yield from (
        f"## {study.title[0].upper()}{study.title[1:]}",
        "",
        f"{study.targets:,} targets, {study.runs} runs of {EPOCHS * STEPS_PER_EPOCH} steps with noise",
        f"multiplier {study.noise}. The worst case is epsilon {format_epsilon(found['worst_case'])} at delta {DELTA:g}",
        f"({study.accountant.upper()}). All identities together {verdict} the account; the largest",
        f"|z| is {largest:.1f}. Of {len(with_power)} bins with power,",
        f"{within} have an observed mu within 5 % of the account's. An account that forgot one step",
        f"in ten would be {tenth:.1f} standard errors off in the last row.",
        "",
        table(
            ("identity", "mean", "account", "error", "z"),
            [
                (
                    one["name"].replace("|", "\\|"),
                    f"{one['mean']:.4f}",
                    f"{one['expected']:.4f}",
                    f"{one['standard_error']:.4f}",
                    f"{one['z']:+.2f}",
                )
                for one in found["identities"]
            ],
        ),
        "",
        table(
            (
                "mean epsilon",
                "mu, account",
                "mu, observed",
                "difference",
                "power",
                "TPR at 1 %",
                "TPR at 10 %",
            ),
            [bin_row(part) for part in found["bins"]],
        ),
        "",
        "Rates over all targets, at thresholds for all runs, with 95 % intervals over runs:",
        "",
        table(
            ("", *HEAD),
            [
                ("observed", *rates(found["rates"]["observed"])),
                ("by the account", *rates(found["rates"]["predicted"])),
            ],
        ),
        "",
    )


def bin_row(part: Figures) -> tuple[str, ...]:
    """A bin as cells."""
    return (
        format_epsilon(part["epsilon"]),
        f"{part['mu_predicted']:.3f}",
        f"{part['mu_observed']:.3f} ± {part['mu_error']:.3f}",
        f"{100 * (part['mu_observed'] / part['mu_predicted'] - 1):+.1f} %",
        "yes" if part["has_power"] else "no",
        *(f"{100 * simulated:.1f} % / {100 * seen:.1f} %" for simulated, seen in part["rates"]),
    )


def canary_lines(canaries: Figures) -> Iterator[str]:
    """The section on gradient canaries."""
    yield from (
        "## Gradient canaries",
        "",
        "Canaries of full length in runs on Adult (680 steps, sample rate 1/34, noise multiplier",
        "1.3998): lower bounds on epsilon at delta 1e-5 from one run, at 95 % confidence each.",
        "",
    )
    names = [name for name in BOUNDS if name in canaries["simulated"][0]["median"]]
    yield table(
        ("run", "canaries", *names, "account", "p-value", "test accuracy"),
        [
            (
                f"Opacus, {run['mode']}",
                "5000",
                *(format_lower_bound(run["bounds"][name]) for name in names),
                limit(run["ceiling"], 2),
                f"{run['p_value']:.2f}",
                f"{100 * run['test_accuracy']:.1f} %",
            )
            for run in canaries["real"]
        ],
    )
    yield ""
    yield from ("Medians of 20 simulated runs, and how often a bound was wrong or missed:", "")
    yield table(
        ("length", "canaries", "figure", *names, "account"),
        [
            (
                f"{run['length']:g}",
                str(run["count"]),
                title,
                *(shown(run[key][name]) for name in names),
                limit(run["ceiling"], 2),
            )
            for run in canaries["simulated"]
            for key, title, shown in (
                ("median", "median bound", format_lower_bound),
                ("above", "draws above the truth, of 20", "{:.0f}".format),
                ("missed", "draws with bound 0, of 20", "{:.0f}".format),
                ("false_alarms", "false alarms, 20 x 1,000 random memberships", "{:.2%}".format),
            )
        ],
    )
    yield ""
    yield "A bound holds with 95 % confidence: about one draw in 20 may be above the truth."
    yield ""
    for name in names:
        yield f"* `{name}`: {BOUNDS[name]['title']}. It assumes: {BOUNDS[name]['assumption']}."
