"""Every attack that an audit can run.

To add one, write a module beside this one and list it in ATTACKS.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import lira, rmia
from indpriv.attacks.attributes import ATTRIBUTES, attribute_scores
from indpriv.attacks.loss_threshold import (
    LABEL_GAP,
    LOSS_THRESHOLD,
    label_scores,
    loss_scores,
    needs_of_labels,
    needs_of_losses,
)
from indpriv.attacks.material import Material
from indpriv.attacks.quantile import QUANTILE, needs_of_regression, quantile_scores
from indpriv.errors import InputError


@dataclass(frozen=True)
class Attack:
    """An attack that decides membership by a score.

    Attributes:
        name: identifies the attack in code and files.
        title: in a few words, for reports; also the method of its scores.
        scores: from what is known about a model to scores.
        needs: the fields of `Material` that it uses.
        source: the paper that it follows.
        caveat: what a reader must know about its results.
        sees: what the attacker sees, one of `indpriv.attack_scores.RUNGS`.
        references: least number of reference models.
        further_needs: what the attack needs of the data and they lack, in words; None if nothing.
    """

    name: str
    title: str
    scores: Callable[[Material], AttackScores]
    needs: frozenset[str]
    source: str
    caveat: str
    sees: str = "losses"
    references: int = 0
    further_needs: Callable[[Material], str | None] = lambda _: None

    def can_use(self, material: Material) -> bool:
        """Whether everything that the attack needs is known."""
        return self.lacks(material) is None

    def lacks(self, material: Material) -> str | None:
        """What the attack needs and does not have, in words; None if it can run."""
        known = all(getattr(material, need) is not None for need in self.needs)
        if known and self.references_in(material) >= self.references:
            return self.further_needs(material)
        needs = ", ".join(sorted(self.needs))
        return f"{needs} of at least {self.references} references" if self.references else needs

    def references_in(self, material: Material) -> int:
        """Number of reference models among what the attack uses."""
        used = (getattr(material, need) for need in self.needs)
        return sum(part.n_models - 1 for part in used if isinstance(part, AttackSignals))


def _on_signals(
    attack: Callable[[AttackSignals, int], AttackScores],
    need: str,
    title: str,
    material: Material,
) -> AttackScores:
    """Attack the audited row of the signals that the field `need` of the material holds."""
    signals = getattr(material, need)
    if signals is None or signals.audited is None:
        raise InputError(
            "this attack needs signals of reference models and the audited run among them: "
            "indpriv.attacks.train_references"
        )
    return replace(attack(signals, signals.audited), method=title)


_SEEN = {"signals": "references", "label_signals": "labels", "checkpoint_signals": "checkpoints"}


def _with_references(
    name: str,
    title: str,
    attack: Callable[[AttackSignals, int], AttackScores],
    source: str,
    caveat: str,
    references: int,
    need: str = "signals",
    *,
    needs_of: Callable[[AttackSignals], str | None] = lambda _: None,
) -> Attack:
    return Attack(
        name=name,
        title=title,
        scores=partial(_on_signals, attack, need, title),
        needs=frozenset({need}),
        source=source,
        caveat=caveat,
        sees=_SEEN[need],
        references=references,
        further_needs=partial(_needs_of_signals, need, needs_of),
    )


def _needs_of_signals(
    need: str, needs_of: Callable[[AttackSignals], str | None], material: Material
) -> str | None:
    """What attacks with references need of the signals and they lack; None if nothing."""
    signals = getattr(material, need)
    if signals.audited is None:
        return None
    known, member = ~np.isnan(signals.signal[signals.audited]), signals.member[signals.audited]
    if min(np.sum(known & member), np.sum(known & ~member)) < 2:
        return "two members and two non-members with a signal of the attacked model"
    return needs_of(signals)


_RMIA = "Zarifzadeh, Liu and Shokri 2024 (arXiv:2312.03262)"
_LIRA = "Carlini et al. 2022 (arXiv:2112.03570)"
_REFERENCES = (
    "Reference models stand for training without the example; they are as good as they are like "
    "the audited run."
)
_ONE = (
    "It is the only kind of attack that one reference is enough for; the randomness of training "
    "that reference is then in every score, so train four."
)
_LABELS = (
    "It sees only which perturbed copies of an example get its label, and is compared with "
    "reference models: by itself, robustness is hardly better than being right."
)
_TRAJECTORY = (
    "It needs every checkpoint of the audit, which the guarantee covers too; the checkpoints of "
    "the run itself are used, without distillation."
)

_ALL = (
    Attack(
        name="loss_threshold",
        title=LOSS_THRESHOLD,
        scores=loss_scores,
        further_needs=needs_of_losses,
        needs=frozenset({"final_losses"}),
        source="Yeom, Giacomelli, Fredrikson and Jha 2018 (arXiv:1709.01604)",
        caveat="A loss threshold is a weak attack: where it fails, a stronger attack may succeed.",
    ),
    Attack(
        name="label_gap",
        title=LABEL_GAP,
        scores=label_scores,
        further_needs=needs_of_labels,
        needs=frozenset({"final_losses"}),
        source="Yeom, Giacomelli, Fredrikson and Jha 2018 (arXiv:1709.01604)",
        caveat="It says no more than the difference of training and test accuracy.",
        sees="labels",
    ),
    Attack(
        name="quantile",
        title=QUANTILE,
        scores=quantile_scores,
        needs=frozenset({"final_losses"}),
        source="Bertran et al. 2023 (arXiv:2307.03694), in its normal form",
        caveat="It knows the label and the metadata of an example, not its inputs; half of the "
        "test examples are used up by its regression.",
        further_needs=needs_of_regression,
    ),
    Attack(
        name="attributes",
        title=ATTRIBUTES,
        scores=attribute_scores,
        needs=frozenset({"attributes"}),
        source="Yeom, Giacomelli, Fredrikson and Jha 2018 (arXiv:1709.01604), section 5, with the "
        "imputation of Jayaraman and Evans 2022 (arXiv:2209.01292)",
        caveat="Half of the test examples are used up by imputation, which is linear: a better one "
        "would be a better baseline.",
    ),
    _with_references(
        "rmia", rmia.RMIA, rmia.rmia, _RMIA, f"{_REFERENCES} {_ONE}", 1, needs_of=rmia.needs_of
    ),
    _with_references(
        "rmia_offline",
        rmia.RMIA_OFFLINE,
        partial(rmia.rmia, offline=True),
        _RMIA,
        "It uses only references without the example, as an attacker who meets the example after "
        f"training them. {_ONE}",
        1,
        needs_of=partial(rmia.needs_of, offline=True),
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
    _with_references(
        "label_rmia",
        "RMIA on labels",
        rmia.rmia,
        f"Choquette-Choo et al. 2021 (arXiv:2007.14321), calibrated by {_RMIA}",
        f"{_LABELS} {_ONE}",
        1,
        "label_signals",
        needs_of=rmia.needs_of,
    ),
    _with_references(
        "label_robustness",
        "calibrated robustness of labels",
        lira.calibrated,
        "Choquette-Choo et al. 2021 (arXiv:2007.14321)",
        _LABELS,
        2,
        "label_signals",
    ),
    _with_references(
        "trajectory_rmia",
        "RMIA on mean confidence over checkpoints",
        rmia.rmia,
        f"Liu et al. 2022 (arXiv:2208.14933), by {_RMIA}",
        f"{_TRAJECTORY} {_ONE}",
        1,
        "checkpoint_signals",
        needs_of=rmia.needs_of,
    ),
    _with_references(
        "trajectory_lira",
        "LiRA, shrunk, on mean confidence over checkpoints",
        lira.lira,
        f"Liu et al. 2022 (arXiv:2208.14933), by {_LIRA}",
        _TRAJECTORY,
        4,
        "checkpoint_signals",
    ),
)
ATTACKS = {attack.name: attack for attack in _ALL}
