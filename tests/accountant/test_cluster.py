"""A Ray cluster of several nodes: one that dies changes no bit, and the page's file is one of Ray's."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from indpriv import NormLog, account

DELTA = 1e-6
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "past-one-machine.md"


@pytest.fixture
def cluster(monkeypatch):
    """A head that computes nothing, and two nodes with a core each."""
    ray = pytest.importorskip("ray", reason="the extra indpriv[ray] is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("RAY_worker_niceness", "0")
    memory = {"object_store_memory": 1 << 28}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    try:
        nodes = [found.add_node(num_cpus=1, **memory) for _ in range(2)]
        ray.init(address=found.address, log_to_driver=False)
        yield found, nodes
    finally:
        ray.shutdown()
        found.shutdown()


def computing():
    import ray

    return [
        node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")
    ]


@pytest.mark.slow
def test_a_node_that_dies_changes_no_bit(cluster):
    """With all its processes, by SIGKILL, while both nodes compute and hold what they read."""
    found, nodes = cluster
    n = 600_000  # three parts
    norms = np.random.default_rng(0).uniform(0, 1.3, (6, n)).astype(np.float32)
    log = NormLog.from_arrays(
        norms,
        np.arange(0, 60, 10),
        total_steps=60,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.02,
        rounding=0.01,
    )
    done = []

    def kill_after_the_first(examples, total):
        done.append(examples)
        if len(done) == 1:
            assert len(computing()) == 2
            found.remove_node(nodes.pop(), allow_graceful=False)

    table = account(log, delta=DELTA, engine="ray", progress=kill_after_the_first)
    assert done[0] < n
    assert len(computing()) == 1
    here = account(log, delta=DELTA)
    assert np.array_equal(table.epsilon, here.epsilon)
    assert np.array_equal(table.epsilon_lower, here.epsilon_lower)


def test_the_pages_cluster_file_is_one_of_rays():
    """Filled and checked as `ray up` does, before it asks Amazon for anything."""
    pytest.importorskip("ray", reason="the extra indpriv[ray] is not installed")
    yaml = pytest.importorskip("yaml", reason="the file is YAML")
    pytest.importorskip("jsonschema", reason="Ray checks the file by its JSON schema")
    from ray.autoscaler._private.util import prepare_config, validate_config

    written = re.search(r'```yaml title="cluster.yaml"\n(.*?)```', PAGE.read_text("utf-8"), re.S)
    config = prepare_config(yaml.safe_load(written[1]))
    validate_config(config)
    nodes = config["available_node_types"]
    assert nodes[config["head_node_type"]]["resources"] == {"CPU": 0}
    assert nodes["worker"]["min_workers"] == config["max_workers"] == 4
    for name, node in nodes.items():
        assert node["node_config"]["InstanceType"], name
    broken = {**config, "head_node": "head"}
    with pytest.raises(Exception, match="head_node"):
        validate_config(broken)
