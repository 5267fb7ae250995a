"""Runs without Poisson sampling: what the Recorder recognises and counts, and what an audit says of it."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

import indpriv
import oracles
from indpriv.audit import audit
from indpriv.cli import run as run_command
from indpriv.norm_log.fields import Truncation
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder, TruncatedPoissonSampler
from indpriv.recording.opacus.draws import Tally
from runs import PER_EXAMPLE, blobs, make_run, record


class LikeTruncated(TruncatedPoissonSampler):
    """A subclass may truncate otherwise."""


class Shuffled(RandomSampler):
    """A subclass may draw otherwise."""


def loader_of(dataset, kind):
    samplers = {
        "shuffled": lambda: RandomSampler(dataset),
        "sequential": lambda: SequentialSampler(dataset),
        "fixed_size": lambda: RandomSampler(dataset, num_samples=12),
        "with_replacement": lambda: RandomSampler(dataset, replacement=True),
        "weighted": lambda: WeightedRandomSampler([1.0] * 120, 120),
        "subclass": lambda: Shuffled(dataset),
    }
    capped = {"num_samples": len(dataset), "sample_rate": 0.1, "max_batch_size": 20}
    if kind == "truncated":
        return DataLoader(dataset, batch_sampler=TruncatedPoissonSampler(**capped))
    if kind == "like_truncated":
        return DataLoader(dataset, batch_sampler=LikeTruncated(**capped))
    return DataLoader(dataset, batch_size=12, sampler=samplers[kind]())


def trained(tmp_path, kind, epochs=2, every=3, batch_norms=None, rounding=0.01, **options):
    dataset = blobs()
    run = make_run(dataset, data_loader=loader_of(dataset, kind), poisson_sampling=False, **options)
    torch.seed()
    recorded = {} if batch_norms is None else {"batch_norms": batch_norms}
    return record(run, tmp_path / "run", epochs=epochs, every=every, rounding=rounding, **recorded)


def drawn(log):
    entries = log.batch_norms.read(0, 120)
    return entries.position.tolist(), entries.step.tolist()


def status_of(run_dir, key):
    return [check.status for check in verify(open_run(run_dir)) if check.key == key]


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        ("shuffled", "shuffled"),
        ("sequential", "sequential"),
        ("fixed_size", "fixed_size"),
        ("with_replacement", "with_replacement"),
        ("weighted", "other"),
        ("subclass", "other"),
        ("truncated", "truncated_poisson"),
        ("like_truncated", "other"),
    ],
)
def test_samplers_of_torch_are_recognised_and_counted(kind, sampler, tmp_path):
    log = trained(tmp_path, kind, **({"batch_norms": True} if kind == "truncated" else {}))
    assert log.sampler == sampler
    counts = Counter(log.batch_norms.read(0, 120).position.tolist())
    assert log.most_participations == max(counts.values())
    assert status_of(tmp_path / "run", "took_part") == ["passed"]
    table = indpriv.account(log, delta=1e-5, participation="known")
    in_doubt = sampler in ("other", "with_replacement")  # a row twice in a batch adds twice C
    assert table.claim == ("estimate" if in_doubt else "exact")
    steps = set(zip(*drawn(log), strict=True))  # one that is drawn twice counts once
    assert table.details["participations"].sum() == len(steps)


def test_a_shuffled_run_has_a_supported_guarantee(tmp_path):
    trained(tmp_path, "shuffled", noise_multiplier=2.0)
    summary = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5)
    assert (summary.guarantee.status, summary.claim) == ("supported", "exact")
    truth = oracles.gaussian_epsilon(np.sqrt(2) / 2.0, 1e-5)
    assert summary.guarantee.worst_case_epsilon == pytest.approx(truth)
    assert (
        "zero out the contribution of one example, participation known"
        in summary.guarantee.statement
    )
    assert summary.guarantee.membership.mu == pytest.approx(np.sqrt(2) / 2.0, rel=1e-6)
    assert summary.account.participation == "known"
    page = (tmp_path / "audit" / "audit.md").read_text()
    assert "took part the most" in page
    assert "clipped in every step" not in page
    assert not any(check.status == "failed" for check in summary.checks)
    secret = audit(tmp_path / "run", tmp_path / "secret", delta=1e-5, participation="secret")
    assert secret.guarantee.status == "unproven"
    assert "--participation known" in secret.guarantee.reasons[0]
    assert "--participation secret" in secret.command


def test_verify_makes_the_checks_of_known_participation(tmp_path, capsys):
    trained(tmp_path, "shuffled")
    assert run_command(["check", str(tmp_path / "run"), "--set", "only=log", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["parts"]
    checks = found["checks"]
    found = {check["key"]: check for check in checks}
    assert found["sampler"]["status"] == "not checked"
    assert "who took part counts as known" in found["sampler"]["detail"]
    assert found["took_part"]["status"] == "passed"


def test_a_truncated_run_has_a_supported_guarantee_that_allows_for_the_cap(tmp_path):
    log = trained(tmp_path, "truncated", every=1, rounding=0.25, noise_multiplier=2.0)
    assert log.truncation == Truncation(20, 120)
    assert set(log.settings.sample_rate) == {0.1}
    summary = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5)
    assert (summary.guarantee.status, summary.claim) == ("supported", "exact")
    assert "truncated Poisson sampling with at most 20 in a batch" in summary.guarantee.statement
    poisson = replace(log, sampler="poisson", truncation=None)
    plain = indpriv.account(poisson, delta=1e-5, neighbouring="zero_out")
    assert summary.guarantee.worst_case_epsilon > plain.worst_case_epsilon
    assert summary.guarantee.membership is None  # no curve is known


def test_a_fixed_size_run_is_supported_if_an_example_is_replaced(tmp_path):
    log = trained(tmp_path, "fixed_size", epochs=20, noise_multiplier=2.0)
    assert set(log.settings.sample_rate) == {0.1}
    options = {"delta": 1e-5, "participation": "secret"}
    summary = audit(tmp_path / "run", tmp_path / "a", neighbouring="replace_one", **options)
    assert (summary.guarantee.status, summary.claim) == ("supported", "exact")
    assert "replace one example, fixed-size sampling" in summary.guarantee.statement
    removed = audit(tmp_path / "run", tmp_path / "b", neighbouring="add_remove", **options)
    assert removed.guarantee.status == "unproven"


def test_one_participation_that_is_miscounted_fails(tmp_path, monkeypatch):
    plain = Tally.next_batch

    def one_for_another(self):
        found = plain(self)
        if self.counts.steps == 3:
            self.took_part[[0, 1]] += (1, -1)
        return found

    monkeypatch.setattr(Tally, "next_batch", one_for_another)
    trained(tmp_path, "shuffled")
    assert status_of(tmp_path / "run", "took_part") == ["failed"]
    summary = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5)
    assert (summary.guarantee.status, summary.claim) == ("unproven", "estimate")


def test_a_sampler_that_may_look_at_data_is_at_best_declared(tmp_path):
    trained(tmp_path, "weighted")
    summary = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5)
    assert summary.guarantee.status == "unproven"
    assert any("drawn twice into one batch" in text for text in summary.guarantee.reasons)
    assert any("draw without replacement" in text for text in summary.guarantee.reasons)
    batch = next(line for line in summary.guarantee.lines if line.key == "batch")
    assert batch.status == "refuted"


def test_a_poisson_run_may_be_audited_with_known_participation(tmp_path):
    record(make_run(noise_multiplier=2.0), tmp_path / "run", epochs=1, batch_norms=True)
    known = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5, participation="known")
    assert (known.guarantee.status, known.claim) == ("supported", "exact")
    assert "--participation known" in known.command
    replaced = audit(
        tmp_path / "run",
        tmp_path / "b",
        delta=1e-5,
        participation="known",
        neighbouring="replace_one",
    )
    assert replaced.guarantee.worst_case_epsilon > known.guarantee.worst_case_epsilon


def test_individual_epsilon_is_exact_without_a_pass_over_the_data(tmp_path):
    """It equals that of norms which were recorded at every step, where each example was absent or not."""
    log = trained(tmp_path, "shuffled", every=1)
    entries = log.batch_norms.read(0, 120)
    present = np.zeros((log.total_steps, 120), bool)
    present[entries.step, entries.position] = True
    contributions = np.where(present, log.levels.relative(log.read()), 0.0)
    table = indpriv.account(log, delta=1e-5, participation="known")
    mu = np.sqrt(np.square(contributions).sum(axis=0))
    truth = [oracles.gaussian_epsilon(value, 1e-5) for value in mu]
    np.testing.assert_allclose(table.epsilon, truth, atol=0.06)  # each norm is rounded by itself
    assert np.all(table.epsilon <= table.worst_case_epsilon)


def test_dropout_is_exact_from_the_norms_of_training_itself(tmp_path):
    torch.manual_seed(2**40 + 0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    run = make_run(blobs(), model)
    recorder = Recorder(
        tmp_path / "run",
        dataset=run.dataset,
        loss_fn=PER_EXAMPLE,
        every="once",
        batch_norms=True,
        rounding=0,
    )
    norms = []
    with recorder.attach(run.model, run.optimizer, run.loader):
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(inputs), targets).backward()
            squares = [p.grad_sample.flatten(1).square().sum(1) for p in run.model.parameters()]
            norms.extend(sum(squares).sqrt().tolist())
            run.optimizer.step()
    log = open_run(tmp_path / "run").log
    known = indpriv.account(log, delta=1e-3, participation="known")
    assert (known.claim, indpriv.account(log, delta=1e-3).claim) == ("exact", "estimate")
    assert "dropout included" in known.claim_reason
    recorded = log.batch_norms.read(0, 120)
    np.testing.assert_allclose(sorted(recorded.norm), sorted(norms), rtol=1e-4)


@pytest.mark.parametrize(("kind", "participation"), [("sequential", None), ("poisson", "known")])
def test_steps_on_another_loader_count_for_everybody(kind, participation, tmp_path):
    dataset = blobs()
    given = {"data_loader": loader_of(dataset, "sequential"), "poisson_sampling": False}
    run = make_run(dataset, **({} if kind == "poisson" else given), noise_multiplier=2.0)
    torch.seed()
    log = record(run, tmp_path / "run", epochs=1, loader=DataLoader(dataset, batch_size=12))
    assert log.total_steps == 10
    assert log.most_participations is None
    options = {} if participation is None else {"participation": participation}
    found = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5, **options)
    assert found.account.participation == "known"
    truth = oracles.gaussian_epsilon(np.sqrt(10) / 2.0, 1e-5)  # anyone in any step
    assert found.guarantee.worst_case_epsilon == pytest.approx(truth)
    assert found.guarantee.status == "unproven"
