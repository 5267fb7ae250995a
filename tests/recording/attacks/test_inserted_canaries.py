"""Items of one's own, inserted by fair coins, in a user's own loop; here texts of a language model."""

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from torch import nn

from indpriv import AttackScores, InputError
from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.attacks import language_scores
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import CANARIES
from indpriv.norm_log.verify import journal_check
from indpriv.recording import CausalLMLoss, InsertedCanaries, MislabelledCanaries, Recorder
from runs import blobs, make_run, record

LENGTH = 6


class Outputs(dict):
    """As of Hugging Face: logits by name and as an attribute."""

    logits = property(lambda self: self["logits"])


class Model(nn.Module):
    """Predicts a token from the one before."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(30, 64), nn.Linear(64, 30)

    def forward(self, input_ids, labels=None):
        return Outputs(logits=self.out(self.embedding(input_ids).tanh()))


def items(n, seed):
    rows = np.random.default_rng(seed).integers(0, 30, (n, LENGTH)).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def test_texts_are_inserted_by_coins_and_scored(tmp_path):
    data, secrets = items(100, 0), items(60, 1)
    canaries = InsertedCanaries(data, secrets, seed=0)
    assert len(canaries.train_set) == 100 + canaries.member.sum()
    inside = [canaries.train_set[k] for k in range(100, len(canaries.train_set))]
    assert inside == [row for row, kept in zip(secrets, canaries.member, strict=True) if kept]
    assert canaries.train_set[3] == data[3]
    module = Model()
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=torch.optim.Adam(module.parameters(), lr=0.02),
        data_loader=canaries.loader(20, collate_fn=collate),
        noise_multiplier=0.05,
        max_grad_norm=1.0,
    )
    assert loader.batch_sampler.sample_rate == 1 / 8  # of 160 planned examples, whatever the coins
    loss_fn = CausalLMLoss()
    recorder = Recorder(
        tmp_path / "run", dataset=canaries.train_set, loss_fn=loss_fn, every="once", attack=canaries
    )
    with recorder.attach(model, optimizer, loader):
        for _ in range(3):
            for batch in loader:
                optimizer.zero_grad()
                loss_fn(model(**batch), batch).mean().backward()
                optimizer.step()
    scores = AttackScores.from_file(tmp_path / "run" / CANARIES)
    assert scores.fair_coins
    assert (scores.member == canaries.member).all()
    assert scores.method == "final loss of inserted canaries"
    # The same as the attack of language models on the final model.
    found = language_scores(model, [row["input_ids"] for row in secrets], canaries.member)
    np.testing.assert_allclose(found["text_loss"].scores, scores.scores, rtol=1e-5)
    assert measure_attack(scores).overall["auc"] > 0.5


@pytest.mark.parametrize("seed", [None, 3])
def test_coins_are_fair_and_of_the_system_unless_seeded(seed):
    one, two = (InsertedCanaries(items(1, 0), range(20_000), seed=seed).member for _ in range(2))
    assert abs(one.mean() - 0.5) < 6 * 0.5 / np.sqrt(20_000)
    assert (one == two).all() == (seed is not None)


@pytest.mark.parametrize("kind", ["inserted", "mislabelled"])
def test_canaries_survive_a_resume(tmp_path, kind):
    def made(**options):
        if kind == "inserted":
            return InsertedCanaries(blobs(60), blobs(60), **options)
        return MislabelledCanaries(blobs(60), 40, n_classes=2, **options)

    def recorded(canaries, **options):
        run = make_run(canaries.train_set, data_loader=canaries.loader(batch_size=12))
        more = {"epochs": 1, "every": 1, "attack": canaries, **options}
        return record(run, tmp_path / "run", **more)

    first = made()
    log = recorded(first)
    middle = log.total_steps // 2
    again = made(resumes=tmp_path / "run")
    assert again.member.tolist() == first.member.tolist()
    assert len(again.train_set) == len(first.train_set)
    with pytest.raises(InputError, match="was begun with other coins"):
        recorded(made(seed=1), resume_at=middle)
    (tmp_path / "run" / CANARIES).unlink()
    assert recorded(again, resume_at=middle).total_steps == middle + log.total_steps
    scores = AttackScores.from_file(tmp_path / "run" / CANARIES)
    assert scores.member.tolist() == first.member.tolist()
    assert journal_check(open_run(tmp_path / "run")).status == "passed"
    (tmp_path / "run" / "coins.json").write_text("{}")
    assert "coins.json is not as it was" in journal_check(open_run(tmp_path / "run")).detail
    with pytest.raises(InputError, match=r"coins.json is damaged"):
        made(resumes=tmp_path / "run")
    with pytest.raises(InputError, match="holds no coins of canaries"):
        made(resumes=tmp_path)


def test_another_number_of_canaries_has_other_coins(tmp_path):
    """The last one was left out, so that the training set is the same without it."""

    items = [blobs(60)[k] for k in range(60)]

    def recorded(count, **options):
        canaries = InsertedCanaries(blobs(60), items[:count], **options)
        run = make_run(canaries.train_set, data_loader=canaries.loader(batch_size=12))
        at = {"resume_at": 5} if "resumes" in options else {}
        return record(run, tmp_path / "run", epochs=1, every=1, attack=canaries, **at)

    seeds = np.arange(99)  # of numpy, as many a script has them
    seed = next(k for k in seeds if not InsertedCanaries([0], range(60), seed=k).member[-1])
    recorded(60, seed=seed)
    with pytest.raises(InputError, match="was begun with other coins"):
        recorded(59, resumes=tmp_path / "run")


def test_refusals(tmp_path):
    with pytest.raises(InputError, match="the number of canaries=0"):
        InsertedCanaries(items(5, 0), [])
    with pytest.raises(InputError, match="has no length"):
        InsertedCanaries(items(5, 0), iter([]))
    canaries = InsertedCanaries(blobs(), [blobs()[0]])
    with pytest.raises(InputError, match="is not the train_set of its canaries"):
        record(make_run(), tmp_path / "run", attack=canaries)
    with pytest.raises(InputError, match="depends on the coins of the canaries"):
        record(make_run(canaries.train_set), tmp_path / "other", attack=canaries)


def test_neither_the_rate_nor_the_divisor_depends_on_the_coins(tmp_path):
    found, kept = set(), set()
    for seed in range(3):
        canaries = InsertedCanaries(blobs(60), blobs(60), seed=seed)
        run = make_run(canaries.train_set, data_loader=canaries.loader(batch_size=12))
        log = record(run, tmp_path / str(seed), epochs=1, every="once", attack=canaries)
        found.add((*log.settings.sample_rate.tolist(), run.optimizer.expected_batch_size))
        kept.add(len(canaries.train_set))
    assert len(kept) > 1
    assert len(found) == 1
