"""Clients of Flower in this process: no server, no Ray."""

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

MODEL = {"weight": np.zeros((3, 2), np.float32), "bias": np.zeros(4, np.float32)}


def record(arrays):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(found):
    return {name: array.numpy() for name, array in found.items()}


TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # a server sets them


class Clients(Grid):
    """Nodes 11, 12, ... of which each adds its own vector to the model that it gets.

    sent: every update, by round; errors and silent: nodes that answer with an error or not at all.
    """

    def __init__(self, updates, counts=None, mods=None, errors=(), silent=()):
        self.updates = dict(zip(range(11, 11 + len(updates)), updates, strict=True))
        self.counts = dict(zip(self.updates, counts or [1] * len(updates), strict=True))
        self.errors, self.silent, self.rounds = errors, silent, []
        self.app = ClientApp(mods=mods)
        self.app.train()(self.train)

    def train(self, message, context):
        start = arrays_of(message.content["arrays"])
        update = self.updates[context.node_id]
        arrays = {name: start[name] + update[name] for name in start}
        metrics = MetricRecord({"num-examples": self.counts[context.node_id], "loss": 1.0})
        return Message(RecordDict({"arrays": record(arrays), "metrics": metrics}), reply_to=message)

    def send_and_receive(self, messages, *, timeout=None):
        replies, asked = [], []
        for message in messages:
            node = message.metadata.dst_node_id
            asked.append(node)
            if node in self.silent:
                continue
            if node in self.errors:
                replies.append(Message(Error(code=0, reason="no memory"), reply_to=message))
                continue
            context = Context(
                run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={}
            )
            replies.append(self.app(message, context))
        self.rounds.append(asked)
        return replies

    def get_node_ids(self):
        return list(self.updates)

    def set_run(self, run): ...
    @property
    def run(self): ...
    def create_message(self, *_, **__): ...
    def push_messages(self, messages): ...
    def pull_messages(self, message_ids): ...


def updates(n, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [
        {
            name: (scale * rng.normal(size=array.shape)).astype(np.float32)
            for name, array in MODEL.items()
        }
        for _ in range(n)
    ]


def norm(update):
    return np.sqrt(sum(np.square(array.astype(np.float64)).sum() for array in update.values()))


def protected(m, noise=1.0, clip=2.0, kind=DifferentialPrivacyServerSideFixedClipping, inner=None):
    inner = inner or FedAvg(
        fraction_train=0.0001, min_train_nodes=m, min_available_nodes=m, fraction_evaluate=0.0
    )
    return kind(inner, noise, clip, m)


def start(strategy, grid, rounds=1, model=MODEL):
    return strategy.start(grid, record(model), num_rounds=rounds, train_config=ConfigRecord())
