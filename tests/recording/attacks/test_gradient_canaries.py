"""Gradient canaries in real Opacus runs: what they add, what they see, and what they leave alone."""

import numpy as np
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from scipy import stats

from indpriv import AttackScores, InputError
from indpriv.audit.attacks import canaries_of_run
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import GRADIENT_CANARIES
from indpriv.norm_log.verify import verify
from indpriv.recording import GradientCanaries, Recorder
from runs import PER_EXAMPLE, Run, failed, make_run, mlp, record


def wide() -> torch.nn.Module:
    torch.manual_seed(2**40 + 0)
    return torch.nn.Sequential(torch.nn.Linear(6, 400), torch.nn.ReLU(), torch.nn.Linear(400, 2))


def canaries_of(run_dir) -> AttackScores:
    return AttackScores.from_file(run_dir / GRADIENT_CANARIES)


def predicted(rng, member, length, *, sigma, rate, steps) -> np.ndarray:
    """Scores of the mechanism itself, simulated: slow and obvious."""
    scores = np.zeros(len(member))
    for _ in range(steps):
        drawn = member & (rng.random(len(member)) < rate)
        seen = rng.normal(size=len(member)) * sigma + drawn * length
        inside = (1 - rate) * stats.norm.pdf(seen, 0, sigma) + rate * stats.norm.pdf(
            seen, length, sigma
        )
        scores += np.log(inside / stats.norm.pdf(seen, 0, sigma))
    return scores


@pytest.mark.parametrize("mode", ["hooks", "ghost", "functorch", "ew"])
def test_scores_are_distributed_as_the_mechanism_says(tmp_path, mode):
    torch.manual_seed(2**40 + 3)
    run = make_run(model=wide(), mode=mode)
    record(run, tmp_path / "run", epochs=3, every="once", attack=GradientCanaries(3000, seed=1))
    scores = canaries_of(tmp_path / "run")
    assert scores.adversary == "updates"
    assert scores.fair_coins
    assert 0.4 < scores.member.mean() < 0.6
    member = np.repeat([True, False], 20_000)
    simulated = predicted(np.random.default_rng(0), member, 1.0, sigma=1.0, rate=0.1, steps=30)
    for side in (True, False):
        found = stats.ks_2samp(scores.scores[scores.member == side], simulated[member == side])
        assert found.pvalue > 1e-3
    assert stats.ks_2samp(scores.scores[scores.member], simulated[~member]).pvalue < 1e-6
    assert not failed(tmp_path / "run") - {"seeds", "random numbers"}


def test_the_sum_gets_the_members_that_the_sampler_drew(tmp_path, monkeypatch):
    """A plain reference: with the noise switched off, the update holds the examples and the canaries."""
    run = make_run(noise_multiplier=1e-12, max_grad_norm=0.5)
    drawn: list[np.ndarray] = []
    plain = torch.rand
    monkeypatch.setattr(
        torch, "rand", lambda *sizes, **kw: drawn.append(plain(*sizes, **kw)) or drawn[-1]
    )
    seen = []
    canaries = GradientCanaries(16, lengths=(0.5, 1.0), seed=2)
    recorder = Recorder(
        tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every="once", attack=canaries
    )
    with recorder.attach(run.model, run.optimizer, run.loader):
        add_noise = run.optimizer.add_noise

        def noisy() -> None:
            before = [p.summed_grad.clone() for p in run.optimizer.params]
            add_noise()
            seen.append(
                sum(
                    float((p.grad - b).abs().sum())
                    for p, b in zip(run.optimizer.params, before, strict=True)
                )
            )

        run.optimizer.add_noise = noisy
        run.train(1)
        run.optimizer.add_noise = add_noise
    member, length = canaries_of(tmp_path / "run").member, np.resize([0.5, 1.0], 16) * 0.5
    rows = [values.numpy() for values in drawn if values.shape == (136,)]
    assert len(rows) == len(seen) == 10
    expected = [float((length * member * (row[120:] < 0.1)).sum()) for row in rows]
    assert max(expected) > 0
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
    assert run.loader.batch_sampler.num_samples == 120
    assert type(run.loader.batch_sampler) is UniformWithReplacementSampler


def test_no_canary_moves_the_model_if_no_coin_is_heads(tmp_path, monkeypatch):
    """Examples, their clipping and the noise stay as they are in a run without canaries."""
    finals = []
    batches = [torch.arange(i, i + 12).tolist() for i in range(0, 120, 12)]
    for attack in (None, GradientCanaries(20, seed=5)):
        run = make_run(noise_multiplier=0.7)
        torch.manual_seed(2**40 + 11)
        monkeypatch.setattr(
            UniformWithReplacementSampler,
            "__iter__",
            lambda self: iter(batches),
        )
        record(run, tmp_path / str(attack is None), epochs=1, every="once", attack=attack)
        finals.append([p.detach().clone() for p in run.model.parameters()])
    for one, other in zip(*finals, strict=True):
        assert torch.equal(one, other)


def test_lengths_are_groups_taken_in_turn(tmp_path):
    record(
        make_run(),
        tmp_path / "run",
        epochs=1,
        every="once",
        attack=GradientCanaries(50, lengths=(0.2, 1.0)),
    )
    scores = canaries_of(tmp_path / "run")
    assert scores.groups[:3].tolist() == ["0.2", "1", "0.2"]
    assert np.abs(scores.scores[::2]).max() < np.abs(scores.scores[1::2]).max()
    assert (tmp_path / "run" / GRADIENT_CANARIES).stat().st_mode & 0o777 == 0o600


def test_clipping_that_is_left_out_is_found_without_canaries(tmp_path, monkeypatch):
    """Norms are divided as ever, and canaries enter after clipping: the sum tells."""

    def summed_up(self):
        before = [p.summed_grad for p in self.params]
        clip(self)
        for p, total in zip(self.params, before, strict=True):
            whole = p.grad_sample.sum(dim=0)
            p.summed_grad = whole if total is None else total + whole

    clip = DPOptimizer.clip_and_accumulate
    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", summed_up)
    attack = GradientCanaries(500, seed=4)
    record(make_run(model=wide()), tmp_path / "run", epochs=1, every="once", attack=attack)
    checks = {check.key: check.status for check in verify(open_run(tmp_path / "run"))}
    assert checks["replay"] == "failed"
    assert canaries_of_run(tmp_path / "run").agree


def refused(tmp_path, run: Run, message: str, attack: GradientCanaries, **options) -> None:
    with pytest.raises(InputError, match=message):
        record(run, tmp_path / "run", attack=attack, **options)
    assert not (tmp_path / "run").exists()


def test_refusals(tmp_path):
    model = mlp()
    n = sum(p.numel() for p in model.parameters())
    refused(tmp_path, make_run(model=model), f"{n} trainable", GradientCanaries(n + 1))
    refused(
        tmp_path,
        make_run(poisson_sampling=False),
        "need one rank that draws Poisson batches",
        GradientCanaries(16),
    )
    with pytest.raises(InputError, match="lengths"):
        GradientCanaries(16, lengths=(0.0,))
    with pytest.raises(InputError, match="count"):
        GradientCanaries(0)


def test_a_resumed_run_is_not_attacked(tmp_path):
    record(make_run(), tmp_path / "run", epochs=1)
    with pytest.raises(InputError, match="attack cannot go on"):
        record(make_run(), tmp_path / "run", resume_at=10, attack=GradientCanaries(16))
