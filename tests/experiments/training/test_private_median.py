"""`max_grad_norm = "median"`: from the audit file to every statement about the run."""

import os
import signal
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from torch import nn
from typer.testing import CliRunner

from audits.__main__ import app
from audits.training.commands import filter_for
from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.dp_sgd import train
from audits.training.models import LOSSES, build_model, first_parameters
from audits.training.planned import facts_of_plan
from audits.training.private_setting import make_private
from audits.training.randomness import Randomness
from audits.training.run_record import with_drawn_norm
from audits.training.step_plan import planned_steps, with_noise
from audits.training.tensors import tensor_set, whole_batch
from indpriv import NormLog, account
from indpriv._files import read_json
from indpriv.accountant import PrivacyFilter
from indpriv.analysis.lint import facts_of_run
from indpriv.analysis.recorded_run import Declared
from indpriv.audit import audit
from indpriv.cli import app as indpriv_app
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import read_run_json
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder, StepOptions, per_example_gradient_norms
from indpriv.recording.checkpoints.replay import AuditSpec, replay
from indpriv.release.mechanisms import ReleasedNorm, norm_grid, private_median_norm
from indpriv.round_recorder import RoundRecorder
from runs import PER_EXAMPLE, blobs, make_run

COST, DELTA = 0.25, 1e-4


def config(tables=None, **training):
    settings = {
        "epochs": 2,
        "batch_size": 50,
        "learning_rate": 0.2,
        "max_grad_norm": "median",
        "median_epsilon": COST,
        "delta": DELTA,
        "noise_multiplier": 1.2,
    }
    found = {
        "name": "small",
        "data": {"dataset": "breast_cancer"},
        "model": {"architecture": "mlp", "hidden": [8]},
        "training": {k: v for k, v in (settings | training).items() if v is not None},
        "recording": {"every": 1},
        "checkpoints": {"every": 4},
    }
    return AuditConfig.from_dict(found | (tables or {}))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An unseeded run, and its audit by adding or removing one example."""
    folder = tmp_path_factory.mktemp("median")
    trained = train(config(), folder / "run")
    summary = audit(folder / "run", folder / "audit", neighbouring="add_remove")
    return trained, summary, folder / "audit"


def command(*arguments):
    commands = app if arguments[0] in ("train", "lint") else indpriv_app
    found = CliRunner().invoke(commands, [str(part) for part in arguments])
    return found.exit_code, " ".join(found.output.split()), found.exception


REFUSED = {
    "no epsilon": ({"median_epsilon": None}, 'max_grad_norm = "median" lacks median_epsilon'),
    "no median": ({"max_grad_norm": 1.0}, 'median_epsilon is for max_grad_norm = "median" only'),
    "nothing": ({"median_epsilon": 0.0}, "median_epsilon = 0.0 is not accepted; it takes a number"),
    "another word": ({"max_grad_norm": "mean"}, "max_grad_norm = 'mean' is not accepted; .*median"),
    "quantile": ({"clipping": "quantile"}, '"median" does not go with clipping = "quantile"'),
    "adaclip": ({"clipping": "adaclip"}, '"median" does not go with clipping = "adaclip"'),
    "noise_std": (
        {"noise_std": 1.0, "noise_multiplier": None},
        '"median" does not go with noise_std',
    ),
    "largest norm": (
        {"noise_scale": "largest_norm", "allow_no_privacy": True},
        '"median" does not go with noise_scale = "largest_norm"',
    ),
    "target": (
        {"target_epsilon": COST, "noise_multiplier": None},
        "target_epsilon = 0.25 includes median_epsilon = 0.25 and leaves nothing",
    ),
    "stop": ({"stop_at_epsilon": 0.1}, "stop_at_epsilon = 0.1 includes median_epsilon = 0.25"),
    "filter": ({"filter_epsilon": 0.2}, "filter_epsilon = 0.2 includes median_epsilon = 0.25"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(InputError, match=f"\\[training\\] .*{message}"):
        config(**changes)


def test_units_and_federated_runs_are_refused():
    rows = {"data": {"dataset": "utkface_gender", "unit_column": "race"}}
    with pytest.raises(InputError, match=r'"median" is of rows, and .* unit_column'):
        config(rows)
    federated = {
        "name": "small",
        "data": {"dataset": "digits"},
        "model": {"architecture": "mlp"},
        "training": {"max_grad_norm": "median", "median_epsilon": 0.1, "delta": 1e-4,
                     "noise_multiplier": 1.0},
        "recording": {"every": 1},
        "checkpoints": {"every": 1},
        "federated": {"clients": 4, "rounds": 2, "local_steps": 1, "learning_rate": 0.1},
    }  # fmt: skip
    with pytest.raises(InputError, match=r'"median" does not go with \[federated\]|federated'):
        AuditConfig.from_dict(federated)


@pytest.mark.parametrize(("data", "epsilon"), [("breast_cancer", 1.0), ("adult", 0.1)])
def test_the_median_is_near_that_of_the_norms_at_the_start(data, epsilon):
    """Its rank is off by 1 / epsilon people on average; candidates are 0.5 % apart."""
    plan = config({"data": {"dataset": data}}, median_epsilon=epsilon, delta=1e-6)
    dataset = load_dataset(data)
    randomness = Randomness.from_seed(None)
    private = make_private(plan, dataset, randomness, "cpu")
    module = first_parameters(
        plan.model, dataset.input_shape, dataset.n_classes, randomness.first_parameters
    )
    inputs, targets = tensor_set(dataset.train).tensors
    loss_fn = LOSSES["cross_entropy"](reduction="none")
    norms = per_example_gradient_norms(module, loss_fn, inputs, targets).numpy()
    found = private.planned.max_grad_norm[0]
    assert np.ptp(private.planned.max_grad_norm) == 0
    assert found in norm_grid()
    # 30 times the average error in rank, which is met but for a chance of e^-30, and two candidates
    shares = 0.5 + np.array([-1, 1]) * 30 / epsilon / len(norms)
    low, high = np.quantile(norms, shares) * [0.99, 1.01]
    assert low <= found <= high
    assert (low, high) == pytest.approx((np.median(norms),) * 2, rel=0.25)
    assert private.clipping_norm_epsilon == epsilon
    assert private.settings.median_epsilon is None


def test_every_statement_of_the_run_contains_the_cost(run):
    trained, summary, audit_dir = run
    record = read_json(trained.run_dir / "run.json")
    norm = record["training"]["max_grad_norm"]
    log = NormLog.open(trained.run_dir)
    assert log.clipping_norm_epsilon == COST
    assert set(log.settings.max_grad_norm) == {norm}
    assert record["config"]["training"]["max_grad_norm"] == "median"
    steps = account(replace(log, clipping_norm_epsilon=0.0), delta=DELTA)
    table = account(log, delta=DELTA)
    # the account
    assert table.worst_case_epsilon == steps.worst_case_epsilon + COST
    np.testing.assert_array_equal(table.epsilon, steps.epsilon + COST)
    # training's own, by Opacus, whose orders are coarser
    assert trained.worst_case_epsilon == record["guarantee"]["epsilon"]
    assert table.worst_case_epsilon <= trained.worst_case_epsilon < table.worst_case_epsilon * 1.2
    assert record["guarantee"]["clipping_norm_epsilon"] == COST
    assert "clipping norm" in record["on_trust"]
    curve = pd.read_parquet(trained.run_dir / "curve.parquet")
    assert curve["worst_case_epsilon"].iloc[0] == COST
    assert curve["worst_case_epsilon"].iloc[-1] == pytest.approx(trained.worst_case_epsilon)
    # the audit
    content = read_json(audit_dir / "audit.json")
    assert content["guarantee"]["worst_case_epsilon"] == table.worst_case_epsilon
    assert content["guarantee"]["status"] == "supported"
    assert content["account"]["clipping_norm_epsilon"] == COST
    assert "including epsilon 0.25 for a private clipping norm" in content["guarantee"]["statement"]
    assert content["guarantee"]["membership"] is not None
    check = next(one for one in content["checks"] if one["key"] == "private_clipping_norm")
    assert (check["status"], check["bears_on"]) == ("passed", "worst_case")
    written = pd.read_parquet(audit_dir / "epsilon.parquet")
    np.testing.assert_array_equal(written["epsilon"], table.epsilon)
    assert summary.individual.max <= table.worst_case_epsilon
    report = " ".join((audit_dir / "report.html").read_text(encoding="utf-8").split())
    assert "including epsilon 0.25 for a private clipping norm" in report
    assert "a private release of these data, of epsilon 0.25 for a row" in report


def test_what_is_shown_to_others_contains_it_too(run):
    _, summary, audit_dir = run
    worst = summary.guarantee.worst_case_epsilon
    assert command("publish", "statement", audit_dir, "--example", "3")[0] == 0
    text = " ".join((audit_dir / "statements" / "example-3.txt").read_text("utf-8").split())
    assert "including epsilon 0.25 for a private clipping norm" in text
    assert "drawn from the data of all people by a private method" in text
    assert command("publish", "card", audit_dir)[0] == 0
    card = (audit_dir / "shareable" / "model-card.md").read_text("utf-8")
    assert "including epsilon 0.25 for a private clipping norm" in card
    assert "a private release of these data" in card
    code, output, _ = command(
        "publish", "quantiles", audit_dir, "--quantiles", "0.5", "--epsilon", "0.5"
    )
    assert code == 0, output
    released = read_json(audit_dir / "shareable" / "release.json")
    assert released["spent"]["training"]["epsilon"] == worst
    assert released["spent"]["with_training"]["epsilon"] == pytest.approx(worst + 0.5)
    assert any("counts as the first state of the model" in one for one in released["assumptions"])
    code, output, _ = command("gate", audit_dir, "--max", f"worst_case_epsilon={worst - 0.01}")
    assert code == 1, output


def test_the_line_that_training_prints(run, tmp_path):
    plan = tmp_path / "small.toml"
    plan.write_text(
        """name = "small"
[data]
dataset = "breast_cancer"
[model]
architecture = "mlp"
[training]
steps = 2
batch_size = 64
learning_rate = 0.2
max_grad_norm = "median"
median_epsilon = 0.25
target_epsilon = 2.0
delta = 1e-4
[recording]
every = 1
[checkpoints]
every = 2
"""
    )
    code, output, _ = command("train", plan, "--run-dir", tmp_path / "run")
    assert code == 0, output
    assert "worst-case epsilon 2.00 at" in output
    assert "accountant, including epsilon 0.25 for a private clipping norm)" in output
    worst = account(NormLog.open(tmp_path / "run"), delta=1e-4).worst_case_epsilon
    assert 1.5 < worst <= 2.0
    code, output, _ = command("lint", plan)
    assert "worst-case epsilon of one row is 2.00" in output


def test_limits_of_epsilon_include_the_median():
    plan = config(target_epsilon=2.0, noise_multiplier=None)
    steps = plan.training.with_clipping_norm(3.0)
    assert (steps.max_grad_norm, steps.median_epsilon) == (3.0, None)
    assert steps.target_epsilon == 2.0 - COST
    noise = with_noise(steps, 456).noise_multiplier
    alone = config(
        target_epsilon=2.0 - COST, noise_multiplier=None, max_grad_norm=3.0, median_epsilon=None
    )
    assert noise == with_noise(alone.training, 456).noise_multiplier
    assert steps.with_clipping_norm(4.0) == steps  # nothing is drawn twice
    before = with_noise(plan.training, 456)  # the same noise, whether the median was drawn or not
    assert (before.noise_multiplier, before.max_grad_norm) == (noise, "median")
    assert before.median_epsilon == COST
    falling = {"law": "linear", "start": 2.0, "end": 1.0}
    planned = config(target_epsilon=2.0, noise_multiplier=falling).training
    drawn = with_noise(planned.with_clipping_norm(3.0), 456)
    assert with_noise(planned, 456).noise_multiplier == drawn.noise_multiplier
    with pytest.raises(InputError, match="call with_clipping_norm first"):
        planned_steps(plan.training, 3, 0.1)
    stopped = config(stop_at_epsilon=2.0).training.with_clipping_norm(3.0)
    assert stopped.stop_at_epsilon == 2.0 - COST


@pytest.mark.filterwarnings("ignore:the privacy filter has left out everyone")
@pytest.mark.filterwarnings("ignore:no step at max_grad_norm fits")
def test_a_privacy_filter_caps_the_whole(tmp_path):
    plan = config(filter_epsilon=1.0, epochs=6)
    made = filter_for(plan)(1.2, 0.1)
    same = PrivacyFilter.for_epsilon(1.0 - COST, delta=DELTA, noise_multiplier=1.2, sample_rate=0.1)
    assert made == same
    trained = train(plan, tmp_path / "run", privacy_filter=made)
    table = account(NormLog.open(trained.run_dir), delta=DELTA)
    assert table.worst_case_epsilon <= 1.0 + 1e-9
    assert table.epsilon.max() <= 1.0 + 1e-9
    assert "including epsilon 0.25" in table.account.guaranteed_by


def test_what_lint_reads_of_a_plan_and_of_a_run(run):
    plan = facts_of_plan(config().to_dict(), 456, {})
    assert plan.max_grad_norm is None
    opened = open_run(run[0].run_dir)
    declared = Declared(read_run_json(run[0].run_dir))
    facts = facts_of_run(opened.log, opened.header["run"], declared)
    assert facts.plan.epsilon(DELTA) == pytest.approx(run[1].guarantee.worst_case_epsilon)
    assert plan.plan.epsilon(DELTA) == pytest.approx(facts.plan.epsilon(DELTA), rel=1e-6)


@pytest.mark.slow
def test_a_seeded_run_draws_the_same_norm_and_an_unseeded_one_another(tmp_path):
    plan = config(median_epsilon=0.02, epochs=1)
    norms = []
    for number, seed in enumerate((1, 1, None, None)):
        trained = train(plan, tmp_path / str(number), seed=seed)
        norms.append(read_json(trained.run_dir / "run.json")["training"]["max_grad_norm"])
        label = read_json(trained.run_dir / "run.json")["label"]
        assert label == (None if seed is None else "reproducible: no privacy")
    assert norms[0] == norms[1]
    assert len(set(norms)) == 3


@pytest.mark.slow
def test_a_resumed_run_keeps_its_norm(tmp_path):
    plan, run_dir = config(median_epsilon=0.02), tmp_path / "run"  # two draws would differ

    def interrupt(stage, done, total):
        if done == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(plan, run_dir, progress=interrupt)
    before = read_json(run_dir / "run.json")["training"]["max_grad_norm"]
    trained = train(plan, run_dir, resume=True)
    log = NormLog.open(run_dir)
    assert set(log.settings.max_grad_norm) == {before}
    assert log.total_steps == trained.steps == 20
    assert log.clipping_norm_epsilon == 0.02
    assert not [check for check in verify(open_run(run_dir)) if check.status == "failed"]


def test_references_are_trained_at_the_norm_of_their_run(run):
    norm = read_json(run[0].run_dir / "run.json")["training"]["max_grad_norm"]
    settings = with_drawn_norm(config().training, run[0].run_dir)
    assert settings.max_grad_norm == norm
    assert with_drawn_norm(settings, None) is settings
    with pytest.raises(InputError, match="which each run draws anew"):
        with_drawn_norm(config().training, None)


def recorded(run_dir, clips, cost=0.1, **options):
    """A recorded loop, two steps at each of these clipping norms; resumed where they are more."""
    made = make_run(blobs(), max_grad_norm=clips[0])
    recorder = Recorder(
        run_dir, dataset=made.dataset, loss_fn=PER_EXAMPLE, every=1,
        clipping_norm_epsilon=cost, **options,
    )  # fmt: skip
    with recorder.attach(made.model, made.optimizer, made.loader):
        for clip in clips:
            made.optimizer.max_grad_norm = clip
            for inputs, targets in list(made.loader)[:0] or [next(iter(made.loader))]:
                made.step(inputs, targets)
    return open_run(run_dir)


def clipping_check(opened):
    return next(check for check in verify(opened) if check.key == "private_clipping_norm")


def test_a_loop_of_ones_own(tmp_path):
    opened = recorded(tmp_path / "one", [1.5, 1.5])
    assert clipping_check(opened).status == "passed"
    steps = account(replace(opened.log, clipping_norm_epsilon=0.0), delta=DELTA)
    found = account(opened.log, delta=DELTA)
    assert found.worst_case_epsilon == pytest.approx(steps.worst_case_epsilon + 0.1)
    assert clipping_check(recorded(tmp_path / "two", [1.5, 1.2])).status == "not checked"
    # Resumed at a norm that was drawn again, which costs again
    recorded(tmp_path / "three", [1.5])
    again = clipping_check(recorded(tmp_path / "three", [1.4], resume_at=1))
    assert (again.status, again.bears_on) == ("failed", "worst_case")
    with pytest.raises(EvidenceError, match=r"clipping_norm_epsilon=0\.1, this run has 0\.0"):
        recorded(tmp_path / "one", [1.5], cost=0.0, resume_at=1)
    with pytest.raises(InputError, match="clipping_norm_epsilon=-1"):
        recorded(tmp_path / "four", [1.5], cost=-1)
    assert not [one for one in verify(recorded(tmp_path / "five", [1.5], cost=0.0))
                if one.key == "private_clipping_norm"]  # fmt: skip


def test_a_recorder_adds_the_cost_that_a_private_median_carries(tmp_path):
    norm = private_median_norm([0.9, 1.1, 1.3] * 20, epsilon=0.4)
    for number, (given, clip, cost) in enumerate(
        [(0.0, norm, 0.4), (0.1, norm, 0.4), (0.7, norm, 0.7), (0.0, float(norm), 0.0)]
    ):
        opened = recorded(tmp_path / str(number), [clip], given)
        assert opened.log.clipping_norm_epsilon == cost


def test_every_log_adds_what_its_clipping_norm_carries_or_refuses_it(tmp_path):
    drawn = [private_median_norm([0.9, 1.1, 1.3] * 20, epsilon=0.4) for _ in range(2)]
    given = {"total_steps": 2, "noise_multiplier": 1.0, "sample_rate": 0.1}
    for clip, told, cost in (
        (drawn[0], 0.0, 0.4), (drawn[0], 0.7, 0.7), ([drawn[0]] * 2, 0.1, 0.4), (drawn, 0.1, 0.8),
        (float(drawn[0]), 0.0, 0.0),
    ):  # fmt: skip
        log = NormLog.from_arrays([[0.5]], [0], max_grad_norm=clip,
                                  clipping_norm_epsilon=told, **given)  # fmt: skip
        assert account(log, delta=DELTA).account.clipping_norm_epsilon == pytest.approx(cost)
    with pytest.raises(InputError, match="private release that came after training began"):
        recorded(tmp_path / "later", [1.5, drawn[0]], 0.0)
    with RoundRecorder(tmp_path / "rounds", ["a"], sampler="fixed_size") as recorder:
        with pytest.raises(InputError, match="private release, and rounds have no account"):
            recorder.round(["a"], [0.3], noise_multiplier=1.0, max_grad_norm=drawn[0])
        assert recorder.n_rounds == 0


def test_a_replay_of_checkpoints_reads_the_cost_from_run_json(run, tmp_path):
    trained, plan = run[0], config()
    dataset = load_dataset("breast_cancer")
    spec = AuditSpec(
        model=lambda: build_model(plan.model, dataset.input_shape, dataset.n_classes),
        dataset=tensor_set(dataset.train),
        collate_fn=whole_batch,
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replay(trained.run_dir / "checkpoints", spec, tmp_path / "replayed")
        clip = ReleasedNorm(read_json(trained.run_dir / "run.json")["training"]["max_grad_norm"])
        clip.clipping_norm_epsilon = 2 * COST
        told = StepOptions(max_grad_norm=clip)
        replay(trained.run_dir / "checkpoints", spec, tmp_path / "told", options=told)
    assert NormLog.open(tmp_path / "told").clipping_norm_epsilon == 2 * COST
    log = NormLog.open(tmp_path / "replayed")
    assert log.clipping_norm_epsilon == COST
    worst = account(log, delta=DELTA).worst_case_epsilon
    assert worst == pytest.approx(run[1].guarantee.worst_case_epsilon, rel=1e-6)
