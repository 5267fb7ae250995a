"""What every attack of the registry must do."""

from dataclasses import fields, replace

import numpy as np
import pytest

from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks import ATTACKS, Attack, LabelQueries, Material
from indpriv.attacks.attributes import AttributeKnowledge
from indpriv.attacks.language import KnownTexts
from indpriv.attacks.released import ReleasedModel
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from synthetic import knowledge, signals_with_effect, small_run

EXAMPLES = small_run()[1]


def material(examples: ExampleTable, order: np.ndarray | None = None) -> Material:
    """Everything that attacks may use of a run on these examples, in this order."""
    train, test = examples.train, examples.test
    n, of = len(train) + len(test), signals_with_effect(1.0, 6, len(train) + len(test))
    member = np.array(of.member)
    member[0] = np.arange(n) < len(train)
    ids = np.concatenate([train["example_id"], test["example_id"]])
    order = np.arange(n) if order is None else order
    facts = {"audited": 0, "coins": True}
    frame = examples.frame.iloc[order].reset_index(drop=True)
    signals = AttackSignals.from_arrays(of.signal[:, order], member[:, order], ids[order], **facts)
    shares = (np.clip(np.round(of.signal + 10), 0, 20) + 0.5) / 21
    labels = AttackSignals.from_arrays(
        shares[:, order], member[:, order], ids[order], kind="label_robustness", **facts
    )

    checkpoints = AttackSignals.from_arrays(
        of.signal[:, order], member[:, order], ids[order], adversary="checkpoints", **facts
    )
    gradients = AttackSignals.from_arrays(
        of.signal[:, order] - 2, member[:, order], ids[order], kind="other", **facts
    )
    return Material(
        losses=ExampleTable(frame),
        confidence=signals,
        labels=labels,
        checkpoints=checkpoints,
        gradients=gradients,
        released=_released(ExampleTable(frame), examples),
        attributes=(_in_order(knowledge(n, member=member[0], example_ids=ids), order),),
        texts=_texts(member[0], ids, order),
        queries=_queries(member[0], ids, order),
    )


def _queries(member: np.ndarray, ids: np.ndarray, order: np.ndarray) -> LabelQueries:
    inputs = np.random.default_rng(5).normal(size=(len(order), 3))
    right = inputs.sum(axis=1) > 0
    about = {"example_ids": ids[order], "moves": 5}
    predict = lambda x: x.sum(axis=1) > 0  # noqa: E731
    return LabelQueries(predict, inputs[order], right[order], member[order], about)


def _texts(member: np.ndarray, ids: np.ndarray, order: np.ndarray) -> KnownTexts:
    values = -np.random.default_rng(4).exponential(size=(6, len(order)))[:, order]
    return KnownTexts(member[order], *values, about={"example_ids": ids[order]})


def _released(ordered: ExampleTable, examples: ExampleTable) -> ReleasedModel:
    """Gradients and inputs that examples keep, whatever their order is."""
    rng, n = np.random.default_rng(3), len(examples.frame)
    gradients, inputs = rng.normal(size=(n, 30)), rng.normal(size=(n, 4))
    half = (np.arange(n) >= len(examples.train)) & (np.arange(n) % 2 == 0)
    mean = gradients[half].mean(axis=0)
    columns = np.flatnonzero(half)[:25]
    spanning = np.concatenate([gradients[columns], mean[None]])
    place = {key: row for row, key in enumerate(_keys(examples))}
    rows = np.array([place[key] for key in _keys(ordered)])
    return ReleasedModel(
        examples=ordered,
        norms=np.linalg.norm(gradients[rows], axis=1),
        holdout=half[rows],
        columns=np.array([rows.tolist().index(column) for column in columns]),
        products=gradients[rows] @ spanning.T,
        inputs=inputs[rows],
    )


def _keys(examples: ExampleTable) -> list[tuple[str, int]]:
    parts = [("train", examples.train), ("test", examples.test)]
    return [(name, one) for name, part in parts for one in part["example_id"].tolist()]


def _in_order(known: AttributeKnowledge, order: np.ndarray) -> AttributeKnowledge:
    arrays = {name: each for name, each in vars(known).items() if isinstance(each, np.ndarray)}
    return replace(known, **{name: each[order] for name, each in arrays.items()})


EVERYTHING = material(EXAMPLES)

every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=lambda attack: attack.name)


def by_example(scores: AttackScores) -> dict[tuple[bool, int], float]:
    keys = zip(scores.member.tolist(), scores.example_ids.tolist(), strict=True)
    return dict(zip(keys, scores.scores.tolist(), strict=True))


def test_names_are_keys():
    assert all(attack.name == name for name, attack in ATTACKS.items())
    assert len({attack.title for attack in ATTACKS.values()}) == len(ATTACKS)


@every_attack
def test_it_says_what_it_needs_and_what_it_is_worth(attack: Attack):
    assert attack.need in {field.name for field in fields(Material)}
    assert attack.source
    assert attack.caveat.endswith(".")


@every_attack
def test_it_runs_only_with_all_that_it_needs(attack: Attack):
    assert attack.can_use(EVERYTHING)
    without = replace(EVERYTHING, **{attack.need: None})
    assert not attack.can_use(without)
    with pytest.raises(InputError, match=r"this attack \(.*\) needs"):
        attack.scores(without)


@pytest.mark.parametrize(
    "attack", [a for a in ATTACKS.values() if a.references], ids=lambda a: a.name
)
def test_it_runs_only_with_enough_references(attack: Attack):
    need = attack.need
    signals = getattr(EVERYTHING, need)
    for n_models in (attack.references, attack.references + 1):
        few = AttackSignals(
            signals.signal[:n_models],
            signals.member[:n_models],
            signals.example_ids,
            kind=signals.kind,
            audited=0,
        )
        enough = n_models > attack.references
        known = replace(EVERYTHING, **dict.fromkeys(attack.beside, few), **{need: few})
        assert attack.can_use(known) == enough
        if not enough:
            with pytest.raises(InputError, match="reference models"):
                attack.scores(known)


@every_attack
def test_it_scores_members_and_non_members_whose_groups_are_known(attack: Attack):
    found = attack.scores(EVERYTHING)
    assert found.method == attack.title
    assert set(found.member.tolist()) == {True, False}
    frame = EXAMPLES.frame.assign(train=EXAMPLES.frame["split"] == "train")
    sex = frame.set_index(["train", "example_id"])["sex"]
    keys = zip(found.member.tolist(), found.example_ids.tolist(), strict=True)
    groups = EVERYTHING.groups("sex", found.example_ids, found.member)
    assert groups.tolist() == [sex[key] for key in keys]
    assert found.groups is None


@every_attack
def test_scores_do_not_depend_on_the_order_of_the_examples(attack: Attack):
    order = np.random.default_rng(0).permutation(len(EXAMPLES.frame))
    mine = by_example(attack.scores(EVERYTHING))
    other = by_example(attack.scores(material(EXAMPLES, order)))
    assert other == pytest.approx(mine, abs=1e-9)


@pytest.mark.parametrize("side", [True, False])
def test_audits_leave_out_attacks_with_references_where_a_side_has_one_signal(side):
    full = material(EXAMPLES).confidence
    signal = np.array(full.signal)
    members = np.flatnonzero(full.member[0] == side)
    signal[0, members[1:]] = np.nan
    known = AttackSignals.from_arrays(signal, full.member, full.example_ids, audited=0, coins=True)
    rmia = ATTACKS["rmia"]
    assert rmia.can_use(Material(confidence=full))
    assert "two members and two non-members" in rmia.lacks(Material(confidence=known))


@pytest.mark.parametrize("attack", [a for a in ATTACKS.values() if a.beside], ids=lambda a: a.name)
def test_attacks_on_several_signals_need_them_of_the_same_models(attack: Attack):
    known = getattr(EVERYTHING, attack.need)
    fewer = replace(known, signal=known.signal[:5], member=known.member[:5])
    for beside in (None, fewer):
        lacking = replace(EVERYTHING, **dict.fromkeys(attack.beside, beside))
        assert not attack.can_use(lacking)
        with pytest.raises(InputError, match="of the same models"):
            attack.scores(lacking)
