"""Every attack that an audit can run.

To add one, write a module beside this one and list it in ATTACKS.
"""

from collections.abc import Callable
from dataclasses import dataclass

from indpriv.attack_scores import AttackScores
from indpriv.attacks.loss_threshold import LOSS_THRESHOLD, loss_scores
from indpriv.attacks.material import Material


@dataclass(frozen=True)
class Attack:
    """An attack that decides membership by a score.

    Attributes:
        name: identifies the attack in code and files.
        title: in a few words, for reports; also the method of its scores.
        scores: from what is known about a model, and a column to group by or None, to scores.
        needs: the fields of `Material` that it uses.
        source: the paper that it follows.
        caveat: what a reader must know about its results.
    """

    name: str
    title: str
    scores: Callable[[Material, str | None], AttackScores]
    needs: frozenset[str]
    source: str
    caveat: str

    def can_use(self, material: Material) -> bool:
        """Whether everything that the attack needs is known."""
        return all(getattr(material, need) is not None for need in self.needs)


_ALL = (
    Attack(
        name="loss_threshold",
        title=LOSS_THRESHOLD,
        scores=loss_scores,
        needs=frozenset({"final_losses"}),
        source="Yeom, Giacomelli, Fredrikson and Jha 2018 (arXiv:1709.01604)",
        caveat="A loss threshold is a weak attack: where it fails, a stronger attack may succeed.",
    ),
)
ATTACKS = {attack.name: attack for attack in _ALL}
