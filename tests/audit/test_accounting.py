from dataclasses import replace

import numpy as np

from indpriv import NormLog
from indpriv.audit import Accounting, Evidence, effect_of_spacing, fidelity_against_k, summarise

from .conftest import DELTA


def test_fidelity_is_zero_where_norms_never_move():
    norms = np.tile(np.linspace(0.01, 1.5, 25), (20, 1))
    settings = {"total_steps": 20, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.1}
    log = NormLog.from_arrays(norms, np.arange(20), **settings)
    accounting = Accounting(DELTA)
    rows = fidelity_against_k(log, accounting, accounting(log))
    assert len(rows) == 4
    assert max(row.largest_absolute for row in rows) == 0
    assert max(row.share_under for row in rows) == 0


def test_no_fidelity_without_exact_values(artifacts):
    log, _ = artifacts
    accounting = Accounting(DELTA)
    thinned = log.thin(10)
    assert fidelity_against_k(thinned, accounting, accounting(thinned)) == ()
    clipped = replace(log, individually_clipped=True)
    assert fidelity_against_k(clipped, accounting, accounting(clipped)) == ()


def test_the_papers_preset(artifacts, tmp_path):
    log, examples = artifacts
    full = NormLog.from_arrays(
        log.levels.norms(log.read(), 1.0), np.arange(30), total_steps=30, noise_multiplier=1.1, max_grad_norm=1.0,
        sample_rate=0.1, rounding_mode="nearest",
    )  # fmt: skip
    accounting = Accounting(DELTA, preset="yu2023")
    table = accounting(full)
    assert (table.claim, table.account.conversion) == ("estimate", "mironov2017")
    rows = fidelity_against_k(full, accounting, table)
    assert {row.between_records for row in rows} == {"last"}
    summary = summarise(full, table, Evidence(examples), name="paper", fidelity=rows)
    assert summary.claim == "estimate"


def test_spacing_is_the_account_of_every_second_record(artifacts):
    log, _ = artifacts
    thinned = log.thin(5)
    accounting = Accounting(DELTA)
    table = accounting(thinned)
    found = effect_of_spacing(thinned, accounting, table)
    shift = accounting(log.thin(10)).epsilon - table.epsilon
    assert (found.n_records, found.n_kept, found.every) == (6, 3, 5)
    assert found.mean_shift == shift.mean()
    assert found.largest_absolute == np.abs(shift).max() > 0


def test_no_spacing_where_nothing_is_carried_between_records(artifacts):
    log, _ = artifacts
    accounting = Accounting(DELTA)
    for whole in (log, replace(log.thin(5), individually_clipped=True), log.thin(20)):
        assert effect_of_spacing(whole, accounting, accounting(whole)) is None
    at_worst = Accounting(DELTA, between_records="worst_case")
    assert effect_of_spacing(log.thin(5), at_worst, at_worst(log.thin(5))) is None
