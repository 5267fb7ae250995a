import io
import subprocess
import sys
import types

import numpy as np
import pytest

import indpriv
from indpriv import InputError, NormLog
from indpriv._formatting import format_epsilon
from indpriv.audit import audit
from indpriv.integrations.callbacks import STATISTICS, metrics_of, print_epsilons, send
from indpriv.recording import Recorder
from runs import PER_EXAMPLE, make_run

PUBLIC = {
    "indpriv/worst_case_epsilon",
    "indpriv/coverage",
    "indpriv/steps",
    "indpriv/norm_pass_seconds",
}


class Tracker:
    def __init__(self):
        self.sent = []

    def log(self, metrics):
        self.sent.append(metrics)


def trained(run_dir, after_step):
    run = make_run()
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, every=2)
    with recorder.attach(run.model, run.optimizer, run.loader):
        after_step(recorder, 0)
        for number, batch in enumerate(run.loader, 1):
            run.step(*batch)
            after_step(recorder, number)


def test_a_tracker_gets_public_figures_only_unless_others_are_asked_for_by_name(tmp_path):
    tracker = Tracker()

    def after_step(recorder, step):
        send(
            tracker,
            metrics_of(recorder, delta=1e-5, also=("epsilon_median",) if step == 10 else ()),
            step,
        )

    trained(tmp_path / "run", after_step)
    assert tracker.sent[0] == {}  # nothing before the first step
    assert {frozenset(sent) for sent in tracker.sent[1:10]} == {frozenset(PUBLIC)}
    assert set(tracker.sent[10]) == PUBLIC | {"indpriv/epsilon_median"}
    epsilons = [sent["indpriv/worst_case_epsilon"] for sent in tracker.sent[1:]]
    assert epsilons == sorted(epsilons)
    table = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5)
    assert epsilons[-1] == table.worst_case_epsilon
    assert tracker.sent[-1]["indpriv/coverage"] == 0.5
    assert tracker.sent[-1]["indpriv/steps"] == 10


@pytest.mark.parametrize("name", ["epsilon", "norms", "example_17"])
def test_values_of_single_examples_are_never_sent(name, tmp_path):
    def after_step(recorder, step):
        with pytest.raises(InputError, match="Values of single examples are never sent"):
            metrics_of(recorder, delta=1e-5, also=(name,))

    trained(tmp_path / "run", after_step)


def test_every_statistic_is_one_number_of_the_table(tmp_path):
    def after_step(recorder, step):
        if step == 10:
            found.update(metrics_of(recorder, delta=1e-5, also=tuple(STATISTICS)))

    found: dict[str, float] = {}
    trained(tmp_path / "run", after_step)
    table = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5)
    assert found["indpriv/epsilon_max"] == table.epsilon.max()
    assert found["indpriv/epsilon_mean"] == table.epsilon.mean()
    assert all(isinstance(value, float) for value in found.values())


@pytest.mark.parametrize(
    "said",
    [{"participation": "known"}, {"account": {"participation": "known"}},
     {"account": {"neighbouring": "replace_one"}}],
)  # fmt: skip
def test_the_guarantee_is_that_of_the_account_that_the_run_declares(said, tmp_path):
    run, shown, found = make_run(), io.StringIO(), {}
    recorder = Recorder(
        tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1, run_info=said
    )
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(1)
        found |= metrics_of(recorder, delta=1e-3)
        print_epsilons(recorder, delta=1e-3, file=shown)
    audited = audit(tmp_path / "run", tmp_path / "audit", delta=1e-3).guarantee
    assert found["indpriv/worst_case_epsilon"] == audited.worst_case_epsilon
    assert f"worst case {format_epsilon(audited.worst_case_epsilon)} is" in shown.getvalue()
    secret = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-3).worst_case_epsilon
    assert audited.worst_case_epsilon > 1.2 * secret


def test_95_per_cent_have_at_most_what_is_called_so():
    table = types.SimpleNamespace(epsilon=np.array([1.0] * 9 + [100.0]))
    assert STATISTICS["epsilon_p95"](table) == 100.0  # on a line between both it is 55.45


def test_the_terminal_shows_what_an_epsilon_must_never_be_without(tmp_path):
    shown = io.StringIO()
    trained(
        tmp_path / "run", lambda recorder, step: print_epsilons(recorder, delta=1e-5, file=shown)
    )
    lines = shown.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("step 10: worst case ")
    for word in (
        "guarantee",
        "estimate",
        "sensitive",
        "delta 1e-5",
        "zero out the contribution of one example",
        "Poisson",
        "RDP accountant",
    ):
        assert word in lines[-1]


def test_figures_while_training_have_the_relation_of_the_audit(tmp_path):
    """Where updates tell the number of examples, add/remove would promise what does not hold."""
    shown = io.StringIO()
    trained(tmp_path / "run", lambda recorder, step: None)
    recorder = types.SimpleNamespace(run_dir=tmp_path / "run", state_dict=lambda: {"step": 10})
    print_epsilons(recorder, delta=1e-5, file=shown)
    found = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5)
    assert found.account.neighbouring == "zero_out"
    assert found.account.describe() in shown.getvalue()


def test_other_kinds_of_trackers():
    class Scalars:
        def add_scalar(self, name, value, step):
            got.append((name, value, step))

    class Logger:
        def log_metrics(self, metrics, step):
            got.append((metrics, step))

    got: list[object] = []
    send(Scalars(), {"a": 1.0, "b": 2.0}, 3)
    send(Logger(), {"a": 1.0}, 3)
    assert got == [("a", 1.0, 3), ("b", 2.0, 3), ({"a": 1.0}, 3)]
    with pytest.raises(InputError, match="object has neither log"):
        send(object(), {}, 0)


def test_nothing_of_it_is_imported_with_the_package():
    code = (
        "import sys, indpriv, indpriv.integrations, indpriv.integrations.callbacks\n"
        "assert not {'transformers', 'lightning', 'wandb', 'tensorboard', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
