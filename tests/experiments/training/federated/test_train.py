"""Federated reference runs: the same as DP-SGD where they must be, logged as they were."""

import os
import signal
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import indpriv
from audits.training.checkpoints import checkpoint_path, load_checkpoint
from audits.training.commands import _left_over
from audits.training.config import AuditConfig, FederatedConfig
from audits.training.datasets.base import Dataset, Split
from audits.training.federated.rounds import Clients, Federation
from audits.training.federated.train import train_federated
from audits.training.models import first_parameters, mlp
from audits.training.randomness import Randomness, generator
from indpriv import InputError, NormLog
from indpriv._files import read_json
from indpriv.accountant.laws import gaussian_epsilons
from indpriv.audit import audit
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify

DELTA = 1e-4
FEDERATED = {
    "clients": 30,
    "rounds": 4,
    "protect": "client",
    "client_rate": 0.3,
    "local_learning_rate": 0.2,
}


def config(training=None, **federated):
    settings = {"max_grad_norm": 0.1, "noise_multiplier": 1.5, "delta": DELTA} | (training or {})
    return AuditConfig.from_dict(
        {
            "name": "toy",
            "data": {"dataset": "digits"},
            "model": {"architecture": "mlp", "hidden": [4]},
            "training": settings,
            "federated": FEDERATED | federated,
            "recording": {"every": 1, "rounding": 0},
            "checkpoints": {"every": 2},
        }
    )


def toy(n=120, n_test=30):
    rng = np.random.default_rng(0)
    splits = []
    for size in (n, n_test):
        targets = np.arange(size) % 3
        inputs = rng.normal(size=(size, 6)) + 1.5 * targets[:, None]
        splits.append(Split(inputs.astype(np.float32), targets.astype(np.int64)))
    return Dataset("toy", *splits, tuple("abc"), "none", "made here")


def federation(data, seed=7, **changes):
    """Clients of one row each."""
    settings = FederatedConfig(**{**FEDERATED, "clients": len(data.train), **changes})
    rows = [np.array([row]) for row in range(len(data.train))]
    randomness = Randomness.from_seed(seed)
    torch.manual_seed(0)
    module = mlp(6, (4,), 3, "tanh")
    clients = Clients(np.arange(len(rows)), rows, np.arange(len(rows)))
    return Federation(settings, "flat", clients, module, data.train, randomness), module, randomness


def test_clients_of_one_row_and_one_local_step_are_dp_sgd():
    """With the same coins and the same noise, step by step."""
    data, rate, clip, noise_multiplier = toy(), 0.2, 0.3, 1.5
    run, module, randomness = federation(data, server_learning_rate=2.0)
    coins, noise = generator(randomness.sampling), generator(randomness.noise)
    inputs, targets = torch.from_numpy(data.train.inputs), torch.from_numpy(data.train.targets)
    for _ in range(5):
        taken = torch.rand(120, generator=coins, dtype=torch.float64) < 0.3
        total = torch.zeros_like(run.parameters)
        for row in torch.nonzero(taken)[:, 0].tolist():  # DP-SGD clips gradients at clip / rate
            module.zero_grad()
            nn.functional.cross_entropy(module(inputs[[row]]), targets[[row]]).backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
            total += gradient * min(1, clip / rate / float(gradient.norm()))
        total -= noise_multiplier * clip / rate * torch.randn(len(total), generator=noise)
        start = parameters_to_vector(module.parameters()).detach()
        expected = start - 2.0 * rate * total / (0.3 * 120)
        run.round(StepSetting(noise_multiplier, clip, 0.3), None)
        torch.testing.assert_close(run.parameters, expected, rtol=1e-5, atol=1e-6)
        run.write_parameters(module)


PLACES = [
    ("client", "server", 1.0),
    ("client", "clients", 1.0),
    ("client", "clients", 0.5),
    ("client", "clients_shared", 1.0),
    ("client", "clients_shared", 0.5),
    ("row", "batch", 1.0),
    ("row", "row", 1.0),
]


@pytest.mark.parametrize(("protect", "place", "share"), PLACES)
def test_the_log_holds_the_noise_that_was_added(protect, place, share, tmp_path):
    """Against a formula written by hand: 9 of 30 clients, batches of 2 rows."""
    run = train_federated(
        config(
            protect=protect,
            noise_at=place,
            share=share,
            sampler="fixed_size",
            local_steps=2,
            local_batch_size=2,
        ),
        tmp_path / "r",
        dataset=toy(),
        seed=1,
    )
    log = NormLog.open(tmp_path / "r")
    expected = {
        ("server", 1.0): 1.5,
        ("clients", 1.0): 1.5 * 3,
        ("clients", 0.5): 1.5,
        ("clients_shared", 1.0): 1.5,
        ("clients_shared", 0.5): 1.5 / 3,
        ("batch", 1.0): 1.5,
        ("row", 1.0): 1.5 * 2**0.5,
    }[place, share]
    assert log.settings.noise_multiplier == pytest.approx(expected)
    steps, n = (8, 120) if protect == "row" else (4, 30)
    assert (log.total_steps, log.n_examples) == (steps, n)
    entries = log.batch_norms.read(0, n)
    assert np.bincount(entries.step).tolist() == [18 if protect == "row" else 9] * steps
    record = read_json(tmp_path / "r" / "run.json")
    table = indpriv.account(log, delta=DELTA, participation="known")
    assert record["guarantee"]["epsilon"] == table.worst_case_epsilon == run.worst_case_epsilon
    curve = pd.read_parquet(tmp_path / "r" / "curve.parquet")
    assert curve["step"].tolist() == [0, 2, 4]
    assert curve["worst_case_epsilon"].iloc[-1] == pytest.approx(run.worst_case_epsilon, rel=1e-6)
    took_part = [check for check in verify(open_run(tmp_path / "r")) if check.key == "took_part"]
    assert [check.status for check in took_part] == ["passed"]
    if log.sampler == "by_client":
        with pytest.raises(InputError, match="coins amplify nothing"):
            indpriv.account(log, delta=DELTA, participation="secret")


@pytest.mark.parametrize("place", ["server", "clients", "clients_shared"])
def test_noise_of_clients_has_the_stated_size(place):
    """Where clients do not move, the model moves by the noise over the planned number."""
    run, _, _ = federation(
        toy(400, 30), client_rate=0.25, noise_at=place, local_learning_rate=1e-12
    )
    start, came = run.parameters.clone(), []
    recorder = type("Seen", (), {"round": lambda _, who, *__, **___: came.append(len(who))})()
    rounds = 60
    for _ in range(rounds):
        run.round(StepSetting(2.0, 0.5, 0.25), recorder)
    moved = float((run.parameters - start).square().mean())
    on_sum = {"server": rounds, "clients": sum(came), "clients_shared": sum(came) / 100}[place]
    assert moved == pytest.approx(on_sum / 100**2, rel=0.5)  # of 43 parameters


def test_norms_of_updates_are_those_before_clipping(tmp_path):
    """One round of all clients: each update is the gradient of its own rows."""
    data = toy()
    train_federated(
        config(client_rate=1.0, rounds=1, training={"max_grad_norm": 1e-3}),
        tmp_path / "r",
        dataset=data,
        seed=1,
    )
    log = NormLog.open(tmp_path / "r")
    examples = pd.read_parquet(tmp_path / "r" / "examples.parquet")
    train = examples[examples["split"] == "train"]
    first = first_parameters(config().model, (6,), 3, Randomness.from_seed(1).first_parameters)
    for client, norm in enumerate(log.batch_norms.read(0, 30).norm.tolist()):
        rows = train["example_id"][train["unit_id"] == client].to_numpy()
        first.zero_grad()
        inputs, targets = (
            torch.from_numpy(part[rows]) for part in (data.train.inputs, data.train.targets)
        )
        nn.functional.cross_entropy(first(inputs), targets).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in first.parameters()])
        assert norm == pytest.approx(0.2 * float(gradient.norm()), rel=1e-4)


def test_nobody_is_protected(tmp_path):
    run = train_federated(
        config(protect="nobody", rounds=40, local_learning_rate=1.0),
        tmp_path / "r",
        dataset=toy(),
        seed=0,
    )
    assert run.worst_case_epsilon == np.inf
    assert run.test_accuracy > 0.6
    assert not (tmp_path / "r" / "journal.jsonl").exists()
    assert read_json(tmp_path / "r" / "run.json")["guarantee"]["claim"].startswith("none")


@pytest.mark.parametrize("protect", ["client", "row"])
def test_a_run_is_audited(protect, tmp_path):
    train_federated(config(protect=protect, partition="shards"), tmp_path / "r", dataset=toy())
    summary = audit(tmp_path / "r", tmp_path / "report", participation="known")
    assert summary.guarantee.status == "declared"
    unit = {"client": "client", "row": "example"}[protect]
    assert (
        f"zero out the contribution of one {unit}, participation known"
        in summary.guarantee.statement
    )
    if protect == "row":  # the same log, of clients
        clients = audit(tmp_path / "r", tmp_path / "clients", unit_column="client")
        assert clients.guarantee.worst_case_epsilon > 2 * summary.guarantee.worst_case_epsilon
        assert "client of at most 4 rows" in clients.guarantee.statement


def test_rows_left_over_are_told(tmp_path):
    train_federated(config(clients=50), tmp_path / "r", dataset=toy(), seed=1)
    training = read_json(tmp_path / "r" / "run.json")["training"]
    assert (training["rows_per_client"], training["rows_left_over"]) == ([2, 2], 20)
    assert "20 rows could not be dealt evenly" in _left_over(tmp_path / "r")
    assert NormLog.open(tmp_path / "r").n_examples == 50


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_leaves_a_usable_run(tmp_path):
    def interrupt(stage, done, total):
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="3 of 4 rounds"):
        train_federated(config(), tmp_path / "r", dataset=toy(), progress=interrupt)
    assert read_json(tmp_path / "r" / "run.json")["status"] == "interrupted"
    log = NormLog.open(tmp_path / "r")
    assert log.total_steps == 3
    assert pd.read_parquet(tmp_path / "r" / "curve.parquet")["step"].tolist() == [0, 2, 3]
    assert len(indpriv.ExampleTable.from_parquet(tmp_path / "r" / "examples.parquet").train) == 120


class CrashError(Exception):
    pass


def crashed_after(rounds, settings, folder, **options):
    """A run that ends without warning, as by kill -9: nothing is saved."""

    def crash(stage, done, total):
        if done == rounds:
            raise CrashError

    with pytest.raises(CrashError):
        train_federated(settings, folder, progress=crash, **options)


@pytest.mark.parametrize("protect", ["client", "row"])
def test_a_resumed_run_is_one_run(protect, tmp_path):
    """Crashed after its fifth round, one after a checkpoint: it is void, and taken again."""
    plan = config(protect=protect, rounds=8, local_steps=2, local_batch_size=2, copies=2)
    crashed_after(5, plan, tmp_path / "r", dataset=toy())
    per_round = 2 if protect == "row" else 1
    assert NormLog.open(tmp_path / "r").total_steps == 5 * per_round
    run = train_federated(plan, tmp_path / "r", dataset=toy(), resume=True)
    assert run.steps == 8
    log, record = NormLog.open(tmp_path / "r"), read_json(tmp_path / "r" / "run.json")
    assert log.total_steps == 8 * per_round
    assert record["status"] == "finished"
    curve = pd.read_parquet(tmp_path / "r" / "curve.parquet")
    assert curve["step"].tolist() == [0, 2, 4, 6, 8]
    assert curve["seconds"].is_monotonic_increasing
    known = indpriv.account(log, delta=DELTA, participation="known")
    if protect == "row":
        assert record["guarantee"]["epsilon"] == known.worst_case_epsilon
        assert curve["worst_case_epsilon"].iloc[-1] == pytest.approx(
            known.worst_case_epsilon, rel=1e-6
        )
    failed = {check.key for check in verify(open_run(tmp_path / "r")) if check.status == "failed"}
    coins = {"sampler"} if protect == "row" else set()  # rows of a client share its coin
    assert failed == {"no_voided_steps"} | coins
    with pytest.raises(InputError, match="is finished"):
        train_federated(plan, tmp_path / "r", dataset=toy(), resume=True)


def test_a_resumed_run_goes_on_from_its_model_and_its_clients(tmp_path):
    """All rows of all clients in one step: gradient descent, whatever the coins."""
    plan = config(protect="nobody", client_rate=1.0, local_learning_rate=0.5)
    crashed_after(3, plan, tmp_path / "r", dataset=toy())
    run = train_federated(plan, tmp_path / "r", dataset=toy(), resume=True)
    data = toy().train
    module = mlp(6, (4,), 3, "tanh")
    found = load_checkpoint(checkpoint_path(tmp_path / "r", 2)).model_state_dict
    module.load_state_dict(found)
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = module(torch.from_numpy(data.inputs))
        nn.functional.cross_entropy(outputs, torch.from_numpy(data.targets)).backward()
        optimizer.step()
    ours, theirs = (parameters_to_vector(each.parameters()) for each in (run.module, module))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_and_resume_leave_no_void_round(tmp_path):
    def interrupt(stage, done, total):
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_federated(config(), tmp_path / "r", dataset=toy(), progress=interrupt)
    train_federated(config(), tmp_path / "r", dataset=toy(), resume=True)
    assert NormLog.open(tmp_path / "r").total_steps == 4
    checks = verify(open_run(tmp_path / "r"))
    assert "failed" not in {check.status for check in checks}


def test_what_cannot_be_resumed(tmp_path):
    with pytest.raises(InputError, match="nothing to resume"):
        train_federated(config(), tmp_path / "none", dataset=toy(), resume=True)
    crashed_after(3, config(), tmp_path / "seeded", dataset=toy(), seed=1)
    with pytest.raises(InputError, match="is seeded"):
        train_federated(config(), tmp_path / "seeded", dataset=toy(), resume=True)
    crashed_after(3, config(), tmp_path / "r", dataset=toy())
    with pytest.raises(InputError, match="other settings"):
        train_federated(config(rounds=5), tmp_path / "r", dataset=toy(), resume=True)
    (tmp_path / "r" / "progress.npz").unlink()
    with pytest.raises(InputError, match="before its first checkpoint"):
        train_federated(config(), tmp_path / "r", dataset=toy(), resume=True)


def test_copies_of_a_row_are_one_unit(tmp_path):
    """All clients in every round, all rows of each: every original is there with both copies."""
    train_federated(
        config(protect="row", copies=2, client_rate=1.0, rounds=3), tmp_path / "r", dataset=toy()
    )
    log = NormLog.open(tmp_path / "r")
    assert (log.unit, log.n_examples, len(np.unique(log.unit_ids))) == ("row", 240, 120)
    table = indpriv.account(log, delta=DELTA, participation="known")
    assert len(table) == 120
    alone = gaussian_epsilons(np.array([2 * 3**0.5 / 1.5]), DELTA)[1]
    assert table.worst_case_epsilon == pytest.approx(float(alone[0]), rel=1e-6)
    summary = audit(tmp_path / "r", tmp_path / "report", participation="known")
    assert "zero out the contribution of one row of at most 2 rows" in summary.guarantee.statement
    assert not summary.views


def test_ten_thousand_clients_of_one_row(tmp_path):
    run = train_federated(
        config(clients=10_000, rounds=2, client_rate=0.1, training={"delta": 1e-6}),
        tmp_path / "r",
        dataset=toy(10_000),
        seed=0,
    )
    assert run.steps == 2
    log = NormLog.open(tmp_path / "r")
    assert abs(len(log.batch_norms.read(0, 10_000)) - 2000) < 300


def test_a_seeded_run_repeats(tmp_path):
    runs = [
        train_federated(config(protect="row"), tmp_path / name, dataset=toy(), seed=5)
        for name in "ab"
    ]
    ours, theirs = (parameters_to_vector(run.module.parameters()) for run in runs)
    assert torch.equal(ours, theirs)
    assert NormLog.open(tmp_path / "a").caveats


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"epochs": 3}}, r"\[training\] epochs does not go with \[federated\]"),
        ({"training": {"momentum": 0.9}}, r"\[training\] momentum does not go"),
        ({"training": {"clipping": "quantile"}}, 'clipping = "quantile" does not go'),
        ({"recording": {"every": 5}}, "of a federated run is every = 1"),
        ({"attacks": {"white_box": 5}}, r"\[attacks\] .* do not go"),
        ({"federated": {"clients": 0}}, "clients"),
    ],
)
def test_what_does_not_go_with_rounds(changes, message):
    tables = config().to_dict()
    for table, values in changes.items():
        tables[table] = tables.get(table, {}) | values
    with pytest.raises(InputError, match=message):
        AuditConfig.from_dict(tables)


def test_other_commands_refuse_federated_audits():
    with pytest.raises(InputError, match="which indpriv lint does not know"):
        config().check_central("indpriv lint")
    central = replace(config(), federated=None)
    with pytest.raises(InputError, match=r"no table \[federated\]"):
        train_federated(central, "runs/never", dataset=toy())
