"""reports/validation.md: what the runs of the studies say of the account. No figure is typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markdown_table import table

from indpriv.accountant.predicted_evidence import PredictedEvidence
from indpriv.analysis.attacks.account_test import Evidence, agree, identities, separation_of
from indpriv.analysis.attacks.canary_bounds import BOUNDS
from validation import study

BINS = 8
RATES = (0.01, 0.1)  # of false positives


def read_runs(folder: Path, n_runs: int) -> tuple[Evidence, np.ndarray, np.ndarray]:
    """Evidence of all targets in all runs; their positions; and simulated evidence."""
    targets = study.StudyData.load().targets
    parts, example, simulated = [], [], []
    for number in range(n_runs):
        with np.load(folder / f"run-{number:03}.npz") as file:
            run = dict(file)
        rows = np.isin(run["example"], targets)
        example.append(run["example"][rows])
        simulated.append(run["simulated"][rows])
        predicted = PredictedEvidence(
            run["with_example"], run["without_example"], run["orders"], run["renyi"]
        ).take(rows)
        parts.append((run["evidence"][rows], run["member"][rows], predicted))
    evidence = Evidence(
        np.concatenate([one for one, _, _ in parts]),
        np.concatenate([member for _, member, _ in parts]),
        np.repeat(np.arange(n_runs), [len(one) for one, _, _ in parts]),
        PredictedEvidence.concatenated([predicted for _, _, predicted in parts]),
    )
    return evidence, np.concatenate(example), np.concatenate(simulated)


def true_positives(scores: np.ndarray, member: np.ndarray, rate: float) -> float:
    """Share of members above the threshold that this share of others exceeds."""
    return float((scores[member] > np.quantile(scores[~member], 1 - rate)).mean())


def bin_rows(
    evidence: Evidence, simulated: np.ndarray, epsilon: np.ndarray
) -> Iterator[Sequence[str]]:
    """One row for each bin of epsilon."""
    edges = np.unique(np.quantile(epsilon, np.linspace(0, 1, BINS + 1)))
    number = np.clip(np.searchsorted(edges, epsilon, side="right") - 1, 0, len(edges) - 2)
    for k in range(len(edges) - 1):
        rows = number == k
        part = evidence.take(rows)
        found = separation_of(part)
        off = found.observed_mu / found.predicted_mu - 1
        yield (
            f"{epsilon[rows].mean():.2f}",
            f"{found.predicted_mu:.3f}",
            f"{found.observed_mu:.3f} ± {found.mu_error:.3f}",
            f"{100 * off:+.1f} %",
            *(
                f"{100 * true_positives(simulated[rows], part.member, rate):.1f} % / "
                f"{100 * true_positives(part.evidence, part.member, rate):.1f} %"
                for rate in RATES
            ),
        )


def render(folder: Path, n_runs: int, canaries: Mapping[str, Any]) -> str:
    """The page."""
    evidence, example, simulated = read_runs(folder, n_runs)
    *epsilons, worst = np.load(folder / "epsilon.npy").tolist()
    epsilon = np.array(epsilons)[example]
    found = identities(evidence)
    verdict = "agree with" if agree(found) else "CONTRADICT"
    lines = [
        "# Do individual epsilons hold for the attacker that they assume?",
        "",
        "Made by `make validate`. An individual epsilon assumes an attacker who sees every noisy",
        "update and knows all other examples, their batches and every parameter. Here this attacker",
        f"exists: it scores {study.TARGETS} examples of scikit-learn's digits in {n_runs} real",
        "Opacus runs (half in hooks mode, half in ghost mode; each example is in a run by a fair",
        f"coin) of {study.EPOCHS * study.STEPS_PER_EPOCH} steps with noise multiplier",
        f"{study.NOISE}; the worst case is epsilon {worst:.2f} at delta {study.DELTA:g} (PLD). An",
        "individual epsilon describes the run that happened; it is no guarantee.",
        "",
        "## Identities",
        "",
        "L is the evidence of a run on an example: the log-likelihood ratio of all its updates. K,",
        "K' and R are what the account says: sums over steps of KL(P||Q), KL(Q||P) and the Rényi",
        f"divergence of order a. Errors are those of {n_runs} independent runs. All identities",
        f"together {verdict} the account; the largest |z| is",
        f"{max(abs(one.z) for one in found):.1f}.",
        "",
        table(
            ("identity", "mean", "account", "error", "z"),
            [
                (
                    one.name.replace("|", "\\|"),
                    f"{one.mean:.4f}",
                    f"{one.expected:.4f}",
                    f"{one.standard_error:.4f}",
                    f"{one.z:+.2f}",
                )
                for one in found
            ],
        ),
        "",
        "## By individual epsilon",
        "",
        "Examples are binned by their epsilon in one more run, which is not attacked. mu is the",
        "square root of the mean evidence of members less that of others. True-positive rates are",
        "at thresholds that 1 % and 10 % of the others of the bin exceed: by a simulation of the",
        "account's steps, then observed.",
        "",
        table(
            (
                "mean epsilon",
                "mu, account",
                "mu, observed",
                "difference",
                "TPR at 1 %",
                "TPR at 10 %",
            ),
            list(bin_rows(evidence, simulated, epsilon)),
        ),
        "",
        *canary_lines(canaries),
    ]
    return "\n".join(lines) + "\n"


def canary_lines(canaries: Mapping[str, Any]) -> Iterator[str]:
    """The section on gradient canaries."""
    yield from (
        "## Gradient canaries",
        "",
        "Canaries of full length in runs on Adult (680 steps, sample rate 1/34, noise multiplier",
        "1.3998): lower bounds on epsilon at delta 1e-5 from one run, at 95 % confidence each.",
        "",
    )
    names = list(BOUNDS)
    yield table(
        ("run", "canaries", *names, "account", "p-value", "test accuracy"),
        [
            (
                f"Opacus, {run['mode']}",
                "5000",
                *(f"{run['bounds'][name]:.2f}" for name in names),
                f"{run['ceiling']:.2f}",
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
                *(shown.format(run[key][name]) for name in names),
                f"{run['ceiling']:.2f}",
            )
            for run in canaries["simulated"]
            for key, title, shown in (
                ("median", "median bound", "{:.2f}"),
                ("above", "draws above the truth, of 20", "{:.0f}"),
                ("missed", "draws with bound 0, of 20", "{:.0f}"),
                ("false_alarms", "false alarms, 20 x 1,000 random memberships", "{:.2%}"),
            )
        ],
    )
    yield ""
    for name, method in BOUNDS.items():
        yield f"* `{name}`: {method.title}. It assumes: {method.assumption}."
