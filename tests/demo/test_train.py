"""The demo is an ordinary Opacus run: verified, exact, and that of audits/adult.toml."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from opacus.accountants import RDPAccountant

import indpriv
from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.models import build_model
from audits.training.step_plan import with_noise
from indpriv import ExampleTable, NormLog
from indpriv.demo.train import RUN_INFO, SETTINGS, network, people, train
from indpriv.norm_log.evidence import lines_of, unverified
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:opacus"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
AUDIT = AuditConfig.from_toml(Path(__file__).parents[2] / "audits/adult.toml")


SEED = 2**70  # larger than torch takes


def run_of(folder, seed):
    seen = []
    train(folder / "run", epochs=1, seed=seed, progress=lambda *done: seen.append(done))
    assert seen == [("training", 1, 1)]
    return folder / "run"


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("seeded"), SEED)


@pytest.fixture(scope="module")
def unseeded(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("unseeded"), None)


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("again"), SEED)


@pytest.mark.parametrize("split", ["train", "test"])
def test_people_are_those_of_the_audit_file(split):
    (inputs, labels), groups = people(split)[0].tensors, people(split)[1]
    expected = getattr(load_dataset("adult"), split)
    np.testing.assert_array_equal(inputs.numpy(), expected.inputs)
    np.testing.assert_array_equal(labels.numpy(), expected.targets)
    assert groups.equals(expected.metadata)
    assert inputs.dtype == torch.float32


def test_settings_are_those_of_the_audit_file():
    wanted = with_noise(AUDIT.training, 32_561)
    assert SETTINGS["max_grad_norm"] == wanted.max_grad_norm
    assert SETTINGS["noise_multiplier"] == pytest.approx(wanted.noise_multiplier, rel=1e-3)
    assert (RUN_INFO["name"], RUN_INFO["delta"]) == (AUDIT.name, AUDIT.training.delta)
    assert tuple(RUN_INFO["groups"]) == AUDIT.audit.groups
    shapes = [tuple(p.shape) for p in build_model(AUDIT.model, (107,), 2).parameters()]
    assert [tuple(p.shape) for p in network().parameters()] == shapes
    accountant = RDPAccountant()
    accountant.history = [(SETTINGS["noise_multiplier"], 1 / 34, 20 * 34)]
    assert 2.99 < accountant.get_epsilon(RUN_INFO["delta"]) <= 3.0


def test_a_run_without_a_seed_is_supported_and_exact(unseeded):
    checks = verify(open_run(unseeded))
    assert [check.name for check in checks if check.status == "failed"] == []
    assert unverified(lines_of(checks, {})) == []
    log = NormLog.open(unseeded)
    assert (log.total_steps, log.n_records, log.n_examples) == (34, 34, 32_561)
    assert indpriv.account(log, delta=1e-5).claim == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["examples.parquet", "examples-non-dp.parquet"])
def test_a_seed_makes_the_same_losses_again(seeded, again, unseeded, name):
    first, second, other = (
        ExampleTable.from_parquet(run / name).frame for run in (seeded, again, unseeded)
    )
    assert first.equals(second)
    assert not first["loss"].equals(other["loss"])


def test_a_seed_takes_the_claim(seeded):
    log = NormLog.open(seeded)
    assert indpriv.account(log, delta=1e-5).claim == "estimate"
    assert "seeded" in " ".join(log.caveats)


def test_the_baseline_has_the_same_people_and_losses_of_its_own(unseeded):
    private = ExampleTable.from_parquet(unseeded / "examples.parquet").frame
    baseline = ExampleTable.from_parquet(unseeded / "examples-non-dp.parquet").frame
    assert set(baseline.columns) == set(private.columns)
    same = [name for name in private.columns if name not in ("loss", "correct")]
    pd.testing.assert_frame_equal(baseline[same], private[same], check_dtype=False)
    assert not baseline["loss"].equals(private["loss"])
    # Of two classes the likelier one is right where the loss is below that of a coin.
    assert (baseline["correct"] == (baseline["loss"] < np.log(2))).all()
    assert baseline["correct"].mean() > 0.8


def test_the_model_is_kept_beside_the_log(seeded):
    model = network()
    model.load_state_dict(torch.load(seeded / "model.pt"))
    test_set, _ = people("test")
    with torch.no_grad():
        right = model(test_set.tensors[0]).argmax(1) == test_set.tensors[1]
    shown = ExampleTable.from_parquet(seeded / "examples.parquet").test["correct"]
    assert right.tolist() == shown.tolist()
