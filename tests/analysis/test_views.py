"""Who sees what, beside a table written by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm as normal

import indpriv
from indpriv import RoundRecorder
from indpriv.analysis.recorded_run import AuditedRun, Declared, RecordedRun
from indpriv.analysis.summary import Audit
from indpriv.analysis.views import views_of
from indpriv.audit import audit

DELTA, NOISE = 1e-3, 2.0
CLIENTS = ["a", "b", "c", "d"]


def epsilon_of(mu):
    """By Theorem 8 of Balle and Wang 2018."""

    def excess(epsilon):
        shift = epsilon / mu
        return (normal.cdf(mu / 2 - shift) - np.exp(epsilon) * normal.cdf(-mu / 2 - shift)) - DELTA

    return brentq(excess, 0, 500) if excess(0) > 0 else 0.0


def run_of(log, table, run_info):
    return AuditedRun(log, table, RecordedRun(declared=Declared(run_info), recorder={"rounds": 3}))


def views(tmp_path, federated, *, by_row=False, noise=NOISE, steps=None, sampler="by_client"):
    """Views of three rounds: a takes part in all; its norms are half of max_grad_norm."""
    owners = np.repeat(CLIENTS, 2) if by_row else None
    ids = np.arange(8) if by_row else CLIENTS
    who = [["a", "b"], ["a", "c"], ["a", "b", "c", "d"]]
    if by_row:
        who = [np.flatnonzero(np.isin(owners, some)) for some in who]
    run_info = (
        {"delta": DELTA, "config": {"federated": federated}} if federated else {"delta": DELTA}
    )
    with RoundRecorder(
        tmp_path,
        ids,
        sampler=sampler,
        rounding=0,
        unit="example" if by_row else "client",
        unit_ids=owners,
        run_info=run_info,
    ) as recorder:
        for number, some in enumerate(who):
            value = noise if np.isscalar(noise) else noise[number]
            recorder.round(
                some,
                np.full(len(some), 0.5),
                noise_multiplier=value,
                max_grad_norm=1.0,
                sample_rate=0.5,
            )
    log = indpriv.NormLog.open(tmp_path)
    participation = "secret" if sampler == "poisson" else "known"
    table = indpriv.account(log, delta=DELTA, participation=participation)
    return {
        (view.unit, view.observer): view for view in views_of(run_of(log, table, run_info))
    }, table


def check(found, expected):
    """expected: (unit, observer) -> (noise multiplier, mu of the most exposed), None without."""
    assert set(found) == set(expected)
    for key, (noise, mu) in expected.items():
        view = found[key]
        assert view.noise_multiplier == (None if noise is None else pytest.approx(noise)), key
        if mu is None:
            assert view.worst_case_epsilon is None, key
            assert view.reason
        else:
            assert view.worst_case_epsilon == pytest.approx(epsilon_of(mu), rel=1e-6), key
            assert view.participation == "known"


NONE = (None, None)
LATE = {(unit, seen): NONE for unit in ("client", "row") for seen in ("update", "gradient")}


@pytest.mark.parametrize("federated", [None, {"protect": "client", "noise_at": "server"}])
def test_noise_of_the_server_protects_nothing_from_the_server(federated, tmp_path):
    found, table = views(tmp_path, federated)
    mu = np.sqrt(3) / NOISE
    row = (NOISE / 2, 2 * mu)
    check(found, {**LATE, ("client", "outsider"): (NOISE, mu), ("row", "outsider"): row})
    assert found["client", "outsider"].median_epsilon == np.median(table.epsilon)
    assert "after it has read" in found["client", "update"].reason


def test_coins_of_clients_are_secret_to_outsiders_only(tmp_path):
    found, table = views(tmp_path, None, sampler="poisson")
    outside = found["client", "outsider"]
    assert (outside.participation, outside.worst_case_epsilon) == (
        "secret",
        table.worst_case_epsilon,
    )
    assert found["row", "outsider"].participation == "known"
    assert found["row", "outsider"].worst_case_epsilon == pytest.approx(
        epsilon_of(2 * np.sqrt(3) / NOISE), rel=1e-6
    )


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_noise_of_clients_adds_up_for_outsiders(share, tmp_path):
    came = np.array([2, 2, 4]) if share == 1 else np.ones(3)
    settings = {"protect": "client", "noise_at": "clients", "share": share}
    found, _ = views(tmp_path, settings, noise=NOISE * np.sqrt(came))
    outside, own = np.sqrt((1 / came).sum()) / NOISE, np.sqrt(3) / NOISE
    least = NOISE * np.sqrt(came.min())
    expected = {
        ("client", "outsider"): (least, outside),
        ("row", "outsider"): (least / 2, 2 * outside),
        ("client", "update"): (NOISE, own),
        ("row", "update"): (NOISE / 2, 2 * own),
        ("client", "gradient"): NONE,
        ("row", "gradient"): NONE,
    }
    check(found, expected)


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("place", ["batch", "row"])
def test_rows_with_noise_of_their_own(place, local_steps, tmp_path):
    """Two rows a client: the noise of a row is that of a batch over the root of 2."""
    settings = {"protect": "row", "noise_at": place, "local_steps": local_steps}
    found, _ = views(tmp_path, settings, by_row=True)
    came = np.array([2, 2, 4]) if local_steps == 1 else np.ones(3)
    outside, own = np.sqrt((1 / came).sum()) / NOISE, np.sqrt(3) / NOISE
    least = NOISE * np.sqrt(came.min())
    gradient = NONE if place == "batch" else (NOISE / np.sqrt(2), np.sqrt(3 * 2) / NOISE)
    expected = {
        ("row", "outsider"): (least, outside),
        ("client", "outsider"): (least, 2 * outside),
        ("row", "update"): (NOISE, own),
        ("client", "update"): (NOISE, 2 * own),
        ("row", "gradient"): gradient,
    }
    check(found, expected)
    # Six of eight rows took part in at most two rounds, at half of max_grad_norm.
    alone = epsilon_of(np.sqrt((1 / came[[0, 2]]).sum()) / 2 / NOISE)
    assert found["row", "outsider"].median_epsilon == pytest.approx(alone, rel=1e-6)


def test_an_audit_shows_them(tmp_path):
    views(tmp_path / "run", None)
    summary = audit(tmp_path / "run", tmp_path / "report")
    assert len(summary.views) == 6
    assert "beside_updates" in [hazard.key for hazard in summary.hazards]
    content = json.loads((tmp_path / "report" / "audit.json").read_text())
    assert [view["observer"] for view in content["views"]][:3] == ["outsider", "update", "gradient"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Who sees what" in page
    assert "the server adds noise after it has read the updates" in page
    assert Audit.from_json(content).views == summary.views


def test_other_runs_have_no_views(tmp_path):
    _, table = views(tmp_path, None)
    log = indpriv.NormLog.open(tmp_path)
    assert views_of(AuditedRun(log, table, RecordedRun())) == ()
    several = replace(table, account=replace(table.account, rows_per_unit=2))
    assert views_of(run_of(log, several, {})) == ()
