from dataclasses import replace

import numpy as np
import pytest

import indpriv.analysis.fidelity
from indpriv import NormLog
from indpriv.accountant import Method
from indpriv.accountant.account import table_for
from indpriv.analysis import statistics
from indpriv.analysis.fidelity import (
    compared_positions,
    fidelity_against_k,
    sensitivity,
)
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.attacks import Material
from summaries import audit_of, run_of

from .conftest import DELTA


def test_fidelity_is_zero_where_norms_never_move():
    norms = np.tile(np.linspace(0.01, 1.5, 25), (20, 1))
    settings = {
        "total_steps": 20,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.1,
    }
    log = NormLog.from_arrays(norms, np.arange(20), **settings)
    method = Method(delta=DELTA)
    rows = fidelity_against_k(run_of(log, method))
    assert len(rows) == 4
    assert max(row.largest_absolute for row in rows) == 0
    assert max(row.share_under for row in rows) == 0


def test_no_fidelity_without_exact_values(artifacts):
    log, _ = artifacts
    method = Method(delta=DELTA)
    thinned = log.thin(10)
    assert fidelity_against_k(run_of(thinned, method)) == ()
    clipped = replace(log, individually_clipped=True)
    assert fidelity_against_k(run_of(clipped, method)) == ()


def test_the_papers_preset(artifacts, tmp_path):
    log, examples = artifacts
    full = NormLog.from_arrays(
        log.levels.norms(log.read(), 1.0), np.arange(30), total_steps=30, noise_multiplier=1.1, max_grad_norm=1.0,
        sample_rate=0.1, rounding_mode="nearest",
    )  # fmt: skip
    method = Method(delta=DELTA, preset="yu2023")
    table = table_for(full, method)
    assert (table.claim, table.account.conversion) == ("estimate", "mironov2017")
    rows = fidelity_against_k(run_of(full, method, table))
    assert {row.between_records for row in rows} == {"last"}
    assert sensitivity(run_of(full, method, table)).empty  # it makes those choices itself
    assert sensitivity(run_of(full.thin(5), method))["choice"].tolist() == ["records"]
    summary = audit_of(
        full, table, RecordedRun(Material(examples)), name="paper", fidelity={"fidelity": rows}
    )
    assert summary.claim == "estimate"


def of_fewer_records(run):
    found = sensitivity(run)
    return next(found[found["choice"] == "records"].itertuples(), None)


def test_fewer_records_are_every_second_one(artifacts):
    log, _ = artifacts
    thinned = log.thin(5)
    method = Method(delta=DELTA)
    table = table_for(thinned, method)
    found = of_fewer_records(run_of(thinned, method, table))
    shift = table_for(log.thin(10), method).epsilon - table.epsilon
    assert (found.here, found.instead) == ("6", "3")
    assert found.mean_shift == shift.mean()
    assert found.largest_absolute == np.abs(shift).max() > 0


def test_fewer_records_change_nothing_where_nothing_is_carried_between_records(artifacts):
    log, _ = artifacts
    method = Method(delta=DELTA)
    for whole in (log, replace(log.thin(5), individually_clipped=True), log.thin(20)):
        assert of_fewer_records(run_of(whole, method)) is None
    at_worst = Method(delta=DELTA, between_records="worst_case")
    assert of_fewer_records(run_of(log.thin(5), at_worst)) is None


def test_fidelity_by_group_adds_up(artifacts):
    log, examples = artifacts
    method = Method(delta=DELTA)
    rows = fidelity_against_k(run_of(log, method, examples=examples, by=["sex"]))
    told = [row for row in rows if row.groups]
    assert [(row.every, row.between_records) for row in told] == [
        (10, "last")
    ]  # one epoch, by the rule of the account
    assert sum(group.n for group in told[0].groups) == told[0].n
    assert sum(group.n * group.signed_bias for group in told[0].groups) == pytest.approx(
        told[0].n * told[0].signed_bias
    )
    assert max(group.largest_absolute for group in told[0].groups) == told[0].largest_absolute


def test_sensitivity_is_the_account_of_other_choices(artifacts):
    log, _ = artifacts
    method = Method(delta=DELTA)
    norms = log.levels.norms(log.read(), 1.0)
    settings = {
        "total_steps": 30,
        "noise_multiplier": 1.1,
        "max_grad_norm": 1.0,
        "sample_rate": 0.1,
    }
    found = sensitivity(run_of(log, method))
    assert list(zip(found["choice"], found["instead"], strict=True)) == [
        ("rounding", "0.02"),
        ("rounding", "0.05"),
        ("rounding", "0.1"),
    ]
    for row in found.itertuples():
        coarser = NormLog.from_arrays(norms, np.arange(30), rounding=float(row.instead), **settings)
        shift = table_for(coarser, method).epsilon - table_for(log, method).epsilon
        assert row.mean_shift == pytest.approx(shift.mean())
        assert row.mean_shift > 0
        assert row.share_smaller == 0  # rounded up twice is rounded up
    full = NormLog.from_arrays(norms, np.arange(30), rounding=0, **settings)
    unrounded = sensitivity(run_of(full, method))
    assert unrounded["here"].iloc[0] == "0.0"
    assert unrounded["mean_shift"].iloc[-1] == pytest.approx(
        (table_for(coarser, method).epsilon - table_for(full, method).epsilon).mean()
    )


def test_sensitivity_to_what_holds_between_records(artifacts):
    method, thinned = Method(delta=DELTA), artifacts[0].thin(10)
    table = table_for(thinned, method)
    found = {
        row.instead: row
        for row in sensitivity(run_of(thinned, method, table)).itertuples()
        if row.choice == "between_records"
    }
    assert set(found) == {"closest", "worst_case"}
    assert found["worst_case"].share_smaller == 0
    assert (
        found["worst_case"].mean_shift
        == (
            table_for(thinned, replace(method, between_records="worst_case")).epsilon
            - table.epsilon
        ).mean()
        > 0
    )


def test_sensitivity_of_many_examples_is_that_of_some(artifacts, monkeypatch):
    log, _ = artifacts
    method = Method(delta=DELTA)
    monkeypatch.setattr(indpriv.analysis.fidelity, "MOST_COMPARED", 50)
    monkeypatch.setattr(indpriv.analysis.fidelity, "COARSER", (0.1,))
    found = sensitivity(run_of(log, method))
    assert found["n"].tolist() == [50]


def test_of_many_examples_a_random_sample_is_compared(artifacts, monkeypatch):
    log, examples = artifacts
    method = Method(delta=DELTA)
    run = run_of(log, method, examples=examples, by=["sex"])
    plain = fidelity_against_k(run)
    monkeypatch.setattr(statistics, "MOST_EXACT", 100)
    monkeypatch.setattr(indpriv.analysis.fidelity, "MOST_COMPARED", 80)
    positions = compared_positions(log)
    assert (len(positions), len(np.unique(positions))) == (80, 80)
    rows = fidelity_against_k(run)
    assert {row.n for row in rows} == {80}
    assert {row.source for row in rows} == {"norms at every step of 80 random examples of this log"}
    assert rows == fidelity_against_k(run)
    (by_group,) = [row.groups for row in rows if row.groups]
    assert sum(row.n for row in by_group) == 80
    for mine, every in zip(rows, plain, strict=True):
        assert (mine.every, mine.between_records) == (every.every, every.between_records)
        assert mine.largest_absolute <= every.largest_absolute
