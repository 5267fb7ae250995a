"""Every attack that an audit can run.

To add one, write a module beside this one and list it in ATTACKS.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import lira, rmia
from indpriv.attacks.loss_threshold import LOSS_THRESHOLD, loss_scores
from indpriv.attacks.material import Material
from indpriv.errors import InputError


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
        references: least number of reference models.
    """

    name: str
    title: str
    scores: Callable[[Material, str | None], AttackScores]
    needs: frozenset[str]
    source: str
    caveat: str
    references: int = 0

    def can_use(self, material: Material) -> bool:
        """Whether everything that the attack needs is known."""
        found = [getattr(material, need) for need in self.needs]
        return all(
            part is not None
            and not (isinstance(part, AttackSignals) and part.n_models <= self.references)
            for part in found
        )


def _on_signals(
    attack: Callable[[AttackSignals, int], AttackScores], material: Material, by: str | None
) -> AttackScores:
    """Attack the audited row of the signals."""
    signals = material.signals
    if signals is None or signals.audited is None:
        raise InputError(
            "this attack needs signals of reference models and the audited run among them; run "
            "indpriv shadow AUDIT.toml --for-run RUN"
        )
    found = attack(signals, signals.audited)
    if by is None or found.example_ids is None:
        return found
    return replace(found, groups=material.groups(by, found.example_ids, found.member))


def _with_references(
    name: str,
    title: str,
    attack: Callable[[AttackSignals, int], AttackScores],
    source: str,
    caveat: str,
    references: int,
) -> Attack:
    return Attack(
        name=name,
        title=title,
        scores=partial(_on_signals, attack),
        needs=frozenset({"signals"}),
        source=source,
        caveat=caveat,
        references=references,
    )


_RMIA = "Zarifzadeh, Liu and Shokri 2024 (arXiv:2312.03262)"
_LIRA = "Carlini et al. 2022 (arXiv:2112.03570)"
_REFERENCES = (
    "Reference models stand for training without the example; they are as good as they are like "
    "the audited run."
)

_ALL = (
    Attack(
        name="loss_threshold",
        title=LOSS_THRESHOLD,
        scores=loss_scores,
        needs=frozenset({"final_losses"}),
        source="Yeom, Giacomelli, Fredrikson and Jha 2018 (arXiv:1709.01604)",
        caveat="A loss threshold is a weak attack: where it fails, a stronger attack may succeed.",
    ),
    _with_references("rmia", rmia.RMIA, rmia.rmia, _RMIA, _REFERENCES, 1),
    _with_references(
        "rmia_offline",
        rmia.RMIA_OFFLINE,
        partial(rmia.rmia, offline=True),
        _RMIA,
        "It uses only references without the example, as an attacker who meets the example after "
        "training them.",
        1,
    ),
    _with_references("lira", lira.LIRA, lira.lira, _LIRA, _REFERENCES, 4),
    _with_references(
        "lira_plain",
        lira.LIRA_PLAIN,
        lira.plain_lira,
        _LIRA,
        "It estimates two normal laws for each example, and needs at least 64 references to do "
        "that well.",
        4,
    ),
    _with_references(
        "lira_fixed",
        lira.LIRA_FIXED,
        partial(lira.plain_lira, variance="fixed"),
        _LIRA,
        "It gives all examples one variance, which few references call for.",
        4,
    ),
    _with_references("lira_offline", lira.LIRA_OFFLINE, lira.offline_lira, _LIRA, _REFERENCES, 2),
    _with_references(
        "calibrated",
        lira.CALIBRATED,
        lira.calibrated,
        "Watson, Guo, Cormode and Sablayrolles 2022 (arXiv:2111.08440)",
        _REFERENCES,
        2,
    ),
)
ATTACKS = {attack.name: attack for attack in _ALL}
