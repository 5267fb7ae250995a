"""Every attack that an audit can run.

To add one, write a function from what is known about a model to scores, and one that says what it
lacks; name both in _FUNCTIONS, and say in attacks.toml what it needs, follows and is worth.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from indpriv._columns import groupable_columns, grouping_of, to_floats
from indpriv._facts import refused, text
from indpriv._types import ArrayLike, BoolArray, FloatArray, NDArray
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import references, released
from indpriv.attacks.attributes import AttributeKnowledge, attribute_scores
from indpriv.attacks.language import KnownTexts, known_texts
from indpriv.attacks.released import LabelQueries, ReleasedModel, column, finite_confidences
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

_MOST_VALUES = 50  # of a column that becomes one indicator for each value
_LEAST = 20  # hold-out examples to regress on
_RIDGE = 1e-3
_SIDES = {
    "loss": "a loss of a training and of a test example",
    "correct": "training and test predictions that are right or wrong",
}
_SEED = 0  # of the half of the hold-out that the regression uses
_NEEDED = {
    "losses": "the losses of the final model",
    "attributes": "to know of attributes",
    "queries": "a model to ask for labels, and inputs: indpriv.attacks.LabelQueries",
    "texts": "what a language model says of texts, by indpriv.attacks.known_texts",
    "released": text("refusal.attacks", "released"),
}


@dataclass(frozen=True)
class Material:
    """What is known about one model; a field is None where it is not known. Sensitive.

    Losses of the final model are on its training examples (members) and on test examples (others).
    Signals are of the model (row `audited`) and of reference models: confidences, shares of
    perturbed copies of each example that get its label, mean confidences over the checkpoints,
    minus the logarithm of the norms of final gradients.
    """

    losses: ExampleTable | None = None
    confidence: AttackSignals | None = None
    labels: AttackSignals | None = None
    checkpoints: AttackSignals | None = None
    gradients: AttackSignals | None = None
    released: ReleasedModel | None = None
    attributes: tuple[AttributeKnowledge, ...] | None = None
    texts: KnownTexts | None = None
    queries: LabelQueries | None = None

    def groups(
        self, by: str, example_ids: NDArray[np.generic], member: BoolArray
    ) -> NDArray[np.generic]:
        """(n,) groups of examples by a column: members are training examples, others test examples.

        InputError if the examples are not known, or an id is not among those of its split.
        """
        if self.losses is None:
            raise InputError(f"there is no example table, which holds the groups by {by}")
        train, test = self.losses.train, self.losses.test
        groups = grouping_of(train, test, by)
        names = np.array(groups.names, dtype=object)
        found = np.empty(len(example_ids), dtype=object)
        for split, inside in ((train, member), (test, ~member)):
            rows = pd.Index(split["example_id"].to_numpy()).get_indexer(example_ids[inside])
            if (rows < 0).any():
                raise refused("refusal.signals", "other_data", n=int((rows < 0).sum()))
            found[inside] = names[groups.codes(split)[rows]]
        return found


@dataclass(frozen=True)
class Attack:
    """An attack that decides membership by a score.

    Attributes:
        name: identifies the attack in code and files.
        attack: from what `need` holds to scores; of signals, from them and the audited row.
        lacking: what the attack needs of that and it lacks, in words; None of one that takes all.
        title: in a few words, for reports; also the method of its scores.
        source: the paper that it follows.
        caveat: what a reader must know about its results.
        need: the field of `Material` that it uses.
        sees: what the attacker sees, one of `indpriv.attack_scores.RUNGS`.
        references: least number of reference models.
        beside: further signals of the same models that it takes, by field; one at least.
    """

    name: str
    attack: Callable[..., AttackScores]
    lacking: Callable[[Any], str | None] | None
    title: str
    source: str
    caveat: str
    need: str = "losses"
    sees: str = "losses"
    references: int = 0
    beside: tuple[str, ...] = ()

    def scores(self, material: Material) -> AttackScores:
        """Scores of the attack; InputError where what it needs is not known."""
        self.check(material)
        known = getattr(material, self.need)
        return self.unchecked(material, known.audited if isinstance(known, AttackSignals) else None)

    def check(self, material: Material) -> None:
        """Raise InputError where what the attack needs is not known."""
        known = getattr(material, self.need)
        if isinstance(known, AttackSignals) and known.audited is not None:
            known.check_references(known.audited, self.references)
        if (lacking := self.lacks(material)) is not None:
            takes = "; indpriv.attacks.train_references takes them" * bool(self.references)
            raise InputError(f"this attack ({self.title}) needs {lacking}{takes}")

    def unchecked(self, material: Material, target: int | None) -> AttackScores:
        """Scores of the attack; target: the row of signals that is attacked."""
        more = {"beside": self._signals_beside(material)} if self.beside else {}
        row = () if target is None else (target,)
        return replace(self.attack(getattr(material, self.need), *row, **more), method=self.title)

    def can_use(self, material: Material) -> bool:
        """Whether everything that the attack needs is known."""
        return self.lacks(material) is None

    def lacks(self, material: Material) -> str | None:
        """What the attack needs and does not have, in words; None if it can run."""
        known = getattr(material, self.need)
        lacking = self.lacking(known) if self.lacking and known is not None else None
        if not self.references:
            return _NEEDED[self.need] if known is None else lacking
        if known is None or known.audited is None or known.n_models <= self.references:
            models = f"the audited model and of reference models, {self.references} at least"
            return f"the signal {self.need!r} of {models}"
        member = known.member[known.audited][~np.isnan(known.signal[known.audited])]
        if min(member.sum(), (~member).sum()) < 2:
            return "two members and two non-members with a signal of the attacked model"
        if self.beside and not self._signals_beside(material):
            return f"the signal {' or '.join(map(repr, self.beside))} of the same models"
        return lacking

    def _signals_beside(self, material: Material) -> list[AttackSignals]:
        member = getattr(material, self.need).member
        every = [getattr(material, name) for name in self.beside]
        return [one for one in every if one is not None and np.array_equal(one.member, member)]


# --- attacks by the losses of the final model


def column_scores(examples: ExampleTable, name: str, sign: float) -> AttackScores:
    """A column with a sign, of each example where it is known.

    Minus the loss, as a model has a small one on what it has memorised; an infinite loss is never a
    member's. Or whether the model gets the label right: 1/2 plus half the gap between training and
    test accuracy is the AUC.
    """
    scores = sign * column(examples, name)
    return released.scores_of(examples, scores, ~np.isnan(scores))


def lacks(examples: ExampleTable, name: str) -> str | None:
    """What the attack on a column lacks: correct is not known in a task without accuracy."""
    known = all(split[name].notna().any() for split in (examples.train, examples.test))
    return None if known else _SIDES[name]


def quantile_scores(examples: ExampleTable) -> AttackScores:
    """How far the confidence of an example lies above that of similar non-members.

    After Bertran, Tang, Roth, Kearns, Morgenstern and Wu 2023 (arXiv:2307.03694), in its normal
    form: mean and scale of the confidence are regressed on what is known of an example other than
    its membership, the label and every metadata column with at most 50 values, or of numbers. A
    random half of the test examples gives the regression; the scores are of the training examples
    and of the other half.
    """
    confidence = finite_confidences(examples)
    known, n_train = ~np.isnan(confidence), len(examples.train)
    # The random half depends on the ids of test examples and not on their order.
    order = n_train + np.argsort(examples.test["example_id"].to_numpy(), kind="stable")
    order = np.random.default_rng(_SEED).permutation(order[known[order]])
    fitting = np.isin(np.arange(len(known)), order[: len(order) // 2])
    columns = groupable_columns(examples.frame)
    splits = [examples.train[columns], examples.test[columns]]
    features = _features(pd.concat(splits, ignore_index=True), fitting)
    mean = _fit(features, confidence, fitting)
    residual = np.log(np.abs(confidence - mean) + 1e-6)
    scale = np.exp(_fit(features, residual, fitting))
    return released.scores_of(examples, (confidence - mean) / scale, known & ~fitting)


def lacks_for_regression(examples: ExampleTable) -> str | None:
    """What `quantile_scores` needs and the examples lack; None if nothing."""
    losses = to_floats(examples.test["loss"])
    fitted = int((np.isfinite(losses) & (losses > 0)).sum())
    if (losses < 0).any() or (to_floats(examples.train["loss"]) < 0).any():
        return "cross-entropy losses, none of them below 0"
    if fitted >= 2 * _LEAST:
        return lacks(examples, "loss")
    return f"{2 * _LEAST} test examples with a finite loss above 0 (there are {fitted})"


def _features(frame: pd.DataFrame, used: BoolArray) -> FloatArray:
    """Indicators of texts and standardised numbers; a number that is not finite is the mean.

    They are cut off at the range of the used rows, less their means: an example unlike all of these
    rows then gets their mean. Otherwise values that only training examples have, as of a split by
    year, would give members away without the model.
    """
    columns = groupable_columns(frame)
    few = [name for name in columns if frame[name].nunique() <= _MOST_VALUES]
    many = [name for name in columns if name not in few and is_numeric_dtype(frame[name])]
    numbers = pd.DataFrame({name: to_floats(frame[name]) for name in many}, index=frame.index)
    numbers = numbers.replace([np.inf, -np.inf], np.nan)
    numbers = numbers.fillna(numbers.mean()).fillna(0.0)
    numbers = (numbers - numbers.mean()) / numbers.std(ddof=0).replace(0.0, 1.0)
    features = np.hstack([pd.get_dummies(frame[few].astype(str), dtype=np.float64), numbers])
    fitted = features[used]
    return np.asarray(
        np.clip(features, fitted.min(axis=0), fitted.max(axis=0)) - fitted.mean(axis=0)
    )


def _fit(x: FloatArray, values: FloatArray, used: BoolArray) -> FloatArray:
    """Ridge regression of the used values on centred features, for all; a free intercept."""
    mean = values[used].mean()
    fitted = x[used]
    squares = fitted.T @ fitted + _RIDGE * len(fitted) * np.eye(x.shape[1])
    return np.asarray(mean + x @ np.linalg.solve(squares, fitted.T @ (values[used] - mean)))


# --- the registry

_RMIA = (references.rmia, references.lacks_for_rmia)
# The function of each attack, and what it lacks; texts and needs stand in attacks.toml.
_FUNCTIONS: dict[str, tuple[Callable[..., AttackScores], Callable[[Any], str | None] | None]] = {
    "loss_threshold": (partial(column_scores, name="loss", sign=-1), partial(lacks, name="loss")),
    "label_gap": (partial(column_scores, name="correct", sign=1), partial(lacks, name="correct")),
    "quantile": (quantile_scores, lacks_for_regression),
    "attributes": (attribute_scores, lambda known: None if known else "an attribute"),
    "rmia": _RMIA,
    "rmia_offline": (partial(_RMIA[0], offline=True), partial(_RMIA[1], offline=True)),
    "lira": (references.lira, None),
    "lira_plain": (references.plain_lira, None),
    "lira_fixed": (partial(references.plain_lira, fixed=True), None),
    "lira_offline": (references.offline_lira, None),
    "calibrated": (references.calibrated, None),
    "label_rmia": _RMIA,
    "label_robustness": (references.calibrated, None),
    "several_lira": (references.lira, None),
    "gradient_lira": (references.lira, None),
    "gradient_norm": (lambda known: known.scored(-known.norms), None),  # training makes them small
    "gradient_ratio": (released.gradient_scores, released.lacks_for_gradients),
    "input_quantile": (released.input_scores, released.lacks_for_inputs),
    "trajectory_rmia": _RMIA,
    "trajectory_lira": (references.lira, None),
    "label_boundary": (LabelQueries.scores, None),
    "text_loss": (lambda known: known.scores(attrgetter("mean")), None),
    "zlib": (
        lambda known: known.scores(lambda of: of.mean / of.compressed),
        lambda known: "the texts as strings" if known.compressed is None else None,
    ),
    "min_k": (lambda known: known.scores(attrgetter("least")), None),
    "min_k_plus": (lambda known: known.scores(attrgetter("standardised")), None),
    "text_reference": (
        lambda known: known.scores(lambda of: of.mean - of.reference),
        lambda known: "a reference model" if known.reference is None else None,
    ),
    "recall": (
        lambda known: known.scores(lambda of: of.after / of.mean, 1.0),
        lambda known: "a prefix" if known.after is None else None,
    ),
}
_TEXTS = tomllib.loads(Path(__file__).with_name("attacks.toml").read_text(encoding="utf-8"))
ATTACKS = {name: Attack(name, *_FUNCTIONS[name], **texts) for name, texts in _TEXTS.items()}


def language_scores(
    model: Any, ids: Sequence[ArrayLike], member: ArrayLike, **options: Any
) -> dict[str, AttackScores]:
    """Scores of texts by each attack on texts whose needs are met, by their names in `ATTACKS`.

    Arguments are those of `known_texts`. Write one with to_parquet: `indpriv attack FILE` gives its
    rates, and its lower bounds on epsilon. Choose the attack before looking: each bound holds by
    itself, the largest of six does not.
    """
    material = Material(texts=known_texts(model, ids, member, **options))
    of_texts = [one for one in ATTACKS.values() if one.need == "texts" and one.can_use(material)]
    return {attack.name: attack.scores(material) for attack in of_texts}
