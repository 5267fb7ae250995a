import re
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from indpriv._files import read_json
from indpriv.analysis.guarantee import true_positive_bound
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.release.publish import owners, statement, write_statements

from .conftest import WORST, read_epsilons, write_small_audit


def words_of(audit_dir, **which):
    (path,) = write_statements(audit_dir, owners(audit_dir, **which))
    return " ".join(path.read_text(encoding="utf-8").split())


def test_a_statement_says_what_an_owner_must_know(audit_dir):
    text = words_of(audit_dir, example="17")
    own = read_epsilons(audit_dir)[17]
    shown = re.search(r"Your epsilon for this run: ([\d.]+), of at most 2\.00", text)
    assert own <= float(shown[1]) <= own + 0.011
    for words in (
        "for the owner of example 17", "This is the guarantee", "epsilon 2.00 (delta 1e-5, add/remove one example, Poisson sampling",
        "It is exact", "It is not a guarantee", "no reason to skip asking for your consent", "sensitive itself", "Theorem 3.2",
        "bijection", "It was not declared whether they were",
    ):  # fmt: skip
        assert words in text, words
    odds = re.search(
        r"says so 1 % of the times when it was not used says so at most ([\d.]+) % of the times",
        text,
    )
    curve = read_json(audit_dir / "audit.json")["guarantee"]["membership"]["true_positive_rate"]
    bound = 100 * min(curve, true_positive_bound(WORST, 1e-5, 0.01))
    assert bound <= float(odds[1]) <= bound + 0.1


def test_a_statement_promises_what_the_report_does(audit_dir, edit_audit):
    """The whole privacy curve leaves a test less than (epsilon, delta) do, of the promise and so of anybody's own."""
    rate = {"false_positive_rate": 0.01, "true_positive_rate": 0.0401, "advantage": 0.2, "mu": 0.5}
    edit_audit(lambda summary: summary["guarantee"].update(membership=rate))
    epsilon = read_epsilons(audit_dir)
    text = words_of(audit_dir, example=str(int(epsilon.argmax())))
    assert "says so at most 4.1 % of the times when it was." in text
    assert "would be at most 4.1 % rather than 1 %" in text
    low = int(epsilon.argmin())
    own = true_positive_bound(epsilon[low], 1e-5, 0.01)
    assert own < 0.04
    shown = re.search(
        r"would be at most ([\d.]+) % rather than 1 %", words_of(audit_dir, example=str(low))
    )
    assert 100 * own <= float(shown[1]) <= 100 * own + 0.1


def test_a_statement_holds_nothing_of_other_people(audit_dir, tmp_path):
    """The same person among other people, of another number, is told the same."""
    values = np.linspace(0.2, 1.9, 50)
    values[17] = read_epsilons(audit_dir)[17]
    other = write_small_audit(tmp_path / "other", values)
    assert words_of(audit_dir, example="17") == words_of(other, example="17")


def test_files_are_their_owners_and_names_harmless(audit_dir):
    (path,) = write_statements(audit_dir, owners(audit_dir, example="3"))
    assert path == audit_dir / "statements" / "example-3.txt"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_an_id_that_climbs_out_of_the_folder_does_not(tmp_path):
    folder = write_small_audit(tmp_path / "audit", [0.5, 1.0], ids=["../../up", "b\x1b[31m"])
    (folder / "examples.parquet").unlink()
    paths = write_statements(folder, owners(folder))
    assert all(path.parent == folder / "statements" for path in paths)
    assert len(set(paths)) == 2
    assert not any("\x1b" in path.read_text(encoding="utf-8") for path in paths)


def test_every_owner_gets_a_file(audit_dir):
    told = []
    paths = write_statements(audit_dir, owners(audit_dir), progress=lambda *step: told.append(step))
    assert len(paths) == len(set(paths)) == 400
    assert told[-1] == ("writing statements", 400, 400)


def test_a_person_of_several_rows_is_told_nothing_by_an_audit_of_rows(audit_dir):
    examples = audit_dir / "examples.parquet"
    frame = pd.read_parquet(examples)
    frame["unit_id"] = frame["unit_id"] // 2
    frame.to_parquet(examples)
    for asked in ({"unit": "8"}, {"example": "17"}, {"example": "16"}):
        with pytest.raises(
            InputError, match=r"unit 8 has 2 rows, and this audit counts rows.*--unit-column"
        ):
            owners(audit_dir, **asked)


@pytest.mark.parametrize(
    ("status", "words"),
    [("void", "Nothing: it was seeded"), ("unproven", "Nothing that is proven")],
)
def test_without_a_guarantee_nobody_is_promised_one(audit_dir, edit_audit, status, words):
    edit_audit(lambda s: s["guarantee"].update(status=status, reasons=["it was seeded"]))
    text = words_of(audit_dir, example="1")
    assert words in text
    assert "This is the guarantee" not in text
    assert "of at most" not in text  # of a worst case that nothing proves
    assert "test above" not in text


def test_an_estimate_is_called_one(audit_dir, edit_audit):
    edit_audit(lambda summary: summary.update(claim="estimate"))
    assert "It is an estimate: the true value for this training can be larger" in words_of(
        audit_dir, example="1"
    )


def test_where_telling_one_owner_tells_of_others_nobody_is_told(audit_dir, edit_audit):
    edit_audit(
        lambda summary: summary["run"]["declared"].update(chosen_from_data=["max_grad_norm"])
    )
    with pytest.raises(InputError, match="max_grad_norm was chosen from the data"):
        write_statements(audit_dir, owners(audit_dir, example="1"))
    edit_audit(lambda summary: summary["run"]["declared"].update(chosen_from_data=[]))
    edit_audit(lambda summary: summary["account"].update(sampler="truncated_poisson"))
    with pytest.raises(InputError, match="depends on the number of examples"):
        write_statements(audit_dir, owners(audit_dir, example="1"))
    assert not (audit_dir / "statements").exists()


def test_nobody_of_that_name(audit_dir):
    with pytest.raises(InputError, match="--example 400"):
        owners(audit_dir, example="400")
    with pytest.raises(InputError, match="--unit x"):
        owners(audit_dir, unit="x")
    with pytest.raises(InputError, match="pass one"):
        owners(audit_dir, example="1", unit="1")


def test_odds_of_a_large_guarantee_do_not_overflow(audit_dir):
    summary = read_json(audit_dir / "audit.json")
    summary["guarantee"].update(worst_case_epsilon=900.0, membership=None)
    (owner,) = owners(audit_dir, example="1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "at most 100 %" in " ".join(statement(owner, summary).split())


def test_an_owner_reads_the_odds_of_their_own_account(audit_dir):
    """All divergences of an example leave a test less than its epsilon does."""
    path = audit_dir / "epsilon.parquet"
    table = EpsilonTable.open(path).table()
    limit = np.full(len(table), 0.5)
    limit[17] = 0.0123
    replace(table, details={"true_positive_limit": limit}).to_parquet(path)
    assert "would be at most 1.3 % rather than 1 %" in words_of(audit_dir, example="17")
    own = 100 * true_positive_bound(table.epsilon[18], 1e-5, 0.01)
    shown = re.search(r"at most ([\d.]+) % rather", words_of(audit_dir, example="18"))
    assert own <= float(shown[1]) <= own + 0.1 < 50


def test_a_person_of_several_rows_reads_of_records(audit_dir):
    (owner,) = owners(audit_dir, example="17")
    text = statement(replace(owner, n_rows=2), read_json(audit_dir / "audit.json")).lower()
    assert "your own records and from when they were sampled" in " ".join(text.split())
    assert not re.search(r"your\s+(own\s+)?record\b", text)
