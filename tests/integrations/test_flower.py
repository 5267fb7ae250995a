"""Flower's own strategies, in this process: pip install 'indpriv[flower]'."""

import json
import random
from unittest import mock

import numpy as np
import pytest

import indpriv
from indpriv.audit.pipeline import audit
from indpriv.errors import InputError
from indpriv.integrations.flower import recorded
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.release.mechanisms import ReleasedNorm

pytest.importorskip("flwr", reason="pip install 'indpriv[flower]' to test against it")
pytestmark = pytest.mark.filterwarnings("ignore")

from flwr.clientapp.mod import fixedclipping_mod  # noqa: E402
from flwr.server import strategy as old  # noqa: E402
from flwr.serverapp import strategy as flower  # noqa: E402

from flower_clients import MODEL, Clients, arrays_of, norm, protected, start, updates  # noqa: E402

CLIENT_SIDE = flower.DifferentialPrivacyClientSideFixedClipping


def entries(run_dir):
    """step -> {client: norm over max_grad_norm} of a log, and its settings."""
    log = indpriv.NormLog.open(run_dir)
    found = log.batch_norms.read(0, log.n_examples)
    norms = np.minimum(log.levels.relative(found.norm), 1.0)
    steps = {}
    for position, step, value in zip(found.position, found.step, norms, strict=True):
        steps.setdefault(int(step), {})[str(log.example_ids[position])] = float(value)
    return steps, log.settings


def released(strategy, grid, seed=0, rounds=1):
    random.seed(seed)
    np.random.seed(seed)
    return arrays_of(start(strategy, grid, rounds).arrays)


def test_norms_and_participants_are_those_of_flower(tmp_path):
    grid = Clients(updates(9, scale=0.4))
    start(recorded(protected(4, noise=1.5), tmp_path / "run"), grid, rounds=5)
    steps, settings = entries(tmp_path / "run")
    asked = [nodes for nodes in grid.rounds if nodes]
    assert [sorted(map(int, steps[step])) for step in range(5)] == list(map(sorted, asked))
    for clients in steps.values():
        for client, found in clients.items():
            exact = min(norm(grid.updates[int(client)]), 2.0) / 2.0
            assert exact - 1e-6 <= found <= exact + 0.011
    assert settings.noise_multiplier == pytest.approx(1.5, rel=1e-6)
    np.testing.assert_array_equal(settings.sample_rate, 4 / 9)
    failed = [check.key for check in verify(open_run(tmp_path / "run")) if check.status == "failed"]
    assert failed == ["sampler"]  # secret participation needs coins


def test_recording_changes_no_model(tmp_path):
    plain = released(protected(3), Clients(updates(6)), rounds=3)
    other = released(recorded(protected(3), tmp_path / "run"), Clients(updates(6)), rounds=3)
    for name in MODEL:
        np.testing.assert_array_equal(plain[name], other[name])


@pytest.mark.parametrize("counts", [[1] * 5, [1, 2, 3, 4, 90]])
@pytest.mark.parametrize("silent", [(), (12, 13)])
def test_noise_is_over_what_one_client_can_move(counts, silent, tmp_path):
    """With Flower's noise left out, without any one client the model moves by at most 1 / mu."""
    here, noise = updates(5, seed=1, scale=3.0), 2.0
    grid = Clients(here, counts, silent=silent)
    start(recorded(protected(5, noise), tmp_path / "run"), grid)
    steps, settings = entries(tmp_path / "run")
    with mock.patch("numpy.random.normal", lambda mean, std, shape: np.zeros(shape)):
        whole = released(protected(5), Clients(here, counts, silent=silent))
        for number, count in enumerate(counts):
            node = 11 + number
            if node in silent:
                assert str(node) not in steps[0]
                continue
            still = [
                {name: np.zeros_like(array) for name, array in update.items()}
                if other == number
                else update
                for other, update in enumerate(here)
            ]
            # Flower divides by the length of an update, so that of a client that stays still is tiny.
            still[number]["bias"][0] = 1e-10
            without = released(protected(5), Clients(still, counts, silent=silent))
            moved = norm({name: whole[name] - without[name] for name in MODEL})
            mu = moved / (noise * 2.0 / 5)
            recorded_mu = steps[0][str(node)] / settings.noise_multiplier[0]
            assert mu <= recorded_mu * (1 + 1e-6)
            assert recorded_mu <= mu + 0.011 / settings.noise_multiplier[0], count  # rounding


@pytest.mark.parametrize(("silent", "claim"), [((), "exact"), ((12,), "estimate")])
def test_who_does_not_answer_may_tell(silent, claim, tmp_path):
    grid = Clients(updates(5), silent=silent)
    start(recorded(protected(5), tmp_path / "run"), grid, rounds=2)
    log = indpriv.NormLog.open(tmp_path / "run")
    assert indpriv.account(log, delta=1e-3, participation="known").claim == claim


def test_two_nodes_may_be_one_client(tmp_path):
    """Then a share of the nodes is not one of the clients."""
    names = {node: f"hospital {node % 3}" for node in range(11, 20)}
    strategy = recorded(
        protected(1),
        tmp_path / "run",
        client_ids=sorted({*names.values()}),
        client_of=lambda reply: names[reply.metadata.src_node_id],
    )
    start(strategy, Clients(updates(9)), rounds=3)
    log = indpriv.NormLog.open(tmp_path / "run")
    assert indpriv.account(log, delta=1e-3, participation="known").claim == "exact"
    np.testing.assert_allclose(log.settings.sample_rate, 1 / 3)


def test_errors_skip_a_round_and_so_does_the_log(tmp_path):
    grid = Clients(updates(4), errors=(11,))
    start(recorded(protected(2), tmp_path / "run"), grid, rounds=12)
    trained = [set(nodes) for nodes in grid.rounds if nodes and 11 not in nodes]
    steps, _ = entries(tmp_path / "run")
    assert 0 < len(trained) < 12
    assert [set(map(int, steps[step])) for step in sorted(steps)] == trained


def test_clients_that_clip_themselves(tmp_path):
    grid = Clients(updates(5, scale=3.0), mods=[fixedclipping_mod])
    start(recorded(protected(5, kind=CLIENT_SIDE), tmp_path / "run"), grid)
    steps, _ = entries(tmp_path / "run")
    assert min(steps[0].values()) >= 1
    with pytest.raises(InputError, match=r"averaged without clipping.*fixedclipping_mod"):
        start(
            recorded(protected(5, kind=CLIENT_SIDE), tmp_path / "other"),
            Clients(updates(5, scale=3.0)),
        )


def test_clients_may_have_names_of_their_own(tmp_path):
    names = {node: f"hospital {node}" for node in range(11, 17)}
    strategy = recorded(
        protected(3),
        tmp_path / "run",
        client_ids=[*names.values(), "never connected"],
        client_of=lambda reply: names[reply.metadata.src_node_id],
        run_info={"delta": 1e-2},
    )
    grid = Clients(updates(6))
    start(strategy, grid, rounds=2)
    log = indpriv.NormLog.open(tmp_path / "run")
    assert set(log.example_ids) == {*names.values(), "never connected"}
    assert any("or is not connected, may depend on their data" in one for one in log.known_caveats)
    summary = audit(tmp_path / "run", output_dir=tmp_path / "audit")
    assert summary.account.participation == "known"
    assert summary.guarantee.status == "declared"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["delta"] == 1e-2


class Other(flower.FedAvg):
    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, replies)


def patched(of):
    """With a method of its own, in the instance."""
    strategy = protected(2)
    names = [name for name in dir(strategy) if name.startswith("_add_noise_to_")]
    one, name = (strategy.strategy, "aggregate_train") if of else (strategy, names[0])
    setattr(one, name, lambda *found: found)
    return strategy


SERVER_SIDE = flower.DifferentialPrivacyServerSideFixedClipping
REFUSED = {
    "no DP": (lambda: flower.FedAvg(), "FedAvg is no strategy whose clipping and noise are known"),
    "old": (
        lambda: old.DifferentialPrivacyServerSideFixedClipping(old.FedAvg(), 1.0, 1.0, 2),
        "Use DifferentialPrivacyServerSideFixedClipping.*of flwr.serverapp.strategy",
    ),
    "adaptive": (
        lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(flower.FedAvg(), 1.0, 40),
        "depends on the data",
    ),
    "median": (lambda: protected(2, inner=flower.FedMedian()), "FedMedian does not publish"),
    "Krum": (lambda: protected(2, inner=flower.Krum()), "Krum does not publish"),
    "Adam": (lambda: protected(2, inner=flower.FedAdam()), "FedAdam does not publish"),
    "own": (lambda: protected(2, inner=Other()), "Other does not publish"),
    "own method": (lambda: patched("strategy"), "aggregate_train of this FedAvg is not that of"),
    "own noise": (lambda: patched(""), "_add_noise_to_.* of this DifferentialPrivacyServerSide"),
    "no noise": (
        lambda: protected(2, noise=0.0),
        "noise_multiplier=0.0 is not a finite number above 0",
    ),
    "not finite": (lambda: protected(2, noise=np.inf), "noise_multiplier"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_account_is_refused(case, tmp_path):
    make, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        recorded(make(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # A row of a client moves its clipped update by up to twice the clipping norm.
        ({"unit": "example"}, "unit= is no setting of `recorded`"),
        ({"sampler": "poisson"}, "sampler= is no setting of `recorded`"),
        ({"run_info": "delta"}, "run_info cannot be written as JSON"),
        ({"client_of": str}, "with client_ids=, all clients"),
        ({"client_ids": ["a"], "client_of": "node"}, "client_of='node' must be a function"),
    ],
)
def test_settings_that_a_strategy_does_not_leave_open(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        recorded(protected(2), tmp_path / "run", **options)


def test_a_strategy_that_is_changed_later_is_refused_then(tmp_path):
    strategy = recorded(protected(2), tmp_path / "run")
    vars(strategy).update(vars(patched("strategy")))
    with pytest.raises(InputError, match="aggregate_train of this FedAvg is not that of"):
        start(strategy, Clients(updates(3)))


def test_no_noise_is_made_by_clipping_at_0():
    with pytest.raises(ValueError, match="clipping norm"):
        protected(2, clip=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": MODEL["weight"] + np.nan}, "not finite"),
        ({"weight": np.zeros((1, 2), np.float32)}, "other arrays"),
        ({"bias": np.zeros(4, np.int64)}, "other arrays"),
    ],
)
def test_replies_that_clipping_does_not_bound(change, message, tmp_path):
    class Bad(Clients):
        def train(self, message, context):
            reply = super().train(message, context)
            from flower_clients import record

            arrays = {**arrays_of(reply.content["arrays"]), **change}
            reply.content["arrays"] = record(arrays)
            return reply

    with pytest.raises(InputError, match=message):
        start(recorded(protected(2), tmp_path / "run"), Bad(updates(2)))


def test_integers_in_a_model(tmp_path):
    model = {**MODEL, "num_batches_tracked": np.zeros((), np.int64)}
    with pytest.raises(InputError, match=r"'num_batches_tracked'.*int64"):
        start(recorded(protected(2), tmp_path / "run"), Clients(updates(2)), model=model)


def test_a_clipping_norm_that_was_drawn_from_the_data(tmp_path):
    norm = ReleasedNorm(2.0)
    norm.clipping_norm_epsilon = 0.4
    with pytest.raises(InputError, match="rounds have no account of its cost"):
        start(recorded(protected(2, clip=norm), tmp_path / "run"), Clients(updates(3)))


def test_weights_that_make_no_average(tmp_path):
    with pytest.raises(InputError, match="make no average"):
        start(recorded(protected(3), tmp_path / "run"), Clients(updates(3), counts=[5, -1, 1]))


def test_a_node_that_was_not_named(tmp_path):
    with pytest.raises(InputError, match="not among the 2 client_ids"):
        start(
            recorded(protected(3), tmp_path / "run", client_ids=["11", "12"]), Clients(updates(3))
        )
    with pytest.raises(InputError, match="with client_ids=, all clients that may take part"):
        recorded(protected(3), tmp_path / "run", client_of=str)
