from dataclasses import replace

import numpy as np
import pytest

from indpriv._files import OneWriter, read_json, write_json
from indpriv.attack_signals import (
    AttackSignals,
    add_model,
    from_losses,
    is_signals,
    new_folder,
    open_signals,
)
from indpriv.attacks.train_references import Pool, train_references
from indpriv.errors import EvidenceError, InputError
from synthetic import signals_with_effect


@pytest.mark.parametrize("kind", ["confidence", "other"])
def test_what_is_written_is_read(tmp_path, kind):
    signals = signals_with_effect(
        1.0, 3, 8, unit_ids=np.arange(8).astype(str), share=0.4, fingerprint="abc", audited=1
    )
    signals, path = replace(signals, kind=kind), tmp_path / "signals"
    signals.save(path)
    found = AttackSignals.open(path)
    for name in ("signal", "member", "example_ids", "unit_ids"):
        assert np.array_equal(getattr(found, name), getattr(signals, name)), name
    assert found.facts == signals.facts
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in path.iterdir())
    assert isinstance(found.signal, np.memmap)
    with pytest.raises(InputError, match="choose another folder"):
        signals.save(path)


def test_a_row_that_was_cut_short_does_not_count(tmp_path):
    signals = signals_with_effect(1.0, 3, 8)
    signals.save(tmp_path / "s")
    with (tmp_path / "s" / "confidence.f32").open("ab") as file:
        file.write(b"half a row")  # as if the process had ended here
    assert np.array_equal(AttackSignals.open(tmp_path / "s").signal, signals.signal)
    add_model(tmp_path / "s", {"confidence": signals.signal[0] + 1}, signals.member[1])
    found = AttackSignals.open(tmp_path / "s")
    assert found.n_models == 4
    assert np.array_equal(found.signal[3], signals.signal[0] + 1)


def test_damage_is_found(tmp_path):
    signals_with_effect(1.0, 3, 8).save(tmp_path / "s")
    content = bytearray((tmp_path / "s" / "confidence.f32").read_bytes())
    content[40] ^= 1
    (tmp_path / "s" / "confidence.f32").write_bytes(content)
    with pytest.raises(EvidenceError, match=r"model 1 .* does not match its checksum"):
        AttackSignals.open(tmp_path / "s")
    (tmp_path / "s" / "confidence.f32").write_bytes(content[:50])
    with pytest.raises(EvidenceError, match="shorter than the 3 models"):
        AttackSignals.open(tmp_path / "s")


def test_one_process_adds_models_at_a_time(tmp_path):
    folder = tmp_path / "signals"
    rng = np.random.default_rng(0)
    more = {"signal_fn": lambda _, positions: rng.random(len(positions)), "pool": 20}
    more["output"] = folder
    train_references(lambda *_: None, 1, seed=1, **more)
    holder = OneWriter(folder)
    with pytest.raises(InputError, match="being written by process"):
        train_references(lambda *_: None, 2, seed=1, **more)
    holder.close()
    assert train_references(lambda *_: None, 2, seed=1, **more).n_models == 2


def test_the_signals_of_a_series_are_of_the_same_models(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "s"
    one, two = rng.random((2, 4)).astype("f4")
    member = np.array([True, False, True, False])
    new_folder(folder, np.arange(4), {"coins": True})
    add_model(folder, {"confidence": one, "labels": two, "checkpoints": one}, member)
    found = open_signals(folder)
    assert {name: (of.kind, of.adversary) for name, of in found.items()} == {
        "confidence": ("confidence", "final_model"),
        "labels": ("label_robustness", "final_model"),
        "checkpoints": ("confidence", "checkpoints"),
    }
    assert np.array_equal(found["labels"].signal, [two])
    with pytest.raises(InputError, match=r"signals confidence, and earlier ones in .* have others"):
        add_model(folder, {"confidence": one}, member)
    with pytest.raises(InputError, match=r"\(3,\), for 4 examples"):
        add_model(folder, {"confidence": one, "labels": two[:3], "checkpoints": one}, member)
    content = read_json(folder / "signals.json")
    del content["models"][0]["crc32"]["confidence"]
    write_json(folder / "signals.json", content)
    with pytest.raises(EvidenceError, match=r"lacks models\.0\.crc32\.confidence"):
        open_signals(folder)


def test_a_series_that_was_killed_before_its_first_model_starts_with_the_run(tmp_path):
    """The row of the run is missing, and no reference may take its place."""
    own, member = np.full(4, 9.0), np.array([True, True, False, False])
    pool = Pool(4, np.arange(4), np.arange(4), audited=({"confidence": own}, member))
    facts = {"audited": 0, "coins": True, "share": 0.5, "fingerprint": ""}
    new_folder(tmp_path / "s", pool.example_ids, facts)  # as if the process had ended here
    each = iter((1.0, 2.0))
    more = {"signal_fn": lambda _, positions: np.full(len(positions), next(each)), "seed": 1}
    found = train_references(lambda *_: None, 2, pool=pool, output=tmp_path / "s", **more)
    assert found.signal.tolist() == [[9.0] * 4, [1.0] * 4, [2.0] * 4]
    assert found.member[0].tolist() == member.tolist()


def test_a_folder_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "s" / "confidence").mkdir(parents=True)
    (tmp_path / "s" / "confidence" / "signals.json").write_text("{}")
    assert is_signals(tmp_path / "s")
    with pytest.raises(EvidenceError, match="earlier version; make the signals again"):
        open_signals(tmp_path / "s")


def test_a_folder_without_models_and_one_that_holds_something_else(tmp_path):
    new_folder(tmp_path / "s", np.arange(3), signals_with_effect(1.0, 1, 3).facts)
    with pytest.raises(InputError, match="no model yet"):
        AttackSignals.open(tmp_path / "s")
    with pytest.raises(InputError, match="holds no signals"):
        new_folder(tmp_path, np.arange(3), {})
    with pytest.raises(InputError, match=r"none is no folder of signals; .*save\(FOLDER\)"):
        AttackSignals.open(tmp_path / "none")


def test_pickles_are_not_read(tmp_path):
    AttackSignals.from_arrays([[0.5, 1.5]], [[1, 0]]).save(tmp_path / "s")
    found = AttackSignals.open(tmp_path / "s")
    assert (found.signal.dtype, found.member.tolist()) == (np.float32, [[True, False]])
    assert found.example_ids.tolist() == [0, 1]
    np.savez(tmp_path / "s" / "ids.npz", example_ids=np.array([object()], dtype=object))
    with pytest.raises(EvidenceError, match="without pickles"):
        AttackSignals.open(tmp_path / "s")
    (tmp_path / "s" / "ids.npz").write_bytes(b"PK")
    with pytest.raises(EvidenceError, match="is damaged"):
        AttackSignals.open(tmp_path / "s")


SIGNAL, MEMBER = np.zeros((2, 3)), np.array([[1, 0, 1], [0, 0, 1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"member": MEMBER[:1]}, r"signal \(2, 3\) and member \(1, 3\)"),
        ({"signal": SIGNAL[0], "member": MEMBER[0]}, "must both be"),
        ({"member": MEMBER * 2}, "neither 0 nor 1"),
        ({"example_ids": [1, 2]}, r"example_ids \(2,\) must name each of the 3"),
        ({"example_ids": [1, 2, 1]}, "has 1 twice"),
        ({"example_ids": [7, 1, 7], "audited": 0}, "has 7 twice"),
        ({"unit_ids": ["a", "b"]}, "unit_ids"),
        ({"unit_ids": ["a", "a", "b"]}, "model 0 was trained on some rows of 1 units"),
        ({"signal": SIGNAL + np.array([[0], [np.nan]])}, "model 1 has no signal"),
        ({"kind": "loss"}, "kind='loss' is not known"),
        ({"adversary": "full"}, "adversary='full' is not known"),
        ({"share": 1.0}, "share=1.0"),
        ({"audited": 2}, "audited=2 is no row"),
    ],
)
def test_what_does_not_match_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        AttackSignals.from_arrays(**{"signal": SIGNAL, "member": MEMBER, **change})


def test_a_member_and_a_non_member_of_the_audited_run_may_share_an_id():
    found = AttackSignals.from_arrays(SIGNAL, MEMBER, [7, 7, 8], audited=0)
    assert (found.audited, found.n_examples) == (0, 3)


def test_confidence_of_losses_is_ordered_and_exact():
    losses = np.array([0.0, 1e-300, 1e-20, 1e-7, 0.5, 0.9999, 1.0001, 50.0, 1e4, np.inf])
    found = from_losses(losses)
    assert (found[0], found[-1]) == (np.inf, -np.inf)
    assert (np.diff(found) < 0).all()
    p = np.exp(-losses[4:7])
    assert found[4:7] == pytest.approx(np.log(p / (1 - p)), rel=1e-12)
    assert found[3] == pytest.approx(-np.log(1e-7), abs=1e-7)
    assert np.isnan(from_losses([np.nan])).all()
    with pytest.raises(InputError, match="1 losses are below 0"):
        from_losses([-1e-9, 1.0])


def test_references_on_nearly_the_same_examples_are_refused():
    signals = signals_with_effect(1.0, 3, 200)
    signals.check_references(0, 1)
    signals.check_references(0, 2)
    for changed in (0, 1, 20):  # of 200 memberships
        member = np.array(signals.member)
        member[2] = member[0]
        member[2, :changed] ^= True
        near = AttackSignals.from_arrays(signals.signal, member)
        with pytest.raises(InputError, match="reference 2 was trained on the same examples"):
            near.check_references(0, 1)
        near.check_references(1, 2)
    mostly_in = signals_with_effect(1.0, 9, 200, share=0.95)  # alike by chance only
    for target in range(9):
        mostly_in.check_references(target, 8)


def test_few_units_are_alike_by_chance():
    """At share 0.9, 2 of 100 pairs of memberships of 20 units are equal."""
    rng = np.random.default_rng(0)
    for n in (20, 60, 150) * 200:
        member = rng.random((2, n)) < 0.9
        if not (member.any(axis=1) & ~member.all(axis=1)).all():
            continue
        signals = AttackSignals.from_arrays(rng.normal(size=(2, n)), member, coins=True, share=0.9)
        signals.check_references(0, 1)
    half = rng.random((1, 40)).repeat(2, axis=0) < 0.5
    same = AttackSignals.from_arrays(rng.normal(size=(2, 40)), half, coins=True)
    with pytest.raises(InputError, match="was trained on the same examples"):
        same.check_references(0, 1)


def draw_alike(n, k, rng):
    """Each example in exactly half of k models, as in the code of Carlini et al."""
    return rng.random((k, n)).argsort(axis=0).argsort(axis=0) < k // 2


@pytest.mark.parametrize("units", [None, 40])
@pytest.mark.parametrize(
    ("memberships", "refused"),
    [
        (lambda fold, rng: rng.random((9, len(fold))) < 0.5, False),
        (lambda fold, rng: rng.random((2, len(fold))) < 0.9, False),
        (lambda fold, rng: draw_alike(len(fold), 16, rng), False),
        (lambda fold, rng: np.stack([fold < 5, fold >= 5]), True),  # one is the other's rest
        (lambda fold, rng: np.stack([fold // 2 != k for k in range(5)]), True),  # cross-validation
        (lambda fold, rng: np.stack([fold != k for k in range(10)]), True),
        (lambda fold, rng: np.stack([fold == k for k in range(10)]), True),
    ],
)
def test_references_whose_examples_follow_from_those_of_the_target_are_refused(
    memberships, refused, units
):
    """How many references have an example would tell whether the target has it: in cross-validation
    LiRA has AUC 1 for a target that leaks nothing."""
    rng = np.random.default_rng(0)
    for _ in range(1 if refused else 25):
        n = 1000 if units is None else units
        member = memberships(rng.permutation(n) % 10, rng)
        of = None if units is None else np.repeat(np.arange(units), 25)
        member = member if of is None else member[:, of]
        signals = AttackSignals.from_arrays(rng.normal(size=member.shape), member, unit_ids=of)
        if refused and units is None:
            with pytest.raises(
                InputError, match="follows from whether the attacked model 0 has it"
            ):
                signals.check_references(0, 1)
        elif not refused:
            signals.check_references(0, 1)
