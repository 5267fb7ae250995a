"""reports/label_dp/README.md, from label_dp.json beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from audits.training.label_privacy import ceiling
from indpriv._types import FloatArray, IntArray
from indpriv.analysis.statistics import clopper_pearson
from reports.shared.markdown_table import table
from reports.shared.rates import limit
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED

Figures = Mapping[str, Any]
RUNS = 3
NONE, RESPONSE, PRIOR = "none", "randomised response", "with a prior"
METHODS = (NONE, RESPONSE, PRIOR)
ROWS, GUESSED, PASSES, MODELS, REFERENCES = 2000, 800, 200, 3, 2  # of the guesses
ATTACKS = ("guessed", "guessed from larger models")


@dataclass(frozen=True)
class Study:
    """What is tried on a data set, in the order of the page."""

    data: str
    title: str
    epsilons: tuple[float, ...]
    classes: int
    power: float
    attacks: tuple[str, ...] = ATTACKS

    @property
    def claim(self) -> str:
        """What is judged."""
        return f"label-DP is close to training without privacy, on {self.title}"


STUDIES = (
    Study("adult", "Adult", (0.5, 1.0, 2.0), 2, 0.75),
    Study("mnist", "MNIST", (1.0, 2.0, 4.0), 10, 0.5, ATTACKS[1:]),
)
CLOSE = 0.02  # points of accuracy, as of the printed cells of other papers
RULE = (
    f"reproduced where the mean test accuracy of {RUNS} models with a prior is at most {CLOSE:g} below that without "
    "label-DP at each epsilon of the table, differs where at some"
)
RULE_OF_GUESSES = (
    "a share of guesses contradicts the guarantee where the 95 % Clopper-Pearson interval of all models together lies above "
    "the ceiling e^epsilon / (e^epsilon + classes - 1), by Bonferroni over the three; the attack has power where its interval "
    "without label-DP lies above the share named below each table"
)


def guess(found: FloatArray, without: FloatArray) -> IntArray:
    """(models, n) the class whose log probability lies furthest above the references' mean.

    found: (models, n, k) log probabilities; without: (references, n, k) those of models that were
    trained without these rows.
    """
    return np.asarray((found - without.mean(axis=0)).argmax(axis=2))


def verdicts(known: Figures) -> dict[str, str]:
    """Claim -> word, by `RULE`, of each data set."""
    return {study.claim: _verdict(study, known.get(study.data, {})) for study in STUDIES}


def _verdict(study: Study, known: Figures) -> str:
    accuracy = known.get("accuracy", {})
    names = [f"{NONE} 0", *(f"{PRIOR} {epsilon:g}" for epsilon in study.epsilons)]
    if any(len(accuracy.get(name, ())) < RUNS for name in names):
        return NOT_RUN
    base, *private = (mean(accuracy[name]) for name in names)
    near = [base - each <= CLOSE for each in private]
    return REPRODUCED if all(near) else DIFFERS if any(near) else NOT_REPRODUCED


def share_guessed(found: Figures, tests: int = 1) -> tuple[float, float, float]:
    """Share of secret labels that were guessed, and its interval."""
    hits, trials = sum(found["hits"]), found["guesses"] * len(found["hits"])
    span = clopper_pearson(hits, trials, 1 - 0.05 / tests)
    return hits / trials, span.low, span.high


def contradicted(study: Study, known: Figures) -> list[float]:
    """The epsilons of a data set whose ceiling the guesses exceed, by `RULE_OF_GUESSES`."""
    return [
        epsilon
        for attack in study.attacks
        for epsilon in study.epsilons
        if (found := known.get(attack, {}).get(f"{epsilon:g}"))
        and share_guessed(found, len(study.epsilons))[1] > ceiling(study.classes, epsilon)
    ]


def render(known: Figures) -> str:
    """The page."""
    return "\n".join(_lines(known)) + "\n"


def _lines(known: Figures) -> Iterator[str]:
    yield from (
        "# Label differential privacy",
        "",
        "Made by `python -m reports.label_dp` from [label_dp.json](label_dp.json), with the networks and rates of",
        "`audits/adult_label_dp.toml` and `audits/mnist_label_dp.toml`. Jarmul 2025 names it where inputs are known and labels are",
        "secret, says that Ghazi et al. 2021 (arXiv:2102.06062) come close to training without privacy, and asks to test it with attacks.",
        "",
        "Each label is randomised once, before training, and whatever is done with the result keeps the guarantee: whoever knows",
        "nothing of one of k classes guesses it from the model with probability e^epsilon / (e^epsilon + k - 1) at most. This epsilon is of",
        "**one row's label alone**. It says nothing about who was in the data, and is not the epsilon of DP-SGD on the other pages: the",
        "two must be neither added nor compared. No model of this page is trained with DP-SGD. What the inputs say of a label,",
        "any model of such data learns, with or without this row.",
        "",
        "## Accuracy",
        "",
        "With a prior (their two stages): a model of one half, by randomised response, says which classes are likely for",
        "each row of the other half, whose labels are randomised among these; the last model learns from both.",
        f"Rule, written before the first result: {RULE}.",
        "",
    )
    for study in STUDIES:
        yield from _accuracy(study, known.get(study.data, {}))
    yield from (
        "## Guessing labels",
        "",
        f"Secret labels: {GUESSED} of {ROWS:,} rows get labels drawn at random, which no input tells, then all labels are",
        f"randomised, and a model is fitted in {PASSES} passes, so that it may remember. The attacker knows the inputs and the model, and",
        f"guesses the class that it finds likelier than {REFERENCES} models without these rows do. Each share is of {MODELS * GUESSED:,} guesses.",
        "Larger models have 512 units in one hidden layer and batches of 32; on Adult they were added after the first had shown no power.",
        f"Rule: {RULE_OF_GUESSES}.",
        "",
    )
    for study in STUDIES:
        yield from _guesses(study, known.get(study.data, {}))
    times = ", ".join(
        f"{known[study.data]['seconds'] / 60:.0f} CPU minutes on {study.title}"
        for study in STUDIES
        if "seconds" in known.get(study.data, {})
    )
    yield from (
        "## What this rests on",
        "",
        "Labels and models are drawn from the operating system, so another run gives somewhat other figures. The",
        "generator is numpy's, which is not cryptographically secure. Settings were fixed before the first result, by no trial, but",
        "for the larger models on Adult. A model that says what most rows of Adult have, an income below 50,000, is right for 76 % of them.",
        "MNIST, with ten classes as data sets of Ghazi et al. have, was begun first and stopped for want of time; Adult was chosen before",
        "its results were seen, and MNIST was finished later in its first settings, but for guesses: 2,000 rows and larger models, as on Adult,"
        f" replaced 4,000 in 40 passes before any guess{f' ({times})' if times else ''}.",
    )
    if first := known.get("adult", {}).get("guessed, first draw"):
        shares = ", ".join(f"{share:.1%}" for share in first.values())
        yield from (
            "",
            f"The first column of guesses on Adult is a second draw: the first ({shares}, in this order) lost its file.",
        )


def _accuracy(study: Study, known: Figures) -> Iterator[str]:
    accuracy = known.get("accuracy", {})
    base = accuracy.get(f"{NONE} 0", [])
    rows = []
    for method in METHODS:
        for epsilon in study.epsilons if method != NONE else (0.0,):
            found = accuracy.get(f"{method} {epsilon:g}", [])
            kept = f"{limit(100 * ceiling(study.classes, epsilon))}%" if epsilon else "100.0%"
            rows.append(
                [
                    "labels as they are" if method == NONE else method,
                    f"{epsilon:g}" if epsilon else "none",
                    kept if method != PRIOR else "–",
                    f"{mean(found):.4f} ({min(found):.4f} to {max(found):.4f})" if found else "–",
                    f"{mean(base) - mean(found):+.4f}" if found and base else "–",
                    f"{len(found)}",
                ]
            )
    head = ["labels", "epsilon of a label", "labels kept", "test accuracy", "lost", "models"]
    yield from (f"### {study.title}, {study.classes} classes", "", table(head, rows), "")
    yield from (f"**{study.claim}: {_verdict(study, known)}.**", "")


def _guesses(study: Study, known: Figures) -> Iterator[str]:
    rows = []
    for epsilon in (0.0, *study.epsilons):
        row = [f"{epsilon:g}" if epsilon else "none"]
        for attack in study.attacks:
            if found := known.get(attack, {}).get(f"{epsilon:g}"):
                share, low, high = share_guessed(found, len(study.epsilons) if epsilon else 1)
                row.append(f"{share:.1%} ({low:.1%} to {high:.1%})")
            else:
                row.append(NOT_RUN)
        most = 100 * ceiling(study.classes, epsilon) if epsilon else 100.0
        rows.append([*row, f"{limit(most)}%"])
    yield from (f"### {study.title}, chance {1 / study.classes:.0%}", "")
    yield from (table(["epsilon of a label", *study.attacks, "ceiling"], rows), "")
    beyond = ", ".join(f"{epsilon:g}" for epsilon in contradicted(study, known))
    if any(attack in known for attack in study.attacks):
        yield f"Contradicted at epsilon {beyond}." if beyond else "No ceiling is exceeded."
    for attack in study.attacks:
        if "0" in known.get(attack, {}):
            _, low, high = share_guessed(known[attack]["0"])
            word = "has power" if low > study.power else "has no power"
            yield f"The attack ({attack}) {word}: its interval without label-DP, {low:.1%} to {high:.1%}, is to lie above {study.power:.0%}."
    yield ""
