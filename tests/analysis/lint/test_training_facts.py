"""Facts of an audit file are those of the run that it describes."""

from dataclasses import replace

import numpy as np
import pytest
from torch.utils.data import DataLoader

from audits.training.architectures import layer_counts
from audits.training.config import AuditConfig
from audits.training.dp_sgd import train
from audits.training.planned import facts_of_plan
from indpriv import NormLog, PrivacyFilter
from indpriv.analysis.lint import SgdSettings, facts_of_run, lint
from indpriv.analysis.recorded_run import Declared
from indpriv.norm_log.norm_log import Filtered, open_run
from indpriv.norm_log.run_files import read_run_json
from indpriv.recording import private_generator
from runs import blobs, make_run, record

TABLES = {
    "name": "small",
    "data": {"dataset": "digits"},
    "model": {"architecture": "mlp", "hidden": [8]},
    "training": {
        "epochs": 1,
        "batch_size": 200,
        "learning_rate": 0.5,
        "momentum": 0.5,
        "max_grad_norm": 0.7,
        "delta": 1e-5,
        "target_epsilon": 3.0,
    },
    "recording": {"every": 1},
    "checkpoints": {"every": "epoch"},
}


def facts_of(run_dir):
    opened = open_run(run_dir)
    return facts_of_run(opened.log, opened.header["run"], Declared(read_run_json(run_dir)))


def status_of(facts, key):
    return next(found.status for found in lint(facts) if found.key == key)


def a_log(norms=((0.2, 3.0, 0.5),), **options):
    settings = {"total_steps": 10, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    steps = np.arange(len(norms))
    return NormLog.from_arrays(norms, steps, **settings | {"sample_rate": 0.1} | options)


def test_a_plan_says_what_its_run_records(tmp_path):
    config = AuditConfig.from_dict(TABLES)
    planned = facts_of_plan(config.to_dict(), 1438, layer_counts(config.model))
    train(config, tmp_path / "run", seed=0)
    found = facts_of(tmp_path / "run")
    noise = found.plan.noise_multiplier  # Opacus solves for it with orders of its own
    assert planned.plan.noise_multiplier == pytest.approx(noise, rel=0.02)
    assert replace(planned.plan, noise_multiplier=noise) == found.plan
    assert found.sgd == planned.sgd == SgdSettings(0.5, 0.5, 0.0)
    assert found.layers == planned.layers
    for name in ("n_examples", "delta", "max_grad_norm", "views"):
        assert getattr(found, name) == getattr(planned, name)
    assert len(found.clipped) == 8


def test_a_run_of_ones_own_is_judged_by_what_its_optimizer_says(tmp_path):
    run = make_run(learning_rate=0.25)
    run.optimizer.param_groups[0]["weight_decay"] = 0.1
    record(run, tmp_path / "run")
    found = facts_of(tmp_path / "run")
    assert found.sgd == SgdSettings(0.25, 0.0, 0.1)
    assert found.layers == {"Linear": 2, "ReLU": 1}
    assert (found.delta, found.views) == (None, None)
    assert status_of(found, "delta") == "not checked"
    assert status_of(found, "activations") == "failed"


def test_groups_with_settings_of_their_own_are_not_judged(tmp_path):
    run = make_run()
    run.optimizer.param_groups.append({**run.optimizer.param_groups[0], "params": [], "lr": 0.1})
    record(run, tmp_path / "run")
    assert facts_of(tmp_path / "run").sgd is None


@pytest.mark.parametrize("optimizer", ["Adam", None])
def test_other_optimizers_are_not_judged_as_sgd(optimizer):
    recorder = {"optimizer": optimizer, "loss_reduction": "mean", "learning_rate": 0.1}
    assert facts_of_run(a_log(), recorder, Declared()).sgd is None
    recorder |= {"optimizer": "SGD", "loss_reduction": "sum"}
    assert facts_of_run(a_log(), recorder, Declared()).sgd is None


@pytest.mark.parametrize("value", ["fast", True, None, float("nan"), [0.1]])
def test_a_learning_rate_that_is_no_number_is_not_known(value):
    recorder = {"optimizer": "SGD", "loss_reduction": "mean", "learning_rate": value}
    assert facts_of_run(a_log(), recorder, Declared()).sgd is None


def test_run_json_may_list_layers_and_views():
    content = {
        "model": {"layers": ["0: Conv2d(1, 16)", "norm: BatchNorm2d(16)", "no layer", 7]},
        "augmentation_multiplicity": 4,
    }
    found = facts_of_run(a_log(), {}, Declared(content))
    assert found.layers == {"Conv2d": 1, "BatchNorm2d": 1}
    assert found.views == 4
    assert status_of(found, "batch_norm") == "failed"
    content = {"model": {"layers": "many"}, "augmentation_multiplicity": "four"}
    found = facts_of_run(a_log(), {}, Declared(content))
    assert (found.layers, found.views) == (None, None)


def test_settings_that_change_are_not_judged():
    found = facts_of_run(a_log(noise_multiplier=np.linspace(1, 2, 10)), {}, Declared(), 1e-5)
    assert (found.plan, found.max_grad_norm) == (None, None)
    assert status_of(found, "delta") == "passed"
    assert status_of(found, "epsilon") == "not checked"


@pytest.mark.parametrize("rounding", [0.01, 0])
def test_clipped_shares_are_counted_at_each_record(rounding):
    norms = [[0.2, 3.0, 0.5, 1.0], [1.5, 2.0, 0.5, 9.0]]
    found = facts_of_run(a_log(norms, rounding=rounding), {}, Declared())
    assert found.clipped.tolist() == [0.25, 0.75]


def test_levels_of_individual_clipping_say_nothing_of_the_share():
    found = facts_of_run(a_log(individually_clipped=True), {}, Declared())
    assert status_of(found, "clipping") == "not checked"


@pytest.mark.parametrize(("delta", "status"), [(0.25, "failed"), (0.5, "failed"), (0.2, "passed")])
def test_delta_is_judged_alike_before_and_after_training(delta, status):
    tables = {**TABLES, "training": {**TABLES["training"], "delta": delta}}
    planned = facts_of_plan(AuditConfig.from_dict(tables).to_dict(), 4, {})
    log = a_log([[0.1, 0.2, 0.3, 0.4]])
    assert status_of(planned, "delta") == status
    assert status_of(facts_of_run(log, {}, Declared(), delta), "delta") == status


def test_an_unknown_number_of_examples_leaves_the_rest():
    config = AuditConfig.from_dict(TABLES)
    found = facts_of_plan(config.to_dict(), None, layer_counts(config.model))
    assert status_of(found, "delta") == status_of(found, "batch_size") == "not checked"
    assert status_of(found, "weight_decay") == status_of(found, "normalisation") == "passed"


@pytest.mark.filterwarnings("ignore:the privacy filter has left out everyone")
def test_a_privacy_filter_caps_epsilon(tmp_path):
    training = {**TABLES["training"], "filter_epsilon": 2.5}
    planned = facts_of_plan(
        AuditConfig.from_dict({**TABLES, "training": training}).to_dict(), 4, {}
    )
    assert planned.epsilon_cap == 2.5
    limit = PrivacyFilter.for_epsilon(2.5, delta=1e-5, noise_multiplier=1.0, sample_rate=0.1)
    loader = DataLoader(blobs(), batch_size=12, generator=private_generator())
    made = make_run(noise_generator=private_generator(), data_loader=loader)
    record(made, tmp_path / "run", privacy_filter=limit)
    opened = open_run(tmp_path / "run")
    found = facts_of_run(opened.log, {}, Declared(), 1e-5)
    assert 2.5 * 0.999 < found.epsilon_cap <= 2.5 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("log", "declared"),
    [
        ({}, {"account": {"participation": "known"}}),
        ({}, {"account": {"neighbouring": "replace_one"}}),
        ({"neighbouring": "replace_one"}, {}),
    ],
)
def test_an_epsilon_of_secret_coins_is_that_of_no_other_account(log, declared):
    filtered = Filtered(8.0, 0.01, np.full(5, 10))
    for one in (a_log(**log), replace(a_log(**log), filtered=filtered)):
        found = facts_of_run(one, {}, Declared(declared), 1e-5)
        assert (found.plan, found.epsilon_cap) == (None, None)
        plain = facts_of_run(replace(one, neighbouring="zero_out"), {}, Declared(), 1e-5)
        assert (plain.plan is not None, plain.epsilon_cap is None) == (True, one.filtered is None)


def test_an_epsilon_by_poisson_sampling_is_that_of_no_other_sampler():
    for sampler, status in (("poisson", "passed"), ("shuffled", "not checked")):
        found = facts_of_run(a_log(sampler=sampler), {}, Declared(), 1e-5)
        assert (status_of(found, "epsilon"), found.max_grad_norm) == (status, 1.0)
