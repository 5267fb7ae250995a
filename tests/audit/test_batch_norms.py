"""What batch norms prove reaches audit.json, the report and the first screen."""

import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from indpriv import ExampleTable
from indpriv.accountant import Method
from indpriv.accountant.account import table_for
from indpriv.analysis.fidelity import free_fidelity
from indpriv.audit import audit
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.report.report import audit_page, print_audit
from summaries import run_of
from synthetic import people, session_counts, write_run

N, STEPS, RATE = 80, 60, 0.2


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("free") / "run"
    rng = np.random.default_rng(0)
    norms = np.exp(np.cumsum(rng.normal(0, 0.2, (STEPS, N)), axis=0) - 1)
    drawn = [np.flatnonzero(rng.random(N) < RATE) for _ in range(STEPS)]
    run = {"clipping": "flat", "loss_reduction": "mean", "expected_batch_size": 16}
    header = LogHeader(0.01, "up", "example", "add_remove", "poisson", False, {"caveats": []}, run)
    writer = NormLogWriter(path, header, np.arange(N), None, np.zeros(0, np.int64))
    writer.record(0, norms[0], max_grad_norm=1.0, targets_fingerprint="same", seconds=0.1)
    writer.free(
        0, [(batch, norms[step, batch]) for step, batch in enumerate(drawn)], np.ones(STEPS)
    )
    counts = session_counts(STEPS, N, RATE, participations=sum(map(len, drawn)))
    writer.steps(0, STEPS, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=RATE, counts=counts)
    writer.finish(counts)
    writer.close()
    return path


def test_it_reaches_every_page(run_dir, tmp_path):
    summary = audit(run_dir, tmp_path / "audit", delta=1e-5, between_records="closest")
    expected = free_fidelity(
        run_of(NormLog.open(run_dir), Method(delta=1e-5, between_records="closest"))
    )
    assert summary.batch_norms == expected
    assert not any("No exact values" in text for text in summary.missing)
    document = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert document["batch_norms"]["n_entries"] == expected.n_entries
    console = Console(file=io.StringIO(), width=200)
    print_audit(summary, console, verbose=True)
    screen, page = console.file.getvalue(), audit_page(summary).html()
    for text in (screen, page):
        assert f"{expected.n_entries:,}" in text
        assert f"{expected.unbiased_mean_rdp:.4g}" in text
        assert f"{expected.rdp_bias:+.2g}" in text


def test_nothing_is_said_where_the_account_uses_none(run_dir, tmp_path):
    summary = audit(run_dir, tmp_path / "audit", delta=1e-5, between_records="worst_case")
    assert summary.batch_norms is None
    assert "Batch norms" not in audit_page(summary).html()


def test_members_and_hold_out_are_binned_by_full_records_alone(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    log = NormLog.open(run)
    people_of = [
        people(N, split, seed).drop(columns="hard") for seed, split in enumerate(("train", "test"))
    ]
    ExampleTable(pd.concat(people_of, ignore_index=True)).to_parquet(run / "examples.parquet")
    norms = np.random.default_rng(1).gamma(2.0, 0.3, (1, N))
    settings = {
        "total_steps": STEPS,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": RATE,
    }
    write_run(run / "holdout", NormLog.from_arrays(norms, [0], **settings), None)
    found = audit(run, tmp_path / "audit", delta=1e-5, between_records="closest").attack_by_epsilon
    method = Method(delta=1e-5, between_records="closest")
    alike, free = table_for(replace(log, batch_norms=None), method), table_for(log, method)
    edges = set(found["up_to"]) - {alike.worst_case_epsilon}
    assert edges <= set(alike.epsilon.tolist())
    assert not edges <= set(free.epsilon.tolist())
