import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
rng = np.random.default_rng(0)
targets = {node: rng.normal(size=20) for node in range(1, 41)}
app = ClientApp()


@app.train()
def train(message, context):
    start = message.content["arrays"]["weight"].numpy()
    weight = start + 0.1 * (targets[context.node_id] - start)
    content = {
        "arrays": ArrayRecord({"weight": Array(weight)}),
        "metrics": MetricRecord({"num-examples": 1}),
    }
    return Message(RecordDict(content), reply_to=message)


class InProcess(Grid):
    def send_and_receive(self, messages, *, timeout=None):
        return [app(message, self.context(message.metadata.dst_node_id)) for message in messages]

    def context(self, node):
        return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})

    def get_node_ids(self):
        return list(targets)

    def set_run(self, run): ...
    @property
    def run(self): ...
    def create_message(self, *_, **__): ...
    def push_messages(self, messages): ...
    def pull_messages(self, message_ids): ...


grid, arrays = InProcess(), ArrayRecord({"weight": Array(np.zeros(20))})
