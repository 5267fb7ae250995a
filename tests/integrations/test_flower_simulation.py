"""Flower's simulation on Ray, recorded: pip install 'indpriv[flower]' 'ray>=2.40'."""

import numpy as np
import pytest

import indpriv
from indpriv.integrations.flower import recorded

pytest.importorskip("flwr", reason="pip install 'indpriv[flower]' to test against it")
pytest.importorskip("ray", reason="pip install 'ray>=2.40' to simulate clients on it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from flwr.app import Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

from flower_clients import MODEL, arrays_of, norm, protected, record, start  # noqa: E402

CLIENTS, PER_ROUND, ROUNDS, CLIP = 6, 3, 3, 2.0


def update_of(partition):
    """What a client adds to the model; longer for a higher number."""
    rng = np.random.default_rng(partition)
    return {
        name: (0.2 * (partition + 1) * rng.normal(size=array.shape)).astype(np.float32)
        for name, array in MODEL.items()
    }


def test_the_log_of_a_simulation_holds_the_norms_of_its_clients(tmp_path):
    clients, server = ClientApp(), ServerApp()

    @clients.train()
    def train(message, context):
        update = update_of(context.node_config["partition-id"])
        begun = arrays_of(message.content["arrays"])
        arrays = record({name: begun[name] + update[name] for name in begun})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    @server.main()
    def main(grid, context):
        strategy = protected(PER_ROUND, noise=1.5, clip=CLIP)
        start(recorded(strategy, tmp_path / "run"), grid, rounds=ROUNDS)

    run_simulation(
        server_app=server,
        client_app=clients,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    log = indpriv.NormLog.open(tmp_path / "run")
    assert (log.total_steps, log.n_examples) == (ROUNDS, CLIENTS)
    found = log.batch_norms.read(0, log.n_examples)
    assert np.bincount(found.step).tolist() == [PER_ROUND] * ROUNDS
    exact = np.minimum([norm(update_of(number)) for number in range(CLIENTS)], CLIP) / CLIP
    seen = np.minimum(log.levels.relative(found.norm), 1.0)
    gaps = np.abs(seen[:, None] - exact).min(axis=1)
    assert gaps.max() <= 0.011  # norms are rounded up by a hundredth
    table = indpriv.account(log, delta=1e-3, participation="known")
    took_part = np.isin(np.arange(CLIENTS), found.position)
    np.testing.assert_array_equal(table.epsilon > 0, took_part)
    assert table.epsilon.max() <= table.worst_case_epsilon
