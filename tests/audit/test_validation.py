"""Real Opacus runs that attack themselves: sound ones agree with their account, broken ones do not."""

import warnings

import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers import optimizer as opacus_optimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from indpriv import InputError
from indpriv.analysis.attacks.evidence import agree, identities
from indpriv.audit.attacks import canaries_of_run, evidence_of_runs
from indpriv.cli import run as cli
from indpriv.recording import GradientCanaries, WhiteBox
from runs import blobs, failed, make_run, record


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 500), torch.nn.ReLU(), torch.nn.Linear(500, 2))


def run_with_canaries(run_dir, seed=0):
    torch.manual_seed(2**40 + seed)
    run = make_run(model=wide())
    attack = GradientCanaries(4000, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record(run, run_dir, epochs=4, every="once", attack=attack)
    return canaries_of_run(run_dir).lengths


def attacked_runs(folder, n_runs, *, class_without_clipping=None):
    """White-box attacks on runs whose test set has the training set's distribution."""
    folders = []
    for number in range(n_runs):
        run = make_run(noise_multiplier=0.8, max_grad_norm=0.2)
        torch.manual_seed(2**40 + number)  # after make_run, whose model is the same each time
        if class_without_clipping is not None:
            forward = run.criterion

            def criterion(outputs, targets, run=run, forward=forward):
                run.optimizer.labels = targets
                return forward(outputs, targets)

            run.criterion = criterion
        folders.append(folder / str(number))
        record(
            run, folders[-1], epochs=3, every=1, rounding=0, test_set=blobs(200),
            record_holdout=True, attack=WhiteBox(200, seed=number),
        )  # fmt: skip
    return folders


def test_a_sound_run_agrees_with_its_canaries_and_proves_much_of_its_epsilon(tmp_path, capsys):
    (found,) = run_with_canaries(tmp_path / "run")
    assert found.agrees
    bounds = {key: bound.epsilon for key, bound in found.bounds.items()}
    assert 0 < bounds["steinke2023"] < bounds["mahloujifar2024"] < bounds["means"] < found.ceiling
    assert 0 < bounds["rates"] < found.ceiling
    low, high = found.separation_interval.low, found.separation_interval.high
    assert low < found.separation < high
    assert cli(["check", "--set", "only=attacks", str(tmp_path / "run")]) == 0
    assert "It assumes: nothing but fair coins." in " ".join(capsys.readouterr().out.split())


def half_the_noise(monkeypatch):
    plain = opacus_optimizer._generate_noise
    monkeypatch.setattr(
        opacus_optimizer, "_generate_noise", lambda std, **kw: plain(std=std / 2, **kw)
    )


def the_noise_of_each_step_used_twice(monkeypatch):
    plain, kept = opacus_optimizer._generate_noise, {}

    def noise(std, reference, **kw):
        if reference.shape in kept:
            return kept.pop(reference.shape)
        kept[reference.shape] = plain(std=std, reference=reference, **kw)
        return kept[reference.shape]

    monkeypatch.setattr(opacus_optimizer, "_generate_noise", noise)


def the_same_batch_at_every_step(monkeypatch):
    def batches(self):
        for _ in range(self.steps):
            yield list(range(0, self.num_samples, round(1 / self.sample_rate)))

    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", batches)


def shuffled_batches(monkeypatch):
    """Every position once an epoch: no coins, though each step draws at the same rate."""

    def batches(self):
        yield from (part.tolist() for part in torch.randperm(self.num_samples).chunk(self.steps))

    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", batches)


@pytest.mark.parametrize(
    "fault",
    [
        half_the_noise,
        the_noise_of_each_step_used_twice,
        the_same_batch_at_every_step,
    ],
)
def test_canaries_catch_broken_noise_and_sampling(tmp_path, monkeypatch, fault, capsys):
    fault(monkeypatch)
    (found,) = run_with_canaries(tmp_path / "run")
    assert not found.agrees, found
    if fault is half_the_noise:
        assert max(bound.epsilon for bound in found.bounds.values()) > found.ceiling
    assert cli(["check", "--set", "only=attacks", str(tmp_path / "run")]) == 1
    assert "CONTRADICTED" in capsys.readouterr().out


def test_shuffled_batches_are_caught_by_how_often_examples_are_drawn(tmp_path, monkeypatch):
    """The mean evidence is that of coins, so that canaries alone would pass."""
    shuffled_batches(monkeypatch)
    (found,) = run_with_canaries(tmp_path / "run")
    assert found.separation == pytest.approx(found.separation_predicted, rel=0.2)
    assert "participation of each example" in failed(tmp_path / "run")


@pytest.mark.slow
def test_the_white_box_agrees_with_sound_runs(tmp_path, capsys):
    folders = attacked_runs(tmp_path, 8)
    found = identities(evidence_of_runs(folders))
    assert agree(found), found
    assert cli(["check", "--set", "only=attacks", *map(str, folders)]) == 0
    assert "with less without: L" in capsys.readouterr().out
    assert cli(["check", "--set", "only=attacks", str(folders[0])]) == 2  # one run proves nothing


@pytest.mark.slow
def test_the_white_box_catches_clipping_left_out_for_one_class(tmp_path, monkeypatch):
    clip = DPOptimizer.clip_and_accumulate

    def broken(self):
        samples = [p.grad_sample for p in self.params]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples], 1).norm(dim=1)
        factors = (0.2 / (norms + 1e-6)).clamp(max=1.0)
        clip(self)
        if len(norms):
            missing = (1 - factors) * (self.labels == 1)
            for p, g in zip(self.params, samples, strict=True):
                p.summed_grad += torch.einsum("i,i...", missing, g)

    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", broken)
    found = identities(evidence_of_runs(attacked_runs(tmp_path, 8, class_without_clipping=1)))
    assert not agree(found), found


@pytest.mark.slow
def test_the_white_box_catches_half_the_noise(tmp_path, monkeypatch):
    half_the_noise(monkeypatch)
    assert not agree(identities(evidence_of_runs(attacked_runs(tmp_path, 8))))


def test_refusals(tmp_path):
    record(make_run(), tmp_path / "plain", epochs=1)
    with pytest.raises(InputError, match=r"has no white-box\.parquet"):
        evidence_of_runs([tmp_path / "plain"] * 2)
    with pytest.raises(InputError, match=r"has no gradient-canaries\.parquet"):
        canaries_of_run(tmp_path / "plain")
    record(make_run(), tmp_path / "run", epochs=1, attack=WhiteBox(5), test_set=blobs(10))
    with pytest.raises(InputError, match="no log of their norms"):
        evidence_of_runs([tmp_path / "run"] * 2)
    record(make_run(), tmp_path / "inside", epochs=1, attack=WhiteBox(5))
    with pytest.raises(InputError, match="no members, or no others"):
        identities(evidence_of_runs([tmp_path / "inside"] * 2))
