"""reports/validation.md: what the runs of the studies say of the account. No figure is typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markdown_table import table

from indpriv.accountant.predicted_evidence import PredictedEvidence
from indpriv.analysis.attacks.account_test import (
    Evidence,
    Separation,
    agree,
    identities,
    separation_of,
)
from indpriv.analysis.attacks.canary_bounds import BOUNDS
from validation.study import DELTA, EPOCHS, STEPS_PER_EPOCH, STUDIES, Study, StudyData

BINS = 8
RATES = (0.01, 0.1)  # of false positives
TOLERANCE = 0.05  # of mu: what the design asks for
POWER = 2.0  # standard errors that must fit into it, or a bin says nothing about it


def read_runs(study: Study, folder: Path, n_runs: int) -> tuple[Evidence, np.ndarray, np.ndarray]:
    """Evidence of all targets in all runs; their positions; and simulated evidence."""
    targets = StudyData.load(study).targets
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


@dataclass(frozen=True)
class Bin:
    """Targets of like epsilon, in all runs."""

    epsilon: float
    separation: Separation
    rates: tuple[tuple[float, float], ...]

    @property
    def off(self) -> float:
        """How far the observed mu is from that of the account, as a share of it."""
        return self.separation.observed_mu / self.separation.predicted_mu - 1

    @property
    def has_power(self) -> bool:
        """Whether a difference of 5 % could be seen."""
        error = self.separation.mu_error / self.separation.predicted_mu
        return POWER * error <= TOLERANCE


def bins(evidence: Evidence, simulated: np.ndarray, epsilon: np.ndarray) -> Iterator[Bin]:
    """Bins of about equal size, from small to large epsilon."""
    edges = np.unique(np.quantile(epsilon, np.linspace(0, 1, BINS + 1)))
    number = np.clip(np.searchsorted(edges, epsilon, side="right") - 1, 0, len(edges) - 2)
    for k in range(len(edges) - 1):
        rows = number == k
        part = evidence.take(rows)
        yield Bin(
            float(epsilon[rows].mean()),
            separation_of(part),
            tuple(
                (
                    true_positives(simulated[rows], part.member, rate),
                    true_positives(part.evidence, part.member, rate),
                )
                for rate in RATES
            ),
        )


def render(folder: Path, n_runs: Mapping[str, int], canaries: Mapping[str, Any]) -> str:
    """The page; n_runs: of each study at most, by name. A study without two runs is left out."""
    lines = [
        "# Do individual epsilons hold for the attacker that they assume?",
        "",
        "Made by `make validate`. An individual epsilon assumes an attacker who sees every noisy",
        "update and knows all other examples, their batches and every parameter. Here this attacker",
        "exists, and attacks many short Opacus runs, half in hooks mode and half in ghost mode. A",
        "fair coin decides which of its targets are in a run; all other examples are in every run.",
        "An individual epsilon describes the run that happened; it is no guarantee.",
        "[Attacks on the final model](attacks.md) reach far less.",
        "",
        "L is the evidence of a run on an example: the log-likelihood ratio of all its updates. K,",
        "K' and R are what the account says: sums over steps of KL(P||Q), KL(Q||P) and the Rényi",
        "divergence of order a. Errors are those of independent runs.",
        "",
        "Examples are binned by their epsilon in one more run, which is not attacked. mu is the",
        "square root of the mean evidence of members less that of others. True-positive rates are",
        "at thresholds that 1 % and 10 % of the others of the bin exceed: by a simulation of the",
        "account's steps, then observed. A bin has power if two standard errors of its mu are at",
        "most 5 % of it.",
        "",
    ]
    for study in STUDIES:
        finished = len(list((folder / study.name).glob("run-???.npz")))
        if finished > 1:
            count = min(finished, n_runs[study.name])
            lines.extend(study_lines(study, folder / study.name, count))
    return "\n".join([*lines, *canary_lines(canaries)]) + "\n"


def study_lines(study: Study, folder: Path, n_runs: int) -> Iterator[str]:
    """The section of one study."""
    evidence, example, simulated = read_runs(study, folder, n_runs)
    *epsilons, worst = np.load(folder / "epsilon.npy").tolist()
    found = identities(evidence)
    verdict = "agree with" if agree(found) else "CONTRADICT"
    parts = list(bins(evidence, simulated, np.array(epsilons)[example]))
    with_power = [part for part in parts if part.has_power]
    within = sum(abs(part.off) <= TOLERANCE for part in with_power)
    yield from (
        f"## {study.title[0].upper()}{study.title[1:]}",
        "",
        f"{study.targets:,} targets, {n_runs} runs of {EPOCHS * STEPS_PER_EPOCH} steps with noise",
        f"multiplier {study.noise}. The worst case is epsilon {worst:.2f} at delta {DELTA:g}",
        f"({study.accountant.upper()}). All identities together {verdict} the account; the largest",
        f"|z| is {max(abs(one.z) for one in found):.1f}. Of {len(with_power)} bins with power,",
        f"{within} have an observed mu within 5 % of the account's.",
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
            [bin_row(part) for part in parts],
        ),
        "",
    )


def bin_row(part: Bin) -> tuple[str, ...]:
    """A bin as cells."""
    return (
        f"{part.epsilon:.2f}",
        f"{part.separation.predicted_mu:.3f}",
        f"{part.separation.observed_mu:.3f} ± {part.separation.mu_error:.3f}",
        f"{100 * part.off:+.1f} %",
        "yes" if part.has_power else "no",
        *(f"{100 * simulated:.1f} % / {100 * seen:.1f} %" for simulated, seen in part.rates),
    )


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
