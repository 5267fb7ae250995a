"""An audit of people: one row a unit from the account to groups, statements and releases."""

import json
import re
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest

import indpriv
from indpriv import ExampleTable, InputError, NormLog, account
from indpriv._files import read_json, read_parquet, write_json
from indpriv._formatting import format_epsilon
from indpriv.analysis.disclosures import undeclared_people
from indpriv.audit import audit, groups_of, read_audit, read_summary
from indpriv.audit.gate import judge_audit
from indpriv.release.publish import Request, owners, release, statement
from synthetic import parts, rows, small_run, write_run

from .conftest import DELTA

pytestmark = pytest.mark.usefixtures("no_extras")


@pytest.fixture(scope="module")
def households():
    """A small run whose rows live in households of one to four; those of one household share a region."""
    log, examples = small_run(120, 12)
    home = np.sort(np.random.default_rng(1).integers(0, 50, 120))
    frame = examples.frame.assign(home=None, region=None)
    train = (frame["split"] == "train").to_numpy()
    frame.loc[train, "home"] = [f"h{number}" for number in home]
    frame.loc[train, "region"] = np.where(home % 2, "north", "south")
    return log, ExampleTable(frame), home


@pytest.fixture(scope="module")
def audited_people(households, tmp_path_factory):
    log, examples, _ = households
    run = tmp_path_factory.mktemp("people") / "run"
    write_run(run, log, examples)
    summary = audit(run, run / "audit", delta=DELTA, unit_column="home")
    return run / "audit", summary


def test_a_gate_computes_units_of_a_column_again(audited_people, tmp_path):
    """What an audit says of its units switches no recomputation off."""
    run = shutil.copytree(audited_people[0].parent, tmp_path / "run")
    limits = {"max_worst_case_epsilon": 0.6, "max_epsilon": 0.6, "unit": "user", "verified": True}
    found = {one.name: one for one in judge_audit(run / "audit", limits)}
    assert found.pop("attacks above the worst case").known == "believed"
    assert {one.known for one in found.values()} == {"recomputed"}
    assert found["audit.json agrees with tables and log"].passed
    content = read_json(run / "audit/audit.json")
    content["guarantee"]["worst_case_epsilon"] = 0.5
    write_json(run / "audit/audit.json", content)
    forged = {one.name: one for one in judge_audit(run / "audit", limits)}
    assert forged["worst-case epsilon"] == found["worst-case epsilon"]
    assert not forged["worst-case epsilon"].passed
    assert not forged["audit.json agrees with tables and log"].passed
    content["command"] = "indpriv audit RUN"
    write_json(run / "audit/audit.json", content)
    with pytest.raises(InputError, match=r"audit\.json"):
        judge_audit(run / "audit", limits)


def test_an_audit_by_a_unit_column_is_of_people(audited_people, households):
    folder, summary = audited_people
    log, _, home = households
    units = [f"h{number}" for number in home]
    by_hand = account(
        NormLog.from_arrays(
            log.levels.norms(log.read(), 1.0),
            log.recorded_steps,
            total_steps=12,
            noise_multiplier=1.1,
            max_grad_norm=1.0,
            sample_rate=0.1,
            unit="user",
            unit_ids=units,
        ),
        delta=DELTA,
    )
    frame = read_parquet(folder / "epsilon.parquet")
    assert frame["unit_id"].tolist() == by_hand.example_ids.tolist()
    np.testing.assert_allclose(frame["epsilon"], by_hand.epsilon, rtol=1e-12)
    largest = int(np.unique(home, return_counts=True)[1].max())
    assert summary.account.unit == "user"
    assert summary.account.rows_per_unit == largest
    assert f"one user of at most {largest} rows" in summary.guarantee.statement
    assert summary.run.n_units == len(by_hand)
    assert "A user whose rows differ in a column is in its group (missing)." in summary.missing
    assert [row.most for row in summary.unit_sizes] == [1, 2, 5, largest]
    document = json.loads((folder / "audit.json").read_text())
    schema = json.loads((Path(indpriv.__file__).parent / "report/audit.schema.json").read_text())
    jsonschema.validate(document, schema)
    assert f"one user of at most {largest} rows" in (folder / "report.html").read_text()
    assert "--unit-column home" in summary.command


def test_its_pages_speak_of_people(audited_people):
    folder, summary = audited_people
    page = (folder / "report.html").read_text()
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL))
    assert len(summary.fidelity) > 2
    for name in ("loss", "fidelity", "groups"):
        assert "users" in sections[name]
        assert not re.search(r"\bexamples?\b", sections[name], re.IGNORECASE), name
    text = (folder / "audit.md").read_text()
    assert "| Rows of one user | Users |" in text
    for row in summary.unit_sizes:
        assert (
            f"| {row.n_units:,} | {format_epsilon(row.worst_case_epsilon)} | {format_epsilon(row.median)} |"
            in text
        )


def test_groups_are_of_people(audited_people):
    folder, _ = audited_people
    (table,) = groups_of(folder, ["region"])
    found, _ = read_audit(folder)
    assert table.rows["n"].sum() == len(found)
    assert table.rows["name"].tolist()[:2] == ["north", "south"]


def test_one_row_a_person_and_what_their_rows_have_in_common():
    frame = pd.concat(
        [
            rows(
                "train",
                [0, 0, 1],
                loss=[1.0, 3.0, 5.0],
                correct=[True, False, True],
                age=[30, 30, 40],
                sex=["F", "M", "M"],
            ),
            rows("test", [1], age=[50], sex=["F"]),
        ],
        ignore_index=True,
    )
    frame["unit_id"] = [7, 7, 8, 0]
    table = ExampleTable(frame).by_unit()
    train = table.train
    assert train["example_id"].tolist() == [7, 8]
    assert train["loss"].tolist() == [2.0, 5.0]
    assert train["correct"].tolist() == [0.5, 1.0]
    assert train["age"].tolist() == [30, 40]
    assert train["label"].tolist() == [0, 1]
    assert pd.isna(train["sex"].iloc[0])
    assert train["sex"].iloc[1] == "M"
    assert len(table.test) == 1


def test_a_statement_is_of_all_rows_of_a_person(audited_people):
    folder, _ = audited_people
    frame = read_parquet(folder / "epsilon.parquet").set_index("unit_id")
    several = frame.index[frame["n_rows"] > 1][0]
    (owner,) = owners(folder, unit=several)
    text = " ".join(statement(owner, read_summary(folder)).split())
    assert (
        f"for all {frame.loc[several, 'n_rows']} records together: {frame.loc[several, 'epsilon']:.2f}"[
            :-1
        ]
        in text
    )
    assert len(owners(folder)) == len(frame)
    with pytest.raises(InputError, match="counts people, not rows"):
        owners(folder, example="3")


def test_a_release_takes_a_person_for_a_record(audited_people):
    pytest.importorskip("opendp")
    folder, summary = audited_people
    content = release(folder, Request((0.5,), epsilon=5.0)).content
    assert content["unit"] == "user"
    assert 0 < content["quantiles"]["0.5"] <= summary.guarantee.worst_case_epsilon


@pytest.mark.parametrize(
    ("column", "match"),
    [("family", "no metadata column 'family'"), ("missing", "missing lacks a value for 1 of")],
)
def test_bad_unit_columns(households, tmp_path, column, match):
    log, examples, _ = households
    frame = examples.frame.assign(missing="a")
    frame.loc[0, "missing"] = None
    write_run(tmp_path, log, ExampleTable(frame))
    with pytest.raises(InputError, match=match):
        audit(tmp_path, tmp_path / "audit", delta=DELTA, unit_column=column)


@pytest.mark.parametrize(("column", "n"), [("born", 47), ("even", 2), ("ward", 3)])
def test_units_may_be_named_by_dates_and_flags_and_differ_in_every_number(
    households, tmp_path, column, n
):
    log, examples, home = households
    frame = examples.frame.assign(born=pd.NaT, even=None, ward=None, visit=np.nan)
    train = (frame["split"] == "train").to_numpy()
    frame.loc[train, "born"] = pd.Timestamp("2000-01-01") + pd.to_timedelta(home, unit="D")
    frame.loc[train, "even"] = home % 2 == 0
    frame.loc[train, "ward"] = home % 3
    frame.loc[train, "visit"] = np.arange(120.0)
    write_run(tmp_path, log, ExampleTable(frame))
    summary = audit(tmp_path, tmp_path / "audit", delta=DELTA, unit_column=column)
    assert summary.individual.n == n == len(set(frame.loc[train, column]))
    assert ("visit:bins=10" in {table.by for table in summary.groups}) == (column == "born")


def test_people_behind_several_rows_are_found():
    log, examples = small_run(40, 5)
    norms = log.levels.norms(log.read(), 1.0)
    norms[:, 9] = norms[:, 4]
    train = examples.train.assign(patient_id=np.arange(40) // 2, code_id=np.arange(40))
    train.loc[9, ["label", "loss", "correct", "sex", "age", "patient_id", "code_id"]] = train.loc[
        4, ["label", "loss", "correct", "sex", "age", "patient_id", "code_id"]
    ]
    run = {"total_steps": 5, "noise_multiplier": 1.1, "max_grad_norm": 1.0, "sample_rate": 0.1}
    twice = NormLog.from_arrays(norms, np.arange(5), **run)
    found = undeclared_people(twice, train)
    assert any("patient_id seems to say whose row each is" in text for text in found)
    shared = small_run(40, 5)[1].train.assign(household_size=np.arange(40) % 4)
    assert not any("household_size" in text for text in undeclared_people(twice, shared))
    assert any("2 rows repeat each other" in text and "4 = 9" in text for text in found)
    same = NormLog.from_arrays(
        norms, np.arange(5), unit="user", unit_ids=np.r_[0:9, 4, 10:40], **run
    )
    assert undeclared_people(same, train) == []
    assert undeclared_people(log, examples.train) == []


def test_people_have_a_row_of_attack_scores_and_rates(audited_people):
    folder, summary = audited_people
    frame = read_parquet(folder / "attacks.parquet")
    epsilons = read_parquet(folder / "epsilon.parquet")
    assert frame["unit_id"].tolist() == epsilons["unit_id"].tolist()
    assert np.array_equal(frame["epsilon"], epsilons["epsilon"])
    ranks = frame[[name for name in frame if name.startswith("loss_threshold_")]]
    assert set(ranks) == {f"loss_threshold_{rule}" for rule in ("max", "mean", "log_sum")}
    assert ranks.to_numpy().min() >= 0
    assert ranks.to_numpy().max() <= 1
    surest = frame["loss_threshold_mean"].idxmax()
    assert frame.loc[surest, "loss"] < frame["loss"].median()  # small losses have high ranks
    found = parts(summary.rates, by="", attack="loss_threshold")
    assert found["mean"]["auc"].n_members == len(frame)
    assert "Attacks by user" in (folder / "audit.md").read_text()


def test_ranks_of_units_are_of_the_random_groups_that_their_rates_are_of(audited_people, tmp_path):
    """The seed of the audit draws both."""
    folder, _ = audited_people
    audit(folder.parent, tmp_path / "audit", delta=DELTA, unit_column="home", seed=7)
    tables = [read_parquet(one / "attacks.parquet") for one in (folder, tmp_path / "audit")]
    assert not tables[0]["loss_threshold_mean"].equals(tables[1]["loss_threshold_mean"])
