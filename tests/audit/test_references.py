"""An audit with signals of reference models."""

from dataclasses import replace

import numpy as np
import pytest

from indpriv._columns import to_floats
from indpriv._files import read_json, write_json
from indpriv.attack_signals import AttackSignals, from_losses
from indpriv.audit import audit
from indpriv.errors import InputError


@pytest.fixture
def signals(artifacts):
    """Four references for the small run, on which being trained on raises the confidence."""
    rng = np.random.default_rng(0)
    _, examples = artifacts
    train, test = examples.train, examples.test
    own = from_losses(np.concatenate([to_floats(part["loss"]) for part in (train, test)]))
    member = np.concatenate([[np.arange(len(own)) < len(train)], rng.random((4, len(own))) < 0.6])
    others = own + rng.normal(0, 0.2, (4, len(own))) + member[1:] * 0.1
    return AttackSignals.from_arrays(
        np.concatenate([[own], others]),
        member,
        np.concatenate([train["example_id"], test["example_id"]]),
        audited=0,
        coins=True,
        share=0.6,
        fingerprint="of the data",
    )


@pytest.mark.usefixtures("no_extras")
def test_the_audit_runs_every_attack_whose_needs_are_met(run_dir, signals, tmp_path):
    signals.save(tmp_path / "signals.npz")
    few = AttackSignals(
        signals.signal[:2], signals.member[:2], signals.example_ids, audited=0, share=0.6
    )
    few.save(tmp_path / "baseline.npz")
    summary = audit(
        run_dir,
        tmp_path / "audit",
        signals=tmp_path / "signals.npz",
        baseline_signals=tmp_path / "baseline.npz",
    )
    ours, baseline = summary.attacks.every.of("dp"), summary.attacks.every.of("non_dp")
    assert {"rmia", "lira", "loss_threshold", "quantile"} <= {found.name for found in ours}
    names = {found.name for found in baseline}
    assert "rmia" in names
    assert "lira" not in names  # it needs four references, and there is one
    assert not {found.name for found in ours} & {"label_rmia", "trajectory_rmia"}
    assert [found.auc for found in ours] == sorted((found.auc for found in ours), reverse=True)
    rmia = next(found for found in ours if found.name == "rmia")
    assert (rmia.references, rmia.n_members, rmia.n_nonmembers) == (4, 240, 120)
    ceilings = summary.attacks.every.ceilings
    assert ceilings.individual["0.01"] <= ceilings.worst_case["0.01"] < 1
    page = (tmp_path / "audit" / "audit.md").read_text()
    assert "RMIA, offline" in page
    assert "Individual ceiling, mean" in page
    assert f"--signals {tmp_path / 'signals.npz'}" in page.replace("\\", "")


@pytest.mark.usefixtures("no_extras")
def test_signals_of_something_else_are_refused(run_dir, signals, tmp_path):
    def message(other):
        other.save(tmp_path / "signals.npz")
        with pytest.raises(InputError) as error:
            audit(run_dir, tmp_path / "audit", signals=tmp_path / "signals.npz")
        return str(error.value)

    record = read_json(run_dir / "run.json")
    write_json(run_dir / "run.json", {**record, "data": {**record["data"], "fingerprint": "of it"}})
    try:
        assert "another fingerprint" in message(signals)
    finally:
        write_json(run_dir / "run.json", record)
    assert "holds a study" in message(replace(signals, audited=None, example_ids=np.arange(360)))
    ids = signals.example_ids.copy()
    ids[0] = 10_000
    assert "holds examples that" in message(replace(signals, example_ids=ids))
    moved = np.array(signals.signal)
    moved[0] += 1
    assert "is not the model of" in message(replace(signals, signal=moved))
    same = np.array(signals.member)
    same[1] = same[0]
    assert "was trained on the same examples" in message(replace(signals, member=same))
