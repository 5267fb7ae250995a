"""What an attacker knows who guesses one attribute of an example. Sensitive.

The attacker knows all other columns of the example and its label, and asks the model how likely
that label is with each value of the attribute. The values can also be imputed from the other
columns without the model, as the population has it: what that achieves is no leak of the model.

Who guesses attributes of members better than those of others tells the two apart: attribute
inference is an attack on membership too, and what limits one limits the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import log_softmax

from indpriv._facts import refused
from indpriv._files import read_parquet
from indpriv._reading import named
from indpriv._types import BoolArray, FloatArray, IntArray, NDArray
from indpriv.attack_scores import AttackScores
from indpriv.errors import EvidenceError, InputError

LOGS = ("likelihood", "prior", "imputed")


@dataclass(frozen=True)
class AttributeKnowledge:
    """One attribute of the training examples and of test examples, and what speaks for each value.

    Non-members are test examples that imputation was not fitted on; ids are within their split.
    """

    name: str
    values: tuple[str, ...]  # names of its k values, at least two
    truth: IntArray  # (n,) int64 number of the true value of each example
    member: BoolArray
    example_ids: NDArray[np.generic]
    # (n, k) log-probability of the label by the attacked model, with each value in place of the
    # true one
    likelihood: FloatArray
    # (n, k) log-probability of each value by imputation from the other columns, fitted on other
    # test examples
    prior: FloatArray
    # (n, k) the same from the other columns and the label: the baseline without the model
    imputed: FloatArray

    def __post_init__(self) -> None:
        n, k = len(self.truth), len(self.values)
        if {len(self.member), len(self.example_ids)} != {n}:
            raise InputError(f"{self.name}: {n} true values, but other numbers of ids or members")
        if not self.member.any() or self.member.all():
            raise InputError(f"{self.name}: members and non-members are needed")
        if k < 2 or ((self.truth < 0) | (self.truth >= k)).any():
            raise InputError(f"{self.name}: true values must be among {k} values, at least two")
        for name in LOGS:
            logs = getattr(self, name)
            if logs.shape != (n, k) or not (logs <= 1e-6).all():
                raise refused("refusal.attacks", "logs", of=self.name, name=name, shape=(n, k))

    def marginal(self) -> FloatArray:
        """(k,) log-share of each value in the population, as imputation has it for others."""
        return np.asarray(np.log(np.exp(self.prior[~self.member]).mean(axis=0)))

    def log_posterior(self) -> FloatArray:
        """(n, k) of each value: imputation from the other columns times the model's likelihood."""
        return np.asarray(log_softmax(self.prior + self.likelihood, axis=1))


class Guesser(NamedTuple):
    """A rule that guesses the value with the largest of (n, k) scores, and its paper."""

    title: str
    source: str
    logs: Callable[[AttributeKnowledge], FloatArray]


GUESSERS: Mapping[str, Guesser] = {
    "inversion": Guesser(
        "model inversion: share of the value times the model's confidence",
        "Fredrikson et al. 2014; Yeom et al. 2018 (arXiv:1709.01604), section 5",
        lambda known: known.marginal() + known.likelihood,
    ),
    "with_imputation": Guesser(
        "imputation times the model's confidence",
        "after Jayaraman and Evans 2022 (arXiv:2209.01292)",
        AttributeKnowledge.log_posterior,
    ),
}


def guesses(logs: FloatArray, seed: int = 0) -> IntArray:
    """(n,) the value with the largest score; ties are decided at random."""
    ties = np.random.default_rng(seed).random(logs.shape) * (logs == logs.max(axis=1)[:, None])
    return np.asarray(ties.argmax(axis=1))


def read_knowledge(path: Path) -> tuple[AttributeKnowledge, ...]:
    """Read a table with one row for each attribute, example and value; EvidenceError for others.

    `audits.training.attributes.write_knowledge` writes it.
    """
    kinds = {"attribute": "t", "member": "b", "example_id": "", "value": "", "true": "b"}
    with named(path):
        frame = read_parquet(path, kinds={**kinds, **dict.fromkeys(LOGS, "f")})
        return tuple(
            _one(str(name), rows, path) for name, rows in frame.groupby("attribute", sort=False)
        )


def _one(name: str, rows: pd.DataFrame, path: Path) -> AttributeKnowledge:
    k = len(values := tuple(rows["value"].drop_duplicates()))
    whole = len(rows) % k == 0 and (rows["value"] == np.resize(np.array(values), len(rows))).all()
    if not whole or (rows["true"].to_numpy(bool).reshape(-1, k).sum(axis=1) != 1).any():
        raise EvidenceError(f"{path}: {name} does not have one row for each example and value")
    return AttributeKnowledge(
        name,
        values,
        rows["true"].to_numpy(bool).reshape(-1, k).argmax(axis=1),
        rows["member"].to_numpy(bool)[::k],
        rows["example_id"].to_numpy()[::k],
        **{log: rows[log].to_numpy(np.float64).reshape(-1, k) for log in LOGS},
    )


def attribute_scores(known: Sequence[AttributeKnowledge]) -> AttackScores:
    """Score examples by what the model adds to the probability of their true attributes.

    For each training example, and each test example that imputation was not fitted on, the
    log-probability of the true value by imputation and model, less that by imputation alone, summed
    over attributes. InputError where one is known of other examples.
    """
    first, total = known[0], np.zeros(len(known[0].truth))
    for one in known:
        if not (
            np.array_equal(one.example_ids, first.example_ids)
            and np.array_equal(one.member, first.member)
        ):
            raise InputError(f"{one.name} is of other examples than {first.name}")
        total += (one.log_posterior() - one.imputed)[np.arange(len(total)), one.truth]
    return AttackScores(total, first.member, "", example_ids=first.example_ids)
