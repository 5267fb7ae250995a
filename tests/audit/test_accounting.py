from dataclasses import replace

import numpy as np

from indpriv import NormLog
from indpriv.audit import Accounting, Evidence, fidelity_against_k, summarise

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
