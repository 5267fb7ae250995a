"""Mislabelled canaries in a user's own loop."""

import numpy as np
import pytest
import torch

from indpriv import AttackScores, ExampleTable, InputError
from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.norm_log.run_files import CANARIES, EXAMPLES
from indpriv.recording import MislabelledCanaries
from runs import blobs, make_run, mlp, record


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_model_trains_on_the_members_with_their_wrong_labels(tmp_path, mode):
    data = blobs(200)
    canaries = MislabelledCanaries(data, 80, n_classes=2, seed=0)
    run = make_run(canaries.train_set, mode=mode, data_loader=canaries.loader(batch_size=20))
    record(run, tmp_path / "run", epochs=1, attack=canaries)
    scores = AttackScores.from_file(tmp_path / "run" / CANARIES)
    assert len(scores.scores) == 80
    assert scores.fair_coins
    assert len(canaries.train_set) == 120 + scores.member.sum()
    # The losses of members are those of the same rows in the table of training examples.
    table = ExampleTable.from_parquet(tmp_path / "run" / EXAMPLES).train
    labels = np.array([int(target) for _, target in canaries.train_set])
    assert (table["label"].to_numpy() == labels).all()
    right = {tuple(x.tolist()): int(y) for x, y in zip(*data.tensors, strict=True)}
    wrong = np.array([right[tuple(x.tolist())] != int(y) for x, y in canaries.train_set])
    assert wrong.sum() == scores.member.sum()
    expected = np.sort(-table["loss"].to_numpy()[wrong])
    np.testing.assert_allclose(np.sort(scores.scores[scores.member]), expected, rtol=1e-6)
    assert measure_attack(scores).bounds["steinke2023"].epsilon >= 0


def test_a_model_that_memorises_gives_members_away(tmp_path):
    torch.manual_seed(2**40 + 0)
    inputs = torch.randn(200, 300)
    data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    canaries = MislabelledCanaries(data, 150, n_classes=2, seed=1)
    run = make_run(
        canaries.train_set, torch.nn.Linear(300, 2), noise_multiplier=0.05, max_grad_norm=5.0,
        data_loader=canaries.loader(batch_size=40), learning_rate=2.0,
    )  # fmt: skip
    record(run, tmp_path / "run", epochs=15, every="once", attack=canaries)
    found = measure_attack(AttackScores.from_file(tmp_path / "run" / CANARIES))
    assert found.bounds["steinke2023"].epsilon > 0.3


def test_refusals(tmp_path):
    with pytest.raises(InputError, match="are more than the 120 examples"):
        MislabelledCanaries(blobs(), 121, n_classes=2)
    with pytest.raises(InputError, match="n_classes"):
        MislabelledCanaries(blobs(), 10, n_classes=1)
    with pytest.raises(InputError, match="is not the train_set"):
        record(
            make_run(model=mlp()),
            tmp_path / "run",
            attack=MislabelledCanaries(blobs(), 10, n_classes=2),
        )


def test_neither_the_rate_nor_the_divisor_depends_on_the_coins(tmp_path):
    found, kept = set(), set()
    for seed in range(3):
        canaries = MislabelledCanaries(blobs(120), 110, n_classes=2, seed=seed)
        run = make_run(canaries.train_set, data_loader=canaries.loader(batch_size=12))
        log = record(run, tmp_path / str(seed), epochs=1, every="once", attack=canaries)
        rates = set(log.settings.sample_rate.tolist())
        found.add((*rates, run.optimizer.expected_batch_size, log.total_steps))
        kept.add(len(canaries.train_set))
    assert len(kept) > 1
    assert found == {(0.1, 12, 10)}
    canaries = MislabelledCanaries(blobs(120), 110, n_classes=2, seed=0)
    with pytest.raises(InputError, match="depends on the coins of the canaries"):
        record(make_run(canaries.train_set), tmp_path / "plain", attack=canaries)
