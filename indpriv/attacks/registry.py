"""Every attack that an audit can run.

To add one, write a function from what is known about a model to scores, and one that says what it
lacks; name both in _FUNCTIONS, and say in attacks.toml what it needs, follows and is worth.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import BoolArray
from indpriv._columns import partition
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import losses, references
from indpriv.attacks.attributes import AttributeKnowledge, attribute_scores
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

_NEEDED = {"losses": "the losses of the final model", "attributes": "to know of attributes"}


@dataclass(frozen=True)
class Material:
    """What is known about one model; a field is None where it is not known. Sensitive.

    Losses of the final model are on its training examples (members) and on test examples (others).
    Signals are of the model (row `audited`) and of reference models: confidences, shares of
    perturbed copies of each example that get its label, mean confidences over the checkpoints.
    """

    losses: ExampleTable | None = None
    confidence: AttackSignals | None = None
    labels: AttackSignals | None = None
    checkpoints: AttackSignals | None = None
    attributes: tuple[AttributeKnowledge, ...] | None = None

    def groups(
        self, by: str, example_ids: NDArray[np.generic], member: BoolArray
    ) -> NDArray[np.generic]:
        """(n,) groups of examples by a column: members are training examples, others test examples.

        InputError if the examples are not known, or an id is not among those of its split.
        """
        if self.losses is None:
            raise InputError(f"there is no example table, which holds the groups by {by}")
        train, test = self.losses.train, self.losses.test
        parts = partition(train, test, by)
        names = np.array(parts.names, dtype=object)
        found = np.empty(len(example_ids), dtype=object)
        for split, codes, inside in (
            (train, parts.train_codes, member),
            (test, parts.test_codes, ~member),
        ):
            rows = pd.Index(split["example_id"].to_numpy()).get_indexer(example_ids[inside])
            if (rows < 0).any():
                raise InputError(
                    f"{int((rows < 0).sum())} attacked examples are not in the example table of "
                    "the run; signals and run must be of the same data"
                )
            found[inside] = names[codes[rows]]
        return found


@dataclass(frozen=True)
class Attack:
    """An attack that decides membership by a score.

    Attributes:
        name: identifies the attack in code and files.
        attack: from what `need` holds to scores; of signals, from them and the audited row.
        lacking: what the attack needs of that and it lacks, in words; None if nothing.
        title: in a few words, for reports; also the method of its scores.
        source: the paper that it follows.
        caveat: what a reader must know about its results.
        need: the field of `Material` that it uses.
        sees: what the attacker sees, one of `indpriv.attack_scores.RUNGS`.
        references: least number of reference models.
    """

    name: str
    attack: Callable[..., AttackScores]
    lacking: Callable[[Any], str | None]
    title: str
    source: str
    caveat: str
    need: str = "losses"
    sees: str = "losses"
    references: int = 0

    def scores(self, material: Material) -> AttackScores:
        """Scores of the attack; InputError where what it needs is not known."""
        known: list[Any] = [getattr(material, self.need)]
        if isinstance(known[0], AttackSignals) and known[0].audited is not None:
            known[0].check_references(known[0].audited, self.references)
            known.append(known[0].audited)
        if (lacking := self.lacks(material)) is not None:
            more = "; indpriv.attacks.train_references takes them" * bool(self.references)
            raise InputError(f"this attack ({self.title}) needs {lacking}{more}")
        return replace(self.attack(*known), method=self.title)

    def can_use(self, material: Material) -> bool:
        """Whether everything that the attack needs is known."""
        return self.lacks(material) is None

    def lacks(self, material: Material) -> str | None:
        """What the attack needs and does not have, in words; None if it can run."""
        known = getattr(material, self.need)
        if not self.references:
            return _NEEDED[self.need] if known is None else self.lacking(known)
        if known is None or known.audited is None or known.n_models <= self.references:
            models = f"the audited model and of reference models, {self.references} at least"
            return f"the signal {self.need!r} of {models}"
        member = known.member[known.audited][~np.isnan(known.signal[known.audited])]
        if min(member.sum(), (~member).sum()) < 2:
            return "two members and two non-members with a signal of the attacked model"
        return self.lacking(known)

    def references_in(self, material: Material) -> int:
        """Number of reference models among what the attack uses."""
        used = getattr(material, self.need)
        return used.n_models - 1 if isinstance(used, AttackSignals) else 0


def _nothing(_: Any) -> None:
    """What attacks lack that take whatever there is."""


_RMIA = (references.rmia, references.lacks_for_rmia)
# The function of each attack, and what it lacks; texts and needs stand in attacks.toml.
_FUNCTIONS: dict[str, tuple[Callable[..., AttackScores], Callable[[Any], str | None]]] = {
    "loss_threshold": (losses.loss_scores, partial(losses.lacks, column="loss")),
    "label_gap": (losses.label_scores, partial(losses.lacks, column="correct")),
    "quantile": (losses.quantile_scores, losses.lacks_for_regression),
    "attributes": (attribute_scores, lambda known: None if known else "an attribute"),
    "rmia": _RMIA,
    "rmia_offline": (partial(_RMIA[0], offline=True), partial(_RMIA[1], offline=True)),
    "lira": (references.lira, _nothing),
    "lira_plain": (references.plain_lira, _nothing),
    "lira_fixed": (partial(references.plain_lira, fixed=True), _nothing),
    "lira_offline": (references.offline_lira, _nothing),
    "calibrated": (references.calibrated, _nothing),
    "label_rmia": _RMIA,
    "label_robustness": (references.calibrated, _nothing),
    "trajectory_rmia": _RMIA,
    "trajectory_lira": (references.lira, _nothing),
}
_TEXTS = tomllib.loads(Path(__file__).with_name("attacks.toml").read_text(encoding="utf-8"))
ATTACKS = {name: Attack(name, *_FUNCTIONS[name], **texts) for name, texts in _TEXTS.items()}
