"""Brackets that say little are marked, counted and not called certified."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from indpriv import NormLog, account
from indpriv.accountant.runs import compose
from indpriv.analysis.summary import Audit
from indpriv.audit import RecordedRun
from indpriv.report.report import markdown_audit, print_audit
from summaries import audit_of
from synthetic import epsilon_table

N, STEPS = 24, 500
LITTLE_NOISE = {"noise_multiplier": 0.5, "sample_rate": 1e-3}
ORDINARY = {"noise_multiplier": 1.0, "sample_rate": 0.02}


def log_of(settings, mean=0.1):
    norms = np.random.default_rng(0).gamma(1, mean, (STEPS, N)).clip(max=1.0)
    norms[:, 0] = 1.0  # clipped in every step
    steps = {"recorded_steps": np.arange(STEPS), "total_steps": STEPS, "max_grad_norm": 1.0}
    return NormLog.from_arrays(norms, **steps, **settings)


@pytest.fixture(scope="module", params=[LITTLE_NOISE, ORDINARY], ids=["little noise", "ordinary"])
def accounted(request):
    log = log_of(request.param)
    return request.param is LITTLE_NOISE, log, account(log, delta=1e-5, accountant="pld")


def test_a_row_is_wide_where_its_ends_are_more_than_a_hundredth_apart(accounted):
    little_noise, _, table = accounted
    width = table.epsilon_upper - table.epsilon_lower
    assert np.array_equal(table.wide, width > 0.01 * table.epsilon_upper)
    assert np.array_equal(table.details["bracket"] == "upper", table.wide)
    assert set(table.details["bracket"][~table.wide]) == {"certified"}
    assert table.wide.sum() >= N // 2 if little_noise else not table.wide.any()


@pytest.mark.parametrize("lower", [[0.0, 0.5, 0.98], []], ids=["three are wide", "none is wide"])
def test_wide_rows_are_counted_on_the_screen_on_the_page_and_in_audit_json(lower):
    log = log_of(ORDINARY)
    table = epsilon_table(np.ones(N), accountant="pld")
    table = replace(table, epsilon_lower=np.array([*lower, *[0.995] * (N - len(lower))]))
    summary = audit_of(log, table, RecordedRun(None), name="x")
    claim = f"tight, at most 1 % wide, for {N - len(lower)} of {N} examples"
    rest = f"; of {len(lower)} only the upper end says something"
    out = io.StringIO()
    print_audit(summary, Console(file=out, width=80), verbose=True)
    for text in (" ".join(out.getvalue().split()), markdown_audit(summary)):
        assert claim in text
        assert (rest in text) == bool(lower)
    content = summary.to_json()
    assert content["individual"]["wide"] == len(lower)
    del content["individual"]["wide"]  # as earlier versions wrote it
    assert Audit.from_json(content).individual.wide is None


def test_no_tightness_is_claimed_of_the_other_accountant():
    log = log_of(ORDINARY)
    table = account(log, delta=1e-5)
    assert not table.wide.any()
    summary = audit_of(log, table, RecordedRun(None), name="x")
    assert summary.individual.wide is None
    assert "only the upper end" not in markdown_audit(summary)


@pytest.mark.slow
def test_composed_runs_are_marked_as_well():
    logs = [log_of(LITTLE_NOISE), log_of(LITTLE_NOISE)]
    table = compose(logs, delta=1e-5, accountant="pld")
    assert table.wide.any()
    assert np.array_equal(table.details["bracket"] == "upper", table.wide)
