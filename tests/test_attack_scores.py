import numpy as np
import pandas as pd
import pytest

from indpriv.attack_scores import AttackScores
from indpriv.errors import EvidenceError, InputError

GROUPS = ["<script>", "a,b", "=1+1", "👩\u200d🔬", "NA", None]


def frame(**columns):
    n = len(GROUPS)
    return pd.DataFrame(
        {"score": np.linspace(-1, 1, n), "member": [1, 0] * (n // 2), "group": GROUPS} | columns
    )


@pytest.mark.parametrize("kind", [list, np.array, pd.Series])
def test_numbers_of_members_are_no_positions(kind):
    """As positions of scores, 0 and 1 would choose the first two, again and again."""
    found = AttackScores(kind([0.5, 1.0, 2.0]), kind([0, 1, 1]), "x", groups=kind(["a", "b", "b"]))
    assert found.scores[found.member].tolist() == [1.0, 2.0]
    assert found.groups.tolist() == ["a", "b", "b"]
    with pytest.raises(InputError, match="member holds '2'"):
        AttackScores(kind([0.5, 1.0]), kind([2, 1]), "x")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_from_outside(tmp_path, kind):
    path = tmp_path / f"scores.{kind}"
    table = frame(score=[np.inf, 0.0, -1.5, 2, 3, -np.inf])
    table.to_csv(path, index=False) if kind == "csv" else table.to_parquet(path)
    found = AttackScores.from_file(path)
    assert found.scores.tolist() == [np.inf, 0.0, -1.5, 2.0, 3.0, -np.inf]
    assert found.member.tolist() == [True, False] * 3
    assert found.groups.tolist() == [*GROUPS[:-1], "(missing)"]
    assert (found.method, found.fair_coins) == ("scores from outside", False)


@pytest.mark.parametrize(
    "member", [[True, False] * 3, ["true", "FALSE"] * 3, [1.0, 0.0] * 3, ["1", " 0"] * 3]
)
def test_ways_to_write_membership(tmp_path, member):
    for name, write in (("a.csv", "to_csv"), ("a.parquet", "to_parquet")):
        getattr(frame(member=member).drop(columns="group"), write)(tmp_path / name, index=False)
        found = AttackScores.from_file(tmp_path / name)
        assert found.member.tolist() == [True, False] * 3
        assert found.groups is None


def test_what_is_written_is_read(tmp_path):
    scores = AttackScores(
        np.array([0.5, 1.0]), np.array([True, False]), "canaries", np.array(["a", "b"]), True
    )
    scores.to_parquet(tmp_path / "x.parquet")
    found = AttackScores.from_file(tmp_path / "x.parquet")
    assert (found.scores.tolist(), found.method, found.fair_coins) == ([0.5, 1.0], "canaries", True)
    assert (tmp_path / "x.parquet").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("score,label\n1,1\n", "lacks the column member"),
        ("a,b\n1,1\n", "lacks the columns score and member"),
        ("score,member\n", "holds no scores"),
        ("score,member\nhigh,1\n", "score holds a value that is not a number"),
        ("score,member\n,1\n", "1 attack scores are NaN"),
        ("score,member\n1,2\n", "member holds '2'"),
        ("score,member\n1,\n", "member holds"),
        ("", "cannot be read as CSV"),
        ('score,member\n"1,1\n', "cannot be read as CSV"),
    ],
)
def test_what_is_no_scores_is_refused(tmp_path, content, message):
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(InputError, match=message):
        AttackScores.from_file(tmp_path / "bad.csv")


def test_no_file_and_another_kind(tmp_path):
    for name in ("none.csv", "none.parquet"):
        with pytest.raises(InputError, match="does not exist"):
            AttackScores.from_file(tmp_path / name)
    with pytest.raises(InputError, match=r"neither \.csv nor \.parquet"):
        AttackScores.from_file(tmp_path / "scores.npy")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(EvidenceError, match="damaged"):
        AttackScores.from_file(tmp_path / "bad.parquet")


def test_ids_models_and_adversary_are_written_and_read(tmp_path):
    scores = AttackScores(
        np.array([0.5, 1.0, 2.0]),
        np.array([True, False, True]),
        "test",
        example_ids=np.array(["a", "b", "a"]),
        model=np.array([0, 0, 1]),
        adversary="updates",
    )
    scores.to_parquet(tmp_path / "x.parquet")
    found = AttackScores.from_file(tmp_path / "x.parquet")
    assert found.adversary == "updates"
    with pytest.raises(InputError, match="scores of several models"):
        found.check_one_model("a rate")
    assert (found.example_ids.tolist(), found.model.tolist()) == (["a", "b", "a"], [0, 0, 1])
    pd.DataFrame({"score": [1.0], "member": [1], "example_id": [7], "model": [3]}).to_csv(
        tmp_path / "x.csv", index=False
    )
    found = AttackScores.from_file(tmp_path / "x.csv")
    found.check_one_model("a rate")
    assert found.adversary == "final_model"
    assert (found.example_ids.tolist(), found.model.tolist()) == (["7"], [3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adversary": "everything"}, "adversary='everything' is not known"),
        ({"example_ids": np.array([1])}, r"example_ids \(1,\) and scores \(2,\)"),
        ({"model": np.array([1, 2, 3])}, r"model \(3,\) and scores \(2,\)"),
    ],
)
def test_what_does_not_fit_the_scores_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        AttackScores(np.zeros(2), np.ones(2, bool), "test", **options)


def test_a_model_is_a_whole_number(tmp_path):
    (tmp_path / "x.csv").write_text("score,member,model\n1,1,1.5\n")
    with pytest.raises(InputError, match="model holds a value that is not a whole number"):
        AttackScores.from_file(tmp_path / "x.csv")


def test_a_path_may_be_a_text(tmp_path):
    scores = AttackScores(np.array([0.1, 0.2]), np.array([True, False]), "mine")
    scores.to_parquet(str(tmp_path / "scores.parquet"))
    assert AttackScores.from_file(str(tmp_path / "scores.parquet")).scores.tolist() == [0.1, 0.2]
