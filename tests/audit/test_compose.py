"""`indpriv compose`: recorded runs on the same people, accounted together."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import oracles
from indpriv import NormLog, account
from indpriv.accountant import compose as compose_logs
from indpriv.audit.accounts import compose_runs
from indpriv.cli import run as run_command
from indpriv.errors import PrivacyWarning
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.records import Records
from indpriv.recording import private_generator
from indpriv.recording.opacus.draws import Tally
from indpriv.round_recorder import RoundRecorder
from runs import blobs, make_run, record

ADULT = Path(__file__).parents[1] / "baseline" / "runs" / "adult"


@pytest.fixture
def compose(capsys):
    def call(*arguments, code=0):
        found = run_command(["compose", *map(str, arguments)])
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return call


def small(folder, order=None, seed=None, **options):
    """A recorded run; examples in this order, batches and noise from generators of this seed."""
    inputs, targets = blobs().tensors
    order = torch.arange(len(inputs)) if order is None else order
    data = TensorDataset(inputs[order], targets[order])
    generators = [private_generator(), private_generator()]
    if seed is not None:
        generators = [torch.Generator().manual_seed(seed + one) for one in range(2)]
    loader = DataLoader(data, batch_size=12, generator=generators[0])
    made = make_run(data, data_loader=loader, noise_generator=generators[1])
    record(made, folder, every=1, run_info={"delta": 1e-3}, **options)
    return folder


@pytest.mark.parametrize("ids", ["positions", "names"])
def test_equal_positions_may_be_other_people(ids, tmp_path):
    turned = torch.arange(119, -1, -1)
    names = [f"person {number}" for number in range(120)]
    named = (
        [{}, {}] if ids == "positions" else [{"example_ids": names}, {"example_ids": names[::-1]}]
    )
    runs = [small(tmp_path / "a", **named[0]), small(tmp_path / "b", turned, **named[1])]
    found = compose_runs(runs)
    assert found.table.claim == ("estimate" if ids == "positions" else "exact")
    assert ("may be other people" in found.table.claim_reason) == (ids == "positions")
    assert found.status == "supported"  # the worst case is of anyone


def test_runs_with_the_same_coins_are_not_independent(tmp_path):
    runs = [small(tmp_path / name, seed=2**40 + 12_345, batch_norms=True) for name in "ab"]
    found = compose_runs(runs)
    assert found.status == "unproven"
    assert "drew everybody equally often" in found.reasons[0]
    assert compose_runs(runs, same_run=True).status == "supported"
    others = compose_runs([runs[0], small(tmp_path / "c", batch_norms=True)])
    assert (others.status, others.table.claim) == ("supported", "exact")


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_few_people_or_all_of_them_may_be_drawn_equally_often(rate, tmp_path):
    for name in "ab":
        with RoundRecorder(tmp_path / name, ["x", "y", "z"], sampler="poisson") as recorder:
            for drawn in ["x"] if rate < 1 else ["xyz"] * 5:
                norms, settings = np.full(len(drawn), 0.5), {"noise_multiplier": 1.0}
                recorder.round([*drawn], norms, max_grad_norm=1.0, sample_rate=rate, **settings)
    found = compose_runs([tmp_path / name for name in "ab"], delta=1e-3)
    assert not any("equally often" in reason for reason in found.reasons)


def test_a_run_with_itself(run_dir, compose, tmp_path):
    copy = tmp_path / "again"
    shutil.copytree(run_dir, copy)
    assert "are the same run" in compose(run_dir, copy, code=2).err
    found = json.loads(
        compose(run_dir, copy, "--set", "same_run", "--json", "--output-dir", tmp_path / "both").out
    )
    assert found == json.loads((tmp_path / "both" / "composition.json").read_text())
    table = pd.read_parquet(tmp_path / "both" / "epsilon.parquet")
    assert (table["n_runs"] == 2).all()
    delta = found["account"]["delta"]
    alone = account(NormLog.open(run_dir), delta=delta)
    assert found["runs"][0]["worst_case_epsilon"] == alone.worst_case_epsilon
    assert alone.worst_case_epsilon < found["worst_case_epsilon"] < 2 * alone.worst_case_epsilon
    assert found["account"]["total_steps"] == 2 * alone.account.total_steps
    assert (tmp_path / "both" / "epsilon.parquet").stat().st_mode & 0o777 == 0o600
    page = compose(run_dir, copy, "--set", "same_run", "--set", "tuning_mean=3").out
    assert "geometric law with mean 3" in " ".join(page.split())
    assert "by a score that uses none of these data" in " ".join(page.split())
    assert "It is not a differential-privacy guarantee" in " ".join(page.split())


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_run_of_adult_with_itself_equals_one_of_twice_the_steps(accountant):
    log = replace(NormLog.open(ADULT), batch_norms=None)
    settings = {name: np.tile(values, 2) for name, values in vars(log.settings).items()}
    twice = replace(
        log,
        recorded_steps=np.append(log.recorded_steps, log.total_steps + log.recorded_steps),
        settings=StepSettings(**settings),
        records=Records.of(np.tile(log.read(), (2, 1))),
    )
    found = compose_logs([log, log], delta=1e-5, accountant=accountant)
    whole = account(twice, delta=1e-5, accountant=accountant)
    np.testing.assert_allclose(found.epsilon, whole.epsilon, rtol=1e-9)
    assert found.worst_case_epsilon == pytest.approx(whole.worst_case_epsilon, rel=1e-12)


@pytest.fixture
def shuffled(tmp_path):
    def make(name, **options):
        dataset = blobs()
        loader = DataLoader(dataset, batch_size=12, shuffle=True)
        run = make_run(dataset, data_loader=loader, poisson_sampling=False, **options)
        torch.seed()
        record(run, tmp_path / name, epochs=2, every="once")
        return tmp_path / name

    return make


def test_shuffled_runs_are_one_gaussian_mechanism(shuffled, compose):
    first, second = shuffled("a", noise_multiplier=2.0), shuffled("b", noise_multiplier=3.0)
    found = json.loads(compose(first, second, "--set", "delta=1e-5", "--json").out)
    mu = (2 / 2.0**2 + 2 / 3.0**2) ** 0.5
    assert found["worst_case_epsilon"] == pytest.approx(oracles.gaussian_epsilon(mu, 1e-5))
    assert (found["guarantee"]["status"], found["claim"]) == ("supported", "exact")
    assert (
        "zero out the contribution of one example, participation known"
        in found["guarantee"]["statement"]
    )
    assert [run["sampling"] for run in found["runs"]] == ["participation known"] * 2
    tuned = compose(first, second, "--set", "delta=1e-5", "--json", "--set", "tuning_mean=2").out
    assert "participation known, RDP accountant" in json.loads(tuned)["guarantee"]["statement"]
    secret = ("--set", "delta=1e-5", "--json", "--set", "participation=secret")
    assert json.loads(compose(first, second, *secret).out)["guarantee"]["status"] == "unproven"


def test_a_shuffled_run_beside_a_poisson_run(run_dir, shuffled, compose):
    other = shuffled("a", noise_multiplier=2.0)
    found = json.loads(compose(run_dir, other, "--set", "delta=1e-5", "--json").out)
    assert found["guarantee"]["status"] == "supported"
    assert found["account"]["neighbouring"] == "zero_out"
    page = " ".join(compose(run_dir, other, "--set", "delta=1e-5").out.split())
    assert "Poisson sampling, participation known in some runs" in page
    assert "describes these runs" in page


def test_one_participation_that_is_miscounted_refutes_the_whole(shuffled, compose, monkeypatch):
    good, plain = shuffled("good"), Tally.next_batch

    def one_for_another(self):
        found = plain(self)
        if self.counts.steps == 3:
            self.took_part[[0, 1]] += (1, -1)
        return found

    monkeypatch.setattr(Tally, "next_batch", one_for_another)
    found = json.loads(compose(good, shuffled("bad"), "--set", "delta=1e-5", "--json").out)
    assert (found["guarantee"]["status"], found["claim"]) == ("unproven", "estimate")


def test_runs_whose_updates_tell_the_number_of_examples_are_of_zero_out(tmp_path, compose):
    for name in ("a", "b"):
        loader = DataLoader(blobs(), batch_size=12, generator=private_generator())
        made = make_run(blobs(), noise_generator=private_generator(), data_loader=loader)
        record(made, tmp_path / name, epochs=1)  # 120 / 12, and 119 / 12 is below 10
    runs = tmp_path / "a", tmp_path / "b", "--set", "delta=1e-5", "--json"
    usual = json.loads(compose(*runs).out)
    assert usual["guarantee"]["status"] == "supported"
    assert usual["account"]["neighbouring"] == "zero_out"
    removed = json.loads(compose(*runs, "--set", "neighbouring=add-remove").out)
    assert removed["worst_case_epsilon"] == usual["worst_case_epsilon"]
    assert removed["guarantee"]["status"] == "unproven"
    assert "expected batch size" in removed["guarantee"]["reasons"][0]


def test_a_delta_that_promises_nothing_is_said_so(run_dir, compose):
    with pytest.warns(PrivacyWarning, match="at least 1/n"):
        page = compose(run_dir, run_dir, "--set", "same_run", "--set", "delta=0.5").out
    assert "promises almost nothing" in page


def test_what_cannot_be_composed(run_dir, compose):
    assert "needs two runs" in compose(run_dir, code=2).err
    assert "does not exist" in compose(run_dir, run_dir / "nothing", code=2).err
    message = compose(run_dir, run_dir, "--set", "same_run", "--by", "nothing", code=2).err
    assert "nothing" in message
    message = compose(run_dir, run_dir, "--set", "same_run", "--set", "tuning_shape=0", code=2).err
    assert "tuning_shape=0 without tuning_mean" in message
    message = compose(
        run_dir, run_dir, "--set", "same_run", "--set", "neighbouring=replace-one", code=2
    ).err
    assert 'pass participation="known"' in message
