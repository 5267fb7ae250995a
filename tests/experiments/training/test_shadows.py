from dataclasses import replace

import numpy as np
import pytest
import torch

from audits.training import shadows
from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.dp_sgd import train
from audits.training.robustness import COPIES, robustness
from audits.training.shadows import train_shadows
from indpriv._files import read_json
from indpriv.attack_signals import AttackSignals, from_losses, open_signals
from indpriv.errors import InputError

TABLES = {
    "name": "small",
    "data": {"dataset": "digits"},
    "model": {"architecture": "mlp", "hidden": [8]},
    "training": {
        "epochs": 2,
        "batch_size": 256,
        "learning_rate": 0.5,
        "max_grad_norm": 1.0,
        "delta": 1e-5,
        "target_epsilon": 8.0,
    },
    "recording": {"every": 1},
    "checkpoints": {"every": "epoch"},
}
CONFIG = AuditConfig.from_dict(TABLES)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    train(CONFIG, folder, seed=0)
    return folder


@pytest.fixture
def settings_seen(monkeypatch):
    """What each private training was asked for."""
    seen = []
    make = shadows.make_private

    def watched(config, dataset, randomness, device):
        private = make(config, dataset, randomness, device)
        noise = private.planned.at(0).noise_multiplier
        seen.append((noise, private.loader.sample_rate, private.total_steps))
        return private

    monkeypatch.setattr(shadows, "make_private", watched)
    return seen


def test_a_study_has_independent_coins_and_the_settings_of_the_audit(
    tmp_path, run_dir, settings_seen
):
    found = train_shadows(CONFIG, tmp_path / "s", 2, targets=500, seed=1)
    record = read_json(run_dir / "run.json")["training"]
    steps = record["planned_steps"]
    assert settings_seen == [(record["noise_multiplier"], record["sample_rate"], steps)] * 2
    assert (found.n_models, found.n_examples, found.coins, found.share) == (2, 500, True, 0.5)
    assert found.audited is None
    assert found.fingerprint == load_dataset("digits").fingerprint()
    assert (found.member.sum(axis=1) != 250).any()  # coins, not exact halves
    assert 0.4 < found.member.mean() < 0.6
    assert len(set(found.example_ids.tolist())) == 500


def test_references_for_a_run_begin_with_its_own_signals(tmp_path, run_dir, settings_seen):
    found = train_shadows(CONFIG, tmp_path / "s", 2, for_run=run_dir)
    record = read_json(run_dir / "run.json")["training"]
    assert (
        settings_seen
        == [(record["noise_multiplier"], record["sample_rate"], record["planned_steps"])] * 2
    )
    dataset = load_dataset("digits")
    n, n_test = len(dataset.train), len(dataset.test)
    assert (found.audited, found.n_models, found.n_examples) == (0, 3, n + n_test)
    assert found.member[0].tolist() == [True] * n + [False] * n_test
    assert found.share == n / (n + n_test)
    losses = shadows.ExampleTable.from_parquet(run_dir / "examples.parquet")
    expected = from_losses(np.concatenate([losses.train["loss"], losses.test["loss"]]))
    assert found.signal[0] == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_an_interrupted_series_goes_on(tmp_path):
    class StopError(Exception):
        pass

    def stop(stage, done, total):
        if done == 1:
            raise StopError

    options = {"targets": 300, "labels": True, "checkpoints": True, "seed": 3}
    with pytest.raises(StopError):
        train_shadows(CONFIG, tmp_path / "s", 3, progress=stop, **options)
    kept = np.array(AttackSignals.open(tmp_path / "s").signal)
    assert len(kept) == 1
    train_shadows(CONFIG, tmp_path / "s", 3, **options)
    whole = train_shadows(CONFIG, tmp_path / "whole", 3, **options)
    found = open_signals(tmp_path / "s")
    assert np.array_equal(found["confidence"].signal, whole.signal)
    assert {name: part.n_models for name, part in found.items()} == dict.fromkeys(found, 3)
    assert found["labels"].kind == "label_robustness"
    assert found["checkpoints"].adversary == "checkpoints"
    assert np.array_equal(found["labels"].member, found["confidence"].member)
    last = open_signals(tmp_path / "whole")
    for name in found:
        assert np.array_equal(found[name].signal, last[name].signal), name


@pytest.mark.slow
def test_several_processes_train_the_same_models(tmp_path):
    one, two = (
        train_shadows(CONFIG, tmp_path / str(workers), 3, targets=100, seed=5, workers=workers)
        for workers in (1, 2)
    )
    assert np.array_equal(one.member, two.member)
    np.testing.assert_allclose(one.signal, two.signal, rtol=1e-4)
    with pytest.raises(InputError, match="workers"):
        train_shadows(CONFIG, tmp_path / "none", 3, seed=5, workers=0)


@pytest.mark.slow
def test_a_study_without_a_seed_keeps_its_targets_when_it_goes_on(tmp_path):
    first = train_shadows(CONFIG, tmp_path / "s", 1, targets=300)
    more = train_shadows(CONFIG, tmp_path / "s", 2, targets=300)
    assert np.array_equal(first.example_ids, more.example_ids)
    assert np.array_equal(first.signal[0], more.signal[0])
    assert not np.array_equal(more.member[0], more.member[1])


def test_training_without_dp_has_the_same_coins_and_no_noise(tmp_path, settings_seen):
    private, plain = (
        train_shadows(
            CONFIG, tmp_path / str(without_dp), 1, targets=700, seed=5, without_dp=without_dp
        )
        for without_dp in (False, True)
    )
    assert len(settings_seen) == 1
    assert np.array_equal(private.member, plain.member)
    assert np.array_equal(private.example_ids, plain.example_ids)
    assert plain.signal.mean() > private.signal.mean()


@pytest.mark.slow
def test_what_references_cannot_be_trained_for_is_refused(tmp_path, run_dir):
    other = replace(CONFIG, training=replace(CONFIG.training, epochs=3))
    with pytest.raises(InputError, match="and this audit file gives"):
        train_shadows(replace(other), tmp_path / "s", 1, for_run=run_dir)
    clipped = replace(CONFIG, training=replace(CONFIG.training, individual_clipping=True))
    with pytest.raises(InputError, match="individual_clipping"):
        train_shadows(clipped, tmp_path / "s", 1)
    with pytest.raises(InputError, match="--targets is for a study"):
        train_shadows(CONFIG, tmp_path / "s", 1, for_run=run_dir, targets=5)
    with pytest.raises(InputError, match="more than half"):
        train_shadows(CONFIG, tmp_path / "s", 1, targets=1000)
    dataset = load_dataset("digits")
    changed = replace(
        dataset, train=replace(dataset.train, targets=dataset.train.targets[::-1].copy())
    )
    with pytest.raises(InputError, match="another fingerprint"):
        train_shadows(CONFIG, tmp_path / "s", 1, for_run=run_dir, dataset=changed)
    train_shadows(CONFIG, tmp_path / "s", 1, targets=10)
    with pytest.raises(InputError, match="another without_dp"):
        train_shadows(CONFIG, tmp_path / "s", 2, targets=10, without_dp=True)
    with pytest.raises(InputError, match="signals of other examples"):
        train_shadows(CONFIG, tmp_path / "s", 2, for_run=run_dir)


def test_robustness_counts_right_labels():
    inputs, targets = torch.randn(50, 6), torch.arange(50) % 2
    assert robustness(lambda x: torch.zeros(len(x)), inputs, targets).tolist() == [
        (COPIES * (1 - number % 2) + 0.5) / (COPIES + 1) for number in range(50)
    ]
    near = torch.tensor([[0.1], [3.0], [-3.0]])
    images = near[:, :, None, None].expand(3, 1, 4, 4)
    found = robustness(lambda x: (x.mean((1, 2, 3)) > 0).long(), images, torch.ones(3))
    assert found[2] < found[0] < found[1]
