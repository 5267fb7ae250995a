"""Labels under label differential privacy: each is randomised once, before training.

After Ghazi et al. 2021, "Deep Learning with Label Differential Privacy" (arXiv:2102.06062). The
guarantee is of one row's label alone, whatever its inputs say of it, and is no part of the epsilon
of DP-SGD, which is of the whole row.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from audits.training.config import AuditConfig
from audits.training.datasets import Dataset
from audits.training.randomness import Randomness
from indpriv._types import FloatArray, IntArray

Labels = NDArray[np.int64]


def randomised(
    labels: IntArray, n_classes: int, epsilon: float, random: np.random.Generator
) -> Labels:
    """(n,) labels after k-ary randomised response: kept at the rate `ceiling`, else another."""
    kept = random.random(len(labels)) < ceiling(n_classes, epsilon)
    others = (labels + random.integers(1, n_classes, len(labels))) % n_classes
    return np.where(kept, labels, others).astype(np.int64)


def randomised_with_prior(
    labels: IntArray, prior: FloatArray, epsilon: float, random: np.random.Generator
) -> Labels:
    """(n,) labels after RRWithPrior (their Algorithm 2): among the likeliest classes only.

    prior (n, k): probabilities of the classes, made without the labels of these rows. The number of
    classes maximises the probability of the right one; a label that is not among them is drawn
    from them uniformly.
    """
    order = np.argsort(-prior, axis=1, kind="stable")
    likely = np.take_along_axis(prior, order, axis=1).cumsum(axis=1)
    right = likely * [ceiling(k, epsilon) for k in range(1, prior.shape[1] + 1)]
    chosen, places = right.argmax(axis=1) + 1, order.argsort(axis=1)
    place = places[np.arange(len(labels)), labels]
    for k in np.unique(chosen):
        rows = np.flatnonzero(chosen == k)
        inside, uniform = place[rows] < k, random.integers(0, k, len(rows))
        kept = randomised(np.minimum(place[rows], k - 1), int(k), epsilon, random) if k > 1 else 0
        place[rows] = np.where(inside, kept, uniform)
    return np.asarray(order[np.arange(len(labels)), place], dtype=np.int64)


def ceiling(n_classes: int, epsilon: float) -> float:
    """The share of labels that anyone can guess, who knew nothing of them before."""
    return 1 / (1 + (n_classes - 1) * math.exp(-epsilon))


def with_label_privacy(dataset: Dataset, config: AuditConfig, randomness: Randomness) -> Dataset:
    """The data with randomised training labels, if [data] has label_epsilon; on_trust says so."""
    epsilon = config.data.label_epsilon
    if epsilon is None:
        return dataset
    labels = randomised(
        dataset.train.targets, dataset.n_classes, epsilon, np.random.default_rng(randomness.labels)
    )
    drawn = (
        "a chosen seed draws the same again, so that labels are not private from who knows it"
        if randomness.seeded
        else "drawn from the operating system's randomness, by a generator that is not "
        "cryptographically secure"
    )
    share = ceiling(dataset.n_classes, epsilon)
    said = (
        f"before training, each training label was kept with probability {share:.3g} or replaced "
        f"by another class: label differential privacy with epsilon {epsilon:g} of one row's label "
        "alone, not of its inputs, and no part of any other epsilon here; losses and groups by "
        f"label are those of the labels after that; {drawn}; another run draws anew, and the "
        "epsilons of a label add up over runs"
    )
    return replace(
        dataset,
        train=replace(dataset.train, targets=labels),
        on_trust={**dataset.on_trust, "labels": said},
    )
